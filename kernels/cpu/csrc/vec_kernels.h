// All inner loops of one instruction set, as the table that kernels() hands out.
#pragma once
#include "families.h"
#include "kernels.h"
#include "vec.h"
//
#include "attention_blocks.h"
#include "attention_nodes.h"
//
#include "attention.h"
#include "elementwise.h"
#include "spectrum.h"
#include "streams.h"
//
#include "states.h"
//
#include "delta.h"
#include "ngrams.h"
#include "sparse.h"

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

constexpr Kernels make_kernels() {
  return {rms_norm,  rope,     store_kv, attention, attention_rows,
          row_stats, penalise, best,     scan_head, histogram,      gather_bucket};
}

constexpr FamilyKernels make_families() {
  return {silu,       gate,      gate_rows, stream_norm,  stream_mix,  stream_add,
          delta_net,  ngram_add, score_pages, attention_to, chosen_nodes};
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
