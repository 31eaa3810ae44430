// Collectives of large arrays by plain data and flags: a block moves pieces of up to PIECE floats,
// says so behind them, and waits for the others' word. 512 threads; a grid PIECE_BLOCKS at most, the
// same on all ranks. Counts of floats are multiples of 4.
#include "grid.cuh"
#include "group.cuh"

namespace voltapile {

constexpr int THREADS = 512, HELD = PIECE / 4 / THREADS;  // float4 of a thread

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// A piece of an array; what lies behind the array's end is not there.
struct Range {
  long long first;
  int length;  // float4
  __device__ Range(long long begin, long long count, int most = PIECE) : first(begin) {
    const long long rest = (count - begin) / 4;
    length = static_cast<int>(rest < 0 ? 0 : rest < most / 4 ? rest : most / 4);
  }
};

__device__ __forceinline__ float4 value_of(const float* x, Range range, int i) {
  return x == nullptr ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                      : reinterpret_cast<const float4*>(x + range.first)[i];
}

// Says to the others that this block's data are there, and waits for theirs.
__device__ __forceinline__ void meet(Group* group, const int* others, int number, int mine,
                                     const unsigned* exchanges, Wait& wait) {
  __syncthreads();
  const int i = threadIdx.x;
  if (i < number && i != mine) {
    const int r = others[i];
    store_flag(flag_of(group->peers[r].out, PIECE_FLAG), exchanges[r]);
    await(flag_of(group->peers[r].in, PIECE_FLAG), exchanges[r], r, wait);
  }
  __syncthreads();
}

struct Pieces {
  Group* group;
  unsigned* exchanges;  // of each rank, in shared memory
  int mates, mate, islands, island;

  __device__ void next(const int* others, int number, int mine) const {
    const int i = threadIdx.x;
    __syncthreads();
    if (i < number && i != mine) ++exchanges[others[i]];
    __syncthreads();
  }

  // Each mate's slice goes to that mate.
  __device__ void scatter(const float* part, long long begin, long long count) const {
    for (int j = 0; j < mates; ++j) {
      if (j == mate) continue;
      const int r = group->mate_ranks[j];
      const Range range(begin + static_cast<long long>(j) * PIECE, count);
      float4* to = reinterpret_cast<float4*>(piece_of(group->peers[r].out, exchanges[r]));
      for (int i = threadIdx.x; i < range.length; i += THREADS) to[i] = value_of(part, range, i);
    }
  }

  // sum: of the same place in all parts, this thread's share.
  __device__ void add(const int* others, int number, int mine, int length, float4 (&sum)[HELD],
                      const float4 (&own)[HELD]) const {
    for (int j = 0; j < number; ++j) {
      const int r = others[j];
      const float4* from = reinterpret_cast<const float4*>(piece_of(group->peers[r].in, exchanges[r]));
#pragma unroll
      for (int h = 0; h < HELD; ++h) {
        const int i = h * THREADS + threadIdx.x;
        if (i >= length) break;
        const float4 value = j == mine ? own[h] : load_far(from + i);
        sum[h] = j == 0 ? value : plus(sum[h], value);
      }
    }
  }

  __device__ void hand_out(const int* others, int number, int mine, int length,
                           const float4 (&sum)[HELD]) const {
    for (int j = 0; j < number; ++j) {
      if (j == mine) continue;
      const int r = others[j];
      float4* to = reinterpret_cast<float4*>(piece_of(group->peers[r].out, exchanges[r]));
#pragma unroll
      for (int h = 0; h < HELD; ++h) {
        const int i = h * THREADS + threadIdx.x;
        if (i < length) to[i] = sum[h];
      }
    }
  }

  // The slices that the mates have added, and our own.
  __device__ void take(float* out, long long begin, long long count, int accumulate,
                       const float4 (&sum)[HELD]) const {
    for (int j = 0; j < mates; ++j) {
      const int r = group->mate_ranks[j];
      const Range range(begin + static_cast<long long>(j) * PIECE, count);
      const float4* from = reinterpret_cast<const float4*>(piece_of(group->peers[r].in, exchanges[r]));
      float4* to = reinterpret_cast<float4*>(out + range.first);
#pragma unroll
      for (int h = 0; h < HELD; ++h) {
        const int i = h * THREADS + threadIdx.x;
        if (i >= range.length) break;
        const float4 value = j == mate ? sum[h] : load_far(from + i);
        to[i] = accumulate ? plus(to[i], value) : value;
      }
    }
  }
};

// This block copies its pieces of a message; flags: this side's count of them.
template <bool IS_SENT>
__device__ void pass_on(Group* group, float* x, long long count, int other) {
  const int block = blockIdx.x;
  const Peer& peer = group->peers[other];
  unsigned* counter = IS_SENT ? &group->sent[other][block] : &group->taken[other][block];
  unsigned number = *counter;
  Wait wait(group);
  for (long long begin = static_cast<long long>(block) * MESSAGE; begin < count;
       begin += static_cast<long long>(gridDim.x) * MESSAGE, ++number) {
    const Range range(begin, count, MESSAGE);
    if (threadIdx.x == 0) {
      if (IS_SENT) await(flag_of(peer.in, TAKEN_FLAG), number - 1, other, wait);
      else await(flag_of(peer.in, SENT_FLAG), number + 1, other, wait);
    }
    __syncthreads();
    float4* mine = reinterpret_cast<float4*>(x + begin);
    float4* theirs = reinterpret_cast<float4*>(message_of(IS_SENT ? peer.out : peer.in, number));
    for (int i = threadIdx.x; i < range.length; i += THREADS) {
      if (IS_SENT) theirs[i] = mine[i];
      else mine[i] = load_far(theirs + i);
    }
    __syncthreads();
    if (threadIdx.x == 0) store_flag(flag_of(peer.out, IS_SENT ? SENT_FLAG : TAKEN_FLAG), number + 1);
  }
  if (threadIdx.x == 0) {
    wait.end();
    *counter = number;
  }
}

}  // namespace voltapile

using namespace voltapile;

// As group_sum_slices: a round adds PIECE floats for each mate and block.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum_pieces(Group* group, const float* part, float* out, long long count, int accumulate) {
  __shared__ unsigned exchanges[MOST_RANKS];
  grid_wait();
  grid_launch();
  const int block = blockIdx.x;
  if (threadIdx.x < MOST_RANKS) exchanges[threadIdx.x] = group->pieces[threadIdx.x][block];
  const Pieces pieces{group, exchanges, group->mates, group->mate, group->islands, group->island};
  const int *mates = group->mate_ranks, *partners = group->partner_ranks;
  Wait wait(group);
  const long long round = static_cast<long long>(pieces.mates) * PIECE;
  for (long long begin = block * round; begin < count; begin += gridDim.x * round) {
    const Range mine(begin + static_cast<long long>(pieces.mate) * PIECE, count);
    float4 own[HELD], sum[HELD];
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      const int i = h * THREADS + threadIdx.x;
      own[h] = i < mine.length ? value_of(part, mine, i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    pieces.next(mates, pieces.mates, pieces.mate);
    pieces.scatter(part, begin, count);
    meet(group, mates, pieces.mates, pieces.mate, exchanges, wait);
    pieces.add(mates, pieces.mates, pieces.mate, mine.length, sum, own);
    if (pieces.islands > 1) {
      pieces.next(partners, pieces.islands, pieces.island);
      pieces.hand_out(partners, pieces.islands, pieces.island, mine.length, sum);
      meet(group, partners, pieces.islands, pieces.island, exchanges, wait);
#pragma unroll
      for (int h = 0; h < HELD; ++h) own[h] = sum[h];
      pieces.add(partners, pieces.islands, pieces.island, mine.length, sum, own);
    }
    pieces.next(mates, pieces.mates, pieces.mate);
    pieces.hand_out(mates, pieces.mates, pieces.mate, mine.length, sum);
    meet(group, mates, pieces.mates, pieces.mate, exchanges, wait);
    pieces.take(out, begin, count, accumulate, sum);
  }
  wait.end();
  if (threadIdx.x < MOST_RANKS) group->pieces[threadIdx.x][block] = exchanges[threadIdx.x];
}

// Of two ranks: either sends the other its whole part. A piece travels while the one before it is
// added: a rank that has seen the other's flag n knows that n - 2 has been read there, and n + 1 goes
// to another part of the room than n - 1 and n.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum_twins(Group* group, const float* part, float* out, long long count, int accumulate) {
  grid_wait();
  grid_launch();
  const int other = 1 - group->rank, block = blockIdx.x, i = threadIdx.x;
  const Peer peer = group->peers[other];
  unsigned exchange = group->pieces[other][block];
  const long long step = static_cast<long long>(gridDim.x) * TWIN;
  Wait wait(group);
  const auto hand_over = [&](long long begin) {  // its flag comes with the next barrier
    const Range range(begin, count, TWIN);
    float4* to = reinterpret_cast<float4*>(twin_of(peer.out, exchange + 1));
    if (i < range.length) to[i] = value_of(part, range, i);
    __syncthreads();
    if (i == 0) store_flag(flag_of(peer.out, PIECE_FLAG), exchange + 1);
  };
  const long long first = static_cast<long long>(block) * TWIN;
  if (first < count) hand_over(first);
  for (long long begin = first; begin < count; begin += step) {
    ++exchange;
    if (i == 0) await(flag_of(peer.in, PIECE_FLAG), exchange, other, wait);
    __syncthreads();
    const Range range(begin, count, TWIN);
    const float4* from = reinterpret_cast<const float4*>(twin_of(peer.in, exchange));
    if (begin + step < count) hand_over(begin + step);
    if (i < range.length) {
      float4* to = reinterpret_cast<float4*>(out + range.first);
      const float4 value = plus(value_of(part, range, i), load_far(from + i));
      to[i] = accumulate ? plus(to[i], value) : value;
    }
  }
  if (i == 0) {
    wait.end();
    group->pieces[other][block] = exchange;
  }
}

extern "C" __global__ void __launch_bounds__(512, 2)
group_send(Group* group, float* x, long long count, int target) {
  grid_wait();
  grid_launch();
  pass_on<true>(group, x, count, target);
}

extern "C" __global__ void __launch_bounds__(512, 2)
group_receive(Group* group, float* x, long long count, int source) {
  grid_wait();
  grid_launch();
  pass_on<false>(group, x, count, source);
}
