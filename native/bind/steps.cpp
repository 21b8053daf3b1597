#include "steps.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "../core/check.h"
#include "../core/store.h"
#include "intake.h"
#include "interpreter.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// Arrays of NumPy whose memory stays where it is while this is there. The GIL must be held when it is made and dropped.
class HeldArrays {
 public:
  HeldArrays(nb::handle arrays, const std::vector<std::size_t>& bytes) {
    buffers_.reserve(bytes.size());
    for (nb::handle array : arrays) {
      Py_buffer buffer;
      if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_CONTIG) != 0) {
        PyErr_Clear();
        return;
      }
      buffers_.push_back(buffer);
    }
    fit_ = std::ranges::equal(buffers_, bytes, {}, [](const Py_buffer& it) { return static_cast<std::size_t>(it.len); });
  }
  HeldArrays(const HeldArrays&) = delete;
  HeldArrays& operator=(const HeldArrays&) = delete;
  ~HeldArrays() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
  }

  // Whether each is writable, in one piece, and as long as it was to be.
  bool fit() const { return fit_; }
  std::size_t size() const { return buffers_.size(); }
  std::span<std::byte> operator[](std::size_t i) const {
    return {static_cast<std::byte*>(buffers_[i].buf), static_cast<std::size_t>(buffers_[i].len)};
  }

 private:
  std::vector<Py_buffer> buffers_;
  bool fit_ = false;
};

using Fields = std::vector<std::uint64_t>;

bool some(std::span<const std::byte> mask) {
  return std::ranges::any_of(mask, [](std::byte is) { return is != std::byte{0}; });
}

// The rows of one step of n environments, or of a single one without that dimension.
class Steps {
 public:
  enum class Autoreset { next_step, same_step, disabled };
  // Fields of the store: of an observation, of the next one (leaf by leaf), of an action; and terminated, truncated, done.
  struct Roles {
    Fields seen, followed, acted;
    std::array<std::uint64_t, 3> flags;
  };

  Steps(const Store& store, const Intake& action, const Intake& outcome, Roles roles, std::vector<std::int64_t> lanes, nb::handle masks,
        bool batched, Autoreset when)
      : action_(action), outcome_(outcome), roles_(std::move(roles)), lanes_(std::move(lanes)), batched_(batched), when_(when) {
    check(store.fields() == outcome.specs().size() && store.fields() == action.specs().size(), "a spec for each field of the store");
    for (std::uint64_t f = 0; f < store.fields(); ++f) {
      bytes_.push_back(bytes_of_rows(outcome.specs()[f], 1));
      check(bytes_[f] == store.row_bytes(f) && bytes_[f] == bytes_of_rows(action.specs()[f], 1), "specs of the fields of the store");
    }
    for (const Fields* fields : {&roles_.seen, &roles_.followed, &roles_.acted}) check_fields(*fields);
    check_fields(roles_.flags);
    for (const std::uint64_t flag : roles_.flags) check(bytes_[flag] == 1, "flags of one byte");
    check(!lanes_.empty() && (batched || lanes_.size() == 1) && roles_.seen.size() == roles_.followed.size(), "a lane per environment");
    for (std::size_t k = 0; k < roles_.seen.size(); ++k) {
      check(bytes_[roles_.seen[k]] == bytes_[roles_.followed[k]], "observations like the next ones");
    }
    masks_ = std::make_unique<HeldArrays>(masks, std::vector<std::size_t>(4, lanes_.size()));
    check(masks_->fit(), "masks of a byte per environment");
  }

  // Keeps the next observations and actions in these arrays. False: they are others than those of the fields.
  bool hold(nb::handle before, nb::handle acted) {
    held_ = std::make_shared<Held>(before, bytes_of(roles_.seen), acted, bytes_of(roles_.acted));
    if (!held_->before.fit() || !held_->acted.fit()) held_.reset();
    return held_ != nullptr;
  }

  bool act(nb::handle action);
  bool go_on(Store& store, nb::handle outcome);

 private:
  struct Held {
    Held(nb::handle seen, const std::vector<std::size_t>& seen_bytes, nb::handle done, const std::vector<std::size_t>& done_bytes)
        : before(seen, seen_bytes), acted(done, done_bytes) {}
    HeldArrays before, acted;
  };

  std::size_t n() const { return lanes_.size(); }
  std::span<std::byte> running() const { return (*masks_)[0]; }
  std::span<std::byte> acting() const { return (*masks_)[1]; }
  std::span<std::byte> open() const { return (*masks_)[2]; }
  std::span<std::byte> waiting() const { return (*masks_)[3]; }

  void check_fields(std::span<const std::uint64_t> fields) const {
    for (const std::uint64_t field : fields) check(field < bytes_.size(), "fields of the store");
  }
  std::vector<std::size_t> bytes_of(const Fields& fields) const {
    std::vector<std::size_t> made;
    for (const std::uint64_t field : fields) made.push_back(n() * bytes_[field]);
    return made;
  }
  bool take(const Intake& intake, nb::handle data, Taken& taken) const {
    return intake.take(data, batched_, taken) && (!batched_ || taken.rows() == static_cast<std::int64_t>(n()));
  }
  bool suits(const Store& store) const {
    bool same = store.ragged() == nullptr && store.fields() == bytes_.size();
    for (std::uint64_t f = 0; same && f < bytes_.size(); ++f) same = store.row_bytes(f) == bytes_[f];
    return same;
  }
  void append(Store& store, std::vector<const std::byte*> columns, const std::vector<std::size_t>& rows) const;

  const Intake &action_, &outcome_;
  const Roles roles_;
  const std::vector<std::int64_t> lanes_;
  const bool batched_;
  const Autoreset when_;
  std::vector<std::size_t> bytes_;  // of a row of each field
  std::unique_ptr<HeldArrays> masks_;
  std::shared_ptr<const Held> held_;
};

// Before a step: keeps the action, if the step is a row of any environment. False: nothing has changed, Python must look at it.
bool Steps::act(nb::handle action) {
  const std::shared_ptr<const Held> held = held_;
  if (held == nullptr) return false;
  if (some(running())) {
    Taken taken;
    if (!take(action_, action, taken)) return false;
    for (std::size_t k = 0; k < roles_.acted.size(); ++k) {
      std::memcpy(held->acted[k].data(), taken.columns()[roles_.acted[k]], held->acted[k].size());
    }
  }
  std::ranges::copy(running(), acting().begin());
  std::ranges::fill(running(), std::byte{0});
  return true;
}

// After it: appends the rows, and keeps what the next actions answer to. False: nothing has changed, and nothing is written.
bool Steps::go_on(Store& store, nb::handle outcome) {
  const std::shared_ptr<const Held> held = held_;
  Taken taken;
  if (held == nullptr || !suits(store) || store.limits().on() || !take(outcome_, outcome, taken)) return false;
  std::vector<const std::byte*> columns(taken.columns().begin(), taken.columns().end());
  const std::byte *const terminated = columns[roles_.flags[0]], *const truncated = columns[roles_.flags[1]];
  std::vector<std::byte> over(n()), waits(n());
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < n(); ++i) {
    const bool ends = (terminated[i] | truncated[i]) != std::byte{0}, acts = acting()[i] != std::byte{0};
    if (ends && when_ == Autoreset::same_step) return false;  // what followed is in the infos
    over[i] = std::byte{ends};
    waits[i] = when_ == Autoreset::next_step ? over[i] : waiting()[i] | over[i];
    if (acts) rows.push_back(i);
    else if (waits[i] == std::byte{0} && open()[i] != std::byte{0}) return false;  // an episode was cut
  }
  columns[roles_.flags[2]] = over.data();
  for (std::size_t k = 0; k < held->before.size(); ++k) columns[roles_.seen[k]] = held->before[k].data();
  for (std::size_t k = 0; k < held->acted.size(); ++k) columns[roles_.acted[k]] = held->acted[k].data();
  if (!rows.empty()) append(store, columns, rows);
  for (const std::size_t i : rows) open()[i] = over[i] ^ std::byte{1};
  for (std::size_t k = 0; k < held->before.size(); ++k) {
    std::memcpy(held->before[k].data(), columns[roles_.followed[k]], held->before[k].size());
  }
  for (std::size_t i = 0; i < n(); ++i) waiting()[i] = waits[i], running()[i] = waits[i] ^ std::byte{1};
  return true;
}

// Appends the rows of some environments, each to its lane.
void Steps::append(Store& store, std::vector<const std::byte*> columns, const std::vector<std::size_t>& rows) const {
  std::vector<std::byte> picked;
  std::vector<std::int64_t> lanes(lanes_);
  if (rows.size() < n()) {
    picked.resize(rows.size() * std::accumulate(bytes_.begin(), bytes_.end(), std::size_t{0}));
    std::byte* to = picked.data();
    for (std::size_t f = 0; f < columns.size(); ++f) {
      const std::byte* const from = columns[f];
      columns[f] = to;
      for (const std::size_t i : rows) std::memcpy(to, from + i * bytes_[f], bytes_[f]), to += bytes_[f];
    }
    for (std::size_t k = 0; k < rows.size(); ++k) lanes[k] = lanes_[rows[k]];
  }
  const WithoutInterpreter running(store.writes_briefly(rows.size()));
  if (rows.size() == 1) {
    store.append(static_cast<std::uint64_t>(lanes[0]), 1, columns, nullptr);
  } else {
    store.append_by_lane(lanes.data(), rows.size(), columns, nullptr);
  }
}

}  // namespace

void bind_steps(nb::module_& m) {
  nb::class_<Steps>(m, "Steps", "The rows of each step of environments that are recorded.")
      .def(
          "__init__",
          [](Steps* self, const Store& store, const Intake& action, const Intake& outcome, Fields seen, Fields followed, Fields acted,
             std::array<std::uint64_t, 3> flags, std::vector<std::int64_t> lanes, nb::handle masks, bool batched, const char* autoreset) {
            const std::string_view mode = autoreset;
            check(mode == "NextStep" || mode == "SameStep" || mode == "Disabled", "an autoreset mode");
            const auto when = mode == "NextStep"   ? Steps::Autoreset::next_step
                              : mode == "SameStep" ? Steps::Autoreset::same_step
                                                   : Steps::Autoreset::disabled;
            new (self) Steps(store, action, outcome, {std::move(seen), std::move(followed), std::move(acted), flags}, std::move(lanes),
                             masks, batched, when);
          },
          "store"_a, "action"_a, "outcome"_a, "seen"_a, "followed"_a, "acted"_a, "flags"_a, "lanes"_a, "masks"_a, "batched"_a,
          "autoreset"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          "`action` and `outcome` take apart actions, and (next observation, reward, terminated, truncated, *others), into columns of the "
          "store. The others are numbers of its fields: of an observation and of the next one, leaf by leaf, of an action, and "
          "(terminated, truncated, done). `masks`: running, acting, open and waiting, arrays of bools, which change in place.")
      .def("hold", &Steps::hold, "before"_a, "acted"_a,
           "The arrays, of the leaves, that hold what the next action answers to, and actions; they change in place. False: others than the "
           "fields.")
      .def("act", &Steps::act, "action"_a.none(), "Before a step. False: nothing has changed, it must be looked at in Python.")
      .def("go_on", &Steps::go_on, "store"_a, "outcome"_a, "After a step: writes its rows. False: as for act.");
}

}  // namespace engram
