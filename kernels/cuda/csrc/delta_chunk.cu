// Gated delta nets of long rows: CHUNK tokens at once, as products of matrices on tensor cores. See
// delta_net.cu, whose delta_step goes through the tokens of other rows one by one.
//
// Of a chunk, G_t is the product of decays up to token t, E_t what token t adds along its key:
//   (1 + L) E = rate (V - G (S K)),  L_ti = rate_t G_t / G_i (k_t . k_i) for i < t
//   O = G (S Q) + A E,               A_ti = G_t / G_i (q_t . k_i) for i <= t
//   S becomes G_end S + the sum of G_end / G_i k_i E_i
// All is kept with a column of values in each row, so that a sum is the next product's operand. A
// float is two halves; of their four products the least is left out.
#include "delta_ahead.cuh"

namespace voltapile {

// A warp's 16 columns of values.
struct State {
  Square s[TILES];

  // matrix: of the first column
  __device__ __forceinline__ void read(const float* matrix, int lane) {
    matrix += own_place(lane);
    for_each([&](int n, int e, int at) {
      const float2 two = *reinterpret_cast<const float2*>(matrix + at);
      s[n].e[e] = two.x, s[n].e[e + 1] = two.y;
    });
  }
  __device__ __forceinline__ void write(float* matrix, int lane) const {
    matrix += own_place(lane);
    for_each([&](int n, int e, int at) {
      *reinterpret_cast<float2*>(matrix + at) = float2{s[n].e[e], s[n].e[e + 1]};
    });
  }
  // What tokens add if they do not know each other; and what their queries find before the chunk.
  // first: of the block's columns
  __device__ __forceinline__ void multiply(Square& x, Square& y, const Chunk& chunk,
                                           const Pace& pace, int first, int lane) const {
    Sum known, asked;
    known.clear(), asked.clear();
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const Halves own = split(s[n], lane);
      known.add(own, chunk.keys + 16 * n, DIM, PITCH, lane);
      asked.add(own, chunk.queries + 16 * n, DIM, PITCH, lane);
      __syncwarp();  // or all tiles would be loaded first, and registers spilled
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int t = place_of(e, lane);
      const float decay = pace.decay[t];
      const float value = chunk.values[value_place(t, first + Mma::row(lane, e >> 1 & 1))];
      x.e[e] = fmaf(-LOWER * decay, known.at(e), value);
      y.e[e] = decay * asked.at(e);
    }
  }
  // On by the chunk. errors: of solve_errors
  __device__ __forceinline__ void go_on(const Square& errors, const Chunk& chunk, const Pace& pace,
                                        int lane) {
    const Halves own = split(errors, lane);
    const float decay = pace.decay[CHUNK - 1];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      Sum more;
      more.clear();
      more.add_rows(own, chunk.keys + 16 * n, DIM, PITCH, lane);
#pragma unroll
      for (int e = 0; e < 8; ++e) s[n].e[e] = fmaf(decay, s[n].e[e], LOWER * more.at(e));
      __syncwarp();
    }
  }

 private:
  static __device__ __forceinline__ int own_place(int lane) {
    return Mma::row(lane, 0) * DIM + place_of(0, lane);
  }
  // Calls use(tile, element, how far it is from the lane's first), for two neighbours at a time.
  template <class Use>
  static __device__ __forceinline__ void for_each(Use use) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 8; e += 2)
        use(n, e, Mma::row_of(0, e >> 1 & 1) * DIM + 16 * n + 8 * (e >> 2));
  }
};

// What tokens add once they know each other, times what is left of it at the chunk's end; y becomes
// the output. x, y: of State::multiply
__device__ __forceinline__ Square solve_errors(Square x, Square& y, const Chunk& chunk,
                                               const Pace& pace, int lane) {
  Sum sum;
  sum.clear();
  sum.add(split(x, lane), chunk.solved, CHUNK, PAIR_PITCH, lane);
#pragma unroll
  for (int e = 0; e < 8; ++e) x.e[e] = sum.at(e);
  sum.clear();
  sum.add(split(x, lane), chunk.asked, CHUNK, PAIR_PITCH, lane);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    y.e[e] = LOWER * (y.e[e] + sum.at(e));
    x.e[e] *= pace.to_end[place_of(e, lane)];
  }
  return x;
}

// A warp's columns go through the row. out: of its first token.
__device__ __forceinline__ void go_through(State& state, Shared& sh, const Run& run, float* out,
                                           int warp, int lane) {
  out += Mma::row(lane, 0);
#pragma unroll 1
  for (int n = 0; CHUNK * n < run.count; ++n) {
    const Chunk& chunk = sh.chunk(n);
    const Pace& pace = sh.pace(n);
    __syncthreads();  // the helpers have made it
    Square x, y;
    state.multiply(x, y, chunk, pace, 16 * warp, lane);
    const Square errors = solve_errors(x, y, chunk, pace, lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int t = CHUNK * n + place_of(e, lane);
      float* own = out + static_cast<unsigned>(t * run.heads * DIM);
      if (t < run.count) own[Mma::row_of(0, e >> 1 & 1)] = y.e[e];
    }
    state.go_on(errors, chunk, pace, lane);
  }
  __syncthreads();  // the helpers go on to the next row
}

}  // namespace voltapile

using namespace voltapile;

// grid: (value heads * DIM / COLUMNS, some), THREADS + HELPERS. Of rows with more than `least`
// tokens, whose matrices delta_step has brought to their first one; blocks take them in turn. As
// delta_step otherwise.
extern "C" __global__ void __launch_bounds__(THREADS + HELPERS, 1)
delta_chunk(const float* c, const float* gates, const float* rate, const float* dt,
            const int* key_head_of, float* matrices, const int* slots, float* out, int tokens,
            int key_heads, int value_heads, int is_provisional, int least) {
  __shared__ __align__(16) Shared sh;
  grid_launch();
  grid_wait();
  constexpr int SLICES = DIM / COLUMNS;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES * COLUMNS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int channels = Heads{key_heads, value_heads}.channels(), q = key_head_of[head] * DIM;
  if (lane == 0) sh.next[warp] = {0, 0};
#pragma unroll 1
  while (true) {
    __syncwarp();
    const uint2 next = sh.next[warp];
    const int row = next.x;
    if (row >= tokens) return;
    const int length = row_length(slots, tokens, row);
    __syncwarp();
    if (lane == 0) sh.next[warp] = {next.x + length, next.y + (length > least)};
    if (length <= least || next.y % gridDim.y != blockIdx.y) continue;
    const Run run{c, gates, row, length, q, q + key_heads * DIM,
                  (2 * key_heads + head) * DIM + slice, channels, head, value_heads};
    if (warp >= WARPS) {
      help(sh, run, rate[head], dt[head], warp - WARPS, lane);
      continue;
    }
    const int column = head * DIM + slice + 16 * warp;  // of all heads'
    const auto matrix = [&] {  // told twice, or its address would be a register too much on sm_70
      return matrices + static_cast<unsigned>((slots[row] * value_heads * DIM + column) * DIM);
    };
    State state;
    state.read(matrix(), lane);
    go_through(state, sh, run, out + static_cast<long long>(row) * value_heads * DIM + column,
               warp, lane);
    if (!is_provisional) state.write(matrix(), lane);
  }
}
