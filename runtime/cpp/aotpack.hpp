// Serve an aotpack bundle from C++: no Python, and of torch only the shared libraries.
//
//     auto bundle = aotpack::Bundle::open("dist/demo-0.1.0", {.libtorch = "/opt/torch/lib"});
//     aotpack::Entry& encoder = bundle->entry("encoder");
//     auto results = encoder.call({aotpack::Tensor::view(ids, "int64", {1, 64}), ...});   // the leaves, in their order
//
// Every file is checked against its digest before it is used, and every call is judged by the guards that the bundle
// carries: what no variant takes is a Miss with the reasons, never a wrong answer. Calls may be made from many threads.
// Programs, sources and weights that change while a server runs are for the Python runtime. CPU.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
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
  const Json& at(const std::string& key) const;      // Error when it is not there
  const Json* find(const std::string& key) const;    // nullptr when it is not there
  std::int64_t integer() const;                      // Error when it is none, or has more than 64 bits
  const std::string& string() const;
  bool operator==(const Json& other) const;
};

// --------------------------------------------------------------------------------------------------------- expressions

using Env = std::map<std::string, std::int64_t>;

// A small integer language over sizes, as the bundle writes it: `x.shape[0] % 100 == 0`.
class Expression {
 public:
  static Expression parse(const std::string& text);
  // Its value; comparisons give 0 or 1. Error when a divisor is 0 or a number leaves 64 bits.
  std::int64_t operator()(const Env& env) const { return evaluate_(env); }
  const std::string& text() const { return text_; }

 private:
  friend class ExpressionParser;
  std::string text_;
  std::function<std::int64_t(const Env&)> evaluate_;
};

// ---------------------------------------------------------------------------------------------------------------- calls

// Memory with a dtype (torch's names) and a shape; `strides` count elements. `owner` keeps results alive.
struct Tensor {
  void* data = nullptr;
  std::string dtype;
  std::vector<std::int64_t> shape, strides;
  std::shared_ptr<void> owner;
  bool read_only = false;
  bool conj = false;                                 // of a result: its memory is to be read conjugated

  static Tensor view(void* data, std::string dtype, std::vector<std::int64_t> shape);   // row-major, borrowed
  std::size_t bytes() const;                         // of its elements
};

// A number, text or nothing, in the JSON form that the index has: 3, true, "s", null, {"float": "0x1.8p+0"}.
using Scalar = Json;
using Leaf = std::variant<Tensor, Scalar>;

// What guards ask of a tensor. `odd` says why no compiled code may see it.
struct TensorMeta {
  std::string dtype, device = "cpu", odd;
  std::vector<std::int64_t> shape, strides;
  int offset = 0;                                    // its address modulo 16
  bool needs_grad = false, shared = false, locked = false;
};

struct Other {
  std::string type_name;
};

struct Call {
  Json trees;                                        // a list: the containers of each parameter, "*" for a plain one
  std::vector<std::variant<TensorMeta, Scalar, Other>> leaves;
  std::vector<std::string> state;
};

struct Variant;
struct Library;

// --------------------------------------------------------------------------------------------------------------- bundle

struct Options {
  std::string libtorch;                              // the folder of libtorch_cpu.so; "" leaves it to the loader's paths
  bool check = true;                                 // hash every file before its first use
};

class Entry {
 public:
  // The flat leaves of the call in the order of the guards; the flat leaves of the result. Miss when none takes it,
  // Error when the compiled model refuses.
  std::vector<Leaf> call(const std::vector<Leaf>& leaves);
  // The variant that takes a call, "" when none does; `reasons` (if given) has a line for each that does not.
  std::string judge(const Call& call, std::vector<std::string>* reasons = nullptr) const;
  // Load every variant now, rather than at its first call.
  void load();
  const std::string& name() const { return name_; }
  // The path, dtype and rank of each leaf of the first variant: what a server needs to read a request.
  struct Wanted {
    std::string path, dtype;                         // dtype "" for a scalar
    Scalar value;
  };
  std::vector<Wanted> wanted() const;

 private:
  friend class Bundle;
  std::string name_;
  class Bundle* bundle_ = nullptr;
  std::vector<std::shared_ptr<Variant>> variants_;   // fixed sizes first, as calls try them
  std::vector<std::string> skipped_;                 // those that do not fit this host, with the reason
};

class Bundle {
 public:
  static std::unique_ptr<Bundle> open(const std::string& path, Options options = {});
  ~Bundle();
  Entry& entry(const std::string& name);
  std::vector<std::string> names() const;

 private:
  friend class Entry;
  Bundle() = default;
  void load(Variant& variant);
  std::string checked(const std::string& member, const Json& file);
  void map_weights();

  std::string root_;
  Options options_;
  Json index_;
  std::map<std::string, Entry> entries_;
  std::shared_ptr<Library> library_;
  std::mutex lock_;
  struct Stored {
    std::string dtype;
    std::vector<std::int64_t> shape;
    char* data;
  };
  std::map<std::string, Stored> weights_;            // by their keys in the file
  std::map<std::string, void*> handles_;             // by weight set and name
  std::map<std::string, std::unique_ptr<std::recursive_mutex>> state_;   // of the sets whose calls write state
  std::vector<std::unique_ptr<char[]>> own_;
  void* map_ = nullptr;
  std::size_t map_bytes_ = 0;
};

// SHA-256 of `size` bytes, in hex.
std::string sha256(const void* data, std::size_t size);

}  // namespace aotpack
