#include "file_rows.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

namespace voltapile {

namespace {
// Rows that a thread asks the drive for before it waits for the first of them: many more than a
// drive serves at once, and fewer than are worth another thread.
constexpr std::int64_t kTogether = 256;
}  // namespace

FileRows::FileRows(int descriptor, std::int64_t offset, std::int64_t rows, std::int64_t row_bytes,
                   int threads)
    : descriptor_(descriptor), offset_(offset), rows_(rows), row_bytes_(row_bytes),
      threads_(threads) {
  // Neighbours of a row are not wanted: they would fill the drive's time and the page cache.
  posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
}

FileRows::~FileRows() { close(descriptor_); }

void FileRows::read(std::int64_t* numbers, std::int64_t count, std::uint8_t* out) noexcept {
  const std::int64_t needed = (count + kTogether - 1) / kTogether;
  const std::int64_t parts = std::clamp<std::int64_t>(needed, 1, threads_);
  const auto read_one = [&](std::int64_t part) {
    const std::int64_t begin = count * part / parts, end = count * (part + 1) / parts;
    read_part(numbers + begin, end - begin, out + begin * row_bytes_);
  };
  std::int64_t begun = 1;
  std::vector<std::thread> others;
  try {
    others.reserve(static_cast<std::size_t>(parts - 1));
    for (; begun < parts; ++begun) others.emplace_back(read_one, begun);
  } catch (const std::exception&) {  // no memory or no thread: then fewer
  }
  read_one(0);
  for (std::int64_t part = begun; part < parts; ++part) read_one(part);
  for (std::thread& other : others) other.join();
}

// What the page cache has is taken at once, and the drive is asked for all the rest together.
void FileRows::read_part(std::int64_t* numbers, std::int64_t count, std::uint8_t* out) noexcept {
  std::array<std::int64_t, kTogether> missing;
  for (std::int64_t start = 0; start < count; start += kTogether) {
    const std::int64_t end = std::min(start + kTogether, count);
    std::size_t waiting = 0;
    for (std::int64_t i = start; i < end; ++i) {
      if (!is_row(numbers[i])) {
        numbers[i] = -1;
      } else if (!read_cached(numbers[i], out + i * row_bytes_)) {
        ask_for(numbers[i]);
        missing[waiting++] = i;
      }
    }
    for (std::size_t k = 0; k < waiting; ++k) {
      const std::int64_t i = missing[k];
      if (!read_waiting(numbers[i], out + i * row_bytes_)) numbers[i] = -1;
    }
  }
}

void FileRows::expect(const std::int64_t* numbers, std::int64_t count) const noexcept {
  for (std::int64_t i = 0; i < count; ++i)
    if (is_row(numbers[i])) ask_for(numbers[i]);
}

void FileRows::ask_for(std::int64_t number) const noexcept {
  posix_fadvise(descriptor_, place(number), row_bytes_, POSIX_FADV_WILLNEED);
}

bool FileRows::read_cached(std::int64_t number, std::uint8_t* out) const noexcept {
#ifdef RWF_NOWAIT
  const iovec piece{out, static_cast<std::size_t>(row_bytes_)};
  return preadv2(descriptor_, &piece, 1, place(number), RWF_NOWAIT) == row_bytes_;
#else
  static_cast<void>(number), static_cast<void>(out);
  return false;
#endif
}

bool FileRows::read_waiting(std::int64_t number, std::uint8_t* out) noexcept {
  std::int64_t done = 0;
  while (done < row_bytes_) {
    const ssize_t got = pread(descriptor_, out + done, static_cast<std::size_t>(row_bytes_ - done),
                              place(number) + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      int none = 0;  // a file that ends here has been cut since it was opened
      fault_.compare_exchange_strong(none, got ? errno : ENODATA);
      return false;
    }
    done += got;
  }
  return true;
}

void run_reading(void* reading) noexcept {
  const Reading& wanted = *static_cast<const Reading*>(reading);
  wanted.rows->read(wanted.numbers, wanted.count, wanted.out);
}

}  // namespace voltapile
