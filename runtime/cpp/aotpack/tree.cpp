#include "tree.hpp"

namespace aotpack {
namespace {

const int MAX_DEPTH = 64;

struct Child {
  std::string suffix;
  const Json* tree;
};

// What stands before the children: the kind, of a class its name, of dicts and classes the names.
std::size_t head_size(const Json& tree) {
  const std::string& kind = tree.list[0].text;
  return kind == "class" ? 3 : kind == "dict" ? 2 : 1;
}

std::vector<Child> children(const Json& tree) {
  std::vector<Child> found;
  if (is_leaf(tree)) return found;
  const std::string& kind = tree.list[0].text;
  const std::size_t head = head_size(tree);
  for (std::size_t n = head; n < tree.list.size(); ++n) {
    const std::string place = std::to_string(n - head);
    const std::string suffix = kind == "class" ? "." + tree.list[2].list[n - head].text
                             : kind == "dict" ? "[" + repr(tree.list[1].list[n - head]) + "]" : "[" + place + "]";
    found.push_back({suffix, &tree.list[n]});
  }
  return found;
}

bool same_head(const Json& a, const Json& b) {
  if (is_leaf(a) || is_leaf(b)) return is_leaf(a) && is_leaf(b);
  if (!(a.list[0] == b.list[0])) return false;
  for (std::size_t n = 1; n < head_size(a); ++n)
    if (!(a.list[n] == b.list[n])) return false;
  return true;
}

std::string said(const Json& tree) {
  if (is_leaf(tree)) return "one value";
  const std::string& kind = tree.list[0].text;
  if (kind == "class") return "an instance of " + tree.list[1].text;
  if (kind != "dict") return kind + " of " + std::to_string(tree.list.size() - 1);
  std::string keys;
  for (const Json& key : tree.list[1].list) keys += (keys.empty() ? "" : ", ") + repr(key);
  return "dict with keys [" + keys + "]";
}

}  // namespace

bool is_leaf(const Json& tree) { return tree.kind == Json::Kind::text; }

void check_tree(const Json& tree, int depth) {
  if (tree.kind == Json::Kind::text && tree.text == "*") return;
  if (depth > MAX_DEPTH || tree.kind != Json::Kind::list || tree.list.empty()) fail("not a tree");
  const std::string& kind = tree.list[0].string();
  if (kind != "tuple" && kind != "list" && kind != "dict" && kind != "class") fail("not a tree: unknown container " + repr(first(kind, 80)));
  const std::size_t head = head_size(tree);
  if (tree.list.size() < head) fail("not a tree: " + kind + " whose names and children do not match");
  if (kind == "class") tree.list[1].string();
  if (head > 1) {
    const auto& names = tree.list[head - 1].items();
    if (names.size() != tree.list.size() - head) fail("not a tree: " + kind + " whose names and children do not match");
    for (const Json& name : names) {
      if (kind == "class") name.string();
      else canonical_scalar(name);
      if (name.kind == Json::Kind::object) fail("not a tree: a dict with a key that is no plain one");
    }
  }
  for (const Child& child : children(tree)) check_tree(*child.tree, depth + 1);
}

std::size_t leaf_count(const Json& tree) {
  if (is_leaf(tree)) return 1;
  std::size_t count = 0;
  for (const Child& child : children(tree)) count += leaf_count(*child.tree);
  return count;
}

bool has_class(const Json& tree) {
  if (is_leaf(tree)) return false;
  if (tree.list[0].text == "class") return true;
  for (const Child& child : children(tree))
    if (has_class(*child.tree)) return true;
  return false;
}

void paths(const Json& tree, const std::string& prefix, std::vector<std::string>& found) {
  if (is_leaf(tree)) found.push_back(prefix);
  for (const Child& child : children(tree)) paths(*child.tree, prefix + child.suffix, found);
}

std::string difference(const Json& wanted, const Json& found, const std::string& path) {
  if (wanted == found) return "";
  const auto left = children(wanted), right = children(found);
  if (same_head(wanted, found) && left.size() == right.size())
    for (std::size_t n = 0; n < left.size(); ++n) {
      const std::string inner = difference(*left[n].tree, *right[n].tree, path + left[n].suffix);
      if (!inner.empty()) return inner;
    }
  return path + ": expected " + said(wanted) + ", got " + said(found);
}

}  // namespace aotpack
