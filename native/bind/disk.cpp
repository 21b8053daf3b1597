// The files of a store's fields, for Python: opening them, which way reads and writes take, and what they moved.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "../core/check.h"
#include "../core/disk.h"
#include "../core/store.h"
#include "store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

Residency::Way way_named(const std::string& name) {
  check(name == "auto" || name == "map" || name == "read", "'auto', 'map' or 'read'");
  return name == "auto" ? Residency::Way::measured : name == "map" ? Residency::Way::mapped : Residency::Way::direct;
}

}  // namespace

void bind_disk(nb::class_<Store>& type) {
  type
      .def(
          "use_files",
          [](Store& self, const std::vector<std::string>& paths, bool larger) {
            check(paths.size() == self.fields(), "one path per field");
            self.use(std::make_unique<Disk>(paths, larger));
          },
          "paths"_a, "larger"_a,
          "From now on rows that are not in memory are read from these files, one per field; '': the field is in memory only, or in that of an earlier one. "
          "larger: than the memory that there is. No other thread may use the store meanwhile.")
      .def(
          "set_io",
          [](Store& self, const std::string& name) {
            const Residency::Way way = way_named(name);
            if (self.disk() == nullptr) return;
            if (way == Residency::Way::direct) self.disk()->open(self.all(), true);
            self.disk()->reads.set(way);
            self.disk()->writes.set(way);
          },
          "way"_a, "'auto': as a look at a few rows says; 'map': through the mapping; 'read': by calls that read and write the files, "
          "which are opened now. Rows that have no files are always read and written where they are. Raises OSError.")
      .def(
          "refill",
          [](const Store& self, std::uint64_t field, std::uint64_t first, std::uint64_t n, std::uintptr_t from) {
            check(field < self.fields() && first + n <= self.control().capacity(), "rows of a field of the store");
            return self.refill(field, first, n, reinterpret_cast<const std::byte*>(from));
          },
          "field"_a, "first"_a, "n"_a, "address"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Writes rows of a store that is being replaced to the field's file. False: write them to the mapping. Raises OSError.")
      .def(
          "in_memory",
          [](const Store& self, std::uint64_t field, std::uint64_t first, std::uint64_t n) {
            check(field < self.fields() && first + n <= self.control().capacity(), "rows of a field of the store");
            std::vector<unsigned char> pages;
            if (self.disk() != nullptr) pages = self.disk()->in_memory(self.rows_of_file(field), self.file_of(field), first, n);
            return nb::bytes(pages.data(), pages.size());
          },
          "field"_a, "first"_a, "n"_a, "Which pages of rows are in memory, a byte each; of a store that is not larger than memory, none.")
      .def(
          "forget",
          [](const Store& self, std::uint64_t field, std::uint64_t first, const nb::bytes& before) {
            if (before.size() == 0) return;
            const std::uint64_t file = self.file_of(field);
            self.disk()->open({&file, 1});
            const auto* pages = reinterpret_cast<const unsigned char*>(before.data());
            if (self.disk()->is_open(file)) self.disk()->forget(self.rows_of_file(field), file, first, {pages, before.size()});
          },
          "field"_a, "first"_a, "before"_a, "Lets the kernel forget the pages that in_memory said were not there, of the same rows.")
      .def(
          "io_state",
          [](const Store& self) {
            static const Disk none({}, false);
            const Disk& disk = self.disk() == nullptr ? none : *self.disk();
            const auto& counters = disk.counters();
            return nb::make_tuple(int{disk.larger()}, int{disk.reads.is_cold()}, int{disk.writes.is_cold()}, counters.reads.load(), counters.bytes_read.load(),
                                  counters.writes.load(), counters.bytes_written.load());
          },
          "(whether the rows are more than fits into memory, whether reads go to the files, whether writes do, reads and bytes of them, writes and bytes of them)");
}

}  // namespace engram
