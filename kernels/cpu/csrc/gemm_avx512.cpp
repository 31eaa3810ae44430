// The matrix kernels for one instruction set; sources.cmake gives this file its flags.
#if defined(__x86_64__)
#include "codebooks.h"
#include "isa_avx512.h"

namespace voltapile {
namespace avx512 {
#include "dot_formats.inc"
#include "dot_superblocks.inc"
#include "dot_codebooks.inc"
#include "gemm_kernels.inc"
}  // namespace avx512

const Isa isa_avx512 = avx512::make_isa("avx512");

}  // namespace voltapile
#endif

