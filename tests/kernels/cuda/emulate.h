// Runs a kernel's own source on the CPU: slow, exact, one fibre for each thread of a block.
//
// Stands before the source (compile.source_of). Lanes meet at shuffles, barriers and products of
// the tensor core, whose register maps are written here from the PTX manual, apart from mma.cuh.
// Asynchronous copies arrive when they are waited for, not before; shared memory starts as NaNs and
// what lies behind it must not change. Products are summed in double and rounded once.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define VP_EMULATION
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x, y, z; };
inline Index threadIdx, blockIdx, blockDim, gridDim;

template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
template <class T>
T __ldg(const T* p) { return *p; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (n & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) << (n & 31) >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned byte = bytes >> (8 * (select >> (4 * i) & 7)) & 255;
    out |= byte << (8 * i);
  }
  return out;
}

constexpr int SHARED_BYTES = 1024 << 10, FENCE = 4096;
alignas(128) inline std::uint8_t shared[SHARED_BYTES + FENCE];

namespace emulation {

struct Barrier {
  int count = 0, generation = 0;
};
struct Copy {
  void* target;
  const void* source;
  int valid;
};
struct Fibre {
  ucontext_t context;
  std::vector<char> stack;
  bool is_done = false;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
struct Warp {
  Barrier barrier;
  unsigned slot[32][8];
};
inline ucontext_t scheduler;
inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline std::vector<Barrier> block_barriers;  // of blocks that run together
inline int current;
inline std::function<void()> body;

inline int lane() { return current & 31; }
inline Warp& warp() { return warps[current >> 5]; }

inline void meet(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.count == count) {
    barrier.count = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation)
      swapcontext(&fibres[current].context, &scheduler);
  }
}
inline void start() {
  body();
  fibres[current].is_done = true;
}
inline bool (*is_held)(int thread) = [](int) { return false; };  // so that warps drift apart

// Blocks that are there together: a cluster of them, or one.
inline void run_blocks(int first, int together) {
  const int threads = together * blockDim.x;
  if (fibres.size() < static_cast<std::size_t>(threads)) fibres.resize(threads);
  warps.assign(threads / 32, {});
  block_barriers.assign(together, {});
  for (int i = 0; i < threads; ++i) {
    Fibre& fibre = fibres[i];
    fibre.stack.resize(256 << 10);
    fibre.is_done = false;
    fibre.groups.clear();
    fibre.open.clear();
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data();
    fibre.context.uc_stack.ss_size = fibre.stack.size();
    fibre.context.uc_link = &scheduler;
    makecontext(&fibre.context, start, 0);
  }
  for (bool is_running = true; is_running;) {
    is_running = false;
    for (int i = 0; i < threads; ++i) {
      if (fibres[i].is_done) continue;
      is_running = true;
      if (is_held(i)) continue;
      current = i;
      threadIdx = {i % blockDim.x, 0, 0};
      blockIdx.x = first + i / blockDim.x;
      swapcontext(&scheduler, &fibres[i].context);
    }
  }
}

inline float half(unsigned bits) {
  const std::uint16_t b = static_cast<std::uint16_t>(bits);
  _Float16 h;
  std::memcpy(&h, &b, 2);
  return static_cast<float>(h);
}
inline unsigned half_bits(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  std::uint16_t b;
  std::memcpy(&b, &h, 2);
  return b;
}
inline float half_of(const unsigned* registers, int k) {
  return half(registers[k / 2] >> (16 * (k % 2)));
}

}  // namespace emulation

inline void __syncwarp() { emulation::meet(emulation::warp().barrier, 32); }
inline void __syncthreads() {
  emulation::meet(emulation::block_barriers[emulation::current / blockDim.x], blockDim.x);
}
inline void team_barrier(int id, int threads) {
  static emulation::Barrier barriers[64][16];
  emulation::meet(barriers[emulation::current / blockDim.x][id], threads);
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  static_assert(sizeof(T) <= sizeof(emulation::Warp::slot[0]));
  auto& warp = emulation::warp();
  std::memcpy(warp.slot[emulation::lane()], &value, sizeof value);
  __syncwarp();
  std::memcpy(&value, warp.slot[from & 31], sizeof value);
  __syncwarp();
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, emulation::lane() ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  const int lane = emulation::lane();
  return __shfl_sync(mask, value, lane >= by ? lane - by : lane);
}
inline int __all_sync(unsigned mask, int vote) {
  int all = 1;
  for (int i = 0; i < 32; ++i) all = __shfl_sync(mask, vote, i) != 0 && all;
  return all;
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  unsigned all = 0;
  for (unsigned i = 0; i < 32; ++i) all |= (__shfl_sync(mask, vote, i) != 0 ? 1u : 0u) << i;
  return all;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __syncthreads_and(int vote) {
  static int all, none;  // `none` is what threads set, so that nobody needs to begin
  if (!vote) none = 1;
  __syncthreads();
  all = !none;
  __syncthreads();
  none = 0;
  return all;
}
template <class T>
T atomicAdd(T* at, T value) { const T old = *at; *at += value; return old; }
template <class T>
T atomicOr(T* at, T value) { const T old = *at; *at |= value; return old; }
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace voltapile {

inline float half_value(unsigned bits) { return emulation::half(bits & 0xffff); }
inline unsigned half_pair(float low, float high) {
  return emulation::half_bits(low) | emulation::half_bits(high) << 16;
}
inline float2 half_values(unsigned pair) {
  return {emulation::half(pair & 0xffff), emulation::half(pair >> 16)};
}
inline unsigned half_add(unsigned a, unsigned b) {
  const float2 x = half_values(a), y = half_values(b);
  return half_pair(x.x + y.x, x.y + y.y);
}
inline unsigned half_mul(unsigned a, unsigned b) {
  const float2 x = half_values(a), y = half_values(b);
  return half_pair(x.x * y.x, x.y * y.y);
}
inline unsigned half_fma(unsigned a, unsigned b, unsigned c) {
  const float2 x = half_values(a), y = half_values(b), z = half_values(c);
  return half_pair(std::fmaf(x.x, y.x, z.x), std::fmaf(x.y, y.y, z.y));
}

inline void copy_async(void* target, const void* source, int valid) {
  emulation::fibres[emulation::current].open.push_back({target, source, valid});
}
inline void commit_copies() {
  auto& fibre = emulation::fibres[emulation::current];
  fibre.groups.push_back(std::move(fibre.open));
  fibre.open.clear();
}
template <int PENDING>
void wait_for_copies() {
  auto& groups = emulation::fibres[emulation::current].groups;
  while (groups.size() > PENDING) {
    for (const auto& copy : groups.front()) {
      std::memset(copy.target, 0, 16);
      std::memcpy(copy.target, copy.source, copy.valid);
    }
    groups.erase(groups.begin());
  }
}

// Every lane shows its registers, A first; `add` sums up one lane's value e from what all show.
template <int VALUES, class Sum>
void product(float (&c)[VALUES], std::initializer_list<unsigned> registers, Sum sum) {
  auto& warp = emulation::warp();
  int i = 0;
  for (unsigned value : registers) warp.slot[emulation::lane()][i++] = value;
  __syncwarp();
  for (int e = 0; e < VALUES; ++e)
    c[e] = static_cast<float>(c[e] + sum(warp.slot, emulation::lane(), e));
  __syncwarp();
}

// m16n8k16: A row r, column k: lane 4 (r % 8) + k % 8 / 2, register r / 8 + 2 (k / 8); B column n:
// lane 4 n + k % 8 / 2, register k / 8. C value e: row lane / 4 + 8 (e / 2), column 2 (lane % 4) + e % 2.
inline void mma_16816(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                      unsigned b0, unsigned b1) {
  product(c, {a0, a1, a2, a3, b0, b1}, [](const unsigned (*slot)[8], int lane, int e) {
    const int row = lane / 4 + 8 * (e / 2), n = 2 * (lane % 4) + e % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const unsigned a = slot[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const unsigned b = slot[4 * n + k % 8 / 2][4 + k / 8];
      sum += static_cast<double>(emulation::half_of(&a, k % 2)) * emulation::half_of(&b, k % 2);
    }
    return sum;
  });
}

// m16n8k8: as the first half of m16n8k16.
inline void mma_1688(float (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  product(c, {a0, a1, b0}, [](const unsigned (*slot)[8], int lane, int e) {
    const int row = lane / 4 + 8 * (e / 2), n = 2 * (lane % 4) + e % 2;
    double sum = 0;
    for (int k = 0; k < 8; ++k) {
      const unsigned a = slot[4 * (row % 8) + k / 2][row / 8], b = slot[4 * n + k / 2][2];
      sum += static_cast<double>(emulation::half_of(&a, k % 2)) * emulation::half_of(&b, k % 2);
    }
    return sum;
  });
}

// m8n8k4, four products by quad pairs: quad pair q is lanes 4 q..4 q + 3 and 16 + 4 q..; lane t of
// it holds row t of A and column t of B. C value e: row (lane & 1) + (e & 2) + 4 (lane / 16), column
// (e & 4) + (lane & 2) + (e & 1).
inline void mma_884(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  product(c, {a0, a1, b0, b1}, [](const unsigned (*slot)[8], int lane, int e) {
    const int quad = lane / 4 % 4;
    const int row = (lane & 1) + (e & 2) + 4 * (lane / 16);
    const int n = (e & 4) + (lane & 2) + (e & 1);
    const auto holder = [&](int t) { return 4 * quad + t % 4 + 16 * (t / 4); };
    double sum = 0;
    for (int k = 0; k < 4; ++k)
      sum += static_cast<double>(emulation::half_of(slot[holder(row)], k)) *
             emulation::half_of(slot[holder(n)] + 2, k);
    return sum;
  });
}

}  // namespace voltapile

namespace emulation {

template <class... P, std::size_t... I>
void call(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<P>*>(args[I])...);
}

// Of each block of a cluster; behind the first one's lies the second one's.
inline int block_bytes;

// together: blocks of a cluster, 1 for none. Returns 0; 1 if the kernel wrote behind its shared
// memory.
template <class... P>
int launch(void (*kernel)(P...), int grid_x, int grid_y, int threads, int shared_bytes,
           void** args, int together = 1) {
  block_bytes = (shared_bytes + 127) / 128 * 128;
  shared_bytes = together > 1 ? together * block_bytes : shared_bytes;
  if (shared_bytes > SHARED_BYTES) return 1;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), 1};
  body = [&] { call(kernel, args, std::index_sequence_for<P...>()); };
  for (int y = 0; y < grid_y; ++y)
    for (int x = 0; x < grid_x; x += together) {
      std::memset(shared, 0xff, sizeof shared);
      blockIdx.y = y;
      run_blocks(x, together);
      for (int i = shared_bytes; i < shared_bytes + FENCE && i < SHARED_BYTES + FENCE; ++i)
        if (shared[i] != 0xff) return 1;
    }
  return 0;
}

}  // namespace emulation
