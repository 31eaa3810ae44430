// Chosen experts of generated rows from sm_80 on, and beside them the one that all tokens take. Each
// token has the bits that it has alone: tokens that share an expert read it together, and that
// changes no sum. Nothing comes from the host.
//
// A pair is a token and one of its experts. Of those with the same expert the first one's block works
// for all. expert_up tells the next kernel to begin when it has waited itself: so the choice is there
// before that one waits. -D FORMAT; OTHER, of the expert that all take; STRIP: tiles of a block of
// expert_parts; WARPS and DEPTH as in expert_strip.cuh.
#include "expert_strip.cuh"
#include "expert_table.cuh"
#include "state_rows.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
using F = formats::FORMAT;
using O = formats::OTHER;
constexpr int MOST_USED = 32;

struct Columns {
  const std::uint8_t *gate, *up;
};

// Lane i gets the pair that comes `first` + i-th of those with this expert, or -1; and all of them
// are counted. The whole warp calls.
__device__ __forceinline__ int pair_with(const int* chosen, int pairs, int expert, int first,
                                         int& count) {
  const int lane = threadIdx.x & 31;
  int mine = -1;
  count = 0;
  for (int base = 0; base < pairs; base += 32) {
    const int at = base + lane;
    unsigned same = __ballot_sync(ALL, at < pairs && chosen[at] == expert);
    int skip = first + lane - count;
    count += __popc(same);
    if (skip < 0 || skip >= __popc(same)) continue;
    while (skip-- > 0) same &= same - 1;
    mine = base + __ffs(static_cast<int>(same)) - 1;
  }
  return mine;
}

// Turns of up to `room` pairs that have the expert of pair `own`, if it is the first of them.
// work(count, pair of token i) by all threads; list: [MOST_TOKENS] in shared memory.
template <class Work>
__device__ __forceinline__ void for_twins(const int* chosen, int pairs, int own, int room,
                                          bool is_single, int* list, Work work) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int first = 0;; first += room) {
    int count = 1, mine = own;
    if (!is_single) mine = pair_with(chosen, pairs, chosen[own], first, count);
    if (first == 0 && __shfl_sync(ALL, mine, 0) != own) return;
    __syncthreads();  // the list, and what is behind it, has been read
    if (warp == 0 && lane < MOST_TOKENS) list[lane] = mine;
    __syncthreads();
    work(min(room, count - first));
    if (first + room >= count) return;
  }
}

// sigmoid(x . weight) of each token, a warp for each.
template <class Row>
__device__ __forceinline__ void gate_tokens(const float* weight, int k, int count, Row row_of,
                                            float* gates) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int token = warp; token < count; token += WARPS) {
    const float* row = row_of(token);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = lane; i < k; i += 32) sum = fmaf(row[i], weight[i], sum);
    sum = warp_join(sum, Add());
    if (lane == 0) gates[token] = sigmoid(sum);
  }
}

// silu(gate x) * up x of 16 rows; out(token): where the first row's goes.
template <class Format, class Out, class Factor>
__device__ __forceinline__ void write_inner(const Strip<Format>& strip, int count, int meant,
                                            int rows, Out out, Factor factor) {
  for (int i = threadIdx.x; i < 16 * count; i += 32 * WARPS) {
    const int token = i / 16, row = first_row_of(meant, rows) + i % 16;
    if (row < meant || row >= rows) continue;
    const float gate = strip.sum(0, token, i % 16), up = strip.sum(1, token, i % 16);
    out(token)[row] = activated(gate, SILU) * up * factor(token);
  }
}
#endif

// grid: (rows / 16, tokens * used + turns of `room` tokens of the one that all take). out: [tokens *
// used][rows]; other_out [tokens][other_rows], times the token's gate if there is one.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_up_stream(const Expert* table, int count, int first, const int* chosen, const float* x,
                     float* out, int tokens, int used, int k, int rows, int room,
                     const std::uint8_t* other_gate, const std::uint8_t* other_up,
                     const float* other_weight, float* other_out, int other_rows) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ int list[MOST_TOKENS];
  __shared__ float gates[MOST_TOKENS];
  const int pairs = tokens * used, y = blockIdx.y, meant = 16 * blockIdx.x;
  if (y >= pairs) {
    const int begin = (y - pairs) * room, own = min(room, tokens - begin);
    const Strip<O> strip{2, k, min(15, other_rows - 1), room, shared};
    const auto row_of = [&](int token) { return x + static_cast<long long>(begin + token) * k; };
    const long long skipped =
        static_cast<long long>(first_row_of(meant, other_rows)) * row_bytes_of<O>(k);
    const bool is_there = meant < other_rows;
    if (!is_there) {
      grid_wait();
      return;
    }
    strip.multiply(own, [&](int t) { return (t ? other_up : other_gate) + skipped; }, row_of, [&] {
      grid_wait();
      grid_launch();
      if (other_weight != nullptr) gate_tokens(other_weight, k, own, row_of, gates);
    });
    write_inner(
        strip, own, meant, other_rows,
        [&](int token) { return other_out + static_cast<long long>(begin + token) * other_rows; },
        [&](int token) { return other_weight != nullptr ? gates[token] : 1.0f; });
    return;
  }
  // Of all experts that are here, gate and up; what is chosen is not known yet.
  Columns* places = reinterpret_cast<Columns*>(shared);
  for (int i = threadIdx.x; i < count; i += 32 * WARPS)
    places[i] = {table[i].matrices[GATE], table[i].matrices[UP]};
  grid_wait();
  grid_launch();
  const int local = chosen[y] - first;
  if (meant >= rows || local < 0 || local >= count) return;
  const Strip<F> strip{2, k, min(15, rows - 1), room, shared + whole(16 * count)};
  const long long skipped = static_cast<long long>(first_row_of(meant, rows)) * row_bytes_of<F>(k);
  for_twins(chosen, pairs, y, room, tokens == 1, list, [&](int own) {
    const std::uint8_t *gate = places[local].gate + skipped, *up = places[local].up + skipped;
    strip.multiply(
        own, [&](int t) { return t ? up : gate; },
        [&](int token) { return x + static_cast<long long>(list[token] / used) * k; }, [] {});
    write_inner(
        strip, own, meant, rows,
        [&](int token) { return out + static_cast<long long>(list[token]) * rows; },
        [](int) { return 1.0f; });
  });
#endif
}

#if VP_ARCH >= 800
// A token's experts that are here, in the order of `chosen`.
struct Present {
  const std::uint8_t* down[MOST_USED];
  float weights[MOST_USED];
  int ranks[MOST_USED], count;

  // By one warp.
  __device__ __forceinline__ void find(const Experts& experts, const int* chosen,
                                       const float* shares, int used) {
    const int lane = threadIdx.x & 31;
    const Expert* own = lane < used ? experts.find(chosen[lane]) : nullptr;
    const unsigned there = __ballot_sync(ALL, own != nullptr);
    const int at = __popc(there & ((1u << lane) - 1));
    if (own != nullptr) down[at] = own->matrices[DOWN], weights[at] = shares[lane], ranks[at] = lane;
    if (lane == 0) count = __popc(there);
  }
};
#endif

// grid: (rows / 16, tokens). inner: [tokens * used][k], other_inner [tokens][other_k] or null; out
// [tokens][rows]: the weighted sum over a token's experts in the order of `chosen`, then the one that
// all take, whose chunks are no more than there are warps. is_ahead: what was chosen is there before
// the wait. slots: items of a warp, most.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_down_stream(const Expert* table, int count, int first, const int* chosen,
                       const float* shares, const float* inner, float* out, int used, int k,
                       int rows, int accumulate, int is_ahead, int slots,
                       const std::uint8_t* other_down, const float* other_inner, int other_k) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Present here;
  using R = Ring<F>;
  using Q = Ring<O>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const long long token = blockIdx.y;
  const int meant = blockIdx.x * 16, first_row = first_row_of(meant, rows);
  const int last_row = min(15, rows - 1), chunks = R::chunks(k), row_bytes = row_bytes_of<F>(k);
  if (!is_ahead) grid_wait();
  if (warp == 0)
    here.find(Experts{table, count, first}, chosen + token * used, shares + token * used, used);
  __syncthreads();
  const int items = here.count * chunks, others = other_down == nullptr ? 0 : Q::chunks(other_k);
  // This warp's chunk of the one that all take: warps with fewer items begin.
  const int other = (warp + WARPS - items % WARPS) % WARPS;
  std::uint8_t* ring = shared + warp * (R::bytes(DEPTH) + Q::bytes(1));
  std::uint8_t* other_ring = ring + R::bytes(DEPTH);
  std::uint8_t* own_slots = shared + WARPS * (R::bytes(DEPTH) + Q::bytes(1)) +
                            warp * (slots * R::slot_bytes(1) + Q::slot_bytes(1));
  std::uint8_t* other_slot = own_slots + slots * R::slot_bytes(1);
  float* parts = reinterpret_cast<float*>(shared + WARPS * (R::bytes(DEPTH) + Q::bytes(1) +
                                                            slots * R::slot_bytes(1) +
                                                            Q::slot_bytes(1)));  // [item][16]
  float* sums = parts + 16 * (used * chunks + others);  // [expert][16]
  const Tile tile{lane};
  const typename R::Raw raw(row_bytes, last_row, lane);
  const auto row_of = [&](int item) {
    return here.down[item / chunks] + static_cast<long long>(first_row) * row_bytes;
  };
  const int other_bytes = row_bytes_of<O>(other_k);
  const std::uint8_t* other_row = other_down + static_cast<long long>(first_row) * other_bytes;
  if (other < others)
    Q::begin(typename Q::Raw(other_bytes, last_row, lane), other_ring, other_row, other,
             other_bytes);
  commit_copies();
  const auto fetch = [&](int item, int place) {
    if (item < items)
      R::begin(raw, ring + place * R::Raw::SIZE, row_of(item), item % chunks, row_bytes);
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch(warp + i * WARPS, i);
  if (is_ahead) grid_wait();
  grid_launch();
  if (other < others)
    Q::stage(other_slot, 1, 0, other_inner + token * other_k, other_k, other, lane);
  int slot = 0;
#pragma unroll 3
  for (int item = warp; item < items; item += WARPS, ++slot)
    R::stage(own_slots + slot * R::slot_bytes(1), 1, 0,
             inner + (token * used + here.ranks[item / chunks]) * k, k, item % chunks, lane);
  float own[Tile::VALUES];
  wait_for_copies<DEPTH>();
  __syncwarp();
  if (other < others) {
    Q::multiply(other_ring, 0, 1, typename Q::Raw(other_bytes, last_row, lane), other_row, other,
                other_slot, 1, tile, own);
    keep_item(own, tile, 1, parts + (used * chunks + other) * 16);
  }
  int place = 0;
  slot = 0;
#pragma unroll 1
  for (int item = warp; item < items; item += WARPS, ++slot) {
    wait_for_copies<DEPTH - 1>();
    __syncwarp();
    R::multiply(ring, place, DEPTH, raw, row_of(item), item % chunks,
                own_slots + slot * R::slot_bytes(1), 1, tile, own);
    __syncwarp();  // what was read may be overwritten
    fetch(item + DEPTH * WARPS, place);
    place = place + 1 < DEPTH ? place + 1 : 0;
    keep_item(own, tile, 1, parts + item * 16);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * (here.count + (others > 0)); i += 32 * WARPS) {
    const bool is_other = i >= 16 * here.count;
    const float* from = parts + (is_other ? used : i / 16) * chunks * 16 + i % 16;
    float sum = 0.0f;
    for (int chunk = 0; chunk < (is_other ? others : chunks); ++chunk) sum += from[16 * chunk];
    sums[i] = sum;
  }
  __syncthreads();
  const int i = threadIdx.x, row = first_row + i;
  if (i >= 16 || row < meant || row >= rows) return;
  float* to = out + token * rows + row;
  float sum = 0.0f;
  for (int n = 0; n < here.count; ++n) sum += here.weights[n] * sums[16 * n + i];
  if (others > 0) sum += sums[16 * here.count + i];
  *to = accumulate ? *to + sum : sum;
#endif
}

// grid: (rows / 16 / STRIP, tokens * used + turns of the one that all take). parts: [tokens *
// used][rows], other_parts [tokens][rows]: what expert_sum adds.
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

// grid: (rows / 256, tokens). other_parts: [tokens][rows] or null. The order of expert_down_stream.
extern "C" __global__ void __launch_bounds__(256)
    expert_sum(const int* chosen, const float* weights, const float* parts,
               const float* other_parts, float* out, int used, int rows, int count, int first,
               int accumulate) {
#if VP_ARCH >= 800
  grid_launch();
  grid_wait();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const long long token = blockIdx.y;
  float sum = 0.0f;
  for (int rank = 0; rank < used; ++rank) {
    const long long pair = token * used + rank;
    const int local = chosen[pair] - first;
    if (local >= 0 && local < count) sum += weights[pair] * parts[pair * rows + row];
  }
  if (other_parts != nullptr) sum += other_parts[token * rows + row];
  float* to = out + token * rows + row;
  *to = accumulate ? *to + sum : sum;
#endif
}
