// How matmul_stream.cu brings tokens to shared memory, and norms them on the way.
#pragma once
#include "matmul_ring.cuh"
#include "norm_row.cuh"

namespace voltapile {
#if VP_ARCH >= 800

template <class F>
__device__ __forceinline__ int chunks_of(unsigned k) {
  return k / TileMemory<F>::COLUMNS;
}

// What a token is normed with before it is multiplied, if anything. In shared memory: gain as it
// lies, and sums of squares, [token][chunk].
struct Norm {
  const float* gain;  // or null
  float eps, share;   // of a column in the mean
  float *gains, *sums;
  Bell* bell;  // that tells of gains

  // So early that it is there when it is needed.
  __device__ __forceinline__ void ask(int columns) const {
#if VP_ARCH >= 900
    if (threadIdx.x != 32 * TEAMS * WARPS - 1) return;
    make_bell(bell);
    tell_bells();
    expect(bell, 4 * columns);
    copy_whole(gains, gain, 4 * columns, bell);
#else
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < columns; i += 128 * TEAMS * WARPS)
      copy_async(gains + i, gain + i, 16);
    commit_copies();
#endif
  }
  // Of the block: also whatever its threads have written before.
  __device__ __forceinline__ void await_gains() const {
#if VP_ARCH >= 900
    __syncthreads();
    await_own(bell, true);
#else
    wait_for_copies<0>();
    __syncthreads();
#endif
  }
};

// All tokens' columns, to `memory`. Each token's part of a chunk is an item, and lies behind the
// one before it; a warp takes every STEP-th, and SEVERAL are on their way at a time. To be normed,
// items are read twice, unless SEVERAL are all: they are added up in the order of norm_row.cuh.
template <class F>
__device__ __forceinline__ void stage(const Product& all, const Norm& norm, std::uint8_t* memory,
                                      int first, int lane) {
  using M = TileMemory<F>;
  using O = Order<F>;
  constexpr int SEVERAL = 2, STEP = TEAMS * WARPS;
  constexpr bool IS_IN_ORDER = O::APART == 4;
  const int size = M::tokens_bytes(all.tokens), chunks = chunks_of<F>(all.k);
  const int count = all.tokens * chunks, column = O::column(lane >> 2, lane & 3);
  const float* own = all.x + column;
  bool adds_up = norm.gain != nullptr;
  int item = first;
#pragma unroll 1
  while (adds_up || item < count) {
    float4 a[SEVERAL], b[SEVERAL];
    const float* from = IS_IN_ORDER || !adds_up ? own : all.x + 8 * lane;
    const int apart = IS_IN_ORDER || !adds_up ? O::APART : 4;
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i) {
      if (item + i * STEP >= count) break;
      a[i] = *reinterpret_cast<const float4*>(from + (item + i * STEP) * RUN);
      b[i] = *reinterpret_cast<const float4*>(from + (item + i * STEP) * RUN + apart);
    }
    if (adds_up) {
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        if (item + i * STEP >= count) break;
        const float sum = warp_join(squares_of(a[i], b[i]), Add());
        if (lane == 0) norm.sums[item + i * STEP] = sum;
      }
      const bool is_first = item == first;
      item += SEVERAL * STEP;
      if (item < count) continue;
      adds_up = false;
      item = first;
      norm.await_gains();
      if (!IS_IN_ORDER || !is_first) continue;
    }
#pragma unroll 1
    while (item < count) {
      int token = 0, chunk = item;
      while (chunk >= chunks) ++token, chunk -= chunks;
      if (norm.gain != nullptr) {
        const float* gains = norm.gains + chunk * RUN + column;
        const float factor =
            norm_factor(norm.sums + token * chunks, chunks, norm.share, norm.eps, lane);
        a[0] = scaled(scaled(a[0], *reinterpret_cast<const float4*>(gains)), factor);
        b[0] = scaled(scaled(b[0], *reinterpret_cast<const float4*>(gains + O::APART)), factor);
      }
      typename M::Staged(memory + chunk * size, all.tokens).put(token, a[0], b[0], lane);
      item += STEP;
      if (item >= count) break;
#pragma unroll
      for (int i = 1; i < SEVERAL; ++i) a[i - 1] = a[i], b[i - 1] = b[i];
      const int next = item + (SEVERAL - 1) * STEP;
      if (next >= count) continue;
      a[SEVERAL - 1] = *reinterpret_cast<const float4*>(own + next * RUN);
      b[SEVERAL - 1] = *reinterpret_cast<const float4*>(own + next * RUN + O::APART);
    }
  }
}

#endif
}  // namespace voltapile
