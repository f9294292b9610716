// The CUDA driver by dlopen: which GPUs there are, memory on one, and whose memory an address is. No CUDA headers.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "words.hpp"

namespace aotpack {

// One device: its compute capability, and the CUDA version that its driver implements (13000 for 13.0).
struct Gpu {
  int major = 0, minor = 0, driver = 0;
  std::string text() const { return "sm_" + std::to_string(major) + std::to_string(minor); }
};

class Driver {
 public:
  static Driver& get();                              // its library opened; Error where there is none
  static bool device_files();                        // are there GPUs, by the file system alone?
  std::optional<Gpu> gpu(int ordinal);               // none for a number past the last; Error when it cannot start

  // Everything below is done in the primary context of a device, which the CUDA runtime uses too; the first takes 0.1 s.
  void retain(int ordinal);
  void enter(int ordinal);                           // it is this thread's current one from now on
  // "cuda:1", or "" for memory that the driver does not know as a device's.
  std::string device_of(const void* address, int ordinal);

 private:
  friend class DeviceMemory;
  Driver();
  void start();                                      // takes a tenth of a second once, with many GPUs more
  void* context(int ordinal);
  void check(int status, const char* what) const;
  struct Current;

  struct Functions;
  std::shared_ptr<const Functions> call_;
  std::mutex lock_;
  bool started_ = false;
  std::map<int, void*> contexts_;
};

// Memory on a device, freed at its end; what was queued to read it is done by then (cuMemFree waits).
class DeviceMemory {
 public:
  DeviceMemory(std::size_t bytes, int ordinal);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return reinterpret_cast<char*>(address_); }
  void fill(char* place, const void* source, std::size_t bytes);
  void finish();                                     // returns when what was copied is there

 private:
  std::uint64_t address_ = 0;
  int ordinal_;
};

}  // namespace aotpack
