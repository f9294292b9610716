// The index of a bundle, as far as a client without torch's Python has a use for it.
#pragma once

#include <memory>
#include <set>

#include "guards.hpp"

namespace aotpack {

const std::size_t MAX_INDEX_BYTES = std::size_t(1) << 30;

// One member: its digest and size.
struct File {
  std::string digest;
  std::int64_t bytes = 0;
  bool operator==(const File&) const = default;
};

// What an artifact needs of a host, by name.
struct Target {
  std::string device;
  std::vector<std::pair<std::string, std::string>> needs;
};

// How one leaf of the result is had.
struct Output {
  enum class Kind { result, argument, value, size, view } kind = Kind::value;
  std::int64_t index = 0;                            // of results and arguments, and of what a view is of
  Json value;
  std::vector<Expression> shape, strides;            // of views; of sizes: shape[0]
  std::vector<Expression> offset;                    // of views: one
  bool of_argument = false, conj = false;            // of views
};

struct Outputs {
  Json tree;
  std::vector<Output> leaves;
};

using Constants = std::vector<std::pair<std::string, std::string>>;   // what the package asks for -> name of its weight

struct VariantRecord {
  std::string id, weights, kind, digest;
  std::map<std::string, File> files;
  std::shared_ptr<const Target> target;
  Guards guards;
  std::shared_ptr<const Outputs> outputs, recipe_outputs;              // of a program, what is compiled from it may give
  std::shared_ptr<const Constants> constants;
};

struct WeightRef {
  std::string tensor;                                // its key in the weights file
  std::vector<std::size_t> order;                    // stored dim -> dim of the weight; {} when they are the same
};

struct WeightSetRecord {
  std::map<std::string, WeightRef> weights;
  std::vector<std::string> state;                    // names of those that calls write
};

struct EntryRecord {
  std::string name;
  bool is_kernel = false;                            // then nothing else is read of it
  std::vector<std::string> parameters;               // their names
  std::vector<VariantRecord> variants, programs;
};

struct Index {
  std::vector<EntryRecord> entries;
  std::unique_ptr<File> weights_file;
  std::map<std::string, WeightSetRecord> sets;

  static Index parse(const std::string& text);       // Error with the place
};

// What must hold between the records; Error says what does not.
void check_variant(const VariantRecord& variant, const EntryRecord& entry, const Json& examples);
void check_members(const Index& index);
void check_weights(const Index& index);

}  // namespace aotpack
