// The kernels in plain C++, for any CPU.
#define VOLTAPILE_ISA plain
#include "vec_kernels.h"

namespace voltapile {
const Kernels kernels_plain = plain::make_kernels();
const FamilyKernels families_plain = plain::make_families();
}
