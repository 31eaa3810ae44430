// Gated delta nets of long rows: CHUNK tokens at once, as products of matrices on tensor cores. See
// delta_net.cu, whose delta_step goes through the tokens of other rows one by one.
//
// Of a chunk, G_t is the product of decays up to token t, E_t what token t adds along its key:
//   (1 + L) E = rate (V - G (S K)),  L_ti = rate_t G_t / G_i (k_t . k_i) for i < t
//   O = G (S Q) + A E,               A_ti = G_t / G_i (q_t . k_i) for i <= t
//   S becomes G_end S + the sum of G_end / G_i k_i E_i
// All is kept with a column of values in each row, so that a sum is the next product's operand. A
// float is two halves; of their four products the least is left out.
#include "attention_mma.cuh"
#include "delta_heads.cuh"

namespace voltapile {

constexpr int CHUNK = 16, TILES = DIM / 16;
constexpr int COLUMNS = DIM < 64 ? DIM : 64;  // of a head's values that a block takes
constexpr int WARPS = COLUMNS / 16, THREADS = 32 * WARPS;
constexpr int PITCH = 2 * DIM + PAD, PAIR_PITCH = 2 * CHUNK + PAD;  // both halves of a row
constexpr int TOGETHER = 4 * THREADS / DIM;     // tokens whose keys are read at once
constexpr int EACH = 2 * CHUNK / TOGETHER;      // fours of a chunk's keys and queries, a thread's
constexpr bool HAS_ROOM = VP_ARCH >= 800;       // in registers, for a chunk that comes early
constexpr float LEAST = -200.0f;  // logarithm of a decay that is as good as 0
// Queries and keys are of length 1 at most: times RAISE, for second halves must not be denormal.
constexpr float RAISE = 256.0f, LOWER = 1 / RAISE;

struct Shared {
  half_bits keys[CHUNK * PITCH], queries[CHUNK * PITCH];
  half_bits solved[CHUNK * PAIR_PITCH];  // rate / (1 + L): [t][i]
  half_bits asked[CHUNK * PAIR_PITCH];   // RAISE A: [t][i]
  float lower[CHUNK][CHUNK];                                        // L: [i][t]
  uint2 next[WARPS + 2];  // each warp's next row's first token, and long rows so far
  float logs[CHUNK], decay[CHUNK], rate[CHUNK], to_end[CHUNK];  // of G_t, G_t, and G_end / G_t
};

// Element e of a Square: which column of the 16 it is.
__device__ __forceinline__ int place_of(int e, int lane) {
  return 8 * (e >> 2) + 2 * Mma::pair(lane) + (e & 1);
}

__device__ __forceinline__ float2 rest_of(unsigned pair, float x, float y) {
  const float2 high = half_values(pair);
  return {x - high.x, y - high.y};
}

struct Halves {
  Mma::A high, low;
};
__device__ __forceinline__ Halves split(const Square& s, int lane) {
  Square low;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const float2 rest = rest_of(half_pair(s.e[e], s.e[e + 1]), s.e[e], s.e[e + 1]);
    low.e[e] = rest.x, low.e[e + 1] = rest.y;
  }
  return {Mma::from_square(s, lane), Mma::from_square(low, lane)};
}

// A sum in two parts, of what is large and what is small.
struct Sum {
  Square large, small;
  __device__ __forceinline__ void clear() { large.clear(), small.clear(); }
  __device__ __forceinline__ float at(int e) const { return large.e[e] + small.e[e]; }

  // b: [column][k], its second halves `low` behind the first ones
  __device__ __forceinline__ void add(const Halves& a, const half_bits* b, int low, int pitch,
                                      int lane) {
    const Mma::B high = Mma::load_b(b, pitch, lane);
    Mma::product(large, a.high, high);
    Mma::product(small, a.high, Mma::load_b(b + low, pitch, lane));
    Mma::product(small, a.low, high);
  }
  // b: [k][column]
  __device__ __forceinline__ void add_rows(const Halves& a, const half_bits* b, int low, int pitch,
                                           int lane) {
    const Mma::B high = Mma::load_b_rows(b, pitch, lane);
    Mma::product_by_rows(large, a.high, high);
    Mma::product_by_rows(small, a.high, Mma::load_b_rows(b + low, pitch, lane));
    Mma::product_by_rows(small, a.low, high);
  }
};

// A row: its first token, how many they are, and which channels are a block's.
struct Run {
  const float *c, *gates;  // of the step
  int first, count, q, k, v, channels, head, heads;

  // Of a token; of the last one where there is none.
  __device__ __forceinline__ unsigned place(int t) const {
    return (first + min(t, count - 1)) * channels;
  }
};

// A warp's values of a chunk.
__device__ __forceinline__ Square read_values(const Run& run, int first, int warp, int lane) {
  Square values;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int t = first + place_of(e, lane);
    const float* own = run.c + (run.place(t) + run.v + 16 * warp + Mma::row(lane, 0));
    values.e[e] = own[Mma::row_of(0, e >> 1 & 1)];
    if (t >= run.count) values.e[e] = 0.0f;
  }
  return values;
}

// A chunk's keys and queries, on their way; zeros behind the row, which change nothing.
struct Coming {
  float4 fours[EACH];  // of keys, then of queries

  __device__ __forceinline__ void read(const Run& run, int first) {
    const int own = first + threadIdx.x / (DIM / 4), column = threadIdx.x % (DIM / 4) * 4;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int t = own + n % (EACH / 2) * TOGETHER;
      const unsigned at = run.place(t) + (n < EACH / 2 ? run.k : run.q) + column;
      fours[n] = *reinterpret_cast<const float4*>(run.c + at);
      if (t >= run.count) fours[n] = float4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void put(Shared& sh) const {
    const int own = threadIdx.x / (DIM / 4) * PITCH + threadIdx.x % (DIM / 4) * 4;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      half_bits* rows = n < EACH / 2 ? sh.keys : sh.queries;
      half_bits* to = rows + own + n % (EACH / 2) * TOGETHER * PITCH;
      const float4 x{fours[n].x * RAISE, fours[n].y * RAISE, fours[n].z * RAISE,
                     fours[n].w * RAISE};
      const uint2 high{half_pair(x.x, x.y), half_pair(x.z, x.w)};
      const float2 one = rest_of(high.x, x.x, x.y), two = rest_of(high.y, x.z, x.w);
      *reinterpret_cast<uint2*>(to) = high;
      *reinterpret_cast<uint2*>(to + DIM) = uint2{half_pair(one.x, one.y), half_pair(two.x, two.y)};
    }
  }
};

// A token of a chunk each lane, as far as there are.
struct Gates {
  float b = 0.0f, a = 0.0f;

  __device__ __forceinline__ void read(const Run& run, int first, int lane) {
    const int t = first + lane;
    if (lane >= CHUNK || t >= run.count) return;
    b = run.gates[2 * (run.first + t) * run.heads + run.head];
    a = run.gates[(2 * (run.first + t) + 1) * run.heads + run.head];
  }
  __device__ __forceinline__ void put(Shared& sh, float rate, float dt, int left, int lane) const {
    const bool is_in = lane < min(CHUNK, left);
    float sum = is_in ? fmaxf(log_decay_of(a, rate, dt), LEAST) : 0.0f;
#pragma unroll 1
    for (int step = 1; step < CHUNK; step <<= 1) {
      const float other = __shfl_up_sync(ALL, sum, step);
      if (lane >= step) sum += other;
    }
    const float end = __shfl_sync(ALL, sum, CHUNK - 1);
    if (lane >= CHUNK) return;
    sh.logs[lane] = sum, sh.decay[lane] = expf(sum), sh.to_end[lane] = expf(end - sum);
    sh.rate[lane] = is_in ? quotient(1.0f, 1.0f + expf(fminf(-b, 80.0f))) : 0.0f;
  }
};

// Products of rows with the chunk's keys: element e is of row(lane, e >> 1 & 1) and place_of.
__device__ __forceinline__ Sum pairs_of(const half_bits* rows, const half_bits* keys, int lane) {
  Sum sum;
  sum.clear();
#pragma unroll 1
  for (int k = 0; k < DIM; k += 16) {
    const Halves a{Mma::load_a(rows + k, PITCH, lane), Mma::load_a(rows + DIM + k, PITCH, lane)};
    sum.add(a, keys + k, DIM, PITCH, lane);
  }
  return sum;
}

__device__ __forceinline__ float ratio(const Shared& sh, int t, int i) {
  return expf(fminf(sh.logs[t] - sh.logs[i], 0.0f));
}

// A warp solves (1 + L) X = rate, a column of X a lane.
__device__ __forceinline__ void solve(Shared& sh, int lane) {
  const Sum sum = pairs_of(sh.keys, sh.keys, lane);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int t = Mma::row(lane, e >> 1 & 1), i = place_of(e, lane);
    sh.lower[i][t] = i < t ? sh.rate[t] * ratio(sh, t, i) * (LOWER * LOWER * sum.at(e)) : 0.0f;
  }
  __syncwarp();
  float x[CHUNK];
#pragma unroll
  for (int t = 0; t < CHUNK; ++t) x[t] = t == lane ? sh.rate[t] : 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
    for (int t = i + 1; t < CHUNK; ++t) x[t] = fmaf(-sh.lower[i][t], x[i], x[t]);
    __syncwarp();
  }
  if (lane >= CHUNK) return;
#pragma unroll
  for (int t = 0; t < CHUNK; ++t) {
    half_bits* to = sh.solved + t * PAIR_PITCH + lane;
    const unsigned high = half_pair(x[t], 0.0f);
    to[0] = static_cast<half_bits>(high);
    to[CHUNK] = static_cast<half_bits>(half_pair(rest_of(high, x[t], 0.0f).x, 0.0f));
  }
}

// A warp makes A.
__device__ __forceinline__ void ask(Shared& sh, int lane) {
  const Sum sum = pairs_of(sh.queries, sh.keys, lane);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int t = Mma::row(lane, e >> 1 & 1), i = place_of(e, lane);
    const float x = i <= t ? ratio(sh, t, i) * (LOWER * sum.at(e)) : 0.0f;
    const float y = i < t ? ratio(sh, t, i + 1) * (LOWER * sum.at(e + 1)) : 0.0f;
    const unsigned high = half_pair(x, y);
    const float2 rest = rest_of(high, x, y);
    unsigned* to = reinterpret_cast<unsigned*>(sh.asked + t * PAIR_PITCH + i);
    to[0] = high, to[CHUNK / 2] = half_pair(rest.x, rest.y);
  }
}

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
  __device__ __forceinline__ void multiply(Square& values, Square& y, const Shared& sh,
                                           int lane) const {
    Sum known, asked;
    known.clear(), asked.clear();
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const Halves own = split(s[n], lane);
      known.add(own, sh.keys + 16 * n, DIM, PITCH, lane);
      asked.add(own, sh.queries + 16 * n, DIM, PITCH, lane);
      __syncwarp();  // or all tiles would be loaded first, and registers spilled
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float decay = sh.decay[place_of(e, lane)];
      values.e[e] = fmaf(-LOWER * decay, known.at(e), values.e[e]);
      y.e[e] = decay * asked.at(e);
    }
  }
  // On by the chunk; y becomes its output.
  __device__ __forceinline__ void go_on(Square x, Square& y, const Shared& sh, int lane) {
    Sum sum;
    sum.clear();
    sum.add(split(x, lane), sh.solved, CHUNK, PAIR_PITCH, lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) x.e[e] = sum.at(e);
    sum.clear();
    sum.add(split(x, lane), sh.asked, CHUNK, PAIR_PITCH, lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      y.e[e] = LOWER * (y.e[e] + sum.at(e));
      x.e[e] *= sh.to_end[place_of(e, lane)];
    }
    const Halves errors = split(x, lane);
    const float decay = sh.decay[CHUNK - 1];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      Sum more;
      more.clear();
      more.add_rows(errors, sh.keys + 16 * n, DIM, PITCH, lane);
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

// Two warps beside the others see to gates, the solution, and A.
__device__ __forceinline__ void help(Shared& sh, const Run& run, float rate, float dt, bool solves,
                                     int lane) {
  Gates gates;
  gates.read(run, 0, lane);
#pragma unroll 1
  for (int first = 0; first < run.count; first += CHUNK) {
    __syncthreads();
    if (solves) gates.put(sh, rate, dt, run.count - first, lane);
    __syncthreads();
    gates.read(run, first + CHUNK, lane);
    if (solves) solve(sh, lane);
    else ask(sh, lane);
    __syncthreads();
  }
}

// A warp's columns go through the row. out: of its first token.
__device__ __forceinline__ void go_through(State& state, Shared& sh, const Run& run, float* out,
                                           int warp, int lane) {
  Coming coming;
  coming.read(run, 0);
  out += Mma::row(lane, 0);
#pragma unroll 1
  for (int first = 0; first < run.count; first += CHUNK) {
    __syncthreads();  // the last chunk's keys and queries are done with
    coming.put(sh);
    Square y, values = read_values(run, first, warp, lane);
    __syncthreads();
    state.multiply(values, y, sh, lane);
    __syncthreads();
    if (HAS_ROOM) coming.read(run, first + CHUNK);
    state.go_on(values, y, sh, lane);
    if (!HAS_ROOM) coming.read(run, first + CHUNK);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int t = first + place_of(e, lane);
      float* own = out + static_cast<unsigned>(t * run.heads * DIM);
      if (t < run.count) own[Mma::row_of(0, e >> 1 & 1)] = y.e[e];
    }
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (value heads * DIM / COLUMNS, some), THREADS and 64 more. Of rows with more than `least`
// tokens, whose matrices delta_step has brought to their first one; blocks take them in turn. As
// delta_step otherwise.
extern "C" __global__ void __launch_bounds__(THREADS + 64)
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
      help(sh, run, rate[head], dt[head], warp == WARPS, lane);
      continue;
    }
    const int column = head * DIM + slice + 16 * warp;  // of all heads'
    float* matrix =
        matrices + static_cast<unsigned>((slots[row] * value_heads * DIM + column) * DIM);
    State state;
    state.read(matrix, lane);
    go_through(state, sh, run, out + static_cast<long long>(row) * value_heads * DIM + column,
               warp, lane);
    if (!is_provisional) state.write(matrix, lane);
  }
}
