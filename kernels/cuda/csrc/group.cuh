// A group of ranks, as its kernels see it: where to write for each other rank and where to read
// what it wrote, how far each pair has come, and how a wait ends.
//
// An exchange goes both ways between two ranks: each writes into one half of its room at the other
// and reads the other half of none before the peer has answered. A block of a kernel counts its own
// exchanges with each peer, and block b of all ranks makes the same ones; so a rank that writes
// exchange n + 2 has seen the peer's n + 1, and the peer has read n. Two halves are enough.
// Words of tails (group_tail.cuh, group_norm.cu) have no count in them: who has read one empties
// its place, and has done that before it sends anything of the next exchange. Many kernels of a
// step may be on a GPU at once (grid.cuh): so an exchange is counted before a later one may start.
// Messages (send, receive) go one way and are acknowledged by a count of their own. A count has 32
// bits: only a slot that lay unused for exactly 2^32 exchanges of its block could be misread.
//
// The numbers are written once more in kernels/cuda/links.py.
#pragma once
#include "group_wires.cuh"

namespace voltapile {

constexpr int MOST_RANKS = 16;
constexpr int PACK_BLOCKS = 128, PIECE_BLOCKS = 256;  // of a grid, at most
constexpr int SLOTS = 512;   // packs of a block in one exchange
constexpr int PIECE = 4096;  // floats of a block in one exchange of plain data
constexpr int TWIN = 2048;   // the same, where there are two ranks
constexpr int MESSAGE = 2048;  // floats of a block in one of a message's parts
constexpr int LONGEST_ROW = 5120;  // floats of one that a sum norms, eight of a thread
// Of a sum by words, most.
constexpr int TAIL_RANKS = 8, TAIL_ROWS = 32, TAIL_COLUMNS = 8192;
// A rank's room at another: packs, pieces, messages, words of tails, flags.
constexpr int HALF_PACKS = PACK_BLOCKS * SLOTS;
constexpr long long HALF_PIECES = 4LL * PIECE_BLOCKS * PIECE;
constexpr long long HALF_MESSAGES = 4LL * PIECE_BLOCKS * MESSAGE;
constexpr long long PACKS_AT = 0, PIECES_AT = 2LL * HALF_PACKS * 24;
constexpr long long MESSAGES_AT = PIECES_AT + 2 * HALF_PIECES;
constexpr long long TAILS_AT = MESSAGES_AT + 2 * HALF_MESSAGES;
constexpr long long HALF_TAILS = 4LL * TAIL_ROWS * TAIL_COLUMNS;
constexpr long long FLAGS_AT = TAILS_AT + 2 * HALF_TAILS;
enum Flag { PIECE_FLAG, SENT_FLAG, TAKEN_FLAG, ROWS_FLAG };  // each PIECE_BLOCKS words

enum Code { FINE, LATE, ENDED };

struct Peer {
  char* out;      // this rank's room there
  char* in;       // its room here
  int is_narrow;
  int pad[3];
};

struct Group {
  long long limit_ticks;
  const unsigned* abort;  // in host memory; not 0: give up
  int* waits_for;         // in host memory: the rank that this one waits for, or -1
  unsigned* report;       // in host memory: a Code and the rank that did not come
  unsigned has_failed;    // all that waits gives up, now and later
  int rank, ranks;
  int mates, mate;        // of the island: how many, and which this rank is
  int islands, island;
  int pad;
  // Of the island; of the same place in each.
  int mate_ranks[MOST_RANKS], partner_ranks[MOST_RANKS];
  Peer peers[MOST_RANKS];
  unsigned packs[MOST_RANKS][PACK_BLOCKS];  // exchanges so far
  unsigned pieces[MOST_RANKS][PIECE_BLOCKS];
  unsigned sent[MOST_RANKS][PIECE_BLOCKS], taken[MOST_RANKS][PIECE_BLOCKS];
  unsigned tails, unused;  // 65,536 for each sum by words (group_tail.cuh)
};

// The patience of one thread in one kernel. Looking up must be cheap: while a rank looks up it is
// late itself, and then the others do. Time is told by the multiprocessor's own clock, since all
// threads of the GPU queue up for the global one; the host's words are looked at seldom.
class Wait {
 public:
  __device__ Wait(Group* group) : group_(group) {}

  // Whether to look no longer for what rank `other` should have written.
  __device__ bool is_over(int other) {
    if ((++looks_ & 255) != 0) return false;
    return look_up(other);
  }
  // All has come; after a failure it stays known for whom.
  __device__ void end() {
    if (has_told_ && !load_fresh(&group_->has_failed))
      store_fresh(reinterpret_cast<unsigned*>(group_->waits_for), ~0u);
  }

 private:
  // In 1,024 ticks: one to four ms or so. Their number comes round after half an hour.
  static constexpr unsigned SELDOM = 1 << 11, SOON = 1 << 13;

  __device__ bool look_up(int other) {
    const unsigned now = static_cast<unsigned>(ticks() >> 10) | 1;
    if (began_ == 0) began_ = looked_ = now;
    if (load_fresh(&group_->has_failed)) return true;
    if (now - began_ > group_->limit_ticks >> 10) return fail(LATE, other);
    if (now - looked_ < SELDOM || threadIdx.x % 32 != 0) return false;
    looked_ = now;
    if (load_fresh(group_->abort)) return fail(ENDED, other);
    if (!has_told_ && now - began_ > SOON) {
      store_fresh(reinterpret_cast<unsigned*>(group_->waits_for), other);
      has_told_ = true;
    }
    return false;
  }

  __device__ bool fail(Code code, int other) {
    if (swap(&group_->has_failed, 1) == 0) {
      store_fresh(reinterpret_cast<unsigned*>(group_->waits_for), other);
      store_fresh(group_->report + 1, other);
      order_all();
      store_fresh(group_->report, code);
    }
    return true;
  }

  Group* group_;
  unsigned looks_ = 0, began_ = 0, looked_ = 0;
  bool has_told_ = false;
};

__device__ __forceinline__ char* slot_of(char* room, unsigned exchange, int is_narrow, int block,
                                         int slot) {
  const long long at = static_cast<long long>(exchange & 1) * HALF_PACKS + block * SLOTS;
  return room + PACKS_AT + (is_narrow ? at * 24 + slot * 8 : (at + slot) * 16);
}

// A pack of an exchange of a block.
__device__ __forceinline__ void push(const Peer& peer, unsigned exchange, Pack words, int block,
                                     int slot) {
  char* to = slot_of(peer.out, exchange, peer.is_narrow, block, slot);
  if (!peer.is_narrow) return store_wide(to, words, exchange);
  store_narrow(to, words.x, exchange);
  store_narrow(to + SLOTS * 8, words.y, exchange);
  store_narrow(to + SLOTS * 16, words.z, exchange);
}

// What the peer has pushed; after a failure anything. One loop for both kinds of packs, since its
// rare end is long.
__device__ __forceinline__ Pack pull(const Peer& peer, int other, unsigned exchange, Wait& wait,
                                      int block, int slot) {
  const char* from = slot_of(peer.in, exchange, peer.is_narrow, block, slot);
  Pack words = {0, 0, 0};
  bool has_come;
  do {
    if (!peer.is_narrow) {
      has_come = load_wide(from, exchange, &words);
    } else {
      has_come = load_narrow(from, exchange, &words.x);
      if (has_come)  // both at once
        has_come = load_narrow(from + SLOTS * 8, exchange, &words.y) &
                   load_narrow(from + SLOTS * 16, exchange, &words.z);
    }
  } while (!has_come && !wait.is_over(other));
  return words;
}

// This thread's own pack of its block.
__device__ __forceinline__ void push(const Peer& peer, unsigned exchange, Pack words) {
  push(peer, exchange, words, blockIdx.x, threadIdx.x);
}
__device__ __forceinline__ Pack pull(const Peer& peer, int other, unsigned exchange, Wait& wait) {
  return pull(peer, other, exchange, wait, blockIdx.x, threadIdx.x);
}

__device__ __forceinline__ float* piece_of(char* room, unsigned exchange) {
  return reinterpret_cast<float*>(room + PIECES_AT + (exchange & 1) * HALF_PIECES) +
         blockIdx.x * PIECE;
}
// Of two ranks: one half in four parts for half as many blocks, so that one exchange may run ahead.
__device__ __forceinline__ float* twin_of(char* room, unsigned exchange) {
  return reinterpret_cast<float*>(room + PIECES_AT + (exchange & 3) * (HALF_PIECES / 4)) +
         blockIdx.x * TWIN;
}
// The other half in two parts, for rows of eights; counted where a rank's own pieces would be.
__device__ __forceinline__ uint4* eights_of(char* room, unsigned exchange) {
  const long long part = HALF_PIECES + (exchange & 1) * (HALF_PIECES / 2);
  return reinterpret_cast<uint4*>(room + PIECES_AT + part) + blockIdx.x * (TWIN / 4);
}
__device__ __forceinline__ float* message_of(char* room, unsigned number) {
  return reinterpret_cast<float*>(room + MESSAGES_AT + (number & 1) * HALF_MESSAGES) +
         blockIdx.x * MESSAGE;
}
__device__ __forceinline__ unsigned* flag_of(char* room, Flag flag) {
  return reinterpret_cast<unsigned*>(room + FLAGS_AT) + flag * PIECE_BLOCKS + blockIdx.x;
}

// Counters wrap round.
__device__ __forceinline__ bool has_reached(unsigned value, unsigned target) {
  return static_cast<int>(value - target) >= 0;
}

// One thread waits until a flag in this rank's memory has come to `target`.
__device__ __forceinline__ void await(const unsigned* flag, unsigned target, int other,
                                      Wait& wait) {
  while (!has_reached(load_flag(flag), target) && !wait.is_over(other)) {
  }
}

// Three floats of an array of `count`; zeros behind its end, and of an array that is null.
__device__ __forceinline__ Pack words_at(const unsigned* x, long long first, long long count) {
  Pack words = {0, 0, 0};
  if (x == nullptr) return words;
  if (first < count) words.x = x[first];
  if (first + 1 < count) words.y = x[first + 1];
  if (first + 2 < count) words.z = x[first + 2];
  return words;
}

struct Sum {
  float x, y, z;
  __device__ void start(Pack w) {
    x = __uint_as_float(w.x), y = __uint_as_float(w.y), z = __uint_as_float(w.z);
  }
  __device__ void add(Pack w) {
    x += __uint_as_float(w.x), y += __uint_as_float(w.y), z += __uint_as_float(w.z);
  }
  __device__ Pack words() const {
    return {__float_as_uint(x), __float_as_uint(y), __float_as_uint(z)};
  }
};

}  // namespace voltapile
