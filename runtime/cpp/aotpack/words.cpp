#include "words.hpp"

#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace aotpack {

void fail(const std::string& text) { throw Error(readable(text)); }

std::string readable(const std::string& text) {
  std::string out;
  std::size_t wrong = not_utf8(text, 0);
  for (std::size_t at = 0; at < text.size(); ++at) {
    char escaped[8];
    const auto c = static_cast<unsigned char>(text[at]);
    if (at == wrong || c < 0x20 || c == 0x7f) std::snprintf(escaped, sizeof escaped, "\\x%02x", c), out += escaped;
    else out += text[at];
    if (at == wrong) wrong = not_utf8(text, at + 1);
  }
  return out;
}

std::size_t not_utf8(const std::string& text, std::size_t from) {
  for (std::size_t at = from; at < text.size();) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const int more = lead < 0x80 ? 0 : lead >= 0xC2 && lead < 0xE0 ? 1 : lead >= 0xE0 && lead < 0xF0 ? 2 : lead >= 0xF0 && lead < 0xF5 ? 3 : -1;
    if (more < 0 || at + more >= text.size()) return at;
    for (int n = 1; n <= more; ++n)
      if ((text[at + n] & 0xC0) != 0x80) return at;
    const auto second = static_cast<unsigned char>(more ? text[at + 1] : 0);
    // Overlong forms, surrogates, and what is past the last code point.
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
        (lead == 0xF4 && second > 0x8F))
      return at;
    at += more + 1;
  }
  return text.size();
}

std::string text_of(Int value) {
  if (!value) return "0";
  std::string digits;
  for (unsigned __int128 rest = value < 0 ? -static_cast<unsigned __int128>(value) : value; rest; rest /= 10)
    digits.insert(digits.begin(), char('0' + int(rest % 10)));
  return value < 0 ? "-" + digits : digits;
}

namespace {

template <typename Numbers>
std::string listed(const Numbers& numbers) {
  std::string text = "[";
  for (std::size_t n = 0; n < numbers.size(); ++n) text += (n ? ", " : "") + text_of(numbers[n]);
  return text + "]";
}

// As Python writes a float: the shortest text that reads back as the same one.
std::string repr_float(double value, const char* whole = ".0") {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const double size = std::fabs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, end.ptr);
  return plain && text.find('.') == std::string::npos ? text + whole : text;
}

// Python's float.fromhex; what is no float is an Error.
double from_hex(const std::string& text) {
  std::string rest = text;
  const bool negative = !rest.empty() && rest[0] == '-';
  if (negative || (!rest.empty() && rest[0] == '+')) rest.erase(0, 1);
  double value = 0;
  if (rest == "inf") value = INFINITY;
  else if (rest == "nan") return NAN;
  else {
    char* end = nullptr;
    const bool hex = rest.rfind("0x", 0) == 0 && rest.find_first_not_of("0123456789abcdefx.p+-") == std::string::npos;
    value = hex ? std::strtod(rest.c_str(), &end) : 0;
    if (!hex || *end || end == rest.c_str() || std::isinf(value)) fail(first(text, 40) + " is no float in hex");
  }
  return negative ? -value : value;
}

std::string to_hex(double value) {
  if (std::isnan(value)) return "nan";
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%016llx", static_cast<unsigned long long>(std::bit_cast<std::uint64_t>(value)));
  return buffer;
}

double from_canonical(const std::string& bits) {
  return bits == "nan" ? NAN : std::bit_cast<double>(std::uint64_t(std::strtoull(bits.c_str(), nullptr, 16)));
}

}  // namespace

std::string words(const Sizes& sizes) { return listed(sizes); }
std::string words(const std::vector<Int>& sizes) { return listed(sizes); }

std::string repr(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    char escaped[8];
    if (c == quote || c == '\\') out += {'\\', c};
    else if (c == '\n') out += "\\n";
    else if (c == '\r') out += "\\r";
    else if (c == '\t') out += "\\t";
    else if ((c >= 0 && c < 0x20) || c == 0x7f) std::snprintf(escaped, sizeof escaped, "\\x%02x", c), out += escaped;
    else out += c;
  }
  return out + quote;
}

// Of canonical scalars.
std::string repr(const Json& scalar) {
  switch (scalar.kind) {
    case Json::Kind::null: return "None";
    case Json::Kind::boolean: return scalar.boolean ? "True" : "False";
    case Json::Kind::text: return repr(scalar.text);
    case Json::Kind::number: {
      const std::size_t digits = scalar.text.size();  // Python's runtime spells none of more than 256 bits, 77 digits
      return digits > 78 ? "an int of " + std::to_string(digits) + " digits" : scalar.text;
    }
    default: break;
  }
  if (const Json* real = scalar.find("float")) return repr_float(from_canonical(real->text));
  const auto& parts = scalar.at("complex").list;
  const double real = from_canonical(parts[0].text), imaginary = from_canonical(parts[1].text);
  const std::string end = repr_float(imaginary, "") + "j";
  if (real == 0 && !std::signbit(real)) return end;
  return "(" + repr_float(real, "") + (end[0] == '-' ? "" : "+") + end + ")";
}

std::string first(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most && (text[most] & 0xC0) == 0x80) --most;
  return text.substr(0, most);
}

Int saturated(const std::string& digits) {
  const Int most = Int(1) << 126;
  const bool negative = digits[0] == '-';
  Int value = 0;
  for (std::size_t n = negative; n < digits.size(); ++n) {
    value = value * 10 + (digits[n] - '0');
    if (value > most) {
      value = most;
      break;
    }
  }
  return negative ? -value : value;
}

Json canonical_scalar(const Json& value) {
  const auto float_of = [](const Json& text) {
    Json made;
    made.kind = Json::Kind::text;
    made.text = to_hex(from_hex(text.string()));
    return made;
  };
  Json made = value;
  switch (value.kind) {
    case Json::Kind::number:
      if (value.text.find_first_of(".eE") != std::string::npos) fail(first(value.text, 80) + ": a float is written {\"float\": hex}");
      if (value.text == "-0") made.text = "0";
      return made;
    case Json::Kind::object:
      if (const Json* text = value.find("float"); text && value.keys.size() == 1) {
        made.list[0] = float_of(*text);
        return made;
      }
      if (const Json* parts = value.find("complex"); parts && value.keys.size() == 1 && parts->items().size() == 2) {
        for (Json& part : made.list[0].list) part = float_of(part);
        return made;
      }
      break;
    case Json::Kind::list: break;
    default: return made;
  }
  fail("not a scalar");
}

}  // namespace aotpack
