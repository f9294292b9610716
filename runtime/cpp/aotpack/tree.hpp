// Containers of arguments and results, as the index writes them: "*" for a leaf, ["list", child, ...], ["dict", [key, ...],
// child, ...], ["class", "pkg.mod:Name", [field, ...], child, ...].
#pragma once

#include "words.hpp"

namespace aotpack {

void check_tree(const Json& tree, int depth = 0);    // Error when it is none
bool is_leaf(const Json& tree);
std::size_t leaf_count(const Json& tree);
bool has_class(const Json& tree);
// Where each leaf sits, in Python's own notation: `q.a`, `q['k'][0]`.
void paths(const Json& tree, const std::string& prefix, std::vector<std::string>& found);
// The first place where two trees differ, "" when they are equal.
std::string difference(const Json& wanted, const Json& found, const std::string& path);

}  // namespace aotpack
