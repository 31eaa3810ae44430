// The matrix kernels for one instruction set; sources.cmake gives this file its flags.
#if defined(__x86_64__)
#include "codebooks.h"
#include "isa_avx2.h"

namespace voltapile {
namespace avx2 {
#include "dot_formats.inc"
#include "dot_superblocks.inc"
#include "dot_codebooks.inc"
#include "gemm_kernels.inc"
}  // namespace avx2

const Isa isa_avx2 = avx2::make_isa("avx2");

}  // namespace voltapile
#endif

