#include "expression.hpp"

#include <algorithm>
#include <cctype>

namespace aotpack {
namespace {

const std::size_t MAX_TEXT = 4096;
const int MAX_DEPTH = 128;                           // of Python's tree of it: names are two deep, each step one more
const int MAX_PARENTHESES = 150;

bool letter(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c < 0; }
bool part_of_name(char c) { return letter(c) || std::isdigit(static_cast<unsigned char>(c)); }

[[noreturn]] void overflow() { fail("a number leaves 128 bits"); }
Int add(Int a, Int b) {
  Int sum;
  if (__builtin_add_overflow(a, b, &sum)) overflow();
  return sum;
}
Int subtract(Int a, Int b) {
  Int difference;
  if (__builtin_sub_overflow(a, b, &difference)) overflow();
  return difference;
}
Int multiply(Int a, Int b) {
  Int product;
  if (__builtin_mul_overflow(a, b, &product)) overflow();
  return product;
}
Int floored(Int a, Int b) {
  if (b == 0) throw DividedByZero("a divisor is 0");
  if (b == -1) return subtract(0, a);
  const Int quotient = a / b;
  return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

}  // namespace

// Python's own grammar, of the operators that expressions have.
class ExpressionParser {
 public:
  explicit ExpressionParser(const std::string& text) : text_(text) {}

  Expression whole() {
    if (text_.size() > MAX_TEXT) stop();
    Expression made;
    made.text_ = text_;
    made.evaluate_ = disjunction().value;
    made.names_ = std::move(names_);
    if (!token().empty()) stop();
    return made;
  }

 private:
  using Fn = std::function<Int(const Env&)>;
  struct Node {
    Fn value;
    int depth;
  };

  Node over(int depth, Fn value) const {
    if (depth + 1 > MAX_DEPTH) stop();
    return {std::move(value), depth + 1};
  }

  Node disjunction() { return chain("or", &ExpressionParser::conjunction, true); }
  Node conjunction() { return chain("and", &ExpressionParser::negation, false); }

  Node chain(const char* word, Node (ExpressionParser::*term)(), bool until) {
    std::vector<Fn> terms;
    int depth = 0;
    do {
      Node next = (this->*term)();
      terms.push_back(std::move(next.value));
      depth = std::max(depth, next.depth);
    } while (take(word));
    if (terms.size() == 1) return {terms[0], depth};
    return over(depth, [terms, until](const Env& env) {
      for (const Fn& each : terms)
        if (bool(each(env)) == until) return Int(until);
      return Int(!until);
    });
  }

  Node negation() {
    if (!take("not")) return comparison();
    const Nesting nesting(*this);
    const Node inner = negation();
    return over(inner.depth, [inner = inner.value](const Env& env) { return Int(!inner(env)); });
  }

  Node comparison() {
    Node left = sum();
    std::vector<Fn> terms = {left.value};
    std::vector<std::string> tests;
    int depth = left.depth;
    for (;;) {
      const std::string found = token();
      if (found != "==" && found != "!=" && found != "<" && found != "<=" && found != ">" && found != ">=") break;
      take(found);
      tests.push_back(found);
      Node right = sum();
      depth = std::max(depth, right.depth);
      terms.push_back(std::move(right.value));
    }
    if (tests.empty()) return left;
    return over(depth, [terms, tests](const Env& env) {
      Int left = terms[0](env);
      for (std::size_t n = 0; n < tests.size(); ++n) {
        const Int right = terms[n + 1](env);
        const std::string& t = tests[n];
        const bool holds = t == "==" ? left == right : t == "!=" ? left != right : t == "<" ? left < right
                         : t == "<=" ? left <= right : t == ">" ? left > right : left >= right;
        if (!holds) return Int(0);
        left = right;
      }
      return Int(1);
    });
  }

  Node sum() {
    Node left = product();
    for (;;) {
      const bool plus = take("+");
      if (!plus && !take("-")) return left;
      const Node right = product();
      left = over(std::max(left.depth, right.depth), [a = left.value, b = right.value, plus](const Env& env) {
        const Int x = a(env), y = b(env);
        return plus ? add(x, y) : subtract(x, y);
      });
    }
  }

  Node product() {
    Node left = unary();
    for (;;) {
      const std::string op = token();
      if (op != "*" && op != "//" && op != "%") return left;
      take(op);
      const Node right = unary();
      left = over(std::max(left.depth, right.depth), [a = left.value, b = right.value, op](const Env& env) {
        const Int x = a(env), y = b(env);
        if (op == "*") return multiply(x, y);
        const Int quotient = floored(x, y);
        return op == "%" ? subtract(x, multiply(y, quotient)) : quotient;
      });
    }
  }

  Node unary() {
    if (!take("-")) return atom();
    const Nesting nesting(*this);
    const Node inner = unary();
    return over(inner.depth, [inner = inner.value](const Env& env) { return subtract(0, inner(env)); });
  }

  Node atom() {
    if (take("(")) {
      const Nesting nesting(*this);
      Node inner = disjunction();
      need(")");
      return inner;
    }
    const std::string found = token();
    if (found.empty()) stop();
    if (std::isdigit(static_cast<unsigned char>(found[0]))) return number(found);
    if (found == "True" || found == "False") {
      take(found);
      return {[value = Int(found == "True")](const Env&) { return value; }, 1};
    }
    if (!letter(found[0])) stop();
    take(found);
    return token() == "(" ? function(found) : size(found);
  }

  Node number(const std::string& digits) {
    take(digits);
    const bool plain = digits.find_first_not_of("0123456789") == std::string::npos && (digits[0] != '0' || digits.size() == 1);
    if (!plain || digits.size() > 38) stop();
    return {[value = saturated(digits)](const Env&) { return value; }, 1};
  }

  Node size(const std::string& start) {
    int depth = 2;
    const std::string name = start + rest_of_name(depth);
    names_.insert(name);
    return over(depth - 1, [name](const Env& env) {
      const auto place = env.find(name);
      if (place == env.end()) fail(name + " is no size of the call");
      return place->second;
    });
  }

  Node function(const std::string& name) {
    need("(");
    const Nesting nesting(*this);
    std::vector<Fn> terms;
    int depth = 2;
    do {
      Node term = disjunction();
      depth = std::max(depth, term.depth);
      terms.push_back(std::move(term.value));
    } while (take(","));
    need(")");
    const bool least = name == "min", most = name == "max";
    if ((!least && !most && name != "ceil_div") || terms.size() < 2 || (name == "ceil_div" && terms.size() > 2)) stop();
    return over(depth, [terms, least, most](const Env& env) {
      Int value = terms[0](env);
      if (!least && !most) {
        const Int by = terms[1](env);
        return subtract(0, floored(subtract(0, value), by));
      }
      for (std::size_t n = 1; n < terms.size(); ++n) {
        const Int other = terms[n](env);
        value = least ? std::min(value, other) : std::max(value, other);
      }
      return value;
    });
  }

  // `.shape[0]`, `['a'][1]`: kept as they are written, which is how paths are written too.
  std::string rest_of_name(int& depth) {
    const std::size_t start = at_;
    for (;; ++depth) {
      if (at_ < text_.size() && text_[at_] == '.') {
        ++at_;
        while (at_ < text_.size() && part_of_name(text_[at_])) ++at_;
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

  // The next token, without taking it.
  std::string token() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    if (at_ >= text_.size()) return "";
    std::size_t end = at_ + 1;
    if (part_of_name(text_[at_])) {
      while (end < text_.size() && part_of_name(text_[end])) ++end;
    } else {
      for (const char* each : {"==", "!=", "<=", ">=", "//"})
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
  [[noreturn]] void stop() const { fail(repr(first(text_, 200)) + " is not an expression that a bundle has"); }

  // Open parentheses and signs: each takes frames of this parser.
  struct Nesting {
    explicit Nesting(ExpressionParser& parser) : of(parser) {
      if (++of.open_ > MAX_PARENTHESES) of.stop();
    }
    ~Nesting() { --of.open_; }
    ExpressionParser& of;
  };

  const std::string text_;
  std::size_t at_ = 0;
  int open_ = 0;
  std::set<std::string> names_;
};

Expression Expression::parse(const std::string& text) { return ExpressionParser(text).whole(); }

}  // namespace aotpack
