#include "weights.hpp"

#include <sys/mman.h>

#include <cstring>

namespace aotpack {
namespace {

const std::size_t MAX_HEADER_BYTES = 100'000'000;    // the limit safetensors itself sets
const std::size_t ALIGNMENT = 256;                   // between tensors on a device, as cudaMalloc has it

const std::map<std::string, std::string> DTYPES = {
    {"BOOL", "bool"}, {"U8", "uint8"}, {"I8", "int8"}, {"I16", "int16"}, {"I32", "int32"}, {"I64", "int64"},
    {"U16", "uint16"}, {"U32", "uint32"}, {"U64", "uint64"}, {"F8_E4M3", "float8_e4m3fn"}, {"F8_E5M2", "float8_e5m2"},
    {"F16", "float16"}, {"BF16", "bfloat16"}, {"F32", "float32"}, {"F64", "float64"}, {"C64", "complex64"}};

}  // namespace

WeightsFile::WeightsFile(const Member& member) {
  size_ = member.size();
  if (size_ < 8) fail(member.name() + ": is truncated: " + std::to_string(size_) + " bytes");
  void* const map = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, member.descriptor(), 0);
  if (map == MAP_FAILED) fail(member.name() + ": cannot be mapped");
  map_ = static_cast<char*>(map);
  try {
    read_header();
  } catch (const Error& error) {
    munmap(map_, size_);
    fail(member.name() + ": is not a safetensors file: " + error.what());
  }
}

WeightsFile::~WeightsFile() { munmap(map_, size_); }

void WeightsFile::read_header() {
  std::uint64_t length = 0;
  std::memcpy(&length, map_, 8);
  if (length > std::min(size_ - 8, MAX_HEADER_BYTES))
    fail("a header of " + std::to_string(length) + " bytes in a file of " + std::to_string(size_));
  const Json header = Json::parse(std::string(map_ + 8, length));
  if (header.kind != Json::Kind::object) fail("its header is no object");
  const auto room = std::int64_t(size_ - 8 - length);
  for (std::size_t n = 0; n < header.keys.size(); ++n) {
    if (header.keys[n] == "__metadata__") continue;
    const Json& record = header.list[n];
    const std::string& form = record.at("dtype").string();
    const auto dtype = DTYPES.find(form);
    if (dtype == DTYPES.end()) fail("tensor " + repr(first(header.keys[n], 80)) + " has the dtype " + repr(first(form, 40)));
    Stored stored{dtype->second, {}, nullptr, 0};
    for (const Json& size : record.at("shape").items()) stored.shape.push_back(size.integer());
    stored.bytes = Tensor::view(nullptr, stored.dtype, stored.shape).bytes();
    const auto& offsets = record.at("data_offsets").items();
    if (offsets.size() != 2) fail("data_offsets are two numbers");
    const std::int64_t begin = offsets[0].integer(), end = offsets[1].integer();
    if (begin < 0 || end < begin || end > room || std::size_t(end - begin) != stored.bytes)
      fail("tensor " + repr(first(header.keys[n], 80)) + " does not lie inside the file");
    stored.data = map_ + 8 + length + begin;
    tensors_[header.keys[n]] = std::move(stored);
  }
}

void WeightsFile::let_go() const { madvise(map_, size_, MADV_DONTNEED); }

const WeightsFile::Stored& WeightsFile::at(const std::string& key) const {
  const auto found = tensors_.find(key);
  if (found == tensors_.end()) fail("the weights file holds no tensor " + repr(first(key, 80)));
  return found->second;
}

WeightSet::WeightSet(const WeightSetRecord& record, std::shared_ptr<const WeightsFile> file, std::string device)
    : record_(record), file_(std::move(file)), device_(std::move(device)) {
  std::set<std::string> keys, written;
  for (const auto& [name, ref] : record.weights) keys.insert(ref.tensor);
  for (const std::string& name : record.state) written.insert(record.weights.at(name).tensor);
  if (device_ == "cpu") {
    for (const std::string& key : keys) {
      const WeightsFile::Stored& stored = file_->at(key);
      char*& place = places_[key] = stored.data;
      const bool misplaced = reinterpret_cast<std::uintptr_t>(place) % ITEMSIZE.at(stored.dtype);
      if (!stored.bytes || !(written.count(key) || misplaced)) continue;
      copies_.push_back(std::make_unique<char[]>(stored.bytes));       // what calls write is private, once
      std::memcpy(copies_.back().get(), place, stored.bytes);
      place = copies_.back().get();
    }
    return;
  }
  std::size_t total = 0;
  std::map<std::string, std::size_t> offsets;
  for (const std::string& key : keys) {
    offsets[key] = total;
    total += (file_->at(key).bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  }
  memory_ = std::make_unique<DeviceMemory>(std::max<std::size_t>(total, 1), index_of(device_));
  for (const std::string& key : keys) {
    const WeightsFile::Stored& stored = file_->at(key);
    places_[key] = memory_->data() + offsets[key];
    if (stored.bytes) memory_->fill(places_[key], stored.data, stored.bytes);
  }
  memory_->finish();
  file_->let_go();                                   // nothing on the host was written
}

void* WeightSet::tensor(const std::string& weight, const Libtorch& library) {
  const std::lock_guard<std::mutex> lock(lock_);
  const auto known = tensors_.find(weight);
  if (known != tensors_.end()) return known->second.get();
  const WeightRef& ref = record_.weights.at(weight);
  const WeightsFile::Stored& stored = file_->at(ref.tensor);
  Sizes shape = stored.shape, strides = contiguous(stored.shape);
  if (!ref.order.empty()) {
    if (ref.order.size() != stored.shape.size()) fail("the order of " + repr(weight) + " is of another number of dims");
    for (std::size_t place = 0; place < ref.order.size(); ++place) shape[ref.order[place]] = stored.shape[place];
    for (std::size_t place = 0; place < ref.order.size(); ++place) strides[ref.order[place]] = contiguous(stored.shape)[place];
  }
  // CUDA asks whose memory an address is: of no elements there is none.
  char* const data = stored.bytes || device_ == "cpu" ? places_.at(ref.tensor) : nullptr;
  return tensors_.emplace(weight, library.over(data, stored.dtype, shape, strides, device_)).first->second.get();
}

}  // namespace aotpack
