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

// BYTES of each row in a chunk; ALIGN divides the address of every chunk. Whole chunks take vectors
// from where the row's other vectors are, be they needed or not: memory behind a matrix is there.
template <int BYTES, int ALIGN>
struct Stage {
  static constexpr int SLACK = ALIGN >= 16 ? 0 : 16 - ALIGN;
  static constexpr int VECTORS = (BYTES + SLACK + 15) / 16;  // that a row may touch
  static constexpr int STRIDE = odd_sixteens(BYTES + SLACK);
  static constexpr int SIZE = 16 * STRIDE;
  static constexpr int TURNS = (16 * VECTORS + 31) / 32;

  int row_bytes, last_row, lane;
  int offset[TURNS];  // of this lane's vectors from the first row
  uint4 held[TURNS];

  __device__ __forceinline__ Stage(int row_bytes, int last_row, int lane)
      : row_bytes(row_bytes), last_row(last_row), lane(lane) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int index = lane + 32 * turn, row = row_of(index);
      offset[turn] = min(row, last_row) * row_bytes + 16 * (index - row * VECTORS);
    }
  }

  // Of a vector: half the instructions of a division, but some registers more on older cards.
  static __device__ __forceinline__ int row_of(int index) {
    static_assert(VECTORS < 60);
    return VP_ARCH >= 800 ? index * (65536 / VECTORS + 1) >> 16 : index / VECTORS;
  }
  static __device__ __forceinline__ int skew(const std::uint8_t* p) {
    return SLACK ? static_cast<int>(reinterpret_cast<std::uint64_t>(p) & 15) : 0;
  }
  // The multiple of 16 at or before it, in one instruction.
  static __device__ __forceinline__ const std::uint8_t* aligned(const std::uint8_t* p) {
    if (!SLACK) return p;
    return reinterpret_cast<const std::uint8_t*>(reinterpret_cast<std::uint64_t>(p) & ~15ull);
  }
  // Where the chunk that begins at `first` in the first row begins for another, in shared memory.
  __device__ __forceinline__ int row_start(const std::uint8_t* first, int row) const {
    return row * STRIDE + skew(first + min(row, last_row) * row_bytes);
  }
  static __device__ __forceinline__ int place(int index) {
    return STRIDE == 16 * VECTORS ? 16 * index
                                  : row_of(index) * STRIDE + (index - row_of(index) * VECTORS) * 16;
  }
  __device__ __forceinline__ bool is_in(int turn) const {
    return 16 * VECTORS % 32 == 0 || turn < TURNS - 1 || lane + 32 * turn < 16 * VECTORS;
  }
  __device__ __forceinline__ const std::uint8_t* vector(const std::uint8_t* first,
                                                        int offset) const {
    return aligned(first + static_cast<unsigned>(offset));
  }
  // Bytes of a vector that a row has which ends `left` bytes behind the start of the chunk.
  __device__ __forceinline__ int valid(const std::uint8_t* first, int index, int left) const {
    const std::uint8_t* start = first + min(index / VECTORS, last_row) * row_bytes;
    return max(0, min(16, skew(start) + left - 16 * (index % VECTORS)));
  }

  __device__ __forceinline__ void begin_whole(std::uint8_t* shared,
                                              const std::uint8_t* first) const {
    std::uint8_t* own = shared + 16 * lane;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      if (is_in(turn))
        copy_async(STRIDE == 16 * VECTORS ? own + 512 * turn : shared + place(lane + 32 * turn),
                   vector(first, offset[turn]), 16);
  }
  // left: bytes of a row from `first` on.
  __device__ __forceinline__ void begin(std::uint8_t* shared, const std::uint8_t* first,
                                        int left) const {
    if (left >= BYTES) {
      begin_whole(shared, first);
    } else {
#pragma unroll 1
      for (int index = lane; index < 16 * VECTORS; index += 32) {
        const int bytes = valid(first, index, left);
        const int from = min(index / VECTORS, last_row) * row_bytes + 16 * (index % VECTORS);
        copy_async(shared + place(index), vector(first, bytes > 0 ? from : 0), bytes);
      }
    }
  }

  // The same through registers.
  __device__ __forceinline__ void load(const std::uint8_t* first, int left) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int bytes = left >= BYTES ? 16 : valid(first, lane + 32 * turn, left);
      held[turn] = uint4{0, 0, 0, 0};
      if (is_in(turn) && bytes > 0)
        held[turn] = __ldg(reinterpret_cast<const uint4*>(vector(first, offset[turn])));
      if (bytes < 16) held[turn] = first_bytes(held[turn], bytes);
    }
  }
  __device__ __forceinline__ void store(std::uint8_t* shared) const {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      if (is_in(turn))
        *reinterpret_cast<uint4*>(shared + place(lane + 32 * turn)) = held[turn];
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
