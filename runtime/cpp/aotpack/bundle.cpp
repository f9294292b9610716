// Open a bundle: its index, what of it fits this host, and begin what calls will need.
#include <algorithm>
#include <thread>

#include "first_calls.hpp"
#include "inside.hpp"

namespace aotpack {
namespace {

const std::size_t MAX_OPEN_FILES = 512;              // kept open from the start; of a bundle with more, the rest when used

std::string member_of(const VariantRecord& variant, const std::string& name) { return "artifacts/" + variant.digest + "/" + name; }

// "cuda" is "cuda:0"; Error for what is no device.
std::string checked_device(const std::string& device) {
  const std::string index = device.rfind("cuda:", 0) == 0 ? device.substr(5) : device == "cuda" ? "0" : "";
  if (device == "cpu") return device;
  if (index.empty() || index.size() > 3 || index.find_first_not_of("0123456789") != std::string::npos)
    fail(repr(first(device, 40)) + " is no device; expected cpu, cuda or such as cuda:1");
  return "cuda:" + std::to_string(std::stoi(index));
}

std::size_t concurrency(const WeightSet* weights, const std::string& device) {
  if (device != "cpu" || (weights && weights->is_written())) return 1;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 2, 8);
}

}  // namespace

std::unique_ptr<Bundle> Bundle::open(const std::string& path, Options options) {
  auto inside = std::make_unique<Inside>();
  options.device = checked_device(options.device);
  const bool cuda = options.device != "cpu";
  inside->members = std::make_unique<Members>(path);
  inside->index = Index::parse((*inside->members)["index.json"].read(MAX_INDEX_BYTES));
  inside->options = std::move(options);
  if (cuda && !Driver::device_files()) fail("device " + repr(inside->device()) + " does not fit this host: no CUDA device on this host");

  std::future<std::optional<Gpu>> gpu;               // the driver starts while libraries are opened
  if (cuda) {
    Driver& driver = Driver::get();                  // a few milliseconds, for which it would wait until they all are open
    gpu = std::async(std::launch::async, [&driver, device = inside->device()] {
      const auto found = driver.gpu(index_of(device));
      if (!found) fail("device " + repr(device) + " does not fit this host: it has no GPU of that number");
      driver.retain(index_of(device));
      return found;
    });
  }
  inside->begin_weights();
  inside->library = &Libtorch::open(inside->options.libtorch, inside->device());
  Host host{inside->device(), inside->library->version(), inside->library->cuda_version(), {}};
  if (cuda) host.gpu = gpu.get();

  std::set<std::string> reasons;
  std::size_t files = 0;
  for (const EntryRecord& record : inside->index.entries) {
    auto entry = std::make_unique<Entry::Inside>();
    entry->bundle = inside.get();
    entry->record = &record;
    for (const VariantRecord& each : record.variants) {
      const std::string reason = reject_variant(each, host);
      if (!reason.empty()) {
        entry->skipped.push_back(each.id + ": " + reason);
        reasons.insert(reason);
        continue;
      }
      entry->variants.push_back(std::make_unique<Variant>());
      entry->variants.back()->record = &each;
      // A build that replaces the folder changes nothing for this process.
      for (const auto& [name, file] : each.files)
        if (++files <= MAX_OPEN_FILES) (*inside->members)[member_of(each, name)];
    }
    if (record.is_kernel) entry->skipped.push_back("it is a kernel, which the Python runtime launches");
    std::stable_partition(entry->variants.begin(), entry->variants.end(), [](const auto& one) { return one->record->guards.fixed(); });
    inside->entries.try_emplace(record.name, std::move(entry));
  }
  const auto fits = [](const auto& one) { return !one.second.inside_->variants.empty(); };
  if (std::none_of(inside->entries.begin(), inside->entries.end(), fits)) {
    std::string said;
    for (const std::string& reason : reasons) said += (said.empty() ? "" : "; ") + reason;
    fail(path + " does not fit this host: " + (said.empty() ? "it holds no models" : said));
  }
  if (cuda) inside->begin_first_calls();
  return std::make_unique<Bundle>(std::move(inside));
}

Bundle::Bundle(std::unique_ptr<Inside> inside) : inside_(std::move(inside)) {}
Bundle::~Bundle() = default;

Entry& Bundle::entry(const std::string& name) {
  const auto found = inside_->entries.find(name);
  if (found == inside_->entries.end()) {
    std::string known;
    for (const std::string& each : names()) known += (known.empty() ? "" : ", ") + each;
    fail("no entry " + repr(first(name, 80)) + "; the bundle has: " + known);
  }
  const auto& entry = *found->second.inside_;
  if (entry.variants.empty()) {
    std::string said;
    for (const std::string& reason : entry.skipped) said += (said.empty() ? "" : "; ") + reason;
    fail("entry " + repr(name) + " does not fit this host: " + (said.empty() ? "it has no variants" : said));
  }
  return found->second;
}

std::vector<std::string> Bundle::names() const {
  std::vector<std::string> found;
  for (const auto& [name, entry] : inside_->entries) found.push_back(name);
  return found;
}

Tensor Bundle::put(const Tensor& tensor) const { return inside_->copy(tensor, inside_->device()); }
Tensor Bundle::host(const Tensor& tensor) const { return inside_->copy(tensor, "cpu"); }

Tensor Bundle::Inside::copy(const Tensor& tensor, const std::string& to) const {
  std::string odd = describe(tensor, device()).odd;
  if (odd.empty() && tensor.device != "cpu" && tensor.device != device()) odd = "is on " + first(tensor.device, 40) + ", the session is for " + device();
  if (odd.empty()) odd = misplaced(tensor, device());
  if (odd.empty() && std::any_of(tensor.strides.begin(), tensor.strides.end(), [](std::int64_t step) { return step < 0; })) odd = "has steps backwards";
  if (!odd.empty()) fail("a tensor " + odd);
  return library->take(library->copy(tensor, to));
}

void Bundle::Inside::begin_weights() {
  if (!index.weights_file) return;
  const bool on_gpu = device() != "cpu";
  Member& member = (*members)["weights/" + index.weights_file->digest + ".safetensors"];
  file = std::async(std::launch::async, [this, &member]() -> std::shared_ptr<const WeightsFile> {
    member.check(*index.weights_file, options.check);
    return std::make_shared<WeightsFile>(member);
  });
  for (const EntryRecord& entry : index.entries)
    for (const VariantRecord& variant : entry.variants) {
      const auto record = index.sets.find(variant.weights);
      if (record == index.sets.end() || weights.count(variant.weights)) continue;
      const bool ahead = on_gpu && is_served(entry.name) && variant.target->device == "cuda";
      weights[variant.weights] = std::async(ahead ? std::launch::async : std::launch::deferred, [this, &set = record->second] {
        return std::make_shared<WeightSet>(set, file.get(), device());
      });
    }
}

bool Bundle::Inside::is_served(const std::string& entry) const {
  const auto& wanted = options.entries;
  return wanted.empty() || std::count(wanted.begin(), wanted.end(), entry);
}

void Bundle::Inside::begin_first_calls() {
  std::vector<std::pair<Member*, const File*>> packages;
  for (auto& [name, entry] : entries) {              // of each, what calls try first: others mostly call the same
    const auto& variants = entry.inside_->variants;
    if (variants.empty() || !is_served(name)) continue;
    for (const auto& [file, expected] : variants.front()->record->files)
      if (file == "model.so") packages.emplace_back(&(*members)[member_of(*variants.front()->record, file)], &expected);
  }
  first_calls = std::async(std::launch::async, [this, packages] {
    try {
      std::vector<const Member*> checked;
      for (const auto& [member, expected] : packages) {
        member->check(*expected, options.check);
        checked.push_back(member);
      }
      make_first_calls(*library, device(), checked);
    } catch (const Error&) {                         // whoever needs it is told
    }
  });
}

Container& Bundle::Inside::load(Variant& variant) {
  if (Container* there = variant.loaded) return *there;
  const std::lock_guard<std::mutex> lock(loading);
  if (variant.loaded) return *variant.loaded;
  const VariantRecord& record = *variant.record;
  std::string path;
  for (const auto& [name, expected] : record.files) {
    Member& member = (*members)[member_of(record, name)];
    member.check(expected, options.check);
    if (name == "model.so") path = member.path();
  }
  if (!record.constants->empty()) variant.weights = weights.at(record.weights).get();
  auto made = std::make_unique<Container>(*library, path, record.id, device(), concurrency(variant.weights.get(), device()));
  std::size_t inputs = 0;
  for (const Guard& guard : record.guards.leaves) inputs += guard.kind != Guard::Kind::value;
  if (made->inputs() != inputs)
    fail(record.id + ": takes " + std::to_string(made->inputs()) + " tensors, its guards say " + std::to_string(inputs));
  for (const Output& output : record.outputs->leaves) {
    const bool of_result = output.kind == Output::Kind::result || (output.kind == Output::Kind::view && !output.of_argument);
    if (of_result && std::size_t(output.index) >= made->results())
      fail(record.id + ": gives " + std::to_string(made->results()) + " results, the index names number " + std::to_string(output.index));
  }
  const std::map<std::string, std::string> names(record.constants->begin(), record.constants->end());
  made->bind([&](const std::string& constant) {
    const auto weight = names.find(constant);
    if (weight == names.end()) fail(record.id + ": asks for constants the index does not name: " + first(constant, 80));
    return variant.weights->tensor(weight->second, *library);
  });
  variant.container = std::move(made);
  variant.loaded = variant.container.get();
  return *variant.container;
}

}  // namespace aotpack
