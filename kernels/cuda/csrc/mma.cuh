// The interface to tensor cores: 16 rows of weights times 8 tokens, fp16 in, fp32 out. Four warps
// together have another (warpgroup.cuh).
//
// Columns come in groups of 32. A *unit* p (0..3) of a group is its columns 4p..4p+3 and
// 16+4p..16+4p+3: four registers of two halves, of which registers 0, 1 belong to the first 16
// columns and 2, 3 to the second. Which column is which half of a register is up to the caller, as
// long as weights and tokens agree: a sum has no order here.
//
// A lane holds UNITS units of each of ROWS rows (weights) and of one token, and VALUES sums:
//            ROWS  UNITS  VALUES  instruction
//   sm_70    1     2      8       m8n8k4: 4 products of 8x8x4; two take the even and odd rows of
//                                 units 0 and 2, two those of units 1 and 3; fold() joins them
//   sm_75    2     1      4       m16n8k8
//   sm_80    2     1      4       m16n8k16
// Row numbers are dealt so that lanes that read together meet distinct banks when a row starts an
// odd number of 16 bytes behind the last one.
#pragma once
#include "half.cuh"

namespace voltapile {

struct Unit {
  unsigned r[4];
};

#ifndef VP_EMULATION
#if VP_ARCH >= 750
// Four matrices of 8 x 8 halves from shared memory, a row's address from each lane; `turned` turns
// them round.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const std::uint16_t* m) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(m));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
__device__ __forceinline__ void load_matrices_turned(unsigned (&r)[4], const std::uint16_t* m) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(m));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
}
#endif
#if VP_ARCH >= 800
__device__ __forceinline__ void mma_16816(float (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                          unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#elif VP_ARCH >= 750
__device__ __forceinline__ void mma_1688(float (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
#else
__device__ __forceinline__ void mma_884(float (&c)[8], unsigned a0, unsigned a1, unsigned b0,
                                        unsigned b1) {
  asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
#endif
#endif

#if VP_ARCH >= 750
struct Tile {
  static constexpr int ROWS = 2, UNITS = 1, VALUES = 4, TOKENS = 2;
  int lane;

  __device__ int row(int i) const {  // i-th row of weights that this lane holds
    const int g = lane >> 2;
    return (g < 4 ? 2 * g : 2 * g - 7) + 8 * i;
  }
  __device__ int unit(int) const { return lane & 3; }
  __device__ int token() const { return lane >> 2; }
  // Sums: value e belongs to row sum_row(row_of(e)) and token sum_token(token_of(e)).
  __device__ int sum_row(int i) const { return row(i); }
  __device__ int sum_token(int i) const { return 2 * (lane & 3) + i; }
  static __device__ constexpr int row_of(int e) { return e >> 1; }
  static __device__ constexpr int token_of(int e) { return e & 1; }
  // Of what lanes hold of their own rows, that of the i-th row of this lane's sums.
  __device__ unsigned of_sum_row(const unsigned (&own)[ROWS], int i) const { return own[i]; }
  // What is added to a sum once must be added by these lanes only.
  __device__ bool owns_sums() const { return true; }
  __device__ float fold(float sum) const { return sum; }

  // c += a b over the 16 columns of `half`. a: [ROWS * UNITS], the units of a row together.
  static __device__ __forceinline__ void multiply(float (&c)[VALUES], const Unit* a, const Unit* b,
                                                  int half) {
    const int r = 2 * half;
#if VP_ARCH >= 800
    mma_16816(c, a[0].r[r], a[1].r[r], a[0].r[r + 1], a[1].r[r + 1], b[0].r[r], b[0].r[r + 1]);
#else
    mma_1688(c, a[0].r[r], a[1].r[r], b[0].r[r]);
    mma_1688(c, a[0].r[r + 1], a[1].r[r + 1], b[0].r[r + 1]);
#endif
  }
};
#else
struct Tile {
  static constexpr int ROWS = 1, UNITS = 2, VALUES = 8, TOKENS = 4;
  int lane;

  __device__ int quad() const { return lane >> 2 & 3; }
  __device__ int place() const { return (lane & 3) + (lane >> 4 << 2); }  // in the quad pair
  __device__ int row(int) const { return 2 * place() + (quad() & 1); }
  __device__ int unit(int i) const { return (quad() >> 1) + 2 * i; }
  __device__ int token() const { return place(); }
  __device__ int sum_row(int i) const {
    return 2 * ((lane & 1) + 2 * i + (lane >> 4 << 2)) + (quad() & 1);
  }
  __device__ int sum_token(int i) const { return (lane & 2) + (i & 1) + (i >> 1 << 2); }
  static __device__ constexpr int row_of(int e) { return e >> 1 & 1; }
  static __device__ constexpr int token_of(int e) { return (e & 1) | (e >> 2 << 1); }
  __device__ unsigned of_sum_row(const unsigned (&own)[ROWS], int i) const {
    return __shfl_sync(~0u, own[0], (lane & 29) | 2 * i);
  }
  __device__ bool owns_sums() const { return (lane & 8) == 0; }
  __device__ float fold(float sum) const { return sum + __shfl_xor_sync(~0u, sum, 8); }

  static __device__ __forceinline__ void multiply(float (&c)[VALUES], const Unit* a, const Unit* b,
                                                  int half) {
    const int r = 2 * half;
    mma_884(c, a[0].r[r], a[0].r[r + 1], b[0].r[r], b[0].r[r + 1]);
    mma_884(c, a[1].r[r], a[1].r[r + 1], b[1].r[r], b[1].r[r + 1]);
  }
};
#endif

}  // namespace voltapile
