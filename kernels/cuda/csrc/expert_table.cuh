// Where the experts of a layer lie; kernels/cuda/experts.py writes it.
#pragma once
#include "half.cuh"

namespace voltapile {

// Where an expert's matrices lie. tier and owner are for whoever places them.
struct Expert {
  const std::uint8_t* matrices[3];  // gate, up, down
  int tier, owner;
};
enum Part { GATE, UP, DOWN };

// A layer's experts `first` to first + count - 1.
struct Experts {
  const Expert* table;
  int count, first;

  // Null if it is computed elsewhere.
  __device__ __forceinline__ const Expert* find(int expert) const {
    const int local = expert - first;
    return local >= 0 && local < count ? table + local : nullptr;
  }
};

}  // namespace voltapile
