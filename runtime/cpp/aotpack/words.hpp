// Values in the words of Python's runtime, whose reasons these are.
#pragma once

#include "../aotpack.hpp"

namespace aotpack {

using Sizes = std::vector<std::int64_t>;
using Int = __int128;                                // what is computed from sizes of 64 bits

[[noreturn]] void fail(const std::string& text);     // an Error, its text readable

// One line of UTF-8: what is neither, or no character to be seen, as \x1b.
std::string readable(const std::string& text);
// The first byte after `from` that is not UTF-8, the size of the text when there is none.
std::size_t not_utf8(const std::string& text, std::size_t from);

std::string text_of(Int value);
std::string words(const Sizes& sizes);               // [2, 3]
std::string words(const std::vector<Int>& sizes);
std::string repr(const std::string& text);           // 'it'
std::string repr(const Json& scalar);                // 3, True, 1.5, 'it', None
std::string first(const std::string& text, std::size_t most);   // its beginning, cut between characters

// An int of any length; what has more than 126 bits is as large as that.
Int saturated(const std::string& digits);
// A scalar in the one form that its value has: equal exactly when type and value are. Error for what is none.
Json canonical_scalar(const Json& value);

}  // namespace aotpack
