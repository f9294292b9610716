// Decisions on recorded calls, for comparison with Python's: aotpack-judge BUNDLE
//
// Reads the index alone: neither libtorch nor a device is needed. One call a line on stdin, {"entry", "device", "trees",
// "leaves", "state"}, where a leaf is {"tensor": {...}}, {"scalar": ...} or {"other": "type"}. Writes for each the variant
// for that kind of device, or the reasons as a list of texts.
#include <algorithm>
#include <iostream>

#include "aotpack/member.hpp"

using aotpack::Json;

namespace {

aotpack::Sizes numbers(const Json& value) {
  aotpack::Sizes found;
  for (const Json& one : value.items()) found.push_back(one.integer());
  return found;
}

aotpack::TensorMeta tensor(const Json& value) {
  aotpack::TensorMeta meta;
  meta.dtype = value.at("dtype").string();
  meta.device = value.at("device").string();
  meta.odd = value.at("odd").string();
  meta.shape = numbers(value.at("shape"));
  meta.strides = numbers(value.at("strides"));
  meta.offset = int(value.at("offset").integer());
  meta.needs_grad = value.at("needs_grad").boolean;
  meta.shared = value.at("shared").boolean;
  meta.locked = value.at("locked").boolean;
  return meta;
}

aotpack::Call read(const Json& record) {
  aotpack::Call call;
  call.trees = record.at("trees").items();
  for (const Json& line : record.at("state").items()) call.state.push_back(line.string());
  for (const Json& leaf : record.at("leaves").items()) {
    if (const Json* one = leaf.find("tensor")) call.leaves.emplace_back(tensor(*one));
    else if (const Json* other = leaf.find("other")) call.leaves.emplace_back(aotpack::Other{other->string()});
    else call.leaves.emplace_back(aotpack::canonical_scalar(leaf.at("scalar")));
  }
  return call;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) out += c == '"' || c == '\\' ? std::string{'\\', c} : std::string(1, c);
  return out + "\"";
}

// "variant", or ["variant: reason", ...].
std::string judged(const aotpack::EntryRecord& entry, const std::string& device, const aotpack::Call& call) {
  std::vector<const aotpack::VariantRecord*> variants;
  for (const auto& one : entry.variants)
    if (one.target->device == device && one.files.count("model.so") && !one.files.count("model.json")) variants.push_back(&one);
  std::stable_partition(variants.begin(), variants.end(), [](const auto* one) { return one->guards.fixed(); });
  std::string reasons;
  for (const auto* variant : variants) {
    aotpack::Env env;
    const std::string reason = variant->guards.reject(call, entry.parameters, env);
    if (reason.empty()) return quoted(variant->id);
    reasons += (reasons.empty() ? "" : ", ") + quoted(variant->id + ": " + reason);
  }
  return "[" + reasons + "]";
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count != 2) throw aotpack::Error("aotpack-judge BUNDLE");
    const auto index = aotpack::Index::parse(aotpack::Member(words[1], "index.json").read(aotpack::MAX_INDEX_BYTES));
    for (std::string line; std::getline(std::cin, line);) {
      const Json record = Json::parse(line);
      const std::string& name = record.at("entry").string();
      const auto entry = std::find_if(index.entries.begin(), index.entries.end(), [&](const auto& one) { return one.name == name; });
      if (entry == index.entries.end()) throw aotpack::Error("no entry " + name);
      std::cout << judged(*entry, record.at("device").string(), read(record)) << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
