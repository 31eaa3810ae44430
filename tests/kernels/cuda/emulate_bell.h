// More of emulate.h: bells, and copies that ring them.
#pragma once
#include <vector>

namespace voltapile {

// Bytes that are still to come (below 0: that came unexpected), whether they are expected, rings.
struct BellState {
  std::int32_t bytes;
  std::int16_t is_expected, rings;
  void look() {
    if (!is_expected || bytes) return;
    is_expected = 0;
    ++rings;
  }
};
static_assert(sizeof(BellState) == 8);
inline BellState& state_of(std::uint64_t* bell) { return *reinterpret_cast<BellState*>(bell); }

inline void make_bell(std::uint64_t* bell) { state_of(bell) = {}; }
inline void expect(std::uint64_t* bell, int bytes) {
  auto& state = state_of(bell);
  if (state.is_expected) abort();
  state.bytes += bytes;
  state.is_expected = 1;
  state.look();
}
// What was asked for, and comes no sooner than somebody waits for it.
struct BellCopy {
  std::uint64_t* bell;
  void* to;
  const void* from;
  int bytes;
};
inline std::vector<BellCopy> bell_copies;
inline bool has_left() { return !bell_copies.empty(); }
inline const bool is_watched = (emulation::has_left = has_left, true);

inline bool is_elected() { return threadIdx.x % 32 == 0; }
inline void tell_bells() {}
inline void order_copies() {}
inline void copy_whole(void* shared, const void* global, int bytes, std::uint64_t* bell) {
  if (bytes % 16 || reinterpret_cast<std::uintptr_t>(global) % 16 ||
      reinterpret_cast<std::uintptr_t>(shared) % 16)
    abort();
  memset(shared, 0xEE, bytes);
  bell_copies.push_back({bell, shared, global, bytes});
}
inline void await(std::uint64_t* bell, bool is_odd) {
  auto& state = state_of(bell);
  for (size_t i = 0; i < bell_copies.size();) {
    if (bell_copies[i].bell != bell) {
      ++i;
      continue;
    }
    memcpy(bell_copies[i].to, bell_copies[i].from, bell_copies[i].bytes);
    state.bytes -= bell_copies[i].bytes;
    bell_copies.erase(bell_copies.begin() + i);
  }
  state.look();
  while ((state_of(bell).rings & 1) != (is_odd ? 1 : 0))
    emulation::pause();
}
inline void await_own(std::uint64_t* bell, bool is_odd) { await(bell, is_odd); }

}  // namespace voltapile
