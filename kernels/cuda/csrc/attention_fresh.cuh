// Heads of q, k and v as their product left them, for a kernel that attends at once: it norms and
// rotates its queries on their way to shared memory, and the block that a fresh position belongs to
// puts its key and value into the page, and among those that it has asked for already. Where
// several blocks have the same position (rows of one slot that are not computed together), each
// stores the same bits, and reads its own.
#pragma once
#include "attention_join.cuh"
#include "attention_turn.cuh"

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

// Whether a position is one of this block's strands'.
__device__ __forceinline__ bool is_of_block(const Source& s, int p) {
  const unsigned at = p - s.first;
  return BLOCKS == 1 || (p >= s.first && at % Walk::ROUND / PAGE < 4 && at % PAGE < STEP);
}

// Whether any of them is.
__device__ __forceinline__ bool has_fresh(const Source& s, const Run& run) {
  bool has = false;
#pragma unroll 1
  for (int p = run.begin; p < run.end; ++p) has |= is_of_block(s, p);
  return has;
}

// Where a row's query goes.
struct Staged {
  half_bits* q;
  Row* rows;
  const int *query, *token;  // of each row; counted in heads of all tokens
  int used;
};

// One of the heads that a block has to look after.
struct RawHead {
  const float *from, *weight, *angles;
  int target;  // a row, or a fresh position
  bool is_query, is_value;

  __device__ __forceinline__ RawHead(int job, int fresh, const Staged& to, const Run& run,
                                     const Raw& raw, const Pages& where) {
    is_query = job >= fresh, is_value = !is_query && job % 2;
    target = is_query ? job - fresh : run.begin + job / 2;
    const int token = is_query ? to.token[target] : run.token + target - run.first;
    const int place = is_query ? to.query[target] : token * where.kv_heads + where.kv_head;
    from = (is_query ? raw.q : is_value ? raw.v : raw.k) + static_cast<unsigned>(place) * DIM;
    weight = is_query ? raw.q_norm : is_value ? nullptr : raw.k_norm;
    angles = is_value ? nullptr : raw.angles + 2 * token * raw.pairs;
  }
};

template <class S>
__device__ __forceinline__ void store_fresh(const Raw& raw, const RawHead& head, const Source& s,
                                            S* strands, const float* scratch) {
  const Pages& where = s.where;
  const int p = head.target, page = where.table[p / PAGE];
  if (page < 0 || page >= where.pages) return;
  unsigned char* to = (head.is_value ? raw.values : raw.keys) +
                      (page * where.kv_heads + where.kv_head) * head_bytes(KIND, DIM);
  store_head(spot_of(to, KIND, p % PAGE, DIM), scratch, KIND, DIM);
  if constexpr (PATCHES) {
    const int strand = static_cast<unsigned>(p - s.first) % Walk::ROUND / PAGE;
    const unsigned step = static_cast<unsigned>(p - Walk(s, strand).p) / Walk::ROUND;
    if (step < STAGES)
      store_head(strands[strand].tiles[step][head.is_value].spot(p % STEP), scratch, KIND, DIM);
  }
}

// A warp takes two heads at once. scratch: its own, for one. All threads meet afterwards.
__device__ __forceinline__ void stage_raw(const Staged& to, const Run& run, const Raw& raw,
                                          const Source& s, Steps* strands, float* scratch,
                                          float scale, int warp, int lane) {
  const Turns turns(raw.pairs, raw.apart);
  const int fresh = 2 * max(0, run.end - run.begin), jobs = fresh + to.used;
  const auto find = [&](int job) {
    while (job < fresh && !is_of_block(s, run.begin + job / 2)) job += STRANDS;
    return job;
  };
  int job = find(warp);
#pragma unroll 1
  while (job < jobs) {
    const int two[2] = {job, find(job + STRANDS)};
    Head<DIM> heads[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (two[i] >= jobs) break;
      const RawHead head(two[i], fresh, to, run, raw, s.where);
      heads[i].read(head.from, DIM, lane);
      heads[i].read_constants(head.weight, head.angles, turns, DIM, lane);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (two[i] >= jobs) break;
      const RawHead head(two[i], fresh, to, run, raw, s.where);
      if (head.weight != nullptr) heads[i].norm(DIM, raw.eps);
      if (!head.is_value) heads[i].rotate(turns, scratch, lane);
      heads[i].put(scratch, lane);
      if (head.is_query) {
        Query<DIM> query;
        query.read(scratch, DIM, lane);
        const float power =
            query.template stage<KvTile::IN_FOURS>(to.q + head.target * PITCH, lane);
        if (lane == 0) to.rows[head.target].factor = power * scale;
      } else {
        store_fresh(raw, head, s, strands, scratch);
      }
      __syncwarp();
    }
    job = find(two[1] + STRANDS);
  }
}

}  // namespace voltapile
