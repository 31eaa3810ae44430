// The product of many rows straight from quantised weights: a tile is unpacked to halves in shared
// memory, then multiplied on tensor cores.
//
// A block takes 128 rows and 64 tokens; columns in steps of 128 (four groups). Eight warps, each 32
// rows by 32 tokens. Sums of 64 columns are made afresh on the tensor core and added in float32.
// Two blocks share a multiprocessor, so that one unpacks while the other multiplies. -D FORMAT; PLANE as in gemm_convert.cu.
#include "mma.cuh"
#include "unpack_k.cuh"

using namespace voltapile;

constexpr int ROWS = 128, TOKENS = 64, GROUPS = 4, THREADS = 256;
// Bytes of a row of units. Lanes that read 16 bytes together meet distinct banks.
constexpr int STRIDE = GROUPS * 64 + (VP_ARCH >= 750 ? 32 : 16);
constexpr int SUMS = 2 * 4 * Tile::VALUES;

// Which of eight tokens is column n of a tile: dealt as the rows are.
__device__ __forceinline__ int dealt(int n) {
  return VP_ARCH >= 750 ? (n < 4 ? 2 * n : 2 * n - 7) : n;
}

// Units of one row, span and p as finished halves to shared memory.
template <class C>
__device__ __forceinline__ void unpack_to(Bytes chunk, int span, int p, std::uint8_t* row) {
  Unit found[C::SPAN * C::PLANES];
  C::unpack(chunk, span, p, found);
#pragma unroll
  for (int g = 0; g < C::SPAN; ++g) {
    Unit u = found[g * C::PLANES + (C::PLANES > 1 ? PLANE : 0)];
    if constexpr (!C::NATURAL) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= C::SCALES) continue;
        const float2 s = C::scale(chunk, (span * C::SPAN + g) * C::SCALES + half);
#pragma unroll
        for (int i = 2 * half; i < (C::SCALES == 1 ? 4 : 2 * half + 2); ++i) {
          const float2 v = half_values(u.r[i]);
          u.r[i] = half_pair(fmaf(s.x, v.x, s.y), fmaf(s.x, v.y, s.y));
        }
      }
    }
    *reinterpret_cast<uint4*>(row + 64 * g + 16 * p) = uint4{u.r[0], u.r[1], u.r[2], u.r[3]};
  }
}

__device__ __forceinline__ Unit unit_at(const std::uint8_t* row, int group, int p) {
  const uint4 v = *reinterpret_cast<const uint4*>(row + 64 * group + 16 * p);
  return {{v.x, v.y, v.z, v.w}};
}

// Adds the products of a step to total: this warp's 2 tiles of rows times 4 of tokens.
__device__ __forceinline__ void multiply_step(const std::uint8_t* rows, const std::uint8_t* tokens,
                                              const Tile& tile, float (&total)[SUMS]) {
#pragma unroll 1
  for (int pair = 0; pair < GROUPS; pair += 2) {
    Unit a[2][2][Tile::ROWS * Tile::UNITS];
#pragma unroll
    for (int i = 0; i < 4 * Tile::ROWS * Tile::UNITS; ++i) {
      const int held = i % (Tile::ROWS * Tile::UNITS), m = i / (Tile::ROWS * Tile::UNITS) % 2;
      const int g = i / (2 * Tile::ROWS * Tile::UNITS);
      a[g][m][held] = unit_at(rows + (16 * m + tile.row(held / Tile::UNITS)) * STRIDE, pair + g,
                              tile.unit(held % Tile::UNITS));
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float sum[2][Tile::VALUES] = {};
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        Unit b[Tile::UNITS];
#pragma unroll
        for (int i = 0; i < Tile::UNITS; ++i)
          b[i] = unit_at(tokens + (8 * n + dealt(tile.token())) * STRIDE, pair + g, tile.unit(i));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int m = 0; m < 2; ++m) Tile::multiply(sum[m], a[g][m], b, half);
      }
#pragma unroll
      for (int i = 0; i < 2 * Tile::VALUES; ++i)
        total[i / Tile::VALUES * 4 * Tile::VALUES + n * Tile::VALUES + i % Tile::VALUES] +=
            sum[i / Tile::VALUES][i % Tile::VALUES];
    }
  }
}

// grid: (rows / 128, tokens / 64), 256 threads. halves: [tokens][k / 32][4] units. k is a multiple
// of 32. sums[token][row] = or += factor * product.
extern "C" __global__ void __launch_bounds__(THREADS, VP_ARCH >= 800 ? 2 : 1)
    gemm_fused(Bytes weights, const uint4* halves, float* sums, int rows, int tokens, int k,
               float factor, int adds) {
  using F = formats::FORMAT;
  using C = Codec<F>;
  extern __shared__ __align__(128) std::uint8_t shared[];
  std::uint8_t *row_units = shared, *token_units = shared + ROWS * STRIDE;
  const int first_row = blockIdx.x * ROWS, first_token = blockIdx.y * TOKENS;
  const int groups = k / 32, warp = threadIdx.x >> 5;
  const Tile tile{static_cast<int>(threadIdx.x & 31)};
  const long long row_bytes = static_cast<long long>(k / F::length) * F::bytes;
  constexpr int TASKS = ROWS * 4 * (GROUPS / C::SPAN);  // row, span, p
  const int p = threadIdx.x & 3;
  float total[SUMS] = {};

  for (int first = 0; first < groups; first += GROUPS) {
#pragma unroll 1
    for (int task = threadIdx.x >> 2; task < TASKS / 4; task += THREADS / 4) {
      const int row = task % ROWS, span = first / C::SPAN + task / ROWS, group = span * C::SPAN;
      std::uint8_t* to = row_units + row * STRIDE + 64 * (group - first);
      if (group < groups) {
        const int there = min(first_row + row, rows - 1);
        const Bytes chunk = weights + there * row_bytes +
                            static_cast<long long>(group / C::GROUPS) * C::BYTES;
        unpack_to<C>(chunk, span % (C::GROUPS / C::SPAN), p, to);
      } else {
        *reinterpret_cast<uint4*>(to + 16 * p) = uint4{0, 0, 0, 0};
      }
    }
#pragma unroll 2
    for (int task = threadIdx.x; task < TOKENS * GROUPS * 4; task += THREADS) {
      const int token = task / (GROUPS * 4), unit = task % (GROUPS * 4);
      const int there = min(first_token + token, tokens - 1);
      const bool is_there = first + unit / 4 < groups;
      *reinterpret_cast<uint4*>(token_units + token * STRIDE + 16 * unit) =
          is_there ? halves[(static_cast<long long>(there) * groups + first) * 4 + unit]
                   : uint4{0, 0, 0, 0};
    }
    __syncthreads();
    multiply_step(row_units + (warp >> 1) * 32 * STRIDE, token_units + (warp & 1) * 32 * STRIDE,
                  tile, total);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int m = i / Tile::VALUES / 4, n = i / Tile::VALUES % 4, e = i % Tile::VALUES;
    const int row = first_row + (warp >> 1) * 32 + 16 * m + tile.sum_row(Tile::row_of(e));
    const int token = first_token + (warp & 1) * 32 + 8 * n +
                      dealt(tile.sum_token(Tile::token_of(e)));
    const float sum = tile.fold(total[i]) * factor;
    if (!tile.owns_sums() || row >= rows || token >= tokens) continue;
    float* out = sums + static_cast<long long>(token) * rows + row;
    *out = adds ? *out + sum : sum;
  }
}
