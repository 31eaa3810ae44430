// N-gram embeddings: which rows of the table, and how what was read there joins the streams.
#include "state_rows.cuh"

using namespace voltapile;
using u64 = unsigned long long;

// grid: (tokens / 64). rows: [tokens][heads]. Orders 2 to N have heads / (N - 1) of them each.
extern "C" __global__ void ngram_rows(const int* slots, const int* positions, const int* history,
                                      const u64* multipliers, const u64* moduli,
                                      const u64* offsets, long long* rows, int tokens, int context,
                                      int order, int heads, int boundary) {
  grid_launch();
  grid_wait();
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t >= tokens) return;
  const int* seen = history + static_cast<long long>(slots[t]) * context;
  const int each = heads / (order - 1);
  u64 hash = 0;
  bool is_over = false;
  for (int n = 0; n < order; ++n) {
    const int at = positions[t] - n;
    int token = at >= 0 ? seen[at] : boundary;
    is_over |= n > 0 && token == boundary;
    token = is_over ? boundary : token;
    hash ^= static_cast<u64>(static_cast<long long>(token)) * multipliers[n];
    if (n == 0) continue;
    for (int head = (n - 1) * each; head < n * each; ++head)
      rows[static_cast<long long>(t) * heads + head] =
          static_cast<long long>(hash % moduli[head] + offsets[head]);
  }
}

// grid: (tokens * S), 256 threads: a stream of a token each. factors [tokens][S]: what value is
// multiplied by; normed: its product's norm, what the convolution sees.
extern "C" __global__ void __launch_bounds__(256)
ngram_gate(const float* x, const float* key, const float* value, const float* norm_query,
           const float* norm_key, const float* norm_conv, float* factors, float* normed, int width,
           int count, float eps) {
  __shared__ float scratch[32];
  grid_launch();
  grid_wait();
  const long long run = blockIdx.x, from = run * width;
  const int weight = static_cast<int>(run % count) * width;
  const float* own = value + run / count * width;
  float queries = 0.0f, keys = 0.0f, both = 0.0f, values = 0.0f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float q = x[from + i], k = key[from + i];
    queries += q * q, keys += k * k, values += own[i] * own[i];
    both += q * norm_query[weight + i] * (k * norm_key[weight + i]);
  }
  queries = 1.0f / sqrtf(block_join(queries, scratch, Add()) / width + eps);
  keys = 1.0f / sqrtf(block_join(keys, scratch, Add()) / width + eps);
  values = block_join(values, scratch, Add()) / width;
  both = block_join(both, scratch, Add());
  const float score = both * queries * keys / sqrtf(static_cast<float>(width));
  const float root = sqrtf(fmaxf(fabsf(score), 1e-6f));
  const float factor = sigmoid(score > 0.0f ? root : score < 0.0f ? -root : 0.0f);
  const float scale = factor / sqrtf(factor * factor * values + eps);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    normed[from + i] = own[i] * scale * norm_conv[weight + i];
  if (threadIdx.x == 0) factors[run] = factor;
}

// grid: (S * width / 128, tokens). x += factor * value + silu(convolution of normed)
extern "C" __global__ void __launch_bounds__(128)
ngram_conv(float* x, const float* value, const float* factors, const float* normed,
           const void* taps, const float* histories, const float* logs, const int* logged,
           const int* slots, const int* positions, const int* kept, int* stands, int tokens,
           int width, int count, int taps_count, int dilation, int kind) {
  grid_launch();
  grid_wait();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
  const int channels = width * count;
  const Step step{slots, positions, kept, tokens, 0};
  const int depth = (taps_count - 1) * dilation, slot = slots[t];
  const int before = before_in_row(slots, t, depth);
  const int found = before < depth ? standing(step, logged, t - before) : FRESH;
  if (before == 0 && channel == 0) stands[slot] = found;
  if (channel >= channels) return;
  const Past past(histories, logs, slot, depth, channels, found);
  const float* own = normed + static_cast<long long>(t) * channels + channel;
  float sum = 0.0f;
  for (int j = 0; j < taps_count; ++j) {
    const int back = (taps_count - 1 - j) * dilation;
    const float input = back <= before ? own[-static_cast<long long>(back) * channels]
                                       : past.at(back - before, channel);
    sum = fmaf(tap_at(taps, kind, static_cast<long long>(channel) * taps_count + j), input, sum);
  }
  const int stream = channel / width;
  const float added = factors[static_cast<long long>(t) * count + stream] *
                      value[static_cast<long long>(t) * width + channel % width];
  x[static_cast<long long>(t) * channels + channel] += added + silu(sum);
}

// grid: (channels / 128, rows). What a slot remembers goes on.
extern "C" __global__ void __launch_bounds__(128)
ngram_end(const float* normed, float* histories, float* logs, int* logged, const int* stands,
          const int* slots, int tokens, int channels, int depth, int is_provisional) {
  grid_launch();
  grid_wait();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int first = find_row(slots, tokens, blockIdx.y);
  if (first < 0) return;
  const int length = row_length(slots, tokens, first), slot = slots[first];
  const Past past(histories, logs, slot, depth, channels, stands[slot]);
  if (channel < channels)
    go_on(histories, logs, past, slot, normed + static_cast<long long>(first) * channels, length,
          channel, is_provisional);
  if (channel == 0) logged[slot] = is_provisional ? min(length, WINDOW) : 0;
}
