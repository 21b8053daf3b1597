// The control memory of a store: header, lock page, counters, participants, lane cursors, and of each row a ticket and a lap.
//
// They lie in two blocks of memory, `control` and `tickets`, which may be private, shared or mapped from a file: the
// layout is the same. Both must be zero when a store is created.
//
//   control   Header, and the sections that it names: locks · counters · limits · waits · participants · lanes
//             (behind the locks the curve, behind the counters the meter: meter.h)
//   tickets   u64 per row:  edited << 63 | number << 2 | state;  then u32 per row: the lap of its lane in which its step was written;
//             then u64 per row: where the row is edited, the number of the write that it holds
//
// Words shared between threads or processes are std::atomic; a pointer is never stored.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "shared_mutex.h"

namespace engram {

using Word = std::atomic<std::uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

// ---- tickets -------------------------------------------------------------------------------------------------------

enum class State : std::uint64_t {
  unused = 0,     // never written, or emptied since
  writing = 1,    // its bytes are being replaced
  committed = 2,  // whole
  voided = 3,     // left behind by a writer that died, or removed
};

constexpr std::uint64_t ticket(std::uint64_t number, State state) {
  return number << 2 | static_cast<std::uint64_t>(state);
}
constexpr State state_of(std::uint64_t word) { return static_cast<State>(word & 3); }
/// In a ticket: the number is that of an edit, and the number of the write stands by itself (Control::write_of).
constexpr std::uint64_t kEdited = std::uint64_t{1} << 63;
constexpr bool is_edited(std::uint64_t word) { return (word & kEdited) != 0; }
constexpr std::uint64_t number_of(std::uint64_t word) { return (word & ~kEdited) >> 2; }
constexpr bool is_committed(std::uint64_t word) { return state_of(word) == State::committed; }
constexpr bool is_being_edited(std::uint64_t word) { return is_edited(word) && state_of(word) == State::writing; }
/// Whether a ticket says that a row is whole under that number, by a write or by an edit.
constexpr bool is_committed_as(std::uint64_t word, std::uint64_t number) { return is_committed(word) && number_of(word) == number; }

// ---- laps ----------------------------------------------------------------------------------------------------------

/// A lane's position p belongs to lap p / lane_length + 1; rows written by number, before any position of theirs, to lap 0.
/// The lap is a hidden field of its row, written and read under the ticket as all fields are: it says which step of the
/// lane a whole row holds, while a ticket's number says only which write. In-place edits leave it as it is.
using Lap = std::atomic<std::uint32_t>;
static_assert(sizeof(Lap) == 4 && Lap::is_always_lock_free);

/// Bytes of the block of tickets and laps: all of it in stores of before edits kept the number of the write.
constexpr std::uint64_t earlier_tickets_bytes(std::uint64_t capacity) {
  return capacity * sizeof(Word) + (capacity * sizeof(Lap) + 7) / 8 * 8;
}
/// Bytes of the block of tickets, laps and numbers of writes.
constexpr std::uint64_t tickets_bytes(std::uint64_t capacity) { return earlier_tickets_bytes(capacity) + capacity * sizeof(Word); }

// ---- control block -------------------------------------------------------------------------------------------------

constexpr std::uint32_t kFormatMajor = 2;
constexpr std::uint32_t kFormatMinor = 0;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kParticipants = 256;
constexpr std::uint64_t kClaims = 3;

/// A part of the block under a name: what it holds may grow up to its size, and other parts stay where they are.
struct Section {
  char name[16];  // padded with zeros
  std::uint64_t at, bytes;
};
constexpr std::uint64_t kSections = 6;

/// Immutable once published.
struct Header {
  char magic[8];                 // "engram\0\1"
  std::uint32_t format_major;    // another major cannot be read
  std::uint32_t format_minor;    // a newer minor can
  std::uint32_t byte_order;      // 0x01020304 as this machine stores it
  std::uint32_t crc;             // CRC32C of this struct with crc = 0
  std::uint64_t abi;             // libc, word and mutex sizes, architecture: who may share the lock page
  std::uint64_t capacity;        // rows
  std::uint64_t lanes;
  std::uint64_t lane_length;     // rows of a lane; capacity = lanes * lane_length
  std::uint64_t participants;    // entries of the table
  std::uint64_t sections_at, sections;  // the directory: where it is, how many it names
  std::uint64_t control_bytes;   // size of this block
  std::uint64_t schema_sum;      // xxh3-64 of store.json: the two files belong together
  Section directory[kSections];
};

/// Section "locks". Reset by the first opener.
struct LockPage {
  char boot_id[40];
  std::uint64_t pid_namespace;
  Word generation;  // one more with every reset
  Word clean;       // 1: closed by its last owner with nothing in flight
  Word pause;       // number of the participant that keeps all writers waiting, and one more; 0: none. | kReplacing
  SharedMutex placing;  // held by writers that look for rows before they write, from placing to writing
};

/// Section "counters".
struct Counters {
  alignas(64) Word next_ticket;  // number of the next write; 0 is never used
  Word write_count;              // rows written since the last empty()
  Word void_changes;             // how often a row became void, or was void and is not any more
  alignas(64) Word index_epoch;  // changes whenever store.json names other indexes
  Word void_rows;                // rows inside the extent that hold nothing
  Word lapped_rows;              // written, but overwritten by a faster writer first
  Word redraws;                  // rows drawn again because they moved or were not whole
  Word scatters;                 // writes by number, edits among them: of another process's an index hears nothing else
  Word patches;                  // rows patched that still had the ticket expected
  Word patches_dropped;          // entries of patches that came too late
  Word fields_epoch;             // changes before store.json names more fields, while no process writes
};

/// Section "counters", behind those: what is counted of samples, and what rates and curves are made of. Zero in stores of versions that
/// did not count.
struct MeterPage {
  static constexpr std::uint64_t kBuckets = 64;
  static constexpr std::uint64_t kNoCurve = ~std::uint64_t{0};  // as interval: no points are noted
  alignas(64) Word inserted_before;  // rows written before the write count began again; may wrap
  Word inserted_mark, sampled_mark;  // rows inserted and sampled when the store was emptied last
  Word saved_ms;                     // when a checkpoint of the rows was saved last, on the clock of the day; 0: never
  Word interval;                     // of 10 s on that clock, in which a point of the curve was noted last
  Word points;                       // how many ever were
  Word minute;                       // of the newest waits
  Word asked_usage;                  // how often it was asked that samples of each row are counted
  alignas(64) std::atomic<std::uint32_t> waits[2][kBuckets];  // of calls in even and odd minutes, by how long they took
};

/// Section "locks", behind those: a point of the curve. All counts only grow, and may wrap.
struct CurvePoint {
  Word when;  // ms on the clock of the day | bucket of the median wait << 48 | bucket of the 99th percentile << 56; 0: none, or being noted
  Word inserted, sampled;
};
constexpr std::uint64_t kCurvePoints = 128;

/// What a writer is about to write, noted before its first row is marked. t0 = 0: free.
struct Claim {
  Word t0;
  Word n;
  std::atomic<std::int64_t> lane;  // -1: scattered rows; kEmptying or less
  Word p0;
};

/// A claim's lane while all rows are being forgotten that are older than number t0. kEmptying - 2 i: lanes below i begin again;
/// one less: n says where lane i does. p0: the write count is kept, or is 0 already.
constexpr std::int64_t kEmptying = -2;

/// What stands in a claim's t0 while the rest of it is noted.
constexpr std::uint64_t kNoted = ~std::uint64_t{0};

/// Beside the number in LockPage::pause: all rows are being replaced. If that ends by a death, the store is empty.
constexpr std::uint64_t kReplacing = std::uint64_t{1} << 32;

/// Section "participants".
struct Participant {
  std::atomic<std::uint32_t> state;  // 0 free, 1 used
  std::uint32_t pid;
  std::uint64_t start_time;  // of the process, as the kernel counts it: pids are reused
  std::uint32_t uid;
  std::atomic<std::uint32_t> prepaid;  // rows that the limits have admitted, and that no claim names yet
  Word sampled;  // rows that the processes which had this entry have sampled
  Claim claims[kClaims];  // one per thread that writes at the same time
};

/// Section "lanes": rings of lane_length rows. One cache line, so that writers of different lanes do not contend.
struct Lane {
  alignas(64) Word cursor;  // position of the next step; only grows
  Word base;                // first position since the last empty(): a multiple of lane_length; only grows
  Word high;                // positions below it are live whatever the cursor says (written by number); only grows
  Word writer;              // who appended last: pid << 16 | entry of the table, and one more; 0: not known, as in earlier versions
  Word met[4];              // the newest positions at which one began behind another who still took part; 0: none
};

/// The rules of one moment and their counts: row_limits.h. Numbers that are not whole lie there as bits.
struct LimitSlot {
  alignas(64) Word ratio;
  Word tolerance;
  Word min_size;
  Word most_in_flight;
  Word fleet;   // which limits of several stores these are a part of; 0: of this store alone
  Word stores;  // how many those are; 0: the counts have begun again here since
  alignas(64) Word level;
  Word samples;
  alignas(64) Word in_flight;
  Word inserts;
};
constexpr std::uint64_t kLimitSlots = 4;

/// Section "limits".
struct LimitsPage {
  alignas(64) Word current;  // how often limits were set, which names a slot << 1 | whether there are any
  LimitSlot slots[kLimitSlots];
};

/// Section "waits": what waits until it is admitted, by side.
struct WaitsPage {
  struct Side {
    alignas(64) std::atomic<std::uint32_t> event;  // a futex: another one when those that wait are to look again
    std::atomic<std::uint32_t> waiting;
    Word want_level;      // bits of a level that lets the first of them go on; 0: none
    Word want_in_flight;  // as many rows, and one more
    Word waits;
    Word waited_ns;
  } sides[2];  // insert, sample
};

static_assert(sizeof(Section) == 32 && offsetof(Header, directory) == 96 && sizeof(Header) <= kPage);
static_assert(sizeof(Claim) == 32 && sizeof(Participant) == 128 && sizeof(Lane) == 64);
static_assert(offsetof(Participant, sampled) == 24 && sizeof(MeterPage) == 576 && sizeof(CurvePoint) == 24);
static_assert(sizeof(Counters) == 128 && sizeof(LimitSlot) == 192 && sizeof(WaitsPage) == 128);

struct Geometry {
  std::uint64_t capacity, lanes, lane_length;
};

/// Bytes of the control block of a store with that many lanes.
std::uint64_t control_bytes(std::uint64_t lanes);

/// A counter, which no store has brought beyond 2^62 yet. Throws Damaged.
std::uint64_t counted(const Word& counter);

/// What the libc, the word sizes and the architecture make of this build.
std::uint64_t abi_fingerprint();

std::uint32_t crc32c(std::span<const std::byte> bytes);

/// A view of the two blocks. Owns nothing; the blocks must outlive it.
class Control {
 public:
  /// Writes header and first counters into zeroed memory.
  static void format(std::span<std::byte> control, Geometry geometry, std::uint64_t schema_sum);

  /// Checks every word of the header before it is used. Throws std::invalid_argument naming the first that is wrong.
  Control(std::span<std::byte> control, std::span<std::byte> tickets);

  /// From now on this view and its copies only read, so that the blocks may be mapped without the right to write. `abandoned`: no
  /// process has the store open, so rows inside the extent that are not whole hold nothing, as after recover(). O(rows) then.
  void only_read(bool abandoned);

  bool only_reads() const { return reading_ != nullptr; }

  /// This, for something that writes. Throws ReadOnly.
  const Control& writable() const {
    if (reading_ != nullptr) [[unlikely]] throw ReadOnly();
    return *this;
  }

  /// Whether a row with this word was left half written, or reserved and not begun, by processes that were dead when this view was
  /// made. Always false for a view that writes: there they are recovered.
  bool left_behind(std::uint64_t row, std::uint64_t word) const;

  /// Rows inside the extent that hold nothing.
  std::uint64_t void_rows() const;

  /// Rows drawn again because they moved or were not whole: by all processes; through a view that only reads, by that.
  std::uint64_t redraws() const { return (reading_ == nullptr ? counters_->redraws : reading_->redraws).load(std::memory_order_relaxed); }
  void count_redraws(std::uint64_t n) const {
    (reading_ == nullptr ? counters_->redraws : reading_->redraws).fetch_add(n, std::memory_order_relaxed);
  }

  const Geometry& geometry() const { return geometry_; }
  std::uint64_t capacity() const { return geometry_.capacity; }
  std::uint64_t lanes() const { return geometry_.lanes; }
  std::uint64_t lane_length() const { return geometry_.lane_length; }
  std::uint64_t schema_sum() const { return schema_sum_; }

  Word& word(std::uint64_t row) const { return tickets_[row]; }
  Lap& lap(std::uint64_t row) const { return laps_[row]; }

  /// The number of the write that a row with this word holds, which edits leave as it is: what a handle of the row names. Of a word that
  /// is not the row's any more, any number.
  std::uint64_t write_of(std::uint64_t row, std::uint64_t word) const {
    return is_edited(word) && writes_ != nullptr ? writes_[row].load(std::memory_order_relaxed) : number_of(word);
  }
  /// The row's word. Between the mark of an edit and the note that it is one are some instructions: it is looked at again then.
  std::uint64_t held_word(std::uint64_t row) const {
    std::uint64_t word = tickets_[row].load(std::memory_order_acquire);
    for (int tries = 0; tries < kBriefly && state_of(word) == State::writing && !is_edited(word); ++tries) {
      if (tries >= kBriefly / 2) std::this_thread::yield();
      word = tickets_[row].load(std::memory_order_acquire);
    }
    return word;
  }
  /// The number of the write that the row holds, or that is just being written to it; 0: none, or one that was left behind.
  std::uint64_t held_write(std::uint64_t row) const {
    const std::uint64_t word = held_word(row);
    return is_committed(word) || (state_of(word) == State::writing && !left_behind(row, word)) ? write_of(row, word) : 0;
  }
  /// Whether the row holds a write: it is whole, or is being edited.
  static bool holds_write(std::uint64_t word) { return is_committed(word) || is_being_edited(word); }
  /// Of tickets that rows were read with, the numbers of the writes that they held; of a row that was written since, the ticket. -1 stays.
  void name_writes(const std::int64_t* rows, std::uint64_t n, std::int64_t* numbers) const;
  /// The row was `seen`, and is the caller's to edit under that number: from now on its ticket says so. The write stays what it is.
  void begin_edit(std::uint64_t row, std::uint64_t seen, std::uint64_t number) const {
    if (is_edited(seen)) return;  // and so is the mark already
    writes_[row].store(number_of(seen), std::memory_order_relaxed);
    tickets_[row].store(ticket(number, State::writing) | kEdited, std::memory_order_release);
  }
  /// The lap of a position, as rows keep it.
  std::uint32_t lap_of(std::uint64_t position) const {
    return static_cast<std::uint32_t>(position / lane_length() + 1);
  }
  /// The lap of the newest step that the row can hold where `end` is its lane's next position.
  std::uint32_t newest_lap(std::uint64_t row, std::uint64_t end) const {
    const std::uint64_t laps = end / lane_length();
    return static_cast<std::uint32_t>(laps + (row - lane_of(row) * lane_length() < end - laps * lane_length() ? 1 : 0));
  }
  Lane& lane(std::uint64_t lane) const { return lanes_[lane]; }
  Counters& counters() const { return *counters_; }
  LockPage& lock_page() const { return *lock_page_; }
  LimitsPage& limits_page() const { return *limits_; }
  WaitsPage& waits_page() const { return *waits_; }
  MeterPage& meter_page() const { return *meter_; }
  CurvePoint* curve() const { return curve_; }
  /// Throws std::invalid_argument beyond the table.
  Participant& participant(std::uint64_t i) const;
  std::uint64_t participants() const { return participants_count_; }
  /// Whether no process writes or is about to, and the next ticket is this one.
  bool at_rest(std::uint64_t next) const;

  /// Rows of the lane that are inside its extent (void ones included).
  std::uint64_t filled(std::uint64_t lane) const;
  bool inside(std::uint64_t row) const {
    const std::uint64_t lane = lane_of(row);
    return row - lane * lane_length() < filled(lane);
  }
  /// The lane of a row. Most stores have one: a division would take most of the time.
  std::uint64_t lane_of(std::uint64_t row) const { return row < lane_length() ? 0 : row / lane_length(); }
  /// The lane's next position.
  std::uint64_t end(std::uint64_t lane) const;
  /// The row that the lane's next step will take.
  std::uint64_t cursor_row(std::uint64_t lane) const;
  /// Whether a row is among the oldest n of its lane, which is full.
  bool among_oldest(std::uint64_t row, std::uint64_t n) const;
  /// Notes who appends at a position of a lane.
  void note_writer(Lane& lane, std::uint64_t position, const Participant& by) const;
  /// Live rows of the store.
  std::uint64_t size() const;

  /// Reserves the lane's next n positions, for a participant (null: it is not noted). Returns the first.
  std::uint64_t reserve(std::uint64_t lane, std::uint64_t n, const Participant* by = nullptr) const;

  /// What became of a request for given positions: the lane's cursor before it, and whether they are reserved now.
  struct Reserved {
    std::uint64_t cursor;
    bool granted;
  };

  /// Reserves those of the n positions from `position` on that are not reserved yet. Not granted, and nothing changed, where the
  /// cursor has not come as far as `position`, or the lane began again behind it.
  Reserved reserve_at(std::uint64_t lane, std::uint64_t position, std::uint64_t n) const;

  /// Forgets all rows: their tickets become unused under a new number, so no earlier draw matches any more. Lanes begin
  /// again at their first row.
  void empty(bool keep_write_count) const;

  /// The same, of rows older than number t, which is the caller's. The claim says at every moment how far this has come.
  /// `begun`: by a process that has died. Then this is finished, and lanes that hold nothing older stay as they are.
  void empty(std::uint64_t t, Claim& claim, bool begun) const;

  /// A row is about to become void. In this order: it is counted before it is, so that void_rows is never too small.
  void one_void_more() const { counters_->void_rows.fetch_add(1, std::memory_order_acq_rel); }
  /// It is.
  void became_void() const { counters_->void_changes.fetch_add(1, std::memory_order_acq_rel); }
  /// One row that was void is not any more. Never below zero: an empty() may just have forgotten them all.
  void one_void_less() const;

  /// Makes the first n rows of the lane count, written by number and not through the cursor. How many did just before.
  std::uint64_t raise_high(std::uint64_t lane, std::uint64_t rows) const;

  /// Commits every row as it stands (a store around data that exists already).
  void fill() const;

  /// Copies tickets, cursors and counters from another store of the same geometry. Neither may be written to meanwhile.
  void copy_state(const Control& from) const;

  /// The state of a lane, without what belongs to this memory alone.
  struct LaneState {
    std::int64_t position;  // of the next step, counted from the last empty()
    std::int64_t live;      // rows inside the extent
    std::int64_t reserved[2];
  };

  void read_lanes(LaneState* lanes) const;

  /// Of the first `rows` rows, of those inside an extent, the ticket's number; 0 if the row is not whole, or has `clock` or a
  /// later number. Also 0 for a row that holds a step of an earlier lap than `lanes` says, as read_lanes: the writer that had
  /// reserved it died before it began. What `numbers` says of other rows stays. `writes`, if not null: the numbers of
  /// their writes.
  void read_numbers(std::uint64_t clock, const LaneState* lanes, std::int64_t* numbers, std::uint64_t rows,
                    std::int64_t* writes = nullptr) const;

  /// Throws std::invalid_argument unless a store of this geometry may say so: numbers are in [0, clock), and where there is one there
  /// is that of a write, too; null: it is the same.
  static void check_state(const Geometry& geometry, std::uint64_t clock, const LaneState* lanes, const std::int64_t* numbers,
                          const std::int64_t* writes = nullptr);

  /// Makes the rows of an empty store live as these lane states and ticket numbers say, under new numbers larger than any
  /// given out, in the same order; their writes keep their numbers. No process may write meanwhile. Throws as check_state, before anything
  /// has changed. Returns by how much the numbers are larger.
  std::uint64_t put_state(std::uint64_t clock, const LaneState* lanes, const std::int64_t* numbers, const std::int64_t* writes = nullptr) const;

  /// What a store that was closed in order says of itself: O(lanes). Throws Damaged: more than any says.
  void check_closed() const;

  struct Repair {
    std::uint64_t claims = 0;  // of dead writers
    std::uint64_t voided = 0;  // rows that were being written
    std::uint64_t gaps = 0;    // rows reserved but never begun
  };
  /// For the only process attached: rows left half written become void, claims are cleared, void rows counted again, and
  /// whatever was left outside the extent is unused. Nothing is paused any more.
  Repair recover() const;

 private:
  std::uint64_t next_round(std::uint64_t lane) const;
  bool holds_older(std::uint64_t lane, std::uint64_t number) const;
  void forget_rows(std::uint64_t lane, std::uint64_t number) const;

  static constexpr int kBriefly = 64;

  Geometry geometry_{};
  std::uint64_t schema_sum_ = 0;
  LockPage* lock_page_ = nullptr;
  Counters* counters_ = nullptr;
  LimitsPage* limits_ = nullptr;
  WaitsPage* waits_ = nullptr;
  MeterPage* meter_ = nullptr;
  CurvePoint* curve_ = nullptr;
  Participant* participants_ = nullptr;
  std::uint64_t participants_count_ = 0;
  Lane* lanes_ = nullptr;
  Word* tickets_ = nullptr;
  Lap* laps_ = nullptr;
  Word* writes_ = nullptr;  // null: a store of before, in which no row is edited; only of a view that reads

  /// What a view that only reads notes of its own.
  struct Reading {
    struct Left {
      std::uint64_t row, word;
    };
    std::vector<Left> left;  // by row
    Word redraws{0};
  };
  std::shared_ptr<Reading> reading_;  // null: a view that writes
};

/// A claim in a participant's entry for as long as it lives. Waits for one, bounded (Stalled). Taken before ticket numbers are: so a reader of the counter
/// finds every number below it noted, or about to be, or done with.
class ClaimGuard {
 public:
  explicit ClaimGuard(Participant& participant);
  ClaimGuard(Participant& participant, std::uint64_t t0, std::uint64_t n, std::int64_t lane, std::uint64_t p0)
      : ClaimGuard(participant) {
    note(t0, n, lane, p0);
  }
  ~ClaimGuard() { give_back(); }
  ClaimGuard(const ClaimGuard&) = delete;
  ClaimGuard& operator=(const ClaimGuard&) = delete;

  /// Nothing is noted any more, or it is as it was at first: the next note() may come.
  void give_back() {
    if (Claim* held = std::exchange(claim_, nullptr)) held->t0.store(0, std::memory_order_release);
  }
  void take_again() { claim_ = free_claim(); }
  void forget_note() { claim_->t0.store(kNoted, std::memory_order_release); }

  /// To be called before the first row is marked.
  void note(std::uint64_t t0, std::uint64_t n, std::int64_t lane, std::uint64_t p0);

  Claim& claim() const { return *claim_; }

 private:
  Claim* free_claim() const;

  Participant* participant_;
  Claim* claim_;
};

}  // namespace engram
