// Memory for a store under test, and rows that tell by themselves whether they are whole.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/control.h"
#include "core/random.h"
#include "core/store.h"
#include "core/wait.h"

/// The blocks of a store: who owns them is another matter.
struct Blocks {
  engram::Geometry geometry{};
  std::span<std::byte> control, tickets;
  std::vector<engram::Field> fields;

  engram::Control view() const { return engram::Control(control, tickets); }
  engram::Store open(std::uint64_t participant = 0) const { return engram::Store(view(), fields, participant); }
};

inline engram::Geometry geometry(std::uint64_t lanes, std::uint64_t lane_length) {
  return {lanes * lane_length, lanes, lane_length};
}

/// A store whose operations leave the same bytes by the same instructions each time: the clock says when a point of the curve is
/// noted, so none is.
inline void format_without_curve(const Blocks& blocks) {
  engram::Control::format(blocks.control, blocks.geometry, 0);
  blocks.view().meter_page().interval.store(engram::MeterPage::kNoCurve);
}

/// Every block an allocation of its own, exactly as large as it must be: the address sanitizer guards its ends. A field
/// without bytes has no memory, as an empty tensor has none.
class Heap : public Blocks {
 public:
  Heap(engram::Geometry g, const std::vector<std::uint64_t>& row_bytes) {
    geometry = g;
    control = allocate(engram::control_bytes(g.lanes));
    tickets = allocate(engram::tickets_bytes(g.capacity));
    for (const std::uint64_t bytes : row_bytes) {
      fields.push_back({bytes == 0 ? nullptr : allocate(g.capacity * bytes).data(), bytes});
    }
    format_without_curve(*this);
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::span<std::byte> allocate(std::uint64_t bytes) {
    owned_.emplace_back(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(64))));
    std::memset(owned_.back().get(), 0, bytes);
    return {owned_.back().get(), bytes};
  }
  std::vector<std::unique_ptr<std::byte[], Free>> owned_;
};

/// All blocks one after the other in memory that somebody else owns. `bytes` says how much that is.
struct Layout : Blocks {
  Layout(std::byte* base, engram::Geometry g, const std::vector<std::uint64_t>& row_bytes) {
    geometry = g;
    std::uint64_t at = 0;
    const auto take = [&](std::uint64_t size) {
      const std::span<std::byte> taken(base + at, size);
      at = (at + size + 63) / 64 * 64;
      return taken;
    };
    control = take(engram::control_bytes(g.lanes));
    tickets = take(engram::tickets_bytes(g.capacity));
    for (const std::uint64_t row : row_bytes) fields.push_back({take(g.capacity * row).data(), row});
    all = {base, at};
  }
  std::span<std::byte> all;
};

/// Zeroed memory that forked children share.
class SharedPages {
 public:
  explicit SharedPages(std::uint64_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(p);
  }
  ~SharedPages() { munmap(data_, bytes_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::uint64_t bytes_;
  std::byte* data_;
};

// ---- rows ----------------------------------------------------------------------------------------------------------

/// Word k of a row: the first is the row's id, all others depend on it too. Id 0: all zero.
inline std::uint64_t word_of(std::uint64_t id, std::uint64_t k) { return id == 0 ? 0 : id ^ k * 0x9E3779B97F4A7C15ull; }

/// Fills a row of whole words.
inline void describe(std::byte* row, std::uint64_t bytes, std::uint64_t id) {
  for (std::uint64_t k = 0; k < bytes / 8; ++k) {
    const std::uint64_t word = word_of(id, k);
    std::memcpy(row + k * 8, &word, 8);
  }
}

/// The id of a row that describes itself; none if the row is torn.
inline std::optional<std::uint64_t> id_of(const std::byte* row, std::uint64_t bytes) {
  std::uint64_t id = 0;
  std::memcpy(&id, row, 8);
  for (std::uint64_t k = 1; k < bytes / 8; ++k) {
    std::uint64_t word = 0;
    std::memcpy(&word, row + k * 8, 8);
    if (word != word_of(id, k)) return std::nullopt;
  }
  return id;
}

/// Memory for n rows of every field of a store, as its calls want them.
struct Rows {
  Rows(const std::vector<engram::Field>& fields, std::uint64_t n) {
    for (const engram::Field& field : fields) {
      row_bytes.push_back(field.row_bytes);
      data.emplace_back(n * field.row_bytes);
    }
    for (auto& column : data) {
      in.push_back(column.data());
      out.push_back(column.data());
    }
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  std::byte* row(std::uint64_t field, std::uint64_t i) { return data[field].data() + i * row_bytes[field]; }
  void describe(std::uint64_t i, std::uint64_t id) {
    for (std::uint64_t f = 0; f < data.size(); ++f) ::describe(row(f, i), row_bytes[f], id);
  }
  /// The id that row i carries in every field, or none.
  std::optional<std::uint64_t> id(std::uint64_t i) {
    const auto first = id_of(row(0, i), row_bytes[0]);
    for (std::uint64_t f = 1; f < data.size(); ++f) {
      if (id_of(row(f, i), row_bytes[f]) != first) return std::nullopt;
    }
    return first;
  }

  std::vector<std::uint64_t> row_bytes;
  std::vector<std::vector<std::byte>> data;
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;
};

/// Waits end in vain later than they do for users: a busy machine may stop who is waited for.
inline const std::chrono::milliseconds kUsualLimit = engram::wait_limit.exchange(std::chrono::seconds(60));

/// Waits end in vain soon, for as long as this lives.
struct Impatient {
  explicit Impatient(std::chrono::milliseconds limit) : before(engram::wait_limit.exchange(limit)) {}
  ~Impatient() { engram::wait_limit = before; }
  Impatient(const Impatient&) = delete;
  Impatient& operator=(const Impatient&) = delete;
  std::chrono::milliseconds before;
};

/// Random numbers for the tests themselves, in order.
class Dice {
 public:
  explicit Dice(std::uint64_t key) : random_(key) {}
  std::uint64_t bits() { return random_.bits(i_++); }
  std::uint64_t below(std::uint64_t n) { return random_.below(n, i_++); }
  /// In [low, high].
  std::uint64_t in(std::uint64_t low, std::uint64_t high) { return low + below(high - low + 1); }

 private:
  engram::Random random_;
  std::uint64_t i_ = 0;
};
