// A small integer language over sizes, as the bundle writes it: `x.shape[0] % 100 == 0`.
#pragma once

#include <functional>
#include <map>
#include <set>

#include "words.hpp"

namespace aotpack {

using Env = std::map<std::string, Int>;

// A divisor is 0.
struct DividedByZero : Error {
  using Error::Error;
};

class Expression {
 public:
  static Expression parse(const std::string& text);  // Error with the text that is none
  // Its value; comparisons give 0 or 1. DividedByZero, or Error when a number leaves 128 bits.
  Int operator()(const Env& env) const { return evaluate_(env); }
  const std::string& text() const { return text_; }
  const std::set<std::string>& names() const { return names_; }

 private:
  friend class ExpressionParser;
  std::string text_;
  std::set<std::string> names_;                      // the sizes that it reads
  std::function<Int(const Env&)> evaluate_;
};

}  // namespace aotpack
