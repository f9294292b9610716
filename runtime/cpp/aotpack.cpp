#include "aotpack.hpp"

#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gnu/libc-version.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

namespace aotpack {
namespace {

using Sizes = std::vector<std::int64_t>;

const std::map<std::string, int> ITEMSIZE = {
    {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"uint16", 2}, {"uint32", 4},
    {"uint64", 8}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4},
    {"float64", 8}, {"complex64", 8}, {"complex128", 16}};

const std::map<std::string, std::string> SAFETENSORS = {
    {"BOOL", "bool"}, {"U8", "uint8"}, {"I8", "int8"}, {"I16", "int16"}, {"I32", "int32"}, {"I64", "int64"},
    {"U16", "uint16"}, {"U32", "uint32"}, {"U64", "uint64"}, {"F8_E4M3", "float8_e4m3fn"}, {"F8_E5M2", "float8_e5m2"},
    {"F16", "float16"}, {"BF16", "bfloat16"}, {"F32", "float32"}, {"F64", "float64"}, {"C64", "complex64"}};

[[noreturn]] void fail(const std::string& text) { throw Error(text); }

Sizes contiguous(const Sizes& shape) {
  Sizes strides(shape.size(), 1);
  for (int axis = int(shape.size()) - 2; axis >= 0; --axis)
    strides[axis] = strides[axis + 1] * std::max<std::int64_t>(shape[axis + 1], 1);
  return strides;
}

Sizes channels_last(const Sizes& shape) {
  std::vector<int> order = {0};
  for (int axis = 2; axis < int(shape.size()); ++axis) order.push_back(axis);
  order.push_back(1);
  Sizes sorted;
  for (int axis : order) sorted.push_back(shape[axis]);
  const Sizes packed = contiguous(sorted);
  Sizes strides(shape.size(), 0);
  for (std::size_t place = 0; place < order.size(); ++place) strides[order[place]] = packed[place];
  return strides;
}

// The stride of a dim of 1, or of no elements, means nothing.
bool same_layout(const Sizes& shape, const Sizes& a, const Sizes& b) {
  if (std::count(shape.begin(), shape.end(), 0)) return true;
  for (std::size_t axis = 0; axis < shape.size(); ++axis)
    if (shape[axis] != 1 && a[axis] != b[axis]) return false;
  return true;
}

std::string words(const Sizes& sizes) {
  std::string text = "[";
  for (std::size_t n = 0; n < sizes.size(); ++n) text += (n ? ", " : "") + std::to_string(sizes[n]);
  return text + "]";
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------- JSON

namespace {

class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : text_(text) {}

  Json whole() {
    Json value = one(0);
    space();
    if (at_ != text_.size()) stop("something follows the end");
    return value;
  }

 private:
  Json one(int depth) {
    if (depth > 200) stop("nested too deeply");
    space();
    Json value;
    switch (peek()) {
      case '{': {
        value.kind = Json::Kind::object;
        ++at_;
        std::set<std::string> seen;
        for (bool first = true; !ends('}'); first = false) {
          if (!first) expect(',');
          space();
          std::string key = string();
          if (!seen.insert(key).second) stop("key given twice: " + key);
          space();
          expect(':');
          value.keys.push_back(std::move(key));
          value.list.push_back(one(depth + 1));
        }
        return value;
      }
      case '[':
        value.kind = Json::Kind::list;
        ++at_;
        for (bool first = true; !ends(']'); first = false) {
          if (!first) expect(',');
          value.list.push_back(one(depth + 1));
        }
        return value;
      case '"':
        value.kind = Json::Kind::text;
        value.text = string();
        return value;
      case 't': literal("true"); value.kind = Json::Kind::boolean; value.boolean = true; return value;
      case 'f': literal("false"); value.kind = Json::Kind::boolean; return value;
      case 'n': literal("null"); return value;
    }
    value.kind = Json::Kind::number;
    const std::size_t start = at_;
    if (peek() == '-') ++at_;
    if (!std::isdigit(static_cast<unsigned char>(peek()))) stop("not a value");
    while (at_ < text_.size() && (std::isdigit(static_cast<unsigned char>(text_[at_])) || std::strchr(".eE+-", text_[at_])))
      ++at_;
    value.text = text_.substr(start, at_ - start);
    return value;
  }

  std::string string() {
    expect('"');
    std::string out;
    for (;;) {
      const char c = next();
      if (c == '"') return out;
      if (static_cast<unsigned char>(c) < 0x20) stop("a control character in a text");
      if (c != '\\') {
        out += c;
        continue;
      }
      switch (const char e = next()) {
        case '"': case '\\': case '/': out += e; break;
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case 'n': out += '\n'; break;
        case 'r': out += '\r'; break;
        case 't': out += '\t'; break;
        case 'u': {
          std::uint32_t code = hex();
          if (code >= 0xD800 && code < 0xDC00) {
            expect('\\');
            expect('u');
            code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
          }
          utf8(out, code);
          break;
        }
        default: stop("an unknown escape");
      }
    }
  }

  static void utf8(std::string& out, std::uint32_t code) {
    if (code < 0x80) {
      out += char(code);
    } else if (code < 0x800) {
      out += char(0xC0 | code >> 6);
      out += char(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      out += char(0xE0 | code >> 12);
      out += char(0x80 | (code >> 6 & 0x3F));
      out += char(0x80 | (code & 0x3F));
    } else {
      out += char(0xF0 | code >> 18);
      out += char(0x80 | (code >> 12 & 0x3F));
      out += char(0x80 | (code >> 6 & 0x3F));
      out += char(0x80 | (code & 0x3F));
    }
  }

  std::uint32_t hex() {
    std::uint32_t code = 0;
    for (int n = 0; n < 4; ++n) {
      const char c = next();
      if (!std::isxdigit(static_cast<unsigned char>(c))) stop("a bad escape");
      code = code * 16 + (std::isdigit(static_cast<unsigned char>(c)) ? c - '0' : std::tolower(c) - 'a' + 10);
    }
    return code;
  }

  void literal(const char* word) {
    for (; *word; ++word) expect(*word);
  }
  bool ends(char c) {
    space();
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_])) ++at_;
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char next() {
    if (at_ >= text_.size()) stop("it ends too soon");
    return text_[at_++];
  }
  void expect(char c) {
    if (next() != c) stop(std::string("expected ") + c);
  }
  [[noreturn]] void stop(const std::string& what) const {
    fail("not JSON at byte " + std::to_string(at_) + ": " + what);
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

}  // namespace

Json Json::parse(const std::string& text) { return JsonParser(text).whole(); }

const Json* Json::find(const std::string& key) const {
  for (std::size_t n = 0; n < keys.size(); ++n)
    if (keys[n] == key) return &list[n];
  return nullptr;
}

const Json& Json::at(const std::string& key) const {
  const Json* found = find(key);
  if (!found) fail("the index has no " + key + " where there should be one");
  return *found;
}

std::int64_t Json::integer() const {
  if (kind != Kind::number) fail("expected an int in the index");
  std::size_t used = 0;
  std::int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    fail(text.substr(0, 40) + " is no int of 64 bits");
  }
  if (used != text.size()) fail(text.substr(0, 40) + " is no int");
  return value;
}

const std::string& Json::string() const {
  if (kind != Kind::text) fail("expected a text in the index");
  return text;
}

bool Json::operator==(const Json& other) const {
  return kind == other.kind && boolean == other.boolean && text == other.text && keys == other.keys && list == other.list;
}

// --------------------------------------------------------------------------------------------------------- expressions

// Python's own grammar, of the operators that expressions have.
class ExpressionParser {
 public:
  using Fn = std::function<std::int64_t(const Env&)>;
  explicit ExpressionParser(const std::string& text) : text_(text) {}

  Expression whole() {
    Expression made;
    made.text_ = text_;
    made.evaluate_ = disjunction(0);
    if (!token().empty()) stop();
    return made;
  }

 private:
  Fn disjunction(int depth) {
    if (depth > 128) stop();
    Fn left = conjunction(depth);
    while (take("or")) {
      Fn right = conjunction(depth);
      left = [left, right](const Env& env) { return std::int64_t(left(env) || right(env)); };
    }
    return left;
  }
  Fn conjunction(int depth) {
    Fn left = negation(depth);
    while (take("and")) {
      Fn right = negation(depth);
      left = [left, right](const Env& env) { return std::int64_t(left(env) && right(env)); };
    }
    return left;
  }
  Fn negation(int depth) {
    if (!take("not")) return comparison(depth);
    Fn inner = negation(depth + 1);
    return [inner](const Env& env) { return std::int64_t(!inner(env)); };
  }
  Fn comparison(int depth) {
    std::vector<Fn> terms = {sum(depth)};
    std::vector<std::string> tests;
    for (;;) {
      const std::string found = token();
      if (found != "==" && found != "!=" && found != "<" && found != "<=" && found != ">" && found != ">=") break;
      take(found);
      tests.push_back(found);
      terms.push_back(sum(depth));
    }
    if (tests.empty()) return terms[0];
    return [terms, tests](const Env& env) {
      std::int64_t left = terms[0](env);
      for (std::size_t n = 0; n < tests.size(); ++n) {
        const std::int64_t right = terms[n + 1](env);
        const std::string& t = tests[n];
        const bool holds = t == "==" ? left == right : t == "!=" ? left != right : t == "<" ? left < right
                         : t == "<=" ? left <= right : t == ">" ? left > right : left >= right;
        if (!holds) return std::int64_t(0);
        left = right;
      }
      return std::int64_t(1);
    };
  }
  Fn sum(int depth) {
    Fn left = product(depth);
    for (;;) {
      const bool plus = take("+");
      if (!plus && !take("-")) return left;
      Fn right = product(depth);
      left = [left, right, plus](const Env& env) {
        const __int128 a = left(env), b = right(env);
        return narrow(plus ? a + b : a - b);
      };
    }
  }
  Fn product(int depth) {
    Fn left = unary(depth);
    for (;;) {
      const std::string op = token();
      if (op != "*" && op != "//" && op != "%") return left;
      take(op);
      Fn right = unary(depth);
      left = [left, right, op](const Env& env) {
        const std::int64_t a = left(env), b = right(env);
        if (op == "*") return narrow(__int128(a) * b);
        return op == "%" ? narrow(a - __int128(b) * floored(a, b)) : narrow(floored(a, b));
      };
    }
  }
  Fn unary(int depth) {
    if (depth > 128) stop();
    if (!take("-")) return atom(depth + 1);
    Fn inner = unary(depth + 1);
    return [inner](const Env& env) { return narrow(-__int128(inner(env))); };
  }
  Fn atom(int depth) {
    if (take("(")) {
      Fn inner = disjunction(depth + 1);
      need(")");
      return inner;
    }
    const std::string found = token();
    if (found.empty()) stop();
    if (std::isdigit(static_cast<unsigned char>(found[0]))) {
      take(found);
      Json number;
      number.kind = Json::Kind::number;
      number.text = found;
      const std::int64_t value = number.integer();
      return [value](const Env&) { return value; };
    }
    if (found == "True" || found == "False") {
      take(found);
      const std::int64_t value = found == "True";
      return [value](const Env&) { return value; };
    }
    if (!(std::isalpha(static_cast<unsigned char>(found[0])) || found[0] == '_' || found[0] < 0)) stop();
    take(found);
    if (token() == "(") return function(found, depth);
    const std::string name = found + rest_of_name();
    return [name](const Env& env) {
      const auto place = env.find(name);
      if (place == env.end()) fail(name + " is no size of the call");
      return place->second;
    };
  }
  Fn function(const std::string& name, int depth) {
    need("(");
    std::vector<Fn> terms = {disjunction(depth + 1)};
    while (take(",")) terms.push_back(disjunction(depth + 1));
    need(")");
    const bool least = name == "min", most = name == "max";
    if ((!least && !most && name != "ceil_div") || terms.size() < 2 || (name == "ceil_div" && terms.size() > 2)) stop();
    return [terms, least, most](const Env& env) {
      std::int64_t value = terms[0](env);
      if (!least && !most) return narrow(-floored(narrow(-__int128(value)), terms[1](env)));
      for (std::size_t n = 1; n < terms.size(); ++n) {
        const std::int64_t other = terms[n](env);
        value = least ? std::min(value, other) : std::max(value, other);
      }
      return value;
    };
  }

  // `.shape[0]`, `['a'][1]`: kept as they are written, which is how paths are written too.
  std::string rest_of_name() {
    const std::size_t start = at_;
    for (;;) {
      if (at_ < text_.size() && text_[at_] == '.') {
        ++at_;
        while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_' || text_[at_] < 0)) ++at_;
      } else if (at_ < text_.size() && text_[at_] == '[') {
        char quote = 0;
        for (++at_; at_ < text_.size() && (quote || text_[at_] != ']'); ++at_) {
          if (quote && text_[at_] == '\\') ++at_;
          else if (quote ? text_[at_] == quote : text_[at_] == '\'' || text_[at_] == '"') quote = quote ? 0 : text_[at_];
        }
        if (at_ >= text_.size()) stop();
        ++at_;
      } else {
        return text_.substr(start, at_ - start);
      }
    }
  }

  static std::int64_t narrow(__int128 value) {
    if (value > INT64_MAX || value < INT64_MIN) fail("a number leaves 64 bits");
    return std::int64_t(value);
  }
  static __int128 floored(__int128 a, __int128 b) {
    if (b == 0) fail("a divisor is 0");
    const __int128 quotient = a / b;
    return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
  }

  // The next token, without taking it.
  std::string token() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    if (at_ >= text_.size()) return "";
    std::size_t end = at_;
    const char c = text_[at_];
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c < 0) {
      while (end < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[end])) || text_[end] == '_' || text_[end] < 0)) ++end;
    } else {
      static const char* const two[] = {"==", "!=", "<=", ">=", "//"};
      end = at_ + 1;
      for (const char* each : two)
        if (text_.compare(at_, 2, each) == 0) end = at_ + 2;
    }
    return text_.substr(at_, end - at_);
  }
  bool take(const std::string& wanted) {
    if (token() != wanted) return false;
    at_ += wanted.size();
    return true;
  }
  void need(const std::string& wanted) {
    if (!take(wanted)) stop();
  }
  [[noreturn]] void stop() const { fail(text_.substr(0, 200) + " is not an expression that a bundle has"); }

  const std::string text_;
  std::size_t at_ = 0;
};

Expression Expression::parse(const std::string& text) { return ExpressionParser(text).whole(); }

// ------------------------------------------------------------------------------------------------------------ libraries

// libtorch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h), of the one library that all packages need.
struct Library {
  int (*from_blob)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t, std::int32_t, std::int32_t,
                   std::int32_t, void**);
  int (*remove)(void*);
  int (*data_ptr)(void*, void**);
  int (*dim)(void*, std::int64_t*);
  int (*dtype)(void*, std::int32_t*);
  int (*sizes)(void*, std::int64_t**);
  int (*strides)(void*, std::int64_t**);
  std::uint64_t (*abi_version)();
  std::map<std::string, std::int32_t> numbers;       // dtype -> torch's number of it
  std::map<std::int32_t, std::string> names;
  std::int32_t cpu = 0;

  explicit Library(const std::string& folder);
  std::string version() const {
    const std::uint64_t found = abi_version();
    return std::to_string(found >> 56) + "." + std::to_string(found >> 48 & 255);
  }
  void* over(void* data, const std::string& dtype, const Sizes& shape, const Sizes& strides) const;
  Tensor take(void* handle, const std::shared_ptr<Library>& self) const;
};

namespace {

template <typename Function>
void symbol(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(dlsym(library, name));
  if (!out) fail(std::string("a library does not export ") + name);
}

void* open_library(const std::string& path) {
  void* found = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!found) fail(std::string("cannot be opened: ") + dlerror());
  return found;
}

}  // namespace

Library::Library(const std::string& folder) {
  void* found = open_library(folder.empty() ? "libtorch_cpu.so" : folder + "/libtorch_cpu.so");
  symbol(found, "aoti_torch_create_tensor_from_blob", from_blob);
  symbol(found, "aoti_torch_delete_tensor_object", remove);
  symbol(found, "aoti_torch_get_data_ptr", data_ptr);
  symbol(found, "aoti_torch_get_dim", dim);
  symbol(found, "aoti_torch_get_dtype", dtype);
  symbol(found, "aoti_torch_get_sizes", sizes);
  symbol(found, "aoti_torch_get_strides", strides);
  symbol(found, "aoti_torch_abi_version", abi_version);
  std::int32_t (*number)();
  symbol(found, "aoti_torch_device_type_cpu", number);
  cpu = number();
  for (const auto& [name, size] : ITEMSIZE) {
    symbol(found, ("aoti_torch_dtype_" + name).c_str(), number);
    numbers[name] = number();
    names[number()] = name;
  }
}

void* Library::over(void* data, const std::string& dtype, const Sizes& shape, const Sizes& strides) const {
  const auto number = numbers.find(dtype);
  void* handle = nullptr;
  if (number == numbers.end()) fail("there is no dtype " + dtype);
  if (from_blob(data, std::int64_t(shape.size()), shape.data(), strides.data(), 0, number->second, cpu, 0, &handle))
    fail("libtorch could not make a tensor over memory");
  return handle;
}

// The tensor of a handle that is ours, which it frees at its end.
Tensor Library::take(void* handle, const std::shared_ptr<Library>& self) const {
  Tensor tensor;
  tensor.owner = std::shared_ptr<void>(handle, [self](void* gone) { self->remove(gone); });
  std::int64_t rank = 0, *size = nullptr, *step = nullptr;
  std::int32_t number = 0;
  if (dim(handle, &rank) || dtype(handle, &number) || sizes(handle, &size) || strides(handle, &step) ||
      data_ptr(handle, &tensor.data) || !names.count(number))
    fail("libtorch could not describe a result");
  tensor.dtype = names.at(number);
  tensor.shape.assign(size, size + rank);
  tensor.strides.assign(step, step + rank);
  return tensor;
}

// AOTInductor's C interface (torch/csrc/inductor/aoti_runtime/interface.h) of one package.
struct ModelContainer {
  void* handle = nullptr;
  std::size_t inputs = 0, results = 0;
  int (*run)(void*, void**, std::size_t, void**, std::size_t, void*, void*) = nullptr;

  struct Pair {
    const char* name;
    void* handle;
  };

  // Open the library at `path` and bind `constants`, by the names that it asks for, without a copy.
  void open(const std::string& path, const std::string& variant, std::size_t concurrency,
            const std::map<std::string, void*>& constants) {
    void* library = open_library(path);
    int (*create)(void**, std::size_t, const char*, const char*);
    int (*count)(void*, std::size_t*);
    int (*name_of)(void*, std::size_t, const char**);
    int (*update)(void*, const Pair*, std::size_t, bool, bool);
    symbol(library, "AOTInductorModelContainerCreateWithDevice", create);
    symbol(library, "AOTInductorModelContainerRun", run);
    symbol(library, "AOTInductorModelContainerGetConstantName", name_of);
    symbol(library, "AOTInductorModelContainerUpdateUserManagedConstantBufferPairs", update);
    if (create(&handle, concurrency, "cpu", nullptr)) fail(variant + ": its container could not be created");
    std::size_t asked = 0;
    symbol(library, "AOTInductorModelContainerGetNumConstants", count);
    if (count(handle, &asked)) fail(variant + ": its container does not say what it asks for");
    symbol(library, "AOTInductorModelContainerGetNumInputs", count);
    if (count(handle, &inputs)) fail(variant + ": its container does not say what it takes");
    symbol(library, "AOTInductorModelContainerGetNumOutputs", count);
    if (count(handle, &results)) fail(variant + ": its container does not say what it gives");
    std::vector<Pair> pairs;
    for (std::size_t n = 0; n < asked; ++n) {
      const char* name = nullptr;
      if (name_of(handle, n, &name)) fail(variant + ": its container does not name what it asks for");
      const auto found = constants.find(name);
      if (found == constants.end()) fail(variant + ": asks for " + name + ", which the index does not name");
      pairs.push_back({name, found->second});
    }
    if (asked && update(handle, pairs.data(), pairs.size(), false, true)) fail(variant + ": its weights could not be bound");
  }
};

// --------------------------------------------------------------------------------------------------------------- guards

struct Guard {
  enum class Kind { tensor, value, integer } kind;
  std::string path, dtype, device, layout;           // layout "" when `strides` says it
  struct Dim {
    std::int64_t low, high;
    bool open, fixed;
  };
  std::vector<Dim> dims;                             // of an int: one
  std::vector<Expression> strides;
  bool aligned = false, written = false;
  Json value;
};

// How one leaf of the result is had: as the index says it.
struct Output {
  enum class Kind { result, argument, value, size, view } kind;
  std::int64_t index = 0;                            // of results and arguments
  Json value;
  std::vector<Expression> shape, strides;            // of views; of sizes: shape[0]
  std::vector<Expression> offset;
  bool of_argument = false, conj = false;
};

struct Variant {
  std::string id, weights;
  Json artifact, trees, constants;
  std::vector<Guard> guards;
  std::vector<Expression> where;
  std::vector<Output> outputs;
  bool fixed = true;                                 // every size is
  std::once_flag once;
  ModelContainer container;

  std::string reject(const Call& call, Env& env) const;
};

namespace {

Guard::Dim read_dim(const Json& value) {
  if (value.kind == Json::Kind::number) return {value.integer(), value.integer(), false, true};
  if (value.kind == Json::Kind::list && value.list.size() == 2) {
    const bool open = value.list[1].kind == Json::Kind::null;
    return {value.list[0].integer(), open ? 0 : value.list[1].integer(), open, false};
  }
  fail("a dim is neither a size nor a range");
}

bool inside(const Guard::Dim& dim, std::int64_t size) { return dim.low <= size && (dim.open || size <= dim.high); }

Guard read_guard(const Json& value) {
  Guard guard{};
  guard.path = value.at("path").string();
  if (value.find("dtype")) {
    guard.kind = Guard::Kind::tensor;
    guard.dtype = value.at("dtype").string();
    guard.device = value.at("device").string();
    for (const Json& dim : value.at("dims").list) guard.dims.push_back(read_dim(dim));
    const Json* layout = value.find("layout");
    if (!layout) guard.layout = "contiguous";
    else if (layout->kind == Json::Kind::text) guard.layout = layout->text;
    else for (const Json& text : layout->list) guard.strides.push_back(Expression::parse(text.string()));
    const Json *aligned = value.find("aligned"), *written = value.find("written");
    guard.aligned = aligned && aligned->boolean;
    guard.written = written && written->boolean;
  } else if (value.find("int")) {
    guard.kind = Guard::Kind::integer;
    guard.dims.push_back(read_dim(value.at("int")));
  } else {
    guard.kind = Guard::Kind::value;
    guard.value = value.at("value");
  }
  return guard;
}

std::string reject_tensor(const Guard& guard, const TensorMeta& leaf, Env& env) {
  if (!leaf.odd.empty()) return guard.path + " " + leaf.odd;
  if (leaf.dtype != guard.dtype) return guard.path + ".dtype: expected " + guard.dtype + ", got " + leaf.dtype;
  if (leaf.shape.size() != guard.dims.size())
    return guard.path + ": expected " + std::to_string(guard.dims.size()) + " dims, got " + words(leaf.shape);
  if (leaf.device.substr(0, leaf.device.find(':')) != guard.device)
    return guard.path + ".device: expected " + guard.device + ", got " + leaf.device;
  if (leaf.needs_grad) return guard.path + " requires grad";
  for (std::size_t axis = 0; axis < guard.dims.size(); ++axis) {
    const std::string name = guard.path + ".shape[" + std::to_string(axis) + "]";
    env[name] = leaf.shape[axis];
    if (!inside(guard.dims[axis], leaf.shape[axis])) {
      const Guard::Dim& dim = guard.dims[axis];
      const std::string wanted = dim.fixed ? std::to_string(dim.low)
                               : std::to_string(dim.low) + (dim.open ? " or more" : ".." + std::to_string(dim.high));
      return name + ": expected " + wanted + ", got " + std::to_string(leaf.shape[axis]);
    }
  }
  if (guard.written && leaf.shared) return guard.path + " shares memory with another argument";
  if (guard.written && leaf.locked) return guard.path + " may not be written";
  if (guard.aligned && leaf.offset) return guard.path + ": expected an address divisible by 16";
  if (guard.layout == "any") return "";
  Sizes wanted;
  if (guard.layout == "contiguous") wanted = contiguous(leaf.shape);
  else if (guard.layout == "channels_last") wanted = channels_last(leaf.shape);
  else for (const Expression& stride : guard.strides) wanted.push_back(stride(env));
  if (same_layout(leaf.shape, leaf.strides, wanted)) return "";
  return guard.path + ": expected strides " + words(wanted) + ", got " + words(leaf.strides);
}

std::string reject_leaf(const Guard& guard, const std::variant<TensorMeta, Scalar, Other>& leaf, Env& env) {
  const auto* tensor = std::get_if<TensorMeta>(&leaf);
  const auto* scalar = std::get_if<Scalar>(&leaf);
  switch (guard.kind) {
    case Guard::Kind::tensor:
      return tensor ? reject_tensor(guard, *tensor, env) : guard.path + ": expected a " + guard.dtype + " tensor";
    case Guard::Kind::value:
      return scalar && *scalar == guard.value ? "" : guard.path + ": expected another value";
    case Guard::Kind::integer:
      break;
  }
  if (!scalar || scalar->kind != Json::Kind::number) return guard.path + ": expected an int";
  try {
    const std::int64_t value = scalar->integer();
    env[guard.path] = value;
    if (inside(guard.dims[0], value)) return "";
  } catch (const Error&) {
  }
  return guard.path + ": expected another range, got " + scalar->text.substr(0, 40);
}

}  // namespace

std::string Variant::reject(const Call& call, Env& env) const {
  if (!call.state.empty()) return call.state[0];
  if (!(call.trees == trees) || call.leaves.size() != guards.size()) return "the arguments have another structure";
  try {
    for (std::size_t n = 0; n < guards.size(); ++n) {
      std::string reason = reject_leaf(guards[n], call.leaves[n], env);
      if (!reason.empty()) return reason;
    }
    for (const Expression& relation : where)
      if (!relation(env)) return relation.text() + " does not hold";
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// ---------------------------------------------------------------------------------------------------------------- calls

Tensor Tensor::view(void* data, std::string dtype, std::vector<std::int64_t> shape) {
  Tensor tensor;
  tensor.data = data;
  tensor.dtype = std::move(dtype);
  tensor.strides = contiguous(shape);
  tensor.shape = std::move(shape);
  return tensor;
}

std::size_t Tensor::bytes() const {
  std::size_t count = ITEMSIZE.at(dtype);
  for (std::int64_t size : shape) count *= std::size_t(size);
  return count;
}

namespace {

std::vector<Expression> expressions(const Json& texts) {
  std::vector<Expression> found;
  for (const Json& text : texts.list) found.push_back(Expression::parse(text.string()));
  return found;
}

Output read_output(const Json& value) {
  Output output{};
  if (const Json* of = value.find("view")) {
    output = read_output(*of);
    output.of_argument = output.kind == Output::Kind::argument;
    if (!output.of_argument && output.kind != Output::Kind::result) fail("a view is of a result or an argument");
    output.kind = Output::Kind::view;
    output.shape = expressions(value.at("shape"));
    output.strides = expressions(value.at("strides"));
    output.offset.push_back(Expression::parse(value.at("offset").string()));
    const Json* conj = value.find("conj");
    output.conj = conj && conj->boolean;
  } else if (const Json* result = value.find("result")) {
    output.kind = Output::Kind::result;
    output.index = result->integer();
  } else if (const Json* argument = value.find("argument")) {
    output.kind = Output::Kind::argument;
    output.index = argument->integer();
  } else if (const Json* size = value.find("size")) {
    output.kind = Output::Kind::size;
    output.shape.push_back(Expression::parse(size->string()));
  } else {
    output.kind = Output::Kind::value;
    output.value = value.at("value");
  }
  return output;
}

// As guards see a tensor of a caller; `odd` where no compiled code may see it.
TensorMeta describe(const Tensor& tensor) {
  TensorMeta meta;
  meta.dtype = tensor.dtype;
  meta.shape = tensor.shape;
  meta.strides = tensor.strides;
  meta.locked = tensor.read_only;
  const auto size = ITEMSIZE.find(tensor.dtype);
  const bool empty = std::count(tensor.shape.begin(), tensor.shape.end(), 0);
  if (size == ITEMSIZE.end() || tensor.strides.size() != tensor.shape.size()) {
    meta.odd = "is no tensor of a known dtype with a stride for each dim";
    return meta;
  }
  for (std::int64_t each : tensor.shape)
    if (each < 0) meta.odd = "has a size below 0";
  if (!empty) {
    meta.offset = int(reinterpret_cast<std::uintptr_t>(tensor.data) % 16);
    if (!tensor.data) meta.odd = "has elements at address 0";
    else if (meta.offset % size->second) meta.odd = "lies at an address that is no multiple of its element";
    if (tensor.conj) meta.odd = "is to be read conjugated";
  }
  return meta;
}

// Marks the tensors in whose memory, from first to last element, another one lies.
void mark_shared(const std::vector<Leaf>& leaves, Call& call) {
  struct Span {
    std::intptr_t start, stop;
    std::size_t position;
  };
  std::vector<Span> spans;
  for (std::size_t n = 0; n < leaves.size(); ++n) {
    const auto* tensor = std::get_if<Tensor>(&leaves[n]);
    if (!tensor || !ITEMSIZE.count(tensor->dtype) || !tensor->bytes()) continue;
    std::int64_t low = 0, high = 0;
    for (std::size_t axis = 0; axis < tensor->shape.size(); ++axis) {
      const std::int64_t reach = (tensor->shape[axis] - 1) * tensor->strides[axis];
      (reach < 0 ? low : high) += reach;
    }
    const std::int64_t item = ITEMSIZE.at(tensor->dtype);
    const auto place = reinterpret_cast<std::intptr_t>(tensor->data);
    spans.push_back({place + low * item, place + (high + 1) * item, n});
  }
  for (const Span& a : spans)
    for (const Span& b : spans)
      if (a.position != b.position && a.start < b.stop && b.start < a.stop)
        std::get<TensorMeta>(call.leaves[a.position]).shared = true;
}

std::size_t concurrency() { return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 2, 8); }

}  // namespace

std::vector<Entry::Wanted> Entry::wanted() const {
  std::vector<Wanted> found;
  if (!variants_.empty())
    for (const Guard& guard : variants_[0]->guards) found.push_back({guard.path, guard.dtype, guard.value});
  return found;
}

std::string Entry::judge(const Call& call, std::vector<std::string>* reasons) const {
  for (const auto& variant : variants_) {
    Env env;
    const std::string reason = variant->reject(call, env);
    if (reason.empty()) return variant->id;
    if (reasons) reasons->push_back(variant->id + ": " + reason);
  }
  if (reasons) reasons->insert(reasons->end(), skipped_.begin(), skipped_.end());
  return "";
}

void Entry::load() {
  for (const auto& variant : variants_) std::call_once(variant->once, [&] { bundle_->load(*variant); });
}

std::vector<Leaf> Entry::call(const std::vector<Leaf>& leaves) {
  Call call;
  for (const Leaf& leaf : leaves) {
    if (const auto* tensor = std::get_if<Tensor>(&leaf)) call.leaves.emplace_back(describe(*tensor));
    else call.leaves.emplace_back(std::get<Scalar>(leaf));
  }
  mark_shared(leaves, call);
  Variant* chosen = nullptr;
  Env env;
  std::string reasons;
  for (const auto& variant : variants_) {
    env.clear();
    call.trees = variant->trees;                     // leaves come flat: their containers are those of the variant
    const std::string reason = variant->reject(call, env);
    if (reason.empty()) {
      chosen = variant.get();
      break;
    }
    reasons += (reasons.empty() ? "" : "; ") + variant->id + ": " + reason;
  }
  for (const std::string& reason : skipped_) reasons += (reasons.empty() ? "" : "; ") + reason;
  if (!chosen) throw Miss(name_ + ": no variant fits this call: " + reasons);
  std::call_once(chosen->once, [&] { bundle_->load(*chosen); });

  const Library& library = *bundle_->library_;
  static char nothing[16];
  std::vector<void*> given, made(chosen->container.results, nullptr);
  for (std::size_t n = 0; n < leaves.size(); ++n) {
    const Guard& guard = chosen->guards[n];
    if (guard.kind == Guard::Kind::integer) {
      const Sizes shape = {std::get<Scalar>(leaves[n]).integer(), 0};
      given.push_back(library.over(nothing, "float32", shape, {1, 1}));
    } else if (guard.kind == Guard::Kind::tensor) {
      const auto& tensor = std::get<Tensor>(leaves[n]);
      const bool empty = !tensor.bytes();
      Sizes strides = contiguous(tensor.shape);      // of dims of 1, and of no elements, they mean nothing
      for (std::size_t axis = 0; axis < strides.size() && !empty; ++axis)
        if (tensor.shape[axis] != 1) strides[axis] = tensor.strides[axis];
      given.push_back(library.over(empty ? nothing : tensor.data, tensor.dtype, tensor.shape, strides));
    }
  }
  if (given.size() != chosen->container.inputs) fail(chosen->id + ": takes another number of tensors than its guards say");
  {
    std::unique_lock<std::recursive_mutex> state;
    const auto found = bundle_->state_.find(chosen->weights);
    if (found != bundle_->state_.end()) state = std::unique_lock<std::recursive_mutex>(*found->second);
    // The model takes over the handles that it is given.
    if (chosen->container.run(chosen->container.handle, given.data(), given.size(), made.data(), made.size(), nullptr, nullptr))
      fail(chosen->id + ": the compiled model refused the call; it said why on stderr");
  }
  std::vector<Tensor> results;
  for (void* handle : made) results.push_back(library.take(handle, bundle_->library_));
  std::vector<Leaf> found;
  for (const Output& output : chosen->outputs) {
    switch (output.kind) {
      case Output::Kind::result: found.emplace_back(results.at(output.index)); break;
      case Output::Kind::argument: found.push_back(leaves.at(output.index)); break;
      case Output::Kind::value: found.emplace_back(output.value); break;
      case Output::Kind::size: {
        Scalar size;
        size.kind = Json::Kind::number;
        size.text = std::to_string(output.shape[0](env));
        found.emplace_back(size);
        break;
      }
      case Output::Kind::view: {
        Tensor view = output.of_argument ? std::get<Tensor>(leaves.at(output.index)) : results.at(output.index);
        view.data = static_cast<char*>(view.data) + output.offset[0](env) * ITEMSIZE.at(view.dtype);
        view.shape.clear();
        view.strides.clear();
        for (const Expression& size : output.shape) view.shape.push_back(size(env));
        for (const Expression& stride : output.strides) view.strides.push_back(stride(env));
        view.conj = output.conj;
        found.emplace_back(std::move(view));
      }
    }
  }
  return found;
}

// --------------------------------------------------------------------------------------------------------------- bundle

namespace {

const std::map<std::string, std::string> LEVELS = {
    {"x86-64", ""},
    {"x86-64-v2", "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2"},
    {"x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"},
    {"x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"}};

std::vector<std::string> split(const std::string& text, char by = ' ') {
  std::vector<std::string> found;
  std::stringstream stream(text);
  for (std::string word; std::getline(stream, word, by);)
    if (!word.empty()) found.push_back(word);
  return found;
}

std::vector<int> numbers(const std::string& version) {
  std::vector<int> found;
  for (const std::string& part : split(version, '.')) {
    if (!std::isdigit(static_cast<unsigned char>(part[0]))) break;
    found.push_back(std::stoi(part));
  }
  return found;
}

std::string missing_flags(const std::string& wanted) {
  std::set<std::string> there;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("flags", 0) == 0) {
      for (const std::string& flag : split(line.substr(line.find(':') + 1))) there.insert(flag);
      break;
    }
  std::string missing;
  for (const std::string& word : split(wanted)) {
    std::string flags = word;
    if (LEVELS.count(word)) {
      flags.clear();
      for (const auto& [level, names] : LEVELS) {
        flags += " " + names;
        if (level == word) break;
      }
    }
    for (const std::string& flag : split(flags))
      if (!there.count(flag)) missing += " " + flag;
  }
  return missing;
}

// Why this host cannot run an artifact with these needs, "" when it can. A need that is not known here is a reason.
std::string reject_host(const Json& target, const std::string& torch) {
  if (target.at("device").string() != "cpu") return "is for " + target.at("device").string();
  const Json& needs = target.at("needs");
  for (std::size_t n = 0; n < needs.keys.size(); ++n) {
    const std::string &name = needs.keys[n], &value = needs.list[n].string();
    if (name == "arch") {
      utsname host{};
      uname(&host);
      if (value != host.machine) return "built for " + value + ", this host is " + host.machine;
    } else if (name == "cpu") {
      const std::string missing = missing_flags(value);
      if (!missing.empty()) return "built for CPU " + value + ", this host lacks" + missing;
    } else if (name == "torch") {
      if (numbers(value) != numbers(torch)) return "built with torch " + value + ", libtorch here is " + torch;
    } else if (name == "glibc") {
      if (numbers(gnu_get_libc_version()) < numbers(value)) return "needs glibc " + value;
    } else if (name != "libstdcxx") {                // the dynamic loader judges that one
      return "needs " + name + " " + value + ", which is not known here";
    }
  }
  return "";
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path + ": cannot be opened");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

bool plain_name(const std::string& name) {
  if (name.empty() || name.size() > 128 || name.find("..") != std::string::npos || name[0] == '.' || name[0] == '-') return false;
  return std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || std::strchr("_.-", c); });
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// A mapped file, to hash or to keep.
struct Mapped {
  void* data = nullptr;
  std::size_t size = 0;
  Mapped(const std::string& path, int protection) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status {};
    if (file < 0 || fstat(file, &status) || !S_ISREG(status.st_mode)) {
      if (file >= 0) close(file);
      fail(path + ": is not a plain file that can be opened");
    }
    size = std::size_t(status.st_size);
    if (size) data = mmap(nullptr, size, protection, MAP_PRIVATE, file, 0);
    close(file);
    if (data == MAP_FAILED) fail(path + ": cannot be mapped");
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() {
    if (data) munmap(data, size);
  }
};

}  // namespace

std::unique_ptr<Bundle> Bundle::open(const std::string& path, Options options) {
  std::unique_ptr<Bundle> bundle(new Bundle);
  bundle->root_ = path;
  bundle->index_ = Json::parse(read_file(path + "/index.json"));
  const Json& index = bundle->index_;
  const std::int64_t format = index.at("format").integer();
  if (format < 1 || format > 3) fail("index.json: format version is " + std::to_string(format) + ", this reads 1, 2, 3");
  bundle->library_ = std::make_shared<Library>(options.libtorch);
  bundle->options_ = std::move(options);
  const std::string torch = bundle->library_->version();
  const Json* shared = index.find("shared");
  const auto field = [&](const Json& record, const char* name) -> const Json& {
    const Json& value = record.at(name);
    if (value.kind != Json::Kind::number) return value;
    const std::int64_t place = value.integer();
    if (!shared || place < 0 || place >= std::int64_t(shared->list.size())) fail("index.json: no such shared value");
    return shared->list[place];
  };
  const Json& entries = index.at("entries");
  for (std::size_t n = 0; n < entries.keys.size(); ++n) {
    if (entries.list[n].find("kernel")) continue;
    Entry& entry = bundle->entries_[entries.keys[n]];
    entry.name_ = entries.keys[n];
    entry.bundle_ = bundle.get();
    for (const Json& record : entries.list[n].at("variants").list) {
      auto variant = std::make_shared<Variant>();
      variant->id = record.at("id").string();
      variant->artifact = record.at("artifact");
      std::string reason = reject_host(field(record, "target"), torch);
      const Json& files = variant->artifact.at("files");
      if (reason.empty() && variant->artifact.at("kind").string() != "aoti") reason = "is no AOTInductor package";
      if (reason.empty() && (files.keys.size() != 1 || files.keys[0] != "model.so"))
        reason = "has operators without a C shim, which torch's Python runs";
      if (!reason.empty()) {
        entry.skipped_.push_back(variant->id + ": " + reason);
        continue;
      }
      const Json& guards = record.at("guards");
      variant->trees = guards.at("trees");
      for (const Json& leaf : guards.at("leaves").list) {
        variant->guards.push_back(read_guard(leaf));
        const Guard& guard = variant->guards.back();
        for (const Guard::Dim& dim : guard.dims) variant->fixed &= dim.fixed;
      }
      variant->where = expressions(guards.at("where"));
      for (const Json& leaf : field(record, "outputs").at("leaves").list) variant->outputs.push_back(read_output(leaf));
      variant->weights = record.at("weights").string();
      variant->constants = field(record, "constants");
      entry.variants_.push_back(std::move(variant));
    }
    std::stable_partition(entry.variants_.begin(), entry.variants_.end(), [](const auto& one) { return one->fixed; });
  }
  return bundle;
}

Bundle::~Bundle() {
  if (library_)
    for (auto& [name, handle] : handles_) library_->remove(handle);
  // Packages stay loaded, and read their weights until the process ends: what is mapped stays mapped.
}

Entry& Bundle::entry(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail("no entry " + name);
  return found->second;
}

std::vector<std::string> Bundle::names() const {
  std::vector<std::string> found;
  for (const auto& [name, entry] : entries_) found.push_back(name);
  return found;
}

// The path of a member, its bytes compared with what the index says of them.
std::string Bundle::checked(const std::string& member, const Json& file) {
  const std::string path = root_ + "/" + member;
  const Mapped mapped(path, PROT_READ);
  if (std::int64_t(mapped.size) != file.at("bytes").integer()) fail(member + ": has another size than the index says");
  if (options_.check && sha256(mapped.data, mapped.size) != file.at("sha256").string())
    fail(member + ": its sha256 is not the one in the index; fetch the bundle again");
  return path;
}

void Bundle::load(Variant& variant) {
  const std::lock_guard<std::mutex> lock(lock_);
  const Json& files = variant.artifact.at("files");
  const std::string digest = variant.artifact.at("digest").string();
  if (!is_digest(digest) || !plain_name(files.keys[0])) fail(variant.id + ": its files have no plain names");
  const std::string path = checked("artifacts/" + digest + "/" + files.keys[0], files.list[0]);
  std::map<std::string, void*> constants;
  bool stateful = false;
  if (!variant.constants.list.empty()) {
    map_weights();
    const Json& set = index_.at("weights").at("sets").at(variant.weights);
    std::set<std::string> state;
    for (const Json& name : set.at("state").list) state.insert(name.string());
    stateful = !state.empty();
    if (stateful && !state_.count(variant.weights)) state_[variant.weights] = std::make_unique<std::recursive_mutex>();
    std::set<std::string> written;                   // stored tensors that calls write: a private copy, once
    for (const std::string& name : state) written.insert(set.at("weights").at(name).at("tensor").string());
    for (const Json& pair : variant.constants.list) {
      const std::string& name = pair.list.at(1).string();
      void*& handle = handles_[variant.weights + "/" + name];
      if (!handle) {
        const Json& ref = set.at("weights").at(name);
        const std::string& key = ref.at("tensor").string();
        const auto found = weights_.find(key);
        if (found == weights_.end()) fail("the weights file holds no tensor " + key);
        Stored& stored = found->second;
        Tensor tensor = Tensor::view(stored.data, stored.dtype, stored.shape);
        const bool misplaced = tensor.bytes() && reinterpret_cast<std::uintptr_t>(stored.data) % ITEMSIZE.at(stored.dtype);
        if ((written.erase(key) || misplaced) && tensor.bytes()) {
          own_.push_back(std::make_unique<char[]>(tensor.bytes()));
          std::memcpy(own_.back().get(), stored.data, tensor.bytes());
          stored.data = own_.back().get();
        }
        Sizes shape = stored.shape, strides = contiguous(stored.shape);
        if (const Json* order = ref.find("order")) {
          if (order->list.size() != shape.size()) fail("the order of " + name + " is no permutation of its dims");
          Sizes turned_shape(shape.size()), turned_strides(shape.size());
          for (std::size_t place = 0; place < shape.size(); ++place) {
            const std::int64_t axis = order->list[place].integer();
            if (axis < 0 || axis >= std::int64_t(shape.size())) fail("the order of " + name + " is no permutation of its dims");
            turned_shape[axis] = shape[place];
            turned_strides[axis] = strides[place];
          }
          shape = turned_shape;
          strides = turned_strides;
        }
        handle = library_->over(stored.data, stored.dtype, shape, strides);
      }
      constants[pair.list.at(0).string()] = handle;
    }
  }
  variant.container.open(path, variant.id, stateful ? 1 : concurrency(), constants);
}

// Map the weights file once, copy-on-write: what writes a weight changes this process only.
void Bundle::map_weights() {
  if (map_) return;
  const Json& file = index_.at("weights").at("file");
  const std::string digest = file.at("sha256").string();
  if (!is_digest(digest)) fail("the weights file has no digest");
  Mapped mapped(checked("weights/" + digest + ".safetensors", file), PROT_READ | PROT_WRITE);
  std::uint64_t length = 0;
  if (mapped.size < 8) fail("the weights file is truncated");
  std::memcpy(&length, mapped.data, 8);
  if (length > mapped.size - 8) fail("the weights file is truncated");
  char* const bytes = static_cast<char*>(mapped.data);
  const Json header = Json::parse(std::string(bytes + 8, length));
  const std::int64_t room = std::int64_t(mapped.size - 8 - length);
  for (std::size_t n = 0; n < header.keys.size(); ++n) {
    if (header.keys[n] == "__metadata__") continue;
    const Json& record = header.list[n];
    const auto dtype = SAFETENSORS.find(record.at("dtype").string());
    if (dtype == SAFETENSORS.end()) fail("the weights file has the dtype " + record.at("dtype").string());
    Stored stored{dtype->second, {}, nullptr};
    __int128 wanted = ITEMSIZE.at(stored.dtype);
    for (const Json& size : record.at("shape").list) {
      stored.shape.push_back(size.integer());
      if (stored.shape.back() < 0) fail("the weights file has a size below 0");
      wanted *= stored.shape.back();
    }
    const std::int64_t begin = record.at("data_offsets").list.at(0).integer(), end = record.at("data_offsets").list.at(1).integer();
    if (begin < 0 || end < begin || end > room || end - begin != wanted)
      fail("tensor " + header.keys[n] + " does not lie inside the weights file");
    stored.data = bytes + 8 + length + begin;
    weights_[header.keys[n]] = std::move(stored);
  }
  map_ = mapped.data;
  map_bytes_ = mapped.size;
  mapped.data = nullptr;                             // kept from here on
}

// -------------------------------------------------------------------------------------------------------------- SHA-256

namespace {

alignas(16) const std::uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t turned(std::uint32_t x, int by) { return x >> by | x << (32 - by); }

void rounds(std::uint32_t state[8], const unsigned char* data, std::size_t blocks) {
  for (; blocks--; data += 64) {
    std::uint32_t w[64], s[8];
    for (int n = 0; n < 16; ++n)
      w[n] = std::uint32_t(data[4 * n]) << 24 | data[4 * n + 1] << 16 | data[4 * n + 2] << 8 | data[4 * n + 3];
    for (int n = 16; n < 64; ++n) {
      const std::uint32_t a = w[n - 15], b = w[n - 2];
      w[n] = w[n - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[n - 7] + (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    std::memcpy(s, state, 32);
    for (int n = 0; n < 64; ++n) {
      const std::uint32_t t = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[n] + w[n];
      const std::uint32_t u = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::memmove(s + 1, s, 28);
      s[4] += t;
      s[0] = t + u;
    }
    for (int n = 0; n < 8; ++n) state[n] += s[n];
  }
}

// The same by the CPU's own instructions, five times as fast.
__attribute__((target("sha,sse4.1"))) void rounds_by_cpu(std::uint32_t state[8], const unsigned char* data, std::size_t blocks) {
  const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i t = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<__m128i*>(state)), 0xB1);
  __m128i b = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<__m128i*>(state + 4)), 0x1B);
  __m128i a = _mm_alignr_epi8(t, b, 8);
  b = _mm_blend_epi16(b, t, 0xF0);
  for (; blocks--; data += 64) {
    const __m128i kept_a = a, kept_b = b;
    __m128i w[4];
    for (int n = 0; n < 4; ++n)
      w[n] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * n)), order);
    for (int n = 0; n < 16; ++n) {
      __m128i message = _mm_add_epi32(w[n & 3], _mm_load_si128(reinterpret_cast<const __m128i*>(K + 4 * n)));
      b = _mm_sha256rnds2_epu32(b, a, message);
      if (n < 12) {
        const __m128i next = _mm_add_epi32(_mm_sha256msg1_epu32(w[n & 3], w[(n + 1) & 3]),
                                           _mm_alignr_epi8(w[(n + 3) & 3], w[(n + 2) & 3], 4));
        w[n & 3] = _mm_sha256msg2_epu32(next, w[(n + 3) & 3]);
      }
      message = _mm_shuffle_epi32(message, 0x0E);
      a = _mm_sha256rnds2_epu32(a, b, message);
    }
    a = _mm_add_epi32(a, kept_a);
    b = _mm_add_epi32(b, kept_b);
  }
  t = _mm_shuffle_epi32(a, 0x1B);
  b = _mm_shuffle_epi32(b, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(t, b, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(b, t, 8));
}

bool has_sha() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

}  // namespace

std::string sha256(const void* data, std::size_t size) {
  static const auto step = has_sha() ? rounds_by_cpu : rounds;
  std::uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* bytes = static_cast<const unsigned char*>(data);
  step(state, bytes, size / 64);
  unsigned char tail[128] = {};
  const std::size_t rest = size % 64, end = rest < 56 ? 64 : 128;
  if (rest) std::memcpy(tail, bytes + size - rest, rest);
  tail[rest] = 0x80;
  for (int n = 0; n < 8; ++n) tail[end - 1 - n] = static_cast<unsigned char>(std::uint64_t(size) * 8 >> 8 * n);
  step(state, tail, end / 64);
  std::string text;
  for (std::uint32_t word : state)
    for (int n = 28; n >= 0; n -= 4) text += "0123456789abcdef"[word >> n & 15];
  return text;
}

}  // namespace aotpack
