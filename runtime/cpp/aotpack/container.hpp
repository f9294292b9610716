// AOTInductor's C interface (torch/csrc/inductor/aoti_runtime/interface.h): the container of one package's library.
#pragma once

#include <functional>
#include <mutex>

#include "libtorch.hpp"

namespace aotpack {

class Container {
 public:
  // Of the library at `path`. `concurrency` calls run at a time on the CPU; on a GPU they are queued in turn.
  Container(const Libtorch& library, const std::string& path, const std::string& variant, const std::string& device, std::size_t concurrency);
  ~Container();
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  // Use these constants, without a copy: `of` gives the tensor for each name that the library asks for, which must stay.
  void bind(const std::function<void*(const std::string&)>& of);
  // The results; the model takes over what it is given. Error when it refuses.
  std::vector<Libtorch::Handle> run(std::vector<Libtorch::Handle> given, void* stream);
  std::size_t inputs() const { return inputs_; }
  std::size_t results() const { return results_; }

 private:
  struct Pair {                                      // AOTInductorConstantMapEntry
    const char* name;
    void* tensor;
  };
  void check(int status, const char* what) const;
  std::size_t count(const char* name) const;
  std::string last_words() const;

  const Libtorch& torch_;
  std::string variant_, device_;
  void* library_;
  void* handle_ = nullptr;
  std::size_t inputs_ = 0, results_ = 0;
  std::mutex turn_;
  int (*run_)(void*, void**, std::size_t, void**, std::size_t, void*, void*);
};

}  // namespace aotpack
