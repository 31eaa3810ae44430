// The table of kernels in use, and the kernel of a format in it.
#pragma once
#include "isa_table.h"

namespace voltapile {

const Isa& current_isa();
const FormatKernel* find_kernel(const Isa& isa, int type);

}  // namespace voltapile
