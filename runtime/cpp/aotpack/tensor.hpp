// Tensors as guards see them: dtypes, layouts, and what of a caller's tensor no compiled code may see.
#pragma once

#include <map>

#include "words.hpp"

namespace aotpack {

extern const std::map<std::string, int> ITEMSIZE;    // torch's name of a dtype -> bytes of an element

Sizes contiguous(const Sizes& shape);                // row-major strides; INT64_MAX for those that have more bits
Sizes channels_last(const Sizes& shape);
bool is_empty(const Sizes& shape);

// `strides` with those that mean nothing, of dims of 1 and of no elements, made ordinary.
Sizes row_major(const Sizes& shape, const Sizes& strides);

// From the first byte of a tensor to the one after the last, seen from its address; Error where that has more than 64
// bits.
struct Span {
  std::int64_t start = 0, stop = 0;
};
Span span_of(const std::string& dtype, const Sizes& shape, const Sizes& strides);

// What guards ask of a tensor. `odd` says why no compiled code may see it.
struct TensorMeta {
  std::string dtype, device = "cpu", odd;
  Sizes shape, strides;
  int offset = 0;                                    // its address modulo 16
  bool needs_grad = false, shared = false, locked = false;
};

// The tensor of a caller for a bundle on `device`. Its memory is not looked into.
TensorMeta describe(const Tensor& tensor, const std::string& device);

}  // namespace aotpack
