// Raw bytes of 16 rows on their way to shared memory: one chunk of columns, 16 bytes at a time.
//
// A row keeps its place within 16 bytes (rows of many formats start anywhere), so what it starts
// with in shared memory is told by row_start(). From sm_80 on copies are asynchronous and STAGES
// are in flight; before, the next chunk waits in registers. Bytes behind a row's end become zero.
// One warp uses a Stage; it knows nothing of formats but the size of a chunk.
#pragma once
#include "half.cuh"

namespace voltapile {

// The two addresses of asynchronous copies.
#ifndef VP_EMULATION
__device__ __forceinline__ void copy_async(void* shared, const void* global, int valid) {
#if VP_ARCH >= 800
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
               "r"(valid)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#if VP_ARCH >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
#if VP_ARCH >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
#endif

constexpr int odd_sixteens(int bytes) {  // rounded up to an odd number of 16 bytes
  return ((bytes + 15) / 16 | 1) * 16;
}

// BYTES of each row in a chunk; ALIGN divides the address of every chunk.
template <int BYTES, int ALIGN>
struct Stage {
  static constexpr int SLACK = ALIGN >= 16 ? 0 : 16 - ALIGN;
  static constexpr int VECTORS = (BYTES + SLACK + 15) / 16;  // that a row may touch
  static constexpr int STRIDE = odd_sixteens(BYTES + SLACK);
  static constexpr int SIZE = 16 * STRIDE;
  static constexpr int TURNS = (16 * VECTORS + 31) / 32;

  // Where vector `turn` of this lane comes from, and how many of its bytes the row has.
  // left: bytes of a row from `first` on.
  static __device__ __forceinline__ const std::uint8_t* source(const std::uint8_t* first,
                                                               int row_bytes, int last_row,
                                                               int left, int lane, int turn,
                                                               int& valid, int& target) {
    const int index = lane + 32 * turn, row = index / VECTORS, vector = index % VECTORS;
    const std::uint8_t* start = first + min(row, last_row) * row_bytes;
    const int skew =
        SLACK ? static_cast<int>(reinterpret_cast<std::uint64_t>(start) & 15) : 0;
    target = row * STRIDE + 16 * vector;
    valid = row < 16 ? min(16, skew + min(left, BYTES) - 16 * vector) : -1;
    return start - skew + 16 * vector;
  }
  static __device__ __forceinline__ int row_start(const std::uint8_t* first, int row_bytes,
                                                  int last_row, int row) {
    const int skew =
        SLACK ? static_cast<int>(reinterpret_cast<std::uint64_t>(
                                     first + min(row, last_row) * row_bytes) & 15)
              : 0;
    return row * STRIDE + skew;
  }

  static __device__ __forceinline__ void begin(std::uint8_t* shared, const std::uint8_t* first,
                                               int row_bytes, int last_row, int left,
                                               int lane) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int valid, target;
      const std::uint8_t* from =
          source(first, row_bytes, last_row, left, lane, turn, valid, target);
      if (lane + 32 * turn < 16 * VECTORS)
        copy_async(shared + target, valid > 0 ? from : first, max(valid, 0));
    }
  }

  // The same through registers.
  uint4 held[TURNS];

  __device__ __forceinline__ void load(const std::uint8_t* first, int row_bytes,
                                       int last_row, int left, int lane) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      int valid, target;
      const std::uint8_t* from =
          source(first, row_bytes, last_row, left, lane, turn, valid, target);
      held[turn] = valid > 0 ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
      if (valid > 0 && valid < 16) held[turn] = first_bytes(held[turn], valid);
    }
  }
  __device__ __forceinline__ void store(std::uint8_t* shared, int lane) const {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int index = lane + 32 * turn, row = index / VECTORS, vector = index % VECTORS;
      if (index < 16 * VECTORS)
        *reinterpret_cast<uint4*>(shared + row * STRIDE + 16 * vector) = held[turn];
    }
  }

  static __device__ __forceinline__ unsigned first_of_word(unsigned w, int bytes) {
    return bytes >= 4 ? w : bytes <= 0 ? 0 : w & ((1u << (8 * bytes)) - 1);
  }
  static __device__ __forceinline__ uint4 first_bytes(uint4 v, int bytes) {
    return {first_of_word(v.x, bytes), first_of_word(v.y, bytes - 4),
            first_of_word(v.z, bytes - 8), first_of_word(v.w, bytes - 12)};
  }
};

}  // namespace voltapile
