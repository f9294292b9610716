// Guards: what a compiled variant relies on, as data; they judge a call and say why not, in Python's words.
#pragma once

#include "expression.hpp"
#include "tensor.hpp"

namespace aotpack {

// An argument that is neither a tensor nor a scalar.
struct Other {
  std::string type_name;
};

using CallLeaf = std::variant<TensorMeta, Scalar, Other>;

// One invocation as guards see it.
struct Call {
  std::vector<Json> trees;                           // the containers of each parameter
  std::vector<CallLeaf> leaves;                      // scalars in their canonical form
  std::vector<std::string> state;                    // what surrounds the call and turns it down
};

// A size, or sizes from `low` to `high`, both included.
struct Dim {
  Int low = 0, high = 0;
  bool open = false, fixed = false;                  // without an end; one size

  bool takes(Int size) const { return low <= size && (open || size <= high); }
  std::string words() const;
};

struct Guard {
  enum class Kind { tensor, value, integer } kind = Kind::value;
  std::string path, dtype, device, layout;           // layout "" when `strides` says it
  std::vector<Dim> dims;                             // of an int: one
  std::vector<Expression> strides;
  bool aligned = false, written = false;
  Json value;

  // "" when the leaf fits, else one line; adds the sizes seen to `env`.
  std::string reject(const CallLeaf& leaf, Env& env) const;
};

struct Guards {
  std::vector<Json> trees;
  std::vector<Guard> leaves;
  std::vector<Expression> where;

  bool fixed() const;                                // is every size?
  // "" when the call fits, and then `env` has its sizes; otherwise the first reason against it.
  std::string reject(const Call& call, const std::vector<std::string>& parameters, Env& env) const;
};

}  // namespace aotpack
