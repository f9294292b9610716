#include "tensor.hpp"

#include <algorithm>

namespace aotpack {

const std::map<std::string, int> ITEMSIZE = {
    {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"int16", 2}, {"int32", 4}, {"int64", 8}, {"uint16", 2}, {"uint32", 4},
    {"uint64", 8}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4},
    {"float64", 8}, {"complex64", 8}, {"complex128", 16}};

namespace {

std::int64_t narrow(Int value) { return std::int64_t(std::clamp<Int>(value, INT64_MIN, INT64_MAX)); }

std::string odd_of(const Tensor& tensor, const std::string& device) {
  if (!ITEMSIZE.count(tensor.dtype)) return "has elements of " + first(tensor.dtype, 40);
  if (tensor.strides.size() != tensor.shape.size())
    return "has " + std::to_string(tensor.strides.size()) + " strides for " + std::to_string(tensor.shape.size()) + " dims";
  for (const std::int64_t size : tensor.shape)
    if (size < 0) return "has a size below 0: " + words(tensor.shape);
  if (tensor.device != "cpu" && device != "cpu" && tensor.device != device)
    return "is on " + first(tensor.device, 40) + ", the session is for " + device;
  if (is_empty(tensor.shape)) return "";
  if (!tensor.data) return "has elements at address 0";
  const int item = ITEMSIZE.at(tensor.dtype);
  if (const auto offset = reinterpret_cast<std::uintptr_t>(tensor.data) % 16; offset % item)
    return "lies " + std::to_string(offset) + " bytes past an address divisible by 16, which is not between its elements of " +
           std::to_string(item);
  if (tensor.conj) return "has its conj bit set";
  try {
    const Span span = span_of(tensor.dtype, tensor.shape, tensor.strides);
    const auto address = reinterpret_cast<std::intptr_t>(tensor.data);
    std::intptr_t end;
    if (__builtin_add_overflow(address, span.start, &end) || __builtin_add_overflow(address, span.stop, &end))
      return "reaches beyond the memory of any process";
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

Sizes contiguous(const Sizes& shape) {
  Sizes strides(shape.size(), 1);
  for (int axis = int(shape.size()) - 2; axis >= 0; --axis)
    strides[axis] = narrow(Int(strides[axis + 1]) * std::max<std::int64_t>(shape[axis + 1], 1));
  return strides;
}

Sizes channels_last(const Sizes& shape) {
  std::vector<std::size_t> order = {0};
  for (std::size_t axis = 2; axis < shape.size(); ++axis) order.push_back(axis);
  order.push_back(1);
  Sizes sorted;
  for (const std::size_t axis : order) sorted.push_back(shape[axis]);
  const Sizes packed = contiguous(sorted);
  Sizes strides(shape.size(), 0);
  for (std::size_t place = 0; place < order.size(); ++place) strides[order[place]] = packed[place];
  return strides;
}

bool is_empty(const Sizes& shape) { return std::count(shape.begin(), shape.end(), 0) > 0; }

Sizes row_major(const Sizes& shape, const Sizes& strides) {
  Sizes made = contiguous(shape);
  for (std::size_t axis = 0; axis < shape.size() && !is_empty(shape); ++axis)
    if (shape[axis] != 1) made[axis] = strides[axis];
  return made;
}

Span span_of(const std::string& dtype, const Sizes& shape, const Sizes& strides) {
  if (is_empty(shape)) return {};
  const int item = ITEMSIZE.at(dtype);
  Int low = 0, high = 0;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    const Int reach = Int(shape[axis] - 1) * strides[axis];   // of 126 bits at most
    (reach < 0 ? low : high) += reach;
    if (low < INT64_MIN / 16 || high > INT64_MAX / 16 - 16) fail("reaches beyond the memory of any process");
  }
  return {std::int64_t(low * item), std::int64_t((high + 1) * item)};
}

Tensor Tensor::view(void* data, std::string dtype, std::vector<std::int64_t> shape, std::string device) {
  Tensor tensor;
  tensor.data = data;
  tensor.dtype = std::move(dtype);
  tensor.strides = contiguous(shape);
  tensor.shape = std::move(shape);
  tensor.device = std::move(device);
  return tensor;
}

std::size_t Tensor::bytes() const {
  const auto item = ITEMSIZE.find(dtype);
  if (item == ITEMSIZE.end()) fail("there is no dtype " + first(dtype, 40));
  if (is_empty(shape)) return 0;
  std::size_t count = item->second;
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, std::size_t(size), &count)) fail("there is no tensor of the sizes " + words(shape));
  return count;
}

TensorMeta describe(const Tensor& tensor, const std::string& device) {
  TensorMeta meta;
  meta.dtype = tensor.dtype;
  meta.device = tensor.device;
  meta.shape = tensor.shape;
  meta.strides = tensor.strides;
  meta.locked = tensor.read_only;
  meta.odd = odd_of(tensor, device);
  if (meta.odd.empty() && !is_empty(tensor.shape)) meta.offset = int(reinterpret_cast<std::uintptr_t>(tensor.data) % 16);
  return meta;
}

}  // namespace aotpack
