// What a bundle and its entries hold behind the public header.
#pragma once

#include <atomic>
#include <future>

#include "host.hpp"
#include "weights.hpp"

namespace aotpack {

using SharedWeights = std::shared_future<std::shared_ptr<WeightSet>>;

struct Variant {
  const VariantRecord* record = nullptr;
  std::atomic<Container*> loaded = nullptr;          // set once; calls look no further
  std::shared_ptr<WeightSet> weights;
  std::unique_ptr<Container> container;              // goes before its weights
};

struct Bundle::Inside {
  Options options;
  Index index;
  std::unique_ptr<Members> members;
  const Libtorch* library = nullptr;
  std::shared_future<std::shared_ptr<const WeightsFile>> file;
  std::map<std::string, SharedWeights> weights;      // by set
  std::map<std::string, Entry> entries;
  std::mutex loading;
  std::future<void> first_calls;                     // ends before what it looks at

  Container& load(Variant& variant);
  bool is_served(const std::string& entry) const;    // will it be called?
  const std::string& device() const { return options.device; }
  // A copy of a tensor of a caller, whose memory is where it says, or Error.
  Tensor copy(const Tensor& tensor, const std::string& device) const;
  void begin_weights();                              // read what calls will need beside what follows
  void begin_first_calls();                          // and have NVIDIA's libraries ready for them
};

struct Entry::Inside {
  Bundle::Inside* bundle = nullptr;
  const EntryRecord* record = nullptr;
  std::vector<std::unique_ptr<Variant>> variants;    // fixed sizes first, as calls try them
  std::vector<std::string> skipped;                  // those that do not fit this host, with the reason

  // The variant that takes a call, nullptr with a reason for each that does not; `env` has its sizes.
  Variant* choose(const std::vector<Leaf>& leaves, Env& env, std::string& reasons) const;
};

// The leaves of a call as guards see them; of an entry that runs on `device`.
std::vector<CallLeaf> describe(const std::vector<Leaf>& leaves, const std::string& device);
// Why a tensor does not lie where it says, "" when it does. The driver is asked; the memory is not looked into.
std::string misplaced(const Tensor& tensor, const std::string& device);

}  // namespace aotpack
