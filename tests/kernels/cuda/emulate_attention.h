// More of emulate.h, for the attention kernels: votes, matrix loads, products with B by rows.
// Register maps are written from the PTX manual, apart from attention_mma.cuh.
#pragma once
#include <csignal>

// Under names of their own, so that emulate.h may come to have the same functions.
#define __popc emulated_popc
#define __ffs emulated_ffs
#define __fmul_rn emulated_fmul_rn
#define __fmaf_rn emulated_fmaf_rn
#define __fdividef emulated_fdividef
#define __float2int_rn emulated_float2int_rn
#define __trap emulated_trap
#define __shfl_down_sync emulated_shfl_down_sync
#define __ballot_sync emulated_ballot_sync

inline int emulated_popc(unsigned x) { return __builtin_popcount(x); }
inline int emulated_ffs(int x) { return __builtin_ffs(x); }
inline float emulated_fmul_rn(float a, float b) { return a * b; }
inline float emulated_fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float emulated_fdividef(float a, float b) { return a / b; }
inline int emulated_float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline void emulated_trap() { std::raise(SIGABRT); }

template <class T>
T emulated_shfl_down_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, std::min(31, emulation::lane() + step));
}
inline unsigned emulated_ballot_sync(unsigned, bool vote) {
  auto& warp = emulation::warp();
  warp.slot[emulation::lane()][0] = vote;
  __syncwarp();
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= warp.slot[i][0] << i;
  __syncwarp();
  return all;
}

template <class T>
T __ldcg(const T* p) { return *p; }
inline void __threadfence() {}
#define __noinline__
inline unsigned atomicInc(unsigned* at, unsigned most) {
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  return old;
}

namespace voltapile {

inline float infinity() { return INFINITY; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline unsigned half_multiply(unsigned a, unsigned b) {
  const float2 x = half_values(a), y = half_values(b);
  return half_pair(x.x * y.x, x.y * y.y);
}

// ldmatrix: lanes 8 m to 8 m + 7 give the rows of matrix m; lane l gets of it row l / 4, columns
// 2 (l % 4) and the next; turned: column l / 4, rows 2 (l % 4) and the next.
inline void load_any(unsigned (&r)[4], const std::uint16_t* m, bool is_turned) {
  const int lane = emulation::lane();
  auto& warp = emulation::warp();
  std::memcpy(warp.slot[lane], &m, sizeof m);
  __syncwarp();
  const auto at = [&](int matrix, int row, int column) -> unsigned {
    const std::uint16_t* p;
    std::memcpy(&p, warp.slot[8 * matrix + row], sizeof p);
    return p[column];
  };
  for (int i = 0; i < 4; ++i) {
    const int own = lane / 4, pair = 2 * (lane % 4);
    r[i] = is_turned ? at(i, pair, own) | at(i, pair + 1, own) << 16
                     : at(i, own, pair) | at(i, own, pair + 1) << 16;
  }
  __syncwarp();
}
inline void load_matrices(unsigned (&r)[4], const std::uint16_t* m) { load_any(r, m, false); }
inline void load_matrices_turned(unsigned (&r)[4], const std::uint16_t* m) { load_any(r, m, true); }

// m8n8k4 with B .row: lane t of a quad pair holds row (k) t % 4, four columns from 4 (t / 4) on.
inline void mma_884_rows(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  product(c, {a0, a1, b0, b1}, [](const unsigned (*slot)[8], int lane, int e) {
    const int quad = lane / 4 % 4;
    const int row = (lane & 1) + (e & 2) + 4 * (lane / 16);
    const int n = (e & 4) + (lane & 2) + (e & 1);
    const auto holder = [&](int t) { return 4 * quad + t % 4 + 16 * (t / 4); };
    double sum = 0;
    for (int k = 0; k < 4; ++k)
      sum += static_cast<double>(emulation::half_of(slot[holder(row)], k)) *
             emulation::half_of(slot[holder(k + 4 * (n / 4))] + 2, n % 4);
    return sum;
  });
}

}  // namespace voltapile
