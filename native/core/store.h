// The write and read protocol over one control block and its fields.
//
//   write   reserve positions and ticket numbers → note the claim → mark the rows → copy → commit them, in order
//   read    look at the ticket → copy → look again: a row that moved meanwhile is not returned
//
// No lock anywhere: readers never wait for writers, and a writer waits only for another writer of the same row, bounded.
// Every method may be called from any thread. Threads that write at the same time each hold a claim.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "control.h"
#include "disk.h"
#include "gather.h"
#include "index.h"
#include "meter.h"
#include "open_rows.h"
#include "row_limits.h"
#include "participants.h"
#include "ragged.h"
#include "random.h"

namespace engram {

/// Rows to write: per field a pointer to n contiguous rows of the field's row size.
using Columns = std::span<const std::byte* const>;
/// Rows to read: per field a pointer to memory for n rows.
using Batch = std::span<std::byte* const>;

/// What was true of the rows when some of them were drawn, at the same moment: what exact draws over several stores need.
struct Masses {
  double total = 0;        // of all leaves; where each row is equally likely, their number
  double least = 0;        // the smallest leaf above zero
  std::uint64_t live = 0;  // rows
};

/// What Store::patch wrote.
struct Patched {
  std::uint64_t first = 0;  // ticket number
  std::uint64_t entries = 0;
};

class Store {
 public:
  /// `fields` may be empty: then only control memory is kept here and the rows live elsewhere (on a GPU, say).
  /// `participant` is the entry of the table in which this process notes its claims. Of a view that only reads every write throws
  /// ReadOnly, before anything has changed.
  Store(Control control, std::vector<Field> fields, std::uint64_t participant);

  /// From now on other processes share the store: this one holds an entry of the table, and recovers dead participants. To be called
  /// before the first write. Throws Stalled: the table is full.
  void join(std::shared_ptr<Participants> participants);

  /// A field to add. `fill`: a row of it. Then writes may leave the field out, and those that do write this.
  struct NewField {
    Field field;
    std::optional<std::vector<std::byte>> fill;
  };

  /// More fields, which hold what the live rows have: reads and writes move them from now on, after all others. To be called while
  /// no other thread adds some or writes. Readers go on: what they have begun with the fields of before they end with these. All are
  /// added, or none if this throws.
  void add_fields(std::vector<NewField> more);
  void add_field(Field field, std::optional<std::vector<std::byte>> fill = std::nullopt) { add_fields({{field, std::move(fill)}}); }

  /// What rows hold in a field that become live without being written, in place of zeros. To be called while no other thread uses the
  /// store.
  void set_fill(std::uint64_t field, std::vector<std::byte> fill);

  /// Called by a call that finds that another process has added fields, before it reads or writes a row: it adds them here.
  void on_new_fields(std::function<void()> adopt) { on_new_fields_ = std::move(adopt); }

  /// All fields that there were at that epoch are here.
  void knows_fields(std::uint64_t epoch) { indexes_->fields_epoch.store(epoch, std::memory_order_release); }

  /// Looks whether another process has added fields since, and adopts them.
  void find_fields() const;

  /// Called by a write that finds that another process has made an index, before the write is told to the indexes: it
  /// attaches what is new.
  void on_new_index(std::function<void()> attach) { on_new_index_ = std::move(attach); }

  /// All indexes that there were at that epoch are attached.
  void knows_indexes(std::uint64_t epoch);

  /// From now on rows that are not in memory are read from their files, one per field, and written there. To be called while no
  /// other thread uses the store.
  void use(std::unique_ptr<Disk> disk);
  /// Null: the rows are in memory only.
  Disk* disk() const { return disk_.get(); }

  /// The rings with the items of ragged fields, whose leaders are fields of the store already. To be called before the store is used.
  void use(std::unique_ptr<Ragged> ragged);
  /// Null: no field is ragged.
  const Ragged* ragged() const { return ragged_.get(); }
  /// The group of ragged fields that a field leads; null: none.
  const RaggedGroup* led_by(std::uint64_t field) const;
  /// Appends the row of a slot, which is of that owner, and frees the slot: in one step, whenever the process dies. As append() of one row.
  /// `open` is attached. Throws std::invalid_argument, and nothing is written: the slot has another owner.
  std::uint64_t seal(const OpenRows& open, std::uint64_t slot, std::uint64_t owner, std::uint64_t lane, Columns columns, std::int64_t* row,
                     RaggedWrite& items);
  /// As OpenRows::append of values and the last items, and then the same; if it throws, those items are dropped again. `times`: how often
  /// the slot was taken.
  std::uint64_t seal(const OpenRows& open, const SlotLayout& layout, std::uint64_t slot, std::uint64_t owner, std::uint64_t times,
                     std::uint64_t lane, std::span<const SlotValue> values, std::span<const SlotItems> items, std::int64_t* row);
  /// Frees slots whose row was sealed by a process that died since, or in which it left nothing.
  void free_sealed(OpenRows& open) const;

  const Control& control() const { return control_; }
  /// How fast rows may come and go. Appended rows, and those that are written by number to grow, are admitted first, or refused: Limited.
  Limits limits() const { return Limits(control_); }
  /// What a call does that the limits still do not admit after a wait: it looks for processes that died, and has rows in flight counted
  /// again, unless a write is under way.
  void waits_in_vain() const;
  /// As Limits::prepay.
  void prepay(std::uint64_t n) const { limits().prepay(n, writer()); }
  /// What is counted for people.
  Meter meter() const { return Meter(control_); }
  /// Whether an index wants to hear which rows are sampled.
  bool hears_samples() const { return indexes_->hear_samples.load(std::memory_order_acquire); }
  /// Counts rows that this process has sampled. They may be null where no index wants to hear of them. A view that only reads counts
  /// nothing.
  void count_sampled(const std::int64_t* rows, std::uint64_t n) const;
  /// There is an index now that wants to hear which rows are sampled: by the next of their samples all processes find it.
  void ask_for_usage() const { control_.writable().meter_page().asked_usage.fetch_add(1, std::memory_order_acq_rel); }
  /// Before a call that waits for a batch, which is timed if its turn has come.
  Waiting begin_wait() const;
  /// After it: counts how long it waited, if it was timed.
  void count_wait(const Waiting& call) const;
  /// Whether reading, or writing, n whole rows is over before another thread has been woken: they lie in memory, and are few and
  /// small. Measured: benchmarks/bench_threads.py.
  bool reads_briefly(std::uint64_t n) const { return in_memory_ && !control_.only_reads() && n <= kBriefReads && n * row_bytes() <= kBriefBytes; }
  bool writes_briefly(std::uint64_t n) const { return in_memory_ && n <= kBriefWrites && n * row_bytes() <= kBriefBytes; }
  std::uint64_t fields() const { return table().fields.size(); }
  /// 0 … fields - 1: what a read of whole rows names.
  std::span<const std::uint64_t> all() const { return table().all; }
  std::uint64_t row_bytes(std::uint64_t number) const { return field(number).row_bytes; }
  const Field& field(std::uint64_t number) const { return table().fields[number]; }
  /// Of the file that the rows of a field lie in: its number, which is that of its first field, and the rows of all fields in it, as one
  /// field.
  std::uint64_t file_of(std::uint64_t number) const { return field(number).contiguous() ? number : lead_; }
  const Field& rows_of_file(std::uint64_t number) const { return field(number).contiguous() ? field(number) : group_; }

  /// Appends n rows to a lane; of more rows than the lane is long the last lane_length survive. rows_out: [n], may be
  /// null. Returns t0: row i has ticket number t0 + i. `items`: of the ragged fields, whose columns are ignored; null if there are none.
  std::uint64_t append(std::uint64_t lane, std::uint64_t n, Columns columns, std::int64_t* rows_out, RaggedWrite* items = nullptr);

  /// Thrown by what reserves positions of a request: an earlier one is missing, or it is too old to tell. `next`: the position, or the
  /// number of the request, that can come next.
  struct OutOfOrder : std::runtime_error {
    explicit OutOfOrder(std::uint64_t next) : std::runtime_error("a request out of order"), next(next) {}
    std::uint64_t next;
  };

  /// Positions of a request that may be repeated: `again`, if some of them may have been reserved before.
  struct Positions {
    std::uint64_t lane, first;
    bool again;
  };

  /// Writes n rows at the positions that `reserve` reserves; it is called when no process keeps writers waiting, and nothing has
  /// changed if it throws. Rows that are whole there stay what they are, whichever process wrote them, and so do those of later laps; what was
  /// reserved and never begun, or lost with its writer, is written. Several may do this for the same positions at the same time: each
  /// row is written once. When it returns every row is whole, or was lapped. rows_out as for append(). Returns how many this call
  /// wrote. Throws Stalled: the rest is not written then.
  /// Of rows with items `reserve` gives them places, by reserve() below or those that they had.
  std::uint64_t append_once(std::uint64_t n, Columns columns, std::int64_t* rows_out, const std::function<Positions()>& reserve,
                            RaggedWrite* items = nullptr);

  /// The position of the first of n rows of a lane, for this process (null: it is not noted), and their items in order; those that
  /// `pick` names, or from the first on.
  std::uint64_t reserve(std::uint64_t lane, std::uint64_t n, const std::int64_t* pick, RaggedWrite* items, const Participant* by) const;

  /// append_once() of the positions of a lane from `position` on: the position says which request it is. For a lane with one writer:
  /// whatever is there is taken for its own. Throws OutOfOrder, and nothing has changed: the lane has not come as far as `position`, or
  /// was emptied and has begun again behind it, so that it is not known whether the rows were there before.
  std::uint64_t append_at(std::uint64_t lane, std::uint64_t position, std::uint64_t n, Columns columns, std::int64_t* rows_out);

  /// Appends row i of the columns to lane lane_of[i]; order is kept within each lane. Otherwise as append.
  std::uint64_t append_by_lane(const std::int64_t* lane_of, std::uint64_t n, Columns columns, std::int64_t* rows_out,
                               RaggedWrite* items = nullptr);

  /// Writes rows by number; of rows named twice the last entry wins. `which` names the fields that `columns` holds: all
  /// others keep their content. `grow`, which needs all fields: the lanes' extents come to cover the rows, and unwritten rows below
  /// them become live as zeros; else every row must be live (std::out_of_range otherwise, nothing written), and one that ceases to be
  /// meanwhile is passed over. `pick`, if not null, names
  /// for each row its row of the columns, which have `of` rows (std::out_of_range for others, nothing written). `items`, with `grow`: of
  /// the ragged fields, which lie in slots, of all rows of the columns.
  /// Returns t0, as append.
  std::uint64_t scatter(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which,
                        Columns columns, bool grow, const std::int64_t* pick = nullptr, std::uint64_t of = 0,
                        const RaggedWrite* items = nullptr);

  /// What a row must still hold: the write of that number, edited or not; or what it held under that ticket.
  enum class Same { write, ticket };

  /// Replaces fields of the rows that are still the `same` as `expected` says, and of no others: the look and the write are one
  /// step. -1 names no row. Every entry of a row named twice counts, in order; of tickets the first one. `numbers_out`: the numbers of
  /// their writes, -1 for those that were left alone. Waits for edits of a row, not for writes. The rows edited
  /// have the tickets `first`, `first` + 1 ... Throws Stalled: an edit is under way for too long.
  Patched patch(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, Columns columns,
                const std::int64_t* expected, std::int64_t* numbers_out, Same same = Same::write);

  /// Copies the items of rows that still have the tickets `expected`, and whose columns of a group's leader are `spans`: of field f, those
  /// of row i to outputs[f] from item places[i] on; null: not that field. Returns the positions of rows that do not have them any more;
  /// what was copied for those is unspecified. Throws std::out_of_range.
  std::vector<std::int64_t> gather_items(std::uint64_t group, const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected,
                                         const std::byte* spans, std::span<std::byte* const> outputs, const std::int64_t* places) const;

  /// As patch(), of the items of a group: rows that still are the same get other items of the same length, of the fields whose values are
  /// not null. Throws std::invalid_argument, and nothing is written: a row has another length.
  Patched patch_items(std::uint64_t group, const std::int64_t* rows, std::uint64_t n, const RaggedSource& source,
                      const std::int64_t* expected, std::int64_t* numbers_out, Same same = Same::write);

  /// The tickets of rows that still hold the writes `expected`, -1 for others and where that is not above 0. Waits for edits, as patch().
  void tickets_of_writes(const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected, std::int64_t* numbers_out) const;

  /// Makes live rows void, as if their writer had died: draws, tables and indexes know them no more. -1 names no row. `expected`, if
  /// not null: only rows that still hold the writes of these numbers. Rows that hold nothing, or that a writer is just writing, stay as
  /// they are; edits are waited for. Returns how many became void. Throws std::out_of_range, and nothing has changed. Cost: O(n log rows); tables of trajectories
  /// are made again, O(rows).
  /// `paused`: this process keeps all writers waiting, and what it has looked at is what goes (std::invalid_argument: it does not).
  std::uint64_t remove(const std::int64_t* rows, std::uint64_t n, const std::int64_t* expected, bool paused = false);

  /// Forgets all rows (Control::empty), and tells the indexes.
  void empty(bool keep_write_count);

  /// From now on no process writes: writers wait for resume(), bounded, and writes that were under way are over.
  /// Priorities may change. Throws Stalled: another one has paused the store, or is writing, for too long.
  void pause();
  void resume();
  /// The same, counted: the outermost one pauses and resumes. If that `failed`, or the store was begun to be replaced and its
  /// process dies, the store is empty. For callers that keep other threads out from the one to the other.
  void begin_pause();
  void end_pause(bool failed);
  bool paused() const { return control_.lock_page().pause.load(std::memory_order_acquire) != 0; }

  /// Held by writers that look for rows, from then to writing: no writer of another process looks for the same. Counted as
  /// begin_pause(). Throws Stalled.
  void begin_placing();
  void end_placing();

  /// In a forked child: what the parent has begun it ends itself.
  void forget_holds();

  /// Empties the store, which this process has paused: its rows may be written to directly. If the process dies before
  /// resume() the store is empty.
  void begin_replacing(bool keep_write_count);
  /// Ends a replacement that failed midway: the store is empty.
  void end_replacing() const;

  /// Writes n rows to the rows first … of a field, past the mapping; false: they are to be written to the mapping. Only while the store
  /// is being replaced. Throws DiskError.
  bool refill(std::uint64_t field, std::uint64_t first, std::uint64_t n, const std::byte* from) const;

  /// The rows are there, as Control::put_state; what indexes are to say of them may be told them before resume().
  std::uint64_t replaced(std::uint64_t clock, const Control::LaneState* lanes, const std::int64_t* numbers,
                         const std::int64_t* writes = nullptr);

  /// From now on every write is told to the index too, which must outlive the store. Writes that are under way may not be:
  /// what was written before, the index looks up by itself after this call.
  void attach(Index& index);

  /// Recovers what dead participants left: rows half written become void, the indexes are told of whole ones, claims are
  /// cleared. Returns how many there were. Reads and writes call it twice a second, and while they wait for a row.
  std::uint64_t reclaim() const;

  /// Recovers one dead participant, whose entry the caller has locked.
  void repair(Participant& dead) const;

  /// What all writers left, for the only process attached: as Control::recover, and the indexes are told.
  Control::Repair recover() const;

  /// Copies rows into a batch. Returns the positions whose row was not whole, or changed during the copy, or no longer
  /// holds `expected` (ticket numbers, may be null); their content in the batch is unspecified. Throws DiskError.
  std::vector<std::int64_t> gather(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which,
                                   Batch batch, const std::int64_t* expected, std::int64_t* numbers_out) const;

  /// Draws n live rows uniformly, with replacement, and copies them: rows that are not whole, or move, are drawn again.
  /// A pure function of (key, extent, tickets), whatever the number of threads. Throws NothingLive, DiskError.
  void sample_uniform(std::uint64_t key, std::uint64_t n, Batch batch, std::int64_t* rows_out, std::int64_t* numbers_out,
                      Masses* masses = nullptr) const;

  /// Copies the live rows of given ranks in row order, ranks[0, n), and puts the rows in their place. One that moves is read
  /// once more; for one that turns out void, as its writer died, or forgotten another live row comes that is not in the batch.
  /// Throws NothingLive: there are not as many live rows any more. Throws Stalled.
  void read_ranked(std::int64_t* ranks, std::uint64_t n, Batch batch, std::int64_t* numbers_out) const;

  /// The current ticket numbers of rows, -1 for a row that is not whole or outside [0, capacity).
  void tickets_of(const std::int64_t* rows, std::uint64_t n, std::int64_t* numbers_out) const;

  /// Rows whose number is at least `since`, with their numbers, the oldest write first. Returns what to ask for the next
  /// time: writes that are under way may have smaller numbers than rows that are there already, which then come again.
  /// Throws Stalled. Cost: O(capacity), a word each.
  std::uint64_t changes(std::uint64_t since, std::vector<std::int64_t>& rows, std::vector<std::int64_t>& numbers) const;

  /// The void rows inside the extent, in row order. Cost: O(void rows), and a look at all tickets where some changed since the last
  /// call of this store.
  std::vector<std::int64_t> holes() const;

 private:
  static constexpr std::uint64_t kMostBlockRows = 64;  // that a read takes between two looks at their tickets

  /// Where a row lies in the ring that wrote it; scattered rows have no place in a ring.
  struct Place {
    std::uint64_t lane, position;
    std::uint32_t lap;
  };
  struct Target {
    std::uint64_t row, number;
    bool in_ring;
    Place place;  // there
  };
  enum class Mark { marked, lapped, there, busy };
  enum class Need { none, waiting };
  enum class Over { anything, live, part_of_live, missing };

  void look_after_others(Need need = Need::none) const;
  void find_usage() const;
  void admit(ClaimGuard& claim) const;
  void wait_while_paused(ClaimGuard& claim) const;
  bool has_new_fields() const { return control_.counters().fields_epoch.load(std::memory_order_acquire) != indexes_->fields_epoch; }
  Participant& writer() const { return control_.writable(), *participant_; }
  std::uint64_t own_pause() const;
  void await_claims() const;
  Stalled paused_in_vain() const;  // says who has paused the store
  void empty(ClaimGuard& claim, bool keep_write_count) const;
  std::uint64_t repair(Claim& claim) const;
  std::uint64_t remove_under(std::uint64_t t0, const std::int64_t* rows, const std::int64_t* expected,
                             std::vector<std::uint64_t>& left) const;
  void void_gaps() const;
  void count_voids() const;
  void count_in_flight(bool died) const;

  std::uint64_t first_unfinished() const;

  template <class Tell>
  void tell_indexes(Tell&& tell) const;
  template <class Write, class Settle, class Tell>
  void write_and_tell(ClaimGuard& claim, Write&& write, Settle&& settle, Tell&& tell) const;
  template <class Put>
  Patched patch_with(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, const std::int64_t* expected,
                     std::int64_t* numbers_out, Same same, Put&& put);
  void forget_if_outside(std::uint64_t row, std::uint64_t number) const;
  void forget_outside(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) const;
  void place_ring(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, const std::int64_t* pick, std::int64_t* rows_out) const;
  template <class At, class Copy>
  std::uint64_t write_chunk(std::uint64_t i, std::uint64_t most, Over over, At&& at, Copy&& copy);
  void write_ring(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, std::uint64_t t0, Columns columns, const std::int64_t* pick,
                  Over over = Over::anything, std::uint64_t* written = nullptr, RaggedWrite* items = nullptr, const Claim* claim = nullptr);
  void check_items(std::uint64_t n, const RaggedWrite* items) const;
  void check_no_spans(std::span<const std::uint64_t> which) const;
  void check_scatter(std::uint64_t n, std::span<const std::uint64_t> which, Columns columns, bool grow, const RaggedWrite* items) const;
  std::vector<std::uint64_t> floors_of(const RaggedWrite& items, std::uint64_t last) const;
  void take_slot(const RaggedWrite& items, std::uint64_t row, std::uint64_t i) const;
  void put_in_slot(const RaggedWrite& items, std::uint64_t row, std::uint64_t i) const;
  void make_room(const RaggedWrite& items, std::uint64_t lane, std::uint64_t last, std::uint64_t position, const Claim& own) const;
  bool clear_items(const std::vector<std::uint64_t>& below, std::uint64_t lane, std::uint64_t position, const Claim& own,
                   std::vector<std::int64_t>& evicted) const;
  bool is_under_way(std::uint64_t lane, std::uint64_t from, std::uint64_t to, const Claim& own) const;
  void write_again(std::uint64_t lane, std::uint64_t p0, std::uint64_t n, std::uint64_t t0, Columns columns, std::uint64_t* written,
                   RaggedWrite& items, const Claim& own);
  bool evict(std::uint64_t row, std::uint64_t seen) const;
  void tell_evicted(const std::vector<std::int64_t>& rows) const;
  std::optional<Span> span_of(std::uint64_t group, std::uint64_t row, std::uint64_t word) const;
  template <class RowOf>
  bool goes_to_files(std::span<const std::uint64_t> which, std::uint64_t n, RowOf&& row) const;
  void put(std::uint64_t f, std::uint64_t first, std::uint64_t n, const std::byte* from, const std::int64_t* pick, bool to_file) const;
  void put_whole(std::uint64_t first, std::uint64_t n, Columns columns, std::uint64_t begin, const std::int64_t* pick, bool to_files) const;
  std::optional<DiskError> read_fields(std::span<const std::int64_t> rows, const std::uint32_t* at, std::span<const std::uint64_t> which,
                                       Batch batch) const;
  std::vector<std::uint64_t> files_of(std::span<const std::uint64_t> which) const;
  std::uint64_t offset_of(std::uint64_t f) const { return static_cast<std::uint64_t>(field(f).data - group_.data); }
  void grow_over(const std::int64_t* rows, std::uint64_t n, ClaimGuard& claim);
  void check_live(const std::int64_t* rows, std::uint64_t n) const;
  bool holds_earlier_lap(std::uint64_t row, const Place& place) const;
  bool overtaken(const Place& place) const;
  Mark try_mark(std::uint64_t row, std::uint64_t number, const Place* place, Over over = Over::anything);
  Mark try_mark_missing(std::uint64_t row, std::uint64_t number, const Place& place);
  Mark mark(std::uint64_t row, std::uint64_t number, const Place* place, Over over = Over::anything);
  void commit(std::uint64_t row, std::uint64_t number, bool edit);
  std::uint64_t settled_word(std::uint64_t row) const;
  std::vector<std::int64_t> live_rows() const;
  using Rows = std::vector<std::int64_t>;
  std::shared_ptr<const Rows> voids() const;
  std::int64_t another_live(std::int64_t gone, const std::int64_t* rows, std::uint64_t n) const;
  void sample_listed(const Random& random, std::uint64_t n, Batch batch, std::int64_t* rows_out,
                     std::int64_t* numbers_out) const;
  void prefetch_tickets(const std::int64_t* rows, std::uint64_t n) const;
  bool read_block(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which, Batch batch,
                  std::uint64_t at, const std::int64_t* expected, std::int64_t* numbers_out,
                  std::uint64_t* moved) const;
  bool read_row(std::int64_t row, Batch batch, std::uint64_t at, std::int64_t* numbers_out) const;
  std::uint64_t block_rows(std::span<const std::uint64_t> which) const;
  const Field* longest_of(std::span<const std::uint64_t> which) const;
  const Field* longest_in_file(std::span<const std::uint64_t> which) const {
    return longest_ == nullptr || which.data() == all().data() ? longest_ : longest_of(which);
  }
  std::vector<std::int64_t> gather_from_disk(const std::int64_t* rows, std::uint64_t n, std::span<const std::uint64_t> which,
                                             Batch batch, const std::int64_t* expected, std::int64_t* numbers_out) const;

  static constexpr std::uint64_t kBriefReads = 1024, kBriefWrites = 256, kBriefBytes = 64 * 1024;

  Control control_;
  bool in_memory_ = true;  // not in files on a disk
  Participant* participant_;
  /// The fields, in order. Each table is complete and never changed: older ones stay for calls that have begun with them.
  struct Table {
    std::vector<Field> fields;
    std::vector<std::vector<std::byte>> fills;  // of each field a row of what unwritten rows hold; empty: zeros
    std::vector<std::uint64_t> all;             // 0 … fields - 1
    std::uint64_t row_bytes = 0;                // of all fields
    void add(Field field, std::vector<std::byte> fill);
  };
  struct Tables {
    std::atomic<const Table*> current{nullptr};
    std::vector<std::unique_ptr<Table>> all;
  };
  const Table& table() const { return *tables_->current.load(std::memory_order_acquire); }
  std::uint64_t row_bytes() const { return table().row_bytes; }
  void check_columns(std::uint64_t columns) const;
  void put_fill(std::uint64_t f, std::uint64_t first, std::uint64_t n) const;
  void fill_others(std::uint64_t from, const std::int64_t* rows, std::uint64_t n) const;

  std::unique_ptr<Tables> tables_ = std::make_unique<Tables>();
  std::uint64_t needed_ = 0;  // of the fields, from the first on: what no write leaves out
  std::unique_ptr<Ragged> ragged_;
  std::unique_ptr<Disk> disk_;
  const Field* longest_ = nullptr;  // of those that lie in files
  Field group_;                     // the rows of all fields that lie between one another
  std::uint64_t lead_ = 0;          // the first of these fields

  /// Grows while others write: each list is complete and never changed, older ones stay for readers that still walk them.
  struct Indexes {
    std::atomic<const std::vector<Index*>*> current{nullptr};
    std::vector<std::unique_ptr<const std::vector<Index*>>> lists;
    std::mutex attaching;
    std::atomic<bool> hear_samples{false};
    Word asked_usage{0};  // when it was looked for last
    Word epoch{0};  // of the store's indexes when all of them were attached
    Word fields_epoch{0};  // of the store's fields when all of them were here
  };
  std::unique_ptr<Indexes> indexes_ = std::make_unique<Indexes>();
  /// The rows that are void, in order, as they were found last, and the count of changes just before.
  struct KnownVoids {
    std::mutex mutex;  // only ever tried: who does not get it looks for itself, as a forked child may never get it
    std::shared_ptr<const Rows> rows;
    std::uint64_t changes = 0;
  };
  std::unique_ptr<KnownVoids> known_voids_ = std::make_unique<KnownVoids>();
  std::shared_ptr<Participants> others_;  // null: no process shares this store
  std::function<void()> on_new_index_, on_new_fields_;
  std::uint64_t pauses_ = 0, placings_ = 0;  // of each, how many are within each other
  /// When dead participants were last looked for, on the steady clock.
  std::unique_ptr<std::atomic<std::int64_t>> last_look_ = std::make_unique<std::atomic<std::int64_t>>(0);
  std::unique_ptr<WaitTimer> wait_timer_ = std::make_unique<WaitTimer>();
};

}  // namespace engram
