#include "guards.hpp"

#include "tree.hpp"

namespace aotpack {
namespace {

std::string described(const CallLeaf& leaf) {
  if (const auto* tensor = std::get_if<TensorMeta>(&leaf)) return "a " + tensor->dtype + words(tensor->shape) + " tensor";
  if (const auto* other = std::get_if<Other>(&leaf)) return other->type_name;
  return repr(std::get<Scalar>(leaf));
}

// The stride of a dim of 1, or of no elements, means nothing.
bool same_layout(const Sizes& shape, const Sizes& strides, const std::vector<Int>& wanted) {
  if (is_empty(shape)) return true;
  for (std::size_t axis = 0; axis < shape.size(); ++axis)
    if (shape[axis] != 1 && strides[axis] != wanted[axis]) return false;
  return true;
}

std::string reject_layout(const Guard& guard, const TensorMeta& leaf, const Env& env) {
  if (guard.layout == "any") return "";
  std::vector<Int> wanted;
  if (guard.layout.empty()) {
    for (const Expression& stride : guard.strides) wanted.push_back(stride(env));
  } else {
    for (const std::int64_t step : guard.layout == "contiguous" ? contiguous(leaf.shape) : channels_last(leaf.shape)) wanted.push_back(step);
  }
  if (same_layout(leaf.shape, leaf.strides, wanted)) return "";
  const std::string name = guard.layout.empty() ? "exact" : guard.layout;
  return guard.path + ": expected " + name + " strides " + words(wanted) + ", got " + words(leaf.strides);
}

std::string reject_tensor(const Guard& guard, const TensorMeta& leaf, Env& env) {
  if (!leaf.odd.empty()) return guard.path + " " + leaf.odd;
  if (leaf.dtype != guard.dtype) return guard.path + ".dtype: expected " + guard.dtype + ", got " + leaf.dtype;
  if (leaf.shape.size() != guard.dims.size())
    return guard.path + ": expected " + std::to_string(guard.dims.size()) + " dims, got " + std::to_string(leaf.shape.size()) + " " +
           words(leaf.shape);
  if (leaf.device.substr(0, leaf.device.find(':')) != guard.device)
    return guard.path + ".device: expected " + guard.device + ", got " + leaf.device;
  if (leaf.needs_grad) return guard.path + " requires grad and grad mode is on; a compiled variant records no gradients";
  for (std::size_t axis = 0; axis < guard.dims.size(); ++axis) {
    const std::string name = guard.path + ".shape[" + std::to_string(axis) + "]";
    env[name] = leaf.shape[axis];
    if (!guard.dims[axis].takes(leaf.shape[axis]))
      return name + ": expected " + guard.dims[axis].words() + ", got " + std::to_string(leaf.shape[axis]);
  }
  if (guard.written && leaf.shared)
    return guard.path + " shares memory with another argument; the variant writes it and takes them to be apart";
  if (guard.written && leaf.locked)
    return guard.path + " may not be written: it is a read-only array, a copy that DLPack gave, or an inference tensor "
                        "outside of its mode";
  if (guard.aligned && leaf.offset)
    return guard.path + ": expected an address divisible by 16, got one " + std::to_string(leaf.offset) + " bytes past it";
  return reject_layout(guard, leaf, env);
}

bool plain(const std::string& text) { return !text.empty() && text.find_first_of(" \t") == std::string::npos; }

// In the words that say most: what is no multiple, what is not equal, or the whole relation with the sizes in it.
std::string reject_relation(const Expression& relation, const Env& env) {
  const std::string& text = relation.text();
  try {
    if (relation(env)) return "";
  } catch (const DividedByZero&) {
    return text + " cannot be computed: a divisor is 0";
  }
  if (const auto equals = text.find(" == "); equals != std::string::npos) {
    const std::string left = text.substr(0, equals), right = text.substr(equals + 4);
    if (const auto percent = left.find(" % "); percent != std::string::npos && right == "0") {
      const std::string size = left.substr(0, percent), by = left.substr(percent + 3);
      if (plain(size) && env.count(size) && !by.empty() && by.find_first_not_of("0123456789") == std::string::npos)
        return size + ": must be divisible by " + by + ", got " + text_of(env.at(size));
    }
    if (env.count(left) && env.count(right))
      return left + ": must equal " + right + " = " + text_of(env.at(right)) + ", got " + text_of(env.at(left));
  }
  std::string seen;
  for (const std::string& name : relation.names())
    if (env.count(name)) seen += (seen.empty() ? "" : ", ") + name + " = " + text_of(env.at(name));
  return text + " does not hold: " + seen;
}

}  // namespace

std::string Dim::words() const {
  if (fixed) return text_of(low);
  return open ? text_of(low) + " or more" : text_of(low) + ".." + text_of(high);
}

std::string Guard::reject(const CallLeaf& leaf, Env& env) const {
  const auto* scalar = std::get_if<Scalar>(&leaf);
  if (kind == Kind::tensor) {
    const auto* tensor = std::get_if<TensorMeta>(&leaf);
    return tensor ? reject_tensor(*this, *tensor, env) : path + ": expected a " + dtype + " tensor, got " + described(leaf);
  }
  if (kind == Kind::value) return scalar && *scalar == value ? "" : path + ": expected " + repr(value) + ", got " + described(leaf);
  if (!scalar || scalar->kind != Json::Kind::number) return path + ": expected an int, got " + described(leaf);
  const Int number = saturated(scalar->text);
  env[path] = number;
  if (!dims[0].takes(number)) return path + ": expected " + dims[0].words() + ", got " + described(leaf);
  return number > INT64_MAX || number < INT64_MIN ? path + ": expected an int of 64 bits, got " + described(leaf) : "";
}

bool Guards::fixed() const {
  for (const Guard& guard : leaves)
    for (const Dim& dim : guard.dims)
      if (!dim.fixed) return false;
  return true;
}

std::string Guards::reject(const Call& call, const std::vector<std::string>& parameters, Env& env) const {
  if (!call.state.empty()) return call.state[0];
  for (std::size_t n = 0; n < trees.size() && n < call.trees.size(); ++n) {
    const std::string reason = difference(trees[n], call.trees[n], parameters[n]);
    if (!reason.empty()) return reason;
  }
  if (call.trees.size() != trees.size() || call.leaves.size() != leaves.size())
    return "expected " + std::to_string(leaves.size()) + " leaves, got " + std::to_string(call.leaves.size());
  try {
    for (std::size_t n = 0; n < leaves.size(); ++n) {
      std::string reason = leaves[n].reject(call.leaves[n], env);
      if (!reason.empty()) return reason;
    }
    for (const Expression& relation : where) {
      std::string reason = reject_relation(relation, env);
      if (!reason.empty()) return reason;
    }
  } catch (const Error& error) {                     // a layout or relation that cannot be computed of these sizes
    return error.what();
  }
  return "";
}

}  // namespace aotpack
