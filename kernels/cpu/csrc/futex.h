// Time and sleep, for whoever waits for other threads or processes.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace voltapile {

inline std::int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#elif defined(__powerpc64__)
  asm volatile("or 27,27,27" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

// Sleeps while *word == value, at most so long (null: until woken). flags: FUTEX_PRIVATE_FLAG for
// the threads of one process, 0 for several.
inline void futex_wait(std::atomic<std::uint32_t>* word, std::uint32_t value, int flags,
                       const timespec* most = nullptr) {
  static_assert(sizeof(*word) == 4);
  syscall(SYS_futex, word, FUTEX_WAIT | flags, value, most, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>* word, int flags) {
  syscall(SYS_futex, word, FUTEX_WAKE | flags, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace voltapile
