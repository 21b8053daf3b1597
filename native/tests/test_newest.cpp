#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/newest.h"
#include "core/random.h"
#include "expect.h"

namespace {

// By its definition, in O(n²).
template <class T>
std::vector<bool> defined(const std::vector<std::int64_t>& rows, const std::vector<T>& stored, const std::vector<T>& given, bool newer,
                          const bool* live) {
  const auto fits = [&](std::size_t i) {
    const bool any = stored[i] != stored[i] && given[i] == given[i];
    return live[i] && (any || (newer ? given[i] > stored[i] : given[i] >= stored[i]));
  };
  std::vector<bool> wins;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    bool best = fits(i);
    for (std::size_t j = 0; j < rows.size(); ++j) {
      if (j != i && rows[j] == rows[i] && fits(j) && (given[j] > given[i] || (given[j] == given[i] && j > i))) best = false;
    }
    wins.push_back(best);
  }
  return wins;
}

template <class T>
void compare(const std::vector<T>& versions) {
  for (std::uint64_t key = 0; key < 400; ++key) {
    const engram::Random random(key);
    const std::uint64_t n = random.below(40, 0), different = 1 + random.below(key % 2 == 0 ? 5 : 1000, 1);
    const std::int64_t stride = key % 3 == 0 ? std::int64_t{1} << 40 : 1;
    std::vector<std::int64_t> rows(n);
    std::vector<T> stored(n), given(n);
    std::unique_ptr<bool[]> live(new bool[n]), wins(new bool[n]);
    for (std::uint64_t i = 0; i < n; ++i) {
      rows[i] = static_cast<std::int64_t>(random.below(different, i, 2)) * stride;
      stored[i] = versions[random.below(versions.size(), i, 3)];
      given[i] = versions[random.below(versions.size(), i, 4)];
      live[i] = random.below(8, i, 5) > 0;
    }
    for (const bool newer : {false, true}) {
      engram::pick_newest(rows.data(), n, stored.data(), given.data(), newer, live.get(), wins.get());
      const std::vector<bool> expected = defined(rows, stored, given, newer, live.get());
      EXPECT(std::equal(expected.begin(), expected.end(), wins.get()));
    }
  }
}

TEST(the_newest_of_each_row_is_picked) {
  compare<std::int64_t>({0, 1, 2, 3, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()});
  constexpr double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  compare<double>({0.0, -0.0, 1.5, 1e308, inf, -inf, nan});
}

}  // namespace
