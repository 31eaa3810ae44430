// The matrix kernels for one instruction set; sources.cmake gives this file its flags.
#include "codebooks.h"
#include "isa_plain.h"

namespace voltapile {
namespace plain {
#include "dot_formats.inc"
#include "dot_superblocks.inc"
#include "dot_codebooks.inc"
#include "gemm_kernels.inc"
}  // namespace plain

const Isa isa_plain = plain::make_isa("plain");

}  // namespace voltapile

