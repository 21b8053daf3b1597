#include <cstdint>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "core/gather.h"
#include "expect.h"

using engram::Field;

namespace {

// Every size that has code of its own, and their neighbours and strangers.
constexpr std::uint64_t kSizes[] = {0,  1,  2,  3,  4,  5,  7,  8,  9,   12,  16,  17,  24,   31,   32,   33,   47,
                                    48, 63, 64, 65, 96, 97, 100, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097, 28224};

std::vector<std::byte> noise(std::uint64_t bytes, Dice& dice) {
  std::vector<std::byte> data(bytes);
  for (std::byte& b : data) b = static_cast<std::byte>(dice.bits());
  return data;
}

TEST(gathers_what_a_naive_loop_gathers) {
  Dice dice(1);
  constexpr std::uint64_t guard = 64;
  for (const std::uint64_t bytes : kSizes) {
    for (const std::uint64_t capacity : {1, 2, 37}) {
      const std::vector<std::byte> data = noise(capacity * bytes, dice);
      const Field field{const_cast<std::byte*>(data.data()), bytes};
      for (const std::uint64_t n : {0, 1, 2, 15, 16, 17, 33, 100}) {
        // A row ends where its memory ends: the last row and prefetches near it are drawn on purpose.
        std::vector<std::int64_t> rows(n);
        for (auto& row : rows) {
          row = static_cast<std::int64_t>(dice.below(4) == 0 ? capacity - 1 : dice.below(capacity));
        }
        const std::vector<std::byte> before = noise(guard + n * bytes + guard, dice);
        std::vector<std::byte> out = before, wanted = before;
        for (std::uint64_t j = 0; j < n; ++j) {
          for (std::uint64_t b = 0; b < bytes; ++b) {
            wanted[guard + j * bytes + b] = data[static_cast<std::uint64_t>(rows[j]) * bytes + b];
          }
        }
        // The field that follows may lie anywhere: it is only asked for.
        engram::gather_rows(field, rows.data(), n, out.data() + guard, n % 2 == 0 ? nullptr : &field);
        if (out != wanted) {
          expect::fail(__FILE__, __LINE__, "row size " + std::to_string(bytes) + ", n " + std::to_string(n));
        }
      }
    }
  }
}

/// Rows with other fields' bytes in between: what is read and written is what a field without them has, and nothing else changes.
TEST(rows_that_lie_among_others_are_read_and_written_alone) {
  Dice dice(9);
  for (const std::uint64_t bytes : kSizes) {
    for (const std::uint64_t gap : {1, 24, 4096}) {
      constexpr std::uint64_t capacity = 23;
      const std::uint64_t stride = bytes + gap;
      std::vector<std::byte> memory = noise(capacity * stride, dice);
      const Field field{memory.data() + gap / 2, bytes, stride};
      std::vector<std::byte> alone;
      for (std::uint64_t row = 0; row < capacity; ++row) alone.insert(alone.end(), field.row(row), field.row(row) + bytes);
      const Field other{alone.data(), bytes};
      for (int round = 0; round < 4; ++round) {
        const std::uint64_t n = dice.in(1, 20), first = dice.below(capacity - n + 1);
        std::vector<std::int64_t> rows(n), pick(n);
        for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(capacity));
        for (auto& row : pick) row = static_cast<std::int64_t>(dice.below(n));
        std::vector<std::byte> a(n * bytes), b(n * bytes), wanted = memory;
        engram::gather_rows(field, rows.data(), n, a.data(), &field);
        engram::gather_rows(other, rows.data(), n, b.data(), nullptr);
        EXPECT(a == b);
        engram::gather_run(field, first, n, a.data());
        engram::gather_run(other, first, n, b.data());
        EXPECT(a == b);
        std::vector<std::uint64_t> ends(n);
        const std::uint64_t runs = engram::runs_of(rows.data(), n, ends.data());
        engram::gather_runs(field, rows.data(), ends.data(), runs, a.data(), &field);
        engram::gather_runs(other, rows.data(), ends.data(), runs, b.data(), nullptr);
        EXPECT(a == b);
        const std::vector<std::byte> given = noise(n * bytes, dice);
        const std::int64_t* picked = round % 2 == 0 ? nullptr : pick.data();
        for (std::uint64_t j = 0; j < 2 * n && bytes > 0; ++j) {  // first the run, then the rows anywhere
          const std::uint64_t k = j % n, row = j < n ? first + k : static_cast<std::uint64_t>(rows[k]);
          const std::uint64_t from = picked == nullptr ? k : static_cast<std::uint64_t>(pick[k]);
          for (std::uint64_t i = 0; i < bytes; ++i) {
            wanted[gap / 2 + row * stride + i] = alone[row * bytes + i] = given[from * bytes + i];
          }
        }
        engram::scatter_run(field, first, n, given.data(), picked);
        engram::scatter_rows(field, rows.data(), n, given.data(), picked);
        EXPECT(memory == wanted);
      }
    }
  }
}

TEST(gathers_from_and_to_any_address) {
  Dice dice(2);
  for (const std::uint64_t bytes : kSizes) {
    for (const std::uint64_t offset : {1, 3, 7}) {
      std::vector<std::byte> data = noise(offset + 9 * bytes, dice), out(offset + 50 * bytes);
      std::vector<std::int64_t> rows(50);
      for (auto& row : rows) row = static_cast<std::int64_t>(dice.below(9));
      engram::gather_rows({data.data() + offset, bytes}, rows.data(), 50, out.data() + offset, nullptr);
      for (std::uint64_t j = 0; j < 50 && bytes > 0; ++j) {
        EXPECT(std::memcmp(out.data() + offset + j * bytes,
                           data.data() + offset + static_cast<std::uint64_t>(rows[j]) * bytes, bytes) == 0);
      }
    }
  }
}

TEST(copies_exactly_the_bytes) {
  Dice dice(3);
  for (const std::uint64_t bytes : kSizes) {
    const std::vector<std::byte> from = noise(bytes, dice), before = noise(bytes + 16, dice);
    std::vector<std::byte> wanted = before;
    for (std::uint64_t b = 0; b < bytes; ++b) wanted[8 + b] = from[b];
    std::vector<std::byte> to = before;
    engram::copy_to_shared(to.data() + 8, from.data(), bytes);
    EXPECT(to == wanted);
    to = before;
    engram::copy_from_shared(to.data() + 8, from.data(), bytes);
    EXPECT(to == wanted);
  }
}

TEST(copies_nothing_from_and_to_nowhere) {
  // Empty tensors have no address.
  engram::copy_to_shared(nullptr, nullptr, 0);
  engram::copy_from_shared(nullptr, nullptr, 0);
  const std::int64_t rows[] = {0, 5};
  engram::gather_rows({nullptr, 0}, rows, 2, nullptr, nullptr);
  engram::gather_rows({nullptr, 8}, nullptr, 0, nullptr, nullptr);
}

TEST(places_what_a_naive_loop_places) {
  Dice dice(4);
  constexpr std::int64_t source_rows = 40, capacity = 60;
  for (const std::uint64_t bytes : kSizes) {
    const std::vector<std::byte> source = noise(source_rows * bytes, dice);
    for (int round = 0; round < 6; ++round) {
      // Runs one behind the other in the source, some of them empty, in any order in the field.
      std::vector<std::int64_t> first, target, count;
      for (std::int64_t row = 0, to = 0; row < source_rows && to < capacity;) {
        const auto n = static_cast<std::int64_t>(dice.below(8));
        if (row + n > source_rows || to + n > capacity) break;
        first.push_back(row);
        target.push_back(capacity - to - n);
        count.push_back(n);
        row += n + static_cast<std::int64_t>(dice.below(3));
        to += n + static_cast<std::int64_t>(dice.below(3));
      }
      const auto begin = static_cast<std::int64_t>(dice.below(source_rows));
      const auto n = dice.below(source_rows - static_cast<std::uint64_t>(begin) + 1);
      std::vector<std::byte> out = noise(capacity * bytes, dice), wanted = out;
      for (std::size_t i = 0; i < first.size(); ++i) {
        for (std::int64_t j = 0; j < count[i]; ++j) {
          const std::int64_t row = first[i] + j;
          if (row < begin || row >= begin + static_cast<std::int64_t>(n)) continue;
          for (std::uint64_t b = 0; b < bytes; ++b) {
            wanted[static_cast<std::uint64_t>(target[i] + j) * bytes + b] = source[static_cast<std::uint64_t>(row) * bytes + b];
          }
        }
      }
      engram::place_runs(source.data() + static_cast<std::uint64_t>(begin) * bytes, begin, n,
                         {first.data(), target.data(), count.data(), first.size()}, {out.data(), bytes}, capacity);
      if (out != wanted) expect::fail(__FILE__, __LINE__, "row size " + std::to_string(bytes));
    }
  }
}

TEST(places_nothing_outside_the_field) {
  const std::vector<std::byte> source(8, std::byte{1});
  std::vector<std::byte> out(8), before = out;
  const std::int64_t first[] = {0, 4};
  const std::int64_t bad[][2] = {{5, 4}, {-1, 2}, {8, 1}, {0, 9}, {0, -1}, {INT64_MAX, 1}, {INT64_MIN, 4}, {4, INT64_MAX}};
  for (const auto& run : bad) {  // beside one that fits, which must not be copied either
    const std::int64_t target[] = {0, run[0]}, count[] = {4, run[1]};
    EXPECT_THROWS(std::invalid_argument, engram::place_runs(source.data(), 0, 8, {first, target, count, 2}, {out.data(), 1}, 8));
    EXPECT(out == before);
  }
}

TEST(copies_parts_to_their_places) {
  Dice dice(7);
  for (const std::uint64_t most : {0u, 1u, 100u, 300'000u}) {
    std::vector<std::vector<std::byte>> sources;
    std::vector<engram::Part> parts;
    std::uint64_t end = 0;
    for (int i = 0; i < 9; ++i) {
      sources.push_back(noise(most == 0 ? 0 : dice.below(most) + 1, dice));
      parts.push_back({end + dice.below(64), sources.back().data(), sources.back().size()});
      end = parts.back().begin + sources.back().size();
    }
    std::vector<std::byte> block(end + 64, std::byte{7}), wanted = block;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::copy(sources[i].begin(), sources[i].end(), wanted.begin() + static_cast<std::ptrdiff_t>(parts[i].begin));
    }
    engram::copy_parts(block.data(), parts);
    EXPECT(block == wanted);
  }
}

}  // namespace
