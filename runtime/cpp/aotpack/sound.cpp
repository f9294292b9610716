// What must hold between the records of an index, beyond the form of each.
#include <algorithm>

#include "index.hpp"
#include "tree.hpp"

namespace aotpack {
namespace {

// What expressions may name.
std::set<std::string> sizes_of(const Guards& guards) {
  std::set<std::string> sizes;
  for (const Guard& guard : guards.leaves) {
    if (guard.kind == Guard::Kind::integer) sizes.insert(guard.path);
    if (guard.kind == Guard::Kind::tensor)
      for (std::size_t axis = 0; axis < guard.dims.size(); ++axis) sizes.insert(guard.path + ".shape[" + std::to_string(axis) + "]");
  }
  return sizes;
}

void check_names(const std::vector<Expression>& expressions, const std::set<std::string>& sizes) {
  for (const Expression& expression : expressions)
    for (const std::string& name : expression.names())
      if (!sizes.count(name)) fail(expression.text() + " names " + repr(name) + ", which is no size of a call");
}

void check_layout(const Guard& guard, const std::set<std::string>& sizes) {
  const std::string rank = std::to_string(guard.dims.size());
  if (guard.layout.empty()) {
    if (guard.strides.size() != guard.dims.size()) fail(guard.path + ": " + std::to_string(guard.strides.size()) + " strides for " + rank + " dims");
    check_names(guard.strides, sizes);
  } else if (guard.layout == "channels_last") {
    if (guard.dims.size() < 3) fail(guard.path + ": channels_last with " + rank + " dims");
  } else if (guard.layout != "any" && guard.layout != "contiguous") {
    fail(guard.path + ": unknown layout " + repr(first(guard.layout, 80)));
  }
}

void check_output(const Output& output, const Guards& guards, const std::set<std::string>& sizes) {
  const bool of_argument = output.kind == Output::Kind::argument || output.of_argument;
  const auto count = std::int64_t(guards.leaves.size());
  if (of_argument && (output.index < 0 || output.index >= count))
    fail("an output is argument " + std::to_string(output.index) + " of " + std::to_string(count));
  if (output.kind == Output::Kind::view && of_argument && guards.leaves[output.index].kind != Guard::Kind::tensor)
    fail("a view is of argument " + std::to_string(output.index) + ", which is no tensor");
  if (!of_argument && output.index < 0) fail("an output is result " + std::to_string(output.index));
  for (const auto* each : {&output.shape, &output.strides, &output.offset}) check_names(*each, sizes);
}

// An int of any length, not below `least`.
bool is_int(const Json& value, Int least) {
  return value.kind == Json::Kind::number && value.text.find_first_of(".eE") == std::string::npos && saturated(value.text) >= least;
}

void check_example(const Guards& guards, const Json& example) {
  bool good = example.items().size() == guards.leaves.size();
  for (std::size_t n = 0; good && n < guards.leaves.size(); ++n) {
    const Guard& guard = guards.leaves[n];
    const Json& one = example.list[n];
    if (guard.kind == Guard::Kind::tensor) {
      good = one.kind == Json::Kind::list && one.list.size() == guard.dims.size();
      for (const Json& size : one.list) good = good && is_int(size, 0);
    } else if (guard.kind == Guard::Kind::integer) {
      good = is_int(one, -(Int(1) << 126));
    } else {
      good = one.kind == Json::Kind::null;
    }
  }
  if (!good) fail("an example is not of its guards");
}

}  // namespace

void check_variant(const VariantRecord& variant, const EntryRecord& entry, const Json& examples) {
  const Guards& guards = variant.guards;
  if (guards.trees.size() != entry.parameters.size())
    fail(std::to_string(guards.trees.size()) + " trees for " + std::to_string(entry.parameters.size()) + " parameters");
  std::vector<std::string> places;
  for (std::size_t n = 0; n < guards.trees.size(); ++n) paths(guards.trees[n], entry.parameters[n], places);
  const bool same = places.size() == guards.leaves.size() &&
                    std::equal(places.begin(), places.end(), guards.leaves.begin(), [](const auto& place, const Guard& guard) { return place == guard.path; });
  if (!same) fail("its guards are of other arguments than the parameters have");
  const Outputs& outputs = *variant.outputs;
  if (has_class(outputs.tree) || leaf_count(outputs.tree) != outputs.leaves.size()) fail("outputs cannot be put together");
  const std::set<std::string> sizes = sizes_of(guards);
  for (const Output& output : outputs.leaves) check_output(output, guards, sizes);
  if (variant.recipe_outputs)
    for (const Output& output : variant.recipe_outputs->leaves) check_output(output, guards, sizes);
  for (const Guard& guard : guards.leaves)
    if (guard.kind == Guard::Kind::tensor) check_layout(guard, sizes);
  check_names(guards.where, sizes);
  if (examples.items().empty()) fail("no examples");
  for (const Json& example : examples.list) check_example(guards, example);
}

void check_members(const Index& index) {
  std::set<std::string> ids;
  std::map<std::string, File> known;
  for (const EntryRecord& entry : index.entries)
    for (const auto* variants : {&entry.variants, &entry.programs})
      for (const VariantRecord& variant : *variants) {
        if (!ids.insert(variant.id).second) fail("two variants have the id " + repr(variant.id));
        const bool is_program = variant.kind == "exported";
        if (is_program && (variant.files.size() != 1 || variant.files.begin()->second.digest != variant.digest))
          fail(variant.id + ": an exported program is one file, named by its digest");
        for (const auto& [name, file] : variant.files) {
          const std::string member = is_program ? "programs/" + variant.digest : "artifacts/" + variant.digest + "/" + name;
          if (!(known.emplace(member, file).first->second == file)) fail(member + " is said to have two contents");
        }
      }
}

void check_weights(const Index& index) {
  for (const auto& [name, set] : index.sets) {
    if (!set.weights.empty() && !index.weights_file) fail("the set " + repr(name) + " names weights, and there is no weights file");
    for (const std::string& state : set.state)
      if (!set.weights.count(state)) fail("the state " + repr(state) + " of the set " + repr(name) + " is no weight of it");
  }
  for (const EntryRecord& entry : index.entries)
    for (const auto* variants : {&entry.variants, &entry.programs})
      for (const VariantRecord& variant : *variants) {
        if (variant.constants->empty() && variant.weights.empty()) continue;
        const auto set = index.sets.find(variant.weights);
        if (set == index.sets.end()) fail("variant " + variant.id + " names the weight set " + repr(variant.weights) + ", which is not there");
        for (const auto& [constant, weight] : *variant.constants)
          if (!set->second.weights.count(weight)) fail("variant " + variant.id + " needs the weight " + repr(weight) + ", which is not there");
      }
}

}  // namespace aotpack
