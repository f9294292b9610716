#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "traits.h"

// One template for all element types; a struct by value, and shared memory whose size is a template argument.
struct Limits {
    char kind;
    double low;
    int high;
};

template <typename T, int BLOCK>
__global__ void __launch_bounds__(BLOCK) reversed(T* x, Limits limits, int n) {
    __shared__ T buffer[BLOCK];
    if constexpr (sizeof(T) < MAX_BYTES) {
        buffer[threadIdx.x] = x[threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x < n && limits.high > 0) {
        x[threadIdx.x] = buffer[BLOCK - 1 - threadIdx.x];
    }
}

extern "C" __global__ void spilling(float* x, int n) {
    float values[96];
    for (int i = 0; i < 96; ++i) values[i] = x[i * n + threadIdx.x];
    for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int i = 0; i < 96; ++i) values[i] = values[i] * values[(i + 7) % 96] + 1.0f;
    }
    for (int i = 0; i < 96; ++i) x[i * n] = values[i];
}
