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

// sigmoid(x . weight) of each token, by all threads.
template <class Row>
__device__ __forceinline__ void gate_tokens(const float* weight, int k, int count, Row row_of,
                                            float* gates) {
  __shared__ float scratch[32];
  for (int token = 0; token < count; ++token) {
    const float* row = row_of(token);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < k; i += 32 * WARPS) sum = fmaf(row[i], weight[i], sum);
    sum = block_join(sum, scratch, Add());
    if (threadIdx.x == 0) gates[token] = sigmoid(sum);
  }
}

// silu(gate x) * up x of units of 16 rows, `first` and those behind it, whose tiles are a gate's
// and its up's in turn; out(token): where the token's values go.
template <class Format, class Out, class Factor>
__device__ __forceinline__ void write_inner(const Strip<Format>& strip, int count, int first,
                                            int rows, Out out, Factor factor) {
  // A warp has a token of a unit, half of its lanes the gate's rows, the others those of up.
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int unit = 0, token = warp;
#pragma unroll 1
  for (;; token += WARPS) {
    for (; token >= count; ++unit) token -= count;
    if (2 * unit >= strip.tiles) return;
    const int meant = 16 * (first + unit), row = first_row_of(meant, rows) + lane % 16;
    const float sum = strip.sum(2 * unit + lane / 16, token, lane % 16);
    const float up = __shfl_xor_sync(ALL, sum, 16);
    if (lane < 16 && row >= meant && row < rows)
      out(token)[row] = activated(sum, SILU) * up * factor(token);
  }
}

// A block's units of 16 rows, of a matrix with `rows`.
struct Units {
  int first, count;

  __device__ __forceinline__ Units(int most, int rows)
      : first(blockIdx.x * most), count(min(most, (rows + 15) / 16 - first)) {}
};
#endif

// grid: (rows / 16 / units, tokens * used + turns of `room` tokens of the expert that all take).
// out: [tokens * used][rows]; other_out [tokens][other_rows], times the token's gate if there is one.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_up_stream(const Expert* table, int count, int first, const int* chosen, const float* x,
                     float* out, int tokens, int used, int k, int rows, int room, int units,
                     const std::uint8_t* other_gate, const std::uint8_t* other_up,
                     const float* other_weight, float* other_out, int other_rows) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ int list[MOST_TOKENS];
  __shared__ float gates[MOST_TOKENS];
  const int pairs = tokens * used, y = blockIdx.y;
  if (y >= pairs) {
    const Units part(units, other_rows);
    if (part.count <= 0) {
      grid_wait();
      return;
    }
    const int begin = (y - pairs) * room, own = min(room, tokens - begin);
    const Strip<O> strip{2 * part.count, k, min(15, other_rows - 1), room, shared};
    const auto row_of = [&](int token) { return x + static_cast<long long>(begin + token) * k; };
    if (other_weight != nullptr)
      for (int i = 32 * threadIdx.x; i < k; i += 32 * 32 * WARPS) prefetch(other_weight + i);
    strip.multiply(
        own,
        [&](int t) {
          const long long row = first_row_of(16 * (part.first + t / 2), other_rows);
          return (t & 1 ? other_up : other_gate) + row * row_bytes_of<O>(k);
        },
        row_of,
        [&] {
          grid_wait();
          grid_launch();
          if (other_weight != nullptr) gate_tokens(other_weight, k, own, row_of, gates);
        });
    write_inner(
        strip, own, part.first, other_rows,
        [&](int token) { return other_out + static_cast<long long>(begin + token) * other_rows; },
        [&](int token) { return other_weight != nullptr ? gates[token] : 1.0f; });
    return;
  }
  // Of all experts that are here, gate and up; what is chosen is not known yet.
  Columns* places = reinterpret_cast<Columns*>(shared);
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += 32 * WARPS)
    places[i] = {table[i].matrices[GATE], table[i].matrices[UP]};
  grid_wait();
  grid_launch();
  const int local = chosen[y] - first;
  const Units part(units, rows);
  if (part.count <= 0 || local < 0 || local >= count) return;
  const Strip<F> strip{2 * part.count, k, min(15, rows - 1), room, shared + whole(16 * count)};
  for_twins(chosen, pairs, y, room, tokens == 1, list, [&](int own) {
    const Columns from = places[local];
    strip.multiply(
        own,
        [&](int t) {
          const long long row = first_row_of(16 * (part.first + t / 2), rows);
          return (t & 1 ? from.up : from.gate) + row * row_bytes_of<F>(k);
        },
        [&](int token) { return x + static_cast<long long>(list[token] / used) * k; }, [] {});
    write_inner(
        strip, own, part.first, rows,
        [&](int token) { return out + static_cast<long long>(list[token]) * rows; },
        [](int) { return 1.0f; });
  });
#endif
}
