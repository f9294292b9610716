// Decisions on recorded calls, for comparison with Python's: aotpack-judge BUNDLE [LIBTORCH]
//
// Reads one call a line on stdin, {"entry", "trees", "leaves", "state"}, where a leaf is {"tensor": {...}}, {"scalar": ...}
// or {"other": "type"}. Writes the variant of each, or an empty line where there is none.
#include <iostream>

#include "aotpack.hpp"

using aotpack::Json;

namespace {

std::vector<std::int64_t> numbers(const Json& value) {
  std::vector<std::int64_t> found;
  for (const Json& one : value.list) found.push_back(one.integer());
  return found;
}

aotpack::Call read(const Json& record) {
  aotpack::Call call;
  call.trees = record.at("trees");
  for (const Json& line : record.at("state").list) call.state.push_back(line.string());
  for (const Json& leaf : record.at("leaves").list) {
    if (const Json* tensor = leaf.find("tensor")) {
      aotpack::TensorMeta meta;
      meta.dtype = tensor->at("dtype").string();
      meta.device = tensor->at("device").string();
      meta.odd = tensor->at("odd").string();
      meta.shape = numbers(tensor->at("shape"));
      meta.strides = numbers(tensor->at("strides"));
      meta.offset = int(tensor->at("offset").integer());
      meta.needs_grad = tensor->at("needs_grad").boolean;
      meta.shared = tensor->at("shared").boolean;
      meta.locked = tensor->at("locked").boolean;
      call.leaves.emplace_back(std::move(meta));
    } else if (const Json* other = leaf.find("other")) {
      call.leaves.emplace_back(aotpack::Other{other->string()});
    } else {
      call.leaves.emplace_back(leaf.at("scalar"));
    }
  }
  return call;
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count < 2) throw aotpack::Error("aotpack-judge BUNDLE [LIBTORCH]");
    auto bundle = aotpack::Bundle::open(words[1], {.libtorch = count > 2 ? words[2] : ""});
    for (std::string line; std::getline(std::cin, line);) {
      const Json record = Json::parse(line);
      std::cout << bundle->entry(record.at("entry").string()).judge(read(record)) << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
