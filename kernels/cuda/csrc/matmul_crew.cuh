// What matmul_cluster.cu is made of: which tiles and chunks a warp takes, where they lie, its ring,
// and the block's shared memory. -D as there.
//
// Warps come in groups of four, which multiply with the same tokens (matmul_crowd.cuh).
#pragma once
#include "cluster.cuh"
#include "matmul_crowd.cuh"
#include "matmul_epilogue.cuh"

#if VP_ARCH == 900
namespace voltapile {

constexpr int CLASSES = SPLIT;
constexpr int ROOM = 8 * PASSES, TOKENS = ROOM / CLASSES;  // of all blocks; whose sums one adds
static_assert(CLASSES == WARPS && ROOM % CLASSES == 0 && CREW % GROUP_WARPS == 0);

struct Launch {
  Matrix matrices[3];
  const float* x;
  int k, first_token, tokens, depth, boxes;  // tokens: of this turn
  int crew, owners;                          // warps of a block; those that ever have a tile
  int rank;                                  // of the block, and its class
  Epilogue kind;

  __device__ __forceinline__ bool is_glu() const { return kind >= SILU; }
};

// Tile `index` of the matrices in `mask`. A gate's and its up's tile are neighbours.
struct Place {
  Matrix matrix;
  int row;  // its first

  __device__ __forceinline__ Place(const Launch& all, unsigned mask, int index) {
    if (all.is_glu()) {
      matrix = all.matrices[0];
      matrix.weights = index & 1 ? all.matrices[1].weights : matrix.weights;
      row = 16 * (index >> 1);
      return;
    }
#pragma unroll
    for (int m = 0; m < 3; ++m) {
      const int tiles = mask >> m & 1 ? all.matrices[m].rows / 16 : 0;
      if (index >= 0 && index < tiles) matrix = all.matrices[m], row = 16 * index;
      index -= tiles;
    }
  }
  __device__ __forceinline__ const std::uint8_t* begin(int row_bytes) const {
    return matrix.weights + static_cast<long long>(row) * row_bytes;
  }
};

// A cluster's tiles, and what divides by the warps of a block and by the chunks of a class.
struct Share {
  int begin, end;
  unsigned by_crew, by_most;

  // n: small enough, as the launcher knows. by: 2^20 over the divisor, rounded up.
  static __device__ __forceinline__ int quotient(int n, unsigned by) {
    return static_cast<int>(static_cast<unsigned>(n) * by >> 20);
  }
};

template <class F>
struct CrewMemory {
  using M = ChunkMemory<F>;
  using C = Codec<F>;
  using Staged = typename CrowdTokens<F>::Staged;
  static constexpr int COLUMNS = 32 * C::GROUPS;
  static constexpr int CHUNK = Dense<F>::SIZE;
  static constexpr int SCALES = M::HAS_SCALES ? M::SCALES : 0;
  static __device__ constexpr int slot() {  // of a chunk's tokens
    return (Staged::PER_TOKEN * ROOM + 15) / 16 * 16;
  }
  static constexpr int SLOT = slot();
};

// What the warps of a block have to do: tiles from begin to end, a round of `crew` warps after the
// other, each with all `slots` chunks of the class. If so few are left for the last round that
// there is a group of warps for each of their chunks (`most`, in any class), groups take a chunk
// each.
struct Work {
  int crew, slots, warp, rounds;
  int own_rounds, busy_rounds;  // in which this warp has a tile; in which any of its group has one
  int first_tile, last_tile;    // of this warp
  int parts, part;              // of the last round's tiles, and which of them this warp takes

  __device__ __forceinline__ Work(int crew, const Share& share, int slots, int most, int warp)
      : crew(crew), slots(slots), warp(warp), first_tile(share.begin + warp) {
    const int count = share.end - share.begin, group = warp / GROUP_WARPS;
    rounds = Share::quotient(count + crew - 1, share.by_crew);
    const int before = (rounds - 1) * crew, left = count - before;
    const int groups = (left + GROUP_WARPS - 1) / GROUP_WARPS;
    parts = left < crew && GROUP_WARPS * groups * most <= crew ? most : 1;
    const int mate = parts > 1 ? Share::quotient(group, share.by_most) : group;
    part = group - mate * parts;
    if (parts == 1) part = 0;
    const int own = warp % GROUP_WARPS, last = share.begin + before + GROUP_WARPS * mate;
    last_tile = last + own;
    own_rounds = rounds - (last + own >= share.end);
    busy_rounds = rounds - (last >= share.end);
  }
  __device__ __forceinline__ bool shares(int round) const {
    return parts > 1 && round == rounds - 1;
  }
  __device__ __forceinline__ int tile(int round) const {
    return shares(round) ? last_tile : first_tile + round * crew;
  }
  // Chunks of a round's tile.
  __device__ __forceinline__ int from(int round) const { return shares(round) ? part : 0; }
  __device__ __forceinline__ int to(int round) const {
    return shares(round) ? min(part + 1, slots) : slots;
  }
};

// A warp's ring of chunks, each with a bell, and the place that is next.
template <class F>
struct Ring {
  static constexpr int PLACE = CrewMemory<F>::CHUNK;
  std::uint8_t* memory;
  int own;  // where the warp's places begin
  Bell* bells;
  int depth, place = 0, times = 0;  // that all places were used

  __device__ __forceinline__ int here() const { return own + place * PLACE; }
  __device__ __forceinline__ std::uint8_t* behind() const { return memory + own + depth * PLACE; }
  __device__ __forceinline__ void await_here() const { await_own(bells + place, ~times & 1); }
  __device__ __forceinline__ void next() {
    if (++place < depth) return;
    place = 0, ++times;
  }
};

// The next chunk of a warp that is to be fetched.
template <class F>
struct Fetch {
  using M = CrewMemory<F>;
  const Launch& all;
  const Work& work;
  unsigned mask;
  int row_bytes, round = 0, left;
  const std::uint8_t* from;

  __device__ __forceinline__ Fetch(const Launch& all, const Work& work, unsigned mask,
                                   int row_bytes)
      : all(all), work(work), mask(mask), row_bytes(row_bytes) {
    find();
  }
  // To a place of the ring that nobody reads, but has read if it is filled again, if there is a
  // chunk.
  __device__ __forceinline__ void begin(const Ring<F>& ring, int place, bool is_again) {
    if (left <= 0) return;
    if (is_elected()) {
      std::uint8_t* to = ring.memory + ring.own + place * Ring<F>::PLACE;
      if (is_again) order_copies();
      expect(ring.bells + place, M::CHUNK);
      copy_whole(to, from, M::CHUNK, ring.bells + place);
    }
    from += CLASSES * M::CHUNK;
    if (--left > 0) return;
    ++round;
    find();
  }

 private:
  __device__ __forceinline__ void find() {
    left = 0;
    if (round >= work.own_rounds) return;
    const int first = work.from(round);
    left = work.to(round) - first;
    from = Place(all, mask, work.tile(round)).begin(row_bytes) +
           (all.rank + CLASSES * first) * M::CHUNK;
  }
};

constexpr int LETTER = 16 * CLASSES * TOKENS;  // floats, for a tile or a part of one
constexpr int LETTER_BYTES = LETTER * sizeof(float);

// Where things are in the block's shared memory.
template <class F>
struct Memory {
  using M = CrewMemory<F>;
  std::uint8_t* tokens;  // first, for they want a multiple of 1024 bytes
  Descriptor first;
  Bell* bells;  // [2][CREW] of sums, [crew][depth] of rings, then one of each chunk's tokens
  int box_floats, ring_bells;
  float* boxes;
  std::uint8_t* rings;

  // most: chunks of a class.
  __device__ __forceinline__ Memory(const Launch& all, std::uint8_t* shared, int most)
      : tokens(shared),
        first(Descriptor(shared).kept()),
        bells(reinterpret_cast<Bell*>(shared + most * M::SLOT)),
        box_floats(all.owners * LETTER),
        ring_bells(all.crew * all.depth) {
    const int count = ring_bells + most;
    boxes = reinterpret_cast<float*>(chunk_bell(most + (count & 1)));
    rings = reinterpret_cast<std::uint8_t*>(box(all.boxes));
  }
  static __device__ __forceinline__ int ring_bytes(const Launch& all) {
    return all.depth * Ring<F>::PLACE + M::SCALES;
  }
  // Who never has a tile reads tokens instead, those that it has awaited first: what comes to
  // others' rings may be on its way. Where a ring begins is not computed again.
  __device__ __forceinline__ Ring<F> ring(const Launch& all, int warp) const {
    static_assert(!CrowdTokens<F>::IS_BLOCK || Ring<F>::PLACE <= M::SLOT);
    const int at = warp < all.owners ? warp * ring_bytes(all) : static_cast<int>(tokens - rings);
    return {rings, __shfl_sync(~0u, at, 0), bells + 2 * CREW + warp * all.depth, all.depth};
  }
  __device__ __forceinline__ float* box(int i) const { return boxes + i * box_floats; }
  __device__ __forceinline__ Bell* bells_of(int box) const { return bells + box * CREW; }
  __device__ __forceinline__ Bell* chunk_bell(int n) const {
    return bells + 2 * CREW + ring_bells + n;
  }
  // The n-th chunk's tokens: as if there were ROOM; sums of those that are not there are nobody's.
  __device__ __forceinline__ typename M::Staged slot(int n) const {
    return typename M::Staged(tokens + n * M::SLOT, ROOM);
  }
  __device__ __forceinline__ Descriptor pieces(int n) const { return first.after(n * M::SLOT); }
};

}  // namespace voltapile
#endif
