// JSON as Python's json reads it, with a key given twice refused, and nothing but UTF-8.
#include <cctype>
#include <cstring>
#include <set>

#include "words.hpp"

namespace aotpack {
namespace {

const int MAX_DEPTH = 900;                           // Python's own limit is near 1000
const std::size_t MAX_DIGITS = 4300;                 // of an int, sys.int_info.default_max_str_digits

bool digit(char c) { return c >= '0' && c <= '9'; }

class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : text_(text) {}

  Json whole() {
    at_ = not_utf8(text_, 0);
    if (at_ != text_.size()) stop("not UTF-8");
    at_ = 0;
    Json value = one(0);
    space();
    if (at_ != text_.size()) stop("something follows the end");
    return value;
  }

 private:
  Json one(int depth) {
    if (depth > MAX_DEPTH) stop("nested too deeply");
    space();
    Json value;
    switch (peek()) {
      case '{': object(value, depth); return value;
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
    value.text = number();
    return value;
  }

  void object(Json& value, int depth) {
    value.kind = Json::Kind::object;
    ++at_;
    std::set<std::string> seen;
    for (bool first = true; !ends('}'); first = false) {
      if (!first) expect(',');
      space();
      std::string key = string();
      if (!seen.insert(key).second) stop("key given twice: " + aotpack::first(key, 80));
      space();
      expect(':');
      value.keys.push_back(std::move(key));
      value.list.push_back(one(depth + 1));
    }
  }

  std::string number() {
    const std::size_t start = at_;
    if (peek() == '-') ++at_;
    if (!digit(peek())) stop("not a value");
    if (peek() == '0') ++at_;
    else digits();
    const bool is_int = peek() != '.' && peek() != 'e' && peek() != 'E';
    if (is_int && at_ - start > MAX_DIGITS) stop("an int of too many digits");
    if (peek() == '.') {
      ++at_;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      digits();
    }
    return text_.substr(start, at_ - start);
  }

  void digits() {
    if (!digit(peek())) stop("expected a digit");
    while (digit(peek())) ++at_;
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
        case 'u': utf8(out, code_point()); break;
        default: stop("an unknown escape");
      }
    }
  }

  // After \u: its number, of a pair of surrogates the one that they say; one alone stands for itself, as in Python.
  std::uint32_t code_point() {
    const std::uint32_t code = hex();
    if (code < 0xD800 || code >= 0xDC00 || text_.compare(at_, 2, "\\u") != 0) return code;
    const std::size_t before = at_;
    at_ += 2;
    const std::uint32_t low = hex();
    if (low >= 0xDC00 && low < 0xE000) return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    at_ = before;
    return code;
  }

  static void utf8(std::string& out, std::uint32_t code) {
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const int lead[] = {0, 0xC0, 0xE0, 0xF0};
    out += char(lead[more] | code >> 6 * more);
    for (int n = more - 1; n >= 0; --n) out += char(0x80 | (code >> 6 * n & 0x3F));
  }

  std::uint32_t hex() {
    std::uint32_t code = 0;
    for (int n = 0; n < 4; ++n) {
      const char c = next();
      if (!std::isxdigit(static_cast<unsigned char>(c))) stop("a bad escape");
      code = code * 16 + (digit(c) ? c - '0' : std::tolower(c) - 'a' + 10);
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
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\r' || text_[at_] == '\n')) ++at_;
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

Json Json::number(std::int64_t value) {
  Json made;
  made.kind = Kind::number;
  made.text = std::to_string(value);
  return made;
}

const Json* Json::find(const std::string& key) const {
  for (std::size_t n = 0; n < keys.size(); ++n)
    if (keys[n] == key) return &list[n];
  return nullptr;
}

const Json& Json::at(const std::string& key) const {
  if (kind != Kind::object) fail("expected an object with " + key);
  const Json* found = find(key);
  if (!found) fail("missing key " + repr(key));
  return *found;
}

const std::vector<Json>& Json::items() const {
  if (kind != Kind::list) fail("expected a list");
  return list;
}

std::int64_t Json::integer() const {
  if (kind != Kind::number || text.find_first_of(".eE") != std::string::npos) fail("expected an int");
  const Int value = saturated(text);
  if (value > INT64_MAX || value < INT64_MIN) fail(first(text, 40) + " has more than 64 bits");
  return std::int64_t(value);
}

const std::string& Json::string() const {
  if (kind != Kind::text) fail("expected a text");
  return text;
}

bool Json::operator==(const Json& other) const {
  return kind == other.kind && boolean == other.boolean && text == other.text && keys == other.keys && list == other.list;
}

}  // namespace aotpack
