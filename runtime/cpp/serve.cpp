// A sample server: aotpack-serve BUNDLE ENTRY [LIBTORCH] [--device cuda:0] [--base64]
//
// Reads one request a line on stdin, {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}: the arguments by the paths
// that guards have, numbers as nested lists. Writes one line for each: {"results": [{"dtype", "shape", "data"}, ...]},
// or {"error": "..."}. The first line that it writes says how long the start took. On a GPU inputs are brought over and
// results brought back. With --base64 their data are the bytes of memory rather than numbers, which takes 0.2 us each.
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>

#include "aotpack.hpp"

using aotpack::Json;

namespace {

// The shape of nested lists, and their numbers in order.
void flatten(const Json& value, std::vector<std::int64_t>& shape, std::vector<const Json*>& numbers, std::size_t depth = 0) {
  if (value.kind != Json::Kind::list) {
    if (depth != shape.size()) throw aotpack::Error("lists of uneven depths");
    numbers.push_back(&value);
    return;
  }
  if (depth == shape.size() && numbers.empty()) shape.push_back(std::int64_t(value.list.size()));
  if (depth >= shape.size() || shape[depth] != std::int64_t(value.list.size())) throw aotpack::Error("lists of uneven lengths");
  for (const Json& one : value.list) flatten(one, shape, numbers, depth + 1);
}

double number_of(const Json& value) {
  if (value.kind == Json::Kind::boolean) return value.boolean;
  if (value.kind != Json::Kind::number) throw aotpack::Error("expected a number");
  return std::strtod(value.text.c_str(), nullptr);
}

// Floats of two bytes: 5 and 10 bits of exponent and fraction (float16), or 8 and 7 (bfloat16).
struct Short {
  int exponent, fraction;
  int bias() const { return (1 << (exponent - 1)) - 1; }

  double read(std::uint16_t bits) const {
    const int power = bits >> fraction & ((1 << exponent) - 1), rest = bits & ((1 << fraction) - 1);
    const double sign = bits >> 15 ? -1 : 1;
    if (power == (1 << exponent) - 1) return rest ? NAN : sign * INFINITY;
    return sign * std::ldexp(power ? rest + (1 << fraction) : rest, (power ? power : 1) - bias() - fraction);
  }

  std::uint16_t write(double value) const {          // to nearest, ties to even
    const std::uint16_t sign = std::signbit(value) ? 1 << 15 : 0, infinite = ((1 << exponent) - 1) << fraction;
    if (std::isnan(value)) return sign | infinite | 1;
    const int power = value == 0 ? 1 - bias() : std::max(std::isinf(value) ? bias() + 1 : std::ilogb(value), 1 - bias());
    if (power > bias()) return sign | infinite;
    const auto steps = std::int64_t(std::nearbyint(std::ldexp(std::fabs(value), fraction - power)));
    // Steps that fill the next power carry into its exponent.
    const std::int64_t bits = steps + (std::int64_t(power + bias() - 1) << fraction);
    return sign | std::uint16_t(std::min<std::int64_t>(bits, infinite));
  }
};
const Short HALF{5, 10}, BRAIN{8, 7};

// Memory aligned as torch's own is.
using Memory = std::unique_ptr<void, decltype(&std::free)>;

template <typename Number, typename Convert>
void store(Memory& memory, const std::vector<const Json*>& numbers, Convert convert) {
  memory.reset(std::aligned_alloc(64, (numbers.size() * sizeof(Number) / 64 + 1) * 64));
  auto* out = static_cast<Number*>(memory.get());
  for (const Json* one : numbers) *out++ = convert(*one);
}

template <typename Number>
void store_ints(Memory& memory, const std::vector<const Json*>& numbers) {
  store<Number>(memory, numbers, [](const Json& one) {
    const std::int64_t value = one.kind == Json::Kind::boolean ? one.boolean : one.integer();
    if (value < std::numeric_limits<Number>::min() || value > std::numeric_limits<Number>::max())
      throw aotpack::Error(std::to_string(value) + " is outside of its dtype");
    return Number(value);
  });
}

aotpack::Tensor tensor_of(const Json& value, const std::string& dtype, Memory& memory) {
  std::vector<std::int64_t> shape;
  std::vector<const Json*> numbers;
  flatten(value, shape, numbers);
  if (dtype == "float32") store<float>(memory, numbers, number_of);
  else if (dtype == "float64") store<double>(memory, numbers, number_of);
  else if (dtype == "float16") store<std::uint16_t>(memory, numbers, [](const Json& one) { return HALF.write(number_of(one)); });
  else if (dtype == "bfloat16") store<std::uint16_t>(memory, numbers, [](const Json& one) { return BRAIN.write(number_of(one)); });
  else if (dtype == "int64") store_ints<std::int64_t>(memory, numbers);
  else if (dtype == "int32") store_ints<std::int32_t>(memory, numbers);
  else if (dtype == "uint8") store_ints<std::uint8_t>(memory, numbers);
  else if (dtype == "bool") store<std::uint8_t>(memory, numbers, [](const Json& one) { return number_of(one) != 0; });
  else throw aotpack::Error("this server reads no " + dtype);
  return aotpack::Tensor::view(memory.get(), dtype, shape);
}

void append(std::string& out, double number) {
  if (!std::isfinite(number)) {
    out += std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity";
    return;
  }
  char text[32];
  out.append(text, std::to_chars(text, text + sizeof text, number).ptr);
}

void append_element(std::string& out, const aotpack::Tensor& tensor, std::int64_t offset) {
  const std::string& dtype = tensor.dtype;
  if (dtype == "float32") append(out, static_cast<const float*>(tensor.data)[offset]);
  else if (dtype == "float64") append(out, static_cast<const double*>(tensor.data)[offset]);
  else if (dtype == "float16") append(out, HALF.read(static_cast<const std::uint16_t*>(tensor.data)[offset]));
  else if (dtype == "bfloat16") append(out, BRAIN.read(static_cast<const std::uint16_t*>(tensor.data)[offset]));
  else if (dtype == "int64") out += std::to_string(static_cast<const std::int64_t*>(tensor.data)[offset]);
  else if (dtype == "int32") out += std::to_string(static_cast<const std::int32_t*>(tensor.data)[offset]);
  else if (dtype == "bool" || dtype == "uint8") out += std::to_string(static_cast<const std::uint8_t*>(tensor.data)[offset]);
  else throw aotpack::Error("this server writes no " + dtype);
}

void append(std::string& out, const aotpack::Tensor& tensor) {
  out += "{\"dtype\": \"" + tensor.dtype + "\", \"shape\": [";
  std::int64_t count = 1;
  for (std::size_t n = 0; n < tensor.shape.size(); ++n) {
    out += (n ? ", " : "") + std::to_string(tensor.shape[n]);
    count *= tensor.shape[n];
  }
  out += "], \"data\": [";
  for (std::int64_t place = 0; place < count; ++place) {
    std::int64_t rest = place, offset = 0;
    for (std::size_t axis = tensor.shape.size(); axis--;) {
      offset += rest % tensor.shape[axis] * tensor.strides[axis];
      rest /= tensor.shape[axis];
    }
    if (place) out += ", ";
    append_element(out, tensor, offset);
  }
  out += "]}";
}

// The same with the bytes of its elements, row-major.
void append_bytes(std::string& out, const aotpack::Bundle& bundle, const aotpack::Tensor& tensor) {
  static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const aotpack::Tensor dense = bundle.host(tensor);
  const auto* bytes = static_cast<const unsigned char*>(dense.data);
  const std::size_t size = dense.bytes();
  out += "{\"dtype\": \"" + dense.dtype + "\", \"shape\": [";
  for (std::size_t n = 0; n < dense.shape.size(); ++n) out += (n ? ", " : "") + std::to_string(dense.shape[n]);
  out += "], \"data\": \"";
  for (std::size_t at = 0; at < size; at += 3) {
    const std::size_t have = std::min<std::size_t>(3, size - at);
    const unsigned group = bytes[at] << 16 | (have > 1 ? bytes[at + 1] << 8 : 0) | (have > 2 ? bytes[at + 2] : 0);
    for (std::size_t n = 0; n < 4; ++n) out += n <= have ? letters[group >> (18 - 6 * n) & 63] : '=';
  }
  out += "\"}";
}

struct Way {
  bool on_host, base64;
};

std::string answer(const aotpack::Bundle& bundle, aotpack::Entry& entry, const std::string& line, Way way) {
  const Json request = Json::parse(line);
  if (request.kind != Json::Kind::object) throw aotpack::Error("a request is one object");
  const auto wanted = entry.wanted();
  std::vector<Memory> memory;
  std::vector<aotpack::Leaf> leaves;
  std::size_t used = 0;
  for (const auto& [path, dtype, value] : wanted) {
    memory.emplace_back(nullptr, &std::free);
    const Json* given = request.find(path);
    used += given != nullptr;
    if (dtype.empty()) {
      leaves.emplace_back(given ? *given : value);
    } else if (given) {
      const aotpack::Tensor tensor = tensor_of(*given, dtype, memory.back());
      leaves.emplace_back(way.on_host ? tensor : bundle.put(tensor));
    } else {
      throw aotpack::Error("the request has no " + path);
    }
  }
  if (used != request.keys.size()) throw aotpack::Error("the request has more than the arguments of " + entry.name());
  std::string out = "{\"results\": [";
  const char* between = "";
  for (const aotpack::Leaf& leaf : entry.call(leaves)) {
    out += between;
    between = ", ";
    const auto* tensor = std::get_if<aotpack::Tensor>(&leaf);
    if (tensor && tensor->conj) throw aotpack::Error("this server writes no conjugated results");
    if (tensor && way.base64) append_bytes(out, bundle, *tensor);
    else if (tensor) append(out, tensor->device == "cpu" ? *tensor : bundle.host(*tensor));
    else out += "null";
  }
  return out + "]}";
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
  std::vector<std::string> plain;
  std::string device = "cpu";
  bool good = true, base64 = false;
  for (int n = 1; n < count; ++n) {
    const std::string word = words[n];
    if (word == "--base64") base64 = true;
    else if (word != "--device") plain.push_back(word);
    else if (++n < count) device = words[n];
    else good = false;
  }
  if (!good || plain.size() < 2 || plain.size() > 3) {
    std::cerr << "aotpack-serve BUNDLE ENTRY [LIBTORCH] [--device cuda:0] [--base64]\n";
    return 2;
  }
  try {
    const auto start = std::chrono::steady_clock::now();
    const std::string libtorch = plain.size() > 2 ? plain[2] : "";
    auto bundle = aotpack::Bundle::open(plain[0], {.libtorch = libtorch, .device = device, .entries = {plain[1]}});
    aotpack::Entry& entry = bundle->entry(plain[1]);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::cout << "{\"ready\": " << quoted(entry.name()) << ", \"open_s\": " << took.count() << "}" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      try {
        std::cout << answer(*bundle, entry, line, {device == "cpu", base64}) << std::endl;
      } catch (const std::exception& error) {
        std::cout << "{\"error\": " << quoted(error.what()) << "}" << std::endl;
      }
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
