#include "pool.h"

#include <sched.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "futex.h"

namespace voltapile {
namespace {

// Nanoseconds to spin. Whoever spins may hold the very CPU that the awaited thread needs (the
// kernel likes to wake a thread where its waker runs), so a barrier's spin is short. Yielding
// instead of sleeping would hand whole time slices to other processes on a busy machine.
constexpr std::int64_t kSpinStart = 60'000;     // for the next list
constexpr std::int64_t kSpinBarrier = 10'000;
constexpr std::int64_t kSpinCrowded = 1'000;    // for both, with more threads than CPUs

void pin(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(cpu, &set);
  // A refusal (a cgroup without these CPUs) leaves the thread unpinned, which only costs speed.
  (void)sched_setaffinity(0, sizeof set, &set);
}

int available_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

void Gate::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(&value_, FUTEX_PRIVATE_FLAG);
}

void Gate::wait_past(std::uint32_t old, std::int64_t spin_ns) {
  const std::int64_t deadline = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (value() != old) return;
      cpu_pause();
    }
  } while (now_ns() < deadline);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == old) {
    futex_wait(&value_, old, FUTEX_PRIVATE_FLAG);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

struct Pool::Member final : Team {
  explicit Member(Pool& pool) : pool(pool) {}
  void barrier() override { pool.barrier(); }
  void fail() override { pool.has_failed_.store(true, std::memory_order_relaxed); }
  Pool& pool;
};

void Pool::Free::operator()(std::uint8_t* p) const { std::free(p); }

Pool::Pool(int threads, const std::vector<int>& cpus, std::atomic<std::int64_t>* heartbeat,
           const std::atomic<std::uint32_t>* abort)
    : heartbeat_(heartbeat), abort_(abort), spin_start_(kSpinStart), spin_barrier_(kSpinBarrier) {
  if (!cpus.empty()) pin(cpus);
  if (threads > available_cpus()) spin_start_ = spin_barrier_ = kSpinCrowded;
  for (int rank = 0; rank < threads; ++rank) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, kLocalBytes) != 0) throw std::bad_alloc();
    memory_.emplace_back(static_cast<std::uint8_t*>(memory));
    locals_.push_back(memory_.back().get());
  }
  for (int rank = 0; rank < threads; ++rank) {
    auto member = std::make_unique<Member>(*this);
    member->rank = rank;
    member->size = threads;
    member->local = locals_[rank];
    member->local_bytes = kLocalBytes;
    member->locals = locals_.data();
    members_.push_back(std::move(member));
  }
  for (int rank = 1; rank < threads; ++rank) {
    threads_.emplace_back([this, rank, cpus] {
      if (!cpus.empty()) pin({cpus[rank % cpus.size()]});
      work(rank);
    });
  }
}

Pool::~Pool() {
  quit_ = true;
  start_.advance();
  for (std::thread& thread : threads_) thread.join();
}

bool Pool::run(Command* const* commands, std::int64_t count) {
  if (!beat()) return false;
  if (count == 0) return true;
  commands_ = commands;
  count_ = count;
  stop_at_.store(count, std::memory_order_relaxed);
  if (size() > 1) start_.advance();
  run_as(*members_[0]);
  return stop_at_.load(std::memory_order_relaxed) == count;
}

void Pool::work(int rank) {
  // First touch by the thread that uses it, so that the memory is on its node.
  std::memset(locals_[rank], 0, kLocalBytes);
  for (std::uint32_t seen = 0;; ++seen) {
    start_.wait_past(seen, spin_start_);
    if (quit_) return;
    run_as(*members_[rank]);
  }
}

void Pool::run_as(Member& member) {
  Command* const* commands = commands_;
  const std::int64_t count = count_;
  for (std::int64_t i = 0; i < count; ++i) {
    commands[i]->run(member);
    if (member.rank == 0 && i + 1 < count && !beat()) {
      stop_at_.store(i + 1, std::memory_order_relaxed);
    }
    barrier();
    if (i + 1 < count && stop_at_.load(std::memory_order_relaxed) <= i + 1) {
      barrier();  // all have read stop_at_, so the next run may write it
      return;
    }
  }
}

void Pool::barrier() {
  const int n = size();
  if (n == 1) return;
  const std::uint32_t generation = met_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n) {
    arrived_.store(0, std::memory_order_relaxed);
    met_.advance();
  } else {
    met_.wait_past(generation, spin_barrier_);
  }
}

bool Pool::beat() {
  if (heartbeat_) heartbeat_->store(now_ns(), std::memory_order_relaxed);
  if (has_failed_.load(std::memory_order_relaxed)) return false;
  return !abort_ || abort_->load(std::memory_order_relaxed) == 0;
}

}  // namespace voltapile
