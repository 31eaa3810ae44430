// How matmul_stream.cu brings tokens to shared memory, and norms them on the way.
#pragma once
#include "grid.cuh"
#include "matmul_ring.cuh"
#include "norm_row.cuh"

namespace voltapile {
#if VP_ARCH >= 800

template <class F>
__device__ __forceinline__ int chunks_of(unsigned k) {
  return k / TileMemory<F>::COLUMNS;
}

// A number that is ready from here on: what is made of it waits, not what it is made of.
__device__ __forceinline__ int ready(int number) {
#ifndef VP_EMULATION
  asm volatile("" : "+r"(number));
#endif
  return number;
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

// A warp's items: each token's part of a chunk is one, and lies behind the one before it; a warp
// takes every STEP-th, and SEVERAL are on their way at a time.
template <class F, bool IS_ALONE>
struct Items {
  using M = TileMemory<F>;
  using O = Order<F>;
  static constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  // What there are registers for.
  static constexpr int SEVERAL = IS_ALONE && ONE && IS_SAME && THREADS <= 512 ? 3 : 2;
  static constexpr int STEP = TEAMS * WARPS, TURN = SEVERAL * STEP;
  static constexpr bool IS_IN_ORDER = O::APART == 4;
  const Product& all;
  const Norm& norm;
  std::uint8_t* memory;
  int first, lane, chunks, count;
  float4 a[SEVERAL], b[SEVERAL];

  __device__ __forceinline__ Items(const Product& all, const Norm& norm, std::uint8_t* memory,
                                   int first, int lane)
      : all(all), norm(norm), memory(memory), first(first), lane(lane),
        chunks(chunks_of<F>(all.k)), count(IS_ALONE ? chunks : all.tokens * chunks) {}

  // Of one token that has no more than N chunks a warp: who has fewer does the last one once more,
  // since nothing is faster than having nothing to decide. own: the first column to ask for, which
  // is first_column(); meanwhile(): what to do until it comes.
  template <int N, class Meanwhile>
  __device__ __forceinline__ void stage_few(int own, const Meanwhile& meanwhile) {
    static_assert(N <= SEVERAL);
    const bool is_normed = norm.gain != nullptr;
    grid_wait();
    int chunk[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      chunk[i] = min(first + i * STEP, chunks - 1);
      load_one(i, all.x + own + (chunk[i] - chunk[0]) * RUN, is_normed ? 4 : O::APART);
    }
    meanwhile();
    if (is_normed) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float sum = warp_join(squares_of(a[i], b[i]), Add());
        if (lane == 0) norm.sums[chunk[i]] = sum;
      }
#pragma unroll
      for (int i = 0; i < N && !IS_IN_ORDER; ++i)
        load_one(i, all.x + chunk[i] * RUN + column(), O::APART);
      norm.await_gains();
#pragma unroll
      for (int i = 0; i < N; ++i) weigh(i, chunk[i]);
      const float by = norm_factor<N * STEP>(norm.sums, chunks, norm.share, norm.eps, lane);
#pragma unroll
      for (int i = 0; i < N; ++i) scale(i, by);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) put(i, 0, chunk[i]);
  }
  __device__ __forceinline__ int first_column() const {
    return min(first, chunks - 1) * RUN + (norm.gain != nullptr ? 8 * lane : column());
  }
  template <class Meanwhile>
  __device__ __forceinline__ void stage(const Meanwhile& meanwhile) {
    const bool is_normed = norm.gain != nullptr;
    grid_wait();
    load(first, is_normed);
    meanwhile();
    if (is_normed) add_up();
    if constexpr (IS_ALONE) put_alone(is_normed);
    else put_each(is_normed);
  }

 private:
  __device__ __forceinline__ int column() const { return O::column(lane >> 2, lane & 3); }
  __device__ __forceinline__ void load_one(int i, const float* from, int apart) {
    a[i] = *reinterpret_cast<const float4*>(from);
    b[i] = *reinterpret_cast<const float4*>(from + apart);
  }
  // From `item` on, the lane's fours of each: as the format orders columns, or its neighbours.
  __device__ __forceinline__ void load(int item, bool is_natural) {
    const float* from = all.x + item * RUN + (is_natural ? 8 * lane : column());
#pragma unroll
    for (int i = 0; i < SEVERAL; ++i, from += STEP * RUN)
      if (item + i * STEP < count) load_one(i, from, is_natural ? 4 : O::APART);
  }
  // Sums of squares of all items, in the order of norm_row.cuh; the first ones are there, and are
  // again in the end.
  __device__ __forceinline__ void add_up() {
#pragma unroll 1
    for (int item = first;;) {
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        if (item + i * STEP >= count) break;
        const float sum = warp_join(squares_of(a[i], b[i]), Add());
        if (lane == 0) norm.sums[item + i * STEP] = sum;
      }
      item += TURN;
      if (item >= count) break;
      load(item, true);
    }
    if (!IS_IN_ORDER || first + TURN < count) load(first, false);
    norm.await_gains();
  }
  __device__ __forceinline__ float factor(int token) const {
    return norm_factor(norm.sums + token * chunks, chunks, norm.share, norm.eps, lane);
  }
  __device__ __forceinline__ void weigh(int i, int chunk) {
    const float* gains = norm.gains + chunk * RUN + column();
    a[i] = scaled(a[i], *reinterpret_cast<const float4*>(gains));
    b[i] = scaled(b[i], *reinterpret_cast<const float4*>(gains + O::APART));
  }
  __device__ __forceinline__ void scale(int i, float factor) {
    a[i] = scaled(a[i], factor), b[i] = scaled(b[i], factor);
  }
  __device__ __forceinline__ void put(int i, int token, int chunk) const {
    const int room = IS_ALONE ? 1 : all.tokens;
    typename M::Staged(memory + chunk * M::tokens_bytes(room), room)
        .template put<IS_ALONE>(token, a[i], b[i], lane);
  }
  // Of one token: items are chunks.
  __device__ __forceinline__ void put_alone(bool is_normed) {
    float by = 0;
#pragma unroll 1
    for (int item = first;;) {
      if (is_normed) {
#pragma unroll
        for (int i = 0; i < SEVERAL; ++i) {
          if (item + i * STEP >= count) break;
          weigh(i, item + i * STEP);
        }
        if (item == first) by = factor(0);
#pragma unroll
        for (int i = 0; i < SEVERAL; ++i) {
          if (item + i * STEP >= count) break;
          scale(i, by);
        }
      }
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        if (item + i * STEP >= count) break;
        put(i, 0, item + i * STEP);
      }
      item += TURN;
      if (item >= count) break;
      load(item, false);
    }
  }
  // In a loop that stays small.
  __device__ __forceinline__ void put_each(bool is_normed) {
#pragma unroll 1
    for (int item = first; item < count; item += STEP) {
      int token = 0, chunk = item;
      while (chunk >= chunks) ++token, chunk -= chunks;
      if (is_normed) weigh(0, chunk), scale(0, factor(token));
      put(0, token, chunk);
      a[0] = a[1], b[0] = b[1];
      const int next = item + 2 * STEP;
      if (next < count) load_one(1, all.x + next * RUN + column(), O::APART);
    }
  }
};

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// All tokens' columns, to `memory`. To be normed, items are read twice, unless SEVERAL are all and
// lie in the order of norm_row.cuh. Waits for the kernel before (grid.cuh) when it is clear what to
// ask for. Each warp calls meanwhile() once, until that comes.
template <class F, class Meanwhile = Nothing>
__device__ __forceinline__ void stage(const Product& all, const Norm& norm, std::uint8_t* memory,
                                      int first, int lane, const Meanwhile& meanwhile = {}) {
  Items<F, true> alone(all, norm, memory, first, lane);
  const int own = ONE ? ready(alone.first_column()) : 0;
  if (ONE && alone.chunks <= alone.STEP) alone.template stage_few<1>(own, meanwhile);
  else if (ONE && alone.chunks <= 2 * alone.STEP) alone.template stage_few<2>(own, meanwhile);
  else if (ONE || all.tokens == 1) alone.stage(meanwhile);
  else Items<F, false>(all, norm, memory, first, lane).stage(meanwhile);
}

#endif
}  // namespace voltapile
