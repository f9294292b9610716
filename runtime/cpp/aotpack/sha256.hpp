#pragma once

#include <cstdint>
#include <string>

namespace aotpack {

// SHA-256 of bytes that come in blocks.
class Sha256 {
 public:
  void blocks(const void* data, std::size_t count);  // `count` blocks of 64 bytes
  std::string finish(const void* data, std::size_t rest);   // with the last bytes, fewer than 64; in hex

 private:
  std::uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::uint64_t bytes_ = 0;
};

}  // namespace aotpack
