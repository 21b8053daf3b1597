// The store, for Python: appending, scattering, reading and drawing rows.
//
// Memory crosses as plain addresses: the caller has checked dtype, shape and contiguity once per storage, and keeps the memory
// alive during the call. The core always checks row numbers and counts.

#include "store.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/check.h"
#include "../core/control.h"
#include "../core/random.h"
#include "../core/store.h"
#include "../core/wait.h"
#include "../core/writers.h"
#include "block.h"
#include "intake.h"
#include "interpreter.h"
#include "memory.h"
#include "ragged.h"
#include "tensors.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace engram {
namespace {

// Numbers of a Python tuple; short ones stay on the stack.
template <class T>
class Values {
 public:
  explicit Values(const nb::tuple& values) : size_(values.size()) {
    if (size_ > kInline) heap_.resize(size_);
    data_ = size_ > kInline ? heap_.data() : stack_;
    for (std::size_t i = 0; i < size_; ++i) {
      const std::uint64_t value = PyLong_AsUnsignedLongLong(PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i)));
      if (value == ~std::uint64_t{0} && PyErr_Occurred()) throw nb::python_error();
      if constexpr (std::is_pointer_v<T>) {
        data_[i] = reinterpret_cast<T>(static_cast<Address>(value));
      } else {
        data_[i] = static_cast<T>(value);
      }
    }
  }
  std::span<const T> span() const { return {data_, size_}; }

 private:
  static constexpr std::size_t kInline = 16;
  std::size_t size_;
  T stack_[kInline];
  std::vector<T> heap_;
  T* data_;
};

using Inputs = Values<const std::byte*>;
using Outputs = Values<std::byte*>;
using Which = Values<std::uint64_t>;

std::vector<std::byte> bytes_in(const nb::bytes& raw) {
  const auto* first = reinterpret_cast<const std::byte*>(raw.c_str());
  return {first, first + raw.size()};
}

// What a request wrote, and 0; or -1, and what can come next.
template <class Append>
std::pair<std::int64_t, std::uint64_t> in_order(Append&& append) {
  try {
    return {static_cast<std::int64_t>(append()), 0};
  } catch (const Store::OutOfOrder& refused) {
    return {-1, refused.next};
  }
}

// Rows in, from data as users hand it over: None if it must be looked at in Python, which then finds what is wrong or converts.
void bind_takes(nb::class_<Store>& type) {
  type
      .def(
          "append_row_of",
          [](Store& self, const Intake& intake, nb::handle data, nb::handle lane) -> nb::object {
            const Ragged* ragged = self.ragged();
            Taken taken(ragged != nullptr);
            NamedLanes named;
            if (!intake.take(data, false, taken)) return nb::none();
            if (!named.read(lane, 1, self.control().lanes()) || !named.is_one()) return nb::none();
            std::optional<RaggedWrite> items;
            if (ragged != nullptr) items.emplace(*ragged, 1, taken.items());
            std::int64_t row = -1;
            std::uint64_t number = 0;
            {
              const WithoutInterpreter running(!items && self.writes_briefly(1));
              number = self.append(named.one(), 1, taken.columns(), &row, items ? &*items : nullptr);
            }
            return nb::make_tuple(row, number);
          },
          "intake"_a, "data"_a.none(), "lane"_a.none(), "Appends one row: (row, ticket number), or None.")
      .def(
          "append_of",
          [](Store& self, const Intake& intake, nb::handle data, nb::handle lane) -> nb::object {
            Taken taken;
            NamedLanes named;
            if (!intake.take(data, true, taken)) return nb::none();
            const auto n = static_cast<std::uint64_t>(taken.rows());
            if (!named.read(lane, n, self.control().lanes())) return nb::none();
            OutputBuffer rows(kNumbers, taken.rows());
            auto* const numbers = reinterpret_cast<std::int64_t*>(rows.data());
            std::uint64_t first = 0;
            {
              const WithoutInterpreter running(self.writes_briefly(n));
              first = named.is_one() ? self.append(named.one(), n, taken.columns(), numbers)
                                     : self.append_by_lane(named.each(), n, taken.columns(), numbers);
            }
            return nb::make_tuple(std::move(rows).tensor(taken.rows()), first);
          },
          "intake"_a, "data"_a.none(), "lane"_a.none(),
          "Appends rows to a lane, or to one each: (int64 tensor of rows, first ticket number), or None.");
}

// In one call, during which Python handles no signal. Fields are added before the layout says them: reads by that need them.
void grow(Store& store, Layout& layout, const nb::list& fields, const nb::list& swaps) {
  std::vector<Store::NewField> more;
  std::vector<RowSpec> specs;
  for (nb::handle field : fields) {
    const auto data = at<std::byte>(nb::cast<Address>(field[0]));
    more.push_back({{data, nb::cast<std::uint64_t>(field[1])}, bytes_in(nb::cast<nb::bytes>(field[2]))});
    specs.push_back(spec_of(field[3]));
  }
  std::vector<std::pair<nb::dict, nb::dict>> all;
  for (nb::handle swap : swaps) all.emplace_back(nb::cast<nb::dict>(swap[0]), nb::cast<nb::dict>(swap[1]));
  store.add_fields(std::move(more));
  layout.add(specs);
  for (auto& [to, entries] : all) to.update(entries);
}

// Rows in.
void bind_writes(nb::class_<Store>& type) {
  type
      .def(
          "add_field",
          [](Store& self, Address data, std::uint64_t row_bytes) { self.add_field({at<std::byte>(data), row_bytes}); }, "data"_a,
          "row_bytes"_a, "One field more, which holds what the live rows have; no other thread may add one or write meanwhile.")
      .def(
          "grow", &grow, "layout"_a, "fields"_a, "swaps"_a,
          "Adds fields, (address, row bytes, fill, spec) each, to the store and to the layout of its reads, and updates dicts, (dict, "
          "entries) each: in one call, during which Python handles no signal.")
      .def(
          "set_fill", [](Store& self, std::uint64_t field, const nb::bytes& fill) { self.set_fill(field, bytes_in(fill)); }, "field"_a,
          "fill"_a, "What rows hold in a field that become live without being written; no other thread may use the store meanwhile.")
      .def(
          "append",
          [](Store& self, std::uint64_t lane, std::uint64_t n, const nb::tuple& columns, Address rows) {
            const Inputs inputs(columns);
            const WithoutInterpreter running(self.writes_briefly(n));
            return self.append(lane, n, inputs.span(), at<std::int64_t>(rows));
          },
          "lane"_a, "n"_a, "columns"_a, "rows"_a, "Appends rows; the first ticket number.")
      .def(
          "append_by_lane",
          [](Store& self, Address lane_of, std::uint64_t n, const nb::tuple& columns, Address rows) {
            const Inputs inputs(columns);
            const WithoutInterpreter running(self.writes_briefly(n));
            return self.append_by_lane(at<std::int64_t>(lane_of), n, inputs.span(), at<std::int64_t>(rows));
          },
          "lane_of"_a, "n"_a, "columns"_a, "rows"_a)
      .def(
          "scatter",
          [](Store& self, Address rows, std::uint64_t n, const nb::tuple& which, const nb::tuple& columns, bool grow,
             Address pick, std::uint64_t of, const nb::tuple& items) {
            const Which fields(which);
            const Inputs inputs(columns);
            std::optional<RaggedWrite> write;
            if (items.size() > 0) write.emplace(write_in(self, pick == 0 ? n : of, items));
            const WithoutInterpreter running(!grow && self.writes_briefly(n));  // to grow may take many more rows
            return self.scatter(at<std::int64_t>(rows), n, fields.span(), inputs.span(), grow, at<std::int64_t>(pick), of,
                                write ? &*write : nullptr);
          },
          "rows"_a, "n"_a, "which"_a, "columns"_a, "grow"_a, "pick"_a = 0, "of"_a = 0, "items"_a = nb::tuple(),
          "Writes rows by number; the first ticket number. `pick`: their places among the `of` rows of the columns. `items`: as for "
          "append_ragged, of all rows of the columns; of a store whose ragged fields lie in slots.")
      .def(
          "patch",
          [](Store& self, Address rows, std::uint64_t n, const nb::tuple& which, const nb::tuple& columns, Address expected,
             Address numbers, bool unedited) {
            const Which fields(which);
            const Inputs inputs(columns);
            const WithoutInterpreter running(self.writes_briefly(n));
            const Patched made = self.patch(at<std::int64_t>(rows), n, fields.span(), inputs.span(), at<std::int64_t>(expected),
                                            at<std::int64_t>(numbers), unedited ? Store::Same::ticket : Store::Same::write);
            return std::pair(made.first, made.entries);
          },
          "rows"_a, "n"_a, "which"_a, "columns"_a, "expected"_a, "numbers"_a, "unedited"_a,
          "Writes fields of the rows that still hold the writes expected, or, `unedited`, still have these tickets; the first ticket "
          "number, and how many entries were written.")
      .def(
          "fill",
          [](Store& self) {
            nb::gil_scoped_release release;
            self.control().writable().fill();
          },
          "Commits every row as it stands.");
}

// Rows out of the store, and rows in, of requests that may be repeated.
void bind_requests(nb::class_<Store>& type) {
  type
      .def(
          "empty",
          [](Store& self, bool keep_write_count) {
            nb::gil_scoped_release release;
            self.empty(keep_write_count);
          },
          "keep_write_count"_a)
      .def(
          "remove",
          [](Store& self, Address rows, std::uint64_t n, Address expected, bool paused) {
            nb::gil_scoped_release release;
            return self.remove(at<std::int64_t>(rows), n, at<std::int64_t>(expected), paused);
          },
          "rows"_a, "n"_a, "expected"_a, "paused"_a = false,
          "Makes rows void, with `expected` only those that still have these tickets; how many. `paused`: this process has paused the store.")
      .def(
          "append_at",
          [](Store& self, std::uint64_t lane, std::uint64_t position, std::uint64_t n, const nb::tuple& columns, Address rows) {
            const Inputs inputs(columns);
            const WithoutInterpreter running(self.writes_briefly(n));
            return in_order([&] { return self.append_at(lane, position, n, inputs.span(), at<std::int64_t>(rows)); });
          },
          "lane"_a, "position"_a, "n"_a, "columns"_a, "rows"_a,
          "Writes what is missing of rows at a position: how many, and 0; or -1, and the position that comes next.")
      .def(
          "append_by",
          [](Store& self, const Writers& writers, std::uint64_t high, std::uint64_t low, std::uint64_t number, std::uint64_t lane,
             std::uint64_t n, const nb::tuple& columns, Address rows, const nb::tuple& items) {
            const Inputs inputs(columns);
            std::optional<RaggedWrite> write;
            if (items.size() > 0) write.emplace(write_in(self, n, items));
            const WithoutInterpreter running(!write && self.writes_briefly(n));
            return in_order([&] {
              return writers.append(self, {high, low}, number, lane, n, inputs.span(), at<std::int64_t>(rows), write ? &*write : nullptr);
            });
          },
          "writers"_a, "high"_a, "low"_a, "number"_a, "lane"_a, "n"_a, "columns"_a, "rows"_a, "items"_a = nb::tuple(),
          "Writes what is missing of a writer's request: how many rows, and 0; or -1, and the number of its next request. `items`: as for "
          "append_ragged.");
}

// Rows out, by number.
void bind_reads(nb::class_<Store>& type) {
  type
      .def(
          "gather",
          [](const Store& self, Address rows, std::uint64_t n, const nb::tuple& which, const nb::tuple& batch,
             Address expected, Address numbers) {
            const Which fields(which);
            const Outputs outputs(batch);
            std::vector<std::int64_t> moved;
            {
              const WithoutInterpreter running(self.reads_briefly(n));
              moved = self.gather(at<std::int64_t>(rows), n, fields.span(), outputs.span(), at<std::int64_t>(expected),
                                  at<std::int64_t>(numbers));
            }
            return moved;
          },
          "rows"_a, "n"_a, "which"_a, "batch"_a, "expected"_a, "numbers"_a)
      .def(
          "take",
          [](const Store& self, const Layout& layout, Address rows, std::uint64_t n, Address expected) {
            OutputBuffers buffers;
            std::vector<std::int64_t> moved;
            {
              const WithoutInterpreter running(self.reads_briefly(n));
              self.find_fields();
              const std::size_t fields = buffers.add(layout, static_cast<std::int64_t>(n));
              moved = self.gather(at<std::int64_t>(rows), n, self.all().first(fields), buffers.first(fields),
                                  at<std::int64_t>(expected), nullptr);
            }
            return nb::make_tuple(std::move(buffers).tensors(static_cast<std::int64_t>(n)), moved);
          },
          "layout"_a, "rows"_a, "n"_a, "expected"_a, "As gather, of all fields into new tensors: (tensors, moved).");
}

// Tickets of rows, the numbers of their writes, and what changed.
void bind_tickets(nb::class_<Store>& type) {
  type
      .def(
          "tickets_of",
          [](const Store& self, Address rows, std::uint64_t n, Address numbers) {
            const WithoutInterpreter running(n <= 1024);
            self.tickets_of(at<std::int64_t>(rows), n, at<std::int64_t>(numbers));
          },
          "rows"_a, "n"_a, "numbers"_a)
      .def(
          "name_writes",
          [](const Store& self, Address rows, std::uint64_t n, Address numbers) {
            const WithoutInterpreter running(n <= 1024);
            self.control().name_writes(at<const std::int64_t>(rows), n, at<std::int64_t>(numbers));
          },
          "rows"_a, "n"_a, "numbers"_a, "Tickets that rows were read with become the numbers of the writes that they held.")
      .def(
          "tickets_of_writes",
          [](const Store& self, Address rows, std::uint64_t n, Address expected, Address numbers) {
            nb::gil_scoped_release release;
            self.tickets_of_writes(at<const std::int64_t>(rows), n, at<const std::int64_t>(expected), at<std::int64_t>(numbers));
          },
          "rows"_a, "n"_a, "expected"_a, "numbers"_a, "The tickets of rows that still hold these writes; -1 of others.")
      .def(
          "changes",
          [](const Store& self, std::uint64_t since) {
            std::vector<std::int64_t> rows, numbers;
            std::uint64_t next = 0;
            {
              nb::gil_scoped_release release;
              next = self.changes(since, rows, numbers);
            }
            return nb::make_tuple(array_of(std::move(rows)), array_of(std::move(numbers)), next);
          },
          "since"_a, "Rows whose number is at least `since`: (rows, numbers, what to ask for the next time).")
      .def(
          "holes",
          [](const Store& self) {
            std::vector<std::int64_t> holes;
            {
              nb::gil_scoped_release release;
              holes = self.holes();
            }
            return array_of(std::move(holes));
          },
          "The void rows inside the extent, in row order: an int64 array.");
}

// Reads the items of rows that were drawn. Those that have lost them are drawn again, which keeps the draw uniform.
void read_drawn(const Store& store, ItemsRead& items, std::uint64_t key, std::uint64_t n, Batch columns, std::int64_t* rows,
                std::int64_t* numbers) {
  check(store.ragged() != nullptr && rows != nullptr && numbers != nullptr, "ragged fields, and rows and numbers of what has them");
  std::vector<std::byte*> spans, one(columns.size());
  for (const RaggedGroup& group : store.ragged()->groups()) spans.push_back(columns[group.leader]);
  const Deadline deadline;
  for (;;) {
    const std::vector<std::int64_t> moved = items.read(store, nullptr, rows, n, numbers, spans, {});
    if (moved.empty()) return;
    if (deadline.passed()) throw in_vain("row " + std::to_string(rows[moved[0]]) + " moved at every try");
    key = mix(key);
    for (const std::int64_t position : moved) {
      const auto i = static_cast<std::uint64_t>(position);
      for (std::uint64_t f = 0; f < one.size(); ++f) one[f] = columns[f] + i * store.row_bytes(f);
      store.sample_uniform(key + i, 1, one, rows + i, numbers + i);
    }
  }
}

// Rows out, drawn.
void bind_draws(nb::class_<Store>& type) {
  type
      .def(
          "sample_uniform",
          [](const Store& self, std::uint64_t key, std::uint64_t n, const nb::tuple& batch, Address rows, Address numbers) {
            const Outputs outputs(batch);
            nb::gil_scoped_release release;
            self.sample_uniform(key, n, outputs.span(), at<std::int64_t>(rows), at<std::int64_t>(numbers));
          },
          "key"_a, "n"_a, "batch"_a, "rows"_a, "numbers"_a)
      .def(
          "draw_uniform",
          [](const Store& self, const Layout& layout, Address key_at, std::uint64_t n, bool with_rows,
             bool with_numbers, bool unless_limited, const ItemLayout* ragged) -> nb::object {
            if (unless_limited && self.limits().on()) return nb::none();
            const std::uint64_t key = *at<const std::uint64_t>(key_at);  // read before the GIL is released
            check(n < std::uint64_t{1} << 48, "a batch of more rows than there is memory");
            const auto size = static_cast<std::int64_t>(n);
            const Waiting waiting = unless_limited ? self.begin_wait() : Waiting{};
            OutputBuffers buffers;
            std::optional<ItemsRead> items;
            {
              const WithoutInterpreter running(ragged == nullptr && self.reads_briefly(n));
              self.find_fields();
              const std::size_t fields = buffers.add(layout, size);
              std::vector<std::int64_t> unseen;
              const auto extra = [&](bool wanted) -> std::int64_t* {
                if (!wanted) return nullptr;
                buffers.add(kNumbers, size);
                return buffers.at<std::int64_t>(buffers.size() - 1);
              };
              std::int64_t* rows = extra(with_rows);
              std::int64_t* numbers = extra(with_numbers);
              if (rows == nullptr && (with_numbers || self.hears_samples())) unseen.resize(n), rows = unseen.data();
              self.sample_uniform(key, n, buffers.first(fields), rows, numbers, masses_of_block());
              if (ragged != nullptr) read_drawn(self, items.emplace(*ragged), key, n, buffers.first(fields), rows, numbers);
              if (with_numbers) self.control().name_writes(rows, n, numbers);
              self.count_sampled(rows, n);
            }
            self.count_wait(waiting);
            nb::list tensors = std::move(buffers).tensors(size);
            if (items) return nb::make_tuple(tensors, std::move(*items).groups());
            return tensors;
          },
          "layout"_a, "key_at"_a, "n"_a, "with_rows"_a, "with_numbers"_a, "unless_limited"_a, "ragged"_a.none() = nb::none(),
          "As sample_uniform, with the key at an address, into new tensors: one per field, then int64 [n] for the rows and "
          "for their ticket numbers, where wanted. None: nothing was drawn, `unless_limited`, and the store has limits; else the wait of such "
          "a call is counted. With `ragged`, of a store that has such fields: (tensors, groups as of "
          "read_items): rows that have lost their items make place for others.");
}

}  // namespace

void bind_store(nb::module_& m) {
  nb::class_<Store> type(m, "Store", "Fields, tickets and lane cursors at given addresses, which must outlive it.");
  type.def(
          "__init__",
          [](Store* self, Address control, std::uint64_t control_bytes, Address tickets, std::uint64_t tickets_bytes,
             const nb::tuple& data, const nb::tuple& row_bytes, const nb::tuple& strides, std::uint64_t participant, bool readonly,
             bool abandoned) {
            const Outputs addresses(data);
            const Which sizes(row_bytes), distances(strides);
            check(data.size() == row_bytes.size() && data.size() == strides.size(), "one row size and stride per field");
            std::vector<Field> fields;
            for (std::size_t i = 0; i < data.size(); ++i) fields.push_back({addresses.span()[i], sizes.span()[i], distances.span()[i]});
            Control view(block(control, control_bytes), block(tickets, tickets_bytes));
            if (readonly) view.only_read(abandoned);
            new (self) Store(view, std::move(fields), participant);
          },
          "control"_a, "control_bytes"_a, "tickets"_a, "tickets_bytes"_a, "fields"_a, "row_bytes"_a, "strides"_a,
          "participant"_a = 0, "readonly"_a = false, "abandoned"_a = false,
          "`readonly`: the memory may be mapped without the right to write, every write is refused. `abandoned`: and no process has "
          "the store open.");
  bind_takes(type);
  bind_writes(type);
  bind_requests(type);
  bind_field_updates(m, type);
  bind_reads(type);
  bind_tickets(type);
  bind_draws(type);
  bind_disk(type);
  bind_ragged(m, type);
  bind_limits(type);
  bind_meter(type);
  bind_store_control(m, type);
}

}  // namespace engram
