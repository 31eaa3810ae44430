// What decode and prefill do alike with positions in shared memory: where they come from, masks,
// softmax. HEAD_DIM, KIND (of both caches; 3: told at run time) come from -D.
#pragma once
#include "attention_kv.cuh"
#include "attention_mma.cuh"
#include "attention_rows.cuh"

namespace voltapile {

constexpr int DIM = HEAD_DIM, TILE = DIM > 128 ? 32 : 64, PITCH = DIM + PAD;
constexpr int ANY = 3;
constexpr bool IS_ASYNC = VP_ARCH >= 800 && KIND == F16, TRUNCATES = VP_ARCH < 750;
constexpr int CHAIN = TRUNCATES ? 64 : DIM;  // products that are summed in one accumulator

// Columns of a row in memory.
__device__ __forceinline__ int width_of(int dim) { return KIND == ANY ? dim : DIM; }

// `threads` call; `count` times 16 bytes become zeros.
__device__ __forceinline__ void clear_quads(half_bits* from, int count, int thread,
                                            int threads = 32) {
#pragma unroll 1
  for (int i = thread; i < count; i += threads)
    reinterpret_cast<uint4*>(from)[i] = uint4{0, 0, 0, 0};
}

// One of the two caches of a layer.
struct Cache {
  const unsigned char* base;
  int kind, dim;
  __device__ const unsigned char* head(int at) const {
    return base + at * head_bytes(KIND == ANY ? kind : KIND, KIND == ANY ? dim : DIM);
  }
};

// Walks over the pages of one slot for one KV head.
struct Pages {
  const int* table;
  int pages, kv_heads, kv_head, width;
  // the head's place in the page that position p lies in, counted in heads
  __device__ int at(int p) const { return head_in(id(p)); }
  __device__ int id(int p) const { return table[min(p / PAGE, width - 1)]; }
  __device__ int head_in(int id) const {
    return (id >= 0 && id < pages ? id : 0) * kv_heads + kv_head;
  }
};

// ROWS positions on their way by some threads' registers.
template <int ROWS, int THREADS>
struct Fetch {
  static constexpr int LEAST = KIND == ANY ? 8 : values_of(KIND);
  Reader<ROWS, DIM, THREADS, (ROWS * DIM / LEAST + THREADS - 1) / THREADS> reader;

  __device__ explicit Fetch(int thread) { reader.thread = thread; }

  // low, high: the positions that anybody sees
  __device__ void read(const Cache& c, int at, int p, int low, int high) {
    const unsigned char* head = c.head(at);
    const int kind = KIND == ANY ? c.kind : KIND, row = p % PAGE;
    const int dim = KIND == ANY ? c.dim : DIM;
    if (kind == F16) reader.template read<F16>(head, row, low - p, high - p, dim);
    if (kind == Q8_0) reader.template read<Q8_0>(head, row, low - p, high - p, dim);
    if (kind == Q4_0) reader.template read<Q4_0>(head, row, low - p, high - p, dim);
  }
  __device__ void put(const Cache& c, half_bits* tile) const {
    const int kind = KIND == ANY ? c.kind : KIND;
    if (kind == F16) reader.template put<F16>(tile, PITCH);
    if (kind == Q8_0) reader.template put<Q8_0>(tile, PITCH);
    if (kind == Q4_0) reader.template put<Q4_0>(tile, PITCH);
  }
};

// Scale, soft cap and mask of one row's four columns in a tile of 16 positions from p on.
// factor: to the exponent of 2, or (with a cap) to what tanh takes; cap: times log2(e).
__device__ __forceinline__ void finish_scores(Square& s, int i, int p, int low, int high,
                                              float factor, float cap, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = 4 * h + 2 * i + j, at = p + 8 * h + 2 * Mma::pair(lane) + j;
      float x = __fmul_rn(s.e[e], factor);  // nothing is contracted: all kernels alike
      if (cap != 0.0f) x = __fmul_rn(cap, tanh_fast(x));
      s.e[e] = at >= low && at < high ? x : -infinity();
    }
}

__device__ __forceinline__ float largest(const Square& s, int i) {
  return fmaxf(fmaxf(s.e[2 * i], s.e[2 * i + 1]), fmaxf(s.e[4 + 2 * i], s.e[4 + 2 * i + 1]));
}

// s becomes 2^(s - m) for one row; returns the sum of this lane's.
__device__ __forceinline__ float exponentials(Square& s, int i, float m) {
  float sum = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = 4 * h + 2 * i + j;
      s.e[e] = exp2_fast(s.e[e] - m);
      sum += s.e[e];
    }
  return sum;
}

// The running maximum of a row after one more value; `shift` what to subtract, `alpha` what the
// sums so far are to be multiplied by.
struct Running {
  float m = -infinity();
  __device__ float take(float next, float& alpha) {
    const float larger = fmaxf(m, next), shift = larger == -infinity() ? 0.0f : larger;
    alpha = exp2_fast(m - shift);
    m = larger;
    return shift;
  }
};

}  // namespace voltapile
