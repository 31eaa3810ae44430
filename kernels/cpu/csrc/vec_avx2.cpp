// The kernels compiled for AVX2; CMakeLists.txt has the options.
#define VOLTAPILE_ISA avx2
#include "vec_kernels.h"

namespace voltapile {
const Kernels kernels_avx2 = avx2::make_kernels();
const FamilyKernels families_avx2 = avx2::make_families();
}
