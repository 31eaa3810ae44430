// All inner loops of one instruction set, as the table that kernels() hands out.
#pragma once
#include "kernels.h"
#include "vec.h"
//
#include "attention_blocks.h"
#include "attention_nodes.h"
//
#include "attention.h"
#include "elementwise.h"
#include "spectrum.h"

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

constexpr Kernels make_kernels() {
  return {rms_norm,  rope,     store_kv, attention, attention_rows,
          row_stats, penalise, best,     scan_head, histogram,      gather_bucket};
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
