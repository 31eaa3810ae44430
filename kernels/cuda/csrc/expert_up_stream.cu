// Gate and up of chosen experts of generated rows from sm_80 on, and beside them of the one that
// every token takes. Each token has the bits that it has alone; nothing comes from the host.
//
// The next kernel may begin when this one has waited: so the choice is there before that one waits.
// -D as in expert_twins.cuh; ONE 1, of a launch with one token.
#include "either.cuh"
#include "expert_twins.cuh"

using namespace voltapile;

#ifndef ONE
#define ONE 0
#endif
constexpr bool IS_ONE = ONE;
#if VP_ARCH >= 800
using Own = Either<IS_ONE, Lone, Seated>::type;

struct Columns {  // as they begin in an Expert
  const std::uint8_t *gate, *up;
};
static_assert(GATE == 0 && UP == 1 && sizeof(Expert) % 16 == 0 && sizeof(Columns) == 16);

// Tokens of the expert that every token takes. weight: null, or factors are sigmoid(x . weight).
// parts, in shared memory: [token of `room`][chunk].
struct Everybody : Own {
  const float* weight;
  float* parts;
  int chunks;
  static constexpr bool IS_EARLY = true;

  __device__ __forceinline__ void arrive() const { grid_wait(); }
  template <class Cut>
  __device__ __forceinline__ void see(int token, int chunk, const Cut& cut, const Held& x) const {
    if (weight == nullptr) return;
    const int lane = threadIdx.x & 31;
    const Held w = cut.load(weight, chunk, lane);
    const float a = fmaf(x.a.x, w.a.x, x.a.y * w.a.y) + fmaf(x.a.z, w.a.z, x.a.w * w.a.w);
    const float b = fmaf(x.b.x, w.b.x, x.b.y * w.b.y) + fmaf(x.b.z, w.b.z, x.b.w * w.b.w);
    const float sum = warp_join(a + b, Add());
    if (lane == 0) parts[token * chunks + chunk] = sum;
  }
  __device__ __forceinline__ float factor(int token) const {
    if (weight == nullptr) return 1.0f;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < chunks; ++i) sum += parts[token * chunks + i];
    return sigmoid(sum);
  }
};

// What a block makes: units of 16 rows, `first` and those behind it, of a gate and its up with
// `rows` rows of k columns, for up to `room` tokens. Their tiles are a gate's and its up's in turn.
struct Units {
  int first, count, rows, k;
  Columns from;

  __device__ __forceinline__ Units(int block, int most, int rows, int k)
      : first(block * most), count(max(0, min(most, rows / 16 - first))), rows(rows), k(k) {}

  // silu(gate x) * up x. source: as of Strip.
  template <class Format, class From>
  __device__ __forceinline__ void make(const Strip<Format>& strip,
                                       PieceRing<Strip<Format>::SIZE>& ring, int tokens,
                                       From source, float* out) const {
    const long long unit_bytes = 16 * Chunks<Format>{k}.row_bytes();
    const Sums sums = strip.multiply(
        tokens,
        [&](int t) { return (t & 1 ? from.up : from.gate) + (first + t / 2) * unit_bytes; },
        source, ring);
    if (tokens <= 0) return;
    // A warp has a token of a unit, half of its lanes the gate's rows, the others those of up.
    const int warp = own_warp(), lane = threadIdx.x & 31;
#pragma unroll 1
    for (unsigned i = warp; i < count * tokens; i += WARPS) {
      const int unit = IS_ONE ? i : i / tokens, token = IS_ONE ? 0 : i - unit * tokens;
      const float sum = sums.of(2 * unit + lane / 16, token, lane % 16);
      const float up = __shfl_xor_sync(ALL, sum, 16);
      const float value = activated(sum, SILU) * up * source.factor(token);
      if (lane < 16) out[source.to(token) + 16 * (first + unit) + lane] = value;
    }
  }
};
#endif

// grid: (rows / 16 / units, tokens * used + turns of `room` tokens of the expert that all take).
// out: [tokens * used][rows]; other_out [tokens][other_rows], times a token's gate if there is one.
// depth, other_depth: of rings. All matrices lie by tiles. Of one token the expert that all take
// has blocks (.., used) on, with other_units each.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 20 / WARPS)
    expert_up_stream(const Expert* table, int count, int first, const int* chosen, const float* x,
                     float* out, int tokens, int used, int k, int rows, int room, int units,
                     int depth, const std::uint8_t* other_gate, const std::uint8_t* other_up,
                     const float* other_weight, float* other_out, int other_rows,
                     int other_depth, int other_units) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Seats seats;
  if (IS_ONE) tokens = room = 1;
  const int pairs = tokens * used, y = blockIdx.y;
  if (!IS_ALONE && y >= pairs) {
    // Of one token there are as many blocks as have found room, of other_units each.
    const int begin = IS_ONE ? 0 : (y - pairs) * room, chunks = Chunks<O>{k}.count();
    const int block = IS_ONE ? (y - pairs) * gridDim.x + blockIdx.x : blockIdx.x;
    Units all(block, other_units, other_rows, k);
    all.from = {other_gate, other_up};
    const int own = all.count > 0 ? min(room, tokens - begin) : 0;
    if (other_weight != nullptr)
#pragma unroll 1
      for (int i = 32 * threadIdx.x; i < k; i += 32 * 32 * WARPS) prefetch(other_weight + i);
    const int token = IS_ONE ? 0 : begin + threadIdx.x;
    const Own seated = Own::sit(seats, x, own, token, token, k, other_rows);
    const Strip<O> strip{2 * all.count, k, room, other_depth, shared + whole(4 * room * chunks)};
    auto ring = strip.ring();
    const Everybody source{seated, other_weight, reinterpret_cast<float*>(shared), chunks};
    all.make(strip, ring, own, source, other_out);
    return;
  }
  Units all(blockIdx.x, units, rows, k);
  Strip<F> strip{2 * all.count, k, room, depth, shared};
  auto ring = strip.ring();
  // Of all experts that are here, gate and up; where tokens come, unless nobody meets before that.
  Columns* places = reinterpret_cast<Columns*>(IS_ONE ? strip.end() : strip.tokens());
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += 32 * WARPS)
    copy_async(places + i, table[i].matrices + GATE, sizeof(Columns));
  commit_copies();
  const auto met = [] {
    wait_for_copies<0>();
    __syncthreads();
  };
  if (IS_ONE) met();
  grid_wait();
  const int local = chosen[y] - first;
  if (!IS_ONE) met();
  // No branch depends on what was chosen, so that what comes before the first copy of weights is
  // worked out while that is on its way.
  const bool is_here = static_cast<unsigned>(local) < count;
  if (!is_here) all.count = strip.tiles = 0;
  all.from = places[is_here ? local : 0];
#pragma unroll 1
  for (int turn = 0, left = room + 1; left > room; turn += room) {
    int mine = y;
    left = 1;
    if (tokens > 1) {
      left = twins_of(chosen, pairs, y, turn, mine);
      if (left <= 0) return;
    }
    const int own = all.count > 0 ? min(room, left) : 0;
    const unsigned token = tokens > 1 ? mine / static_cast<unsigned>(used) : 0;
    all.make(strip, ring, own, Own::sit(seats, x, own, token, mine, k, rows), out);
  }
#endif
}
