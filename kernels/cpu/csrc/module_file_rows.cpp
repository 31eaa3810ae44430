// FileRows for Python.
#include <nanobind/stl/pair.h>

#include "file_rows.h"
#include "python_engine.h"

using namespace nanobind::literals;

namespace voltapile {
namespace {

struct FileRowsObject {
  FileRowsObject(int descriptor, std::int64_t offset, std::int64_t rows, std::int64_t row_bytes,
                 int threads)
      : rows(std::make_shared<FileRows>(descriptor, offset, rows, row_bytes, threads)) {}

  // Function and argument of a call in C that reads `count` rows. The argument is never freed, and
  // holds the file: nobody tells when a device calls for the last time.
  std::pair<std::uintptr_t, std::uintptr_t> reading(std::uintptr_t numbers, std::int64_t count,
                                                    std::uintptr_t out) const {
    auto* wanted = new Reading{rows, reinterpret_cast<std::int64_t*>(numbers), count,
                               reinterpret_cast<std::uint8_t*>(out)};
    return {reinterpret_cast<std::uintptr_t>(&run_reading),
            reinterpret_cast<std::uintptr_t>(wanted)};
  }

  void expect(Array<const std::int64_t> numbers) const {
    const std::int64_t* data = numbers.data();
    const auto count = static_cast<std::int64_t>(numbers.size());
    nb::gil_scoped_release release;
    rows->expect(data, count);
  }

  std::shared_ptr<FileRows> rows;
};

}  // namespace

void bind_file_rows(nb::module_& m) {
  nb::class_<FileRowsObject>(m, "FileRows")
      .def(nb::init<int, std::int64_t, std::int64_t, std::int64_t, int>(), "descriptor"_a,
           "offset"_a, "rows"_a, "row_bytes"_a, "threads"_a)
      .def("reading", &FileRowsObject::reading, "numbers"_a, "count"_a, "out"_a)
      .def("expect", &FileRowsObject::expect, nb::arg("numbers").noconvert())
      .def_prop_ro("fault", [](const FileRowsObject& self) { return self.rows->fault(); });
}

}  // namespace voltapile
