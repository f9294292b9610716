// Where am I: each thread writes its linear number, for grids and blocks of three dims, and what shared memory holds.
extern "C" __global__ void unused() {}

template <int SCALE>
__global__ void place(long long* out, double bias, unsigned char shift, bool negate) {
  extern __shared__ long long box[];
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const long long block = blockIdx.x + (long long)gridDim.x * (blockIdx.y + (long long)gridDim.y * blockIdx.z);
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  box[thread] = block * threads + thread;
  __syncthreads();
  const long long value = SCALE * box[thread] + (long long)bias + (1ll << shift);
  out[block * threads + thread] = negate ? -value : value;
}
