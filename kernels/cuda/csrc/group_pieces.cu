// Collectives of large arrays by plain data and flags: a block moves pieces of up to PIECE floats,
// says so behind them, and waits for the others' word. 512 threads; a grid PIECE_BLOCKS at most,
// the same on all ranks. Counts of floats are multiples of 4, and of 8 for eights.
// -D CODE, how the floats of a sum travel: Plain, or Eights (group_eights.cuh).
#include "grid.cuh"
#include "group.cuh"
#include "group_eights.cuh"

namespace voltapile {

constexpr int THREADS = 512;
static_assert(PIECE == 8 * THREADS && TWIN == 4 * THREADS);

// A piece of an array; what lies behind the array's end is not there.
struct Range {
  long long first;
  int length;  // float4
  __device__ Range(long long begin, long long count, int most = PIECE) : first(begin) {
    const long long rest = (count - begin) / 4;
    length = static_cast<int>(rest < 0 ? 0 : rest < most / 4 ? rest : most / 4);
  }
};

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
  __device__ Range slice(long long begin, int j, long long count) const {
    return Range(begin + static_cast<long long>(j) * PIECE, count);
  }

  // Each mate's slice goes to that mate.
  __device__ void scatter(const float* part, long long begin, long long count) const {
    for (int j = 0; j < mates; ++j) {
      if (j == mate) continue;
      const int r = group->mate_ranks[j];
      const Range range = slice(begin, j, count);
      CODE::write(piece_of(group->peers[r].out, exchanges[r]), range.length,
                  CODE::load(part, range.first, range.length));
    }
  }

  // What all have written for the same place, in their order; `own` is what this rank has there.
  __device__ Eight add(const int* others, int number, int mine, int length,
                       const Eight& own) const {
    Eight sum;
    for (int j = 0; j < number; ++j) {
      const int r = others[j];
      const Eight value =
          j == mine ? own : CODE::read(piece_of(group->peers[r].in, exchanges[r]), length);
      sum = j == 0 ? value : plus(sum, value);
    }
    return sum;
  }

  __device__ void hand_out(const int* others, int number, int mine, int length,
                           const Eight& sum) const {
    for (int j = 0; j < number; ++j) {
      if (j == mine) continue;
      const int r = others[j];
      CODE::write(piece_of(group->peers[r].out, exchanges[r]), length, sum);
    }
  }

  // The slices that the mates have added, and our own.
  __device__ void take(float* out, long long begin, long long count, int accumulate,
                       const Eight& sum) const {
    for (int j = 0; j < mates; ++j) {
      const int r = group->mate_ranks[j];
      const Range range = slice(begin, j, count);
      const Eight value =
          j == mate ? sum : CODE::read(piece_of(group->peers[r].in, exchanges[r]), range.length);
      CODE::put(out, range.first, range.length, value, accumulate);
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
    if (threadIdx.x == 0)
      store_flag(flag_of(peer.out, IS_SENT ? SENT_FLAG : TAKEN_FLAG), number + 1);
  }
  if (threadIdx.x == 0) {
    wait.end();
    *counter = number;
  }
}

}  // namespace voltapile

using namespace voltapile;

// As group_sum_slices: a round adds PIECE floats for each mate and block. What is handed out is
// rounded as it travels, here too.
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
    const Range mine = pieces.slice(begin, pieces.mate, count);
    const Eight own = CODE::load(part, mine.first, mine.length);
    pieces.next(mates, pieces.mates, pieces.mate);
    pieces.scatter(part, begin, count);
    meet(group, mates, pieces.mates, pieces.mate, exchanges, wait);
    Eight sum = CODE::rounded(pieces.add(mates, pieces.mates, pieces.mate, mine.length, own));
    if (pieces.islands > 1) {
      pieces.next(partners, pieces.islands, pieces.island);
      pieces.hand_out(partners, pieces.islands, pieces.island, mine.length, sum);
      meet(group, partners, pieces.islands, pieces.island, exchanges, wait);
      sum = CODE::rounded(
          pieces.add(partners, pieces.islands, pieces.island, mine.length, sum));
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
// added: a rank that has seen the other's flag n knows that n - 2 has been read there, and n + 1
// goes to another part of the room than n - 1 and n. A grid of PIECE_BLOCKS / 2; always plain.
extern "C" __global__ void __launch_bounds__(512, 2)
group_sum_twins(Group* group, const float* part, float* out, long long count, int accumulate) {
  grid_wait();
  grid_launch();
  const int other = 1 - group->rank, block = blockIdx.x, i = threadIdx.x;
  const Peer peer = group->peers[other];
  unsigned exchange = group->pieces[other][block];
  const long long step = static_cast<long long>(gridDim.x) * TWIN;
  Wait wait(group);
  const auto value_of = [&](Range range) {
    return part == nullptr ? nothing() : reinterpret_cast<const float4*>(part + range.first)[i];
  };
  const auto hand_over = [&](long long begin) {  // its flag comes with the next barrier
    const Range range(begin, count, TWIN);
    float4* to = reinterpret_cast<float4*>(twin_of(peer.out, exchange + 1));
    if (i < range.length) to[i] = value_of(range);
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
    if (i < range.length)
      put_four(out + range.first, i, plus(value_of(range), load_far(from + i)), accumulate);
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
