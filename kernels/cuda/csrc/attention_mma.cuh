// One warp's 16 x 16 x 16 product: halves in, floats out, on every tensor core since Volta.
//
// A lane keeps of a 16 x 16 result two rows, row(lane, 0) and row(lane, 1), and of each row four
// columns; element e is at row(lane, e >> 1 & 1), column 8 (e >> 2) + 2 pair(lane) + (e & 1). The
// four lanes that share rows differ in the bits SHARE_1 and SHARE_2 of their number. Volta's four
// quad pairs compute an 8 x 8 quarter each; rows and columns are dealt out to them so that the
// padded rows of shared memory are read without bank conflicts (tests/kernels/cuda proves it).
#pragma once
#include "mma.cuh"

namespace voltapile {

using half_bits = std::uint16_t;

constexpr int PAD = 8;  // halves behind each row of shared memory; rows stay 16-byte aligned

struct Square {
  float e[8];
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = 0.0f;
  }
};

#ifndef VP_EMULATION
#if VP_ARCH < 750
// mma_884 with B by rows: lane t of a quad pair holds row t % 4 and columns 4 (t / 4) to + 3 of it.
__device__ __forceinline__ void mma_884_rows(float (&c)[8], unsigned a0, unsigned a1, unsigned b0,
                                             unsigned b1) {
  asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
#endif
#endif

#if VP_ARCH < 750

struct Mma {
  static constexpr int SHARE_1 = 2, SHARE_2 = 8;
  struct A { unsigned r[8]; };  // r[i]: k = 2i, 2i + 1 of one row
  struct B { unsigned r[8]; };

  static __device__ int pair(int lane) { return (lane >> 1 & 1) + 2 * (lane >> 3 & 1); }
  static __device__ int row(int lane, int i) {
    return row_of(number(lane), i);
  }
  // Rows of one i have numbers from 0 to 7.
  static __device__ int number(int lane) {
    return (lane & 1) + 2 * (lane >> 2 & 1) + 4 * (lane >> 4);
  }
  static __device__ int row_of(int number, int i) {
    return (number & 1) + 2 * i + 4 * (number >> 1 & 1) + 8 * (number >> 2);
  }

  // m[row][k], `pitch` halves a row
  static __device__ A load_a(const half_bits* m, int pitch, int lane) {
    const int at = (lane & 3) + 4 * (lane >> 2 & 1) + 8 * (lane >> 4);
    return load<A>(m + at * pitch);
  }
  // m[column][k]
  static __device__ B load_b(const half_bits* m, int pitch, int lane) {
    const int at = (lane & 3) + 4 * (lane >> 3 & 1) + 8 * (lane >> 4);
    return load<B>(m + at * pitch);
  }
  // m[k][column]; only for product_by_rows
  static __device__ B load_b_rows(const half_bits* m, int pitch, int lane) {
    m += (lane & 3) * pitch + 4 * (lane >> 3 & 1) + 8 * (lane >> 4);
    B b;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint2 two = *reinterpret_cast<const uint2*>(m + 4 * s * pitch);
      b.r[2 * s] = two.x;
      b.r[2 * s + 1] = two.y;
    }
    return b;
  }
  // A row's columns lie in four lanes: exchange rows with one neighbour, halves with another.
  static __device__ A from_square(const Square& p, int lane) {
    const int j = lane >> 1 & 1, c = lane >> 3 & 1;
    unsigned own[2], got[2], row[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned first = half_pair(p.e[4 * h], p.e[4 * h + 1]);
      const unsigned second = half_pair(p.e[4 * h + 2], p.e[4 * h + 3]);
      own[h] = j ? second : first;
      got[h] = __shfl_xor_sync(0xffffffffu, j ? first : second, SHARE_1);
      row[h][0] = j ? got[h] : own[h];
      row[h][1] = j ? own[h] : got[h];
    }
    A a;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, row[h][i], SHARE_2);
        a.r[4 * h + i] = c ? other : row[h][i];
        a.r[4 * h + 2 + i] = c ? row[h][i] : other;
      }
    return a;
  }
  static __device__ void product(Square& t, const A& a, const B& b) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      mma_884(t.e, a.r[2 * s], a.r[2 * s + 1], b.r[2 * s], b.r[2 * s + 1]);
  }
  static __device__ void product_by_rows(Square& t, const A& a, const B& b) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      mma_884_rows(t.e, a.r[2 * s], a.r[2 * s + 1], b.r[2 * s], b.r[2 * s + 1]);
  }

 private:
  template <class Operand>
  static __device__ Operand load(const half_bits* m) {
    const uint4 low = *reinterpret_cast<const uint4*>(m);
    const uint4 high = *reinterpret_cast<const uint4*>(m + 8);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
};

#else

struct Mma {
  static constexpr int SHARE_1 = 1, SHARE_2 = 2;
  struct A { unsigned r[4]; };
  struct B { unsigned r[4]; };  // r[0], r[1]: columns 0 to 7; r[2], r[3]: columns 8 to 15

  static __device__ int pair(int lane) { return lane & 3; }
  static __device__ int row(int lane, int i) { return row_of(number(lane), i); }
  static __device__ int number(int lane) { return lane >> 2; }
  static __device__ int row_of(int number, int i) { return number + 8 * i; }

  static __device__ A load_a(const half_bits* m, int pitch, int lane) {
    A a;
    load_matrices(a.r, m + (lane & 15) * pitch + 8 * (lane >> 4));
    return a;
  }
  static __device__ B load_b(const half_bits* m, int pitch, int lane) {
    B b;
    load_matrices(b.r, m + ((lane & 7) + 8 * (lane >> 4)) * pitch + 8 * (lane >> 3 & 1));
    return b;
  }
  static __device__ B load_b_rows(const half_bits* m, int pitch, int lane) {
    B b;
    load_matrices_turned(b.r, m + (lane & 15) * pitch + 8 * (lane >> 4));
    return b;
  }
  static __device__ A from_square(const Square& p, int) {
    return {{half_pair(p.e[0], p.e[1]), half_pair(p.e[2], p.e[3]), half_pair(p.e[4], p.e[5]),
             half_pair(p.e[6], p.e[7])}};
  }
  static __device__ void product(Square& t, const A& a, const B& b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float(&c)[4] = *reinterpret_cast<float(*)[4]>(t.e + 4 * h);
#if VP_ARCH < 800
      mma_1688(c, a.r[0], a.r[1], b.r[2 * h]);
      mma_1688(c, a.r[2], a.r[3], b.r[2 * h + 1]);
#else
      mma_16816(c, a.r[0], a.r[1], a.r[2], a.r[3], b.r[2 * h], b.r[2 * h + 1]);
#endif
    }
  }
  static __device__ void product_by_rows(Square& t, const A& a, const B& b) { product(t, a, b); }
};

#endif

// The larger, or the sum, of a row's values in the lanes that share the row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, Mma::SHARE_1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, Mma::SHARE_2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, Mma::SHARE_1);
  return x + __shfl_xor_sync(0xffffffffu, x, Mma::SHARE_2);
}

}  // namespace voltapile
