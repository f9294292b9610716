// Calls of the C++ client with tensors of any kind, also such as nobody may make: calls BUNDLE LIBTORCH DEVICE
//
// One call a line on stdin: {"entry", "leaves", "stream", "threads", "late"}, where a leaf is {"scalar": ...} or
// {"hex": its bytes, "where": "host" | "device" | "null", "skip": bytes, "start": of its first element, "dtype", "shape", "strides", "device",
// "read_only", "conj"}: what it says it is. Writes for each {"results": [{"dtype", "shape", "device", "hex"}, ...],
// "leaves": [hex after the call, ...]}, or {"error", "miss"}. With `threads` as many make it on streams of their own, 20
// times each, and all must find the same; with `late` the first leaf gets its bytes on the stream long after the call was
// made.
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>

#include "aotpack.hpp"

using aotpack::Json;
using aotpack::Tensor;

namespace {

const int REPEATS = 20;

template <typename Function>
Function driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const found = library ? dlsym(library, name) : nullptr;
  if (!found) throw aotpack::Error(std::string("no ") + name);
  return reinterpret_cast<Function>(found);
}

void must(int status, const char* what) {
  if (status) throw aotpack::Error(std::string(what) + ": " + std::to_string(status));
}

void* new_stream() {
  void* stream = nullptr;
  must(driver<int (*)(void**, unsigned)>("cuStreamCreate")(&stream, 1), "cuStreamCreate");   // CU_STREAM_NON_BLOCKING
  return stream;
}

std::string hex(const void* data, std::size_t size) {
  std::string text;
  for (std::size_t n = 0; n < size; ++n)
    for (const int half : {4, 0}) text += "0123456789abcdef"[static_cast<const unsigned char*>(data)[n] >> half & 15];
  return text;
}

std::string bytes(const std::string& text) {
  std::string found;
  for (std::size_t n = 0; n + 1 < text.size(); n += 2) found += char(std::stoi(text.substr(n, 2), nullptr, 16));
  return found;
}

std::string hex(const aotpack::Bundle& bundle, const Tensor& tensor) {
  const Tensor there = bundle.host(tensor);
  return hex(there.data, there.bytes());
}

std::vector<std::int64_t> numbers(const Json& value) {
  std::vector<std::int64_t> found;
  for (const Json& one : value.items()) found.push_back(one.integer());
  return found;
}

// A leaf, its bytes on the host and, for `device`, in memory there.
struct Given {
  std::shared_ptr<char> memory;
  Tensor flat;
  std::string content;
  aotpack::Leaf leaf;
};

Given read(const Json& value, const aotpack::Bundle& bundle) {
  Given given;
  if (const Json* scalar = value.find("scalar")) {
    given.leaf = *scalar;
    return given;
  }
  given.content = bytes(value.at("hex").string());
  const auto skip = std::size_t(value.find("skip") ? value.at("skip").integer() : 0);
  const auto start = std::size_t(value.find("start") ? value.at("start").integer() : 0);
  const std::size_t size = given.content.size() + skip;
  given.memory.reset(static_cast<char*>(std::aligned_alloc(64, (size / 64 + 1) * 64)), &std::free);
  std::memcpy(given.memory.get() + skip, given.content.data(), given.content.size());
  given.flat = Tensor::view(given.memory.get(), "uint8", {std::int64_t(size)});
  const std::string& where = value.at("where").string();
  if (where == "device") given.flat = bundle.put(given.flat);
  Tensor tensor = Tensor::view(where == "null" ? nullptr : static_cast<char*>(given.flat.data) + skip + start, value.at("dtype").string(),
                               numbers(value.at("shape")), value.at("device").string());
  if (const Json* strides = value.find("strides")) tensor.strides = numbers(*strides);
  tensor.read_only = value.find("read_only") != nullptr;
  tensor.conj = value.find("conj") != nullptr;
  given.leaf = tensor;
  return given;
}

std::string answer(const aotpack::Bundle& bundle, const std::vector<aotpack::Leaf>& results) {
  std::string out;
  for (const aotpack::Leaf& leaf : results) {
    out += out.empty() ? "" : ", ";
    if (const auto* tensor = std::get_if<Tensor>(&leaf)) {
      out += "{\"dtype\": \"" + tensor->dtype + "\", \"device\": \"" + tensor->device + "\", \"shape\": [";
      for (std::size_t n = 0; n < tensor->shape.size(); ++n) out += (n ? ", " : "") + std::to_string(tensor->shape[n]);
      out += "], \"hex\": \"" + hex(bundle, *tensor) + "\"}";
    } else {
      out += "null";
    }
  }
  return out;
}

// The same call from several threads at once.
void in_threads(const aotpack::Bundle& bundle, aotpack::Entry& entry, const std::vector<aotpack::Leaf>& leaves, std::int64_t count,
                bool streams, const std::string& wanted) {
  std::vector<std::thread> threads;
  std::vector<std::string> wrong(static_cast<std::size_t>(count));
  for (std::string& said : wrong)
    threads.emplace_back([&, streams] {
      try {
        if (streams) bundle.put(Tensor::view(&said, "uint8", {1}));    // this thread has the device's context
        const std::optional<void*> stream = streams ? std::optional<void*>(new_stream()) : std::nullopt;
        for (int n = 0; n < REPEATS; ++n)
          if (answer(bundle, entry.call(leaves, stream)) != wanted) said = "a thread found another result";
      } catch (const std::exception& error) {
        said = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& said : wrong)
    if (!said.empty()) throw aotpack::Error(said);
}

// The first leaf is zeros, then sleeps, then has its bytes, all on one stream; the call is queued behind them.
std::vector<aotpack::Leaf> late(aotpack::Entry& entry, const std::vector<Given>& given, const std::vector<aotpack::Leaf>& leaves) {
  entry.call(leaves);
  void* const stream = new_stream();
  const auto address = std::uint64_t(reinterpret_cast<std::uintptr_t>(std::get<Tensor>(leaves[0]).data));
  const std::string& content = given[0].content;
  must(driver<int (*)(std::uint64_t, unsigned char, std::size_t)>("cuMemsetD8_v2")(address, 0, content.size()), "cuMemsetD8");
  must(driver<int (*)()>("cuCtxSynchronize")(), "cuCtxSynchronize");
  void (*sleep)(void*) = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); };
  must(driver<int (*)(void*, void (*)(void*), void*)>("cuLaunchHostFunc")(stream, sleep, nullptr), "cuLaunchHostFunc");
  must(driver<int (*)(std::uint64_t, const void*, std::size_t, void*)>("cuMemcpyHtoDAsync_v2")(address, content.data(), content.size(), stream),
       "cuMemcpyHtoDAsync");
  auto results = entry.call(leaves, stream);
  if (driver<int (*)(void*)>("cuStreamQuery")(stream) != 600) throw aotpack::Error("the call waited for the stream");   // CUDA_ERROR_NOT_READY
  must(driver<int (*)(void*)>("cuStreamSynchronize")(stream), "cuStreamSynchronize");
  return results;
}

std::string made(const aotpack::Bundle& bundle, aotpack::Entry& entry, const Json& request) {
  std::vector<Given> given;
  std::vector<aotpack::Leaf> leaves;
  for (const Json& leaf : request.at("leaves").items()) {
    given.push_back(read(leaf, bundle));
    leaves.push_back(given.back().leaf);
  }
  const bool streams = request.find("stream");
  const auto results = request.find("late") ? late(entry, given, leaves) : streams ? entry.call(leaves, new_stream()) : entry.call(leaves);
  const std::string found = answer(bundle, results);
  if (const Json* threads = request.find("threads")) in_threads(bundle, entry, leaves, threads->integer(), streams, found);
  std::string after;
  for (const Given& one : given) after += (after.empty() ? "\"" : ", \"") + (one.memory ? hex(bundle, one.flat) : "") + "\"";
  return "{\"results\": [" + found + "], \"leaves\": [" + after + "]}";
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  try {
    auto bundle = aotpack::Bundle::open(words[1], {.libtorch = words[2], .device = words[3]});
    for (std::string line; std::getline(std::cin, line);) {
      try {
        const Json request = Json::parse(line);
        std::cout << made(*bundle, bundle->entry(request.at("entry").string()), request) << std::endl;
      } catch (const aotpack::Miss& miss) {
        std::cout << "{\"miss\": true, \"error\": " << quoted(miss.what()) << "}" << std::endl;
      } catch (const aotpack::Error& error) {
        std::cout << "{\"miss\": false, \"error\": " << quoted(error.what()) << "}" << std::endl;
      }
    }
  } catch (const aotpack::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
