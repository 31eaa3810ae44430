// The ends of a step: continuing tokens from their slots, and the choice of tokens as
// kernels/random.md says it. Blocks find the best of parts of a row, then one block chooses for
// the row, so rows know nothing of each other.
#include "grid.cuh"
#include "select.cuh"

using namespace voltapile;

enum { RUNNING, STOP, LENGTH, DONE_BEFORE, NOT_FINITE };
constexpr int STOP_IDS = 16;

// grid: (tokens / blockDim)
extern "C" __global__ void begin_step(int* tokens, const int* slots, int* positions,
                                      int* rope_positions, const int* continues,
                                      const int* last_token, const int* next_position,
                                      int* history, int count, int context) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= count) return;
  const int slot = slots[t];
  if (continues[t]) {
    tokens[t] = last_token[slot];
    positions[t] = rope_positions[t] = next_position[slot];
  }
  const int position = positions[t];  // a slot that has finished may go past the end
  if (position >= 0 && position < context)
    history[static_cast<long long>(slot) * context + position] = tokens[t];
}

// What `adjust` packs into a word of each token before it becomes the adjusted logit.
constexpr unsigned COUNT = (1u << 20) - 1, HELD = 1u << 20;
constexpr int BIAS_SHIFT = 21;

struct Adjustment {
  float repetition, presence, frequency;
  int first, generated, position;  // history[first, position); generated: its first that counts
  const int* history;
  int bias_count;
  const int* bias_ids;
  const float* bias_values;
  const unsigned* mask;  // null: all tokens may be chosen
  int mask_words;

  __device__ bool may_choose(int token) const {
    return !mask || (token >> 5 < mask_words && mask[token >> 5] >> (token & 31) & 1);
  }
  __device__ bool has_penalty() const {
    return repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  }
};

__device__ inline void adjust(const float* logits, float* adjusted, int vocab,
                              const Adjustment& a) {
  unsigned* marks = reinterpret_cast<unsigned*>(adjusted);
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) marks[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < a.bias_count; i += blockDim.x)
    if (static_cast<unsigned>(a.bias_ids[i]) < static_cast<unsigned>(vocab))
      atomicOr(marks + a.bias_ids[i], static_cast<unsigned>(i + 1) << BIAS_SHIFT);
  if (a.has_penalty()) {
    for (int p = a.first + threadIdx.x; p < a.position; p += blockDim.x) {
      const int token = a.history[p];
      if (static_cast<unsigned>(token) >= static_cast<unsigned>(vocab)) continue;
      atomicOr(marks + token, HELD);
      if (p >= a.generated) atomicAdd(marks + token, 1u);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
    const unsigned mark = marks[i], count = mark & COUNT;
    float x = logits[i];
    if (mark >> BIAS_SHIFT) x += a.bias_values[(mark >> BIAS_SHIFT) - 1];
    if (mark & HELD) x = x > 0.0f ? x / a.repetition : x * a.repetition;
    if (count) x -= a.frequency * static_cast<float>(count) + a.presence;
    adjusted[i] = a.may_choose(i) ? x : __int_as_float(0xff800000);
  }
  __syncthreads();
}

// Orders logits, equal ones by falling id, as integers: the best is the largest.
__device__ __forceinline__ u64 rank_of(float x, int id) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0 is 0
  const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<u64>(ordered) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}
__device__ __forceinline__ int id_of(u64 rank) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(rank));
}

// The best token below `limit`; 0 if none is left that may be chosen. can_choose: neither a NaN nor
// +inf is there.
__device__ inline u64 best_below(const float* logits, int vocab, u64 limit, u64* scratch,
                                 bool* can_choose) {
  u64 best = 0;
  bool good = true;
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
    const float x = logits[i];
    good = good && x < __int_as_float(0x7f800000);
    const u64 rank = x > __int_as_float(0xff800000) ? rank_of(x, i) : 0;
    if (rank < limit && rank > best) best = rank;
  }
  *can_choose = __syncthreads_and(good);
  return block_join(best, scratch, Max());
}

struct Filter {
  float temperature, top_p, min_p;
  int top_k;
  unsigned uniform;  // 24 bits
};

// The weight of all tokens up to and with `id`, in order.
__device__ inline u64 weight_through(const Spectrum& x, int id, u64* scratch) {
  const float last = x.at(id);
  u64 sum = 0;
  for (int i = threadIdx.x; i < x.vocab; i += blockDim.x) {
    const float value = x.at(i), depth = x.depth(value);
    if ((value > last || (value == last && i <= id)) && key_of(depth) != NOWHERE)
      sum += weight_of(depth);
  }
  return block_join(sum, scratch, Add());
}

enum { TOP_K, TOP_P, LAST };

__device__ inline int draw(const Spectrum& x, const Filter& filter, SelectScratch& s) {
  u64 all = 0, count = 0, likely = 0;
  for (int i = threadIdx.x; i < x.vocab; i += blockDim.x) {
    const float depth = x.depth(x.at(i));
    if (key_of(depth) == NOWHERE) continue;
    const u64 weight = weight_of(depth);
    all += weight, count += 1;
    if (depth == 0.0f || expf(-depth) >= filter.min_p) likely += weight;
  }
  all = block_join(all, s.join, Add());
  count = block_join(count, s.join, Add());
  likely = block_join(likely, s.join, Add());
  u64 kept = all;
  Cut cut{};
#pragma unroll 1  // a search is long
  for (int stage = TOP_K; stage <= LAST; ++stage) {
    u64 target = filter.top_k;
    if (stage == TOP_K && (filter.top_k <= 0 || target >= count)) continue;
    if (stage == TOP_P) {
      if (!(filter.top_p < 1.0f)) continue;
      const double share = static_cast<double>(filter.top_p) * static_cast<double>(kept);
      target = share > 1.0 ? static_cast<u64>(ceil(share)) : 1;
      if (target > kept) target = kept;
    } else if (stage == LAST) {
      if (filter.min_p > 0.0f && likely < kept) kept = likely;
      target = __umul64hi(static_cast<u64>(filter.uniform) << 40, kept) + 1;
    }
    cut = select(x, s, target, stage != TOP_K);
    if (stage == TOP_K) kept = weight_through(x, cut.id, s.join);
    if (stage == TOP_P) kept = cut.sum;
  }
  return cut.id;
}

struct State {  // arrays over slots
  int *last_token, *next_position, *finished;
  const int *max_position, *stop_ids;
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p;
  const u64* seed;
  const int *history, *prompt_tokens, *penalty_window;
  const float *repetition, *presence, *frequency;
  const int *bias_count, *bias_ids;
  const float* bias_values;
  const int *logprobs, *masked, *forced;
  const unsigned* mask;
  int context, biases, mask_words;
};

struct Output {  // arrays over rows
  int *tokens, *finish, *logprob_ids;
  float* logprobs;
  int width;
};

__device__ inline Adjustment adjustment_of(const State& state, int slot, int position) {
  const int window = __ldcg(state.penalty_window + slot);
  const int prompt = __ldcg(state.prompt_tokens + slot);
  const int first = window > 0 && position > window ? position - window : 0;
  const long long place = slot;
  const bool is_masked = __ldcg(state.masked + slot);
  return {__ldcg(state.repetition + slot), __ldcg(state.presence + slot),
          __ldcg(state.frequency + slot), first, prompt > first ? prompt : first,
          position < state.context ? position : state.context,
          state.history + place * state.context, __ldcg(state.bias_count + slot),
          state.bias_ids + place * state.biases, state.bias_values + place * state.biases,
          is_masked ? state.mask + place * state.mask_words : nullptr, state.mask_words};
}

// What a slot asks for. All of it is there when a step begins: so one thread reads it while the
// kernel before still runs, past the first cache (grid.cuh).
struct Wish {
  int slot, position, finished, most, stops[STOP_IDS], logprobs, forced;
  Filter filter;
  Adjustment adjustment;

  __device__ __forceinline__ void read(const State& state, int own_slot, int own_position) {
    slot = own_slot, position = own_position;
#pragma unroll
    for (int i = 0; i < STOP_IDS; ++i) stops[i] = __ldcg(state.stop_ids + slot * STOP_IDS + i);
    finished = __ldcg(state.finished + slot), most = __ldcg(state.max_position + slot);
    logprobs = __ldcg(state.logprobs + slot), forced = __ldcg(state.forced + slot);
    filter.temperature = __ldcg(state.temperature + slot);
    filter.top_p = __ldcg(state.top_p + slot), filter.min_p = __ldcg(state.min_p + slot);
    filter.top_k = __ldcg(state.top_k + slot);
    filter.uniform = uniform24(__ldcg(state.seed + slot), position, 0);
    adjustment = adjustment_of(state, slot, position);
  }
  __device__ __forceinline__ int end_of(int chosen) const {
    int finish = position + 1 >= most ? LENGTH : RUNNING;
#pragma unroll
    for (int i = 0; i < STOP_IDS; ++i)
      if (stops[i] == chosen) finish = STOP;
    return finish;
  }
};

__device__ inline void report(const float* logits, int vocab, int chosen, int alternatives,
                              u64 best, int* ids, float* values, u64* scratch) {
  const float top = logits[id_of(best)];
  double sum = 0;
  for (int i = threadIdx.x; i < vocab; i += blockDim.x)
    sum += static_cast<double>(expf(logits[i] - top));
  const double all = log(block_join(sum, reinterpret_cast<double*>(scratch), Add()));
  u64 limit = ~0ull;
  for (int n = 0; n <= alternatives; ++n) {
    int id = chosen;
    if (n > 0) {
      bool unused;
      limit = n == 1 ? best : best_below(logits, vocab, limit, scratch, &unused);
      if (limit == 0) break;
      id = id_of(limit);
    }
    if (threadIdx.x == 0) {
      ids[n] = id;
      values[n] = static_cast<float>(static_cast<double>(logits[id] - top) - all);
    }
  }
}

constexpr int AT_ONCE = 8;  // logits of a thread
constexpr u64 BAD = ~0ull;  // a part holds a NaN or +inf; more than any rank

// grid: (parts, rows). parts_best [rows, parts]: the best of each part of a row; 0: none, BAD
extern "C" __global__ void __launch_bounds__(256)
    best_of_parts(const float* logits, u64* parts_best, int vocab) {
  __shared__ u64 join[32];
  grid_launch();
  const int size = (vocab + gridDim.x - 1) / gridDim.x;
  const int first = blockIdx.x * size, last = min(first + size, vocab);
  grid_wait();
  logits += static_cast<long long>(blockIdx.y) * vocab;
  u64 best = 0;
#pragma unroll 1
  for (int start = first; start < last; start += 256 * AT_ONCE) {
    float values[AT_ONCE];  // asked for together
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int at = start + 256 * i + static_cast<int>(threadIdx.x);
      values[i] = at < last ? logits[at] : __int_as_float(0xff800000);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float x = values[i];
      const int at = start + 256 * i + static_cast<int>(threadIdx.x);
      u64 rank = x > __int_as_float(0xff800000) ? rank_of(x, at) : 0;
      if (!(x < __int_as_float(0x7f800000))) rank = BAD;
      best = rank > best ? rank : best;
    }
  }
  best = block_join(best, join, Max());
  if (threadIdx.x == 0) parts_best[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

// grid: (rows). scratch: [rows, vocab]. A step's slots and positions are there before the wait.
extern "C" __global__ void __launch_bounds__(1024)
    sample_rows(const float* logits, float* scratch, const u64* parts_best, const int* outputs,
                const int* slots, const int* positions, State state, Output out, int vocab,
                int parts) {
  __shared__ SelectScratch s;
  __shared__ Wish wish;
  grid_launch();
  const int row = blockIdx.x;
  if (threadIdx.x == 0) {
    const int t = __ldcg(outputs + row);
    wish.read(state, __ldcg(slots + t), __ldcg(positions + t) + 1);
  }
  grid_wait();
  __syncthreads();
  logits += static_cast<long long>(row) * vocab;
  scratch += static_cast<long long>(row) * vocab;
  int *ids = out.logprob_ids + row * out.width;
  float *values = out.logprobs + row * out.width;
  for (int i = threadIdx.x; i < out.width; i += blockDim.x) ids[i] = -1, values[i] = 0.0f;
  if (wish.finished != RUNNING) {
    if (threadIdx.x == 0) out.tokens[row] = -1, out.finish[row] = DONE_BEFORE;
    return;
  }
  const bool is_mine = static_cast<int>(threadIdx.x) < parts;
  const u64 best =  // of the model
      block_join(is_mine ? parts_best[row * parts + threadIdx.x] : 0, s.join, Max());
  bool good = best != BAD;
  const Adjustment& adjustment = wish.adjustment;
  const float* chosen_from = logits;
  u64 first = best;
  if (adjustment.bias_count > 0 || adjustment.mask || adjustment.has_penalty()) {
    bool still_good;
    adjust(logits, scratch, vocab, adjustment);
    first = best_below(scratch, vocab, ~0ull, s.join, &still_good);
    good = good && still_good;
    chosen_from = scratch;
  }
  if (!good || best == 0 || first == 0) {
    if (threadIdx.x == 0) {
      out.tokens[row] = -1;
      out.finish[row] = state.finished[wish.slot] = NOT_FINITE;
    }
    return;
  }
  int chosen = id_of(first);
  const float temperature = wish.filter.temperature;
  if (wish.forced >= 0) {
    chosen = wish.forced;
  } else if (temperature != 0.0f) {
    const float top = __fdiv_rn(chosen_from[chosen], temperature);
    if (fabsf(top) < __int_as_float(0x7f800000))  // else the temperature is as good as 0
      chosen = draw({chosen_from, vocab, temperature, top}, wish.filter, s);
  }
  if (wish.logprobs >= 0)
    report(logits, vocab, chosen, wish.logprobs, best, ids, values, s.join);
  if (threadIdx.x != 0) return;
  out.tokens[row] = state.last_token[wish.slot] = chosen;
  state.next_position[wish.slot] = wish.position;
  out.finish[row] = state.finished[wish.slot] = wish.end_of(chosen);
}
