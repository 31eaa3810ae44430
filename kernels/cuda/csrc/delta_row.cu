// A gated delta net in one kernel, for rows of few tokens: a block has a value head. It convolves
// the channels of that head and of its key head (which other blocks do, too), goes on with the
// state and ends the head. The bits are those of delta_net.cu.
//
// States are read before the kernel before this one has ended: this layer's were complete when the
// step began. What several blocks read of one is written by the last of them to have read it.
// -D DIM, of a head.
#include "delta_heads.cuh"

namespace voltapile {

using Own = Token<DIM>;
constexpr int BLOCK_WARPS = DIM / 8;
constexpr int TURNS = (BATCH + BLOCK_WARPS - 1) / BLOCK_WARPS;  // in which warps end a head a token

struct Shared {
  Own tokens[BATCH];
  float o[BATCH][DIM];
  float sums[2][2][DIM / 32];  // of every other token
  int is_last_of_key, is_last_of_row;
};

// Of the threads of one of the block's heads, in the order of block_join. The whole block calls,
// with sums of its own from one time to the next; `head` 2 and 3 get nothing.
__device__ __forceinline__ float head_sum(float value, float (*sums)[DIM / 32], int head) {
  constexpr int WARPS = DIM / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % WARPS;
  value = warp_join(value, Add());
  if (head < 2 && lane == 0) sums[head][warp] = value;
  __syncthreads();
  float part = sums[head & 1][lane & (WARPS - 1)];
#pragma unroll
  for (int step = WARPS / 2; step > 0; step >>= 1) part += __shfl_xor_sync(ALL, part, step);
  return part;
}

// `count` tokens, which are `channels` apart from x on, become queries, keys and values in shared
// memory. head: 0 queries, 1 keys, 2 values, 3: nothing. next: the first token's, asked for early.
__device__ __forceinline__ void convolve(Channel& channel, const float* x, float next, int count,
                                         int channels, int head, Shared& sh, float eps) {
  const float length = head == 0 ? 1.0f / sqrtf(static_cast<float>(DIM)) : 1.0f;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float input = next;
    if (head < 3 && i + 1 < count) next = x[static_cast<long long>(i + 1) * channels];
    float y = head < 3 ? channel.go_on(input) : 0.0f;
    const float norm = length * inverse_root(head_sum(y * y, sh.sums[i % 2], head) + eps);
    if (head < 2) y *= norm;
    Own& own = sh.tokens[i];
    float* to = reinterpret_cast<float*>(head == 0 ? own.q : head == 1 ? own.k : own.v);
    if (head < 3) to[threadIdx.x % DIM] = y;
  }
}

// What else of a token its step needs; by one thread.
__device__ __forceinline__ void put_gates(Shared& sh, int i, float b, float a, float rate,
                                          float dt) {
  sh.tokens[i].gates.decay = decay_of(a, rate, dt), sh.tokens[i].gates.rate = sigmoid(b);
}

// A ticket of `count` blocks that come here; it is 0 again after them.
__device__ __forceinline__ unsigned ticket_of(unsigned* tickets, int count) {
  return atomicInc(tickets, count - 1);
}

}  // namespace voltapile

using namespace voltapile;

// grid: (value heads, rows), 4 DIM threads: eight lanes for two columns of values. members: of each
// key head, how many value heads it has. tickets: zeros, [rows][key heads + 1]. y: [tokens][value
// heads * DIM]. b_and_a: [tokens][2][value heads].
extern "C" __global__ void __launch_bounds__(4 * DIM, 1)
delta_row(const float* m, const float* z, const float* b_and_a, const void* taps,
          const float* rate, const float* dt, const float* norm, const int* key_head_of,
          const int* members, float* histories, float* matrices, float* logs, float* b_log,
          float* a_log, int* logged, const int* slots, const int* positions, const int* kept,
          unsigned* tickets, float* y, int tokens, int key_heads, int value_heads, int count,
          int kind, int is_sigmoid, int is_provisional, float eps) {
  __shared__ __align__(16) Shared sh;
  grid_launch();
  // What is far away comes in two rounds: whose state it is, and then all of it, wanted or not.
  const int head = blockIdx.x, key_head = key_head_of[head];
  const float own_rate = rate[head], own_dt = dt[head];
  const int first = find_row(slots, tokens, blockIdx.y);
  if (first < 0) {
    grid_wait();
    return;
  }
  const int length = min(row_length(slots, tokens, first), BATCH), slot = slots[first];
  const int position = positions[first], noted_before = logged[slot];
  const int kept_before = kept == nullptr ? WINDOW : kept[slot];
  const int part = threadIdx.x % PARTS;
  const int column = threadIdx.x / PARTS * 2, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int channels = Heads{key_heads, value_heads}.channels(), depth = count - 1;
  const int kind_of_head = threadIdx.x / DIM;  // see convolve
  const int whole = kind_of_head == 0   ? key_head
                    : kind_of_head == 1 ? key_heads + key_head
                                        : 2 * key_heads + head;
  const int own = whole * DIM + threadIdx.x % DIM;
  const long long logged_at = static_cast<long long>(slot) * WINDOW;
  float* history = histories + static_cast<long long>(slot) * depth * channels + own;
  float* log = logs + logged_at * channels + own;
  float* matrix = matrices + (static_cast<long long>(slot) * value_heads + head) * DIM * DIM;
  Columns s;
  s.read(matrix, column, part);
  Channel channel{Taps(taps, kind, own, count)};
#pragma unroll
  for (int j = 0; j < PAST; ++j) {
    const int at = j - PAST + depth;
    channel.past[j] = at < 0 ? 0.0f : __ldcg(history + at * channels);
  }
  const int sharers = members[key_head];
  grid_wait();

  // Of this step's tokens, asked for early.
  const float* row = m + static_cast<long long>(first) * channels + own;
  const float next = kind_of_head < 3 ? row[0] : 0.0f;
  const long long place = static_cast<long long>(first) * value_heads + head;
  const long long ended = (place + warp * value_heads) * DIM + lane;  // by this warp, first of all
  const long long turn_apart = static_cast<long long>(BLOCK_WARPS) * value_heads * DIM;
  const int gate = threadIdx.x - 3 * DIM;  // whose gates this thread sees to, if any: it has time
  const bool has_token = gate >= 0 && gate < length;
  const float* own_gates = b_and_a + 2 * (place - head + gate * value_heads) + head;
  const float own_b = has_token ? own_gates[0] : 0.0f;
  const float own_a = has_token ? own_gates[value_heads] : 0.0f;
  float gates[TURNS][PER_LANE], past[PAST];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
    if (turn * BLOCK_WARPS + warp < length) read_head(z + ended + turn * turn_apart, gates[turn]);
  const bool asks = threadIdx.x == blockDim.x - 1;
  const int found = position == 0 ? FRESH : min(noted_before, kept_before);
  if (found == FRESH) {
    s.clear();
#pragma unroll
    for (int j = 0; j < PAST; ++j) channel.past[j] = 0.0f;
  }
  unsigned key_ticket = 0, row_ticket = 0;
  // The tokens of the step before that stand, if any, then this step's: one code for both.
#pragma unroll 1
  for (bool is_now = found <= 0, is_done = false; !is_done; is_done = is_now, is_now = true) {
    const int here = is_now ? length : found;
    float b = own_b, a = own_a, input = next;
    if (!is_now) {
      const long long at = (logged_at + gate) * value_heads + head;
      if (gate >= 0 && gate < found) b = b_log[at], a = a_log[at];
      if (kind_of_head < 3) input = log[0];
    } else if (is_provisional) {
      s.write(matrix, column, part);
#pragma unroll
      for (int j = 0; j < PAST; ++j) past[j] = channel.past[j];
    }
    if (is_now && found > 0) __syncthreads();  // the tokens that stand are done with
    if (gate >= 0 && gate < here) put_gates(sh, gate, b, a, own_rate, own_dt);
    convolve(channel, is_now ? row : log, input, here, channels, kind_of_head, sh, eps);
    __syncthreads();
    // The block has used what it read of the state, and takes its tickets; answers come meanwhile.
    if (is_now && asks) {
      unsigned* own_tickets = tickets + blockIdx.y * (key_heads + 1);
      key_ticket = ticket_of(own_tickets + key_head, sharers);
      row_ticket = ticket_of(own_tickets + key_heads, value_heads);
    }
#pragma unroll 1
    for (int i = 0; i < here; ++i) {
      const float both = product_of(sh.tokens[i], part);
      const float out = s.go_on(sh.tokens[i], both, column, part);
      if (part % 4 == 0) sh.o[i][column + part / 4] = out;
    }
  }
  if (asks) {
    sh.is_last_of_key = key_ticket == sharers - 1u;
    sh.is_last_of_row = row_ticket == value_heads - 1u;
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
    if (const int i = turn * BLOCK_WARPS + warp; i < length)
      end_head(sh.o[i] + lane, norm + lane, gates[turn], y + ended + turn * turn_apart, is_sigmoid,
               eps);
  if (!is_provisional) {
    s.write(matrix, column, part);
#pragma unroll
    for (int j = 0; j < PAST; ++j) past[j] = channel.past[j];
  }
  if (kind_of_head == 2 || (kind_of_head < 2 && sh.is_last_of_key)) {
#pragma unroll
    for (int j = 0; j < PAST; ++j)
      if (j >= PAST - depth) history[(j - PAST + depth) * channels] = past[j];
    if (is_provisional)
      for (int i = 0; i < length; ++i)
        log[i * channels] = row[static_cast<long long>(i) * channels];
  }
  const int noted = is_provisional ? length : 0;
  if (gate >= 0 && gate < noted) {
    const long long to = (logged_at + gate) * value_heads + head;
    b_log[to] = own_b, a_log[to] = own_a;
  }
  if (threadIdx.x == 0 && sh.is_last_of_row) logged[slot] = noted;
}
