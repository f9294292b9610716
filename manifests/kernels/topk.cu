// Top-k softmax and sampling over rows of logits, one block a row.
//
// A logit and its index travel as one 64-bit key whose order is "larger logit first, then smaller index", so both
// kernels are maxima of keys, and ties come out the same whatever the block's size. A NaN counts as -inf: what is
// returned is always a column of the row.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Key = unsigned long long;  // 0 is below every key

constexpr unsigned kFull = 0xffffffffu;
constexpr float kLowest = -3.402823466e38f;

// NaN to -inf.
__device__ __forceinline__ float number(float value) { return fmaxf(value, __uint_as_float(0xff800000u)); }

__device__ __forceinline__ Key make_key(float value, unsigned index) {
  unsigned bits = __float_as_uint(number(value));
  if (bits == 0x80000000u) bits = 0;  // -0 ties with 0
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(bits) << 32 | ~index;
}

__device__ __forceinline__ unsigned key_index(Key key) { return ~static_cast<unsigned>(key); }

__device__ __forceinline__ float key_value(Key key) {
  const unsigned bits = static_cast<unsigned>(key >> 32);
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ __forceinline__ Key warp_max(Key key) {
  const unsigned high = static_cast<unsigned>(key >> 32);
  const unsigned best = __reduce_max_sync(kFull, high);
  const unsigned low = __reduce_max_sync(kFull, high == best ? static_cast<unsigned>(key) : 0u);
  return static_cast<Key>(best) << 32 | low;
}

// The block's largest key, in every thread. `slots` holds BLOCK / 32 keys that the call before did not use: with two
// sets used in turn, one barrier a call is enough, since nobody writes a set again before all have read it.
template <int BLOCK>
__device__ __forceinline__ Key block_max(Key key, Key* slots) {
  key = warp_max(key);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = key;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < BLOCK / 32; ++warp) key = slots[warp] > key ? slots[warp] : key;
  return key;
}

template <typename T, int VPT>
struct alignas(sizeof(T) * VPT) Pack {
  T values[VPT];
};

// take(value, index) for every element of this thread, by rising index. Neighbours come VPT at a time, in one load
// where n and the address allow it and in VPT loads where they do not; a second scan meets the same elements.
template <typename T, int BLOCK, int VPT, typename Take>
__device__ __forceinline__ void scan(const T* row, unsigned n, Take take) {
  using Vector = Pack<T, VPT>;
  const bool aligned = n % VPT == 0 && reinterpret_cast<size_t>(row) % sizeof(Vector) == 0;
  for (unsigned i = threadIdx.x * VPT; i < n; i += BLOCK * VPT) {  // unsigned: i may pass 2**31, by one step
    if (VPT > 1 && aligned) {
      const Vector vector = *reinterpret_cast<const Vector*>(row + i);
#pragma unroll
      for (int j = 0; j < VPT; ++j) take(static_cast<float>(vector.values[j]), i + j);
    } else {
#pragma unroll
      for (int j = 0; j < VPT; ++j) {
        if (i + j < n) take(static_cast<float>(row[i + j]), i + j);
      }
    }
  }
}

// The k largest of softmax(logits[row, :n]) and their indices, largest first; 1 <= k <= n.
//
// One scan gives the softmax's denominator and each thread's own best four; then k maxima over the block, each popping
// its owner's list. A thread that runs out scans again, which needs five of the k largest among its own elements.
// Dynamic shared memory: BLOCK bytes (24 a warp are used).
template <typename T, int BLOCK, int VPT>
__global__ void __launch_bounds__(BLOCK) topk_softmax(const T* logits, T* out, int* idx, int n, int k) {
  constexpr int kWarps = BLOCK / 32;
  constexpr int kKept = 4;
  extern __shared__ Key shared[];
  Key* const slots = shared;                                            // 2 * kWarps keys
  float* const maxima = reinterpret_cast<float*>(shared + 2 * kWarps);  // kWarps floats
  float* const sums = maxima + kWarps;                                  // kWarps floats

  const T* const row = logits + static_cast<long long>(blockIdx.x) * n;
  out += static_cast<long long>(blockIdx.x) * k;
  idx += static_cast<long long>(blockIdx.x) * k;

  Key kept[kKept] = {};  // this thread's best, falling; 0 where there is none
  const auto keep = [&kept](Key key) {
    if (key <= kept[kKept - 1]) return;
    kept[kKept - 1] = key;
#pragma unroll
    for (int j = kKept - 1; j > 0; --j) {
      const Key upper = kept[j - 1], lower = kept[j];
      kept[j - 1] = upper > lower ? upper : lower;
      kept[j] = upper > lower ? lower : upper;
    }
  };

  float maximum = kLowest, sum = 0.0f;  // a finite start: -inf adds exp(-inf) = 0
  scan<T, BLOCK, VPT>(row, n, [&](float value, unsigned index) {
    keep(make_key(value, index));
    value = number(value);
    if (value > maximum) {
      sum *= expf(maximum - value);
      maximum = value;
    }
    sum += expf(value - maximum);
  });
  bool more = kept[kKept - 1] != 0;  // the list is full: there may be elements below it

#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other_maximum = __shfl_xor_sync(kFull, maximum, offset);
    const float other_sum = __shfl_xor_sync(kFull, sum, offset);
    const float larger = fmaxf(maximum, other_maximum);
    sum = sum * expf(maximum - larger) + other_sum * expf(other_maximum - larger);
    maximum = larger;
  }
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = maximum;
    sums[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  maximum = maxima[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) maximum = fmaxf(maximum, maxima[warp]);
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp] * expf(maxima[warp] - maximum);

  for (int rank = 0; rank < k; ++rank) {
    const Key best = block_max<BLOCK>(kept[0], slots + rank % 2 * kWarps);
    if (best != kept[0]) continue;  // keys are distinct: one thread owns the best
    out[rank] = static_cast<T>(expf(key_value(best) - maximum) / sum);
    idx[rank] = static_cast<int>(key_index(best));
#pragma unroll
    for (int j = 1; j < kKept; ++j) kept[j - 1] = kept[j];
    kept[kKept - 1] = 0;
    if (kept[0] == 0 && more) {
      scan<T, BLOCK, VPT>(row, n, [&](float value, unsigned index) {
        const Key key = make_key(value, index);
        if (key < best) keep(key);
      });
      more = kept[kKept - 1] != 0;
    }
  }
}

// argmax(logits[row, :n] / temperature + noise[row, :n]), the smaller index on a tie.
//
// With Gumbel noise, -log(-log(u)), it draws from softmax(logits / temperature); with zeros it is the greedy choice.
// Dynamic shared memory: BLOCK / 4 bytes.
template <typename T, int BLOCK, int VPT>
__global__ void __launch_bounds__(BLOCK)
    sample(const T* logits, const float* noise, int* token, float temperature, int n) {
  extern __shared__ Key shared[];
  const T* const row = logits + static_cast<long long>(blockIdx.x) * n;
  noise += static_cast<long long>(blockIdx.x) * n;
  Key best = 0;
  scan<T, BLOCK, VPT>(row, n, [&](float value, unsigned index) {
    const Key key = make_key(value / temperature + noise[index], index);
    best = key > best ? key : best;
  });
  best = block_max<BLOCK>(best, shared);
  if (threadIdx.x == 0) token[blockIdx.x] = static_cast<int>(key_index(best));
}
