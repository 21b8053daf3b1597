#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "blocks.h"
#include "core/pieces.h"
#include "expect.h"

using engram::Piece;

namespace {

std::vector<std::byte> noise(std::uint64_t bytes, Dice& dice) {
  std::vector<std::byte> data(bytes);
  for (std::byte& b : data) b = static_cast<std::byte>(dice.bits());
  return data;
}

// Around lines, pages, and how far ahead the memory is asked.
constexpr std::uint64_t kSizes[] = {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 2112, 4095, 4096, 4097, 9000};

/// Sources and targets begin at any address, and a source ends where its memory ends.
TEST(pieces_are_copied_and_nothing_else_changes) {
  Dice dice(1);
  for (const std::uint64_t n : {0, 1, 2, 7, 40}) {
    for (int round = 0; round < 8; ++round) {
      std::vector<std::vector<std::byte>> sources;
      std::vector<std::uint64_t> sizes, places;
      std::uint64_t end = dice.below(70);
      for (std::uint64_t i = 0; i < n; ++i) {
        sizes.push_back(kSizes[dice.below(std::size(kSizes))]);
        sources.push_back(noise(dice.below(70) + sizes[i], dice));
        places.push_back(end);
        end += sizes[i] + dice.below(70);
      }
      const std::vector<std::byte> before = noise(end + 70, dice);
      std::vector<std::byte> out = before, wanted = before;
      std::vector<Piece> pieces;
      for (std::uint64_t i = 0; i < n; ++i) {
        const std::uint64_t first = sources[i].size() - sizes[i];
        pieces.push_back({out.data() + places[i], sources[i].data() + first, sizes[i]});
        for (std::uint64_t b = 0; b < sizes[i]; ++b) wanted[places[i] + b] = sources[i][first + b];
      }
      engram::copy_from_shared(pieces);
      EXPECT(out == wanted);
    }
  }
}

/// The same of each alone, at every distance from a line.
TEST(streams_write_what_they_are_to_and_nothing_else) {
  Dice dice(2);
  for (const std::uint64_t bytes : kSizes) {
    for (std::uint64_t at = 0; at < 65; ++at) {
      const std::vector<std::byte> source = noise(at % 7 + bytes, dice), before = noise(at + bytes + 70, dice);
      std::vector<std::byte> out = before, wanted = before;
      for (std::uint64_t b = 0; b < bytes; ++b) wanted[at + b] = source[at % 7 + b];
      engram::stream_to_shared(out.data() + at, source.data() + at % 7, bytes);
      if (out != wanted) expect::fail(__FILE__, __LINE__, std::to_string(bytes) + " bytes at " + std::to_string(at));
    }
  }
}

}  // namespace
