// Runs a kernel's own source on the CPU: slow, exact, one fibre for each thread of a block.
//
// Stands before the source (compile.source_of). Lanes meet at shuffles, barriers and products of
// the tensor core (emulate_products.h). Asynchronous copies arrive when they are waited for,
// not before; shared memory starts as NaNs and what lies behind it must not change.
// Of C++'s headers it takes the smallest: they, and not the kernels, were most of a compilation.
#pragma once
#include <stdlib.h>
#include <string.h>

#include <cstdint>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" {
float expf(float), exp2f(float), logf(float), log1pf(float), tanhf(float), sqrtf(float);
float rintf(float), nearbyintf(float), floorf(float), ceilf(float), fabsf(float);
float fminf(float, float), fmaxf(float, float), powf(float, float), fmaf(float, float, float);
double exp(double), log(double), sqrt(double), floor(double), ceil(double), fabs(double);
void sincosf(float, float*, float*), sincos(double, double*, double*);
}

#define VP_EMULATION
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int4 { int x, y, z, w; };
struct Index { unsigned x, y, z; };
inline Index threadIdx, blockIdx, blockDim, gridDim;

template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
template <class T>
T __ldg(const T* p) { return *p; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (n & 31));
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned n) {
  return n < 32 ? __funnelshift_r(low, high, n) : high;
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

constexpr int SHARED_BYTES = 8 * 228 << 10, FENCE = 4096;
alignas(1024) inline std::uint8_t shared[SHARED_BYTES + FENCE];

namespace emulation {

struct Barrier {
  int count = 0, generation = 0;
};
struct Copy {
  void* target;
  const void* source;
  int valid;
};

// A stack of its own, and where it was left. swapcontext() asks the kernel for the signals that are
// blocked; that was two thirds of all the time.
#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void vp_switch(void** from, void* to);
asm(R"(
  .text
  .globl vp_switch
  .hidden vp_switch
  .type vp_switch, @function
vp_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size vp_switch, .-vp_switch
)");
struct Context {
  void* top = nullptr;
  void prepare(char* stack, size_t bytes, void (*function)()) {
    const uintptr_t end = reinterpret_cast<uintptr_t>(stack + bytes) / 16 * 16;
    void** at = reinterpret_cast<void**>(end) - 8;  // six registers, the function, and no caller
    memset(at, 0, 64);
    at[6] = reinterpret_cast<void*>(function);
    top = at;
  }
  void go_to(Context& other) { vp_switch(&top, other.top); }
};
#else
struct Context {
  ucontext_t own;
  void prepare(char* stack, size_t bytes, void (*function)()) {
    getcontext(&own);
    own.uc_stack.ss_sp = stack;
    own.uc_stack.ss_size = bytes;
    makecontext(&own, function, 0);
  }
  void go_to(Context& other) { swapcontext(&own, &other.own); }
};
#endif

constexpr int MOST_THREADS = 4096, MOST_COPIES = 512, MOST_GROUPS = 64, SLOT_BYTES = 64;
constexpr size_t STACK_BYTES = 256 << 10;
struct Fibre {
  Context context;
  char* stack;
  bool is_done;
  const Barrier* awaited;  // until it is no longer of this generation
  int generation;
  int copies, groups, ends[MOST_GROUPS];  // of each group that was closed, where it ends
  Copy copy[MOST_COPIES];
};
struct Warp {
  Barrier barrier;
  alignas(64) std::uint8_t slots[2][32][SLOT_BYTES];
};
inline Context scheduler;
inline Fibre fibres[MOST_THREADS];
inline Warp warps[MOST_THREADS / 32];
inline Barrier block_barriers[MOST_THREADS / 32];  // of blocks that run together
inline int current;
inline void (*body)(void* call);
inline void* call;
inline int together;  // blocks of a cluster; their warps drift far apart, each held for a while

inline int lane() { return current & 31; }
inline Warp& warp() { return warps[current >> 5]; }

// Until the scheduler comes to this thread again.
inline void pause() { fibres[current].context.go_to(scheduler); }

inline void meet(Barrier& barrier, int count) {
  if (++barrier.count == count) {
    barrier.count = 0;
    ++barrier.generation;
    return;
  }
  Fibre& fibre = fibres[current];
  fibre.awaited = &barrier;
  fibre.generation = barrier.generation;
  pause();
}

// What each lane of a warp has shown. It stays until the warp has met twice more: a lane that is
// ahead writes into the other half.
template <class T>
struct Shown {
  const std::uint8_t (*slots)[SLOT_BYTES];
  const T& operator[](int lane) const { return *reinterpret_cast<const T*>(slots[lane]); }
};
template <class T>
Shown<T> show(const T& own) {
  static_assert(sizeof(T) <= SLOT_BYTES);
  Warp& mine = warp();
  auto* slots = mine.slots[mine.barrier.generation & 1];
  memcpy(slots[lane()], &own, sizeof own);
  meet(mine.barrier, 32);
  return {slots};
}

inline void start() {
  body(call);
  fibres[current].is_done = true;
  pause();
}
inline bool is_held(int thread) {
  static unsigned looks;
  unsigned x = (looks++ >> 21) * 2654435761u + (thread / 32 + 1) * 2246822519u;
  x = (x ^ x >> 15) * 2654435761u;
  return x >> 29 == 0;
}

// One look at each thread; whether any ran or is held.
inline bool run_threads(int first, int threads) {
  bool has_moved = false;
  for (int i = 0; i < threads; ++i) {
    Fibre& fibre = fibres[i];
    if (fibre.is_done) continue;
    if (together > 1 && is_held(i)) {
      has_moved = true;
      continue;
    }
    if (fibre.awaited && fibre.awaited->generation == fibre.generation) continue;
    fibre.awaited = nullptr;
    has_moved = true;
    current = i;
    threadIdx = {i % blockDim.x, 0, 0};
    blockIdx.x = first + i / blockDim.x;
    scheduler.go_to(fibre.context);
  }
  return has_moved;
}

inline bool (*has_left)() = nullptr;  // copies on their way when a block has ended

// Blocks that are there together: a cluster of them, or one. False: threads wait for ever.
inline bool run_blocks(int first, int together) {
  const int threads = together * blockDim.x;
  for (int i = 0; i < threads / 32; ++i) warps[i].barrier = {};
  for (int i = 0; i < together; ++i) block_barriers[i] = {};
  for (int i = 0; i < threads; ++i) {
    Fibre& fibre = fibres[i];
    if (!fibre.stack) fibre.stack = static_cast<char*>(malloc(STACK_BYTES));
    fibre.is_done = false;
    fibre.awaited = nullptr;
    fibre.copies = fibre.groups = 0;
    fibre.context.prepare(fibre.stack, STACK_BYTES, start);
  }
  while (run_threads(first, threads)) {
  }
  for (int i = 0; i < threads; ++i)
    if (!fibres[i].is_done) return false;
  return true;
}

inline float half(unsigned bits) {
  const std::uint16_t b = static_cast<std::uint16_t>(bits);
  _Float16 h;
  memcpy(&h, &b, 2);
  return static_cast<float>(h);
}
inline unsigned half_bits(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  std::uint16_t b;
  memcpy(&b, &h, 2);
  return b;
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
  return emulation::show(value)[from & 31];
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, emulation::lane() ^ bits);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by) {
  const int lane = emulation::lane();
  return __shfl_sync(mask, value, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  const int lane = emulation::lane();
  return __shfl_sync(mask, value, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, int vote) {
  const auto votes = emulation::show(vote);
  unsigned all = 0;
  for (unsigned i = 0; i < 32; ++i) all |= (votes[i] != 0 ? 1u : 0u) << i;
  return all;
}
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == ~0u; }
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
inline unsigned atomicInc(unsigned* at, unsigned most) {
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  return old;
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
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline void __trap() { abort(); }
template <class T>
T __ldcg(const T* p) { return *p; }
inline void __threadfence() {}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace voltapile {

inline float infinity() { return __builtin_inff(); }
inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
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
inline unsigned half_multiply(unsigned a, unsigned b) { return half_mul(a, b); }
inline unsigned half_fma(unsigned a, unsigned b, unsigned c) {
  const float2 x = half_values(a), y = half_values(b), z = half_values(c);
  return half_pair(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}

inline void copy_async(void* target, const void* source, int valid) {
  auto& fibre = emulation::fibres[emulation::current];
  if (fibre.copies == emulation::MOST_COPIES) abort();
  fibre.copy[fibre.copies++] = {target, source, valid};
}
inline void commit_copies() {
  auto& fibre = emulation::fibres[emulation::current];
  if (fibre.groups == emulation::MOST_GROUPS) abort();
  fibre.ends[fibre.groups++] = fibre.copies;
}
template <int PENDING>
void wait_for_copies() {
  auto& fibre = emulation::fibres[emulation::current];
  const int groups = fibre.groups - PENDING;
  if (groups <= 0) return;
  const int copies = fibre.ends[groups - 1];
  for (int i = 0; i < copies; ++i) {
    const auto& [to, from, valid] = fibre.copy[i];
    memset(to, 0, 16);
    memcpy(to, from, valid);
  }
  for (int i = copies; i < fibre.copies; ++i) fibre.copy[i - copies] = fibre.copy[i];
  for (int i = groups; i < fibre.groups; ++i) fibre.ends[i - groups] = fibre.ends[i] - copies;
  fibre.copies -= copies;
  fibre.groups = PENDING;
}

}  // namespace voltapile

#include "emulate_products.h"

namespace emulation {

template <class... P>
struct Call {
  void (*kernel)(P...);
  void** args;
  struct Now {  // arguments in braces are evaluated in their order
    Now(void (*kernel)(P...), P... values) { kernel(values...); }
  };
  static void run(void* self) {
    auto [kernel, args] = *static_cast<Call*>(self);
    Now{kernel, *static_cast<P*>(*args++)...};
  }
};

// Of each block of a cluster; behind the first one's lies the second one's.
inline int block_bytes;

// together: blocks of a cluster, 1 for none. Returns 0; 1 if the kernel wrote behind its shared
// memory, 2 if its threads wait for each other.
template <class... P>
int launch(void (*kernel)(P...), int grid_x, int grid_y, int threads, int shared_bytes,
           void** args, int together = 1) {
  block_bytes = (shared_bytes + 1023) / 1024 * 1024;
  shared_bytes = together > 1 ? together * block_bytes : shared_bytes;
  if (shared_bytes > SHARED_BYTES || together * threads > MOST_THREADS) abort();
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), 1};
  Call<P...> own{kernel, args};
  body = own.run, call = &own;
  emulation::together = together;
  for (int y = 0; y < grid_y; ++y)
    for (int x = 0; x < grid_x; x += together) {
      memset(shared, 0xff, shared_bytes + FENCE);
      blockIdx.y = y;
      if (!run_blocks(x, together)) return 2;
      if (has_left && has_left()) return 3;
      for (int i = shared_bytes; i < shared_bytes + FENCE; ++i)
        if (shared[i] != 0xff) return 1;
    }
  return 0;
}

}  // namespace emulation
