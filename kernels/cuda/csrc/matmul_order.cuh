// Tokens for chunks of 256 columns that are multiplied as their bytes lie (matmul_block.cuh): the
// order of columns that each format makes, and what shared memory keeps of a token.
#pragma once
#include "formats/registry.h"
#include "matmul_tokens.cuh"
#include "matmul_words.cuh"

namespace voltapile {

__device__ __forceinline__ Unit unit_at(const Unit* at) {
  const uint4 v = *reinterpret_cast<const uint4*>(at);
  return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ unsigned word_of(const uint4& v, int k) {
  return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
}

// Unit j (0..7) of lane p (0..3) is four columns from column(j, p) on and four from APART later.
// EXACT_BITS: of tokens that are whole numbers times 2^-24, so many that sums of a group of 32 are
// exact on whichever tensor core; 0 where tokens keep all bits of a half. OF_GROUPS: each group has
// so many bits of its own, so that an outlier takes none from more than its group.
template <class F>
struct Order {
  static constexpr bool IS_BLOCK = false, SUMS = false;
};
// sm_80: eight neighbours of each group, so that scales can wait for the sums of a group. Before,
// where bytes come straight from global memory (matmul_direct.cuh), 16 bytes at once: piece i (0 to
// 7) of a block is 16 bytes of nibbles, and lane p takes pieces p and 4 + p.
template <>
struct Order<formats::Q4_K> {
  static constexpr bool IS_BLOCK = true, SUMS = true, NATURAL = false, TURNS = true;
  static constexpr int APART = IS_ASYNC ? 4 : 32, EXACT_BITS = IS_ASYNC ? 14 : 0;
  static constexpr bool OF_GROUPS = false;
  static __device__ __forceinline__ int column(int j, int p) {
    return IS_ASYNC ? 32 * j + 8 * p
                    : 128 * (j >> 2) + 64 * (p >> 1) + 16 * (p & 1) + 4 * (j & 3);
  }
};
// Lane p takes 16 bytes of upper bits and the two times 16 of lower ones that belong to them, word
// after word. From sm_80 on, where rows of a tile lie 210 bytes apart, no other order meets fewer
// banks of shared memory twice, and a word's end is the next one's begin. Before, lanes begin with
// word p, and meet none.
template <>
struct Order<formats::Q6_K> {
  static constexpr bool IS_BLOCK = true, SUMS = false, NATURAL = false, TURNS = false;
  static constexpr int APART = 64, EXACT_BITS = 0;
  static constexpr bool OF_GROUPS = false;
  static __device__ __forceinline__ int column(int j, int p) {
    return 128 * (p >> 1) + 32 * (j & 1) + 16 * (p & 1) + 4 * word(j >> 1, p);
  }
  // Lane p's k-th.
  static __device__ __forceinline__ int word(int k, int p) { return IS_ASYNC ? k : (k + p) & 3; }
};
// As units have them (mma.cuh): what its Codec unpacks.
template <>
struct Order<formats::Q5_K> {
  static constexpr bool IS_BLOCK = false;
  static constexpr int APART = 16;
  static __device__ __forceinline__ int column(int j, int p) { return 32 * j + 4 * p; }
};
template <>
struct Order<formats::Q8_0> {
  static constexpr bool IS_BLOCK = true, SUMS = false, NATURAL = true, TURNS = false;
  static constexpr int APART = 4, EXACT_BITS = IS_ASYNC ? 12 : 0;
  static constexpr bool OF_GROUPS = IS_ASYNC;
  static __device__ __forceinline__ int column(int j, int p) { return 32 * j + 8 * p; }
};

// In shared memory, for `room` tokens of a chunk: records one after the other,
//   units   [8][4] Units
//   sums    [4]: of Q4_K pairs for groups 2 p and 2 p + 1, over 2^6, and what they leave times 2^11
//   scale   what sums of products are multiplied by
// Their size is an odd number of 64 bytes, so that lanes that read together meet distinct banks.
// If sums are exact, a token that is alone (room 1) is kept as bytes instead of units:
//   groups  [8][2] its upper bytes, its lower ones: 32, of which the second 16 come first in every
//           other pair of groups, if the order TURNS: so lanes meet no bank of those of weights
// and, if its groups have bits of their own, with their scales in the place of sums: floats.
struct Records {
  static constexpr int PER_TOKEN = 576, SUMS = 512, SCALE = 544;
  std::uint8_t* memory;
  int room;

  static __device__ constexpr int bytes(int room) { return PER_TOKEN * room; }
  // A token's record, or another where there is none: its sums are nobody's.
  __device__ __forceinline__ std::uint8_t* record(int token) const {
    return memory + (token < room ? token : 0) * PER_TOKEN;
  }
  static __device__ __forceinline__ Unit unit(const std::uint8_t* record, int j, int p) {
    return unit_at(reinterpret_cast<const Unit*>(record) + 4 * j + p);
  }
  static __device__ __forceinline__ uint2 sums(const std::uint8_t* record, int p) {
    return reinterpret_cast<const uint2*>(record + SUMS)[p];
  }
  __device__ __forceinline__ float scale(int token) const {
    return *reinterpret_cast<const float*>(record(token) + SCALE);
  }
  __device__ __forceinline__ void put_unit(int token, const Unit& unit, int lane) const {
    reinterpret_cast<uint4*>(memory + token * PER_TOKEN)[lane] =
        uint4{unit.r[0], unit.r[1], unit.r[2], unit.r[3]};
  }
  // Of lane i of four.
  __device__ __forceinline__ void put_pair(int token, uint2 pair, int i) const {
    reinterpret_cast<uint2*>(memory + token * PER_TOKEN + SUMS)[i] = pair;
  }
  __device__ __forceinline__ void put_scale(int token, float scale) const {
    *reinterpret_cast<float*>(memory + token * PER_TOKEN + SCALE) = scale;
  }
};

// The same as matmul_crowd.cuh wants them, for `room` tokens, 16 or 32, that come together, from a
// multiple of 1024 bytes on:
//   units   [4] pairs of groups of [room] rows of 8 pieces of 16 bytes: piece 4 odd + i is made of
//           register i of the group's four units. In a row, piece c lies where c ^ row % 8 would:
//           as the tensor core reads them (warpgroup.cuh), and so that no bank is met twice.
//   sums    [room][2][4]: of Q4_K pairs, then what they leave
//   scales  [room]
struct CrowdOrder {
  static constexpr int PER_TOKEN = 576, ROW = 128;
  std::uint8_t* memory;
  int room;

  static __device__ constexpr int sums(int room) { return 512 * room; }
  static __device__ constexpr int scales(int room) { return 544 * room; }
  static __device__ constexpr int bytes(int room) { return PER_TOKEN * room; }

  // Lane 4 j + p has unit p of group j. Four lanes turn theirs, so that each has a piece.
  __device__ __forceinline__ void put_unit(int token, const Unit& unit, int lane) const {
    const bool is_odd = lane & 1, is_upper = lane & 2;
    unsigned pairs[2][2];  // of registers 0 or 1, and 2 or 3, of two lanes
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned even = unit.r[2 * i], odd = unit.r[2 * i + 1];
      const unsigned other = __shfl_xor_sync(~0u, is_odd ? even : odd, 1);
      pairs[i][0] = is_odd ? other : even, pairs[i][1] = is_odd ? odd : other;
    }
    unsigned others[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      others[i] = __shfl_xor_sync(~0u, is_upper ? pairs[0][i] : pairs[1][i], 2);
    const uint4 piece = is_upper ? uint4{others[0], others[1], pairs[1][0], pairs[1][1]}
                                 : uint4{pairs[0][0], pairs[0][1], others[0], others[1]};
    std::uint8_t* row = memory + ((lane >> 3) * room + token) * ROW;
    *reinterpret_cast<uint4*>(row + 16 * ((lane ^ token) & 7)) = piece;
  }
  __device__ __forceinline__ void put_pair(int token, uint2 pair, int i) const {
    unsigned* own = reinterpret_cast<unsigned*>(memory + sums(room) + 32 * token) + i;
    own[0] = pair.x, own[4] = pair.y;
  }
  __device__ __forceinline__ void put_scale(int token, float scale) const {
    *reinterpret_cast<float*>(memory + scales(room) + 4 * token) = scale;
  }
};

// Tokens of a format, whose parts lie as P has them.
template <class F, class P = Records>
struct BlockTokens : P {
  using O = Order<F>;
  using P::memory, P::room;
  static constexpr bool IS_EXACT = O::EXACT_BITS > 0;

  __device__ BlockTokens(std::uint8_t* memory, int room) : P{memory, room} {}

  __device__ __forceinline__ bool is_alone() const { return IS_EXACT && PASSES == 1 && room == 1; }

  // This lane's eight columns of a token's row, of which there are a multiple of 32; column: where
  // the chunk starts.
  static __device__ __forceinline__ void load(const float* row, int column, int k, int lane,
                                              float4& a, float4& b) {
    if constexpr (F::length == 256) {
      load_whole(row, column, lane, a, b);
    } else {
      const int first = column + O::column(lane >> 2, lane & 3);
      a = b = float4{0, 0, 0, 0};
      if (first < k) a = *reinterpret_cast<const float4*>(row + first);
      if (first + O::APART < k) b = *reinterpret_cast<const float4*>(row + first + O::APART);
    }
  }
  // The same where k is a multiple of 256; offset: of the chunk from the first token's row on.
  static __device__ __forceinline__ void load_whole(const float* x, unsigned offset, int lane,
                                                    float4& a, float4& b) {
    const float* first = x + O::column(lane >> 2, lane & 3) + offset;
    a = *reinterpret_cast<const float4*>(first);
    b = *reinterpret_cast<const float4*>(first + O::APART);
  }
  // The whole warp puts what it loaded to its place. CAN_BE_ALONE: false where it has company.
  template <bool CAN_BE_ALONE = true>
  __device__ __forceinline__ void put(int token, float4 a, float4 b, int lane) const {
    const float own_largest = larger_of(largest_of(a), largest_of(b));
    if constexpr (O::OF_GROUPS)
      return put_groups<CAN_BE_ALONE>(token, a, b, own_largest, lane);
    const float largest = largest_of_warp(own_largest);
    const float2 scale =
        IS_EXACT ? exact_scales_for<O::EXACT_BITS>(largest) : scales_for(largest);
    Unit unit;
    const float low = pack_four<O::NATURAL>(a, scale.x, unit.r, nullptr);
    const float high = pack_four<O::NATURAL>(b, scale.x, unit.r + 2, nullptr);
    if constexpr (O::SUMS) put_sums(token, unit, low, high, lane);
    if (CAN_BE_ALONE && is_alone())
      put_bytes(unit, lane);
    else
      P::put_unit(token, unit, lane);
    if (lane == 0) P::put_scale(token, scale.y);
  }
  __device__ __forceinline__ void stage(const float* x, int tokens, int k, int column,
                                        int lane) const {
    float4 a, b;
    if constexpr (PASSES > 1) {  // two at once, for which there are registers now and then
#pragma unroll 2
      for (int token = 0; token < tokens; ++token, x += k) {
        load(x, column, k, lane, a, b);
        put(token, a, b, lane);
      }
    } else {
      load(x, column, k, lane, a, b);
#pragma unroll 1
      for (int token = 0; token < tokens; ++token) {
        const float4 own = a, apart = b;
        if (token + 1 < tokens) load(x += k, column, k, lane, a, b);  // while the other is put
        put(token, own, apart, lane);
      }
    }
  }

 private:
  // Lane / 4 is the group. Alone, whole numbers stay as they are, and their sums are moved up.
  template <bool CAN_BE_ALONE>
  __device__ __forceinline__ void put_groups(int token, float4 a, float4 b, float largest,
                                             int lane) const {
    static_assert(!O::SUMS);
    largest = larger_of(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = larger_of(largest, __shfl_xor_sync(~0u, largest, 2));
    const GroupScale by = exact_scale_of<O::EXACT_BITS>(largest, largest_of_warp(largest));
    if (lane == 0) P::put_scale(token, by.inverse);
    Unit unit;
    pack_four<O::NATURAL>(a, by.scale, unit.r, nullptr);
    pack_four<O::NATURAL>(b, by.scale, unit.r + 2, nullptr);
    if (CAN_BE_ALONE && is_alone()) {
      if ((lane & 3) == 0)
        reinterpret_cast<float*>(memory + Records::SUMS)[lane >> 2] =
            __uint_as_float(static_cast<unsigned>(by.up + 103) << 23);  // 2^(up - 24)
      put_bytes(unit, lane);
    } else {
      const unsigned up = static_cast<unsigned>(by.up + 15) * 0x04000400;  // twice, as halves
#pragma unroll
      for (int i = 0; i < 4; ++i) unit.r[i] = half_mul(unit.r[i], up);
      P::put_unit(token, unit, lane);
    }
  }
#if VP_ARCH >= 800
  // On the tensor core: a matrix of one number makes sums of the columns of group lane / 4, which
  // are this lane's and its neighbours'. Lane p has those of groups 2 p and 2 p + 1.
  __device__ __forceinline__ void put_sums(int token, const Unit& unit, float, float,
                                           int lane) const {
    constexpr unsigned N = 0x24002400;  // 2^-6 twice
    float sums[4] = {};
    mma_16816(sums, N, N, N, N, unit.r[0], unit.r[1]);
    mma_16816(sums, N, N, N, N, unit.r[2], unit.r[3]);
    const uint2 pair = kept_sums(sums[0], sums[1]);
    if (lane < 4) P::put_pair(token, pair, lane);
  }
#else
  // low, high: sums of this lane's two fours of columns.
  __device__ __forceinline__ void put_sums(int token, const Unit&, float low, float high,
                                           int lane) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int step = i ? 2 << i : 1;
      low += __shfl_xor_sync(~0u, low, step);
      high += __shfl_xor_sync(~0u, high, step);
    }
    if ((lane & 13) != 0) return;
    P::put_pair(token, kept_sums(low * 0x1p-6f, high * 0x1p-6f),
                2 * (lane >> 4) + (lane >> 1 & 1));
  }
#endif
  // Of group lane / 4, of a token that is alone.
  __device__ __forceinline__ void put_bytes(const Unit& unit, int lane) const {
    const PutBytes bytes = put_bytes_of<O::NATURAL>(unit);
    const int turned = O::TURNS ? lane >> 2 & 2 : 0;
    std::uint8_t* at = memory + 64 * (lane >> 2) + 8 * ((lane & 3) ^ turned);
    *reinterpret_cast<uint2*>(at) = bytes.high;
    *reinterpret_cast<uint2*>(at + 32) = bytes.low;
  }
  // Two sums as halves, and what these leave times 2^11.
  static __device__ __forceinline__ uint2 kept_sums(float low, float high) {
    const unsigned pair = half_pair(low, high);
    const float2 kept = half_values(pair);
    return {pair, half_pair((low - kept.x) * 2048.0f, (high - kept.y) * 2048.0f)};
  }
};

}  // namespace voltapile
