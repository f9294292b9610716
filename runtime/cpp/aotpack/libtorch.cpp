#include "libtorch.hpp"

#include <dlfcn.h>

#include <mutex>
#include <utility>

namespace aotpack {
namespace {

const std::string WHOLE = "libtorch.so";             // empty but for what it needs

// First version whose C interface is known, and the first whose is not.
const std::pair<int, int> FIRST = {2, 11}, END = {2, 15};

}  // namespace

struct Libtorch::Functions {
  int (*from_blob)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t, std::int32_t, std::int32_t,
                   std::int32_t, void**);
  int (*empty_strided)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t, std::int32_t, std::int32_t, void**);
  int (*copy)(void*, void*, std::int32_t);
  int (*remove)(void*);
  int (*data_ptr)(void*, void**);
  int (*dim)(void*, std::int64_t*);
  int (*dtype)(void*, std::int32_t*);
  int (*sizes)(void*, std::int64_t**);
  int (*strides)(void*, std::int64_t**);
  int (*device_type)(void*, std::int32_t*);
  int (*device_index)(void*, std::int32_t*);
  const char* (*last_words)();                       // since torch 2.13; before it the library says on stderr what went wrong
  std::int32_t cpu, cuda;
};

struct Libtorch::CudaFunctions {
  int (*create_guard)(std::int32_t, void**);
  int (*delete_guard)(void*);
  int (*current_stream)(std::int32_t, void**);
  int (*synchronize)();
};

void* open_library(const std::string& path) {
  void* found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!found) fail(std::string("a library cannot be opened: ") + dlerror());
  return found;
}

void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) fail(std::string("a library does not export ") + name);
  return found;
}

int index_of(const std::string& device) {
  const std::size_t colon = device.find(':');
  return colon == std::string::npos ? 0 : std::atoi(device.c_str() + colon + 1);
}

const Libtorch& Libtorch::open(const std::string& folder, const std::string& device) {
  static std::mutex lock;
  static Libtorch* known = nullptr;                  // results outlive their bundles, and are freed by it
  const std::lock_guard<std::mutex> turn(lock);
  if (!known) known = new Libtorch(folder);
  if (known->folder_ != folder)                      // packages find whichever was opened first
    fail("libtorch was opened from " + repr(known->folder_) + " in this process, and cannot be from " + repr(folder) + " too");
  if (device != "cpu" && !known->cuda_) known->open_cuda();
  return *known;
}

Libtorch::Libtorch(const std::string& folder) : folder_(folder) {
  void* found = open_library((folder.empty() ? "" : folder + "/") + "libtorch_cpu.so");
  std::uint64_t (*abi_version)();
  find(found, "aoti_torch_abi_version", abi_version);
  const std::pair<int, int> have = {int(abi_version() >> 56), int(abi_version() >> 48 & 255)};
  version_ = std::to_string(have.first) + "." + std::to_string(have.second);
  if (have < FIRST || have >= END) fail("libtorch " + version_ + ": its C interface is known for 2.11 and newer, below 2.15");

  Functions made{};
  find(found, "aoti_torch_create_tensor_from_blob", made.from_blob);
  find(found, "aoti_torch_empty_strided", made.empty_strided);
  find(found, "aoti_torch_copy_", made.copy);
  find(found, "aoti_torch_delete_tensor_object", made.remove);
  find(found, "aoti_torch_get_data_ptr", made.data_ptr);
  find(found, "aoti_torch_get_dim", made.dim);
  find(found, "aoti_torch_get_dtype", made.dtype);
  find(found, "aoti_torch_get_sizes", made.sizes);
  find(found, "aoti_torch_get_strides", made.strides);
  find(found, "aoti_torch_get_device_type", made.device_type);
  find(found, "aoti_torch_get_device_index", made.device_index);
  made.last_words = reinterpret_cast<const char* (*)()>(dlsym(found, "torch_exception_get_what_without_backtrace"));
  std::int32_t (*number)();
  find(found, "aoti_torch_device_type_cpu", number);
  made.cpu = number();
  find(found, "aoti_torch_device_type_cuda", number);
  made.cuda = number();
  for (const auto& [name, size] : ITEMSIZE) {
    find(found, ("aoti_torch_dtype_" + name).c_str(), number);
    numbers_[name] = number();
    names_[number()] = name;
  }
  call_ = std::make_shared<const Functions>(made);
}

void Libtorch::open_cuda() {
  const std::string start = folder_.empty() ? "" : folder_ + "/";
  void* library = open_library(start + "libtorch_cuda.so");
  open_library(start + WHOLE);                       // packages for CUDA name it
  CudaFunctions cuda{};
  find(library, "aoti_torch_create_cuda_guard", cuda.create_guard);
  find(library, "aoti_torch_delete_cuda_guard", cuda.delete_guard);
  find(library, "aoti_torch_get_current_cuda_stream", cuda.current_stream);
  find(library, "cudaDeviceSynchronize", cuda.synchronize);       // the CUDA runtime's, which the library brings
  int (*runtime_version)(int*);
  find(library, "cudaRuntimeGetVersion", runtime_version);
  int runtime = 0;
  if (runtime_version(&runtime)) fail("the CUDA runtime does not say its version");
  cuda_version_ = std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10);
  cuda_ = std::make_shared<const CudaFunctions>(cuda);
  cuda_library_ = library;
}

Libtorch::Handle& Libtorch::Handle::operator=(Handle&& other) noexcept {
  std::swap(library_, other.library_);
  std::swap(tensor_, other.tensor_);
  return *this;
}

Libtorch::Handle::~Handle() {
  if (tensor_) library_->call_->remove(tensor_);
}

void* Libtorch::Handle::release() { return std::exchange(tensor_, nullptr); }

void Libtorch::check(int status, const std::string& what) const {
  if (status) fail("libtorch: " + what + " failed" + last_words());
}

std::string Libtorch::last_words() const {
  const char* said = call_->last_words ? call_->last_words() : nullptr;
  const std::string text = said ? said : "";
  const std::size_t start = text.find_first_not_of(" \n");
  if (start == std::string::npos) return "; it said why on stderr";
  return ": " + first(text.substr(start, text.find('\n', start) - start), 300);
}

std::int32_t Libtorch::device_type(const std::string& device) const { return device == "cpu" ? call_->cpu : call_->cuda; }

Libtorch::Handle Libtorch::over(void* data, const std::string& dtype, const Sizes& shape, const Sizes& strides, const std::string& device) const {
  void* tensor = nullptr;
  check(call_->from_blob(data, std::int64_t(shape.size()), shape.data(), strides.data(), 0, numbers_.at(dtype), device_type(device),
                         index_of(device), &tensor),
        "making a tensor over memory");
  return {*this, tensor};
}

Libtorch::Handle Libtorch::empty(const std::string& dtype, const Sizes& shape, const std::string& device) const {
  void* tensor = nullptr;
  const Sizes dense = contiguous(shape);
  check(call_->empty_strided(std::int64_t(shape.size()), shape.data(), dense.data(), numbers_.at(dtype), device_type(device),
                             index_of(device), &tensor),
        "making a tensor on " + device);
  return {*this, tensor};
}

Libtorch::Handle Libtorch::copy(const Tensor& source, const std::string& device) const {
  synchronize(source.device);
  Handle made = empty(source.dtype, source.shape, device);
  if (is_empty(source.shape)) return made;
  const Handle from = over(source.data, source.dtype, source.shape, row_major(source.shape, source.strides), source.device);
  check(call_->copy(made.get(), from.get(), 0), "copying a tensor");
  if (source.device != "cpu" && device != "cpu") synchronize(device);   // a copy from or to the host libtorch waits for
  return made;
}

Tensor Libtorch::take(Handle handle) const {
  std::int64_t rank = 0, *size = nullptr, *step = nullptr;
  std::int32_t number = 0, kind = 0, index = 0;
  Tensor tensor;
  void* const its = handle.get();
  const bool unknown = call_->dim(its, &rank) || call_->dtype(its, &number) || call_->sizes(its, &size) || call_->strides(its, &step) ||
                       call_->data_ptr(its, &tensor.data) || call_->device_type(its, &kind) || call_->device_index(its, &index);
  if (unknown || !names_.count(number)) fail("libtorch could not describe a result");
  tensor.dtype = names_.at(number);
  tensor.shape.assign(size, size + rank);
  tensor.strides.assign(step, step + rank);
  if (kind != call_->cpu) tensor.device = "cuda:" + std::to_string(index);
  tensor.owner = std::make_shared<Handle>(std::move(handle));
  return tensor;
}

void* Libtorch::open_package(const std::string& path) const {
  try {
    return open_library(path);
  } catch (const Error&) {                           // where it is not needed it would bring CUDA's libraries, 0.3 s of them
    if (!dlopen((folder_.empty() ? WHOLE : folder_ + "/" + WHOLE).c_str(), RTLD_NOW | RTLD_LOCAL)) throw;
    return open_library(path);
  }
}

void* Libtorch::current_stream(int index) const {
  void* stream = nullptr;
  check(cuda_->current_stream(index, &stream), "asking for the current stream");
  return stream;
}

void Libtorch::synchronize(const std::string& device) const {
  if (device == "cpu") return;
  const OnDevice there(*this, device);
  if (const int status = cuda_->synchronize())
    fail("libtorch: " + device + " failed at work it was given before (CUDA error " + std::to_string(status) + ")");
}

Libtorch::OnDevice::OnDevice(const Libtorch& library, const std::string& device) : library_(library) {
  if (device != "cpu") library.check(library.cuda_->create_guard(index_of(device), &guard_), "turning to " + device);
}

Libtorch::OnDevice::~OnDevice() {
  if (guard_) library_.cuda_->delete_guard(guard_);
}

}  // namespace aotpack
