// The table that each instruction set fills: a few functions over raw pointers.
//
// A kernel computes one RowGroup (as many neighbouring weight rows as a vector has lanes) for a
// few tokens, a lane a row, into a tile [tokens][lanes] that it adds to. Commands, threads, bias
// and the residual are matmul.cpp's business. The files that fill a table are compiled for CPUs
// that this one may not be: they include nothing with inline functions of its own (the linker
// would keep one copy of those, perhaps theirs, for everybody).
#pragma once
#include <cstdint>

// Left to itself the compiler makes calls of what must stay in registers.
#define VP_INLINE [[gnu::always_inline]]
#define VP_ALWAYS __attribute__((always_inline))  // the same for a lambda

namespace voltapile {

struct RowGroup {
  const std::uint8_t* data;  // first byte of the first row that is read
  std::int64_t row_bytes;
  int rows;             // at most the lanes; lanes past it are computed from zeros
  std::int64_t slack;   // bytes of the matrix behind the last lane's row, which may be over-read
};

// Activations, quantised: a record for every 32 values.
//   0  64 bytes  the integers, in the order that the instruction set likes
//   64 float     scale
//   68 float[3]  sums of scale * integer / 32 over all, the first 16 and the second 16 values
//                (divided by 32 so that a sum overflows only where the product would)
//   80 int32[3]  sums of -integer over the same
constexpr std::int64_t kBlock = 32, kRecordBytes = 92;
constexpr float kSumShare = 32;
constexpr int kTileTokens = 8;  // tokens that a kernel takes at most

struct FormatKernel {
  int type;
  int step_blocks;   // blocks of 32 between two places where a row may be entered
  int step_bytes;
  int panel_bytes;   // of one block of 32 in a panel; 0: no panels, x is float32
  // x: records (or float32) of the first token, the next one x_stride bytes further.
  // `count` is blocks of 32, for float formats columns.
  void (*direct)(const RowGroup&, std::int64_t count, const std::uint8_t* x, std::int64_t x_stride,
                 int tokens, float* tile);
  // The same in two: unpack once, multiply with many tiles of tokens. Same bits.
  void (*pack)(const RowGroup&, std::int64_t count, std::uint8_t* panel);
  void (*panel)(const std::uint8_t* panel, std::int64_t count, const std::uint8_t* x,
                std::int64_t x_stride, int tokens, float* tile);
};

struct Isa {
  const char* name;
  int lanes;
  void (*quantise)(const float* x, std::int64_t blocks, std::uint8_t* records);
  void (*silu_mul)(float* gate, const float* up, std::int64_t n);  // gate = silu(gate) * up
  void (*gelu_mul)(float* gate, const float* up, std::int64_t n);
  const FormatKernel* formats;
  int num_formats;
};

extern const Isa isa_plain;
#if defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512;
#endif

}  // namespace voltapile
