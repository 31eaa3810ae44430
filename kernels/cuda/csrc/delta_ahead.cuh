// What delta_chunk.cu needs of a chunk of tokens beside the state: keys and queries as halves,
// values, gates, and the two matrices that tie the tokens to each other. HELPERS threads of a block
// make it a chunk ahead, so that only what depends on the state is in a row's way.
#pragma once
#include "attention_mma.cuh"
#include "delta_heads.cuh"

namespace voltapile {

constexpr int CHUNK = 16, TILES = DIM / 16;
constexpr int COLUMNS = DIM < 64 ? DIM : 64;  // of a head's values that a block takes
constexpr int WARPS = COLUMNS / 16, THREADS = 32 * WARPS;  // that go through the chunks
constexpr int HELPERS = 128;
constexpr int PITCH = 2 * DIM + PAD, PAIR_PITCH = 2 * CHUNK + PAD;  // both halves of a row
constexpr int TOGETHER = 4 * HELPERS / DIM;  // tokens whose keys are read at once
constexpr int EACH = 2 * CHUNK / TOGETHER;   // fours of a chunk's keys and queries, a thread's
constexpr int EACH_VALUE = CHUNK * COLUMNS / (4 * HELPERS);  // and of the block's values
constexpr bool HAS_ROOM = VP_ARCH >= 800;  // in registers, for what is loaded early
constexpr float LEAST = -200.0f;           // logarithm of a decay that is as good as 0
// Queries and keys are of length 1 at most: times RAISE, for second halves must not be denormal.
constexpr float RAISE = 256.0f, LOWER = 1 / RAISE;

struct Chunk {
  half_bits keys[CHUNK * PITCH], queries[CHUNK * PITCH];
  half_bits solved[CHUNK * PAIR_PITCH];  // rate / (1 + L): [t][i]
  half_bits asked[CHUNK * PAIR_PITCH];   // RAISE A: [t][i]
  float values[CHUNK * COLUMNS];         // see value_place
};
// Four tokens' columns that lanes read at once are in different banks (on Volta in half as many).
__device__ __forceinline__ int value_place(int t, int column) {
  return t * COLUMNS + (column ^ 8 * (t >> 1 & 3));
}
struct Pace {
  float logs[CHUNK], decay[CHUNK], rate[CHUNK], to_end[CHUNK];  // of G_t, G_t, and G_end / G_t
};

struct Shared {
  Chunk chunks[2];  // one in use, one in the making
  Pace paces[3];    // and one more ahead
  float lower[CHUNK][CHUNK];  // L of the one in the making: [i][t]
  uint2 next[WARPS + HELPERS / 32];  // each warp's next row's first token, and long rows so far

  // n: of a row's chunks
  __device__ __forceinline__ Chunk& chunk(int n) { return chunks[n & 1]; }
  __device__ __forceinline__ Pace& pace(int n) { return paces[n % 3]; }
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

// A chunk's keys, queries and values, on their way; zeros behind the row, which change nothing.
struct Coming {
  float4 fours[EACH];  // of keys, then of queries
  float4 values[EACH_VALUE];

  __device__ __forceinline__ void read(const Run& run, int first) {
    const int own = first + number() / (DIM / 4), column = number() % (DIM / 4) * 4;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int t = own + n % (EACH / 2) * TOGETHER;
      const unsigned at = run.place(t) + (n < EACH / 2 ? run.k : run.q) + column;
      fours[n] = *reinterpret_cast<const float4*>(run.c + at);
      if (t >= run.count) fours[n] = float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int n = 0; n < EACH_VALUE; ++n) {
      const int t = first + value_token(n);
      const unsigned at = run.place(t) + run.v + value_column();
      values[n] = *reinterpret_cast<const float4*>(run.c + at);
      if (t >= run.count) values[n] = float4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void put(Chunk& chunk) const {
    const int own = number() / (DIM / 4) * PITCH + number() % (DIM / 4) * 4;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      half_bits* rows = n < EACH / 2 ? chunk.keys : chunk.queries;
      half_bits* to = rows + own + n % (EACH / 2) * TOGETHER * PITCH;
      const float4 x{fours[n].x * RAISE, fours[n].y * RAISE, fours[n].z * RAISE,
                     fours[n].w * RAISE};
      const uint2 high{half_pair(x.x, x.y), half_pair(x.z, x.w)};
      const float2 one = rest_of(high.x, x.x, x.y), two = rest_of(high.y, x.z, x.w);
      *reinterpret_cast<uint2*>(to) = high;
      *reinterpret_cast<uint2*>(to + DIM) = uint2{half_pair(one.x, one.y), half_pair(two.x, two.y)};
    }
#pragma unroll
    for (int n = 0; n < EACH_VALUE; ++n)
      *reinterpret_cast<float4*>(chunk.values + value_place(value_token(n), value_column())) =
          values[n];
  }

 private:
  static __device__ __forceinline__ int number() { return threadIdx.x - THREADS; }
  static __device__ __forceinline__ int value_token(int n) {
    return (number() + n * HELPERS) / (COLUMNS / 4);
  }
  static __device__ __forceinline__ int value_column() { return number() % (COLUMNS / 4) * 4; }
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
  __device__ __forceinline__ void put(Pace& pace, float rate, float dt, int left, int lane) const {
    const bool is_in = lane < min(CHUNK, left);
    float sum = is_in ? fmaxf(log_decay_of(a, rate, dt), LEAST) : 0.0f;
#pragma unroll 1
    for (int step = 1; step < CHUNK; step <<= 1) {
      const float other = __shfl_up_sync(ALL, sum, step);
      if (lane >= step) sum += other;
    }
    const float end = __shfl_sync(ALL, sum, CHUNK - 1);
    if (lane >= CHUNK) return;
    pace.logs[lane] = sum, pace.decay[lane] = expf(sum), pace.to_end[lane] = expf(end - sum);
    pace.rate[lane] = is_in ? quotient(1.0f, 1.0f + expf(fminf(-b, 80.0f))) : 0.0f;
  }
};

// Products of rows with the chunk's keys: element e is of row(lane, e >> 1 & 1) and place_of.
__device__ __forceinline__ Sum pairs_of(const half_bits* rows, const half_bits* keys, int lane) {
  Sum sum;
  sum.clear();
#pragma unroll(HAS_ROOM ? 4 : 1)
  for (int k = 0; k < DIM; k += 16) {
    const Halves a{Mma::load_a(rows + k, PITCH, lane), Mma::load_a(rows + DIM + k, PITCH, lane)};
    sum.add(a, keys + k, DIM, PITCH, lane);
  }
  return sum;
}

// What is left of each token i at token t. All are read before anything is written, for the
// compiler keeps the order of the two.
__device__ __forceinline__ Square ratios_of(const Pace& pace, int lane) {
  Square ratios;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int t = Mma::row(lane, e >> 1 & 1), i = place_of(e, lane);
    ratios.e[e] = expf(fminf(pace.logs[t] - pace.logs[i], 0.0f));
  }
  return ratios;
}

// A warp solves (1 + L) X = rate, a column of X a lane.
__device__ __forceinline__ void solve(float (&lower)[CHUNK][CHUNK], Chunk& chunk, const Pace& pace,
                                      int lane) {
  Square factors = ratios_of(pace, lane);
#pragma unroll
  for (int e = 0; e < 8; ++e) factors.e[e] *= pace.rate[Mma::row(lane, e >> 1 & 1)];
  const Sum sum = pairs_of(chunk.keys, chunk.keys, lane);
#pragma unroll
  for (int e = 0; e < 8; ++e)  // only those with i < t are read
    lower[place_of(e, lane)][Mma::row(lane, e >> 1 & 1)] =
        factors.e[e] * (LOWER * LOWER * sum.at(e));
  __syncwarp();
  float x[CHUNK];
#pragma unroll
  for (int t = 0; t < CHUNK; ++t) x[t] = t == lane ? pace.rate[t] : 0.0f;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
    for (int t = i + 1; t < CHUNK; ++t) x[t] = fmaf(-lower[i][t], x[i], x[t]);
    if (!HAS_ROOM) __syncwarp();  // or all of L would be loaded first, and registers spilled
  }
  if (lane >= CHUNK) return;
#pragma unroll
  for (int t = 0; t < CHUNK; ++t) {
    half_bits* to = chunk.solved + t * PAIR_PITCH + lane;
    const unsigned high = half_pair(x[t], 0.0f);
    to[0] = static_cast<half_bits>(high);
    to[CHUNK] = static_cast<half_bits>(half_pair(rest_of(high, x[t], 0.0f).x, 0.0f));
  }
}

// A warp makes A.
__device__ __forceinline__ void ask(Chunk& chunk, const Pace& pace, int lane) {
  const Square ratios = ratios_of(pace, lane);
  const Sum sum = pairs_of(chunk.queries, chunk.keys, lane);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const int t = Mma::row(lane, e >> 1 & 1), i = place_of(e, lane);
    const float own = ratios.e[e] * (LOWER * sum.at(e));
    const float other = ratios.e[e + 1] * (LOWER * sum.at(e + 1));
    const float x = i <= t ? own : 0.0f, y = i < t ? other : 0.0f;
    const unsigned high = half_pair(x, y);
    const float2 rest = rest_of(high, x, y);
    unsigned* to = reinterpret_cast<unsigned*>(chunk.asked + t * PAIR_PITCH + i);
    to[0] = high, to[CHUNK / 2] = half_pair(rest.x, rest.y);
  }
}

// The helpers, while the others are at the chunk before.
__device__ __forceinline__ void meet_helpers() {
#ifdef VP_EMULATION
  team_barrier(1, HELPERS);
#else
  asm volatile("bar.sync 1, %0;" ::"n"(HELPERS) : "memory");
#endif
}

// All put down keys and queries; then one warp solves, one makes A, one sees to the next gates.
__device__ __forceinline__ void help(Shared& sh, const Run& run, float rate, float dt, int warp,
                                     int lane) {
  Coming coming;
  Gates gates;
  coming.read(run, 0);
  if (warp == 2) {
    gates.read(run, 0, lane);
    gates.put(sh.pace(0), rate, dt, run.count, lane);
    gates.read(run, CHUNK, lane);
  }
#pragma unroll 1
  for (int n = 0, first = 0; first < run.count; ++n, first += CHUNK) {
    Chunk& chunk = sh.chunk(n);
    coming.put(chunk);
    meet_helpers();
    coming.read(run, first + CHUNK);
    if (warp == 0) solve(sh.lower, chunk, sh.pace(n), lane);
    if (warp == 1) ask(chunk, sh.pace(n), lane);
    if (warp == 2) {
      gates.put(sh.pace(n + 1), rate, dt, run.count - first - CHUNK, lane);
      gates.read(run, first + 2 * CHUNK, lane);
    }
    __syncthreads();  // the chunk is ready, and the one before is done with
  }
  __syncthreads();
}

}  // namespace voltapile
