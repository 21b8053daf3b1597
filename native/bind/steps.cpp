#include "steps.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
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

// What an array holds: its shape, and the bytes of all of it.
struct Form {
  std::vector<std::int64_t> shape;
  std::size_t bytes;

  bool is_of(const Py_buffer& buffer) const {
    const bool is_ours = buffer.format == nullptr || (*buffer.format != '>' && *buffer.format != '!');  // the order of bytes
    return is_ours && static_cast<std::size_t>(buffer.len) == bytes &&
           std::ranges::equal(shape, std::span(buffer.shape, static_cast<std::size_t>(buffer.ndim)));
  }
};

// Arrays of NumPy whose memory stays where it is while this is there. The GIL must be held when it is made and dropped.
class HeldArrays {
 public:
  HeldArrays(nb::handle arrays, const std::vector<Form>& forms) {
    buffers_.reserve(forms.size());
    for (nb::handle array : arrays) {
      Py_buffer buffer;
      if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_CONTIG | PyBUF_FORMAT) != 0) {
        PyErr_Clear();
        return;
      }
      buffers_.push_back(buffer);
    }
    fit_ = std::ranges::equal(forms, buffers_, [](const Form& form, const Py_buffer& it) { return form.is_of(it); });
  }
  HeldArrays(const HeldArrays&) = delete;
  HeldArrays& operator=(const HeldArrays&) = delete;
  ~HeldArrays() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
  }

  // Whether each is writable, in one piece, and of its form.
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

  // `seen`, `action` and `outcome` take observations, actions, and (next observation, reward, terminated, truncated, …) apart. `done`:
  // the field of terminated or truncated.
  Steps(const Store& store, const Intake& seen, const Intake& action, const Intake& outcome, std::uint64_t done,
        std::vector<std::int64_t> lanes, nb::handle masks, bool batched, Autoreset when)
      : action_(action), outcome_(outcome), seen_(seen.fields()), acted_(action.fields()), done_(done), lanes_(std::move(lanes)),
        batched_(batched), when_(when) {
    for (const RowSpec& spec : outcome.specs()) bytes_.push_back(bytes_of_rows(spec, 1));
    const Fields given = outcome.fields();
    check(given.size() >= seen_.size() + 3, "an observation, a reward and two flags");
    const auto flags = given.begin() + static_cast<std::ptrdiff_t>(seen_.size());
    followed_.assign(given.begin(), flags), terminated_ = flags[1], truncated_ = flags[2];
    std::vector<int> named(bytes_.size());
    for (const Fields& fields : {seen_, acted_, given, Fields{done}}) {
      for (const std::uint64_t field : fields) ++named.at(field);
    }
    complete_ = std::ranges::all_of(named, [](int times) { return times == 1; }) && suits(store);
    for (const std::uint64_t flag : {terminated_, truncated_, done}) check(bytes_[flag] == 1, "flags of one byte");
    for (const Intake* other : {&seen, &action}) {
      check(other->specs().size() == bytes_.size(), "a spec for each field of the store");
      for (std::size_t f = 0; f < bytes_.size(); ++f) check(bytes_of_rows(other->specs()[f], 1) == bytes_[f], "the same specs");
    }
    for (std::size_t k = 0; k < seen_.size(); ++k) complete_ = complete_ && bytes_[seen_[k]] == bytes_[followed_[k]];
    check(!lanes_.empty() && (batched || lanes_.size() == 1), "a lane per environment");
    masks_ = std::make_unique<HeldArrays>(masks, std::vector<Form>(4, {{static_cast<std::int64_t>(n())}, n()}));
    check(masks_->fit(), "masks of a byte per environment");
  }

  // Keeps the next observations and actions in these arrays. False: they are others than the store holds, or it has more fields.
  bool hold(nb::handle before, nb::handle acted) {
    held_ = std::make_shared<Held>(before, forms_of(seen_), acted, forms_of(acted_));
    if (!complete_ || !held_->before.fit() || !held_->acted.fit()) held_.reset();
    return held_ != nullptr;
  }

  bool act(nb::handle action);
  bool go_on(Store& store, nb::handle outcome);

 private:
  struct Held {
    Held(nb::handle seen, const std::vector<Form>& of_seen, nb::handle done, const std::vector<Form>& of_done)
        : before(seen, of_seen), acted(done, of_done) {}
    HeldArrays before, acted;
  };

  std::size_t n() const { return lanes_.size(); }
  std::span<std::byte> running() const { return (*masks_)[0]; }
  std::span<std::byte> acting() const { return (*masks_)[1]; }
  std::span<std::byte> open() const { return (*masks_)[2]; }
  std::span<std::byte> waiting() const { return (*masks_)[3]; }

  std::vector<Form> forms_of(const Fields& fields) const {
    std::vector<Form> made;
    for (const std::uint64_t field : fields) {
      Form& form = made.emplace_back(Form{outcome_.specs()[field].shape, n() * bytes_[field]});
      if (batched_) form.shape.insert(form.shape.begin(), static_cast<std::int64_t>(n()));
    }
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
  const Fields seen_, acted_;
  Fields followed_;  // leaf by leaf like seen_
  std::uint64_t terminated_ = 0, truncated_ = 0;
  const std::uint64_t done_;
  bool complete_ = false;  // each field is given once
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
    for (std::size_t k = 0; k < acted_.size(); ++k) {
      std::memcpy(held->acted[k].data(), taken.columns()[acted_[k]], held->acted[k].size());
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
  const std::byte *const terminated = columns[terminated_], *const truncated = columns[truncated_];
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
  columns[done_] = over.data();
  for (std::size_t k = 0; k < held->before.size(); ++k) columns[seen_[k]] = held->before[k].data();
  for (std::size_t k = 0; k < held->acted.size(); ++k) columns[acted_[k]] = held->acted[k].data();
  if (!rows.empty()) append(store, columns, rows);
  for (const std::size_t i : rows) open()[i] = over[i] ^ std::byte{1};
  for (std::size_t k = 0; k < held->before.size(); ++k) {
    std::memcpy(held->before[k].data(), columns[followed_[k]], held->before[k].size());
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
          [](Steps* self, const Store& store, const Intake& seen, const Intake& action, const Intake& outcome, std::uint64_t done,
             std::vector<std::int64_t> lanes, nb::handle masks, bool batched, const char* autoreset) {
            const std::string_view mode = autoreset;
            check(mode == "NextStep" || mode == "SameStep" || mode == "Disabled", "an autoreset mode");
            const auto when = mode == "NextStep"   ? Steps::Autoreset::next_step
                              : mode == "SameStep" ? Steps::Autoreset::same_step
                                                   : Steps::Autoreset::disabled;
            new (self) Steps(store, seen, action, outcome, done, std::move(lanes), masks, batched, when);
          },
          "store"_a, "seen"_a, "action"_a, "outcome"_a, "done"_a, "lanes"_a, "masks"_a, "batched"_a, "autoreset"_a,
          nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
          "How observations, actions, and (next observation, reward, terminated, truncated, *others) are taken apart into fields of the "
          "store, and the field of terminated or truncated. `masks`: running, acting, open and waiting, arrays of bools, which change in "
          "place.")
      .def("hold", &Steps::hold, "before"_a, "acted"_a,
           "The arrays, of the leaves, that hold what the next action answers to, and actions; they change in place. False: others than the "
           "fields.")
      .def("act", &Steps::act, "action"_a.none(), "Before a step. False: nothing has changed, it must be looked at in Python.")
      .def("go_on", &Steps::go_on, "store"_a, "outcome"_a, "After a step: writes its rows. False: as for act.");
}

}  // namespace engram
