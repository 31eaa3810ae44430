// How much of an answer a residual stream gets, and the gate of a mix: the same wherever it is
// computed.
#pragma once
#include "half.cuh"
#include "quotient.cuh"

namespace voltapile {

// Where e^-x is beyond 2^126 the true value is below any that counts.
__device__ __forceinline__ float sigmoid(float x) {
  return quotient(1.0f, 1.0f + expf(fminf(-x, 80.0f)));
}
__device__ __forceinline__ float share_of(float inject, int streams) {
  return 2.0f * sigmoid(quotient(inject, static_cast<float>(streams)));
}

}  // namespace voltapile
