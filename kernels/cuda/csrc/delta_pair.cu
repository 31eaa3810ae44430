// A gated delta net in one kernel, as delta_row.cu and with its bits, from sm_90 on: two blocks of
// a cluster share a head, each half of its columns. They are small, so that they find room beside a
// product that still runs, and their state comes to shared memory by one copy meanwhile.
//
// Both convolve the channels of queries and keys; what they find they tell each other, for the norm
// of the head. What several blocks read of a state is written by the last of them to have read it.
// -D DIM, of a head; SPLIT 2
#include "cluster.cuh"
#include "delta_heads.cuh"

namespace voltapile {

constexpr int HALF = DIM / 2, THREADS = DIM, OWN_WARPS = THREADS / 32;
constexpr int PASSES = 2;  // of a block's columns, two for eight lanes in each
constexpr int KINDS = 3;  // channels of a thread: of a query, a key and, in half of them, a value
constexpr int ENDED = PER_LANE / SPLIT;  // values of a head that a lane ends
static_assert(SPLIT == 2 && DIM >= 64);

using Own = Token<HALF>;
struct Shared {
  float state[HALF * DIM];  // [column][key]
  Own tokens[BATCH];
  float o[BATCH][DIM];
  float past[KINDS][PAST][THREADS];  // of each thread's channels
  float sums[2][2][OWN_WARPS];       // of every other token
  Bell state_bell, o_bell;
  int is_last_of_key, is_last_of_row;
};

// Its inputs so far are asked for at once.
struct OwnChannel : Channel {
  int at;  // among all

  __device__ __forceinline__ OwnChannel(const void* all, int kind, int at, int count,
                                        const float* history, int channels)
      : Channel{Taps(all, kind, at, count)}, at(at) {
#pragma unroll
    for (int j = 0; j < PAST; ++j) {
      const int depth = j - PAST + count - 1;
      past[j] = depth < 0 ? 0.0f : __ldcg(history + depth * channels + at);
    }
  }
};

// What is remembered of a thread's channels, out of the way of what a state takes.
__device__ __forceinline__ void put_past(Shared& sh, const OwnChannel (&own)[KINDS]) {
#pragma unroll
  for (int c = 0; c < KINDS; ++c)
#pragma unroll
    for (int j = 0; j < PAST; ++j) sh.past[c][j][threadIdx.x] = own[c].past[j];
}

// Over the block's threads, in the order of block_join; `sums`: of this kind and token.
__device__ __forceinline__ void put_sum(float value, float* sums) {
  value = warp_join(value, Add());
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x / 32] = value;
}
__device__ __forceinline__ float whole_sum(const float* sums) {
  float part = sums[threadIdx.x & (OWN_WARPS - 1)];
#pragma unroll
  for (int step = OWN_WARPS / 2; step > 0; step >>= 1) part += __shfl_xor_sync(ALL, part, step);
  return part;
}

// `count` tokens, which are `channels` apart from x on, become queries, keys and values in shared
// memory. next: of the first one.
__device__ __forceinline__ void convolve(OwnChannel (&own)[KINDS], const float* x,
                                         const float (&first)[KINDS], int count, int channels,
                                         Shared& sh, float eps) {
  const int t = threadIdx.x;
  const bool has_value = t < HALF;
  float next[KINDS] = {first[0], first[1], first[2]};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    float y[KINDS];
#pragma unroll
    for (int c = 0; c < KINDS; ++c) {
      if (c == 2 && !has_value) continue;
      const float input = next[c];
      if (i + 1 < count) next[c] = x[static_cast<long long>(i + 1) * channels + own[c].at];
      y[c] = own[c].go_on(input);
    }
    float(*sums)[OWN_WARPS] = sh.sums[i % 2];
    put_sum(y[0] * y[0], sums[0]), put_sum(y[1] * y[1], sums[1]);
    __syncthreads();
    const float length = 1.0f / sqrtf(static_cast<float>(DIM));
    Own& token = sh.tokens[i];
    reinterpret_cast<float*>(token.q)[t] =
        y[0] * (length * inverse_root(whole_sum(sums[0]) + eps));
    reinterpret_cast<float*>(token.k)[t] = y[1] * inverse_root(whole_sum(sums[1]) + eps);
    if (has_value) reinterpret_cast<float*>(token.v)[t] = y[2];
  }
}

// Of a step's tokens, or of those before it that stand: how the state of a pass goes on.
struct Phase {
  int count, rank;
  bool is_now, is_fresh, is_provisional;
};

__device__ __forceinline__ void go_through(Shared& sh, float* matrix, const Phase& phase,
                                           int pass) {
  const int part = threadIdx.x % PARTS, column = pass * (HALF / PASSES) + threadIdx.x / PARTS * 2;
  Columns s;
  if (phase.is_fresh)
    s.clear();
  else
    s.read(sh.state, column, part);
  if (phase.is_now && phase.is_provisional) s.write(matrix, column, part);
#pragma unroll 1
  for (int i = 0; i < phase.count; ++i) {
    const float both = product_of(sh.tokens[i], part);
    const float out = s.go_on(sh.tokens[i], both, column, part);
    const float2 pair{out, __shfl_xor_sync(ALL, out, 4)};
    if (!phase.is_now || part != 0) continue;
    float2* to = reinterpret_cast<float2*>(sh.o[i] + phase.rank * HALF + column);
    *to = pair;
#if VP_ARCH >= 900
    send(pair, to, &sh.o_bell, 1 - phase.rank);
#endif
  }
  if (!phase.is_now)
    s.write(sh.state, column, part);
  else if (!phase.is_provisional)
    s.write(matrix, column, part);
}

// As end_head, of the block's half. z: of the lane's own values.
__device__ __forceinline__ void end_half(const float* o, const float* norm, const float (&z)[ENDED],
                                         float* y, int rank, bool is_sigmoid, float eps) {
  const int lane = threadIdx.x & 31;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) sum = fmaf(o[32 * i + lane], o[32 * i + lane], sum);
  const float factor = inverse_root(warp_join(sum, Add()) / DIM + eps);
#pragma unroll
  for (int i = 0; i < ENDED; ++i) {
    const int at = rank * HALF + 32 * i + lane;
    y[at] = o[at] * factor * norm[at] *
            quotient(is_sigmoid ? 1.0f : z[i], 1.0f + expf(fminf(-z[i], 80.0f)));
  }
}

// What is remembered of a channel: `past`, and the inputs of a provisional step.
__device__ __forceinline__ void remember(float* history, float* log, const float* row, int at,
                                         const float (&past)[PAST][THREADS], int depth,
                                         int channels, int noted) {
#pragma unroll
  for (int j = 0; j < PAST; ++j)
    if (j >= PAST - depth) history[(j - PAST + depth) * channels + at] = past[j][threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < noted; ++i)
    log[i * channels + at] = row[static_cast<long long>(i) * channels + at];
}

}  // namespace voltapile

using namespace voltapile;

// grid: (value heads * 2, rows), DIM threads. Arguments: of delta_row. shared: Shared.
extern "C" __global__ void VP_CLUSTER __launch_bounds__(THREADS, 640 / THREADS)
delta_pair(const float* m, const float* z, const float* b_and_a, const void* taps,
           const float* rate, const float* dt, const float* norm, const int* key_head_of,
           const int* members, float* histories, float* matrices, float* logs, float* b_log,
           float* a_log, int* logged, const int* slots, const int* positions, const int* kept,
           unsigned* tickets, float* y, int tokens, int key_heads, int value_heads, int count,
           int kind, int is_sigmoid, int is_provisional, float eps) {
#if VP_ARCH >= 900
  extern __shared__ __align__(128) std::uint8_t shared[];
  Shared& sh = *reinterpret_cast<Shared*>(own_memory(shared));
  const int head = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT, key_head = key_head_of[head];
  const int first = blockIdx.y == 0 ? 0 : find_row(slots, tokens, blockIdx.y);
  if (first < 0) {
    grid_wait();
    return;
  }
  const int slot = slots[first], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long columns = (static_cast<long long>(slot) * value_heads + head) * DIM + rank * HALF;
  float* matrix = matrices + columns * DIM;
  if (threadIdx.x == 0) {
    make_bell(&sh.state_bell), make_bell(&sh.o_bell);
    tell_bells();
    expect(&sh.state_bell, sizeof sh.state);
    copy_whole(sh.state, matrix, sizeof sh.state, &sh.state_bell);
  }
  cluster_arrive();
  const int length = min(row_length(slots, tokens, first), BATCH);
  const int position = positions[first], noted_before = logged[slot];
  const int kept_before = kept == nullptr ? WINDOW : kept[slot];
  const int channels = Heads{key_heads, value_heads}.channels(), depth = count - 1;
  const long long logged_at = static_cast<long long>(slot) * WINDOW;
  float* history = histories + static_cast<long long>(slot) * depth * channels;
  float* log = logs + logged_at * channels;
  const int place_of_value = rank * HALF + threadIdx.x % HALF;
  OwnChannel own[KINDS] = {
      {taps, kind, key_head * DIM + static_cast<int>(threadIdx.x), count, history, channels},
      {taps, kind, (key_heads + key_head) * DIM + static_cast<int>(threadIdx.x), count, history,
       channels},
      {taps, kind, (2 * key_heads + head) * DIM + place_of_value, count, history, channels}};
  const int sharers = SPLIT * members[key_head];
  const float own_rate = rate[head], own_dt = dt[head];
  grid_wait();

  const float* row = m + static_cast<long long>(first) * channels;
  float gates[ENDED];
  const long long place = static_cast<long long>(first) * value_heads + head;
  const int gate = static_cast<int>(threadIdx.x) - (THREADS - BATCH);  // whose gates this sees to
  const float* own_gates = b_and_a + 2 * (place - head + gate * value_heads) + head;
  const auto read_gates = [&](int i) {
    const float* from = z + (place + i * value_heads) * DIM + rank * HALF + lane;
#pragma unroll
    for (int n = 0; n < ENDED; ++n) gates[n] = from[32 * n];
  };
  if (warp < length) read_gates(warp);
  grid_launch();  // a product's weights come behind what is asked for here
  const bool asks = threadIdx.x == THREADS - 1;
  const int found = position == 0 ? FRESH : min(noted_before, kept_before);
  if (found == FRESH)
#pragma unroll
    for (int c = 0; c < KINDS; ++c)
#pragma unroll
      for (int j = 0; j < PAST; ++j) own[c].past[j] = 0.0f;
  // The tokens of the step before that stand, if any, then this step's: one code for both.
#pragma unroll 1
  for (bool is_now = found <= 0, is_done = false; !is_done; is_done = is_now, is_now = true) {
    const Phase phase{is_now ? length : found, rank, is_now, found == FRESH, is_provisional != 0};
    float b = 0.0f, a = 0.0f, inputs[KINDS];
    const bool has_gates = gate >= 0 && gate < phase.count;
#pragma unroll
    for (int c = 0; c < KINDS; ++c) inputs[c] = (is_now ? row : log)[own[c].at];
    if (has_gates) {
      const long long at = (logged_at + gate) * value_heads + head;
      b = *(is_now ? own_gates : b_log + at);
      a = *(is_now ? own_gates + value_heads : a_log + at);
    }
    if (is_now && found > 0) {
      __syncthreads();  // the tokens that stand are done with
#pragma unroll
      for (int c = 0; c < KINDS; ++c) {
        own[c].taps = Taps(taps, kind, own[c].at, count);
#pragma unroll
        for (int j = 0; j < PAST; ++j) own[c].past[j] = sh.past[c][j][threadIdx.x];
      }
    }
    if (is_now && is_provisional) put_past(sh, own);
    if (has_gates)
      sh.tokens[gate].gates.decay = decay_of(a, own_rate, own_dt),
      sh.tokens[gate].gates.rate = sigmoid(b);
    convolve(own, is_now ? row : log, inputs, phase.count, channels, sh, eps);
    if (!is_now || !is_provisional) put_past(sh, own);
    __syncthreads();
    if (is_now == (found <= 0)) await_own(&sh.state_bell, true);
    if (is_now) {
      if (threadIdx.x == 0) expect(&sh.o_bell, length * HALF * static_cast<int>(sizeof(float)));
      cluster_wait();  // nobody is sent anything who has not begun
    }
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) go_through(sh, matrix, phase, pass);
  }
  // The block has used what others read, too, and takes its tickets; answers come meanwhile.
  unsigned key_ticket = 0, row_ticket = 0;
  if (asks) {
    unsigned* own_tickets = tickets + blockIdx.y * (key_heads + 1);
    key_ticket = atomicInc(own_tickets + key_head, sharers - 1);
    row_ticket = atomicInc(own_tickets + key_heads, SPLIT * value_heads - 1);
  }
  __syncthreads();
  await(&sh.o_bell, true);
#pragma unroll 1
  for (int i = warp; i < length; i += OWN_WARPS) {
    if (i != warp) read_gates(i);
    end_half(sh.o[i], norm, gates, y + (place + i * value_heads) * DIM, rank, is_sigmoid, eps);
  }
  if (asks) {
    sh.is_last_of_key = key_ticket == sharers - 1u;
    sh.is_last_of_row = row_ticket == SPLIT * value_heads - 1u;
  }
  __syncthreads();
  const int noted = is_provisional ? length : 0;
#pragma unroll
  for (int c = 0; c < KINDS; ++c) {
    if (c < 2 ? !sh.is_last_of_key : threadIdx.x >= HALF) continue;
    remember(history, log, row, own[c].at, sh.past[c], depth, channels, noted);
  }
  // The other block has read its gates, for it has told what it made of them.
  if (rank == 0 && gate >= 0 && gate < noted) {
    const long long to = (logged_at + gate) * value_heads + head;
    b_log[to] = own_gates[0], a_log[to] = own_gates[value_heads];
  }
  if (threadIdx.x == 0 && sh.is_last_of_row) logged[slot] = noted;
#endif
}
