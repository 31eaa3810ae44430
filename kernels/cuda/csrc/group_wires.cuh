// What two devices can tell each other through memory: packs that carry their own flag, and flags
// behind plain data. Nothing newer than sm_70.
//
// A four is four floats, each of which tells by itself that it has come, since an empty place is
// zeros: what travels is the complement of each word, and the NaN whose complement that would be
// travels as another. So fours arrive whole anywhere.
//
// A pack is three words and a flag. Wide, it is one store of 16 bytes, which arrives whole over
// NVLink; narrow, three stores of 8 bytes with a flag each, which arrive whole anywhere. What a
// peer wrote is never read through the first cache, which would keep an old copy.
#pragma once
#ifdef VP_EMULATION
#include <sched.h>
#include <time.h>
#endif

namespace voltapile {

struct Pack {
  unsigned x, y, z;
};

__device__ __forceinline__ unsigned hidden(float value) {
  const unsigned word = __float_as_uint(value);
  return word == ~0u ? 1u << 31 : ~word;
}
__device__ __forceinline__ uint4 hidden(float4 v) {
  return uint4{hidden(v.x), hidden(v.y), hidden(v.z), hidden(v.w)};
}
__device__ __forceinline__ float4 shown(uint4 words) {
  return make_float4(__uint_as_float(~words.x), __uint_as_float(~words.y),
                     __uint_as_float(~words.z), __uint_as_float(~words.w));
}
__device__ __forceinline__ bool is_whole(uint4 words) {
  return min(min(words.x, words.y), min(words.z, words.w)) != 0;
}

#ifdef VP_EMULATION

inline void store_wide(void* at, Pack words, unsigned flag) {
  unsigned* to = static_cast<unsigned*>(at);
  to[0] = words.x, to[1] = words.y, to[2] = words.z;
  __atomic_store_n(to + 3, flag, __ATOMIC_RELEASE);
}
inline bool load_wide(const void* at, unsigned flag, Pack* words) {
  const unsigned* from = static_cast<const unsigned*>(at);
  if (__atomic_load_n(from + 3, __ATOMIC_ACQUIRE) != flag) return false;
  *words = {from[0], from[1], from[2]};
  return true;
}
inline void store_narrow(void* at, unsigned word, unsigned flag) {
  __atomic_store_n(static_cast<unsigned long long*>(at),
                   static_cast<unsigned long long>(flag) << 32 | word, __ATOMIC_RELEASE);
}
inline bool load_narrow(const void* at, unsigned flag, unsigned* word) {
  const auto both = __atomic_load_n(static_cast<const unsigned long long*>(at), __ATOMIC_ACQUIRE);
  *word = static_cast<unsigned>(both);
  return both >> 32 == flag;
}
inline unsigned load_fresh(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_fresh(unsigned* at, unsigned value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline void store_flag(unsigned* at, unsigned value) { store_fresh(at, value); }
inline unsigned load_flag(const unsigned* at) { return load_fresh(at); }
inline float4 load_far(const float4* at) { return *at; }
inline void store_four(uint4* at, uint4 words) {
  at->x = words.x, at->y = words.y, at->z = words.z;
  __atomic_store_n(&at->w, words.w, __ATOMIC_RELEASE);
}
inline uint4 load_four(const uint4* at) {
  const unsigned last = __atomic_load_n(&at->w, __ATOMIC_ACQUIRE);
  return uint4{at->x, at->y, at->z, last};
}
inline unsigned swap(unsigned* at, unsigned value) {
  return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL);
}
inline unsigned count_on(unsigned* at, unsigned by = 1) {
  return __atomic_fetch_add(at, by, __ATOMIC_ACQ_REL);
}
inline void order_all() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline long long ticks() {
  emulation::pause();  // the peer may wait for what another thread of this block has
  sched_yield();  // the peer may need this CPU
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

#else

__device__ __forceinline__ void store_wide(void* at, Pack words, unsigned flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(flag)
               : "memory");
}
__device__ __forceinline__ bool load_wide(const void* at, unsigned flag, Pack* words) {
  unsigned found;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words->x), "=r"(words->y), "=r"(words->z), "=r"(found)
               : "l"(at)
               : "memory");
  return found == flag;
}
__device__ __forceinline__ void store_narrow(void* at, unsigned word, unsigned flag) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(word), "r"(flag)
               : "memory");
}
__device__ __forceinline__ bool load_narrow(const void* at, unsigned flag, unsigned* word) {
  unsigned found;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(*word), "=r"(found)
               : "l"(at)
               : "memory");
  return found == flag;
}
__device__ __forceinline__ unsigned load_fresh(const unsigned* at) {
  return *static_cast<const volatile unsigned*>(at);
}
__device__ __forceinline__ void store_fresh(unsigned* at, unsigned value) {
  *static_cast<volatile unsigned*>(at) = value;
}
// Behind everything that this block has written before its last barrier.
__device__ __forceinline__ void store_flag(unsigned* at, unsigned value) {
  __threadfence_system();
  store_fresh(at, value);
}
__device__ __forceinline__ unsigned load_flag(const unsigned* at) {
  const unsigned value = load_fresh(at);
  __threadfence_system();
  return value;
}
__device__ __forceinline__ float4 load_far(const float4* at) {
  float4 value;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(at)
               : "memory");
  return value;
}
// Whole over NVLink, as a wide pack is.
__device__ __forceinline__ void store_four(uint4* at, uint4 words) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_four(const uint4* at) {
  uint4 words;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at)
               : "memory");
  return words;
}
__device__ __forceinline__ unsigned swap(unsigned* at, unsigned value) {
  return atomicExch(at, value);
}
// What it was; by the time that this is known all the GPU sees the next number.
__device__ __forceinline__ unsigned count_on(unsigned* at, unsigned by = 1) {
  return atomicAdd(at, by);
}
__device__ __forceinline__ void order_all() { __threadfence_system(); }
__device__ __forceinline__ long long ticks() { return clock64(); }

#endif

}  // namespace voltapile
