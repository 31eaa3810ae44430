// The product of many generated rows from sm_90 on: each weight is unpacked once for all of them.
//
// Columns are cut into CLASSES, chunk c into class c % CLASSES, as matmul_rows.cu deals them to
// warps. A cluster has a block for each class and takes some tiles of 16 rows of weights: a block
// keeps its class's part of all tokens in shared memory and streams its part of the weights, each
// of its CREW warps a tile at a time, through a ring of `depth` chunks. The sums of a tile are sent
// to the blocks that own the tokens, TOKENS each, where those of all classes are added in their
// order. So bits are those of matmul_rows.cu.
//
// grid: (CLASSES * clusters, turns of `room` tokens). Clusters from first_other on take the matrices
// whose bit in `others` is set. boxes: 2 where a tile's sums may arrive while those of the one before
// are read, else 1. -D FORMAT, OTHER; SPLIT and WARPS, both CLASSES; CREW; MANY 0, 2 or 4;
// TILES 1.
#include "cluster.cuh"
#include "grid.cuh"
#include "matmul_chunk.cuh"
#include "matmul_epilogue.cuh"

using namespace voltapile;

#if VP_ARCH >= 900
constexpr int CLASSES = SPLIT;
constexpr int TOKENS = 8 * PASSES / CLASSES;  // whose sums a block adds
static_assert(CLASSES == WARPS && 8 * PASSES % CLASSES == 0 && CREW % 2 == 0);

struct Launch {
  Matrix matrices[3];
  const float* x;
  int k, first_token, tokens, depth, boxes;  // tokens: of this turn
  int rank;                                  // of the block, and its class
  Epilogue kind;

  __device__ __forceinline__ bool is_glu() const { return kind >= SILU; }
};

// Tile `index` of the matrices in `mask`. A gate's and its up's tile are neighbours.
struct Place {
  Matrix matrix;
  int row;  // the first that is meant

  __device__ __forceinline__ Place(const Launch& all, unsigned mask, int index) {
    if (all.is_glu()) {
      matrix = all.matrices[0];
      matrix.weights = index & 1 ? all.matrices[1].weights : matrix.weights;
      row = 16 * (index >> 1);
      return;
    }
#pragma unroll
    for (int m = 0; m < 3; ++m) {
      const int tiles = mask >> m & 1 ? (all.matrices[m].rows + 15) / 16 : 0;
      if (index >= 0 && index < tiles) matrix = all.matrices[m], row = 16 * index;
      index -= tiles;
    }
  }
  __device__ __forceinline__ int first_row() const { return first_row_of(row, matrix.rows); }
  __device__ __forceinline__ const std::uint8_t* begin(int row_bytes) const {
    return matrix.weights + static_cast<long long>(first_row()) * row_bytes;
  }
};

__device__ __forceinline__ int tiles_of(const Launch& all, unsigned mask) {
  if (all.is_glu()) return 2 * ((all.matrices[0].rows + 15) / 16);
  int tiles = 0;
#pragma unroll
  for (int m = 0; m < 3; ++m) tiles += mask >> m & 1 ? (all.matrices[m].rows + 15) / 16 : 0;
  return tiles;
}

template <class F>
struct CrewMemory {
  using M = ChunkMemory<F>;
  using C = Codec<F>;
  using Staged = typename M::Staged;
  static constexpr int BYTES = C::BYTES, COLUMNS = 32 * C::GROUPS;
  // Rows start at multiples of 16 bytes where chunks do: the launcher sees to it.
  using Raw = Stage<BYTES, BYTES % 16 == 0 ? 16 : C::ALIGN>;
  static constexpr int SCALES = M::HAS_SCALES ? M::SCALES : 0;

  static constexpr int TABLE = 32 * Raw::TURNS;  // of every lane's vectors, for all warps

  static __device__ __forceinline__ int slot_bytes(int room) {
    return (Staged::PER_TOKEN * room + 15) / 16 * 16;
  }
  static __device__ __forceinline__ void begin(std::uint8_t* place, const std::uint8_t* first,
                                               const int* table, int row_bytes, int lane) {
    Raw raw(row_bytes, 15, lane);
#pragma unroll
    for (int turn = 0; turn < Raw::TURNS; ++turn) raw.offset[turn] = table[32 * turn + lane];
    raw.begin_whole(place, first);
  }
  static __device__ __forceinline__ void make_table(int* table, int row_bytes, int lane) {
    const Raw raw(row_bytes, 15, lane);
#pragma unroll
    for (int turn = 0; turn < Raw::TURNS; ++turn) table[32 * turn + lane] = raw.offset[turn];
  }
};

// The next chunk of a warp that is to be fetched: the n-th of its class, of a tile.
template <class F>
struct Fetch {
  using M = CrewMemory<F>;
  const Launch& all;
  unsigned mask;
  int tile, end, row_bytes, slots, n = 0;
  const std::uint8_t* first;  // of the tile and class

  __device__ __forceinline__ Fetch(const Launch& all, unsigned mask, int tile, int end,
                                   int row_bytes, int slots)
      : all(all), mask(mask), tile(slots ? tile : end), end(end), row_bytes(row_bytes),
        slots(slots) {
    find();
  }
  // To a place of the ring, if there is a chunk.
  __device__ __forceinline__ void begin(std::uint8_t* place, const int* table, int lane) {
    if (tile < end) {
      M::begin(place, first + n * CLASSES * M::BYTES, table, row_bytes, lane);
      if (++n == slots) {
        n = 0;
        tile += CREW;
        find();
      }
    }
    commit_copies();
  }

 private:
  __device__ __forceinline__ void find() {
    if (tile < end) first = Place(all, mask, tile).begin(row_bytes) + all.rank * M::BYTES;
  }
};

__device__ __forceinline__ const float* row_of(const Launch& all, int token) {
  return all.x + static_cast<long long>(all.first_token + token) * all.k;
}

// All tokens of the block's chunks, by all warps. What comes from far away is asked for SEVERAL at a
// time.
template <class F>
__device__ __forceinline__ void stage_slots(const Launch& all, int slots, std::uint8_t* memory,
                                            int warp, int lane) {
  using M = CrewMemory<F>;
  using Staged = typename M::Staged;
  const int slot_bytes = M::slot_bytes(all.tokens), count = slots * all.tokens;
  if constexpr (Order<F>::IS_BLOCK) {
    constexpr int SEVERAL = 4;
    for (int start = warp; start < count; start += SEVERAL * CREW) {
      float4 a[SEVERAL], b[SEVERAL];
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        const int at = start + i * CREW;
        if (at >= count) break;
        const int slot = at / all.tokens, token = at % all.tokens;
        Staged::load_whole(row_of(all, token),
                           (all.rank + CLASSES * slot) * M::COLUMNS, lane, a[i], b[i]);
      }
#pragma unroll
      for (int i = 0; i < SEVERAL; ++i) {
        const int at = start + i * CREW;
        if (at >= count) break;
        const int slot = at / all.tokens, token = at % all.tokens;
        Staged(memory + slot * slot_bytes, all.tokens).put(token, a[i], b[i], lane);
      }
    }
  } else {
    for (int at = warp; at < count; at += CREW) {
      const int slot = at / all.tokens, token = at % all.tokens;
      Staged staged(memory + slot * slot_bytes, all.tokens);
      staged.units += 4 * token, staged.sums += token, staged.scales += token;
      staged.stage(row_of(all, token), 1, all.k,
                   (all.rank + CLASSES * slot) * M::COLUMNS, lane);
    }
  }
}

// Sums on their way to their owner: [warp, of which each has a tile][class][token][8] pairs of rows.
__device__ __forceinline__ int pair_at(int warp, int which, int token, int pair) {
  return ((warp * CLASSES + which) * TOKENS + token) * 8 + pair;
}
constexpr int BOX = CREW * CLASSES * TOKENS * 8;
constexpr int LETTERS = CLASSES * TOKENS * 8 * sizeof(float2);  // bytes for a warp

// To all blocks: what they own of this warp's sums.
__device__ __forceinline__ void send_sums(const float (&total)[PASSES][Tile::VALUES], float2* box,
                                          Bell* bell, int warp, int which, const Tile& tile) {
#pragma unroll
  for (int i = 0; i < 2 * PASSES; ++i) {
    const int token = 8 * (i / 2) + tile.sum_token(i % 2);
    send({total[i / 2][i % 2], total[i / 2][2 + i % 2]},
         box + pair_at(warp, which, token % TOKENS, tile.lane >> 2), bell, token / TOKENS);
  }
}

// What a lane has to do with the end of its warp's tile: one token's sums of two rows. Of a gate and
// its up, the two warps take a row each.
struct Finish {
  const Launch& all;
  int pair, own, row;
  bool is_there[2];
  float* out;
  const float *bias, *up_bias;
  float before[2] = {};

  __device__ __forceinline__ Finish(const Launch& all, unsigned mask, int tile, int lane)
      : all(all), pair(lane & 7), own(lane >> 3) {
    const Place place(all, mask, tile);
    const int token = all.rank * TOKENS + own, rows = place.matrix.rows;
    const Tile held{4 * pair};
    row = place.first_row() + held.sum_row(0);
    bias = place.matrix.bias, up_bias = all.matrices[1].bias;
    out = place.matrix.out + static_cast<long long>(all.first_token + token) * rows + row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_there[i] = own < TOKENS && token < all.tokens && row + 8 * i >= place.row &&
                    row + 8 * i < rows && (!all.is_glu() || (tile & 1) == i);
      if (is_there[i] && all.kind == ADD) before[i] = out[8 * i];
    }
  }
  __device__ __forceinline__ float2 sum_of(const float2* box, int warp) const {
    float2 sum{0, 0};
#pragma unroll
    for (int which = 0; which < CLASSES; ++which) {
      const float2 part = box[pair_at(warp, which, own, pair)];
      sum.x += part.x;
      sum.y += part.y;
    }
    return sum;
  }
  __device__ __forceinline__ void write(const float2* box, int warp) const {
    if (!is_there[0] && !is_there[1]) return;
    const float2 sums = sum_of(box, all.is_glu() ? warp & ~1 : warp);
    const float2 ups = all.is_glu() ? sum_of(box, warp | 1) : sums;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!is_there[i]) continue;
      float value = i ? sums.y : sums.x;
      if (bias != nullptr) value += bias[row + 8 * i];
      if (all.is_glu()) {
        float up = i ? ups.y : ups.x;
        if (up_bias != nullptr) up += up_bias[row + 8 * i];
        value = activated(value, all.kind) * up;
      }
      out[8 * i] = all.kind == ADD ? before[i] + value : value;
    }
  }
};

template <int PENDING>
__device__ __forceinline__ void wait_for_chunk(int depth) {
  if (depth > PENDING + 1) {
    if constexpr (PENDING < 3) return wait_for_chunk<PENDING + 1>(depth);
  }
  wait_for_copies<PENDING>();
}

// Where things are in the block's shared memory.
template <class F>
struct Memory {
  using M = CrewMemory<F>;
  Bell* bells;  // [boxes][CREW]
  int* table;
  float2* boxes;
  std::uint8_t *ring, *tokens;

  __device__ __forceinline__ Memory(const Launch& all, std::uint8_t* shared, int warp) {
    bells = reinterpret_cast<Bell*>(shared);
    table = reinterpret_cast<int*>(bells + 2 * CREW);
    boxes = reinterpret_cast<float2*>(table + M::TABLE);
    std::uint8_t* rings = reinterpret_cast<std::uint8_t*>(boxes + all.boxes * BOX);
    const int ring_bytes = all.depth * M::Raw::SIZE + M::SCALES;
    ring = rings + warp * ring_bytes, tokens = rings + CREW * ring_bytes;
  }
};

// The end of a warp's n-th tile. With two boxes one may be sent to while the other is read: who has
// got all sums of a tile knows that all blocks have read those before it.
template <class F>
__device__ __forceinline__ void finish_tile(const Launch& all, const Memory<F>& memory,
                                            unsigned mask, int tile, int end, int n, int warp,
                                            int lane) {
  const Finish finish(all, mask, tile, lane);
  const int box = all.boxes > 1 ? n & 1 : 0, uses = all.boxes > 1 ? n >> 1 : n;
  Bell* bells = memory.bells + box * CREW;
  await(bells + warp, ~uses & 1);
  if (all.is_glu()) await(bells + (warp ^ 1), ~uses & 1);
  finish.write(memory.boxes + box * BOX, warp);
  if (lane == 0 && tile + all.boxes * CREW < end) expect(bells + warp, LETTERS);
  __syncwarp();
}

// Tiles of the cluster from begin to end, of which each warp takes every CREW-th.
template <class F>
__device__ __forceinline__ void multiply_tiles(const Launch& all, unsigned mask, int begin, int end,
                                               std::uint8_t* shared) {
  using M = CrewMemory<F>;
  using Raw = typename M::Raw;
  // The same for all lanes, as the compiler is to know.
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int row_bytes = all.k / F::length * F::bytes, slot_bytes = M::slot_bytes(all.tokens);
  const int slots = (all.k / M::COLUMNS - all.rank + CLASSES - 1) / CLASSES;
  const Memory<F> memory(all, shared, warp);

  if (warp == 0) M::make_table(memory.table, row_bytes, lane);
  if (lane < all.boxes) {
    Bell* bell = memory.bells + lane * CREW + warp;
    make_bell(bell);
    if (begin + warp + lane * CREW < end) expect(bell, LETTERS);
  }
  __syncthreads();
  cluster_arrive();
  Fetch<F> fetch(all, mask, begin + warp, end, row_bytes, slots);
  for (int i = 0; i < all.depth; ++i) fetch.begin(memory.ring + i * Raw::SIZE, memory.table, lane);
  grid_wait();
  stage_slots<F>(all, slots, memory.tokens, warp, lane);
  __syncthreads();
  cluster_wait();  // all blocks have begun

  int place = 0, turn = 0, tile = begin + warp;
  for (int first = begin; first < end; first += CREW, tile += CREW, ++turn) {
    const bool is_in = tile < end;
    const std::uint8_t* weights = nullptr;
    if (is_in && Raw::SLACK > 0)
      weights = Place(all, mask, tile).begin(row_bytes) + all.rank * M::BYTES;
    float total[PASSES][Tile::VALUES] = {};
#pragma unroll 1
    for (int n = 0; is_in && n < slots; ++n) {
      wait_for_chunk<0>(all.depth);
      __syncwarp();
      float part[PASSES][Tile::VALUES];
      multiply_any<F>(memory.ring, place * Raw::SIZE, memory.ring + all.depth * Raw::SIZE,
                      weights + n * CLASSES * M::BYTES, Raw(row_bytes, 15, lane),
                      typename M::Staged(memory.tokens + n * slot_bytes, all.tokens), Tile{lane},
                      part);
      __syncwarp();  // what was read may be overwritten
      fetch.begin(memory.ring + place * Raw::SIZE, memory.table, lane);
      place = place + 1 < all.depth ? place + 1 : 0;
#pragma unroll
      for (int i = 0; i < PASSES * Tile::VALUES; ++i) {
        const int pass = i / Tile::VALUES, e = i % Tile::VALUES;
        total[pass][e] = total[pass][e] + part[pass][e];
      }
    }
    if (turn > 0) {
      finish_tile(all, memory, mask, tile - CREW, end, turn - 1, warp, lane);
      if (all.boxes == 1) cluster_arrive(), cluster_wait();  // all have read
    }
    const int box = all.boxes > 1 ? turn & 1 : 0;
    if (is_in)
      send_sums(total, memory.boxes + box * BOX, memory.bells + box * CREW + warp, warp, all.rank,
                Tile{lane});
  }
  if (turn > 0 && tile - CREW < end)
    finish_tile(all, memory, mask, tile - CREW, end, turn - 1, warp, lane);
}
#endif

extern "C" __global__ void VP_CLUSTER __launch_bounds__(32 * CREW)
    matmul_cluster(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                   const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                   const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                   const float* x, int k, int tokens, int room, int epilogue, int others,
                   int first_other, int depth, int boxes) {
#if VP_ARCH >= 900
  extern __shared__ __align__(128) std::uint8_t shared[];
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
                   static_cast<int>(blockIdx.x % CLASSES),
                   static_cast<Epilogue>(epilogue)};
  constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;
  const int cluster = blockIdx.x / CLASSES;
  const bool is_other = !IS_SAME && cluster >= first_other;
  const unsigned mask = IS_SAME ? 7 : is_other ? others : ~others & 7;
  // A gate and its up stay together.
  const int unit = all.is_glu() ? 2 : 1, units = tiles_of(all, mask) / unit;
  const int clusters = IS_SAME      ? gridDim.x / CLASSES
                       : is_other ? gridDim.x / CLASSES - first_other
                                  : first_other;
  const int own = cluster - (is_other ? first_other : 0);
  const int begin = static_cast<long long>(units) * own / clusters * unit;
  const int end = static_cast<long long>(units) * (own + 1) / clusters * unit;
  std::uint8_t* memory = own_memory(shared);
  if (is_other)
    multiply_tiles<formats::OTHER>(all, mask, begin, end, memory);
  else
    multiply_tiles<formats::FORMAT>(all, mask, begin, end, memory);
#endif
}
