// Keys and values in pages of 64 positions: [page][KV head][position][dimension].
//
// f16 holds plain halves. q8_0 and q4_0 hold, for each page and head, first the integers of all 64
// positions and then their scales (a half for each 16 values of q8_0, each 32 of q4_0), so that
// 16-byte reads are aligned and have one scale; the bytes of q4_0 hold value i in the low and value
// i + 16 in the high nibble, as in GGUF. From sm_80 on each row's pieces of 16 bytes are exchanged
// (turn_of), so that rows can be copied as they lie, and eight that follow each other have one and
// the same piece in different banks; and integers of q8_0 lie there 128 higher.
#pragma once
#include "half.cuh"

namespace voltapile {

using half_bits = std::uint16_t;

constexpr int PAGE = 64;
enum Kind { F16 = 0, Q8_0 = 1, Q4_0 = 2 };

__device__ constexpr int values_of(int kind) {  // in 16 bytes
  return kind == F16 ? 8 : kind == Q8_0 ? 16 : 32;
}

// Bytes of one head in a page; of it those before the scales.
__device__ __forceinline__ long long integer_bytes(int kind, int dim) {
  return PAGE * dim * 2 >> kind;
}
__device__ __forceinline__ long long head_bytes(int kind, int dim) {
  return integer_bytes(kind, dim) + (kind == F16 ? 0 : PAGE * dim >> (2 + kind));
}

constexpr unsigned BYTE_SIGNS = VP_ARCH < 800 ? 0x80808080u : 0;  // make them so where they are not

// A row has `wide` pieces of 16 bytes, of which `group_of` are exchanged among themselves: piece c
// of `row` lies where c ^ turn_of() would.
__device__ constexpr unsigned group_of(unsigned wide) {
  const unsigned power = wide & (0u - wide);
  return power < 8 ? power : 8;
}
__device__ constexpr unsigned turn_of(unsigned row, unsigned wide) {
  const unsigned group = group_of(wide);
  return VP_ARCH < 800 ? 0 : row * group / 8 & (group - 1);
}

}  // namespace voltapile
