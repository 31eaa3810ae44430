// Which instruction set is in use.
#include "matmul_isa.h"

#include <atomic>
#include <cstring>

#include "matmul.h"

namespace voltapile {
namespace {

const Isa* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni"))
    return &isa_avx512;
  if (avx2) return &isa_avx2;
#endif
  return &isa_plain;
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{best()};
  return isa;
}

}  // namespace

const Isa& current_isa() { return *chosen().load(std::memory_order_relaxed); }

const FormatKernel* find_kernel(const Isa& isa, int type) {
  for (int i = 0; i < isa.num_formats; ++i)
    if (isa.formats[i].type == type) return &isa.formats[i];
  return nullptr;
}

const char* isa() { return current_isa().name; }

bool set_isa(const char* name) {
  const Isa* known[] = {
      &isa_plain,
#if defined(__x86_64__)
      &isa_avx2, &isa_avx512,
#endif
  };
  for (const Isa* isa : known) {  // in rising order: all up to the best one run here
    if (std::strcmp(isa->name, name) == 0) {
      chosen() = isa;
      return true;
    }
    if (isa == best()) break;
  }
  return false;
}

}  // namespace voltapile
