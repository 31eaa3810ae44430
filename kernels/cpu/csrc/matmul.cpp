// The Commands that multiply with matrices: threads, tokens and row groups around the kernels.
//
// Threads split the rows of all matrices of a command, in whole groups, and never the columns.
// Few tokens are multiplied straight from the file's bytes; many share an unpacked panel, some
// tokens at a time so that their records stay in the second-level cache. Both give the same bits.
#include "matmul.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <string>

#include "matmul_formats.h"
#include "matmul_isa.h"

namespace voltapile {
namespace {

constexpr std::int64_t kCacheBytes = 384 << 10;  // of records that a thread works on at once
constexpr std::int64_t kMaxChunk = 128;          // tokens; bounds the tiles in local memory
constexpr std::int64_t kOwnRecords = 128;        // so few are sooner computed twice than waited for

std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// A matrix and its kernel.
struct Factor {
  const Matrix* matrix;
  const FormatKernel* kernel;

  std::int64_t groups(int lanes) const { return (matrix->rows + lanes - 1) / lanes; }
};

// What one thread multiplies with: its memory and where x is.
struct Desk {
  std::uint8_t* free;
  std::int64_t free_bytes;
  const std::uint8_t* records;

  float* take_tile(std::int64_t floats) {
    auto* tile = reinterpret_cast<float*>(free);
    const std::int64_t bytes = round_up(floats * 4, 64);
    free += bytes;
    free_bytes -= bytes;
    return tile;
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
      isa_.quantise(x_, all, desk.free);
      desk.records = desk.free;
      desk.free += round_up(all * kRecordBytes, 64);
      desk.free_bytes -= round_up(all * kRecordBytes, 64);
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
    const FormatKernel& kernel = *factor.kernel;
    std::memset(tile, 0, static_cast<std::size_t>(count * isa_.lanes) * 4);
    const RowGroup rows = row_group(*factor.matrix, group);
    if (kernel.panel_bytes && count > kTileTokens) {
      by_panels(desk, kernel, rows, first, count, tile);
      return;
    }
    const bool floats = kernel.panel_bytes == 0;
    const std::int64_t stride = floats ? cols_ * 4 : record_stride();
    const std::uint8_t* x = floats ? reinterpret_cast<const std::uint8_t*>(x_) : desk.records;
    for (std::int64_t t = 0; t < count; t += kTileTokens)
      kernel.direct(rows, floats ? cols_ : cols_ / kBlock, x + (first + t) * stride, stride,
                    tokens_at(t, count), tile + t * isa_.lanes);
  }

 private:
  std::int64_t record_stride() const { return cols_ / kBlock * kRecordBytes; }

  static int tokens_at(std::int64_t t, std::int64_t count) {
    return static_cast<int>(std::min<std::int64_t>(kTileTokens, count - t));
  }

  RowGroup row_group(const Matrix& matrix, std::int64_t group) const {
    const std::int64_t first = group * isa_.lanes, behind = matrix.rows - first - isa_.lanes;
    return {matrix.data + first * matrix.row_bytes, matrix.row_bytes,
            static_cast<int>(std::min<std::int64_t>(isa_.lanes, matrix.rows - first)),
            std::max<std::int64_t>(behind, 0) * matrix.row_bytes};
  }

  // Unpacks as many columns as local memory holds, then adds all tokens of the chunk.
  void by_panels(const Desk& desk, const FormatKernel& kernel, RowGroup rows, std::int64_t first,
                 std::int64_t count, float* tile) const {
    const std::int64_t blocks = cols_ / kBlock;
    const std::int64_t most =
        desk.free_bytes / kernel.panel_bytes / kernel.step_blocks * kernel.step_blocks;
    assert(most > 0);
    for (std::int64_t b = 0; b < blocks; b += most) {
      const std::int64_t part = std::min(most, blocks - b);
      RowGroup from = rows;
      from.data += b / kernel.step_blocks * kernel.step_bytes;
      kernel.pack(from, part, desk.free);
      const std::uint8_t* x = desk.records + first * record_stride() + b * kRecordBytes;
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

void add_bias(float* tile, std::int64_t tokens, int lanes, const float* bias, std::int64_t rows) {
  if (!bias) return;
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t r = 0; r < rows; ++r) tile[t * lanes + r] += bias[r];
}

class Linear : public Command {
 public:
  Linear(const float* x, std::int64_t tokens, std::vector<Product> products,
         std::uint8_t* quantised)
      : multiplication_(x, tokens, products.at(0).weight->cols, quantised),
        products_(std::move(products)) {
    for (const Product& product : products_)
      factors_.push_back(multiplication_.add(product.weight));
  }

  void run(Team& team) override {
    const int lanes = multiplication_.isa().lanes;
    Desk desk = multiplication_.prepare(team);
    const std::int64_t chunk = multiplication_.chunk(), tokens = multiplication_.tokens();
    float* tile = desk.take_tile(chunk * lanes);
    std::int64_t all = 0;
    for (const Factor& factor : factors_) all += factor.groups(lanes);
    const auto [begin, end] = team.share(all);
    for (std::int64_t t = 0; t < tokens; t += chunk) {
      const std::int64_t count = std::min(chunk, tokens - t);
      std::int64_t base = 0;
      for (std::size_t i = 0; i < factors_.size(); ++i) {
        const std::int64_t groups = factors_[i].groups(lanes);
        for (std::int64_t g = std::max(begin - base, std::int64_t{0});
             g < std::min(end - base, groups); ++g) {
          multiplication_.multiply(desk, factors_[i], g, t, count, tile);
          store(products_[i], g * lanes, t, count, tile);
        }
        base += groups;
      }
    }
  }

 private:
  void store(const Product& product, std::int64_t row, std::int64_t token, std::int64_t count,
             float* tile) const {
    const int lanes = multiplication_.isa().lanes;
    const std::int64_t rows = std::min<std::int64_t>(lanes, product.weight->rows - row);
    add_bias(tile, count, lanes, product.bias ? product.bias + row : nullptr, rows);
    for (std::int64_t t = 0; t < count; ++t) {
      float* out = product.out + (token + t) * product.out_stride + row;
      const float* sums = tile + t * lanes;
      if (product.accumulate)
        for (std::int64_t r = 0; r < rows; ++r) out[r] += sums[r];
      else
        std::memcpy(out, sums, static_cast<std::size_t>(rows) * 4);
    }
  }

  Multiplication multiplication_;
  std::vector<Product> products_;
  std::vector<Factor> factors_;
};

class Glu : public Command {
 public:
  Glu(const float* x, std::int64_t tokens, const Matrix* gate, const Matrix* up,
      const float* gate_bias, const float* up_bias, Activation activation, float* out,
      std::uint8_t* quantised)
      : multiplication_(x, tokens, gate->cols, quantised),
        gate_(multiplication_.add(gate)),
        up_(multiplication_.add(up)),
        gate_bias_(gate_bias),
        up_bias_(up_bias),
        activation_(activation),
        out_(out) {
    if (gate->rows != up->rows) throw std::invalid_argument("gate and up differ in rows");
  }

  void run(Team& team) override {
    const Isa& isa = multiplication_.isa();
    Desk desk = multiplication_.prepare(team);
    const std::int64_t chunk = multiplication_.chunk(), tokens = multiplication_.tokens();
    float* gate = desk.take_tile(chunk * isa.lanes);
    float* up = desk.take_tile(chunk * isa.lanes);
    const auto activate = activation_ == Activation::silu ? isa.silu_mul : isa.gelu_mul;
    const auto [begin, end] = team.share(gate_.groups(isa.lanes));
    for (std::int64_t t = 0; t < tokens; t += chunk) {
      const std::int64_t count = std::min(chunk, tokens - t);
      for (std::int64_t g = begin; g < end; ++g) {
        multiplication_.multiply(desk, gate_, g, t, count, gate);
        multiplication_.multiply(desk, up_, g, t, count, up);
        const std::int64_t row = g * isa.lanes, all = gate_.matrix->rows;
        const std::int64_t rows = std::min<std::int64_t>(isa.lanes, all - row);
        add_bias(gate, count, isa.lanes, gate_bias_ ? gate_bias_ + row : nullptr, rows);
        add_bias(up, count, isa.lanes, up_bias_ ? up_bias_ + row : nullptr, rows);
        activate(gate, up, count * isa.lanes);
        for (std::int64_t i = 0; i < count; ++i)
          std::memcpy(out_ + (t + i) * all + row, gate + i * isa.lanes,
                      static_cast<std::size_t>(rows) * 4);
      }
    }
  }

 private:
  Multiplication multiplication_;
  Factor gate_, up_;
  const float *gate_bias_, *up_bias_;
  Activation activation_;
  float* out_;
};

class Embed : public Command {
 public:
  Embed(const Matrix* table, const std::int32_t* tokens, std::int64_t num_tokens, float scale,
        float* out)
      : table_(table), format_(find_format(table->type)), tokens_(tokens),
        num_tokens_(num_tokens), scale_(scale), out_(out) {
    if (!format_ || table->cols % format_->length != 0)
      throw std::invalid_argument("no embedding from tensor type " + std::to_string(table->type));
  }

  void run(Team& team) override {
    const std::int64_t blocks = table_->cols / format_->length;
    const auto [begin, end] = team.share(num_tokens_ * blocks);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = tokens_[i / blocks];
      float* out = out_ + i * format_->length;
      if (token < 0 || token >= table_->rows) {
        std::fill(out, out + format_->length, 0.f);
        continue;
      }
      format_->unpack(table_->data + token * table_->row_bytes + i % blocks * format_->bytes, out);
      for (std::int64_t d = 0; d < format_->length; ++d) out[d] *= scale_;
    }
  }

 private:
  const Matrix* table_;
  const FormatRow* format_;
  const std::int32_t* tokens_;
  std::int64_t num_tokens_;
  float scale_;
  float* out_;
};

}  // namespace

std::int64_t quantised_bytes(std::int64_t tokens, std::int64_t cols) {
  return round_up(tokens * (cols / kBlock) * kRecordBytes, 64);
}

std::unique_ptr<Command> make_linear(const float* x, std::int64_t tokens,
                                     std::vector<Product> products, std::uint8_t* quantised) {
  return std::make_unique<Linear>(x, tokens, std::move(products), quantised);
}

std::unique_ptr<Command> make_glu(const float* x, std::int64_t tokens, const Matrix* gate,
                                  const Matrix* up, const float* gate_bias, const float* up_bias,
                                  Activation activation, float* out, std::uint8_t* quantised) {
  return std::make_unique<Glu>(x, tokens, gate, up, gate_bias, up_bias, activation, out,
                               quantised);
}

std::unique_ptr<Command> make_embed(const Matrix* table, const std::int32_t* tokens,
                                    std::int64_t num_tokens, float scale, float* out) {
  return std::make_unique<Embed>(table, tokens, num_tokens, scale, out);
}

}  // namespace voltapile
