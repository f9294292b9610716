// The files of a bundle: opened once, checked before they are used, and then the same however the folder changes.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "index.hpp"

namespace aotpack {

// A plain file of a bundle, open.
class Member {
 public:
  // Error when it is no plain file that can be opened: a pipe is not waited for.
  Member(const std::string& root, const std::string& name);
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  // Compare with what the index says of it, once; `hash` its bytes too.
  void check(const File& wanted, bool hash);
  std::string read(std::size_t most) const;
  std::size_t size() const;
  int descriptor() const { return descriptor_; }
  // A path that opens this very file. The dynamic loader knows libraries by path: it stays so until the process ends.
  std::string path() const;
  const std::string& name() const { return name_; }

 private:
  std::string hash() const;

  std::string name_, path_;
  int descriptor_;
  std::mutex lock_;
  bool checked_ = false;
};

// The members of a folder by name, each opened once.
class Members {
 public:
  explicit Members(std::string root);                // Error when it is no folder
  Member& operator[](const std::string& name);

 private:
  std::string root_;
  std::mutex lock_;
  std::map<std::string, std::unique_ptr<Member>> opened_;
};

}  // namespace aotpack
