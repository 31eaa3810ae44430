// A product of few tokens with small matrices that are not quantised, in float32: a block has some
// rows, and each of its threads eight columns of them, asked for before the kernel before has
// ended.
//
// A sum's order knows its matrix alone. -D FORMAT of all matrices; ROWS of a block.
#include "grid.cuh"
#include "row_sums.cuh"

namespace voltapile {

using Format = formats::FORMAT;
constexpr int TOKENS = 8;  // of a block
static_assert(ROWS <= SUMS);

struct Matrix {
  const std::uint8_t* weights;
  float* out;  // [tokens][rows]
  int rows;
};

}  // namespace voltapile

using namespace voltapile;

// grid: (rows of all matrices / ROWS, tokens / TOKENS), k / 8 threads. x: [tokens][k]
extern "C" __global__ void __launch_bounds__(512)
plain_rows(const float* x, const std::uint8_t* weights0, float* out0, int rows0,
           const std::uint8_t* weights1, float* out1, int rows1, const std::uint8_t* weights2,
           float* out2, int rows2, int tokens, int k) {
  __shared__ float sums[16][SUMS];
  grid_launch();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const bool is_in = EIGHT * static_cast<int>(threadIdx.x) < k;
  const int column = is_in ? EIGHT * threadIdx.x : 0, all = rows0 + rows1 + rows2;
  const int first = blockIdx.x * ROWS;
  // Row `row` of all, and where its result of a token goes.
  const auto matrix_of = [&](int& row) -> Matrix {
    if (row < rows0) return {weights0, out0, rows0};
    row -= rows0;
    if (row < rows1) return {weights1, out1, rows1};
    row -= rows1;
    return {weights2, out2, rows2};
  };
  typename Eight<Format>::Raw raw[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    int row = min(first + r, all - 1);
    const Matrix matrix = matrix_of(row);
    raw[r] = Eight<Format>::read(matrix.weights + row * row_bytes<Format>(k), column);
  }
  grid_wait();
  const int first_token = blockIdx.y * TOKENS;
  for (int t = first_token; t < min(tokens, first_token + TOKENS); ++t) {
    float own[EIGHT], mine[SUMS] = {};
    eight_of(x + static_cast<long long>(t) * k + column, own);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float values[EIGHT], sum = 0.0f;
      Eight<Format>::renew(raw[r]);
      Eight<Format>::values(raw[r], values);
#pragma unroll
      for (int i = 0; i < EIGHT; ++i) sum = fmaf(values[i], own[i], sum);
      mine[r] = is_in ? sum : 0.0f;
    }
    const float sum = sum_of_mine<SUMS / 2>(mine, lane);
    __syncthreads();  // sums may still be read
    if (lane % 2 == 0) sums[warp][lane / 2] = sum;
    __syncthreads();
    int row = first + threadIdx.x;
    if (threadIdx.x >= ROWS || row >= all) continue;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 16; ++w)
      if (w < warps) total += sums[w][threadIdx.x];
    const Matrix matrix = matrix_of(row);
    matrix.out[static_cast<long long>(t) * matrix.rows + row] = total;
  }
}
