#include "first_calls.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "cuda.hpp"

namespace aotpack {
namespace {

void require(const Libtorch& library, int status, const char* what) {
  if (status) fail(std::string("libtorch: ") + what + " failed" + library.last_words());
}

void multiply(const Libtorch& library, const std::string& device) {
  int (*call)(void*, void*, void*);
  find(library.cuda_library(), "aoti_torch_cuda_mm_out", call);
  const auto square = [&] { return library.empty("float16", {16, 16}, device); };
  const Libtorch::Handle out = square(), a = square(), b = square();
  require(library, call(out.get(), a.get(), b.get()), "multiplying");
}

void convolve(const Libtorch& library, const std::string& device) {
  int (*call)(void*, void*, void**, const std::int64_t*, std::int64_t, const std::int64_t*, std::int64_t, const std::int64_t*, std::int64_t,
              std::int32_t, const std::int64_t*, std::int64_t, std::int64_t, void**);
  find(library.cuda_library(), "aoti_torch_cuda_convolution", call);
  const Libtorch::Handle image = library.empty("float16", {1, 8, 8, 8}, device), weight = library.empty("float16", {8, 8, 3, 3}, device);
  const std::int64_t ones[] = {1, 1}, zeros[] = {0, 0};
  void* made = nullptr;
  require(library, call(image.get(), weight.get(), nullptr, ones, 2, ones, 2, ones, 2, 0, zeros, 2, 1, &made), "a convolution");
  const Libtorch::Handle result(library, made);
}

// Part of the names of a package's functions -> the call. addmm, bmm and baddbmm end in mm_out as well.
const std::pair<const char*, void (*)(const Libtorch&, const std::string&)> CALLS[] = {{"mm_out", multiply}, {"cuda_convolution", convolve}};

// Is `name` part of a function's that a package asks for? Only looked for, not understood.
bool says(const Member& package, const char* name) {
  const std::size_t size = package.size();
  void* const data = size ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, package.descriptor(), 0) : MAP_FAILED;
  if (data == MAP_FAILED) return false;
  const bool found = memmem(data, size, name, std::strlen(name));
  munmap(data, size);
  return found;
}

// The first to ask makes the call.
bool first_to_ask(const std::string& device, const std::string& name) {
  static std::mutex lock;
  static auto* const made = new std::set<std::pair<std::string, std::string>>;   // kept to the end, which a thread may see
  const std::lock_guard<std::mutex> turn(lock);
  return made->emplace(device, name).second;
}

}  // namespace

void make_first_calls(const Libtorch& library, const std::string& device, const std::vector<const Member*>& packages) {
  Driver::get().enter(index_of(device));             // cuBLAS warns in a thread that has no context
  const Libtorch::OnDevice there(library, device);
  library.empty("uint8", {1}, device);               // the CUDA runtime and the caching allocator
  for (const auto& [name, call] : CALLS) {
    const bool needed = std::any_of(packages.begin(), packages.end(), [&](const Member* package) { return says(*package, name); });
    if (needed && first_to_ask(device, name)) call(library, device);
  }
}

}  // namespace aotpack
