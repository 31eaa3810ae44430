// Whether kernels start while the one before them ends (grid.cuh), so that there is time to go once
// through code that is needed behind grid_wait(): instructions come from far away, too.
#pragma once

namespace voltapile {

#if defined(VP_EMULATION) || __CUDA_ARCH__ >= 900
constexpr bool STARTS_EARLY = true;
#else
constexpr bool STARTS_EARLY = false;
#endif

}  // namespace voltapile
