// Keys and values in pages of 64 positions: [page][KV head][position][dimension].
//
// f16 holds plain halves. q8_0 and q4_0 hold, for each page and head, first the integers of all 64
// positions and then their scales (a half for each 16 values of q8_0, each 32 of q4_0), so that
// 16-byte reads are aligned and have one scale; the bytes of q4_0 hold value i in the low and value
// i + 16 in the high nibble, as in GGUF. From sm_80 on each row's pieces of 16 bytes are exchanged
// (turn_of), so that rows can be copied as they lie, and eight that follow each other have one and
// the same piece in different banks; and integers of q8_0 lie there 128 higher.
// A reader brings part of a page into shared memory as halves: positions outside [low, high) and
// dimensions past the head's end become zeros, so that what was left there by others cannot harm.
#pragma once
#include "attention_copies.cuh"
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

// Four bytes as halves, in order: the byte becomes the low bits of 1024 + byte.
__device__ __forceinline__ void spread(unsigned bytes, unsigned& low, unsigned& high) {
  low = __byte_perm(bytes, 0x64646464u, 0x4140);
  high = __byte_perm(bytes, 0x64646464u, 0x4342);
}

#ifndef VP_EMULATION
__device__ __forceinline__ unsigned half_multiply(unsigned a, unsigned b) {
  const __half2 y =
      __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const unsigned*>(&y);
}
#endif

// The sum is exact.
__device__ __forceinline__ unsigned scaled(unsigned halves, float offset, unsigned scale) {
  return half_multiply(half_add(halves, half_pair(-offset, -offset)), scale);
}

// Place i of one of THREADS threads in a tile of rows of WIDE pieces, so that most of it is known
// beforehand.
template <int WIDE, int THREADS>
__device__ __forceinline__ int row_of_place(int thread, int i) {
  return THREADS % WIDE == 0 ? thread / WIDE + i * (THREADS / WIDE) : (i * THREADS + thread) / WIDE;
}
template <int WIDE, int THREADS>
__device__ __forceinline__ int column_of_place(int thread, int i) {
  return THREADS % WIDE == 0 ? thread % WIDE : (i * THREADS + thread) % WIDE;
}

// What one thread has read of ROWS positions and not yet put in shared memory. DIM is the width
// there; dim <= DIM that of the cache. The newest positions were written by a kernel that may have
// run beside this one: nothing is read by way of a cache of its own.
template <int ROWS, int DIM, int THREADS, int SLOTS>
struct Reader {
  int thread;
  uint4 data[SLOTS];
  half_bits scale[SLOTS];

  // head: this head's part of the page; row: the first position's place in it
  template <int TYPE>
  __device__ void read(const unsigned char* head, int row, int low, int high, int dim) {
    constexpr int EACH = values_of(TYPE), WIDE = DIM / EACH;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (i * THREADS >= ROWS * WIDE) break;
      const int r = row_of_place<WIDE, THREADS>(thread, i);
      const int c = column_of_place<WIDE, THREADS>(thread, i);
      data[i] = uint4{0, 0, 0, 0};
      scale[i] = 0;
      if (r < ROWS && r >= low && r < high && c * EACH < dim) {
        const int wide = dim / EACH, cell = (row + r) * wide + c;
        const int place = (row + r) * wide + (c ^ turn_of(row + r, wide));
        data[i] = __ldcg(reinterpret_cast<const uint4*>(head) + place);
        if (TYPE != F16) {
          const unsigned char* scales = head + integer_bytes(TYPE, dim);
          scale[i] = __ldcg(reinterpret_cast<const half_bits*>(scales) + cell);
        }
      }
    }
  }

  template <int TYPE>
  __device__ void put(half_bits* tile, int pitch) const {
    constexpr int EACH = values_of(TYPE), WIDE = DIM / EACH;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (i * THREADS >= ROWS * WIDE) break;
      const int r = row_of_place<WIDE, THREADS>(thread, i);
      const int c = column_of_place<WIDE, THREADS>(thread, i);
      if (r >= ROWS) break;
      uint4* to = reinterpret_cast<uint4*>(tile + r * pitch + c * EACH);
      if (TYPE == F16) to[0] = data[i];
      if (TYPE == Q8_0) {
        to[0] = bytes(data[i].x ^ BYTE_SIGNS, data[i].y ^ BYTE_SIGNS, 1152.0f, scale[i]);
        to[1] = bytes(data[i].z ^ BYTE_SIGNS, data[i].w ^ BYTE_SIGNS, 1152.0f, scale[i]);
      }
      if (TYPE == Q4_0) {
        const uint4 d = data[i];
        to[0] = bytes(d.x & 0x0f0f0f0fu, d.y & 0x0f0f0f0fu, 1032.0f, scale[i]);
        to[1] = bytes(d.z & 0x0f0f0f0fu, d.w & 0x0f0f0f0fu, 1032.0f, scale[i]);
        to[2] = bytes(d.x >> 4 & 0x0f0f0f0fu, d.y >> 4 & 0x0f0f0f0fu, 1032.0f, scale[i]);
        to[3] = bytes(d.z >> 4 & 0x0f0f0f0fu, d.w >> 4 & 0x0f0f0f0fu, 1032.0f, scale[i]);
      }
    }
  }

 private:
  static __device__ uint4 bytes(unsigned first, unsigned second, float offset, unsigned half) {
    const unsigned scale = half | half << 16;
    uint4 y;
    spread(first, y.x, y.y);
    spread(second, y.z, y.w);
    return {scaled(y.x, offset, scale), scaled(y.y, offset, scale), scaled(y.z, offset, scale),
            scaled(y.w, offset, scale)};
  }
};

// Reader::read and put for f16 at once, without registers between; arrives some time later. row: 8
// divides it.
template <int ROWS, int DIM, int THREADS>
__device__ __forceinline__ void fetch_halves(half_bits* tile, int pitch, const unsigned char* head,
                                             int row, int low, int high, int thread) {
  constexpr int WIDE = DIM / 8;
#pragma unroll
  for (int i = 0; i < (ROWS * WIDE + THREADS - 1) / THREADS; ++i) {
    const int r = row_of_place<WIDE, THREADS>(thread, i);
    const int c = column_of_place<WIDE, THREADS>(thread, i);
    if (r >= ROWS) break;
    const bool is_seen = r >= low && r < high;
    const unsigned char* from = head + ((row + r) * DIM + 8 * c) * 2;
    // (Where it is the same for all of a thread's rows the compiler is to know.)
    const int turn = turn_of(THREADS / WIDE % 8 == 0 ? thread / WIDE : r, WIDE);
    copy_async(tile + r * pitch + 8 * (c ^ turn), is_seen ? from : head, is_seen ? 16 : 0);
  }
}

}  // namespace voltapile
