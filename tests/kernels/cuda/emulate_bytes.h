// Products of bytes on the emulated tensor core: A unsigned, B signed; maps from the PTX manual.
// m16n8k32: A row r, column k: lane 4 (r % 8) + k % 16 / 4, register r / 8 + 2 (k / 16), byte k % 4;
// B column n: lane 4 n + k % 16 / 4, register k / 16. m16n8k16: as its first half. C as in emulate.h.
#pragma once

struct int4 { int x, y, z, w; };
inline float __fdividef(float a, float b) { return a / b; }

namespace voltapile {

template <int K>
void product_of_bytes(int (&c)[4], std::initializer_list<unsigned> registers) {
  auto& warp = emulation::warp();
  const int lane = emulation::lane();
  int i = 0;
  for (unsigned value : registers) warp.slot[lane][i++] = value;
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + 8 * (e / 2), n = 2 * (lane % 4) + e % 2;
    for (int k = 0; k < K; ++k) {
      const unsigned a = warp.slot[4 * (row % 8) + k % 16 / 4][row / 8 + 2 * (k / 16)];
      const unsigned b = warp.slot[4 * n + k % 16 / 4][K / 8 + k / 16];
      c[e] += static_cast<int>(a >> 8 * (k % 4) & 255) *
              static_cast<std::int8_t>(b >> 8 * (k % 4) & 255);
    }
  }
  __syncwarp();
}
inline void mma_bytes_32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1) {
  product_of_bytes<32>(c, {a0, a1, a2, a3, b0, b1});
}
inline void mma_bytes_16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  product_of_bytes<16>(c, {a0, a1, b0});
}

}  // namespace voltapile
