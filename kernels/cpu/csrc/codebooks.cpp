// Unpacks the grids at compile time.
#include "codebooks.h"

#include "../../formats/codebooks.h"
#include "../../formats/grid_iq1.h"
#include "../../formats/grid_iq2.h"
#include "../../formats/grid_iq3.h"

namespace voltapile {
namespace {

constexpr int iq1_byte(std::uint32_t entry, int j) {
  return 8 * formats::iq1_element(entry, j) + 15;
}

template <int (*element)(std::uint32_t, int), class Bytes, int n>
constexpr void fill(const std::uint16_t (&grid)[n], Bytes (&out)[n]) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < static_cast<int>(sizeof(Bytes)); ++j)
      out[i] |= static_cast<Bytes>(element(grid[i], j)) << (8 * j);
}

constexpr Codebooks filled() {
  Codebooks all{};
  fill<iq1_byte>(formats::iq1s_grid, all.iq1);
  fill<formats::iq2_element>(formats::iq2xxs_grid, all.iq2xxs);
  fill<formats::iq2_element>(formats::iq2xs_grid, all.iq2xs);
  fill<formats::iq2_element>(formats::iq2s_grid, all.iq2s);
  fill<formats::iq3xxs_element>(formats::iq3xxs_grid, all.iq3xxs);
  fill<formats::iq3s_element>(formats::iq3s_grid, all.iq3s);
  return all;
}

}  // namespace

extern constexpr Codebooks codebooks = filled();

}  // namespace voltapile
