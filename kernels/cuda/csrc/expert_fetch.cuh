// How kernels of chosen experts get weights: some contiguous bytes at once, by one copy and a bell
// from sm_90 on, by a warp's own copies before. Knows nothing of formats.
#pragma once
#include "bell.cuh"
#include "matmul_stage.cuh"

namespace voltapile {

#if VP_ARCH >= 800
constexpr bool HAS_BELLS = VP_ARCH >= 900;

// A multiple of 16 bytes. By a warp that has met; the bell is its own to ask, once for each ring.
// is_again: something was read there.
__device__ __forceinline__ void fetch(std::uint8_t* to, const std::uint8_t* from, int bytes,
                                      Bell* bell, int lane, bool is_again = false) {
#if VP_ARCH >= 900
  if (is_elected()) {
    if (is_again) order_copies();
    expect(bell, bytes);
    copy_whole(to, from, bytes, bell);
  }
#else
#pragma unroll 4
  for (int at = 16 * lane; at < bytes; at += 512) copy_async(to + at, from + at, 16);
#endif
}
// Until what was fetched is there; before sm_90 others see to that.
__device__ __forceinline__ void hear(Bell* bell, bool is_odd) {
#if VP_ARCH >= 900
  await_own(bell, is_odd);
#endif
}
__device__ __forceinline__ void make_bells(Bell* bells, int count) {
#if VP_ARCH >= 900
  if (is_elected())
#pragma unroll 1
    for (int i = 0; i < count; ++i) make_bell(bells + i);
  tell_bells();
  __syncwarp();
#endif
}

// A warp's places for pieces of SIZE bytes, taken in turn: `depth` of them, two to four, or from
// sm_90 on any number.
template <int SIZE>
struct PieceRing {
  std::uint8_t* memory;
  Bell* bells;
  int depth, lane;
  int asking = 0, hearing = 0;  // places
  bool is_odd = true;

  __device__ __forceinline__ PieceRing(std::uint8_t* memory, Bell* bells, int depth, int lane)
      : memory(memory), bells(bells), depth(depth), lane(lane) {
    make_bells(bells, depth);
  }
  // from: the next piece, or null. What was in its place, if anything (is_again), has been read by
  // all lanes, which met.
  __device__ __forceinline__ void ask(const std::uint8_t* from, bool is_again) {
    if (from != nullptr) {
      fetch(memory + asking * SIZE, from, SIZE, bells + asking, lane, is_again);
      asking = asking + 1 < depth ? asking + 1 : 0;
    }
    if (!HAS_BELLS) commit_copies();
  }
  // The piece that was asked for `depth` calls of ask() ago.
  __device__ __forceinline__ const std::uint8_t* next() {
    hear(bells + hearing, is_odd);
    if (!HAS_BELLS) {
      depth == 2 ? wait_for_copies<1>() : depth == 3 ? wait_for_copies<2>() : wait_for_copies<3>();
      __syncwarp();
    }
    const std::uint8_t* found = memory + hearing * SIZE;
    if (++hearing == depth) hearing = 0, is_odd = !is_odd;
    return found;
  }
};
#endif

}  // namespace voltapile
