// A call: judged by the guards, run by the variant that takes it, its result put together.
#include <algorithm>

#include "inside.hpp"

namespace aotpack {
namespace {

char nothing[16];                                    // where tensors without elements lie, on the CPU

// Marks the tensors in whose memory, from first to last element, another one lies.
void mark_shared(const std::vector<Leaf>& leaves, std::vector<CallLeaf>& described) {
  struct Place {
    std::intptr_t start, stop;
    std::size_t position;
  };
  std::vector<Place> places;
  for (std::size_t n = 0; n < leaves.size(); ++n) {
    const auto* tensor = std::get_if<Tensor>(&leaves[n]);
    if (!tensor || is_empty(tensor->shape) || !std::get<TensorMeta>(described[n]).odd.empty()) continue;
    const Span span = span_of(tensor->dtype, tensor->shape, tensor->strides);
    const auto address = reinterpret_cast<std::intptr_t>(tensor->data);
    places.push_back({address + span.start, address + span.stop, n});
  }
  for (const Place& a : places)
    for (const Place& b : places)
      if (a.position != b.position && a.start < b.stop && b.start < a.stop) std::get<TensorMeta>(described[a.position]).shared = true;
}

std::int64_t narrow(Int value) {
  if (value > INT64_MAX || value < INT64_MIN) fail("a size or stride of a result has more than 64 bits");
  return std::int64_t(value);
}

// A tensor over the memory of another, inside of what that one reaches.
Tensor view_of(const Tensor& base, const Output& output, const Env& env) {
  Tensor view = base;
  view.shape.clear();
  view.strides.clear();
  for (const Expression& size : output.shape) view.shape.push_back(narrow(size(env)));
  for (const Expression& stride : output.strides) view.strides.push_back(narrow(stride(env)));
  view.conj = output.conj;
  view.bytes();                                      // Error for sizes below 0
  const Int offset = output.offset[0](env) * ITEMSIZE.at(view.dtype);
  const Span whole = span_of(base.dtype, base.shape, base.strides), part = span_of(view.dtype, view.shape, view.strides);
  if (!is_empty(view.shape) && (offset + part.start < whole.start || offset + part.stop > whole.stop))
    fail("a result would show memory that is not its own");
  if (offset >= whole.start && offset <= whole.stop) view.data = static_cast<char*>(view.data) + std::int64_t(offset);
  return view;
}

std::vector<Libtorch::Handle> inputs(const Variant& variant, const std::vector<Leaf>& leaves, const Libtorch& library, const std::string& device) {
  std::vector<Libtorch::Handle> given;
  void* const nowhere = device == "cpu" ? nothing : nullptr;           // CUDA asks whose memory an address is
  for (std::size_t n = 0; n < leaves.size(); ++n) {
    const Guard& guard = variant.record->guards.leaves[n];
    if (guard.kind == Guard::Kind::integer) {
      given.push_back(library.over(nowhere, "float32", {std::get<Scalar>(leaves[n]).integer(), 0}, {1, 1}, device));
    } else if (guard.kind == Guard::Kind::tensor) {
      const auto& tensor = std::get<Tensor>(leaves[n]);
      void* const data = is_empty(tensor.shape) ? nowhere : tensor.data;
      given.push_back(library.over(data, tensor.dtype, tensor.shape, row_major(tensor.shape, tensor.strides), device));
    }
  }
  return given;
}

}  // namespace

std::string misplaced(const Tensor& tensor, const std::string& device) {
  if (tensor.device == "cpu" || is_empty(tensor.shape)) return "";
  const std::string found = Driver::get().device_of(tensor.data, index_of(device));
  if (found == tensor.device) return "";
  return "says that it is on " + tensor.device + ", where its memory is not: it is " + (found.empty() ? "none of a GPU" : "on " + found);
}

std::vector<CallLeaf> describe(const std::vector<Leaf>& leaves, const std::string& device) {
  std::vector<CallLeaf> found;
  for (const Leaf& leaf : leaves) {
    if (const auto* tensor = std::get_if<Tensor>(&leaf)) {
      TensorMeta meta = describe(*tensor, device);
      if (meta.odd.empty() && tensor->device == device) meta.odd = misplaced(*tensor, device);
      found.emplace_back(std::move(meta));
    } else {
      found.emplace_back(canonical_scalar(std::get<Scalar>(leaf)));
    }
  }
  mark_shared(leaves, found);
  return found;
}

Entry::Entry(std::unique_ptr<Inside> inside) : inside_(std::move(inside)) {}
Entry::~Entry() = default;

const std::string& Entry::name() const { return inside_->record->name; }

std::vector<Entry::Wanted> Entry::wanted() const {
  std::vector<Wanted> found;
  for (const Guard& guard : inside_->variants.at(0)->record->guards.leaves) found.push_back({guard.path, guard.dtype, guard.value});
  return found;
}

Variant* Entry::Inside::choose(const std::vector<Leaf>& leaves, Env& env, std::string& reasons) const {
  Call call{{}, describe(leaves, bundle->device()), {}};
  for (const auto& variant : variants) {
    env.clear();
    call.trees = variant->record->guards.trees;      // leaves come flat: their containers are those of the variant
    const std::string reason = variant->record->guards.reject(call, record->parameters, env);
    if (reason.empty()) return variant.get();
    reasons += (reasons.empty() ? "" : "; ") + variant->record->id + ": " + reason;
  }
  for (const std::string& reason : skipped) reasons += (reasons.empty() ? "" : "; ") + reason;
  return nullptr;
}

std::string Entry::explain(const std::vector<Leaf>& leaves) const {
  Env env;
  std::string reasons;
  const Variant* found = inside_->choose(leaves, env, reasons);
  return readable(found ? "hit: " + found->record->id : "miss: " + reasons);
}

void Entry::load() {
  for (const auto& variant : inside_->variants) inside_->bundle->load(*variant);
}

std::vector<Leaf> Entry::call(const std::vector<Leaf>& leaves, std::optional<void*> stream) {
  Env env;
  std::string reasons;
  Variant* const variant = inside_->choose(leaves, env, reasons);
  if (!variant) throw Miss(readable(name() + ": no variant fits this call: " + reasons));
  Bundle::Inside& bundle = *inside_->bundle;
  Container& container = bundle.load(*variant);
  const Libtorch& library = *bundle.library;
  const std::string& device = bundle.device();
  if (device != "cpu" && !stream) stream = library.current_stream(index_of(device));

  std::vector<Libtorch::Handle> made;
  {
    auto given = inputs(*variant, leaves, library, device);
    std::unique_lock<std::mutex> state;
    if (variant->weights && variant->weights->is_written()) state = std::unique_lock<std::mutex>(variant->weights->state());
    made = container.run(std::move(given), stream.value_or(nullptr));
  }
  std::vector<Tensor> results;
  for (Libtorch::Handle& handle : made) {
    results.push_back(library.take(std::move(handle)));
    // A result may be a weight as it is: what it lies in stays as long as it.
    results.back().owner = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(variant->weights, results.back().owner);
  }
  std::vector<Leaf> found;
  for (const Output& output : variant->record->outputs->leaves) {
    switch (output.kind) {
      case Output::Kind::result: found.emplace_back(results.at(output.index)); break;
      case Output::Kind::argument: found.push_back(leaves.at(output.index)); break;
      case Output::Kind::value: found.emplace_back(output.value); break;
      case Output::Kind::size: found.emplace_back(Json::number(narrow(output.shape[0](env)))); break;
      case Output::Kind::view:
        found.emplace_back(view_of(output.of_argument ? std::get<Tensor>(leaves.at(output.index)) : results.at(output.index), output, env));
    }
  }
  return found;
}

}  // namespace aotpack
