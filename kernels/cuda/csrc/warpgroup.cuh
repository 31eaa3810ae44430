// Products by four warps together, for compute capability 9.0 alone (sm_90a): each has 16 rows of
// weights in its registers, as for Tile::multiply, and the tensor core reads the tokens of all of
// them from shared memory by itself. Fragments and sums are those of m16n8k16 (mma.cuh), PASSES
// times eight tokens at once.
//
// All four warps come along the same way: they call each of these together. From begin_products()
// to await_products() neither registers of weights nor sums may be touched. What threads wrote to
// tokens must have been shown by show_tokens() first, which copies that rang a bell need not.
#pragma once
#include "matmul_tokens.cuh"

#if VP_ARCH == 900
namespace voltapile {

constexpr int GROUP_WARPS = 4;
using Sums = float[PASSES][Tile::VALUES];

#ifndef VP_EMULATION
// Where tokens lie for 16 columns: 32 bytes of rows of 128, from a multiple of eight rows on, which
// is one of 1024 bytes. In rows pieces of 16 bytes are exchanged as CrowdOrder has them.
struct Descriptor {
  std::uint64_t bits;

  __device__ __forceinline__ explicit Descriptor(const std::uint8_t* memory) {
    unsigned at;  // so that the compiler computes with 32 bits
    asm("{ .reg .u64 p; cvta.to.shared.u64 p, %1; cvt.u32.u64 %0, p; }" : "=r"(at) : "l"(memory));
    // From bit 24 on is the block's number in its cluster.
    constexpr unsigned EIGHT_ROWS = 1024 >> 4, IS_EXCHANGED = 1 << 30;
    bits = (at & 0x3ffff) >> 4 | std::uint64_t{EIGHT_ROWS | IS_EXCHANGED} << 32;
  }
  // bytes: a multiple of 16.
  __device__ __forceinline__ Descriptor after(int bytes) const {
    Descriptor found = *this;
    found.bits += bytes >> 4;
    return found;
  }
  // The same, which is not computed again.
  __device__ __forceinline__ Descriptor kept() const {
    Descriptor found = *this;
    found.bits = __shfl_sync(~0u, static_cast<unsigned>(bits), 0) | bits >> 32 << 32;
    return found;
  }
};

__device__ __forceinline__ void show_tokens() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// a: the registers of weights, which the compiler is to have made by then.
__device__ __forceinline__ void begin_products(Unit (&a)[2]) {
  asm volatile("wgmma.fence.sync.aligned;"
               : "+r"(a[0].r[0]), "+r"(a[0].r[1]), "+r"(a[0].r[2]), "+r"(a[0].r[3]),
                 "+r"(a[1].r[0]), "+r"(a[1].r[1]), "+r"(a[1].r[2]), "+r"(a[1].r[3])::"memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// c = a b, or c += a b if ADDS, over 16 columns; a as mma_16816 takes it.
template <bool ADDS>
__device__ __forceinline__ void multiply_together(float (&c)[2][4], unsigned a0, unsigned a1,
                                                  unsigned a2, unsigned a3, Descriptor b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "{%8,%9,%10,%11}, %12, p, 1, 1, 0;\n"
      "}\n"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
        "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b.bits), "n"(ADDS)
      : "memory");
}
template <bool ADDS>
__device__ __forceinline__ void multiply_together(float (&c)[4][4], unsigned a0, unsigned a1,
                                                  unsigned a2, unsigned a3, Descriptor b) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,"
      "%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;\n"
      "}\n"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
        "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
        "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b.bits), "n"(ADDS)
      : "memory");
}
// Until all that was committed is there. The compiler is to know which sums are.
__device__ __forceinline__ void await_products(float (&c)[2][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                 "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])::"memory");
}
__device__ __forceinline__ void await_products(float (&c)[4][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]),
                 "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]),
                 "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]),
                 "+f"(c[3][3])::"memory");
}
#endif

// Of a group of 32 columns, as Tile::multiply makes them in two steps. a: of a lane's two rows.
template <bool ADDS>
__device__ __forceinline__ void multiply_group(Sums& c, const Unit (&a)[2], Descriptor b) {
  multiply_together<ADDS>(c, a[0].r[0], a[1].r[0], a[0].r[1], a[1].r[1], b);
  multiply_together<true>(c, a[0].r[2], a[1].r[2], a[0].r[3], a[1].r[3], b.after(32));
}

}  // namespace voltapile
#endif
