// The product of many generated rows, for compute capability 9.0: each weight is unpacked once for
// all of them.
//
// Columns are cut into CLASSES, chunk c into class c % CLASSES, as matmul_rows.cu deals them to
// warps. A cluster has a block for each class and takes some tiles of 16 rows of weights: a block
// keeps its class's part of all tokens in shared memory and streams its part of the weights, each
// of its warps a tile at a time, through a ring of `depth` chunks. The sums of a tile are sent
// to the blocks that own the tokens, TOKENS each, where those of all classes are added in their
// order. So bits are those of matmul_rows.cu.
//
// grid: (CLASSES * clusters, turns of `room` tokens). Clusters from first_other on take the
// matrices whose bit in `others` is set. A cluster takes `units` of a format, and the first `more`
// another one: a tile, or a gate's and its up's. boxes: 2 where a tile's sums may arrive while
// those of the one before are read, else 1. owners: warps that ever have a tile. by_crew, by_most:
// matmul_crew.cuh. records: of each turn, of each chunk in CrowdOrder. -D FORMAT, OTHER;
// SPLIT and WARPS, both CLASSES; CREW, the most warps, of which there are a multiple of four; MANY
// 2 or 4; TILES 1.
#include "grid.cuh"
#include "matmul_crew.cuh"
#include "matmul_letters.cuh"

using namespace voltapile;

#if VP_ARCH == 900
// Records of the block's chunks are copied, a chunk at a time, by the first warp; the chunk's bell
// tells. Somebody must wait for each bell, since a block must not end before.
template <class F>
__device__ __forceinline__ void copy_tokens(const Launch& all, const std::uint8_t* records,
                                            const Memory<F>& memory, int slots) {
  constexpr int SIZE = CrewMemory<F>::SLOT;
  if (!is_elected()) return;
  int chunk = blockIdx.y * (all.k / CrewMemory<F>::COLUMNS) + all.rank;
#pragma unroll 1
  for (int n = 0; n < slots; ++n, chunk += CLASSES) {
    expect(memory.chunk_bell(n), SIZE);
    copy_whole(memory.slot(n).memory, records + static_cast<long long>(chunk) * SIZE, SIZE,
               memory.chunk_bell(n));
  }
}

// Where there are no records, all warps make what would have been copied. What comes from far away
// is asked for SEVERAL at a time.
template <class F>
__device__ __forceinline__ void stage_tokens(const Launch& all, const Memory<F>& memory, int slots,
                                             int warp, int lane) {
  using M = CrewMemory<F>;
  using Staged = typename M::Staged;
  const int count = slots * ROOM;
  const float* x = all.x + static_cast<long long>(all.first_token) * all.k;
  if constexpr (Order<F>::IS_BLOCK) {
    constexpr int SEVERAL = 4;
    for (int start = warp; start < count; start += SEVERAL * all.crew) {
      float4 a[SEVERAL], b[SEVERAL];
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        const int at = min(start + i * all.crew, count - 1), token = min(at % ROOM, all.tokens - 1);
        const int chunk = all.rank + CLASSES * (at / ROOM);
        Staged::load_whole(x, token * all.k + chunk * M::COLUMNS, lane, a[i], b[i]);
      }
#pragma unroll 1
      for (int at = start; at < min(start + SEVERAL * all.crew, count); at += all.crew) {
        if (at % ROOM < all.tokens) memory.slot(at / ROOM).put(at % ROOM, a[0], b[0], lane);
#pragma unroll
        for (int i = 1; i < SEVERAL; ++i) a[i - 1] = a[i], b[i - 1] = b[i];
      }
    }
    show_tokens();
  } else {
    for (int at = warp; at < count; at += all.crew) {
      const int token = at % ROOM;
      if (token >= all.tokens) continue;
      Staged staged = memory.slot(at / ROOM);
      staged.units += 4 * token, staged.sums += token, staged.scales += token;
      staged.stage(x + static_cast<long long>(token) * all.k, 1, all.k,
                   (all.rank + CLASSES * (at / ROOM)) * M::COLUMNS, lane);
    }
  }
  __syncthreads();
}

// A warp's chunks of a tile; what is fetched meanwhile goes to the places that become free. Who has
// no tile stays at one place and multiplies whatever lies there. awaited: chunks whose tokens may
// still be on their way.
template <class F>
__device__ __forceinline__ void multiply_chunks(const Memory<F>& memory, const Work& work,
                                                int round, Fetch<F>& fetch, Ring<F>& ring,
                                                int awaited, const Tile& tile, Sums& total) {
  const bool is_in = round < work.own_rounds;
#pragma unroll 1
  for (int n = work.from(round); n < work.to(round); ++n) {
    if (n < awaited) await_own(memory.chunk_bell(n), true);
    if (is_in) ring.await_here();
    add_chunk<F>(ring.memory, ring.here(), ring.behind(), memory.slot(n), memory.pieces(n), tile,
                 total);
    __syncwarp();  // what was read may be overwritten
    fetch.begin(ring, ring.place, true);
    if (is_in) ring.next();
  }
}

// The cluster's share of the tiles.
template <class F>
__device__ __forceinline__ void multiply_tiles(const Launch& all, const std::uint8_t* records,
                                               unsigned mask, const Share& share,
                                               std::uint8_t* shared) {
  using M = CrewMemory<F>;
  // A lane's number is not asked for again, and a warp's is the same for all lanes, as the compiler
  // is to know.
  const int lane = __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int row_bytes = all.k / F::length * F::bytes, chunks = all.k / M::COLUMNS;
  const int most = (chunks + CLASSES - 1) / CLASSES;
  const Work work(all.crew, share, (chunks - all.rank + CLASSES - 1) / CLASSES, most, warp);
  const Memory<F> memory(all, shared, most);

  Ring<F> ring = memory.ring(all, warp);
  // By one thread: code for some lanes is gone through by warps of which none is meant, and then
  // racecheck (2026.4) takes them to make bells, too.
  if (is_elected())
#pragma unroll 1
    for (int i = 0; i < all.depth; ++i) make_bell(ring.bells + i);
  tell_bells();
  __syncwarp();
  Fetch<F> fetch(all, work, mask, row_bytes);
  for (int i = 0; i < all.depth; ++i) fetch.begin(ring, i, false);
  if (is_elected()) {
#pragma unroll 1
    for (int i = 0; i < all.boxes; ++i) {
      Bell* bell = memory.bells_of(i) + warp;
      make_bell(bell);
      if (i < work.own_rounds) expect(bell, LETTER_BYTES);
    }
#pragma unroll 1
    for (int i = 0; warp == 0 && i < work.slots; ++i) make_bell(memory.chunk_bell(i));
  }
  __syncthreads();
  cluster_arrive();
  grid_wait();
  const bool is_copied = Order<F>::IS_BLOCK && records != nullptr;
  const int copied = __shfl_sync(~0u, is_copied ? work.slots : 0, 0);
  if (!is_copied) {
    stage_tokens<F>(all, memory, work.slots, warp, lane);
  } else if constexpr (Order<F>::IS_BLOCK) {
    if (warp == 0 && work.rounds > 0) copy_tokens<F>(all, records, memory, work.slots);
  }
  const Desk desk(all, lane);
  for (int round = 0; round <= work.rounds; ++round) {
    Sums total = {};
    const bool is_over = round == work.rounds;
    if (round < (Order<F>::IS_BLOCK ? work.busy_rounds : work.own_rounds))
      multiply_chunks(memory, work, round, fetch, ring, round == 0 ? copied : 0, Tile{lane}, total);
    if (round == 0) cluster_wait();  // nobody is sent anything who has not begun
    if (round > 0) {
      // Whose bells are awaited by another warp must have seen them ring for the rounds before.
      if (is_over && work.shares(round - 1)) __syncthreads();
      finish_tile(all, work, memory, mask, round - 1, desk, lane);
      if (!is_over && all.boxes == 1) cluster_arrive(), cluster_wait();  // all have read
    }
    const int box = all.boxes > 1 ? round & 1 : 0;
    if (round < work.own_rounds)
      send_sums(total, memory.box(box), memory.bells_of(box) + warp, warp, all.rank, Tile{lane});
  }
}
#endif

extern "C" __global__ void VP_CLUSTER __launch_bounds__(32 * CREW, 1)
    matmul_cluster(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                   const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                   const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                   const float* x, const std::uint8_t* records, const std::uint8_t* other_records,
                   int k, int tokens, int room, int epilogue, int others, int depth, int boxes,
                   int owners, int by_crew, int by_most, int units, int more, int first_other,
                   int other_units, int other_more) {
#if VP_ARCH == 900
  extern __shared__ __align__(1024) std::uint8_t shared[];
  grid_launch();
  const int first = blockIdx.y * room;
  const Launch all{{{weights0, bias0, out0, rows0},
                    {weights1, bias1, out1, rows1},
                    {weights2, bias2, out2, rows2}},
                   x,
                   k,
                   first,
                   min(room, tokens - first),
                   depth,
                   boxes,
                   static_cast<int>(blockDim.x / 32),
                   owners,
                   static_cast<int>(blockIdx.x % CLASSES),
                   static_cast<Epilogue>(epilogue)};
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int cluster = blockIdx.x / CLASSES;
  // A gate and its up stay together.
  const int tiles = all.is_glu() ? 2 : 1;
  const auto share = [&](int own, int count, int extra) -> Share {
    const int begin = (own * count + min(own, extra)) * tiles;
    return {begin, begin + (count + (own < extra)) * tiles, static_cast<unsigned>(by_crew),
            static_cast<unsigned>(by_most)};
  };
  std::uint8_t* memory = own_memory(shared);
  if (!IS_SAME && cluster >= first_other)
    multiply_tiles<formats::OTHER>(all, other_records, others,
                                   share(cluster - first_other, other_units, other_more), memory);
  else
    multiply_tiles<formats::FORMAT>(all, records, IS_SAME ? 7 : ~others & 7,
                                    share(cluster, units, more), memory);
#endif
}
