// Gated delta nets of prompts: three kernels a layer, token after token as delta_row.cu does it, so
// that a row's bits depend on no company. See kernels/families.py for the formulas.
//
// State of a slot: history [taps - 1][channels] of the convolution, matrix [value heads][dim of
// values][dim of keys], and the inputs of a provisional step. -D DIM, of a head.
#include "attention_copies.cuh"
#include "delta_heads.cuh"

namespace voltapile {

constexpr int COLUMNS = 32;   // of a head's values that a block of delta_step takes
constexpr int CONVOLVED = 4;  // tokens of a block of delta_conv
constexpr int PIECES = DIM / 2 + COLUMNS / 4;  // float4 of a token's q, k and v
constexpr int TURNS = (BATCH * PIECES + 127) / 128;
using Own = Token<COLUMNS>;

// Without an index that is known at run time only.
__device__ __forceinline__ int slot_at(const int (&slots)[PAST + CONVOLVED], int index) {
  int found = -1;
#pragma unroll
  for (int j = 0; j < PAST + CONVOLVED; ++j) found = j == index ? slots[j] : found;
  return found;
}

// Where `count` tokens lie, and how far apart; a head's constants.
struct Run {
  const float *c, *b, *a;  // of the first
  int count, channels, apart;
  float rate, dt;
};
struct Where {
  int q, k, v;  // channels of a block's
};

// Calls use(token, piece, channel) for the thread's pieces of a batch.
template <class Use>
__device__ __forceinline__ void for_pieces(const Where& where, Use use) {
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int at = turn * 128 + threadIdx.x, token = at / PIECES, piece = at % PIECES;
    const int channel = piece < DIM / 4   ? where.q + 4 * piece
                        : piece < DIM / 2 ? where.k + 4 * piece - DIM
                                          : where.v + 4 * piece - 2 * DIM;
    if (at < BATCH * PIECES) use(turn, token, piece, channel);
  }
}

// A batch of tokens on its way to shared memory: where copies need no registers it is asked for
// there, so that nothing that reads shared memory meanwhile waits for it.
struct Reader {
  static constexpr bool COPIES = VP_ARCH >= 800;
  float4 held[COPIES ? 1 : TURNS];
  float b, a;

  // From token `first` of the run on.
  __device__ __forceinline__ void begin(Own* tokens, const Run& run, const Where& where,
                                        int first) {
    for_pieces(where, [&](int turn, int token, int piece, int channel) {
      if (first + token >= run.count) return;
      const float* from = run.c + static_cast<long long>(first + token) * run.channels + channel;
      if constexpr (COPIES) copy_async(reinterpret_cast<float4*>(tokens + token) + piece, from, 16);
      else held[turn] = *reinterpret_cast<const float4*>(from);
    });
    if constexpr (COPIES) commit_copies();
    const int token = first + threadIdx.x;
    if (threadIdx.x < BATCH && token < run.count)
      b = run.b[token * run.apart], a = run.a[token * run.apart];
  }
  // The whole block meets afterwards.
  __device__ __forceinline__ void end(Own* tokens, const Run& run, const Where& where) {
    if constexpr (COPIES)
      wait_for_copies<0>();
    else
      for_pieces(where, [&](int turn, int token, int piece, int) {
        reinterpret_cast<float4*>(tokens + token)[piece] = held[turn];
      });
    if (threadIdx.x >= BATCH) return;
    auto& gates = tokens[threadIdx.x].gates;
    gates.decay = decay_of(a, run.rate, run.dt), gates.rate = sigmoid(b);
  }
};

// Over a run of tokens; out: of the lane's column at the first of them, or null. The whole block
// calls.
__device__ __forceinline__ void go_through(Columns& state, Own (*tokens)[BATCH], const Run& run,
                                           const Where& where, float* out, int out_stride) {
  const int part = threadIdx.x % PARTS, column = threadIdx.x / PARTS * 2;
  Reader reader;
  __syncthreads();  // what was read may be overwritten
  reader.begin(tokens[0], run, where, 0);
  reader.end(tokens[0], run, where);
  __syncthreads();
  for (int first = 0, turn = 0; first < run.count; first += BATCH, turn ^= 1) {
    const bool goes_on = first + BATCH < run.count;
    if (goes_on) reader.begin(tokens[turn ^ 1], run, where, first + BATCH);
    multiply_both(tokens[turn]);
    __syncthreads();
    const int count = min(BATCH, run.count - first);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Own& in = tokens[turn][i];
      const float y = state.go_on(in, in.gates.both, column, part);
      if (part % 4 == 0 && out != nullptr) out[static_cast<long long>(first + i) * out_stride] = y;
    }
    if (goes_on) reader.end(tokens[turn ^ 1], run, where);
    __syncthreads();
  }
}

}  // namespace voltapile

using namespace voltapile;

// grid: (heads of q, k and v; tokens / CONVOLVED), DIM threads: a channel each. m:
// [tokens][channels]; c: alike, what the convolution makes, q and k of length 1 (q then over
// sqrt(DIM)); c_log: [slots][WINDOW][channels], the same of logged tokens that stand.
extern "C" __global__ void __launch_bounds__(DIM, 1)
delta_conv(const float* m, const void* taps, const float* histories, const float* logs,
           const int* logged, const int* slots, const int* positions, const int* kept, float* c,
           float* c_log, int* stands, int tokens, int key_heads, int value_heads, int count,
           int kind, float eps) {
  __shared__ float scratch[32];
  grid_launch();
  const Heads heads{key_heads, value_heads};
  const int head = blockIdx.x, first = blockIdx.y * CONVOLVED, channel = head * DIM + threadIdx.x;
  const int channels = heads.channels(), depth = count - 1;
  const bool is_normed = head < 2 * key_heads;
  const float length = head < key_heads ? 1.0f / sqrtf(static_cast<float>(DIM)) : 1.0f;
  const Taps own(taps, kind, channel, count);
  grid_wait();
  const Step step{slots, positions, kept, tokens, 0};
  const auto end = [&](float y) {
    if (is_normed) y *= length * inverse_root(block_join(y * y, scratch, Add()) + eps);
    return y;
  };
  // The block's tokens and those before them, asked for at once.
  float inputs[PAST + CONVOLVED];
  int slot_of[PAST + CONVOLVED];
#pragma unroll
  for (int j = 0; j < PAST + CONVOLVED; ++j) {
    const int t = first - PAST + j;
    const bool is_in = t >= 0 && t < tokens;
    inputs[j] = is_in ? m[static_cast<long long>(t) * channels + channel] : 0.0f;
    slot_of[j] = is_in ? slots[t] : -1;
  }
#pragma unroll
  for (int i = 0; i < CONVOLVED; ++i) {
    const int t = first + i, slot = slot_of[PAST + i];
    if (t >= tokens) break;
    int before = 0;
    while (before < depth && slot_at(slot_of, PAST + i - 1 - before) == slot) ++before;
    const int found = before < depth ? standing(step, logged, t - before) : FRESH;
    const Past past(histories, logs, slot, depth, channels, found);
    float seen[PAST];
#pragma unroll
    for (int j = 0; j < PAST; ++j) {
      const int back = PAST - j;
      seen[j] = back <= before  ? inputs[i + j]
                : back <= depth ? past.at(back - before, channel)
                                : 0.0f;
    }
    c[static_cast<long long>(t) * channels + channel] = end(own.apply(seen, inputs[PAST + i]));
    if (before > 0) continue;
    for (int n = 0; n < found; ++n) {
      const Past kept_past(histories, logs, slot, depth, channels, n);
#pragma unroll
      for (int j = 0; j < PAST; ++j)
        seen[j] = PAST - j <= depth ? kept_past.at(PAST - j, channel) : 0.0f;
      const long long place = (static_cast<long long>(slot) * WINDOW + n) * channels + channel;
      c_log[place] = end(own.apply(seen, logs[place]));
    }
    if (head == 0 && threadIdx.x == 0) stands[slot] = found;
  }
}

// grid: (value heads * DIM / COLUMNS, rows), 128 threads: eight lanes for two columns of values.
// out: [tokens][value heads * DIM]. key_head_of: [value heads]. gates: [tokens][2][value heads].
// Rows of more than `most` tokens are left to delta_chunk, after what stands of a step before.
extern "C" __global__ void __launch_bounds__(128)
delta_step(const float* c, const float* c_log, const float* gates, const float* b_log,
           const float* a_log, const float* rate, const float* dt, const int* key_head_of,
           float* matrices, const int* stands, const int* slots, float* out, int tokens,
           int key_heads, int value_heads, int is_provisional, int most) {
  __shared__ __align__(16) Own held[2][BATCH];
  grid_launch();
  grid_wait();
  const int first = find_row(slots, tokens, blockIdx.y);
  if (first < 0) return;
  const int length = row_length(slots, tokens, first);
  const Heads heads{key_heads, value_heads};
  constexpr int SLICES = DIM / COLUMNS;
  const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES * COLUMNS;
  const int column = slice + threadIdx.x / PARTS * 2, part = threadIdx.x % PARTS;
  const int slot = slots[first], own = column + part / 4;  // the column that this lane writes
  const int channels = heads.channels(), found = stands[slot], q = key_head_of[head] * DIM;
  const Where where{q, q + key_heads * DIM, (2 * key_heads + head) * DIM + slice};
  float* matrix = matrices + (static_cast<long long>(slot) * value_heads + head) * DIM * DIM;
  Columns s;
  if (found == FRESH) s.clear();
  else s.read(matrix, column, part);
  const long long logged = static_cast<long long>(slot) * WINDOW;
  if (found > 0)
    go_through(s, held,
               {c_log + logged * channels, b_log + logged * value_heads + head,
                a_log + logged * value_heads + head, found, channels, value_heads, rate[head],
                dt[head]},
               where, nullptr, 0);
  if (length > most) {
    if (found != 0) s.write(matrix, column, part);
    return;
  }
  if (is_provisional) s.write(matrix, column, part);
  const long long row = first;
  go_through(s, held,
             {c + row * channels, gates + 2 * row * value_heads + head,
              gates + (2 * row + 1) * value_heads + head, length, channels, 2 * value_heads,
              rate[head], dt[head]},
             where, out + (row * value_heads + head) * DIM + own, value_heads * DIM);
  if (!is_provisional) s.write(matrix, column, part);
}

// grid: (`norms` blocks for four heads of a token each, then of each row for 128 channels each),
// 128 threads. y = norm of o, times gate(z); and what a slot remembers beside its matrices.
extern "C" __global__ void __launch_bounds__(128, 1)
delta_end(const float* o, const float* norm, const float* z, float* y, const float* m,
          const float* gates, float* histories, float* logs, float* b_log, float* a_log,
          int* logged, const int* stands, const int* slots, int tokens, int key_heads,
          int value_heads, int count, int is_sigmoid, float eps, int norms, int is_provisional) {
  grid_launch();
  grid_wait();
  const Heads heads{key_heads, value_heads};
  const int lane = threadIdx.x & 31;
  if (static_cast<int>(blockIdx.x) < norms) {
    const int run = blockIdx.x * 4 + threadIdx.x / 32;
    if (run >= tokens * value_heads) return;
    const long long at = static_cast<long long>(run) * DIM + lane;
    float own_z[PER_LANE];
    read_head(z + at, own_z);
    end_head(o + at, norm + lane, own_z, y + at, is_sigmoid, eps);
    return;
  }
  const int channels = heads.channels(), wide = (channels + 127) / 128;
  const int row = (blockIdx.x - norms) / wide, part = (blockIdx.x - norms) % wide;
  const int first = find_row(slots, tokens, row);
  if (first < 0) return;
  const int length = row_length(slots, tokens, first), slot = slots[first];
  const int channel = part * 128 + threadIdx.x;
  const Past past(histories, logs, slot, count - 1, channels, stands[slot]);
  if (channel < channels)
    go_on(histories, logs, past, slot, m + static_cast<long long>(first) * channels, length,
          channel, is_provisional);
  if (part > 0) return;
  const int noted = is_provisional ? min(length, WINDOW) : 0;
  for (int i = threadIdx.x; i < noted * value_heads; i += 128) {
    const long long from = static_cast<long long>(first + i / value_heads) * 2 * value_heads;
    const long long to = static_cast<long long>(slot) * WINDOW * value_heads + i;
    b_log[to] = gates[from + i % value_heads];
    a_log[to] = gates[from + value_heads + i % value_heads];
  }
  if (threadIdx.x == 0) logged[slot] = noted;
}
