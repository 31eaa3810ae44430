// A warp's own part of shared memory in decode: keys and values of STEP positions at a time, and
// how they get there by way of registers (attention_copied.cuh: by copies). No other warp touches
// it, so none waits for another.
// -D CLUSTER: blocks that take a piece together, where shared memory may be read by others (sm_90)
#pragma once
#include "attention_tile.cuh"
#include "bell.cuh"

namespace voltapile {

constexpr int STEP = 16;
constexpr int BLOCKS = VP_ARCH >= 900 ? CLUSTER : 1;
constexpr int TURNS = SHARES / BLOCKS;  // shares that a strand goes through
constexpr bool COPIES = VP_ARCH >= 800 && (KIND == F16 || KIND == Q8_0);
constexpr unsigned WHOLE_WARP = 0xffffffffu;

// STEP positions as halves. An operand has WIDTH of the dimensions.
struct HalfTile {
  static constexpr int WIDTH = 16;
  static constexpr bool IN_FOURS = false;
  half_bits at[STEP * PITCH];

  __device__ void keys(Mma::B (&b)[1], int k, int lane) const {
    b[0] = Mma::load_b(at + k, PITCH, lane);
  }
  __device__ void values(Mma::B (&b)[1], int d, int lane) const {
    b[0] = Mma::load_b_rows(at + d, PITCH, lane);
  }
  // Row i of this lane's part of a result, 16 dimensions wide.
  static __device__ void write(float* to, const Square& s, int i, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(to + 8 * h + 2 * Mma::pair(lane)) =
          float2{s.e[4 * h + 2 * i], s.e[4 * h + 2 * i + 1]};
  }
};

// Where a block's keys and values come from; in shared memory.
struct Source {
  Cache caches[2];  // of keys, of values
  Pages where;
  int low, high;   // positions that anybody of the block sees
  int first, end;  // of the first strand, and of the piece
};

// Where a block's first strand begins, counted from the piece's beginning. A block of a cluster has
// the same STEP positions of four shares' pages, a strand each.
__device__ __forceinline__ int begin_of(int rank) {
  return BLOCKS > 1 ? 4 * PAGE * (rank >> 2) + STEP * (rank & 3) : 0;
}
// Blocks of a cluster that have any of so many positions: the first of them.
__device__ __forceinline__ int blocks_of(int positions) {
  if (BLOCKS == 1) return 1;
  const int own = min(4, (positions + STEP - 1) / STEP), more = positions - begin_of(4);
  return own + (more > 0 ? min(4, (more + STEP - 1) / STEP) : 0);
}

// Which positions a strand goes through: STEP of each page of its share, then those of the next
// share, for TURNS shares.
struct Walk {
  static constexpr int ROUND = PAGE * SHARES, APART = BLOCKS > 1 ? PAGE : STEP;
  int p, turn = 0;

  __device__ explicit Walk(const Source& s) { begin(s); }
  __device__ bool is_done(const Source& s) const { return TURNS > 1 ? turn == TURNS : p >= s.end; }
  __device__ void go_on(const Source& s) {
    p += ROUND;
    if (TURNS == 1 || p < s.end || is_done(s)) return;
    ++turn;
    begin(s);
  }

 private:
  __device__ void begin(const Source& s) {
#pragma unroll 1
    for (; turn < TURNS; ++turn) {
      p = s.first + PAGE * turn + APART * (static_cast<int>(threadIdx.x) / 32);
      p += static_cast<unsigned>(max(s.low - STEP - p, -ROUND) + ROUND) / ROUND * ROUND;
      if (TURNS == 1 || p < s.end) return;
    }
  }
};

// By way of registers: keys are read while values are multiplied, and values while keys are; where
// there are no registers for that, both are read when they are wanted, part by part. A block has
// one share.
struct ReadSteps {
  static constexpr bool IS_AHEAD = DIM <= 128;
  static constexpr int BELLS = 1;  // none, but an array must have one
  static constexpr int PART = IS_AHEAD ? STEP : KIND == ANY ? STEP / 4 : STEP / 2;
  HalfTile tile;

  struct State {
    Fetch<PART, 32> fetch{static_cast<int>(threadIdx.x & 31)};
    int page, next;
    __device__ State(const Source& s, Bell*, int) : page(s.where.at(Walk(s).p)) {}
  };
  __device__ void begin(const Source&, State&, int, int) {}
  __device__ void go_on(const Source& s, State& state, int) { read_keys(s, state, Walk(s).p); }
  __device__ const HalfTile& keys(const Source& s, State& state, int p, int) {
    put(s.caches[0], s, state, p);
    if (IS_AHEAD) state.fetch.read(s.caches[1], state.page, p, s.low, s.high);
    state.next = s.where.at(p + PAGE * SHARES);
    return tile;
  }
  __device__ void end_keys(const Source&, State&, int) { __syncwarp(); }
  __device__ const HalfTile& values(const Source& s, State& state, int p, int) {
    put(s.caches[1], s, state, p);
    state.page = state.next;
    read_keys(s, state, p + PAGE * SHARES);
    return tile;
  }
  __device__ void end_values(const Source&, State&, int) { __syncwarp(); }

 private:
  __device__ void read_keys(const Source& s, State& state, int p) {
    if (IS_AHEAD && p < s.end) state.fetch.read(s.caches[0], state.page, p, s.low, s.high);
  }
  __device__ void put(const Cache& c, const Source& s, State& state, int p) {
#pragma unroll
    for (int at = 0; at < STEP; at += PART) {
      if (!IS_AHEAD) state.fetch.read(c, state.page, p + at, s.low, s.high);
      state.fetch.put(c, tile.at + at * PITCH);
    }
    __syncwarp();
  }
};

}  // namespace voltapile
