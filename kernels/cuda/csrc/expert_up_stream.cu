// Gate and up of chosen experts of generated rows from sm_80 on, and beside them of the one that
// every token takes. Each token has the bits that it has alone; nothing comes from the host.
//
// The next kernel may begin when this one has waited: so the choice is there before that one waits.
#include "expert_twins.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
struct Columns {
  const std::uint8_t *gate, *up;
};
struct Guests : Seats {
  float factors[MOST_TOKENS];  // of what is written
};

// sigmoid(x . weight) of each token, by all threads.
__device__ __forceinline__ void gate_tokens(const float* weight, int k, int count,
                                            Guests& guests) {
  constexpr int SEVERAL = 8;  // loads under way
  __shared__ float sums[WARPS];
#pragma unroll 1
  for (int token = 0; token < count; ++token) {
    const float* row = guests.from[token];
    float sum = 0.0f;
#pragma unroll 1
    for (int start = threadIdx.x; start < k; start += SEVERAL * 32 * WARPS) {
      float a[SEVERAL], b[SEVERAL];
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        const int at = start + 32 * WARPS * i;
        a[i] = at < k ? row[at] : 0.0f;
        b[i] = at < k ? weight[at] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) sum = fmaf(a[i], b[i], sum);
    }
    sum = warp_join(sum, Add());
    __syncthreads();  // sums may still be read from the last time
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) continue;
    sum = sums[threadIdx.x & (WARPS - 1)];
#pragma unroll
    for (int step = WARPS / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
    if (threadIdx.x == 0) guests.factors[token] = sigmoid(sum);
  }
}

// What a block makes: units of 16 rows, `first` and those behind it, of a gate and its up with
// `rows` rows of k columns, for up to `room` tokens. Their tiles are a gate's and its up's in turn.
struct Units {
  int first, count, rows, k, room;
  Columns from;

  __device__ __forceinline__ Units(int most, int rows, int k, int room)
      : first(blockIdx.x * most),
        count(max(0, min(most, (rows + 15) / 16 - first))),
        rows(rows), k(k), room(room) {}

  // silu(gate x) * up x. arrive: as of Strip.
  template <class Format, class Arrive>
  __device__ __forceinline__ void make(std::uint8_t* memory, int tokens, const Guests& guests,
                                       Arrive arrive) const {
    const Strip<Format> strip{2 * count, k, min(15, rows - 1), room, memory};
    const Sums sums = strip.multiply(
        tokens,
        [&](int t) {
          const long long row = first_row_of(16 * (first + t / 2), rows);
          return (t & 1 ? from.up : from.gate) + row * row_bytes_of<Format>(k);
        },
        [&](int token) { return guests.from[token]; }, arrive);
    if (tokens <= 0) return;
    // A warp has a token of a unit, half of its lanes the gate's rows, the others those of up.
    const int warp = own_warp(), lane = threadIdx.x & 31;
    int unit = 0, token = warp;
#pragma unroll 1
    for (;; token += WARPS) {
#pragma unroll 1
      for (; token >= tokens; ++unit) token -= tokens;
      if (unit >= count) return;
      const int meant = 16 * (first + unit), row = first_row_of(meant, rows) + lane % 16;
      const float sum = sums.of(2 * unit + lane / 16, token, lane % 16);
      const float up = __shfl_xor_sync(ALL, sum, 16);
      if (lane < 16 && row >= meant && row < rows)
        guests.to[token][row] = activated(sum, SILU) * up * guests.factors[token];
    }
  }
};
#endif

// grid: (rows / 16 / units, tokens * used + turns of `room` tokens of the expert that all take).
// out: [tokens * used][rows]; other_out [tokens][other_rows], times a token's gate if there is one.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_up_stream(const Expert* table, int count, int first, const int* chosen, const float* x,
                     float* out, int tokens, int used, int k, int rows, int room, int units,
                     const std::uint8_t* other_gate, const std::uint8_t* other_up,
                     const float* other_weight, float* other_out, int other_rows) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Guests guests;
  const int pairs = tokens * used, y = blockIdx.y, begin = (y - pairs) * room;
  const bool is_other = !IS_ALONE && y >= pairs;
  Units all(units, is_other ? other_rows : rows, k, room);
  std::uint8_t* memory = shared;
  Columns* places = reinterpret_cast<Columns*>(shared);
  int local = 0;
  if (is_other) {
    if (other_weight != nullptr)
#pragma unroll 1
      for (int i = 32 * threadIdx.x; i < k; i += 32 * 32 * WARPS) prefetch(other_weight + i);
  } else {
    // Of all experts that are here, gate and up.
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += 32 * WARPS)
      places[i] = {table[i].matrices[GATE], table[i].matrices[UP]};
    memory += whole(16 * count);
    grid_wait();
    grid_launch();
    local = chosen[y] - first;
    __syncthreads();
  }
  // No branch depends on what was chosen, so that what comes before the first copy of weights is
  // worked out while that is on its way.
  const bool is_here = is_other || static_cast<unsigned>(local) < count;
  if (!is_here) all.count = 0;
  all.from = places[is_here ? local : 0];
  if (is_other) all.from = {other_gate, other_up};
  // By a thread for each of `own` tokens; row: that it is written to.
  const auto seat = [&](int own, unsigned token, unsigned row, float* out) {
    __syncthreads();  // what is in shared memory has been read
    if (threadIdx.x < own) {
      guests.from[threadIdx.x] = x + static_cast<long long>(token) * k;
      guests.to[threadIdx.x] = out + static_cast<long long>(row) * all.rows;
      guests.factors[threadIdx.x] = 1.0f;
    }
    __syncthreads();
  };
  if (is_other) {
    const int own = all.count > 0 ? min(room, tokens - begin) : 0;
    all.make<O>(memory, own, guests, [&] {
      grid_wait();
      grid_launch();
      seat(own, begin + threadIdx.x, begin + threadIdx.x, other_out);
      if (other_weight != nullptr) gate_tokens(other_weight, k, own, guests);
    });
    return;
  }
#pragma unroll 1
  for (int turn = 0, left = room + 1; left > room; turn += room) {
    int mine = y;
    left = 1;
    if (tokens > 1) {
      left = twins_of(chosen, pairs, y, turn, mine);
      if (left <= 0) return;
    }
    const int own = all.count > 0 ? min(room, left) : 0;
    all.make<F>(memory, own, guests,
                [&] { seat(own, mine / static_cast<unsigned>(used), mine, out); });
  }
#endif
}
