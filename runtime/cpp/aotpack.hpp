// Serve an aotpack bundle from C++: no Python, and of torch only the shared libraries.
//
//     auto bundle = aotpack::Bundle::open("dist/demo-0.1.0", {.libtorch = "/opt/torch/lib", .device = "cuda:0"});
//     aotpack::Entry& encoder = bundle->entry("encoder");
//     auto ids = bundle->put(aotpack::Tensor::view(numbers, "int64", {1, 64}));      // host memory -> the device
//     auto results = encoder.call({ids, ...});                                       // the leaves, in their order
//     auto first = bundle->host(std::get<aotpack::Tensor>(results[0]));              // the device -> host memory
//
// Every file is checked against its digest before it is used, and every call is judged by the guards that the bundle
// carries: what no variant takes is a Miss with the reasons, never a wrong answer. Calls may be made from many threads.
// Programs, sources, kernels and weights that change while a server runs are for the Python runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace aotpack {

// The bundle, a library or an argument cannot be used; what() is one line.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// No variant takes a call: what() names the entry and, for each variant, the first thing that turned the call down.
struct Miss : Error {
  using Error::Error;
};

// ---------------------------------------------------------------------------------------------------------------- JSON

// One JSON value. Numbers keep their text: an int of any length is itself.
struct Json {
  enum class Kind { null, boolean, number, text, list, object };
  Kind kind = Kind::null;
  bool boolean = false;
  std::string text;                                  // of numbers and texts
  std::vector<Json> list;                            // of lists, and the values of objects in order
  std::vector<std::string> keys;                     // of objects

  static Json parse(const std::string& text);        // strict; Error with the place
  static Json number(std::int64_t value);
  const Json& at(const std::string& key) const;      // Error when this is no object, or has no such key
  const Json* find(const std::string& key) const;    // nullptr when it is not there
  const std::vector<Json>& items() const;            // of a list; Error when it is none
  std::int64_t integer() const;                      // Error when it is none, or has more than 64 bits
  const std::string& string() const;                 // Error when it is no text
  bool operator==(const Json& other) const;
};

// ---------------------------------------------------------------------------------------------------------------- calls

// Memory with a dtype (torch's names) and a shape, on the host ("cpu") or on a GPU ("cuda:0"); `strides` count elements.
struct Tensor {
  void* data = nullptr;
  std::string dtype;
  std::vector<std::int64_t> shape, strides;
  std::string device = "cpu";
  std::shared_ptr<void> owner;                       // keeps memory that is not the caller's alive
  bool read_only = false;
  bool conj = false;                                 // of a result: its memory is to be read conjugated

  // Row-major, borrowed: the memory must stay until the call has been made, on a GPU until its work is done.
  static Tensor view(void* data, std::string dtype, std::vector<std::int64_t> shape, std::string device = "cpu");
  std::size_t bytes() const;                         // of its elements; Error for what has none that can be counted
};

// A number, text or nothing, in the JSON form that the index has: 3, true, "s", null, {"float": "0x1.8p+0"}.
using Scalar = Json;
using Leaf = std::variant<Tensor, Scalar>;

// --------------------------------------------------------------------------------------------------------------- bundle

struct Options {
  std::string libtorch;                              // the folder of libtorch_cpu.so; "" leaves it to the loader's paths
  std::string device = "cpu";                        // "cpu", or "cuda:1", the number of a GPU
  bool check = true;                                 // hash every file before its first use
  std::vector<std::string> entries;                  // which will be served; {} all: their weights go to the GPU at open
};

class Entry {
 public:
  // The flat leaves of the call in the order of the guards; the flat leaves of the result. Miss when none takes it,
  // Error when the compiled model refuses. On a GPU the work is queued on `stream` (a cudaStream_t; nullptr is the
  // default one), else on the current one of this thread, and the results are there when the stream has come to them.
  std::vector<Leaf> call(const std::vector<Leaf>& leaves, std::optional<void*> stream = std::nullopt);
  // "hit: <variant>", or "miss: " and a reason for each variant. Runs and loads nothing.
  std::string explain(const std::vector<Leaf>& leaves) const;
  // Load every variant now, rather than at its first call.
  void load();
  const std::string& name() const;
  // The path and dtype of each leaf of the first variant: what a server needs to read a request.
  struct Wanted {
    std::string path, dtype;                         // dtype "" for a scalar
    Scalar value;                                    // of a scalar that is fixed
  };
  std::vector<Wanted> wanted() const;

  struct Inside;
  explicit Entry(std::unique_ptr<Inside> inside);
  ~Entry();

 private:
  friend class Bundle;
  std::unique_ptr<Inside> inside_;
};

// Results keep what they lie in; a bundle must outlive the calls that are being made.
class Bundle {
 public:
  static std::unique_ptr<Bundle> open(const std::string& path, Options options = {});
  ~Bundle();
  Entry& entry(const std::string& name);             // Error when there is none, or nothing of it fits this host
  std::vector<std::string> names() const;
  // A row-major copy in memory of the bundle's device: there, for all streams, when this returns.
  Tensor put(const Tensor& tensor) const;
  // A row-major copy in host memory, made when all that was queued for the device is done.
  Tensor host(const Tensor& tensor) const;

  struct Inside;
  explicit Bundle(std::unique_ptr<Inside> inside);

 private:
  std::unique_ptr<Inside> inside_;
};

}  // namespace aotpack
