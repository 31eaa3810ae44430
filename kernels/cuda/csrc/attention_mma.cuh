// One warp's 16 x 16 x 16 product: halves in, floats out, on every tensor core since Volta.
//
// A lane keeps of a 16 x 16 result two rows, row(lane, 0) and row(lane, 1), and of each row four
// columns; element e is at row(lane, e >> 1 & 1), column 8 (e >> 2) + 2 pair(lane) + (e & 1). The
// four lanes that share rows differ in the bits SHARE_1 and SHARE_2 of their number. Volta's four
// quad pairs compute an 8 x 8 quarter each; rows and columns are dealt out to them so that the
// padded rows of shared memory are read without bank conflicts (tests/kernels/cuda proves it).
#pragma once
#include <cuda_fp16.h>

namespace voltapile {

constexpr int PAD = 8;  // halves behind each row of shared memory; rows stay 16-byte aligned

struct Tile {
  float e[8];
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = 0.0f;
  }
};

__device__ __forceinline__ unsigned pack(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const unsigned*>(&h);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750

struct Mma {
  static constexpr int SHARE_1 = 2, SHARE_2 = 8;
  struct A { unsigned r[8]; };  // r[i]: k = 2i, 2i + 1 of one row
  struct B { unsigned r[8]; };

  static __device__ int pair(int lane) { return (lane >> 1 & 1) + 2 * (lane >> 3 & 1); }
  static __device__ int row(int lane, int i) {
    return (lane & 1) + 2 * i + 4 * (lane >> 2 & 1) + 8 * (lane >> 4);
  }

  // m[row][k], `pitch` halves a row
  static __device__ A load_a(const __half* m, int pitch, int lane) {
    const int at = (lane & 3) + 4 * (lane >> 2 & 1) + 8 * (lane >> 4);
    return load<A>(m + at * pitch);
  }
  // m[column][k]
  static __device__ B load_b(const __half* m, int pitch, int lane) {
    const int at = (lane & 3) + 4 * (lane >> 3 & 1) + 8 * (lane >> 4);
    return load<B>(m + at * pitch);
  }
  // m[k][column]; only for product_by_rows
  static __device__ B load_b_rows(const __half* m, int pitch, int lane) {
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
  static __device__ A from_tile(const Tile& p, int lane) {
    const int j = lane >> 1 & 1, c = lane >> 3 & 1;
    unsigned own[2], got[2], row[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned first = pack(p.e[4 * h], p.e[4 * h + 1]);
      const unsigned second = pack(p.e[4 * h + 2], p.e[4 * h + 3]);
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
  static __device__ void product(Tile& t, const A& a, const B& b) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "
          "{%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
          : "+f"(t.e[0]), "+f"(t.e[1]), "+f"(t.e[2]), "+f"(t.e[3]), "+f"(t.e[4]), "+f"(t.e[5]),
            "+f"(t.e[6]), "+f"(t.e[7])
          : "r"(a.r[2 * s]), "r"(a.r[2 * s + 1]), "r"(b.r[2 * s]), "r"(b.r[2 * s + 1]));
  }
  static __device__ void product_by_rows(Tile& t, const A& a, const B& b) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "
          "{%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
          : "+f"(t.e[0]), "+f"(t.e[1]), "+f"(t.e[2]), "+f"(t.e[3]), "+f"(t.e[4]), "+f"(t.e[5]),
            "+f"(t.e[6]), "+f"(t.e[7])
          : "r"(a.r[2 * s]), "r"(a.r[2 * s + 1]), "r"(b.r[2 * s]), "r"(b.r[2 * s + 1]));
  }

 private:
  template <class Operand>
  static __device__ Operand load(const __half* m) {
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
  static __device__ int row(int lane, int i) { return (lane >> 2) + 8 * i; }

  static __device__ A load_a(const __half* m, int pitch, int lane) {
    A a;
    matrices(a.r, m + (lane & 15) * pitch + 8 * (lane >> 4));
    return a;
  }
  static __device__ B load_b(const __half* m, int pitch, int lane) {
    B b;
    matrices(b.r, m + ((lane & 7) + 8 * (lane >> 4)) * pitch + 8 * (lane >> 3 & 1));
    return b;
  }
  static __device__ B load_b_rows(const __half* m, int pitch, int lane) {
    B b;
    const unsigned at =
        static_cast<unsigned>(__cvta_generic_to_shared(m + (lane & 15) * pitch + 8 * (lane >> 4)));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3])
                 : "r"(at)
                 : "memory");
    return b;
  }
  static __device__ A from_tile(const Tile& p, int) {
    return {{pack(p.e[0], p.e[1]), pack(p.e[2], p.e[3]), pack(p.e[4], p.e[5]),
             pack(p.e[6], p.e[7])}};
  }
  static __device__ void product(Tile& t, const A& a, const B& b) {
    eight_columns(t.e, a, b.r);
    eight_columns(t.e + 4, a, b.r + 2);
  }
  static __device__ void product_by_rows(Tile& t, const A& a, const B& b) { product(t, a, b); }

 private:
  static __device__ void matrices(unsigned* r, const __half* m) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(m));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  }
  static __device__ void eight_columns(float* c, const A& a, const unsigned* b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma unroll
    for (int s = 0; s < 2; ++s)
      asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
          "{%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a.r[2 * s]), "r"(a.r[2 * s + 1]), "r"(b[s]));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b[0]), "r"(b[1]));
#endif
  }
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
