// Rows of a matrix that stays in its file, for a device that cannot read files: its driver calls
// `read` between two kernels, from a thread of its own. Knows no device, and no Python.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

namespace voltapile {

class FileRows {
 public:
  // descriptor: of the open file, which is closed at the end. offset: where row 0 begins.
  FileRows(int descriptor, std::int64_t offset, std::int64_t rows, std::int64_t row_bytes,
           int threads);
  ~FileRows();
  FileRows(const FileRows&) = delete;
  FileRows& operator=(const FileRows&) = delete;

  // Rows to `out`, one behind another. The number of a row that the matrix has not, or that could
  // not be read, becomes -1.
  void read(std::int64_t* numbers, std::int64_t count, std::uint8_t* out) noexcept;

  // They will be read soon: the drive may begin. Waits for none of them.
  void expect(const std::int64_t* numbers, std::int64_t count) const noexcept;

  // errno of the first read that failed; 0: none has.
  int fault() const { return fault_.load(std::memory_order_relaxed); }

 private:
  void read_part(std::int64_t* numbers, std::int64_t count, std::uint8_t* out) noexcept;
  bool is_row(std::int64_t number) const { return number >= 0 && number < rows_; }
  std::int64_t place(std::int64_t number) const { return offset_ + number * row_bytes_; }
  void ask_for(std::int64_t number) const noexcept;
  bool read_cached(std::int64_t number, std::uint8_t* out) const noexcept;
  bool read_waiting(std::int64_t number, std::uint8_t* out) noexcept;

  const int descriptor_;
  const std::int64_t offset_, rows_, row_bytes_;
  const int threads_;
  std::atomic<int> fault_{0};
};

// A call of `read`, for whoever calls C with one argument (run_reading).
struct Reading {
  std::shared_ptr<FileRows> rows;
  std::int64_t* numbers;
  std::int64_t count;
  std::uint8_t* out;
};
void run_reading(void* reading) noexcept;

}  // namespace voltapile
