#include "group.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "futex.h"

namespace voltapile {
namespace {

constexpr std::int64_t kSpin = 20'000;             // ns before a wait sleeps
constexpr std::int64_t kSleep = 20'000'000;        // ns between two looks at the abort word
constexpr std::int64_t kPage = 4096;

// Counters wrap round.
bool has_reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

void post(Word& word, std::uint32_t value) {
  word.value.store(value, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(&word.value, 0);
}

std::int64_t number_of_words(int ranks) { return 1 + ranks + 2 * ranks * ranks; }

std::int64_t head_bytes(int ranks) {
  const std::int64_t bytes = number_of_words(ranks) * static_cast<std::int64_t>(sizeof(Word));
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

Group::Group(const GroupArgs& args) : args_(args) {
  if (args.ranks < 1 || args.rank < 0 || args.rank >= args.ranks) {
    throw std::invalid_argument("group: no such rank");
  }
  if (args.room < kPage || args.room % kPage != 0) {
    throw std::invalid_argument("group: the room must be whole pages");
  }
  // Of ranks * room bytes a rank, one half for two halves, one for the rings that lead to it.
  half_bytes_ = args.ranks * args.room / 4;
  slot_bytes_ = args.room / 2 / kSlots;
  words_ = reinterpret_cast<Word*>(args.memory);
  halves_ = args.memory + head_bytes(args.ranks);
  rings_ = halves_ + 2 * half_bytes_ * args.ranks;
}

std::int64_t Group::bytes(int ranks, std::int64_t room) {
  return head_bytes(ranks) + ranks * ranks * room;
}

std::uint8_t* Group::half_of_round(int rank, std::uint32_t round) const {
  return halves_ + (2 * rank + round % 2) * half_bytes_;
}

std::uint8_t* Group::half(int rank) const { return half_of_round(rank, round_ + 1); }

const std::uint8_t* Group::met_half(int rank) const { return half_of_round(rank, round_); }

std::uint8_t* Group::slot(int source, int target, std::uint32_t number) const {
  return rings_ + ((source * args_.ranks + target) * kSlots + number % kSlots) * slot_bytes_;
}

Word& Group::ring_word(int kind, int source, int target) const {
  const int ranks = args_.ranks;
  return words_[1 + ranks + (kind * ranks + source) * ranks + target];
}

bool Group::meet() {
  if (failed()) return false;
  ++round_;
  words_[1 + args_.rank].value.store(round_, std::memory_order_relaxed);
  // Only the last one to come wakes the others: one sleep a rank and round, whatever their number.
  const std::uint32_t all = round_ * static_cast<std::uint32_t>(args_.ranks);
  const std::uint32_t come = words_[0].value.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (come == all) {
    if (words_[0].sleepers.load(std::memory_order_seq_cst) != 0)
      futex_wake_all(&words_[0].value, 0);
    return true;
  }
  return wait(words_[0], all, -1, "come");
}

bool Group::send(int target, const std::uint8_t* data, std::int64_t bytes) {
  Word& sent = ring_word(0, args_.rank, target);
  Word& taken = ring_word(1, args_.rank, target);
  for (std::int64_t done = 0; done < bytes; done += slot_bytes_) {
    const std::uint32_t number = sent.value.load(std::memory_order_relaxed);
    if (!wait(taken, number + 1 - kSlots, target, "taken what was sent")) return false;
    std::uint8_t* place = slot(args_.rank, target, number);
    std::copy_n(data + done, std::min(slot_bytes_, bytes - done), place);
    post(sent, number + 1);
  }
  return true;
}

bool Group::receive(int source, std::uint8_t* data, std::int64_t bytes) {
  Word& sent = ring_word(0, source, args_.rank);
  Word& taken = ring_word(1, source, args_.rank);
  for (std::int64_t done = 0; done < bytes; done += slot_bytes_) {
    const std::uint32_t number = taken.value.load(std::memory_order_relaxed);
    if (!wait(sent, number + 1, source, "sent anything")) return false;
    std::copy_n(slot(source, args_.rank, number), std::min(slot_bytes_, bytes - done), data + done);
    post(taken, number + 1);
  }
  return true;
}

// other -1: the first rank that has not come to this round.
bool Group::wait(Word& word, std::uint32_t target, int other, const char* what) {
  if (failed()) return false;
  const auto value = [&] { return word.value.load(std::memory_order_seq_cst); };
  const std::int64_t began = now_ns(), spin_end = began + (args_.crowded ? 0 : kSpin);
  do {
    for (int i = 0; i < 32; ++i) {
      if (has_reached(value(), target)) return true;
      cpu_pause();
    }
  } while (now_ns() < spin_end);
  const timespec most{0, kSleep};
  bool has_come;
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  for (;;) {
    const std::uint32_t seen = value();
    has_come = has_reached(seen, target);
    if (has_come || give_up(began, other, what)) break;
    futex_wait(&word.value, seen, 0, &most);
  }
  word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  if (args_.waits_for && has_come) args_.waits_for->store(-1, std::memory_order_relaxed);
  return has_come;
}

bool Group::give_up(std::int64_t began, int other, const char* what) {
  const std::int64_t now = now_ns();
  const double seconds = static_cast<double>(now - began) * 1e-9;
  other = missing(other);
  if (args_.heartbeat) args_.heartbeat->store(now, std::memory_order_relaxed);
  if (args_.waits_for) args_.waits_for->store(other, std::memory_order_relaxed);
  if (args_.is_interrupted && args_.is_interrupted()) {
    failure_ = "interrupted";
    return true;
  }
  const bool is_aborted = args_.abort && args_.abort->load(std::memory_order_relaxed) != 0;
  if (!is_aborted && seconds < args_.seconds) return false;
  char text[200];
  if (is_aborted) {
    std::snprintf(text, sizeof text, "the group was ended while rank %d waited for rank %d",
                  args_.rank, other);
  } else {
    std::snprintf(text, sizeof text, "rank %d has waited %.1f s for rank %d, which has not %s",
                  args_.rank, seconds, other, what);
  }
  failure_ = text;
  return true;
}

int Group::missing(int other) const {
  for (int rank = 0; other < 0 && rank < args_.ranks; ++rank) {
    const std::uint32_t round = words_[1 + rank].value.load(std::memory_order_relaxed);
    if (!has_reached(round, round_)) other = rank;
  }
  return other;
}

}  // namespace voltapile
