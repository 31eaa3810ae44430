// A warp's own part of shared memory in decode: keys and values of STEP positions at a time, and
// how they get there. No other warp touches it, so none waits for another.
// -D CLUSTER: blocks that take a piece together, where shared memory may be read by others (sm_90)
#pragma once
#include "attention_tile.cuh"

namespace voltapile {

constexpr int STEP = 16;
constexpr int BLOCKS = VP_ARCH >= 900 ? CLUSTER : 1;
constexpr int TURNS = SHARES / BLOCKS;  // shares that a strand goes through
constexpr bool COPIES = VP_ARCH >= 800 && (KIND == F16 || KIND == Q8_0);
// Steps that are under way; bytes in flight are what memory's speed needs.
constexpr int STAGES = !COPIES || DIM > 128 ? 1 : KIND == F16 ? 2 : 3;
constexpr unsigned WHOLE_WARP = 0xffffffffu;

template <bool IS_FIRST, class First, class Second>
struct Either {
  using type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using type = Second;
};

__device__ __forceinline__ unsigned place_in_page(int p) { return static_cast<unsigned>(p) % PAGE; }

// STEP rows of PIECES times 16 bytes, which lie one behind the other, to rows `pitch` bytes apart.
// from: this lane's first. (Sums are written so that copies have one address and constants.)
template <int PIECES>
__device__ __forceinline__ void copy_rows(void* to, const unsigned char* from, int pitch,
                                          unsigned lane) {
  auto* own = static_cast<unsigned char*>(to) + lane / PIECES * pitch + lane % PIECES * 16;
#pragma unroll
  for (int i = 0; i < STEP * PIECES / 32; ++i) {
    if (32 % PIECES != 0) {
      const unsigned n = lane + 32 * i;
      own = static_cast<unsigned char*>(to) + n / PIECES * pitch + n % PIECES * 16;
    }
    copy_async(own + (32 % PIECES == 0 ? i * (32 / PIECES) * pitch : 0), from + 512 * i, 16);
  }
}

// STEP positions as halves. An operand has WIDTH of the dimensions.
struct HalfTile {
  static constexpr int WIDTH = 16;
  static constexpr bool IN_FOURS = false;
  half_bits at[STEP * PITCH];

  // All positions: none lies outside of the page. What is in a row after another is so in a page.
  __device__ void copy(const unsigned char* head, int p, int lane) {
    constexpr int PIECES = DIM / 8;
    const unsigned char* from = head + place_in_page(p) * (DIM * 2) + 16 * lane;
    copy_rows<PIECES>(at, from, PITCH * 2, lane);
  }
  // Values that nobody sees may be anything, and 0 times that is not 0. (Scores of keys that nobody
  // sees are replaced: finish_scores.)
  __device__ void hide(int low, int high, int lane) {
    clear_quads(at, low * (PITCH / 8), lane);
    clear_quads(at + high * PITCH, (STEP - high) * (PITCH / 8), lane);
  }
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

#if VP_ARCH >= 800
// STEP positions as q8_0 has them; they become halves on their way to the tensor core. Where halves
// lie, two bytes are one: of 16 dimensions a lane gets 4 pair to 4 pair + 3. Queries must lie in
// that order (Query), and results come out in it. Rows start an odd number of 16 bytes apart.
struct ByteTile {
  static constexpr int WIDTH = 32, WIDE = DIM + 16, SCALES = DIM / 16;
  static constexpr bool IN_FOURS = true;
  std::uint8_t at[STEP * WIDE];
  half_bits scales[STEP * SCALES];

  // As HalfTile's; what is hidden has no scale.
  __device__ void copy(const unsigned char* head, int p, int lane) {
    constexpr int PIECES = DIM / 16;
    const unsigned row = place_in_page(p);
    copy_rows<PIECES>(at, head + row * DIM + 16 * lane, WIDE, lane);
    if (lane < STEP * SCALES / 8)
      copy_async(scales + 8 * lane, head + PAGE * DIM + 2 * SCALES * row + 16 * lane, 16);
  }
  __device__ void hide(int low, int high, int lane) {
#pragma unroll 1
    for (int i = lane; i < STEP * SCALES; i += 32)
      if (i < low * SCALES || i >= high * SCALES) scales[i] = 0;
  }
  __device__ void keys(Mma::B (&b)[2], int k, int lane) const {
    unsigned r[4];
    load_matrices(r, matrix(k, lane));
    const unsigned first = scale_pair(lane >> 2, k), second = scale_pair((lane >> 2) + 8, k);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      four(b[j].r[0], b[j].r[1], r[2 * j], __byte_perm(first, 0, j ? 0x3232 : 0x1010));
      four(b[j].r[2], b[j].r[3], r[2 * j + 1], __byte_perm(second, 0, j ? 0x3232 : 0x1010));
    }
  }
  __device__ void values(Mma::B (&b)[2], int d, int lane) const {
    unsigned r[4], s[4];
    load_matrices_turned(r, matrix(d, lane));
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = scale_pair(2 * (lane & 3) + (i & 1) + 8 * (i >> 1), d);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const unsigned pick = j ? 0x7632 : 0x5410;
      pairs(b[j].r[0], b[j].r[2], r[2 * j], __byte_perm(s[0], s[1], pick));
      pairs(b[j].r[1], b[j].r[3], r[2 * j + 1], __byte_perm(s[2], s[3], pick));
    }
  }
  static __device__ void write(float* to, const Square& s, int i, int lane) {
    *reinterpret_cast<float4*>(to + 4 * Mma::pair(lane)) =
        float4{s.e[2 * i], s.e[4 + 2 * i], s.e[2 * i + 1], s.e[5 + 2 * i]};
  }

 private:
  // Lanes' rows of four matrices: positions 0 to 7 and 8 to 15 of 16 bytes, then of the next 16.
  __device__ const half_bits* matrix(int d, int lane) const {
    return reinterpret_cast<const half_bits*>(at + (lane & 15) * WIDE + d + (lane >> 4) * 16);
  }
  __device__ unsigned scale_pair(int position, int d) const {  // of dimensions d to d + 31
    return *reinterpret_cast<const unsigned*>(scales + position * SCALES + d / 16);
  }
  // Four neighbours of one position.
  static __device__ void four(unsigned& low, unsigned& high, unsigned bytes, unsigned scale) {
    spread(bytes ^ 0x80808080u, low, high);
    low = scaled(low, 1152.0f, scale), high = scaled(high, 1152.0f, scale);
  }
  // Two neighbours of two positions: the even dimension of both, the odd one of both.
  static __device__ void pairs(unsigned& even, unsigned& odd, unsigned bytes, unsigned scale) {
    bytes ^= 0x80808080u;
    even = scaled(__byte_perm(bytes, 0x64646464, 0x4240), 1152.0f, scale);
    odd = scaled(__byte_perm(bytes, 0x64646464, 0x4341), 1152.0f, scale);
  }
};

using KvTile = Either<COPIES && KIND == Q8_0, ByteTile, HalfTile>::type;
#else
using KvTile = HalfTile;
#endif

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

// With cp.async: STAGES steps are under way. Positions from `fresh` on are written by the kernel
// before this one, so the first step that has any, and those behind it, are asked for after
// waiting.
struct CopiedSteps {
  KvTile tiles[STAGES][2];  // keys, values

  struct State {
    Walk ahead;  // at the step that is asked for next
    int page, stage = 0, asked;  // the latter of the first STAGES
    __device__ explicit State(const Source& s) : ahead(s) {
#pragma unroll 1
      for (int i = 0; i < STAGES; ++i) ahead.go_on(s);
      page = s.where.at(ahead.p);
    }
  };
  __device__ void begin(const Source& s, State& state, int fresh, int lane) {
    state.asked = ask_first(s, 0, fresh, lane);
  }
  __device__ void go_on(const Source& s, const State& state, int lane) {
    if (state.asked < STAGES) ask_first(s, state.asked, 1 << 30, lane);
  }
  __device__ const KvTile& keys(const Source&, const State& state, int, int) {
    wait_for_copies<2 * STAGES - 1>();
    __syncwarp();
    return tiles[state.stage][0];
  }
  __device__ void end_keys(const Source& s, const State& state, int lane) {
    __syncwarp();
    ask(0, s, state, lane);
  }
  __device__ const KvTile& values(const Source& s, const State& state, int p, int lane) {
    wait_for_copies<2 * STAGES - 1>();
    __syncwarp();
    KvTile& tile = tiles[state.stage][1];
    if (p < s.low || p + STEP > s.high) {
      tile.hide(max(0, s.low - p), min(STEP, s.high - p), lane);
      __syncwarp();
    }
    return tile;
  }
  __device__ void end_values(const Source& s, State& state, int lane) {
    __syncwarp();
    ask(1, s, state, lane);
    state.ahead.go_on(s);
    state.page = s.where.at(state.ahead.p);
    state.stage = state.stage + 1 == STAGES ? 0 : state.stage + 1;
  }

 private:
  __device__ void ask(int which, const Source& s, const State& state, int lane) {
    if (!state.ahead.is_done(s))
      tiles[state.stage][which].copy(s.caches[which].head(state.page), state.ahead.p, lane);
    commit_copies();
  }
  // For the first STAGES steps, from step `first` to before one that has positions from `fresh` on;
  // returns which that is. A call, for its code runs twice.
  __device__ __noinline__ int ask_first(const Source& s, int first, int fresh, int lane) {
    Walk at(s);
    int i = 0;
#pragma unroll 1
    for (; i < STAGES; ++i, at.go_on(s)) {
      if (i < first) continue;
      const bool is_asked = !at.is_done(s);
      if (is_asked && at.p + STEP > fresh) break;
      const int page = s.where.at(at.p);
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        if (is_asked) tiles[i][which].copy(s.caches[which].head(page), at.p, lane);
        commit_copies();
      }
    }
    return i;
  }
};

// By way of registers: keys are read while values are multiplied, and values while keys are; where
// there are no registers for that, both are read when they are wanted, part by part. A block has
// one share.
struct ReadSteps {
  static constexpr bool IS_AHEAD = DIM <= 128;
  static constexpr int PART = IS_AHEAD ? STEP : KIND == ANY ? STEP / 4 : STEP / 2;
  HalfTile tile;

  struct State {
    Fetch<PART, 32> fetch{static_cast<int>(threadIdx.x & 31)};
    int page, next;
    __device__ explicit State(const Source& s) : page(s.where.at(Walk(s).p)) {}
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

using Steps = Either<COPIES, CopiedSteps, ReadSteps>::type;

}  // namespace voltapile
