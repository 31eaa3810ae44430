// One multiplication of some tokens with matrices, as the Commands share it: the form of x, tiles.
//
// Few tokens are multiplied straight from the file's bytes; many share an unpacked panel, some
// tokens at a time so that their records stay in the second-level cache. Both give the same bits.
#pragma once
#include <algorithm>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <string>

#include "matmul.h"
#include "matmul_formats.h"
#include "matmul_isa.h"

namespace voltapile {

constexpr std::int64_t kCacheBytes = 384 << 10;  // of records that a thread works on at once
constexpr std::int64_t kMaxChunk = 128;          // tokens; bounds the tiles in local memory
constexpr std::int64_t kOwnRecords = 128;        // so few are sooner computed twice than waited for

inline std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// A matrix and its kernel.
struct Factor {
  const Matrix* matrix;
  const FormatKernel* kernel;

  bool takes_floats() const { return kernel->panel_bytes == 0; }
  std::int64_t groups(int lanes) const { return (matrix->rows + lanes - 1) / lanes; }
};

// What one thread multiplies with: its memory and where x is.
struct Desk {
  std::uint8_t* free;
  std::int64_t free_bytes;
  const std::uint8_t* records;

  float* take_tile(std::int64_t floats) { return reinterpret_cast<float*>(take(floats * 4)); }
  std::uint8_t* take(std::int64_t nbytes) {
    std::uint8_t* const taken = free;
    free += round_up(nbytes, 64);
    free_bytes -= round_up(nbytes, 64);
    return taken;
  }
};

class Multiplication {
 public:
  Multiplication(const float* x, std::int64_t tokens, std::int64_t cols, std::uint8_t* quantised)
      : isa_(current_isa()), x_(x), tokens_(tokens), cols_(cols), quantised_(quantised) {}

  Factor add(const Matrix* matrix) {
    const FormatRow* format = find_format(matrix->type);
    const FormatKernel* kernel = find_kernel(isa_, matrix->type);
    if (!format || !kernel)
      throw std::invalid_argument("no kernel for tensor type " + std::to_string(matrix->type));
    if (matrix->cols != cols_ || cols_ % format->length != 0 ||
        matrix->row_bytes < cols_ / format->length * format->bytes)
      throw std::invalid_argument("a matrix of " + std::to_string(matrix->cols) + " columns for " +
                                  std::to_string(cols_) + " activations");
    needs_records_ |= kernel->panel_bytes > 0;
    return {matrix, kernel};
  }

  const Isa& isa() const { return isa_; }
  std::int64_t tokens() const { return tokens_; }
  std::int64_t chunk() const {
    const std::int64_t fit = kCacheBytes / std::max<std::int64_t>(record_stride(), 1);
    return std::clamp<std::int64_t>(fit / kTileTokens * kTileTokens, 32, kMaxChunk);
  }

  // Quantises x: the few records of a small step by each thread for itself, others together.
  Desk prepare(Team& team) const {
    Desk desk{team.local, team.local_bytes, quantised_};
    if (!needs_records_) return desk;
    const std::int64_t blocks = cols_ / kBlock, all = tokens_ * blocks;
    if (team.size > 1 && all <= kOwnRecords) {
      std::uint8_t* const records = desk.take(all * kRecordBytes);
      isa_.quantise(x_, all, records);
      desk.records = records;
      return desk;
    }
    const auto [begin, end] = team.share(all);
    isa_.quantise(x_ + begin * kBlock, end - begin, quantised_ + begin * kRecordBytes);
    team.barrier();
    return desk;
  }

  // tile [count][lanes] = a group of rows for tokens from `first` on.
  void multiply(const Desk& desk, const Factor& factor, std::int64_t group, std::int64_t first,
                std::int64_t count, float* tile) const {
    multiply_at(desk, factor, group, input(desk, factor) + first * stride(factor), count, tile);
  }

  // The same for any tokens, one behind another in the form that the factor takes.
  void multiply_at(const Desk& desk, const Factor& factor, std::int64_t group,
                   const std::uint8_t* x, std::int64_t count, float* tile) const {
    multiply_blocks(desk, factor, group, x, count, tile);
    if (!factor.matrix->factors) return;
    const float scale = factor.matrix->factor();
    for (std::int64_t i = 0; i < count * isa_.lanes; ++i) tile[i] *= scale;
  }

  // Where the tokens are in the form that the factor takes, and how far apart.
  const std::uint8_t* input(const Desk& desk, const Factor& factor) const {
    return factor.takes_floats() ? reinterpret_cast<const std::uint8_t*>(x_) : desk.records;
  }
  std::int64_t stride(const Factor& factor) const {
    return factor.takes_floats() ? cols_ * 4 : record_stride();
  }
  std::int64_t record_stride() const { return cols_ / kBlock * kRecordBytes; }

 private:
  static int tokens_at(std::int64_t t, std::int64_t count) {
    return static_cast<int>(std::min<std::int64_t>(kTileTokens, count - t));
  }

  void multiply_blocks(const Desk& desk, const Factor& factor, std::int64_t group,
                       const std::uint8_t* x, std::int64_t count, float* tile) const {
    const FormatKernel& kernel = *factor.kernel;
    std::memset(tile, 0, static_cast<std::size_t>(count * isa_.lanes) * 4);
    const RowGroup rows = row_group(*factor.matrix, group);
    if (kernel.panel_bytes && count > kTileTokens) {
      by_panels(desk, kernel, rows, x, count, tile);
      return;
    }
    const std::int64_t step = stride(factor);
    for (std::int64_t t = 0; t < count; t += kTileTokens)
      kernel.direct(rows, factor.takes_floats() ? cols_ : cols_ / kBlock, x + t * step, step,
                    tokens_at(t, count), tile + t * isa_.lanes);
  }

  RowGroup row_group(const Matrix& matrix, std::int64_t group) const {
    const std::int64_t first = group * isa_.lanes, behind = matrix.rows - first - isa_.lanes;
    return {matrix.data + first * matrix.row_bytes, matrix.row_bytes,
            static_cast<int>(std::min<std::int64_t>(isa_.lanes, matrix.rows - first)),
            std::max<std::int64_t>(behind, 0) * matrix.row_bytes};
  }

  // Unpacks as many columns as local memory holds, then adds all tokens of the chunk.
  void by_panels(const Desk& desk, const FormatKernel& kernel, RowGroup rows,
                 const std::uint8_t* first, std::int64_t count, float* tile) const {
    const std::int64_t blocks = cols_ / kBlock;
    const std::int64_t most =
        desk.free_bytes / kernel.panel_bytes / kernel.step_blocks * kernel.step_blocks;
    assert(most > 0);
    for (std::int64_t b = 0; b < blocks; b += most) {
      const std::int64_t part = std::min(most, blocks - b);
      RowGroup from = rows;
      from.data += b / kernel.step_blocks * kernel.step_bytes;
      kernel.pack(from, part, desk.free);
      const std::uint8_t* x = first + b * kRecordBytes;
      for (std::int64_t t = 0; t < count; t += kTileTokens)
        kernel.panel(desk.free, part, x + t * record_stride(), record_stride(),
                     tokens_at(t, count), tile + t * isa_.lanes);
    }
  }

  const Isa& isa_;
  const float* x_;
  std::int64_t tokens_, cols_;
  std::uint8_t* quantised_;
  bool needs_records_ = false;
};

}  // namespace voltapile
