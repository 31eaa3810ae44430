// How blocks of a cluster (sm_90) bring together what they found about the same rows. Each joins
// its own strands and sends what they give to the block that owns the row: nothing is fenced, and
// nobody reads another block's memory, so that a block may end when it has written its rows.
#pragma once
#include "attention_join.cuh"
#if VP_ARCH >= 900 && CLUSTER > 1
#define SPLIT CLUSTER
#include "cluster.cuh"
#else
#define VP_CLUSTER
#endif

namespace voltapile {

#if VP_ARCH >= 900 && CLUSTER > 1
static_assert(BLOCKS == 8 && STRANDS == 4);

// What the blocks send a row's owner. Rows are dealt out: a block owns row `rank` and each
// `blocks`-th after it.
struct Inbox {
  static constexpr int LETTERS = 14;  // the most for up to 8 rows and blocks
  float4 out[LETTERS][DIM / 4];
  float2 stats[LETTERS];  // largest score, sum of exponentials
};

__device__ __forceinline__ void open_inbox(Bell* bell) { make_bell(bell); }

// Of the cluster's blocks that have part of a piece, which is this.
struct Member {
  Bell* bell;
  int rank, blocks;

  __device__ int rows_of(int rows) const { return (rows - rank + blocks - 1) / blocks; }
  __device__ int letter(int row, int from) const { return row / blocks * blocks + from; }
};

// Of each row all columns, in which all strands are joined.
__device__ __forceinline__ void send_rows(const Ends& ends, Inbox& inbox, const Member& own,
                                          int rows) {
#pragma unroll 1
  for (int at = threadIdx.x; at < rows * (DIM / 4); at += THREADS) {
    const int r = at / (DIM / 4), q = at % (DIM / 4), letter = own.letter(r, own.rank);
    Part all;
#pragma unroll
    for (int s = 0; s < STRANDS; ++s) join_part(all, part_of(ends.rows[s][r], 4 * q));
    send(all.out, &inbox.out[letter][q], own.bell, r % own.blocks);
    if (q == 0) send(float2{all.most, all.sum}, &inbox.stats[letter], own.bell, r % own.blocks);
  }
}

// What block b sent; nothing if it is not there.
__device__ __forceinline__ Part part_from(const Inbox& inbox, const Member& own, int row, int q,
                                          int b) {
  const int letter = own.letter(row, min(b, own.blocks - 1));
  const float2 stats = inbox.stats[letter];
  return {b < own.blocks ? stats.x : -infinity(), stats.y, inbox.out[letter][q]};
}

// The two halves of a strand's shares, then the strands, as one block has them.
__device__ __forceinline__ Part join_blocks(const Inbox& inbox, const Member& own, int row, int q) {
  Part parts[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) parts[b] = part_from(inbox, own, row, q, b);
#pragma unroll
  for (int s = 0; s < STRANDS; ++s) join_part(parts[s], parts[s + STRANDS]);
  return join_strands([&](int s) { return parts[s]; });
}

// Up to HALF rows from `first` on. A call, since its registers would be taken from those of the
// products. is_odd: whether it is the first, third ... call.
__device__ __noinline__ void write_dealt_rows(const Ends& ends, Inbox& inbox, const Row* rows,
                                              int first, int count, Member own, bool is_odd,
                                              Target to) {
  const int mine = own.rows_of(count);
  if (threadIdx.x == 0 && mine > 0)
    expect(own.bell, mine * own.blocks * static_cast<int>(DIM * sizeof(float) + sizeof(float2)));
  cluster_wait();  // until inboxes are free
  send_rows(ends, inbox, own, count);
  if (mine > 0) await(own.bell, is_odd);
#pragma unroll 1
  for (int at = threadIdx.x; at < mine * (DIM / 4); at += THREADS) {
    const int row = own.rank + at / (DIM / 4) * own.blocks, q = at % (DIM / 4);
    const int slot = rows[first + row].slot;
    if (slot >= 0 && 4 * q < width_of(to.dim))
      write_part(to, join_blocks(inbox, own, row, q), slot, 4 * q);
  }
}
#else
struct Inbox {};
struct Member {
  Bell* bell;
  int rank, blocks;
};
__device__ __forceinline__ void open_inbox(Bell*) {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void write_dealt_rows(const Ends&, Inbox&, const Row*, int, int, Member,
                                                 bool, const Target&) {}
__device__ __forceinline__ unsigned char* own_memory(unsigned char* shared) { return shared; }
#endif

// The strands of all blocks of a piece become its result.
__device__ __forceinline__ void write_piece(Ends& ends, Inbox& inbox, const Row* rows,
                                            const Sums& sums, int used, const Member& own,
                                            const Target& to, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int first = 16 * t + Mma::row_of(0, i);
      if (first >= used) continue;
      cluster_arrive();  // this thread is done with its tiles, and with what was sent before
      const int number = Mma::number(lane);
      const float sum = TURNS > 1 ? sums.sum[t][i] : row_sum(sums.sum[t][i]);
      __syncthreads();  // tiles are done with
      if (16 * t + Mma::row(lane, i) < used) {
        if (Mma::pair(lane) == 0)
          *reinterpret_cast<float2*>(ends.rows[warp][number] + DIM) =
              float2{sums.running[t][i].m, sum};
#pragma unroll
        for (int c = 0; c < DIM / 16; ++c)
          KvTile::write(ends.rows[warp][number] + 16 * c, sums.out[t][c], i, lane);
      }
      __syncthreads();
      if (BLOCKS == 1)
        write_rows(ends, rows, 16 * t, i, used, to);
      else
        write_dealt_rows(ends, inbox, rows, first, min(HALF, used - first), own, i == 0, to);
    }
}

}  // namespace voltapile
