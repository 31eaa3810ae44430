// The row-invariant product: any number of tokens, each with the bits that it has alone.
//
// A block takes TILES tiles of 16 rows of weights and PASSES * 8 tokens. Its warps share the
// columns: warp w takes chunks w, w + WARPS, ...; their sums meet in shared memory, in the order of
// the warps. Sums of a group are made afresh on the tensor core, scaled and added in float32.
// Nothing that decides the order depends on the tokens. -D: FORMAT, and OTHER, the format of the
// matrices whose bit in `others` is set; WARPS, TILES (a gate and its up share a block), MANY;
// LOOPS: blocks stay, take every gridDim.x-th tile and keep `slots` chunks of tokens. A matrix
// whose bit in `tiled` is set lies by tiles.
#include "matmul_chunk.cuh"
#include "matmul_direct.cuh"
#include "matmul_epilogue.cuh"

using namespace voltapile;

// Registers for two blocks of a multiprocessor are too few where much is summed at once.
constexpr int MIN_BLOCKS =
    VP_ARCH >= 800 && PASSES == 1 && Codec<formats::FORMAT>::PLANES == 1 ? 2 : 1;
constexpr bool IS_SAME = Equal<formats::FORMAT, formats::OTHER>::value;

// All chunks of this warp. memory: the warp's own.
template <class F>
__device__ __forceinline__ void multiply_staged(const Job& job, std::uint8_t* memory, int warp,
                                                const Tile& tile,
                                                float (&total)[TILES][PASSES][Tile::VALUES]) {
  using M = ChunkMemory<F>;
  using Raw = typename M::Raw;
  constexpr int STAGES = M::STAGES, BYTES = Codec<F>::BYTES, COLUMNS = 32 * Codec<F>::GROUPS;
  constexpr int AHEAD = IS_ASYNC ? STAGES - 1 : 1;
  const int chunks = (job.k + COLUMNS - 1) / COLUMNS;
  const int row_bytes = job.k / F::length * F::bytes;
  const Lay lay = lay_of(HAS_TILES<F> && job.is_tiled, BYTES, row_bytes);
  typename M::Staged staged(memory + M::FIXED, job.room);
  Raw raw(lay.row, job.last_row, tile.lane);

  // Step s of this warp is tile s % TILES of its chunk s / TILES. Bytes go to the place `slot`.
  const auto fetch = [&](int step, int slot) {
    const int chunk = warp + step / TILES * WARPS, t = step % TILES;
    if (chunk < chunks) {
      const std::uint8_t* first = job.first_of(t) + chunk * lay.chunk;
      const int left = row_bytes - chunk * BYTES;
      if constexpr (IS_ASYNC)
        raw.begin(memory + slot * Raw::SIZE, first, left);
      else
        raw.load(first, left);
    }
    if constexpr (IS_ASYNC) commit_copies();
  };
  for (int step = 0; step < AHEAD; ++step) fetch(step, step);
  grid_wait();
  int slot = 0, step = 0;
  for (int chunk = warp; chunk < chunks; chunk += WARPS) {
    staged.stage(job.x, job.tokens, job.k, chunk * COLUMNS, tile.lane);
#pragma unroll 1
    for (int t = 0; t < TILES; ++t, ++step) {
      const int next = slot + AHEAD < STAGES ? slot + AHEAD : slot + AHEAD - STAGES;
      if constexpr (IS_ASYNC)
        wait_for_copies<AHEAD - 1>();
      else
        raw.store(memory + slot * Raw::SIZE);
      __syncwarp();
      fetch(step + AHEAD, next);
      const std::uint8_t* first = job.first_of(t) + chunk * lay.chunk;
      float part[PASSES][Tile::VALUES];
      multiply_any<F>(memory, slot * Raw::SIZE, memory + STAGES * Raw::SIZE, first, raw, staged,
                      tile, part);
#pragma unroll
      for (int i = 0; i < TILES * PASSES * Tile::VALUES; ++i) {
        const int pass = i / Tile::VALUES % PASSES, e = i % Tile::VALUES;
        float& sum = total[i / Tile::VALUES / PASSES][pass][e];
        sum = i / Tile::VALUES / PASSES == t ? sum + part[pass][e] : sum;
      }
      __syncwarp();  // what was read may be overwritten
      slot = slot + 1 < STAGES ? slot + 1 : 0;
    }
  }
}

template <class F>
__device__ __forceinline__ void multiply_all(const Job& job, std::uint8_t* memory, int warp,
                                             int slots, bool is_first, const Tile& tile,
                                             float (&total)[TILES][PASSES][Tile::VALUES]) {
  if constexpr (IS_DIRECT<F>)
    multiply_direct(job, memory + ChunkMemory<F>::FIXED, warp, LOOPS ? slots : 1, is_first, tile,
                                  total);
  else
    multiply_staged<F>(job, memory, warp, tile, total);
}

__device__ __forceinline__ int blocks_of(int rows) {
  return (rows + 16 * TILES - 1) / (16 * TILES);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    matmul_rows(const std::uint8_t* weights0, const float* bias0, float* out0, int rows0,
                const std::uint8_t* weights1, const float* bias1, float* out1, int rows1,
                const std::uint8_t* weights2, const float* bias2, float* out2, int rows2,
                const float* x, int k, int tokens, int room, int epilogue, int others, int tiled,
                int slots) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  grid_launch();
  const bool is_glu = epilogue >= SILU;
  constexpr int PAIRED = TILES > 1 ? TILES / 2 : 1;
  const int block_rows = 16 * (is_glu ? PAIRED : TILES);
  const int blocks = is_glu ? (rows0 + block_rows - 1) / block_rows
                            : blocks_of(rows0) + blocks_of(rows1) + blocks_of(rows2);
#pragma unroll 1
  for (int index = blockIdx.x; index < blocks || !LOOPS; index += gridDim.x) {
    const bool is_first = !LOOPS || slots == 1 || index == blockIdx.x;
    Matrix matrix{weights0, bias0, out0, rows0};
    int m = 0, block = index;
    if (!is_glu && block >= blocks_of(rows0)) {
      block -= blocks_of(rows0);
      m = block < blocks_of(rows1) ? 1 : 2;
      block -= m == 2 ? blocks_of(rows1) : 0;
      matrix = m == 1 ? Matrix{weights1, bias1, out1, rows1} : Matrix{weights2, bias2, out2, rows2};
    }
    const bool is_other = others >> m & 1;
    const long long row_bytes =
        is_other ? static_cast<long long>(k / formats::OTHER::length) * formats::OTHER::bytes
                 : static_cast<long long>(k / formats::FORMAT::length) * formats::FORMAT::bytes;
    const int first_row = block * block_rows, first_token = blockIdx.y * room;

    Job job;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int row = first_row_of(first_row + 16 * (is_glu ? t % PAIRED : t), matrix.rows);
      job.first[t] = (is_glu && t >= PAIRED ? weights1 : matrix.weights) + row * row_bytes;
    }
    job.is_tiled = tiled >> m & 1;
    job.last_row = min(15, matrix.rows - 1);
    job.x = x + static_cast<long long>(first_token) * k;
    job.k = k;
    job.tokens = min(room, tokens - first_token);
    job.room = room;

    // Known to be one number, branches need no code for lanes that go apart; but more registers.
    const int warp = PASSES > 1 ? threadIdx.x >> 5 : __shfl_sync(~0u, threadIdx.x >> 5, 0);
    const Tile tile{static_cast<int>(threadIdx.x & 31)};
    float total[TILES][PASSES][Tile::VALUES] = {};
    int stride;
    if (!IS_SAME && is_other) {
      stride = ChunkMemory<formats::OTHER>::bytes(room);
      multiply_all<formats::OTHER>(job, shared + warp * stride, warp, 1, true, tile, total);
    } else {
      stride = ChunkMemory<formats::FORMAT>::bytes(room);
      if constexpr (LOOPS) stride += (slots - 1) * DirectTokens::bytes(room);
      multiply_all<formats::FORMAT>(job, shared + warp * stride, warp, LOOPS ? slots : 1, is_first,
                                    tile, total);
    }
    keep_sums(total, tile, reinterpret_cast<float*>(shared + warp * stride));
    __syncthreads();
    const Epilogue kind = static_cast<Epilogue>(epilogue);
    const Target target{matrix, bias1, first_row, first_token, job.tokens, block_rows, kind};
    write_sums(target, shared, stride);
    if (!LOOPS) break;
    __syncthreads();
  }
}
