// More of emulate.h: blocks of a cluster, which write into each other's shared memory.
#pragma once
#include "emulate_bell.h"

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

template <class T>
void send(T values, T* mine, std::uint64_t* bell, int block) {
  *cluster::of_block(mine, block) = values;
  auto& state = state_of(cluster::of_block(bell, block));
  state.bytes -= sizeof values;
  state.look();
}
inline std::uint8_t* own_memory(std::uint8_t* shared) {
  return shared + cluster::rank() * emulation::block_bytes;
}

}  // namespace voltapile
