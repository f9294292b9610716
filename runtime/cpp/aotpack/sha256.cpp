#include "sha256.hpp"

#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

namespace aotpack {
namespace {

alignas(16) const std::uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t turned(std::uint32_t x, int by) { return x >> by | x << (32 - by); }

void rounds(std::uint32_t state[8], const unsigned char* data, std::size_t blocks) {
  for (; blocks--; data += 64) {
    std::uint32_t w[64], s[8];
    for (int n = 0; n < 16; ++n)
      w[n] = std::uint32_t(data[4 * n]) << 24 | data[4 * n + 1] << 16 | data[4 * n + 2] << 8 | data[4 * n + 3];
    for (int n = 16; n < 64; ++n) {
      const std::uint32_t a = w[n - 15], b = w[n - 2];
      w[n] = w[n - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[n - 7] + (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    std::memcpy(s, state, 32);
    for (int n = 0; n < 64; ++n) {
      const std::uint32_t t = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[n] + w[n];
      const std::uint32_t u = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::memmove(s + 1, s, 28);
      s[4] += t;
      s[0] = t + u;
    }
    for (int n = 0; n < 8; ++n) state[n] += s[n];
  }
}

// The same by the CPU's own instructions, five times as fast.
__attribute__((target("sha,sse4.1"))) void rounds_by_cpu(std::uint32_t state[8], const unsigned char* data, std::size_t blocks) {
  const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i t = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<__m128i*>(state)), 0xB1);
  __m128i b = _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<__m128i*>(state + 4)), 0x1B);
  __m128i a = _mm_alignr_epi8(t, b, 8);
  b = _mm_blend_epi16(b, t, 0xF0);
  for (; blocks--; data += 64) {
    const __m128i kept_a = a, kept_b = b;
    __m128i w[4];
    for (int n = 0; n < 4; ++n)
      w[n] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * n)), order);
    for (int n = 0; n < 16; ++n) {
      __m128i message = _mm_add_epi32(w[n & 3], _mm_load_si128(reinterpret_cast<const __m128i*>(K + 4 * n)));
      b = _mm_sha256rnds2_epu32(b, a, message);
      if (n < 12) {
        const __m128i next = _mm_add_epi32(_mm_sha256msg1_epu32(w[n & 3], w[(n + 1) & 3]),
                                           _mm_alignr_epi8(w[(n + 3) & 3], w[(n + 2) & 3], 4));
        w[n & 3] = _mm_sha256msg2_epu32(next, w[(n + 3) & 3]);
      }
      message = _mm_shuffle_epi32(message, 0x0E);
      a = _mm_sha256rnds2_epu32(a, b, message);
    }
    a = _mm_add_epi32(a, kept_a);
    b = _mm_add_epi32(b, kept_b);
  }
  t = _mm_shuffle_epi32(a, 0x1B);
  b = _mm_shuffle_epi32(b, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(t, b, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(b, t, 8));
}

bool has_sha() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

const auto step = has_sha() ? rounds_by_cpu : rounds;

}  // namespace

void Sha256::blocks(const void* data, std::size_t count) {
  step(state_, static_cast<const unsigned char*>(data), count);
  bytes_ += 64 * count;
}

std::string Sha256::finish(const void* data, std::size_t rest) {
  unsigned char tail[128] = {};
  const std::size_t end = rest < 56 ? 64 : 128;
  if (rest) std::memcpy(tail, data, rest);
  tail[rest] = 0x80;
  for (int n = 0; n < 8; ++n) tail[end - 1 - n] = static_cast<unsigned char>((bytes_ + rest) * 8 >> 8 * n);
  step(state_, tail, end / 64);
  std::string text;
  for (const std::uint32_t word : state_)
    for (int n = 28; n >= 0; n -= 4) text += "0123456789abcdef"[word >> n & 15];
  return text;
}

}  // namespace aotpack
