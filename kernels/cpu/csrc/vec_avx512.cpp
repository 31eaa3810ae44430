// The kernels compiled for AVX512; CMakeLists.txt has the options.
#define VOLTAPILE_ISA avx512
#include "vec_kernels.h"

namespace voltapile {
const Kernels kernels_avx512 = avx512::make_kernels();
const FamilyKernels families_avx512 = avx512::make_families();
}
