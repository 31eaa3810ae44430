// The ranks of one model, in processes of their own, that meet in a block of shared memory.
//
// Every collective is one or more rounds: each rank writes into its half of a double buffer, says
// so, and reads the others' when all have. A rank that has come to round n has read round n - 1, so
// two halves are enough and nothing has to be acknowledged. send and receive have a ring for each
// ordered pair instead. A wait spins a little and then sleeps (futex); it ends at a deadline or
// when the abort word is set, and then `failure` says who waited for whom.
//
// Knows neither who made the memory nor what the numbers mean.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"

namespace voltapile {

// A counter in shared memory that other processes wait for.
struct alignas(64) Word {
  std::atomic<std::uint32_t> value, sleepers;
};

struct GroupArgs {
  std::uint8_t* memory;  // Group::bytes of zeros, aligned to 64; the same for all ranks
  int rank, ranks;
  std::int64_t room;  // bytes that each rank keeps for each: for its halves and for its rings
  double seconds;     // after which a wait gives up
  const std::atomic<std::uint32_t>* abort;  // not 0: all waits give up; may be null
  std::atomic<std::int32_t>* waits_for;     // the rank that this one waits for, or -1; may be null
  std::atomic<std::int64_t>* heartbeat;     // CLOCK_MONOTONIC ns, written while waiting, or null
  bool crowded;                             // more threads than CPUs: do not spin
  std::function<bool()> is_interrupted;     // asked while waiting: whether to give up; may be empty
};

class Group {
 public:
  static constexpr int kSlots = 8;  // of a ring

  explicit Group(const GroupArgs& args);
  static std::int64_t bytes(int ranks, std::int64_t room);

  int rank() const { return args_.rank; }
  int ranks() const { return args_.ranks; }
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }

  // Rounds. Between two calls of meet, a rank fills its own half and then reads everybody's.
  std::int64_t half_bytes() const { return half_bytes_; }
  std::uint8_t* half(int rank) const;  // of the round in preparation
  bool meet();                         // all halves of the round are there; prepares the next one
  // of the round that has been met
  const std::uint8_t* met_half(int rank) const;

  // Messages, in pieces of at most slot_bytes.
  std::int64_t slot_bytes() const { return slot_bytes_; }
  bool send(int target, const std::uint8_t* data, std::int64_t bytes);
  bool receive(int source, std::uint8_t* data, std::int64_t bytes);

 private:
  // What a wait needs to know: has it come, and if not, whose fault is it?
  bool wait(Word& word, std::uint32_t target, int other, const char* what);
  bool give_up(std::int64_t began, int other, const char* what);
  int missing(int other) const;
  std::uint8_t* half_of_round(int rank, std::uint32_t round) const;
  std::uint8_t* slot(int source, int target, std::uint32_t number) const;
  Word& ring_word(int kind, int source, int target) const;  // kind 0: sent, 1: taken

  GroupArgs args_;
  std::int64_t half_bytes_, slot_bytes_;
  Word* words_;          // arrivals, then each rank's round, then the rings' counters
  std::uint8_t* halves_;
  std::uint8_t* rings_;
  std::uint32_t round_ = 0;  // of the last meeting
  std::string failure_;
};

// group may be null: a group of one. All numbers are floats unless they say bytes.
// out (+)= the sum over ranks of part (null: zeros), added in the order of ranks.
std::unique_ptr<Command> make_all_reduce(Group* group, const float* part, float* out,
                                         std::int64_t count, bool accumulate);
// out [rows, sum of widths]: the ranks' parts [rows, widths[rank]] side by side.
std::unique_ptr<Command> make_all_gather(Group* group, const float* part, float* out,
                                         std::int64_t rows, std::vector<std::int64_t> widths);
std::unique_ptr<Command> make_broadcast(Group* group, std::uint8_t* data, std::int64_t bytes,
                                        int source);
std::unique_ptr<Command> make_send(Group* group, const float* x, std::int64_t count, int target);
std::unique_ptr<Command> make_receive(Group* group, float* x, std::int64_t count, int source);
// out [rows, width]: x [rows, cols] from column offset on, zeros beside it.
std::unique_ptr<Command> make_place(const float* x, float* out, std::int64_t rows,
                                    std::int64_t cols, std::int64_t width, std::int64_t offset);

}  // namespace voltapile
