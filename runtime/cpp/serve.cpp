// A sample server: aotpack-serve BUNDLE ENTRY [LIBTORCH]
//
// Reads one request a line on stdin, {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}: the arguments by the paths
// that guards have, numbers as nested lists. Writes one line for each: {"results": [{"dtype", "shape", "data"}, ...]},
// or {"error": "..."}. The first line that it writes says how long the start took.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "aotpack.hpp"

using aotpack::Json;

namespace {

// The shape of nested lists, and their numbers in order.
void flatten(const Json& value, std::vector<std::int64_t>& shape, std::vector<const Json*>& numbers, std::size_t depth = 0) {
  if (value.kind != Json::Kind::list) {
    numbers.push_back(&value);
    return;
  }
  if (depth == shape.size() && numbers.empty()) shape.push_back(std::int64_t(value.list.size()));
  if (depth >= shape.size() || shape[depth] != std::int64_t(value.list.size())) throw aotpack::Error("lists of uneven lengths");
  for (const Json& one : value.list) flatten(one, shape, numbers, depth + 1);
}

// Memory aligned as torch's own is.
using Memory = std::unique_ptr<void, decltype(&std::free)>;

template <typename Number>
Number* room(Memory& memory, std::size_t count) {
  memory.reset(std::aligned_alloc(64, (count * sizeof(Number) / 64 + 1) * 64));
  return static_cast<Number*>(memory.get());
}

template <typename Number>
void store(Memory& memory, const std::vector<const Json*>& numbers) {
  Number* out = room<Number>(memory, numbers.size());
  for (const Json* one : numbers) {
    if (one->kind == Json::Kind::boolean) *out++ = Number(one->boolean);
    else *out++ = Number(std::is_integral_v<Number> ? double(one->integer()) : std::stod(one->text));
  }
}

template <>
void store<std::int64_t>(Memory& memory, const std::vector<const Json*>& numbers) {
  auto* out = room<std::int64_t>(memory, numbers.size());
  for (const Json* one : numbers) *out++ = one->integer();
}

aotpack::Tensor tensor_of(const Json& value, const std::string& dtype, Memory& memory) {
  std::vector<std::int64_t> shape;
  std::vector<const Json*> numbers;
  flatten(value, shape, numbers);
  if (dtype == "float32") store<float>(memory, numbers);
  else if (dtype == "float64") store<double>(memory, numbers);
  else if (dtype == "int64") store<std::int64_t>(memory, numbers);
  else if (dtype == "int32") store<std::int32_t>(memory, numbers);
  else if (dtype == "bool" || dtype == "uint8") store<std::uint8_t>(memory, numbers);
  else throw aotpack::Error("this server reads no " + dtype);
  return aotpack::Tensor::view(memory.get(), dtype, shape);
}

void write(std::ostream& out, const aotpack::Tensor& tensor) {
  out << "{\"dtype\": \"" << tensor.dtype << "\", \"shape\": [";
  std::int64_t count = 1;
  for (std::size_t n = 0; n < tensor.shape.size(); ++n) out << (n ? ", " : "") << tensor.shape[n], count *= tensor.shape[n];
  out << "], \"data\": [";
  out.precision(17);
  for (std::int64_t place = 0; place < count; ++place) {
    std::int64_t rest = place, offset = 0;
    for (std::size_t axis = tensor.shape.size(); axis--;) {
      offset += rest % tensor.shape[axis] * tensor.strides[axis];
      rest /= tensor.shape[axis];
    }
    if (place) out << ", ";
    double number = 0;
    if (tensor.dtype == "float32") number = static_cast<const float*>(tensor.data)[offset];
    else if (tensor.dtype == "float64") number = static_cast<const double*>(tensor.data)[offset];
    else if (tensor.dtype == "int64") { out << static_cast<const std::int64_t*>(tensor.data)[offset]; continue; }
    else if (tensor.dtype == "bool") { out << int(static_cast<const char*>(tensor.data)[offset]); continue; }
    else throw aotpack::Error("this server writes no " + tensor.dtype);
    if (std::isfinite(number)) out << number;
    else out << (std::isnan(number) ? "NaN" : number > 0 ? "Infinity" : "-Infinity");
  }
  out << "]}";
}

std::string answer(aotpack::Entry& entry, const std::string& line) {
  std::ostringstream out;
  const Json request = Json::parse(line);
  const auto wanted = entry.wanted();
  std::vector<Memory> memory;
  std::vector<aotpack::Leaf> leaves;
  for (std::size_t n = 0; n < wanted.size(); ++n) {
    memory.emplace_back(nullptr, &std::free);
    const Json* given = request.find(wanted[n].path);
    if (wanted[n].dtype.empty()) leaves.emplace_back(given ? *given : wanted[n].value);
    else if (given) leaves.emplace_back(tensor_of(*given, wanted[n].dtype, memory[n]));
    else throw aotpack::Error("the request has no " + wanted[n].path);
  }
  out << "{\"results\": [";
  const char* between = "";
  for (const aotpack::Leaf& leaf : entry.call(leaves)) {
    out << between;
    between = ", ";
    if (const auto* tensor = std::get_if<aotpack::Tensor>(&leaf)) write(out, *tensor);
    else out << "null";
  }
  out << "]}";
  return out.str();
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
  if (count < 3) {
    std::cerr << "aotpack-serve BUNDLE ENTRY [LIBTORCH]\n";
    return 2;
  }
  try {
    const auto start = std::chrono::steady_clock::now();
    auto bundle = aotpack::Bundle::open(words[1], {.libtorch = count > 3 ? words[3] : ""});
    aotpack::Entry& entry = bundle->entry(words[2]);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::cout << "{\"ready\": " << quoted(entry.name()) << ", \"open_s\": " << took.count() << "}" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      try {
        std::cout << answer(entry, line) << std::endl;
      } catch (const std::exception& error) {
        std::cout << "{\"error\": " << quoted(error.what()) << "}" << std::endl;
      }
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
