// Down of chosen experts for more generated rows: what expert_down_stream.cu adds, pair by pair;
// expert_join adds it up, with the same bits. -D as in expert_twins.cuh; STRIP: tiles of a block.
#include "expert_twins.cuh"

using namespace voltapile;

// grid: (rows / 16 / STRIP, tokens * used + turns of the one that all take). parts: [tokens *
// used][rows], other_parts [tokens][rows].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_parts(const Expert* table, int count, int first, const int* chosen, const float* inner,
                 float* parts, int tokens, int used, int k, int rows, int room,
                 const std::uint8_t* other_down, const float* other_inner, float* other_parts,
                 int other_k) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ int list[MOST_TOKENS];
  grid_launch();
  grid_wait();
  const int pairs = tokens * used, y = blockIdx.y, begin = 16 * STRIP * blockIdx.x;
  const int tiles = min(STRIP, (rows - begin + 15) / 16), last_row = min(15, rows - 1);
  const auto write = [&](const auto& strip, int own, auto out) {
    for (int i = threadIdx.x; i < 16 * tiles * own; i += 32 * WARPS) {
      const int token = i / 16 % own, t = i / 16 / own, meant = begin + 16 * t;
      const int row = first_row_of(meant, rows) + i % 16;
      if (row >= meant && row < rows) out(token)[row] = strip.sum(t, token, i % 16);
    }
  };
  if (y >= pairs) {
    const int start = (y - pairs) * room, own = min(room, tokens - start);
    const Strip<O> strip{tiles, other_k, last_row, room, shared};
    strip.multiply(
        own,
        [&](int t) {
          const long long row = first_row_of(begin + 16 * t, rows);
          return other_down + row * row_bytes_of<O>(other_k);
        },
        [&](int token) { return other_inner + static_cast<long long>(start + token) * other_k; },
        [] {});
    write(strip, own,
          [&](int token) { return other_parts + static_cast<long long>(start + token) * rows; });
    return;
  }
  const Expert* expert = Experts{table, count, first}.find(chosen[y]);
  if (expert == nullptr) return;
  const std::uint8_t* down = expert->matrices[DOWN];
  const Strip<F> strip{tiles, k, last_row, room, shared};
  for_twins(chosen, pairs, y, room, tokens == 1, list, [&](int own) {
    strip.multiply(
        own,
        [&](int t) {
          const long long row = first_row_of(begin + 16 * t, rows);
          return down + row * row_bytes_of<F>(k);
        },
        [&](int token) { return inner + static_cast<long long>(list[token]) * k; }, [] {});
    write(strip, own,
          [&](int token) { return parts + static_cast<long long>(list[token]) * rows; });
  });
#endif
}
