// libtorch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h), which AOTInductor's packages are compiled against: its
// libraries opened, and declared here. No headers of torch or CUDA.
#pragma once

#include <memory>

#include "tensor.hpp"

namespace aotpack {

class Libtorch {
 public:
  // The libraries in `folder`, "" those that the loader finds, with CUDA's for a `device` there; opened once, and kept until
  // the process ends. Error when they cannot be opened, or are of a version whose interface is not known.
  static const Libtorch& open(const std::string& folder, const std::string& device);

  const std::string& version() const { return version_; }             // "2.11"
  const std::string& cuda_version() const { return cuda_version_; }   // of its CUDA runtime, "13.0"; "" before it is opened

  // A tensor of libtorch.
  class Handle {
   public:
    Handle() = default;
    Handle(const Libtorch& library, void* tensor) : library_(&library), tensor_(tensor) {}
    Handle(Handle&& other) noexcept : library_(other.library_), tensor_(other.release()) {}
    Handle& operator=(Handle&& other) noexcept;
    ~Handle();
    void* get() const { return tensor_; }
    void* release();                                 // no longer ours

   private:
    const Libtorch* library_ = nullptr;
    void* tensor_ = nullptr;
  };

  // A tensor over memory, which it does not own.
  Handle over(void* data, const std::string& dtype, const Sizes& shape, const Sizes& strides, const std::string& device) const;
  // A row-major tensor in memory of libtorch's own, on CUDA of its caching allocator; whatever is in it.
  Handle empty(const std::string& dtype, const Sizes& shape, const std::string& device) const;
  // A row-major copy on a device. What was queued for the source's device is waited for; it is there when this returns.
  Handle copy(const Tensor& source, const std::string& device) const;
  // What a tensor is, kept by the one that is returned.
  Tensor take(Handle handle) const;

  // A package's library. One that was built with a torch for CUDA names libtorch.so, also when it is for the CPU.
  void* open_package(const std::string& path) const;
  void* current_stream(int index) const;             // of this thread
  void* cuda_library() const { return cuda_library_; }                // for functions that few ask for
  std::string last_words() const;                    // ": what went wrong", as far as the library keeps it
  void synchronize(const std::string& device) const; // returns when all that was queued is done; for the host at once

  // A GPU is this thread's current one inside; for the host nothing.
  class OnDevice {
   public:
    OnDevice(const Libtorch& library, const std::string& device);
    ~OnDevice();
    OnDevice(const OnDevice&) = delete;

   private:
    const Libtorch& library_;
    void* guard_ = nullptr;
  };

 private:
  struct Functions;
  struct CudaFunctions;
  explicit Libtorch(const std::string& folder);
  void open_cuda();
  void check(int status, const std::string& what) const;
  std::int32_t device_type(const std::string& device) const;

  std::shared_ptr<const Functions> call_;
  std::shared_ptr<const CudaFunctions> cuda_;
  void* cuda_library_ = nullptr;
  std::map<std::string, std::int32_t> numbers_;      // dtype -> torch's number of it
  std::map<std::int32_t, std::string> names_;
  std::string folder_, version_, cuda_version_;
};

int index_of(const std::string& device);             // 1 of "cuda:1"

// A library opened where only packages find it; Error with the loader's words.
void* open_library(const std::string& path);
// A function of a library; Error when it does not export it.
void* symbol(void* library, const char* name);

template <typename Function>
void find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(symbol(library, name));
}

}  // namespace aotpack
