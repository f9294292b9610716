// The weights of a bundle: one mapped file, and of each set of them the tensors on the device, made once.
#pragma once

#include "container.hpp"
#include "cuda.hpp"
#include "member.hpp"

namespace aotpack {

// A mapped safetensors file. Copy-on-write: what writes a weight changes this process only, and never the file.
class WeightsFile {
 public:
  explicit WeightsFile(const Member& member);        // Error for what is none
  ~WeightsFile();
  WeightsFile(const WeightsFile&) = delete;
  WeightsFile& operator=(const WeightsFile&) = delete;

  // A tensor's bytes in the mapping, row-major.
  struct Stored {
    std::string dtype;
    Sizes shape;
    char* data;
    std::size_t bytes;
  };
  const Stored& at(const std::string& key) const;
  void let_go() const;                               // of pages that were read; the next who reads has them again

 private:
  void read_header();

  char* map_ = nullptr;
  std::size_t size_ = 0;
  std::map<std::string, Stored> tensors_;
};

// The tensors of one set on a device, whichever variants use them; tied ones are one.
class WeightSet {
 public:
  WeightSet(const WeightSetRecord& record, std::shared_ptr<const WeightsFile> file, std::string device);

  // The tensor of a weight, over memory that stays where it is.
  void* tensor(const std::string& weight, const Libtorch& library);
  bool is_written() const { return !record_.state.empty(); }
  std::mutex& state() { return state_; }             // held while a call runs that writes state

 private:
  const WeightSetRecord& record_;
  std::shared_ptr<const WeightsFile> file_;
  std::string device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::vector<std::unique_ptr<char[]>> copies_;
  std::map<std::string, char*> places_;              // by their keys in the file
  std::mutex lock_, state_;
  std::map<std::string, Libtorch::Handle> tensors_;  // by their names in the set
};

}  // namespace aotpack
