// Products of the emulated tensor core, and what loads its operands: more of emulate.h. Register
// maps are written from the PTX manual, apart from those of the kernels. Products of halves are
// summed in double and rounded once.
#pragma once
#include <initializer_list>

namespace emulation {

// Of each lane the values of its registers, A first; `sum` gives what is added to one lane's value
// e.
struct Halves {
  float x[16];
};
template <int VALUES, class Sum>
void product(float (&c)[VALUES], std::initializer_list<unsigned> registers, Sum sum) {
  Halves own;
  int i = 0;
  for (unsigned pair : registers) {
    own.x[i++] = half(pair & 0xffff);
    own.x[i++] = half(pair >> 16);
  }
  const auto all = show(own);
  for (int e = 0; e < VALUES; ++e)
    c[e] = static_cast<float>(c[e] + sum(all, lane(), e));
}
using AllHalves = Shown<Halves>;

struct Words {
  unsigned x[6];
};
template <int K, class Weight = std::uint8_t>
void product_of_bytes(int (&c)[4], Words registers) {
  const auto all = show(registers);
  const int own = lane();
  for (int e = 0; e < 4; ++e) {
    const int row = own / 4 + 8 * (e / 2), n = 2 * (own % 4) + e % 2;
    for (int k = 0; k < K; ++k) {
      const unsigned a = all[4 * (row % 8) + k % 16 / 4].x[row / 8 + 2 * (k / 16)];
      const unsigned b = all[4 * n + k % 16 / 4].x[K / 8 + k / 16];
      c[e] += static_cast<Weight>(a >> 8 * (k % 4) & 255) *
              static_cast<std::int8_t>(b >> 8 * (k % 4) & 255);
    }
  }
}

}  // namespace emulation

namespace voltapile {

// m16n8k16: A row r, column k: lane 4 (r % 8) + k % 8 / 2, register r / 8 + 2 (k / 8); B column n:
// lane 4 n + k % 8 / 2, register k / 8. C value e: row lane / 4 + 8 (e / 2), column 2 (lane % 4) +
// e % 2.
inline void mma_16816(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                      unsigned b0, unsigned b1) {
  emulation::product(c, {a0, a1, a2, a3, b0, b1}, [](emulation::AllHalves all, int lane, int e) {
    const int row = lane / 4 + 8 * (e / 2), n = 2 * (lane % 4) + e % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const float a = all[4 * (row % 8) + k % 8 / 2].x[2 * (row / 8 + 2 * (k / 8)) + k % 2];
      const float b = all[4 * n + k % 8 / 2].x[2 * (4 + k / 8) + k % 2];
      sum += static_cast<double>(a) * b;
    }
    return sum;
  });
}

// wgmma m64nNk16 with A in registers: of each of four warps as m16n8k16. B (K major, swizzled by
// 128 bytes) has rows n of 128 bytes, of whose addresses bits 4 to 6 are changed by bits 7 to 9.
// Sums come when they are waited for, and till then are NaNs. All four warps must come, with the
// same B.
struct Descriptor {
  const std::uint8_t* at;
  explicit Descriptor(const std::uint8_t* at) : at(at) {}
  Descriptor after(int bytes) const { return Descriptor(at + bytes); }
  Descriptor kept() const { return *this; }
  float value(int k, int n) const {
    auto place = reinterpret_cast<std::uintptr_t>(at) + n / 8 * 1024 + n % 8 * 128 + 2 * k;
    place ^= (place >> 7 & 7) << 4;
    return emulation::half(*reinterpret_cast<const std::uint16_t*>(place));
  }
};
namespace together {
struct Made {
  float* at;
  float values[4][4];
  bool is_begun;
};
inline Made made[emulation::MOST_THREADS];
struct Group {
  emulation::Barrier barrier;
  const std::uint8_t* at[2][4];
};
inline Group groups[emulation::MOST_THREADS / 128];
inline void meet(Descriptor b) {
  if (blockDim.x % 128 || reinterpret_cast<std::uintptr_t>(b.at) % 16) abort();
  Group& own = groups[emulation::current / 128];
  auto& at = own.at[own.barrier.generation & 1];
  at[emulation::current / 32 % 4] = b.at;
  emulation::meet(own.barrier, 128);
  for (const std::uint8_t* other : at)
    if (other != b.at) abort();
}
}  // namespace together

inline void show_tokens() {}
template <class T>
void begin_products(T&) {
  together::made[emulation::current].is_begun = true;
}
inline void commit_products() {}
template <bool ADDS, int PASSES>
void multiply_together(float (&c)[PASSES][4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                       Descriptor b) {
  together::meet(b);
  together::Made& own = together::made[emulation::current];
  if (!own.is_begun || (own.at && (!ADDS || own.at != c[0]))) abort();
  if (!own.at) memcpy(own.values, c, sizeof c);
  if (!ADDS) memset(own.values, 0, sizeof own.values);
  own.at = c[0];
  for (int pass = 0; pass < PASSES; ++pass) {
    emulation::product(
        own.values[pass], {a0, a1, a2, a3}, [&](emulation::AllHalves all, int lane, int e) {
          const int row = lane / 4 + 8 * (e / 2), n = 8 * pass + 2 * (lane % 4) + e % 2;
          double sum = 0;
          for (int k = 0; k < 16; ++k) {
            const float a = all[4 * (row % 8) + k % 8 / 2].x[2 * (row / 8 + 2 * (k / 8)) + k % 2];
            sum += static_cast<double>(a) * b.value(k, n);
          }
          return sum;
        });
  }
  memset(c, 0xff, sizeof c);
}
template <int PASSES>
void await_products(float (&c)[PASSES][4]) {
  together::Made& own = together::made[emulation::current];
  if (own.at != c[0]) abort();
  memcpy(c, own.values, sizeof c);
  own = {};
}

// m16n8k8: as the first half of m16n8k16.
inline void mma_1688(float (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  emulation::product(c, {a0, a1, b0}, [](emulation::AllHalves all, int lane, int e) {
    const int row = lane / 4 + 8 * (e / 2), n = 2 * (lane % 4) + e % 2;
    double sum = 0;
    for (int k = 0; k < 8; ++k) {
      const float a = all[4 * (row % 8) + k / 2].x[2 * (row / 8) + k % 2];
      sum += static_cast<double>(a) * all[4 * n + k / 2].x[4 + k % 2];
    }
    return sum;
  });
}

// m8n8k4, four products by quad pairs: quad pair q is lanes 4 q..4 q + 3 and 16 + 4 q..; lane t of
// it holds row t of A and column t of B. C value e: row (lane & 1) + (e & 2) + 4 (lane / 16),
// column (e & 4) + (lane & 2) + (e & 1).
inline void mma_884(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  emulation::product(c, {a0, a1, b0, b1}, [](emulation::AllHalves all, int lane, int e) {
    const int quad = lane / 4 % 4;
    const int row = (lane & 1) + (e & 2) + 4 * (lane / 16);
    const int n = (e & 4) + (lane & 2) + (e & 1);
    const auto holder = [&](int t) { return 4 * quad + t % 4 + 16 * (t / 4); };
    double sum = 0;
    for (int k = 0; k < 4; ++k)
      sum += static_cast<double>(all[holder(row)].x[k]) * all[holder(n)].x[4 + k];
    return sum;
  });
}

// m8n8k4 with B .row: lane t of a quad pair holds row (k) t % 4, four columns from 4 (t / 4) on.
inline void mma_884_rows(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
  emulation::product(c, {a0, a1, b0, b1}, [](emulation::AllHalves all, int lane, int e) {
    const int quad = lane / 4 % 4;
    const int row = (lane & 1) + (e & 2) + 4 * (lane / 16);
    const int n = (e & 4) + (lane & 2) + (e & 1);
    const auto holder = [&](int t) { return 4 * quad + t % 4 + 16 * (t / 4); };
    double sum = 0;
    for (int k = 0; k < 4; ++k)
      sum += static_cast<double>(all[holder(row)].x[k]) *
             all[holder(k + 4 * (n / 4))].x[4 + n % 4];
    return sum;
  });
}

// m16n8k32 of bytes, A unsigned (or signed), B signed: A row r, column k: lane 4 (r % 8) + k % 16 /
// 4, register r / 8 + 2 (k / 16), byte k % 4; B column n: lane 4 n + k % 16 / 4, register k / 16.
// m16n8k16: as its first half. C as that of halves.
inline void mma_bytes_32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                         unsigned b0, unsigned b1) {
  emulation::product_of_bytes<32>(c, {{a0, a1, a2, a3, b0, b1}});
}
inline void mma_signed_16(int (&c)[4], unsigned a0, unsigned a1, unsigned b0) {
  emulation::product_of_bytes<16, std::int8_t>(c, {{a0, a1, b0}});
}

inline void mma_signed_32(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                          unsigned b0, unsigned b1) {
  emulation::product_of_bytes<32, std::int8_t>(c, {{a0, a1, a2, a3, b0, b1}});
}

// ldmatrix: lanes 8 m to 8 m + 7 give the rows of matrix m; lane l gets of it row l / 4, columns
// 2 (l % 4) and the next; turned: column l / 4, rows 2 (l % 4) and the next.
inline void load_any(unsigned (&r)[4], const std::uint16_t* m, bool is_turned) {
  const int lane = emulation::lane();
  const auto rows = emulation::show(m);
  const auto at = [&](int matrix, int row, int column) -> unsigned {
    return rows[8 * matrix + row][column];
  };
  for (int i = 0; i < 4; ++i) {
    const int own = lane / 4, pair = 2 * (lane % 4);
    r[i] = is_turned ? at(i, pair, own) | at(i, pair + 1, own) << 16
                     : at(i, own, pair) | at(i, own, pair + 1) << 16;
  }
  __syncwarp();  // before anybody writes there
}
inline void load_matrices(unsigned (&r)[4], const std::uint16_t* m) { load_any(r, m, false); }
inline void load_matrices_turned(unsigned (&r)[4], const std::uint16_t* m) { load_any(r, m, true); }

}  // namespace voltapile
