#include "cuda.hpp"

#include <dlfcn.h>
#include <unistd.h>

namespace aotpack {
namespace {

// Of cuda.h.
const int CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76;              // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
const int MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9;       // CU_POINTER_ATTRIBUTE_*
const unsigned DEVICE_MEMORY = 2;                                    // CU_MEMORYTYPE_DEVICE

}  // namespace

struct Driver::Functions {
  int (*cuInit)(unsigned);
  int (*cuDriverGetVersion)(int*);
  int (*cuDeviceGetCount)(int*);
  int (*cuDeviceGet)(int*, int);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxPushCurrent)(void*);
  int (*cuCtxPopCurrent)(void**);
  int (*cuCtxSynchronize)();
  int (*cuMemAlloc)(std::uint64_t*, std::size_t);
  int (*cuMemFree)(std::uint64_t);
  int (*cuMemcpyHtoD)(std::uint64_t, const void*, std::size_t);
  int (*cuPointerGetAttribute)(void*, int, std::uint64_t);
  int (*cuGetErrorString)(int, const char**);

  explicit Functions(void* library) {
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) fail(std::string("the CUDA driver does not export ") + name);
    };
    find(cuInit, "cuInit");
    find(cuDriverGetVersion, "cuDriverGetVersion");
    find(cuDeviceGetCount, "cuDeviceGetCount");
    find(cuDeviceGet, "cuDeviceGet");
    find(cuDeviceGetAttribute, "cuDeviceGetAttribute");
    find(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    find(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    find(cuCtxSynchronize, "cuCtxSynchronize");
    find(cuMemAlloc, "cuMemAlloc_v2");
    find(cuMemFree, "cuMemFree_v2");
    find(cuMemcpyHtoD, "cuMemcpyHtoD_v2");
    find(cuPointerGetAttribute, "cuPointerGetAttribute");
    find(cuGetErrorString, "cuGetErrorString");
  }
};

// A context is this thread's current one inside.
struct Driver::Current {
  Current(Driver& driver, int ordinal) : driver_(driver) {
    driver.check(driver.call_->cuCtxPushCurrent(driver.context(ordinal)), "cuCtxPushCurrent");
  }
  ~Current() {
    void* before = nullptr;
    driver_.call_->cuCtxPopCurrent(&before);
  }
  Current(const Current&) = delete;
  Driver& driver_;
};

Driver& Driver::get() {
  static Driver* const driver = new Driver;          // kept to the end; where it throws, the next call tries again
  return *driver;
}

Driver::Driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(std::string("there is no CUDA driver: ") + dlerror());
  call_ = std::make_shared<const Functions>(library);
}

void Driver::start() {
  const std::lock_guard<std::mutex> lock(lock_);
  if (!started_) check(call_->cuInit(0), "cuInit");
  started_ = true;
}

bool Driver::device_files() {
  for (const char* path : {"/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu"})
    if (access(path, F_OK) == 0) return true;
  return false;
}

std::optional<Gpu> Driver::gpu(int ordinal) {
  start();
  int count = 0, device = 0;
  Gpu found;
  if (call_->cuDeviceGetCount(&count) || ordinal >= count || call_->cuDeviceGet(&device, ordinal)) return std::nullopt;
  check(call_->cuDriverGetVersion(&found.driver), "cuDriverGetVersion");
  check(call_->cuDeviceGetAttribute(&found.major, CAPABILITY_MAJOR, device), "cuDeviceGetAttribute");
  check(call_->cuDeviceGetAttribute(&found.minor, CAPABILITY_MINOR, device), "cuDeviceGetAttribute");
  return found;
}

void Driver::retain(int ordinal) { context(ordinal); }

void Driver::enter(int ordinal) { check(call_->cuCtxPushCurrent(context(ordinal)), "cuCtxPushCurrent"); }

void* Driver::context(int ordinal) {
  start();
  const std::lock_guard<std::mutex> lock(lock_);
  void*& known = contexts_[ordinal];
  if (!known) {
    int device = 0;
    void* made = nullptr;
    check(call_->cuDeviceGet(&device, ordinal), "cuDeviceGet");
    check(call_->cuDevicePrimaryCtxRetain(&made, device), "cuDevicePrimaryCtxRetain");
    known = made;
  }
  return known;
}

std::string Driver::device_of(const void* address, int ordinal) {
  const Current current(*this, ordinal);
  const auto place = std::uint64_t(reinterpret_cast<std::uintptr_t>(address));
  unsigned type = 0, managed = 0;
  int found = 0;
  if (call_->cuPointerGetAttribute(&type, MEMORY_TYPE, place) || call_->cuPointerGetAttribute(&found, DEVICE_ORDINAL, place)) return "";
  if (type != DEVICE_MEMORY && (call_->cuPointerGetAttribute(&managed, IS_MANAGED, place) || !managed)) return "";
  return "cuda:" + std::to_string(found);
}

void Driver::check(int status, const char* what) const {
  if (!status) return;
  const char* said = nullptr;
  call_->cuGetErrorString(status, &said);
  fail(std::string("the CUDA driver: ") + what + ": " + (said ? said : "error " + std::to_string(status)));
}

DeviceMemory::DeviceMemory(std::size_t bytes, int ordinal) : ordinal_(ordinal) {
  Driver& driver = Driver::get();
  const Driver::Current current(driver, ordinal);
  try {
    driver.check(driver.call_->cuMemAlloc(&address_, bytes), "cuMemAlloc");
  } catch (const Error& error) {
    fail("the weights, " + std::to_string(bytes / 1000000) + " MB, do not go to cuda:" + std::to_string(ordinal) + ": " + error.what());
  }
}

DeviceMemory::~DeviceMemory() {
  try {
    Driver& driver = Driver::get();
    const Driver::Current current(driver, ordinal_);
    driver.call_->cuMemFree(address_);
  } catch (const Error&) {                           // the process ends, and the driver with it
  }
}

void DeviceMemory::fill(char* place, const void* source, std::size_t bytes) {
  Driver& driver = Driver::get();
  const Driver::Current current(driver, ordinal_);
  driver.check(driver.call_->cuMemcpyHtoD(reinterpret_cast<std::uintptr_t>(place), source, bytes), "cuMemcpyHtoD");
}

void DeviceMemory::finish() {
  Driver& driver = Driver::get();
  const Driver::Current current(driver, ordinal_);
  driver.check(driver.call_->cuCtxSynchronize(), "cuCtxSynchronize");
}

}  // namespace aotpack
