// Threads that run Commands together. The caller is rank 0; workers spin briefly for the next
// list and then sleep. Knows nothing of what a Command computes, nor of Python.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "engine.h"

namespace voltapile {

// A counter that threads wait on: they spin, then sleep in the kernel (futex).
class Gate {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();                                         // wakes whoever waits
  void wait_past(std::uint32_t old, std::int64_t spin_ns);  // until value() != old

 private:
  alignas(64) std::atomic<std::uint32_t> value_{0};
  alignas(64) std::atomic<std::uint32_t> sleepers_{0};
};

class Pool {
 public:
  static constexpr std::int64_t kLocalBytes = 512 << 10;  // of Team::local

  // cpus: rank i > 0 is pinned to cpus[i % n], the caller may move among all of them; empty: no
  // pinning. heartbeat: rank 0 writes CLOCK_MONOTONIC nanoseconds there before each command.
  // abort: a nonzero value there stops a list between two commands. Both may be null.
  Pool(int threads, const std::vector<int>& cpus, std::atomic<std::int64_t>* heartbeat,
       const std::atomic<std::uint32_t>* abort);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs the commands in order, a barrier after each; false if the abort flag or a command that
  // failed has stopped them.
  bool run(Command* const* commands, std::int64_t count);
  int size() const { return static_cast<int>(members_.size()); }

 private:
  struct Member;
  struct Free {
    void operator()(std::uint8_t* p) const;
  };

  void work(int rank);
  void run_as(Member& member);
  void barrier();
  bool beat();  // the heartbeat; false if the list must stop

  std::atomic<std::int64_t>* heartbeat_;
  const std::atomic<std::uint32_t>* abort_;
  std::int64_t spin_start_, spin_barrier_;  // ns
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::unique_ptr<std::uint8_t, Free>> memory_;
  std::vector<std::uint8_t*> locals_;
  std::vector<std::thread> threads_;

  // The list being run; written by rank 0 before start_ advances.
  Command* const* commands_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> stop_at_{0};  // first command that must not run
  std::atomic<bool> has_failed_{false};  // for good
  bool quit_ = false;
  Gate start_;
  Gate met_;
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace voltapile
