// Heads of q, k and v as their product left them, for a kernel that attends at once: it norms and
// rotates its queries on their way to shared memory, and the block that a fresh position belongs to
// puts its key and value into the page, and among those that it has asked for already. Where
// several blocks have the same position (rows of one slot that are not computed together), each
// stores the same bits, and reads its own.
#pragma once
#include "attention_join.cuh"
#include "attention_turn.cuh"
#include "grid.cuh"

namespace voltapile {

constexpr bool FUSES = VP_ARCH >= 900 && COPIES;
constexpr bool PATCHES = FUSES && TURNS == 1;  // in steps that were asked for

struct Raw {
  const float *q, *k, *v;        // k: null where they are raw no longer
  const float *q_norm, *k_norm;  // or null
  const float* angles;
  unsigned char *keys, *values;
  int pairs, apart;
  float eps;
};

// Fresh positions that a block may have to store, those of a slot's tokens in this step from
// number `token` on, which has position `first`.
struct Run {
  int token, first;
  int begin, end;
};

// The strand of this block that a position belongs to; -1: none.
__device__ __forceinline__ int strand_of(const Source& s, int p) {
  const unsigned at = static_cast<unsigned>(p - s.first) % Walk::ROUND;
  if (BLOCKS == 1) return at % PAGE / STEP;
  return p >= s.first && at % PAGE < STEP && at / PAGE < STRANDS ? at / PAGE : -1;
}

// What a warp does, two heads at once: keys and values of its strand's fresh positions, then
// queries. Where a block has one fresh position, the other warps have the queries.
struct Jobs {
  int p, end, row, rows, step;

  __device__ __forceinline__ Jobs(const Source& s, const Run& run, int rows, int warp)
      : p(run.begin), end(run.end), row(warp), rows(rows), step(STRANDS) {
    const int busy = end - p == 1 ? strand_of(s, p) : -1;
    if (busy >= 0) {
      step = STRANDS - 1, row = (warp - busy - 1) & (STRANDS - 1);
      if (warp == busy) row = rows;
    }
    find(s, warp);
  }
  __device__ __forceinline__ bool are_done() const { return p >= end && row >= rows; }
  __device__ __forceinline__ bool is_fresh() const { return p < end; }
  __device__ __forceinline__ bool has(int i) const { return is_fresh() || row + i * step < rows; }
  __device__ __forceinline__ void go_on(const Source& s, int warp) {
    if (is_fresh())
      ++p, find(s, warp);
    else
      row += 2 * step;
  }

 private:
  __device__ __forceinline__ void find(const Source& s, int warp) {
#pragma unroll 1
    while (p < end && strand_of(s, p) != warp) ++p;
  }
};

// Where a row's query goes.
struct Staged {
  half_bits* q;
  Row* rows;
  const int *query, *token;  // of each row; counted in heads of all tokens
  int used;
};

// The i-th of two heads.
struct RawHead {
  const float *from, *weight, *angles;
  int target;  // a row, or a fresh position

  __device__ __forceinline__ void find(const Jobs& jobs, int i, const Staged& to, const Run& run,
                                       const Raw& raw, const Pages& where) {
    const bool is_query = !jobs.is_fresh(), is_value = !is_query && i == 1;
    target = is_query ? jobs.row + i * jobs.step : jobs.p;
    const int token = is_query ? to.token[target] : run.token + target - run.first;
    const int place = is_query ? to.query[target] : token * where.kv_heads + where.kv_head;
    from = (is_query ? raw.q : is_value ? raw.v : raw.k) + static_cast<unsigned>(place) * DIM;
    weight = is_query ? raw.q_norm : is_value ? nullptr : raw.k_norm;
    angles = is_value ? nullptr : raw.angles + 2 * token * raw.pairs;
  }
};

// What lies in scratch becomes position p's key or value.
template <class S>
__device__ __forceinline__ void store_fresh(const Raw& raw, bool is_value, int p, const Source& s,
                                            S& own, const float* scratch) {
  const Pages& where = s.where;
  const int page = where.table[p / PAGE];
  if (page < 0 || page >= where.pages) return;
  if constexpr (PATCHES) {
    const unsigned step = static_cast<unsigned>(p - Walk(s).p) / Walk::ROUND;
    if (step < STAGES) {
      wait_for_copies<0>();  // of what lies beside it
      __syncwarp();
      store_head(own.tiles[step][is_value].spot(p % STEP), scratch, KIND, DIM);
    }
  }
  unsigned char* to = (is_value ? raw.values : raw.keys) +
                      (page * where.kv_heads + where.kv_head) * head_bytes(KIND, DIM);
  store_head(spot_of(to, KIND, p % PAGE, DIM), scratch, KIND, DIM);
}

// own: the warp's strand. scratch: its own, for one head. What needs no other kernel's results
// comes before waiting for them. All threads meet afterwards.
__device__ __forceinline__ void stage_raw(const Staged& to, const Run& run, const Raw& raw,
                                          const Source& s, Steps& own, float* scratch, float scale,
                                          int warp, int lane) {
  const Turns turns(raw.pairs, raw.apart);
#pragma unroll 1
  for (Jobs jobs(s, run, to.used, warp); !jobs.are_done(); jobs.go_on(s, warp)) {
    RawHead which[2];
    Head<DIM> heads[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!jobs.has(i)) break;
      which[i].find(jobs, i, to, run, raw, s.where);
      heads[i].read_constants(which[i].weight, which[i].angles, turns, DIM, lane);
    }
    grid_wait();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (jobs.has(i)) heads[i].read(which[i].from, DIM, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!jobs.has(i)) break;
      if (which[i].weight != nullptr) heads[i].norm(DIM, raw.eps);
      if (which[i].angles != nullptr) heads[i].rotate(turns, scratch, lane);
      heads[i].put(scratch, lane);
      const int target = which[i].target;
      if (jobs.is_fresh()) {
        store_fresh(raw, i == 1, target, s, own, scratch);
      } else {
        Query<DIM> query;
        query.read(scratch, DIM, lane);
        const float power = query.template stage<KvTile::IN_FOURS>(to.q + target * PITCH, lane);
        if (lane == 0) to.rows[target].factor = power * scale;
      }
      __syncwarp();
    }
  }
  grid_wait();
}

}  // namespace voltapile
