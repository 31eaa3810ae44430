// What happens to finished sums: warps' parts are added in order, then bias, residual or gate.
//
// -D WARPS, TILES as in matmul_rows.cu.
#pragma once
#include "matmul_chunk.cuh"

namespace voltapile {

enum Epilogue { PLAIN, ADD, SILU, GELU };
constexpr int PASS_TOKENS = 8 * PASSES;

struct Matrix {
  const std::uint8_t* weights;
  const float* bias;  // or null
  float* out;         // [tokens][rows]
  int rows;
};
struct Target {
  Matrix matrix;
  const float* up_bias;
  int first_row, first_token, tokens, block_rows;
  Epilogue kind;
};

// A tile that would leave the matrix begins earlier; rows of its neighbour are then made twice.
__device__ __forceinline__ int first_row_of(int row, int rows) {
  return max(0, min(row, rows - 16));
}

// This warp's sums as [tile][token][16 rows].
__device__ __forceinline__ void keep_sums(const float (&total)[TILES][PASSES][Tile::VALUES],
                                          const Tile& tile, float* kept) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
      for (int e = 0; e < Tile::VALUES; ++e) {
        const float sum = tile.fold(total[t][pass][e]);
        const int token = 8 * pass + tile.sum_token(Tile::token_of(e));
        if (tile.owns_sums())
          kept[(t * PASS_TOKENS + token) * 16 + tile.sum_row(Tile::row_of(e))] = sum;
      }
}

__device__ __forceinline__ float sum_of_warps(const std::uint8_t* shared, int stride, int t,
                                              int token, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp)
    sum += reinterpret_cast<const float*>(
        shared + warp * stride)[(t * PASS_TOKENS + token) * 16 + row];
  return sum;
}

__device__ __forceinline__ float activated(float gate, Epilogue kind) {
  float slope = gate;
  if (kind != SILU)  // sqrt(8 / pi); tanh without cancellation
    slope = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + expf(-slope));
}

__device__ __forceinline__ void write_sums(const Target& target, const std::uint8_t* shared,
                                           int stride) {
  const Matrix& matrix = target.matrix;
  const bool is_glu = target.kind >= SILU;
#pragma unroll 1
  for (int i = threadIdx.x; i < target.block_rows * target.tokens; i += 32 * WARPS) {
    int t = 0, token = i / 16;
#pragma unroll 1
    while (TILES > 1 && token >= target.tokens) token -= target.tokens, ++t;
    const int meant = target.first_row + 16 * t;
    const int row = first_row_of(meant, matrix.rows) + i % 16;
    if (row < meant || row >= matrix.rows) continue;
    float value = 0, gate = 0;
#pragma unroll 1
    for (int half = 0; half <= is_glu; ++half) {  // one path for a gate and its up
      gate = value;
      value = sum_of_warps(shared, stride, t + half * (TILES / 2), token, i % 16);
      const float* bias = half ? target.up_bias : matrix.bias;
      if (bias != nullptr) value += bias[row];
    }
    if (is_glu) value = activated(gate, target.kind) * value;
    float* out =
        matrix.out + static_cast<long long>(target.first_token + token) * matrix.rows + row;
    *out = target.kind == ADD ? *out + value : value;
  }
}

}  // namespace voltapile
