// Partial attention results, and how they are merged along the binary tree over pieces. Included
// by vec_kernels.h.
#pragma once

namespace voltapile {
namespace VOLTAPILE_ISA {
namespace {

constexpr std::int64_t kPieceTokens = 256;
constexpr int kMaxNodes = 64;

// --- sizes ------------------------------------------------------------------------------------

struct Shape {
  std::int64_t piece_pages, piece_tokens, piece_pitch;  // pitch: scores of a piece
  std::int64_t acc_pitch, max_nodes, max_rows;

  Shape(const KvLayout& cache, std::int64_t table_width, std::int64_t rows) {
    piece_pages = cache.page_tokens < kPieceTokens ? kPieceTokens / cache.page_tokens : 1;
    piece_tokens = piece_pages * cache.page_tokens;
    piece_pitch = piece_pages * cache.pitch;
    acc_pitch = ceil_div(cache.value_dim, KvLayout::kPitch) * KvLayout::kPitch;
    max_nodes = 3;
    for (std::int64_t n = ceil_div(table_width, piece_pages); n > 1; n = (n + 1) / 2) {
      max_nodes += 2;
    }
    max_rows = rows;
  }
  std::int64_t node_floats() const { return max_rows * (2 + acc_pitch); }
};

// A partial result of an Item: max[rows], sum[rows], acc[rows][acc_pitch] for 2^level pieces.
struct Node {
  std::int64_t index;
  int level;
};

struct Partial {
  std::int64_t item;
  int count;
  Node nodes[kMaxNodes];
  float* data(const Shape& shape, int node) {
    return reinterpret_cast<float*>(this + 1) + node * shape.node_floats();
  }
  static std::int64_t bytes(const Shape& shape) {
    return ceil_div(sizeof(Partial) + shape.max_nodes * shape.node_floats() * 4, 64) * 64;
  }
};

// --- the tree ---------------------------------------------------------------------------------

// a := a and b together.
inline void merge_nodes(const Shape& shape, std::int64_t rows, float* a, const float* b) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* acc = a + 2 * shape.max_rows + r * shape.acc_pitch;
    const float* other = b + 2 * shape.max_rows + r * shape.acc_pitch;
    float &max = a[r], &sum = a[shape.max_rows + r];
    const float other_max = b[r], other_sum = b[shape.max_rows + r];
    if (other_sum == 0.0f) continue;  // the row sees nothing there
    if (sum == 0.0f) {
      max = other_max;
      sum = other_sum;
      __builtin_memcpy(acc, other, shape.acc_pitch * 4);
      continue;
    }
    const float top = max > other_max ? max : other_max;
    const float u = exp_one(max - top), v = exp_one(other_max - top);
    max = top;
    sum = sum * u + other_sum * v;
    const Vec us = splat(u), vs = splat(v);
    for (std::int64_t d = 0; d < shape.acc_pitch; d += W) {
      store(acc + d, load(acc + d) * us + load(other + d) * vs);
    }
  }
}

inline bool are_siblings(const Node& a, const Node& b) {
  return a.level == b.level && a.index % 2 == 0 && b.index == a.index + 1;
}

// Merges the last two nodes of p while they are the two halves of a parent.
inline void fold(const Shape& shape, std::int64_t rows, Partial* p) {
  while (p->count >= 2 && are_siblings(p->nodes[p->count - 2], p->nodes[p->count - 1])) {
    merge_nodes(shape, rows, p->data(shape, p->count - 2), p->data(shape, p->count - 1));
    --p->count;
    Node& node = p->nodes[p->count - 1];
    node = {node.index / 2, node.level + 1};
  }
}

// Appends a copy of another rank's node, and folds.
inline void append(const Shape& shape, std::int64_t rows, Partial* p, Partial* from, int node) {
  p->nodes[p->count] = from->nodes[node];
  __builtin_memcpy(p->data(shape, p->count), from->data(shape, node), shape.node_floats() * 4);
  ++p->count;
  fold(shape, rows, p);
}

// Merges what is left: every node rises to its parent, alone or with its sibling. Node i's data
// stay at the slot of the leftmost node that it holds.
inline void finish(const Shape& shape, std::int64_t rows, Partial* p) {
  int slot[kMaxNodes];
  for (int i = 0; i < p->count; ++i) slot[i] = i;
  while (p->count > 1) {
    int level = p->nodes[0].level;
    for (int i = 1; i < p->count; ++i) {
      level = p->nodes[i].level < level ? p->nodes[i].level : level;
    }
    int kept = 0;
    for (int i = 0; i < p->count; ++i) {
      Node node = p->nodes[i];
      const int data = slot[i];
      if (node.level == level) {
        if (i + 1 < p->count && are_siblings(node, p->nodes[i + 1])) {
          merge_nodes(shape, rows, p->data(shape, data), p->data(shape, slot[i + 1]));
          ++i;
        }
        node = {node.index / 2, node.level + 1};
      }
      slot[kept] = data;
      p->nodes[kept++] = node;
    }
    p->count = kept;
  }
}

}  // namespace
}  // namespace VOLTAPILE_ISA
}  // namespace voltapile
