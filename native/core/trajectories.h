// Where trajectories begin and end: a table of runs per track, kept up to date with every write, and draws of windows.
//
// A track is a ring of steps that belong together in time: a lane, or with columns (ndim > 1) one column of the only lane,
// whose rows are slot-major. Steps are named by their place q: position + steps of a track, so that rows which were
// written by number into a young ring have places too, a lap before the positions of the same rows. Place q of a track
// lies in row q % steps. Of a lane, the places from low() to the cursor are live, and the seam is where they end.
//
// The table lies in one block of memory, zero when it is made; it holds plain words and no pointers:
//
//   Header (a page) · LaneState[lanes] · TrackState[tracks] · Run[tracks][steps]
//
// Boundaries are read from the fields' bytes as they are stored, under the tickets. A row's lap says whether it holds the
// step of a place or still one of an earlier lap. A scan stops at a row that is being written, or that was reserved for a
// place and still holds an earlier lap: the row's writer goes on from there. A row that was changed behind the front is
// compared with the table, and only if it says something else is its lane scanned again, by the next draw.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "control.h"
#include "gather.h"
#include "index.h"
#include "random.h"

namespace engram {

/// Step types, as dm_env numbers them: the first step of a trajectory, and the last one.
enum class StepType : std::uint64_t { first = 0, last = 2 };

/// Whether one of the integers of `size` bytes each, at most 8, is that step type.
bool any_is(const std::byte* from, std::uint64_t bytes, std::uint64_t size, StepType type);

/// Whether each of the flags of `size` bytes is set, of which there is at least one.
bool all_set(const std::byte* from, std::uint64_t bytes, std::uint64_t size);

/// What ends a trajectory: another content of an id field in the next step; or, in one of the other fields, a byte other than zero; or
/// a step type: the last one, or the first one in the next step. Without fields only the ends of what is stored do.
struct Boundaries {
  std::uint64_t ids;                 // how many of the fields, the first ones, hold ids
  std::vector<Field> fields;
  std::vector<std::uint64_t> which;  // their numbers in the store, for edits; may be empty if they are not of the store
  std::vector<std::uint64_t> step_types = {};  // of each field the bytes of an integer, 0 for flags; may be empty: all are flags
  std::vector<std::uint64_t> whole = {};  // of each field the bytes of a flag if all flags must be set, 0 if one does; may be empty: one

  /// Fills the lists that may be empty. Throws std::invalid_argument: what they say does not fit the fields.
  void complete();
  /// Whether the i-th field, which holds no ids, says that a trajectory ends with a row, or begins with one.
  bool ends_with(std::size_t i, std::uint64_t row) const;
  bool begins_with(std::size_t i, std::uint64_t row) const;
};

/// Steps of a window, in their order: some before the trajectory, then those in it; where all are wanted, the rest is past its
/// end. The trajectory's first step stands for those before it, and its last one for those past its end.
struct Steps {
  std::uint64_t before, real;
};

/// Steps of the places [first, first + length) of a track; the first of them is `ahead` places behind where the window begins.
struct Window {
  std::uint64_t track, first, length, ahead = 0;
};

/// Which windows may be drawn, and how likely each is.
struct WindowSpec {
  std::uint64_t length;                // steps
  bool strict = true;                  // no trajectory shorter than that; else those give shorter windows
  bool by_anchor = false;              // uniform over windows; else over trajectories, then over the windows of one
  std::uint64_t left = 0, right = 0;   // steps by which a window may overhang its trajectory, < length; they are left out
  std::uint64_t period = 1;            // places between the beginnings of two windows of a trajectory
  std::uint64_t dilation = 1;          // places between two steps of a window; more than one: without overhangs
  std::uint64_t burn_in = 0;           // steps of a window before its anchor, < length
  std::uint64_t padding = 0;           // steps by which the first window begins before its trajectory, < length; of whole ones
  bool whole = false;                  // windows have all their steps, whatever trajectory they are of
  // Windows hold none of the last `unfinished` steps of a trajectory, unless the first int64 in `final` of its last step is at least 0.
  std::uint64_t unfinished = 0;
  Field final{};

  std::uint64_t extent() const { return (length - 1) * dilation + 1; }
  std::uint64_t ahead() const { return padding * dilation; }
  /// Rows of a window, as it is drawn.
  std::uint64_t rows(const Window& window) const { return whole ? length : steps(window).real; }
  Steps steps(const Window& window) const {
    if (dilation == 1) return {window.ahead, window.length};
    const std::uint64_t before = (window.ahead + dilation - 1) / dilation;
    return {before, (window.ahead + window.length - 1) / dilation + 1 - before};
  }
  /// Throws std::invalid_argument: there are no such windows.
  void validate() const;
};

struct Drawn {
  std::vector<Window> windows;
  std::vector<std::int64_t> rows;     // of all windows, one behind the other
  std::vector<std::int64_t> numbers;  // of their tickets; -1 in a window that was just being written
};

/// The steps around a row, of the same trajectory: some of those that drawn rows and tickets name.
struct Around {
  std::uint64_t from;    // where they begin among them
  std::uint64_t before;  // steps before the row
  std::uint64_t steps;   // all of them, the row included; 0: unknown, as the row is being written
  bool over;             // the trajectory ends with the last of them, and not only what is known of it
};

struct Surroundings {
  std::vector<Around> around;         // of each row
  std::vector<std::int64_t> rows;     // of all, one behind the other
  std::vector<std::int64_t> numbers;  // of their tickets; -1 where one of them was just being written
};

/// Steps that are nearest to times before and after n rows: memory for as many entries as rows times deltas, those of a row one behind
/// the other.
struct Moments {
  std::int64_t* rows;
  std::int64_t* numbers;  // of their tickets; -1: the step is being written, or the row's trajectory is not known
  double* after;          // their times less that of the row
  bool* is_last;          // whether the trajectory has no step beyond it, on the side where the time that is meant lies
};

/// Which step of its trajectory is the goal of a row: this one or a later one, the last one, any; or any step there is.
enum class Goal { future, final, episode, random };

struct GoalDraw {
  Goal goal;
  std::uint64_t key = 0, attempt = 0;     // attempt: how often it is drawn again
};

/// A walk over the trajectories that were there when it began, in a random order (or lane by lane, oldest first).
struct TrajectoryEpoch {
  std::uint64_t key = 0;
  std::uint64_t version = 0;   // of the store when the epoch began; 0: there is none
  std::uint64_t visited = 0;
  std::uint64_t count = 0;     // trajectories
  /// Of each trajectory the row of its last step then, and the number of that write. Empty: they are those of the store.
  std::span<const std::int64_t> known = {};
  std::shared_ptr<const std::vector<std::int64_t>> own = nullptr;  // `known`, where a draw has listed them
};

struct Census {
  std::uint64_t trajectories = 0, longest = 0;
};

/// Anchors of windows of `length` steps in a trajectory.
constexpr std::uint64_t anchors_in(std::uint64_t steps, std::uint64_t length) {
  return steps >= length ? steps - length + 1 : 0;
}

class Trajectories final : public Index {
 public:
  /// Bytes of the table.
  static std::uint64_t bytes(std::uint64_t lanes, std::uint64_t lane_length, std::uint64_t width);

  /// `width`: columns of the only lane, 1 for a storage without. `window`: the length whose anchors are counted, so that
  /// uniform draws of them take O(log n). `memory` must outlive the table, as must what `control` and `boundaries` point to.
  Trajectories(Control control, Boundaries boundaries, std::uint64_t width, std::uint64_t window,
               std::span<std::byte> memory);

  void written(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0) override;
  void rewritten(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::uint64_t scatter) override;
  void edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t> which,
              std::uint64_t scatter) override;
  void lost(const std::int64_t* rows, std::uint64_t n) override;
  void emptied() override;

  /// Looks at up to `steps` steps that are not in the table yet. How many are left then, those of writers at work aside.
  std::uint64_t catch_up(std::uint64_t steps);

  /// Forgets what is known: the next call looks at every row again.
  void forget();

  /// From now on windows of that length are counted, as `window` of the constructor says. Forgets what is known, unless they are
  /// counted already.
  void count(std::uint64_t window);

  /// In a child that was forked off: a thread of the parent that was at work here does not exist.
  void after_fork();

  /// The newest whole window of each track, those that were written last first, and no more than n. Left out are windows with
  /// steps that are not newer than the track's entry of `taken`, a ticket number; the others' last ones are entered there.
  Drawn newest(std::span<std::int64_t> taken, std::uint64_t n, const WindowSpec& spec);

  /// The oldest windows that were not handed out, in the order in which they were completed, and no more than n. Those of a trajectory lie
  /// one behind another from its first step on, without gaps. `next`: of each track the place that the next one begins at, or a place
  /// before it; it is moved on behind those that are handed out, and over what gives none any more: overwritten ones, and rests of
  /// trajectories.
  Drawn completed(std::span<std::int64_t> next, std::uint64_t n, const WindowSpec& spec);
  /// Of each track how many steps there are from the first one that was ever appended to where the next window begins; `next` is moved
  /// on as by completed(). And the reverse, for a store that holds the same rows.
  std::vector<std::int64_t> positions_of(std::span<std::int64_t> next, const WindowSpec& spec);
  std::vector<std::int64_t> places_of(std::span<const std::int64_t> positions);

  /// Draws n windows with replacement: a pure function of key, table and tickets. Empty if there is none to draw.
  Drawn draw(std::uint64_t key, std::uint64_t n, const WindowSpec& spec);

  /// The next n trajectories of an epoch, one random window each of the steps that were there when it began. Too short ones are left
  /// out, overwritten ones are passed over. Begins a new epoch, under `key`, where the old one is over. `drop_last`: a rest of less than
  /// n is skipped, if need be before the draw; empty and count < n if there are not as many at all.
  Drawn draw_epoch(TrajectoryEpoch& epoch, std::uint64_t key, std::uint64_t n, const WindowSpec& spec, bool shuffle, bool drop_last);
  /// The same window, as its rows are now. All its tickets are -1: a writer is in it. False: it is not what it was, as steps of it were
  /// written over or removed, or a boundary lies in it by now.
  bool choose_again(const Window& window, const WindowSpec& spec, Drawn& drawn);
  /// How many trajectories are left of an epoch, and no more than `most`. Moves on over those that were overwritten.
  std::uint64_t left(TrajectoryEpoch& epoch, bool shuffle, std::uint64_t most) const;

  /// Lengths of the windows that begin at given rows, 0 where none may: where too little follows for a window and what may
  /// hang over the end, but for the first step of a shorter trajectory if not strict.
  std::vector<std::uint64_t> window_lengths(const std::int64_t* rows, std::uint64_t n, const WindowSpec& spec);

  /// The windows that begin at given rows, where one may, and no more than `most`.
  Drawn windows_at(const std::int64_t* rows, std::uint64_t n, const WindowSpec& spec, std::uint64_t most);

  /// The whole window of each row, of which the row is the step after the burn-in, wherever its trajectory begins and ends. With
  /// `shifted`, one that ends past the trajectory begins as much earlier, but no earlier than makes the trajectory's first step the
  /// one after the burn-in. `steps`, `numbers`: the rows and tickets of n * length steps; all tickets are -1 where a row holds nothing,
  /// or is being written.
  std::vector<Window> windows_around(const std::int64_t* rows, std::uint64_t n, const WindowSpec& spec, bool shifted, std::int64_t* steps,
                                     std::int64_t* numbers);

  /// Of each row the steps of its trajectory from at most `before` steps earlier to at most `after` later. Where that is not
  /// known, the row alone with ticket -1. Only of the first rows, but at least of one, where all have more than `most` steps.
  Surroundings around(const std::int64_t* rows, std::uint64_t n, std::uint64_t before, std::uint64_t after,
                      std::uint64_t most);

  /// Of each row the steps of its trajectory whose times are nearest to that of the row plus each of some deltas; of a delta of 0 the row
  /// itself. `times`: a real number per row, of the dtype that DLPack names so; within a trajectory they never go back. Returns a row
  /// whose time is not finite, where nothing is to be used of what was found; -1: there is none.
  std::int64_t nearest(const Field& times, std::uint8_t code, std::uint8_t bits, const std::int64_t* rows, std::uint64_t n,
                       std::span<const double> deltas, const Moments& found);

  /// The row that is the goal of each of n rows, and its ticket number; -1 where the row does not hold `expected`, or the goal is just
  /// being written. The i-th row takes the random numbers of position `places[i]` (null: i).
  void goals(const GoalDraw& draw, const std::int64_t* rows, const std::int64_t* expected, const std::int64_t* places,
             std::uint64_t n, std::int64_t* goals, std::int64_t* numbers);

  /// How many windows there are of which one is drawn.
  std::uint64_t windows(const WindowSpec& spec);
  /// How many there are of what a draw chooses among, each equally often: trajectories with a window, or all their windows.
  std::uint64_t choices(const WindowSpec& spec);

  std::uint64_t tracks() const { return tracks_; }

  /// How many trajectories there are, and the length of the longest.
  Census census();
  /// Whether a participant's steps follow those of another one that took part at the same time, and end flags alone tell
  /// trajectories, none of which ends between them. Looks at the calls 1, 2, 4, 8 … until it has said so once.
  bool mixed();

  /// (track, first place, length) of all, track by track, oldest first.
  std::vector<Window> runs();

  /// Row of a step.
  std::int64_t row(std::uint64_t track, std::uint64_t place) const {
    if (width_ == 1) return static_cast<std::int64_t>(track * control_.lane_length() + place % steps_);
    return static_cast<std::int64_t>(track / width_ * control_.lane_length() + place % steps_ * width_ + track % width_);
  }

 private:
  struct Header {
    std::uint64_t redo;  // for a table shared by processes: the lane whose update was under way
    std::uint64_t reserved[511];
  };
  struct LaneState {
    std::uint64_t next;   // first place not in the table yet
    std::uint64_t low;    // first live place, when last looked at
    std::uint64_t dirty;  // 1: the table is wrong somewhere, scan again
    std::uint64_t reserved[5];
  };
  struct TrackState {
    std::uint64_t head, count;  // runs [head, head + count) of the ring
    std::uint64_t dead;         // those among them that hold nothing
    std::uint64_t reserved;
  };
  struct Run {
    std::uint64_t start;    // first place; with kDead: rows that hold nothing
    std::uint64_t anchors;  // of all runs before, since the table began
  };
  static_assert(sizeof(Header) == kPage && sizeof(LaneState) == 64 && sizeof(TrackState) == 32 && sizeof(Run) == 16);
  static constexpr std::uint64_t kDead = std::uint64_t{1} << 63;

  /// A place's step is there; or never will be; or its row is being written; or the row is reserved and holds no such step yet.
  enum class Look { whole, dead, writing, reserved };
  struct Live {  // places of a lane
    std::uint64_t low, end;
  };
  /// A track with something in it, as it is during one draw.
  struct View {
    std::uint64_t track, low, next;
    const Run* ring;
    std::uint64_t head, count, holes, steps;

    const Run& run(std::uint64_t i) const {
      const std::uint64_t at = head + i;
      return ring[at < steps ? at : at - steps];
    }
    bool dead(std::uint64_t i) const { return (run(i).start & kDead) != 0; }
    std::uint64_t start(std::uint64_t i) const { return run(i).start & ~kDead; }
    std::uint64_t first(std::uint64_t i) const { return start(i) > low ? start(i) : low; }
    std::uint64_t end(std::uint64_t i) const { return i + 1 < count ? start(i + 1) : next; }
    std::uint64_t length(std::uint64_t i) const { return dead(i) ? 0 : end(i) - first(i); }
    /// The run that holds the place: low <= place < next. Runs are mostly of similar lengths: it is looked for near where it would
    /// be if all were of one.
    std::uint64_t find(std::uint64_t place) const {
      const auto share = static_cast<double>(place - low) / static_cast<double>(next - low);
      const std::uint64_t guess = std::min(static_cast<std::uint64_t>(share * static_cast<double>(count)), count - 1);
      std::uint64_t from = 0, to = count;  // start(from) <= place < start(to)
      if (start(guess) <= place) {
        from = guess;
        for (std::uint64_t step = 1; from + step < count; step *= 4) {
          if (start(from + step) > place) {
            to = from + step;
            break;
          }
          from += step;
        }
      } else {
        to = guess;
        for (std::uint64_t step = 1; to > step; step *= 4) {
          if (start(to - step) <= place) {
            from = to - step;
            break;
          }
          to -= step;
        }
      }
      while (to - from > 1) {
        const std::uint64_t middle = from + (to - from) / 2;
        (start(middle) <= place ? from : to) = middle;
      }
      return from;
    }
  };
  using Views = std::vector<View>;
  class Chooser;
  /// The claims that were held when the lanes ended at `ends`, each with what its t0 was. A writer claims before it reserves:
  /// once these claims are given back, no writer has a place before those ends any more.
  struct Held {
    const Claim* claim;
    std::uint64_t t0;
  };
  struct Writers {
    std::vector<std::uint64_t> ends;
    std::vector<Held> claims;
  };

  std::uint64_t cursor(std::uint64_t lane) const { return control_.end(lane) / width_ + steps_; }
  Live live(std::uint64_t lane) const;
  /// The newest place of a row before `end`.
  std::uint64_t place_of(std::uint64_t row, std::uint64_t end) const {
    const std::uint64_t step = row % control_.lane_length() / width_, seam = end % steps_;
    return end - steps_ + (step >= seam ? step - seam : step + steps_ - seam);
  }
  std::uint64_t track_of(std::uint64_t row) const { return row / control_.lane_length() * width_ + row % width_; }
  View view(std::uint64_t track) const {
    const TrackState& t = track_states_[track];
    const LaneState& lane = lanes_[track / width_];
    return {track, lane.low, lane.next, rings_ + track * steps_, t.head, t.count, t.dead, steps_};
  }
  Views views() const;

  Look look(std::uint64_t lane, std::uint64_t column, std::uint64_t place) const;
  bool look_at(std::uint64_t lane, std::uint64_t place, int looks);
  bool same(const Field& field, std::int64_t a, std::int64_t b) const;
  bool ends_in(std::size_t i, std::int64_t row, std::int64_t next) const;
  bool ends(std::int64_t row, std::int64_t next) const;
  bool ends_within(std::int64_t row, std::uint64_t n) const;
  bool ends_on_the_way(std::int64_t row, std::uint64_t n, std::int64_t begin, std::int64_t end) const;
  bool boundary(std::uint64_t track, std::uint64_t place) const;
  bool abandoned(std::uint64_t lane, std::uint64_t place);

  std::unique_lock<std::mutex> locked();
  void forget_lane(std::uint64_t lane);
  Live refresh(std::uint64_t lane);
  void push(std::uint64_t track, std::uint64_t place, bool dead);
  bool agrees(std::uint64_t track, std::uint64_t place) const;
  std::uint64_t advance(std::uint64_t lane, std::uint64_t steps, bool settle);
  void settle();
  void changed(const std::int64_t* rows, std::uint64_t n, bool compare, std::uint64_t scatter);

  void forget_all();
  std::uint64_t first_position(std::uint64_t track) const;
  bool find_completed(const View& v, std::int64_t& next, const WindowSpec& spec, Window* window) const;
  std::uint64_t usable(const View& v, std::uint64_t run, const WindowSpec& spec) const;
  Window window_around(std::int64_t row, const WindowSpec& spec, bool shifted) const;
  Window window_at(std::int64_t row, const WindowSpec& spec) const;
  bool append(Drawn& drawn, const Window& window, const WindowSpec& spec, bool certain) const;
  std::int64_t any_row(const Views& views, const std::vector<std::uint64_t>& ends, const Random& random, std::uint64_t i,
                       std::uint64_t attempt) const;
  bool list_rows(const Window& window, const WindowSpec& spec, std::int64_t* rows, std::int64_t* numbers) const;
  bool add_rows(Drawn& drawn, const Window& window, const WindowSpec& spec, bool certain) const;
  bool is_being_edited(const Window& window) const;
  void ask_for(const Window& window) const;
  std::int64_t number_at(std::int64_t row) const;
  template <class T>
  std::int64_t nearest_of(const Field& times, const std::int64_t* rows, std::uint64_t n, std::span<const double> deltas,
                          const Moments& found) const;
  std::vector<std::int64_t> ends_of(const Views& tracks, std::uint64_t version) const;
  bool still(std::int64_t row, std::int64_t number) const;
  bool meets() const;
  bool list_steps(std::int64_t row, std::uint64_t n, std::int64_t end, std::int64_t* rows, std::int64_t* numbers) const;

  Control control_;
  Boundaries boundaries_;
  std::vector<Field> flags_;         // of these fields: the flags of one byte
  std::vector<std::size_t> others_;  // numbers of the rest
  std::uint64_t width_, steps_, tracks_, window_;
  LaneState* lanes_;
  TrackState* track_states_;
  Run* rings_;
  std::vector<Look> seen_;  // at the place that was looked at last, per column
  Writers writers_;  // that reserved places are waited for
  std::uint64_t scatters_;  // up to which the table knows them
  std::mutex mutex_;  // in this process; a shared table will have a robust one in the lock page
  std::atomic<std::uint64_t> asked_{0};  // calls of mixed()
  std::atomic<bool> said_{false};        // that steps are mixed
};

}  // namespace engram
