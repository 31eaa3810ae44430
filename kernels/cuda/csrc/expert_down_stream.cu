// Down of a token's chosen experts and their weighted sum, for few generated rows from sm_80 on,
// and with it the expert that every token takes. -D as in expert_twins.cuh.
#include "expert_twins.cuh"

using namespace voltapile;

#if VP_ARCH >= 800
constexpr int MOST_USED = 32;

// A token's experts that are here, in the order of `chosen`.
struct Present {
  const std::uint8_t* down[MOST_USED];
  float weights[MOST_USED];
  int ranks[MOST_USED], count;

  // By each warp for itself, with the same result: then loads come first, and nobody waits.
  __device__ __forceinline__ void find(const Experts& experts, const int* chosen,
                                       const float* shares, int used) {
    const int lane = threadIdx.x & 31;
    const Expert* own = lane < used ? experts.find(chosen[lane]) : nullptr;
    const unsigned there = __ballot_sync(ALL, own != nullptr);
    const int at = __popc(there & ((1u << lane) - 1));
    if (own != nullptr) {
      down[at] = own->matrices[DOWN];
      weights[at] = shares[lane];
      ranks[at] = lane;
    }
    if (lane == 0) count = __popc(there);
  }
};
#endif

// grid: (rows / 16, tokens). inner: [tokens * used][k], other_inner [tokens][other_k] or null; out
// [tokens][rows]: the weighted sum over a token's experts in the order of `chosen`, then the one
// that all take, whose chunks are no more than there are warps. What was chosen is there before the
// wait, since expert_up_stream is the kernel before. slots: items of a warp, most.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    expert_down_stream(const Expert* table, int count, int first, const int* chosen,
                       const float* shares, const float* inner, float* out, int used, int k,
                       int rows, int accumulate, int slots,
                       const std::uint8_t* other_down, const float* other_inner, int other_k) {
#if VP_ARCH >= 800
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ Present here;
  using R = Ring<F>;
  using Q = Ring<O>;
  const int warp = own_warp(), lane = threadIdx.x & 31;
  const long long token = blockIdx.y;
  const int meant = blockIdx.x * 16, first_row = first_row_of(meant, rows);
  const int last_row = min(15, rows - 1), chunks = R::chunks(k), row_bytes = row_bytes_of<F>(k);
  here.find(Experts{table, count, first}, chosen + token * used, shares + token * used, used);
  __syncwarp();
  const int items = here.count * chunks, others = IS_ALONE ? 0 : Q::chunks(other_k);
  // This warp's chunk of the one that all take: warps with fewer items begin.
  const int other = (warp - items) & (WARPS - 1);
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
  const auto row_of = [&](int n) {
    return here.down[n] + static_cast<long long>(first_row) * row_bytes;
  };
  const int other_bytes = row_bytes_of<O>(other_k);
  const std::uint8_t* other_row = other_down + static_cast<long long>(first_row) * other_bytes;
  if (other < others)
    Q::begin(typename Q::Raw(other_bytes, last_row, lane), other_ring, other_row, other,
             other_bytes);
  commit_copies();
  // Walks go over a token's experts as over tiles.
  Walk ahead(warp, chunks), staged = ahead, own = ahead;
  const auto inner_of = [&](int n) { return inner + (token * used + here.ranks[n]) * k; };
  const auto stage = [&] {
    const float* other_x = other_inner + token * other_k;
    if (other < others)
      Q::put(Q::load(other_x, other_k, other, lane), other_slot, 1, 0, other_x, other_k, other,
             lane);
    if (staged.tile >= here.count) return;
    const float* row = inner_of(staged.tile);
    typename R::Held held = R::load(row, k, staged.chunk, lane);
#pragma unroll 1
    for (std::uint8_t* slot = own_slots; staged.tile < here.count; slot += R::slot_bytes(1)) {
      const typename R::Held now = held;
      const float* own_row = row;
      const int chunk = staged.chunk;
      staged.advance(WARPS, chunks);
      if (staged.tile < here.count) {
        row = inner_of(staged.tile);
        held = R::load(row, k, staged.chunk, lane);
      }
      R::put(now, slot, 1, 0, own_row, k, chunk, lane);
    }
  };
  int place = 0;
  std::uint8_t* slot = own_slots;
  // As in Strip.
#pragma unroll 1
  for (int turn = -DEPTH; turn < 0 || own.tile < here.count; ++turn) {
    if (turn >= 0) {
      wait_for_copies<DEPTH - 1>();
      __syncwarp();
      R::multiply(ring, place, DEPTH, raw, row_of(own.tile), own.chunk, slot, 1, tile,
                  parts + (own.tile * chunks + own.chunk) * 16);
      __syncwarp();  // what was read may be overwritten
      slot += R::slot_bytes(1);
      own.advance(WARPS, chunks);
    }
    if (ahead.tile < here.count) {
      R::begin(raw, ring + place * R::Raw::SIZE, row_of(ahead.tile), ahead.chunk, row_bytes);
      ahead.advance(WARPS, chunks);
    }
    commit_copies();
    place = place + 1 < DEPTH ? place + 1 : 0;
    if (turn == -1) {
      grid_wait();
      grid_launch();
      stage();
      __syncwarp();
    }
  }
  if (other < others) {
    wait_for_copies<0>();
    __syncwarp();
    Q::multiply(other_ring, 0, 1, typename Q::Raw(other_bytes, last_row, lane), other_row, other,
                other_slot, 1, tile, parts + (used * chunks + other) * 16);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 16 * (here.count + (others > 0)); i += 32 * WARPS) {
    const bool is_other = i >= 16 * here.count;
    const float* from = parts + (is_other ? used : i / 16) * chunks * 16 + i % 16;
    float sum = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < (is_other ? others : chunks); ++chunk) sum += from[16 * chunk];
    sums[i] = sum;
  }
  __syncthreads();
  const int i = threadIdx.x, row = first_row + i;
  if (i >= 16 || row < meant || row >= rows) return;
  float* to = out + token * rows + row;
  float sum = 0.0f;
#pragma unroll 1
  for (int n = 0; n < here.count; ++n) sum += here.weights[n] * sums[16 * n + i];
  if (others > 0) sum += sums[16 * here.count + i];
  *to = accumulate ? *to + sum : sum;
#endif
}
