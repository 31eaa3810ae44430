// The choice of the indexer of attention to chosen blocks: the largest scores of each token. See
// kernels/families.py.
//
// Scores are not negative, so their bits are in their order. They are read twice from far away:
// once to count the first digits, once to take those with larger ones than the last that is chosen
// and to keep aside, with their places, the few with the same. The other digits are of those. What
// is taken is marked in a map of bits, which is in rising order by itself.
#include "block.cuh"
#include "grid.cuh"

constexpr int CHOOSERS = 512;  // threads

namespace voltapile {

constexpr int DIGIT = 10, DIGITS = 2 << DIGIT, PLACES = 3;  // bits; values; the first has one more
constexpr int FIRST = DIGIT * (PLACES - 1);                 // where the first digit begins
constexpr int EACH = DIGITS / CHOOSERS;                     // digits of a thread
constexpr int LISTED = 1792, FOURS = 4;  // scores kept aside; fours of a thread, on their way
static_assert(EACH == 4);

// Where the choice is: of the last score that is taken the digits so far, and how many of those
// with these digits are taken.
struct Cut {
  unsigned found;
  int left;
};

// Of a token; behind it two maps, a bit for each score: larger than the last one, and equal to it.
struct alignas(16) Choice {
  int4 counts[(PLACES + 1) * (DIGITS / 2) / 4];  // of scores with each digit; not counted: 0
  uint2 listed[LISTED];  // bits and place of those with the last one's first digit
  int sums[2][32], count;
  Cut cut;

  __device__ __forceinline__ unsigned* maps() { return reinterpret_cast<unsigned*>(this + 1); }
  __device__ __forceinline__ int4* of_place(int n) {
    return counts + (n ? n + 1 : 0) * (DIGITS / 2) / 4;
  }
  __device__ __forceinline__ void add(int place, unsigned digit) {
    if (digit) atomicAdd(reinterpret_cast<int*>(of_place(place)) + digit, 1);
  }
};
static_assert(sizeof(Choice) == 30992);  // see sparse.py

// The sum of what the threads before this one have.
__device__ __forceinline__ int before_me(int own, int* sums) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int upto = own;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  return upto - own + warp_join(lane < warp ? sums[lane] : 0, Add());
}

// One more digit: that of the largest ones that were counted where `left` is reached. If no other
// one is, it is 0.
__device__ __forceinline__ Cut next_digit(Choice& own, int place, Cut cut) {
  const int four = CHOOSERS - 1 - static_cast<int>(threadIdx.x);
  __syncthreads();
  int4 sum{0, 0, 0, 0};
  if (place == 0 || four < DIGITS / 2 / 4) sum = own.of_place(place)[four];
  if (four == 0) sum.x = 1 << 30;
  const int counts[EACH] = {sum.w, sum.z, sum.y, sum.x};
  int before = before_me(sum.x + sum.y + sum.z + sum.w, own.sums[0]);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (before < cut.left && before + counts[i] >= cut.left)
      own.cut = {cut.found << DIGIT | static_cast<unsigned>(EACH * four + EACH - 1 - i),
                 cut.left - before};
    before += counts[i];
  }
  __syncthreads();
  return own.cut;
}

// f(bits, place) for each of `count` scores.
template <class F>
__device__ __forceinline__ void for_scores(const uint4* scores, int count, F f) {
#pragma unroll 1
  for (int start = threadIdx.x; 4 * start < count; start += FOURS * CHOOSERS) {
    uint4 fours[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; ++i)
      fours[i] = scores[min(start + i * CHOOSERS, (count - 1) / 4)];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      const int place = 4 * (start + i * CHOOSERS);
      const unsigned bits[4] = {fours[i].x, fours[i].y, fours[i].z, fours[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (place + j < count) f(bits[j], place + j);
    }
  }
}

__device__ __forceinline__ void mark(unsigned* map, int place) {
  atomicOr(map + place / 32, 1u << place % 32);
}

// A token's.
struct Scores {
  const uint4* scores;
  int count;

  // Marks those that are taken. larger, equal: maps. Of equal ones some may be taken.
  __device__ __forceinline__ Cut find(Choice& own, int chosen, unsigned* larger,
                                      unsigned* equal) const {
    for_scores(scores, count, [&](unsigned bits, int) { own.add(0, bits >> FIRST); });
    Cut cut = next_digit(own, 0, {0, chosen});
    const unsigned first = cut.found;
    const int same = reinterpret_cast<const int*>(own.of_place(0))[first];
    const bool is_listed = first > 0 && same <= LISTED;
    for_scores(scores, count, [&](unsigned bits, int place) {
      if (bits >> FIRST > first) mark(larger, place);
      if (bits >> FIRST == first && is_listed)
        own.listed[atomicAdd(&own.count, 1)] = {bits, static_cast<unsigned>(place)};
    });
    __syncthreads();
    const auto for_same = [&](auto f) {
      if (is_listed) {
#pragma unroll 1
        for (int i = threadIdx.x; i < same; i += CHOOSERS)
          f(own.listed[i].x, static_cast<int>(own.listed[i].y));
      } else {
        for_scores(scores, count, [&](unsigned bits, int place) {
          if (bits >> FIRST == first) f(bits, place);
        });
      }
    };
#pragma unroll 1
    for (int n = 1; n < PLACES; ++n) {
      const int shift = FIRST - n * DIGIT;
      for_same([&](unsigned bits, int) {
        const unsigned upper = bits >> shift;
        if (upper >> DIGIT == cut.found) own.add(n, upper & ((1 << DIGIT) - 1));
      });
      cut = next_digit(own, n, cut);
    }
    for_same([&](unsigned bits, int place) {
      if (bits >= cut.found) mark(bits > cut.found ? larger : equal, place);
    });
    __syncthreads();
    return cut;
  }

  // Numbers of the scores that are taken, rising. left: of equal ones. Each thread has neighbours.
  __device__ __forceinline__ void write(Choice& own, const unsigned* larger,
                                        const unsigned* equal, int left, int* blocks) const {
    const int words = (count + 31) / 32, each = (words + CHOOSERS - 1) / CHOOSERS;
    const int first = min(words, each * static_cast<int>(threadIdx.x));
    const int last = min(words, first + each);
    int larger_of = 0, equal_of = 0;
#pragma unroll 4
    for (int i = first; i < last; ++i) larger_of += __popc(larger[i]), equal_of += __popc(equal[i]);
    int to = before_me(larger_of, own.sums[0]), equals = before_me(equal_of, own.sums[1]);
#pragma unroll 1
    for (int i = first; i < last; ++i) {
      const unsigned equal_ones = equals < left ? equal[i] : 0;
#pragma unroll 1
      for (unsigned ones = larger[i] | equal_ones; ones; ones &= ones - 1) {
        const int bit = __ffs(ones) - 1, is_equal = equal_ones >> bit & 1;
        if (!is_equal || equals < left) blocks[to + min(equals, left)] = 32 * i + bit;
        to += 1 - is_equal, equals += is_equal;
      }
    }
  }
};

}  // namespace voltapile

using namespace voltapile;

// grid: (tokens), CHOOSERS threads. scores: [tokens][most], most a multiple of 4. blocks:
// [tokens][chosen], rising. The largest scores, of equal ones the first; all, if there are no more.
// shared: a Choice and two bits for each score that there may be.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 2)
    index_choose(const float* scores, const int* positions, int* blocks, int shift, int most,
                 int chosen) {
  extern __shared__ __align__(16) unsigned char shared[];
  Choice& own = *reinterpret_cast<Choice*>(shared);
  grid_launch();
  const int t = blockIdx.x, whole = min((positions[t] + 1) >> shift, most);
  const int words = (whole + 31) / 32;
  blocks += static_cast<unsigned>(t * chosen);
  if (whole <= chosen) {
    grid_wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < whole; i += CHOOSERS) blocks[i] = i;
    return;
  }
#pragma unroll
  for (int i = 0; i < sizeof own.counts / sizeof(int4); i += CHOOSERS)
    own.counts[i + threadIdx.x] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * words; i += CHOOSERS) own.maps()[i] = 0;
  if (threadIdx.x == 0) own.count = 0;
  __syncthreads();
  grid_wait();
  const float* from = scores + static_cast<long long>(t) * most;
  const Scores mine{reinterpret_cast<const uint4*>(from), whole};
  unsigned *larger = own.maps(), *equal = larger + words;
  const Cut cut = mine.find(own, chosen, larger, equal);
  mine.write(own, larger, equal, cut.left, blocks);
}
