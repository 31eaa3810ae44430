// Keys and values of STEP positions as they lie in their page, copied whole into a strand's part of
// shared memory while others are multiplied; sm_80 on. From sm_90 on one thread asks for a tile by
// one copy (two of q8_0: integers and scales) and the strand waits for its bell; before, all lanes
// copy 16 bytes at a time.
#pragma once
#include "attention_strand.cuh"
#include "either.cuh"

namespace voltapile {

#if VP_ARCH >= 800
// Steps that are under way; bytes in flight are what memory's speed needs.
constexpr int STAGES = (DIM > 128 ? 1 : 2) + (KIND == Q8_0);
constexpr bool HAS_BELLS = VP_ARCH >= 900;

__device__ __forceinline__ unsigned place_in_page(int p) { return static_cast<unsigned>(p) % PAGE; }

// BYTES that lie one behind the other.
template <int BYTES>
__device__ __forceinline__ void copy_lying(void* to, const unsigned char* from, Bell* bell,
                                           int lane) {
#if VP_ARCH >= 900
  if (lane == 0) copy_whole(to, from, BYTES, bell);
#else
  auto* own = static_cast<unsigned char*>(to) + 16 * lane;
#pragma unroll
  for (int at = 0; at < BYTES; at += 512)
    if (at + 512 <= BYTES || 16 * lane < BYTES - at)
      copy_async(own + at, from + 16 * lane + at, 16);
#endif
}

// An address in shared memory as a number, and back.
#ifdef VP_EMULATION
inline std::size_t number_of(const void* p) { return reinterpret_cast<std::size_t>(p); }
inline const half_bits* at_number(std::size_t n) { return reinterpret_cast<const half_bits*>(n); }
#else
__device__ __forceinline__ unsigned number_of(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ const half_bits* at_number(unsigned n) {
  return static_cast<const half_bits*>(__cvta_shared_to_generic(n));
}
#endif

// Where load_matrices finds a row of a tile whose rows have WIDE pieces (turn_of): piece `first` +
// `second`; only the former, which is even, is known beforehand. (It costs one instruction, since
// tiles begin where what a group takes, at most 128 bytes, divides the address.)
template <int WIDE>
__device__ __forceinline__ const half_bits* matrix_row(const void* tile, unsigned row,
                                                       unsigned second, unsigned first) {
  constexpr unsigned GROUP = group_of(WIDE);
  const auto at =
      number_of(tile) + row * (16 * WIDE) + 16 * (second ^ turn_of(row, WIDE));
  return at_number((at ^ 16 * (first % GROUP)) + 16 * (first / GROUP * GROUP));
}

// As f16 has them.
struct HalfRows {
  static constexpr int WIDTH = HalfTile::WIDTH, WIDE = DIM / 8, BYTES = STEP * DIM * 2;
  static constexpr bool IN_FOURS = HalfTile::IN_FOURS;
  half_bits at[STEP * DIM];

  // All positions: none lies outside of the page. What is in a row after another is so in a page.
  __device__ void copy(const unsigned char* head, int p, Bell* bell, int lane) {
    copy_lying<BYTES>(at, head + place_in_page(p) * (DIM * 2), bell, lane);
  }
  static __device__ void bring_near(const unsigned char* head, int p) {
    copy_to_l2(head + place_in_page(p) * (DIM * 2), BYTES);
  }
  // Values that nobody sees may be anything, and 0 times that is not 0. (Scores of keys that nobody
  // sees are replaced: finish_scores.)
  __device__ void hide(int low, int high, int lane) {
    clear_quads(at, low * WIDE, lane);
    clear_quads(at + high * DIM, (STEP - high) * WIDE, lane);
  }
  __device__ void keys(Mma::B (&b)[1], int k, int lane) const {
    load_matrices(b[0].r, matrix_row<WIDE>(at, (lane & 7) + 8 * (lane >> 4), lane >> 3 & 1, k / 8));
  }
  __device__ void values(Mma::B (&b)[1], int d, int lane) const {
    load_matrices_turned(b[0].r, matrix_row<WIDE>(at, lane & 15, lane >> 4, d / 8));
  }
  static __device__ void write(float* to, const Square& s, int i, int lane) {
    HalfTile::write(to, s, i, lane);
  }
};

// As q8_0 has them; they become halves on their way to the tensor core. Where halves lie, two bytes
// are one: of 16 dimensions a lane gets 4 pair to 4 pair + 3. Queries must lie in that order
// (Query), and results come out in it.
struct ByteRows {
  static constexpr int WIDTH = 32, WIDE = DIM / 16, BYTES = STEP * (DIM + 2 * WIDE);
  static constexpr bool IN_FOURS = true;
  std::uint8_t at[STEP * DIM];
  half_bits scales[STEP * WIDE];

  // As HalfRows'; what is hidden has no scale.
  __device__ void copy(const unsigned char* head, int p, Bell* bell, int lane) {
    const unsigned row = place_in_page(p);
    copy_lying<STEP * DIM>(at, head + row * DIM, bell, lane);
    copy_lying<STEP * 2 * WIDE>(scales, head + PAGE * DIM + row * (2 * WIDE), bell, lane);
  }
  static __device__ void bring_near(const unsigned char* head, int p) {
    const unsigned row = place_in_page(p);
    copy_to_l2(head + row * DIM, STEP * DIM);
    copy_to_l2(head + PAGE * DIM + row * (2 * WIDE), STEP * 2 * WIDE);
  }
  __device__ void hide(int low, int high, int lane) {
#pragma unroll 1
    for (int i = lane; i < STEP * WIDE; i += 32)
      if (i < low * WIDE || i >= high * WIDE) scales[i] = 0;
  }
  __device__ void keys(Mma::B (&b)[2], int k, int lane) const {
    unsigned r[4];
    load_matrices(r, matrix_row<WIDE>(at, lane & 15, lane >> 4, k / 16));
    const unsigned first = scale_pair(lane >> 2, k), second = scale_pair((lane >> 2) + 8, k);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      four(b[j].r[0], b[j].r[1], r[2 * j], __byte_perm(first, 0, j ? 0x3232 : 0x1010));
      four(b[j].r[2], b[j].r[3], r[2 * j + 1], __byte_perm(second, 0, j ? 0x3232 : 0x1010));
    }
  }
  __device__ void values(Mma::B (&b)[2], int d, int lane) const {
    unsigned r[4], s[4];
    load_matrices_turned(r, matrix_row<WIDE>(at, lane & 15, lane >> 4, d / 16));
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
  __device__ unsigned scale_pair(int position, int d) const {  // of dimensions d to d + 31
    return *reinterpret_cast<const unsigned*>(scales + position * WIDE + d / 16);
  }
  // Four neighbours of one position.
  static __device__ void four(unsigned& low, unsigned& high, unsigned bytes, unsigned scale) {
    spread(bytes, low, high);
    low = scaled(low, 1152.0f, scale), high = scaled(high, 1152.0f, scale);
  }
  // Two neighbours of two positions: the even dimension of both, the odd one of both.
  static __device__ void pairs(unsigned& even, unsigned& odd, unsigned bytes, unsigned scale) {
    even = scaled(__byte_perm(bytes, 0x64646464, 0x4240), 1152.0f, scale);
    odd = scaled(__byte_perm(bytes, 0x64646464, 0x4341), 1152.0f, scale);
  }
};

using CopiedTile = Either<KIND == Q8_0, ByteRows, HalfRows>::type;

// STAGES steps are under way. Positions from `fresh` on are written by the kernel before this one,
// so the first step that has any, and those behind it, are asked for after waiting.
struct CopiedSteps {
  static constexpr int BELLS = HAS_BELLS ? 2 * STAGES : 1;
  CopiedTile tiles[STAGES][2];  // keys, values

  struct State {
    Walk ahead;   // at the step that is asked for next
    Bell* bells;  // of tiles, BELLS
    int page;  // its number in the table, which nobody has looked at: it may be on its way
    int stage = 0, asked;  // the latter of the first STAGES
    bool is_odd = true;          // how often the stage's bells will have rung
    int first_p, first_page;     // of the first STAGES steps a lane has one each; -1 for none
    __device__ State(const Source& s, Bell* bells, int lane) : ahead(s), bells(bells) {
      Walk own(s);
      go_far(own, s, min(lane, STAGES - 1));
      first_p = own.is_done(s) ? -1 : own.p;
      first_page = s.where.id(own.p);
      go_far(ahead, s, STAGES);
      page = s.where.id(ahead.p);
      if (HAS_BELLS) make_bells(bells, lane);
    }
  };
  __device__ void begin(const Source& s, State& state, int fresh, int lane) {
    state.asked = ask_first(s, state.bells, state.first_p, state.first_page, 0, fresh, lane);
  }
  __device__ void go_on(const Source& s, const State& state, int lane) {
    if (state.asked < STAGES)
      ask_first(s, state.bells, state.first_p, state.first_page, state.asked, 1 << 30, lane);
  }
  __device__ const CopiedTile& keys(const Source&, const State& state, int, int) {
    wait_for(0, state);
    return tiles[state.stage][0];
  }
  __device__ void end_keys(const Source& s, const State& state, int lane) {
    __syncwarp();
    ask_next(0, s, state, lane);
  }
  __device__ const CopiedTile& values(const Source& s, const State& state, int p, int lane) {
    wait_for(1, state);
    CopiedTile& tile = tiles[state.stage][1];
    if (p < s.low || p + STEP > s.high) {
      __syncwarp();
      tile.hide(max(0, s.low - p), min(STEP, s.high - p), lane);
      __syncwarp();
    }
    return tile;
  }
  __device__ void end_values(const Source& s, State& state, int lane) {
    __syncwarp();
    ask_next(1, s, state, lane);
    state.ahead.go_on(s);
    state.page = s.where.id(state.ahead.p);
    state.is_odd ^= state.stage + 1 == STAGES;
    state.stage = state.stage + 1 == STAGES ? 0 : state.stage + 1;
  }

 private:
  static __device__ void make_bells(Bell* bells, int lane) {
#if VP_ARCH >= 900
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < BELLS; ++i) make_bell(bells + i);
      tell_bells();
    }
    __syncwarp();
#endif
  }
  static __device__ void wait_for(int which, const State& state) {
#if VP_ARCH >= 900
    await_own(state.bells + 2 * state.stage + which, state.is_odd);
#else
    wait_for_copies<2 * STAGES - 1>();
    __syncwarp();
#endif
  }
  // is_again: the tile has been read by all lanes, which met.
  __device__ void ask(int which, int stage, const Source& s, int page, int p, Bell* bells,
                      int lane, bool is_again) {
    Bell* bell = bells + 2 * stage + which;
#if VP_ARCH >= 900
    if (lane == 0) {
      if (is_again) order_copies();
      expect(bell, CopiedTile::BYTES);
    }
#endif
    tiles[stage][which].copy(s.caches[which].head(page), p, bell, lane);
  }
  __device__ void ask_next(int which, const Source& s, const State& state, int lane) {
    if (!state.ahead.is_done(s))
      ask(which, state.stage, s, s.where.head_in(state.page), state.ahead.p, state.bells, lane,
          true);
    if (!HAS_BELLS) commit_copies();
  }
  static __device__ __forceinline__ void go_far(Walk& at, const Source& s, int steps) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) at.go_on(s);
  }
  // For the first STAGES steps, from step `first` to before one that has positions from `fresh` on;
  // returns which that is. What lies there of those behind it comes near. A call, for its code runs
  // twice.
  __device__ __noinline__ int ask_first(const Source& s, Bell* bells, int own_p, int own_page,
                                        int first, int fresh, int lane) {
    int end = STAGES;
#pragma unroll 1
    for (int i = first; i < STAGES; ++i) {
      const int p = __shfl_sync(WHOLE_WARP, own_p, i);
      const int page = s.where.head_in(__shfl_sync(WHOLE_WARP, own_page, i));
      const bool is_asked = p >= 0;
      if (is_asked && p + STEP > fresh) end = min(end, i);
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        if (is_asked && i < end) ask(which, i, s, page, p, bells, lane, false);
        if (is_asked && i >= end && lane == 0)
          CopiedTile::bring_near(s.caches[which].head(page), p);
        if (!HAS_BELLS && i < end) commit_copies();
      }
    }
    return end;
  }
};

using Steps = Either<COPIES, CopiedSteps, ReadSteps>::type;
using KvTile = Either<COPIES, CopiedTile, HalfTile>::type;
#else
using Steps = ReadSteps;
using KvTile = HalfTile;
#endif

}  // namespace voltapile
