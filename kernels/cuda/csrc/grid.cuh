// Between two kernels of one stream: from sm_90 on a kernel may start while the one before it ends.
//
// Instances with `waits` are launched so. Such a kernel calls grid_wait(), in every thread that has
// anything left to do, before it reads what an earlier kernel wrote and before it writes to global
// memory at all: till then earlier kernels may still read, and write, everything. Weights, and
// tables made when the model was loaded, may be read ahead; so may, past the first cache, what was
// there before the kernel before let this one start: what a router chose (expert_down_stream.cu,
// expert_parts.cu), and what kernels made that are launched the ordinary way, at a step's begin
// (attention_decode.cu, sample.cu; angles: attention_heads.cu, sparse_index.cu), and states that
// an earlier step left (delta_row.cu, delta_pair.cu). The wait is for all kernels before, for each
// of them has waited too; so no kernel may end without. grid_launch() lets the next kernel start,
// as soon as every block has called it or ended; it promises nothing about what was written. A
// product's blocks ask for some 70 KB each when they start, and whatever is asked for then waits
// for it: attention_decode.cu and delta_pair.cu let it start when they have asked for what they
// need. Before sm_90 both are nothing.
#pragma once

namespace voltapile {

__device__ __forceinline__ void grid_wait() {
#if !defined(VP_EMULATION) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_launch() {
#if !defined(VP_EMULATION) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Asks for what lies at an address, far ahead of its use.
__device__ __forceinline__ void prefetch(const void* address) {
#if !defined(VP_EMULATION) && __CUDA_ARCH__ >= 800
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

}  // namespace voltapile
