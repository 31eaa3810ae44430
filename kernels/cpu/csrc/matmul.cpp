// The Commands that multiply with matrices: threads, tokens and row groups around the kernels.
//
// Threads split the rows of all matrices of a command, in whole groups, and never the columns.
#include "matmul.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "matmul_tiles.h"

namespace voltapile {
namespace {

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

template <class Index>
class Embed : public Command {
 public:
  Embed(const Matrix* table, const Index* tokens, std::int64_t num_tokens, float scale,
        float* out)
      : table_(table), format_(find_format(table->type)), tokens_(tokens),
        num_tokens_(num_tokens), scale_(scale), out_(out) {
    if (!format_ || table->cols % format_->length != 0)
      throw std::invalid_argument("no embedding from tensor type " + std::to_string(table->type));
  }

  void run(Team& team) override {
    const std::int64_t blocks = table_->cols / format_->length;
    const float scale = scale_ * table_->factor();
    const auto [begin, end] = team.share(num_tokens_ * blocks);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t token = tokens_[i / blocks];
      float* out = out_ + i * format_->length;
      if (token < 0 || token >= table_->rows) {
        std::fill(out, out + format_->length, 0.f);
        continue;
      }
      format_->unpack(table_->data + token * table_->row_bytes + i % blocks * format_->bytes, out);
      for (std::int64_t d = 0; d < format_->length; ++d) out[d] *= scale;
    }
  }

 private:
  const Matrix* table_;
  const FormatRow* format_;
  const Index* tokens_;
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
  return std::make_unique<Embed<std::int32_t>>(table, tokens, num_tokens, scale, out);
}

std::unique_ptr<Command> make_embed_rows(const Matrix* table, const std::int64_t* rows,
                                         std::int64_t count, float* out) {
  return std::make_unique<Embed<std::int64_t>>(table, rows, count, 1.f, out);
}

}  // namespace voltapile
