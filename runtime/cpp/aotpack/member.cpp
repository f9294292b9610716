#include "member.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "sha256.hpp"

namespace aotpack {
namespace {

const std::size_t READ_AT_ONCE = 1 << 20;            // of 64-byte blocks a whole number

// Bytes of a file from `offset` on, as many as there are up to `most`.
std::size_t read_at(int descriptor, char* to, std::size_t most, std::size_t offset, const std::string& name) {
  std::size_t have = 0;
  while (have < most) {
    const ssize_t count = pread(descriptor, to + have, most - have, off_t(offset + have));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(name + ": cannot be read: " + std::strerror(errno));
    if (count == 0) break;
    have += std::size_t(count);
  }
  return have;
}

}  // namespace

Member::Member(const std::string& root, const std::string& name)
    : name_(name), path_(root + "/" + name), descriptor_(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (descriptor_ < 0) fail(name + ": cannot be opened: " + std::strerror(errno));
  struct stat status {};
  if (fstat(descriptor_, &status) || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    fail(name + ": is not a plain file");
  }
}

Member::~Member() { close(descriptor_); }

std::size_t Member::size() const {
  struct stat status {};
  if (fstat(descriptor_, &status)) fail(name_ + ": " + std::strerror(errno));
  return std::size_t(status.st_size);
}

std::string Member::read(std::size_t most) const {
  std::string text(std::min(size(), most), '\0');
  text.resize(read_at(descriptor_, text.data(), text.size(), 0, name_));
  return text;
}

std::string Member::hash() const {
  Sha256 sum;
  const std::unique_ptr<char[]> buffer(new char[READ_AT_ONCE]);
  for (std::size_t offset = 0;; offset += READ_AT_ONCE) {
    const std::size_t count = read_at(descriptor_, buffer.get(), READ_AT_ONCE, offset, name_);
    sum.blocks(buffer.get(), count / 64);
    if (count < READ_AT_ONCE) return sum.finish(buffer.get() + count / 64 * 64, count % 64);
  }
}

void Member::check(const File& wanted, bool hash_it) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (checked_) return;
  if (const std::size_t found = size(); found != std::uint64_t(wanted.bytes))
    fail(name_ + ": has " + std::to_string(found) + " bytes, the index says " + std::to_string(wanted.bytes));
  if (hash_it) {
    const std::string found = hash();
    if (found != wanted.digest)
      fail(name_ + ": sha256 is " + found.substr(0, 12) + ", the index says " + wanted.digest.substr(0, 12) +
           " (the file changed after packing; fetch the bundle again)");
  }
  checked_ = true;
}

std::string Member::path() const {
  struct stat now {}, then {};
  if (!stat(path_.c_str(), &now) && !fstat(descriptor_, &then) && now.st_dev == then.st_dev && now.st_ino == then.st_ino) return path_;
  return "/proc/self/fd/" + std::to_string(fcntl(descriptor_, F_DUPFD_CLOEXEC, 0));
}

Members::Members(std::string root) : root_(std::move(root)) {
  struct stat status {};
  if (stat(root_.c_str(), &status)) fail(root_ + ": " + std::strerror(errno));
  if (!S_ISDIR(status.st_mode)) fail(root_ + ": is not a folder; unpack an archive first, as with unzip");
}

Member& Members::operator[](const std::string& name) {
  const std::lock_guard<std::mutex> lock(lock_);
  auto& member = opened_[name];
  if (!member) member = std::make_unique<Member>(root_, name);
  return *member;
}

}  // namespace aotpack
