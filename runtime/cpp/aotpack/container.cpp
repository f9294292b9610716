#include "container.hpp"

#include <dlfcn.h>

namespace aotpack {

Container::Container(const Libtorch& library, const std::string& path, const std::string& variant, const std::string& device,
                     std::size_t concurrency)
    : torch_(library), variant_(variant), device_(device) {
  const Libtorch::OnDevice there(library, device);   // a container leaves its device as the current one
  try {
    library_ = library.open_package(path);
    int (*create)(void**, std::size_t, const char*, const char*);
    find(library_, "AOTInductorModelContainerCreateWithDevice", create);
    // On a GPU one model object: a second would load every kernel again. The library's other way to run takes an object
    // out of use until the GPU has finished with it, so that calls would not be queued behind each other.
    find(library_, device == "cpu" ? "AOTInductorModelContainerRun" : "AOTInductorModelContainerRunSingleThreaded", run_);
    const std::string folder = path.substr(0, path.rfind('/'));        // where the kernels lie
    check(create(&handle_, concurrency, device.c_str(), device == "cpu" ? nullptr : folder.c_str()), "be created");
    inputs_ = count("AOTInductorModelContainerGetNumInputs");
    results_ = count("AOTInductorModelContainerGetNumOutputs");
  } catch (const Error& error) {
    fail(variant + ": " + error.what());
  }
}

Container::~Container() {
  int (*remove)(void*) = nullptr;
  if (handle_) remove = reinterpret_cast<int (*)(void*)>(dlsym(library_, "AOTInductorModelContainerDelete"));
  if (remove) remove(handle_);
}

void Container::bind(const std::function<void*(const std::string&)>& of) {
  int (*name_of)(void*, std::size_t, const char**);
  int (*update)(void*, const Pair*, std::size_t, bool, bool);
  find(library_, "AOTInductorModelContainerGetConstantName", name_of);
  find(library_, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", update);
  const Libtorch::OnDevice there(torch_, device_);
  std::vector<Pair> pairs;
  const std::size_t asked = count("AOTInductorModelContainerGetNumConstants");
  for (std::size_t n = 0; n < asked; ++n) {
    const char* name = nullptr;
    check(name_of(handle_, n, &name), "be asked for its constants");
    pairs.push_back({name, of(name)});
  }
  if (!pairs.empty()) check(update(handle_, pairs.data(), pairs.size(), false, true), "be bound");
}

std::vector<Libtorch::Handle> Container::run(std::vector<Libtorch::Handle> given, void* stream) {
  std::vector<void*> in, out(results_, nullptr);
  for (Libtorch::Handle& each : given) in.push_back(each.release());
  int status;
  {
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (device_ != "cpu") turn.lock();
    const Libtorch::OnDevice there(torch_, device_);
    status = run_(handle_, in.data(), in.size(), out.data(), out.size(), stream, nullptr);
  }
  if (status) {
    const std::string said = last_words();
    fail(variant_ + ": the compiled model refused the call" + (said.empty() ? "; it said why on stderr" : said));
  }
  std::vector<Libtorch::Handle> made;
  for (void* each : out) made.emplace_back(torch_, each);
  return made;
}

std::size_t Container::count(const char* name) const {
  int (*ask)(void*, std::size_t*);
  std::size_t found = 0;
  find(library_, name, ask);
  check(ask(handle_, &found), "be asked for its numbers");
  return found;
}

std::string Container::last_words() const {
  int (*ask)(const char**) = reinterpret_cast<int (*)(const char**)>(dlsym(library_, "AOTInductorGetLastError"));
  const char* said = nullptr;                        // of newer packages; others say on stderr what went wrong
  if (!ask || ask(&said) || !said || !*said) return "";
  const std::string text = said;
  return ": " + first(text.substr(0, text.find('\n')), 300);
}

void Container::check(int status, const char* what) const {
  if (!status) return;
  const std::string said = last_words();
  fail(variant_ + ": its container could not " + what + (said.empty() ? "; the library said why on stderr" : said));
}

}  // namespace aotpack
