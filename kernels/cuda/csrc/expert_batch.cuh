// Products of up to BATCH tokens of one expert with its rows, from sm_80 on. Knows neither where
// rows and tokens come from nor where sums go.
//
// Eight warps each have TILES tiles of 16 rows and all tokens, so that weights are unpacked once,
// to registers. Bytes of weights come by asynchronous copies, a stage ahead, to two places of the
// warp; tokens' halves a step of two groups ahead, to two places of the block. A quad of lanes has
// row lane / 4 of each octet (eight rows): a tile's first and second. Its lanes compute scales
// for a group each and show them to each other. Columns are summed in their order on the tensor
// core, however many tokens there are and whatever TILES is.
//
// -D TILES: 1, or 2 with half as many tokens, so that these are read half as often; PITCH: bytes
// from row to row of what does not lie by tiles, enough for a stage that begins anywhere in 16.
#pragma once
#include "attention_copies.cuh"
#include "gemm_tile.cuh"
#include "tiles.cuh"

#if VP_ARCH >= 800
namespace voltapile {

constexpr int OCTETS = 2 * TILES, WARPS = THREADS / 32, BATCH = 128 / TILES;
constexpr int STEP = 2, TOKEN_BYTES = 64 * STEP, TOKENS_BYTES = BATCH * TOKEN_BYTES;
using BatchSums = float[TILES][BATCH / 8][Tile::VALUES];

template <class F>
struct Stages {
  using C = Codec<F>;
  static constexpr int SIZE = F::length == 256 ? C::GROUPS : GROUPS;  // groups of a stage
  static constexpr int ROW_BYTES = C::BYTES * SIZE / C::GROUPS;
  static constexpr int SLACK = C::ALIGN < 16 ? 16 - C::ALIGN : 0;
  static constexpr int PIECES = (ROW_BYTES + SLACK + 15) / 16;  // that a row may touch
  static constexpr int OCTET_BYTES = 8 * PITCH, BYTES = OCTETS * OCTET_BYTES;
  static_assert(PITCH % 16 == 0 && PITCH >= 16 * PIECES);

  Lay lay;
  int groups, lane;
  bool is_whole;  // the bytes of an octet's stage are contiguous

  __device__ __forceinline__ Stages(bool is_tiled, int k, int lane)
      : lay(lay_of(HAS_TILES<F> && is_tiled, C::BYTES, k / F::length * F::bytes)),
        groups(k / 32),
        lane(lane),
        is_whole(HAS_TILES<F> && SIZE == C::GROUPS && is_tiled) {}

  // Where it begins in a row.
  __device__ __forceinline__ int begin(int stage) const {
    const int group = stage * SIZE;
    return group / C::GROUPS * lay.chunk + group % C::GROUPS * C::BYTES / C::GROUPS;
  }
  // Of a lane's row in an octet.
  __device__ __forceinline__ int row_offset() const { return (lane >> 2) * lay.row; }

  // octet_at: where an octet's first row begins. By a warp, for which nothing is there any more.
  template <class Octet>
  __device__ __forceinline__ void ask(std::uint8_t* to, const Octet& octet_at, int stage) const {
    if (stage * SIZE >= groups) return;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
      const Bytes from = octet_at(octet) + begin(stage);
      std::uint8_t* place = to + octet * OCTET_BYTES;
      if (is_whole) {
#pragma unroll
        for (int i = 0; i < (C::BYTES / 2 + 31) / 32; ++i) {
          const int at = 16 * (lane + 32 * i);
          if (at < 8 * C::BYTES) copy_async(place + at, from + at, 16);
        }
      } else {
        ask_row(place + (lane >> 2) * PITCH, from + row_offset(), stage);
      }
    }
  }
  // Where a lane's row of an octet is in what came.
  template <class Octet>
  __device__ __forceinline__ int row_at(const Octet& octet_at, int octet, int stage) const {
    const int at = octet * OCTET_BYTES;
    if (is_whole) return at + (lane >> 2) * C::BYTES;
    const int low = C::ALIGN < 16 ? low_bits(octet_at(octet) + begin(stage) + row_offset()) : 0;
    return at + (lane >> 2) * PITCH + low;
  }

 private:
  static __device__ __forceinline__ int low_bits(Bytes p) {
    return static_cast<int>(reinterpret_cast<std::uint64_t>(p) & 15);
  }
  // A row keeps its place within 16 bytes. By a quad.
  __device__ __forceinline__ void ask_row(std::uint8_t* to, Bytes from, int stage) const {
    const int low = C::ALIGN < 16 ? low_bits(from) : 0;
    const int bytes = low + C::BYTES * min(SIZE, groups - stage * SIZE) / C::GROUPS;
#pragma unroll
    for (int i = 0; i < (PIECES + 3) / 4; ++i) {
      const int at = 16 * ((lane & 3) + 4 * i);
      if (at < bytes) copy_async(to + at, from - low + at, 16);
    }
  }
};

// A step of `count` tokens' units. Odd tokens have groups exchanged, so that lanes that read
// together meet distinct banks.
__device__ __forceinline__ void ask_tokens(std::uint8_t* to, const uint4* const* tokens, int count,
                                           int step, int groups) {
  const int unit = threadIdx.x % (4 * STEP), first = step * 4 * STEP + unit;
  const int own = threadIdx.x / (4 * STEP);
  if (first >= 4 * groups) return;
  to += own * TOKEN_BYTES + 16 * (unit ^ (own & 1) << 2);
  constexpr int EACH = THREADS / (4 * STEP);  // tokens at once, an even number
#pragma unroll
  for (int i = 0; i < BATCH / EACH; ++i)
    if (own + i * EACH < count)
      copy_async(to + i * EACH * TOKEN_BYTES, tokens[own + i * EACH] + first, 16);
}

// Adds the products of a group of a step, a: of the warp's tiles.
__device__ __forceinline__ void multiply_group(const Unit (&a)[TILES][2],
                                               const std::uint8_t* tokens, int group, int count,
                                               int lane, BatchSums& total) {
  const int token = lane >> 2, unit = (4 * group + (lane & 3)) ^ (token & 1) << 2;
  const std::uint8_t* own = tokens + token * TOKEN_BYTES + 16 * unit;
#pragma unroll
  for (int n = 0; n < BATCH / 8; n += 2) {
    if (8 * n >= count) break;
    Unit b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i] = unit_at(own + (n + i) * 8 * TOKEN_BYTES, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i)
        Tile::multiply(total[i >> 1][n + (i & 1)], a[i >> 1], b + (i & 1), half);
  }
}

// A group of a warp's rows as weights. rows: this lane's; scales: of four groups, one of them a
// lane, that of this one `holder`.
template <class C>
__device__ __forceinline__ void unpack_group(const Bytes (&rows)[OCTETS], int span, int part,
                                             const float2 (&scales)[OCTETS][C::SCALES], int holder,
                                             int lane, Unit (&a)[TILES][2]) {
#pragma unroll
  for (int octet = 0; octet < OCTETS; ++octet) {
    Unit found[C::SPAN];
    C::unpack(rows[octet], span, lane & 3, found);
    float2 own[C::SCALES];
#pragma unroll
    for (int half = 0; half < C::SCALES; ++half) {
      const float2 held = scales[octet][half];
      own[half].x = __shfl_sync(~0u, held.x, (lane & ~3) | holder);
      own[half].y = C::OFFSET ? __shfl_sync(~0u, held.y, (lane & ~3) | holder) : 0.0f;
    }
    finish_unit<C>(found[part], own);
    a[octet >> 1][octet & 1] = found[part];
  }
}

// Of a warp's rows, up to four groups. base: the first in the stage; left: groups from there on;
// next_tokens(): those of the next step, by all threads.
template <class C, class Tokens>
__device__ __forceinline__ void multiply_rows(const Bytes (&rows)[OCTETS], int base, int left,
                                              const std::uint8_t* tokens,
                                              const Tokens& next_tokens, int count, int lane,
                                              BatchSums& total) {
  float2 scales[OCTETS][C::SCALES];
#pragma unroll
  for (int i = 0; i < OCTETS * C::SCALES; ++i) {
    const int octet = i / C::SCALES, half = i % C::SCALES;
    scales[octet][half] = C::scale(rows[octet], (base + (lane & 3)) * C::SCALES + half);
  }
#pragma unroll 1
  for (int first = 0; first < min(GROUPS, left); first += C::SPAN) {
#pragma unroll
    for (int part = 0; part < C::SPAN; ++part) {
      const int group = first + part;
      if (group == STEP) {
        tokens = next_tokens();
        commit_copies();
      }
      Unit a[TILES][2];
      unpack_group<C>(rows, (base + first) / C::SPAN, part, scales, group, lane, a);
      multiply_group(a, tokens, group % STEP, count, lane, total);
    }
  }
}

// shared: [2][TOKENS_BYTES], [WARPS][2][Stages::BYTES]. tokens: the units of each of `count`, a
// number rounded up to 16, in shared memory. By all threads, which have met since those are there.
template <class F, class Octet>
__device__ __forceinline__ void multiply_batch(const Octet& octet_at, bool is_tiled,
                                               const uint4* const* tokens, int k, int count,
                                               std::uint8_t* shared, BatchSums& total) {
  using S = Stages<F>;
  const int lane = threadIdx.x & 31, groups = k / 32, rounded = (count + 15) & ~15;
  std::uint8_t* weights = shared + 2 * TOKENS_BYTES + (threadIdx.x >> 5) * 2 * S::BYTES;
  const S stages(is_tiled, k, lane);
  stages.ask(weights, octet_at, 0);
  ask_tokens(shared, tokens, rounded, 0, groups);
  commit_copies();
  commit_copies();
  int step = 0;
  const auto next_tokens = [&] {  // a group of copies, or none, is to be committed behind it
    wait_for_copies<1>();  // weights that were asked for a step ago may be under way
    __syncthreads();  // the step's tokens are there for all, and the last one's are not read again
    ask_tokens(shared + (step + 1 & 1) * TOKENS_BYTES, tokens, rounded, step + 1, groups);
    commit_copies();
    return shared + (step++ & 1) * TOKENS_BYTES;
  };
#pragma unroll 1
  for (int first = 0; first < groups; first += GROUPS) {
    const std::uint8_t* units = next_tokens();
    const int stage = first / S::SIZE;
    std::uint8_t* own = weights + (stage & 1) * S::BYTES;
    if (first % S::SIZE == 0)
      stages.ask(weights + (stage + 1 & 1) * S::BYTES, octet_at, stage + 1);
    commit_copies();
    Bytes rows[OCTETS];
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet)
      rows[octet] = own + stages.row_at(octet_at, octet, stage);
    multiply_rows<Codec<F>>(rows, first % S::SIZE, groups - first, units, next_tokens, count, lane,
                            total);
  }
}

}  // namespace voltapile
#endif
