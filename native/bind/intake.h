// What users hand over, as columns for the core: nested dicts, tuples, lists, named tuples, dataclasses and TensorDicts of
// tensors, NumPy arrays and numbers. One call looks at all leaves: no Python code runs per leaf.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "../core/ragged.h"
#include "tensors.h"

namespace engram {

/// The columns of one write, and what keeps their memory. The GIL must be held when it is made and dropped.
class Taken {
 public:
  /// Not `with_items`: ragged fields are refused.
  explicit Taken(bool with_items = false) : with_items_(with_items) {}
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  ~Taken();

  std::span<const std::byte* const> columns() const { return columns_; }
  /// Rows of the batch; -1: one row without that dimension.
  std::int64_t rows() const { return rows_; }
  /// Of one row, the items of each group of ragged fields. Null values: zeros.
  std::span<const RaggedSource> items() const { return items_; }
  /// Whether some field of a group was given.
  bool has_items(std::size_t group) const { return lengths_[group] != kUnknown; }

 private:
  friend class Intake;
  static constexpr std::int64_t kUnknown = -2;

  const bool with_items_;
  std::int64_t rows_ = kUnknown;
  std::vector<RaggedSource> items_;
  std::vector<std::int64_t> lengths_;      // of each group
  std::vector<std::uint32_t> counts_;      // the same, as the core reads them
  std::vector<const std::byte*> columns_;
  std::vector<nanobind::object> kept_;
  std::vector<Py_buffer> buffers_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;

  /// Memory that stays until the rows are written.
  std::byte* room(std::uint64_t bytes) {
    return copies_.emplace_back(std::make_unique_for_overwrite<std::byte[]>(bytes)).get();
  }
};

/// How the data of one storage is put together, and the dtypes and shapes of its leaves; of ragged fields, of an item.
class Intake {
 public:
  enum class Kind { numbers, utf8, bytes, other };
  struct Group {
    std::uint32_t most;               // items of a row
    std::vector<std::size_t> fields;  // the first one leads
  };

  /// `specs`: as Layout. `tree`: the number of a field, or (kind, type, keys, trees): "dict", "tensordict", "tuple", "list" or
  /// "object", whose attributes these are.
  /// `casts`: the fields that also take values of other dtypes, as cast.h makes them. `groups`: of the ragged ones, (items of a row,
  /// ((field, kind), …)), as the store has them; other kinds of texts than "utf-8" and "bytes" are left to Python.
  Intake(const nanobind::list& specs, nanobind::handle tree, nanobind::handle casts, nanobind::handle groups);

  /// The columns of a batch of rows, or of one row. False: the data has another structure, or a leaf another shape or dtype, or
  /// one that must be converted first; then nothing is in `taken` that counts.
  bool take(nanobind::handle data, bool batched, Taken& taken) const;

  /// The columns of some fields of n rows, from dicts and TensorDicts of tensors and arrays under strings, and their numbers; of one row
  /// (n < 0), numbers and items, too. False: as above, or there is none.
  bool take_some(nanobind::handle data, std::int64_t n, Taken& taken, std::vector<std::uint64_t>& which) const;

  const std::vector<RowSpec>& specs() const { return specs_; }
  /// The fields that data is taken apart into, leaf by leaf.
  std::vector<std::uint64_t> fields() const;
  const std::vector<Group>& groups() const { return groups_; }
  bool is_ragged(std::size_t field) const { return members_[field].group != kNone; }
  bool is_json(std::size_t field) const { return members_[field].kind == Kind::other; }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  struct Member {  // of a group
    std::size_t group = kNone, place = 0;
    Kind kind = Kind::numbers;
  };
  struct Node {
    enum Kind { leaf, dict, tensordict, sequence, attributes } kind = leaf;
    std::size_t field = 0;
    nanobind::object type;
    std::vector<nanobind::object> keys;
    bool has_ints = false;  // among the keys
    std::vector<Node> children;
  };

  static Node node_of(nanobind::handle tree, std::size_t fields);
  static void list(const Node& node, std::vector<std::uint64_t>& fields);
  bool walk(const Node& node, PyObject* data, Taken& taken) const;
  bool walk_some(const Node& node, PyObject* data, Taken& taken, std::vector<std::uint64_t>& which) const;
  bool take_leaf(std::size_t field, PyObject* leaf, Taken& taken) const;
  bool take_numbers(std::size_t field, PyObject* leaf, Taken& taken) const;
  bool put_list(std::size_t field, PyObject* leaf, std::int64_t n, const std::byte*& column, Taken& taken) const;
  bool take_column(std::size_t field, PyObject* leaf, std::int64_t& rows, const std::byte*& column, Taken& taken) const;
  bool take_items(std::size_t field, PyObject* leaf, Taken& taken) const;
  void begin(Taken& taken) const;
  bool settle(Taken& taken, bool whole) const;

  std::vector<RowSpec> specs_;
  std::vector<Group> groups_;
  std::vector<Member> members_;  // of each field
  std::vector<bool> casts_;
  Node root_;
};

/// The lanes that a user names for n rows: an int, or an int per row in a list, tuple, range, array or tensor, or "each". False:
/// it is none of these, or one is outside [0, lanes), or there are not n of them.
class NamedLanes {
 public:
  bool read(nanobind::handle named, std::uint64_t n, std::uint64_t lanes);

  /// One lane for all rows.
  bool is_one() const { return one_; }
  std::uint64_t one() const { return lane_; }
  /// A lane per row.
  const std::int64_t* each() const { return each_.data(); }

 private:
  bool read_one(PyObject* named, std::uint64_t lanes);

  bool one_ = false;
  std::uint64_t lane_ = 0;
  std::vector<std::int64_t> each_;
};

void bind_intake(nanobind::module_& m);

}  // namespace engram
