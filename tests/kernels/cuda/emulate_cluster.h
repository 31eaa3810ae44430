// More of emulate.h: blocks of a cluster, which write into each other's shared memory.
#pragma once

namespace voltapile {

namespace cluster {
inline emulation::Barrier barrier;
inline int arrived_in[4096];  // of each thread: the generation of the barrier
inline int rank() { return emulation::current / blockDim.x; }
template <class T>
T* of_block(T* mine, int block) {
  const auto at = reinterpret_cast<std::intptr_t>(mine);
  return reinterpret_cast<T*>(at + (block - rank()) * emulation::block_bytes);
}
// Whether all threads have arrived that have not ended.
inline bool is_met() {
  int alive = 0;
  for (unsigned i = 0; i < emulation::together * blockDim.x; ++i)
    alive += !emulation::fibres[i].is_done;
  return barrier.count == alive;
}
}  // namespace cluster
using cluster::of_block;

inline void cluster_arrive() {
  ++cluster::barrier.count;
  cluster::arrived_in[emulation::current] = cluster::barrier.generation;
}
inline void cluster_wait() {
  const int generation = cluster::arrived_in[emulation::current];
  while (cluster::barrier.generation == generation) {
    if (cluster::is_met()) {
      cluster::barrier.count = 0, ++cluster::barrier.generation;
      return;
    }
    auto& fibre = emulation::fibres[emulation::current];
    if (emulation::lane() != 0) fibre.awaited = &cluster::barrier, fibre.generation = generation;
    emulation::pause();  // one of each warp looks on
  }
}

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
inline void await(std::uint64_t* bell, bool is_odd) {
  while ((state_of(bell).rings & 1) != (is_odd ? 1 : 0))
    emulation::pause();
}
template <class T>
void send(T values, T* mine, std::uint64_t* bell, int block) {
  *cluster::of_block(mine, block) = values;
  auto& state = state_of(cluster::of_block(bell, block));
  state.bytes -= sizeof values;
  state.look();
}
inline void copy_whole(void* shared, const void* global, int bytes, std::uint64_t* bell) {
  if (bytes % 16) abort();
  memcpy(shared, global, bytes);
  auto& state = state_of(bell);
  state.bytes -= bytes;
  state.look();
}
inline std::uint8_t* own_memory(std::uint8_t* shared) {
  return shared + cluster::rank() * emulation::block_bytes;
}

}  // namespace voltapile
