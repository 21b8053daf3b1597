#include "content_index.h"

#include <stdexcept>

#include "check.h"

namespace engram {

ContentIndex::ContentIndex(const RedoWords& redo, const Control& tickets, std::uint64_t rows)
    : redo_(redo), tickets_(tickets), rows_(rows), new_rows_(tickets) {
  check(tickets_.capacity() == rows_, "an index of rows of a store of another capacity");
}

void ContentIndex::look_at_each(Rows rows, std::uint64_t n) {
  for (std::uint64_t i = 0; i < n; ++i) look_at(rows[i]);
}

void ContentIndex::look_at_these(Rows rows, std::uint64_t n) {
  RedoChange change(redo_);
  look_at_each(rows, n);
  change.done();
}

void ContentIndex::look_at_all() {
  RedoChange change(redo_);
  redo_.missed.exchange(0, std::memory_order_acq_rel);  // what those wrote who set it is seen below
  look_at_each({}, rows_);
  change.done();
}

void ContentIndex::rebuild() {
  redo_.redo.store(1, std::memory_order_relaxed);  // until it is done, if this process dies, too
  std::atomic_signal_fence(std::memory_order_seq_cst);
  forget_all();
  look_at_all();
  new_rows_.forget();  // catch_up() was perhaps interrupted
}

void ContentIndex::put_in_order() {
  const RedoLock guard = lock();
  rebuild();
}

void ContentIndex::scan(std::uint64_t begin, std::uint64_t end) {
  if (begin > end || end > rows_) throw std::out_of_range("a scan of rows that there are not");
  const RedoLock guard = lock();
  look_at_these({.first = begin}, end - begin);
}

void ContentIndex::catch_up() {
  const RedoLock guard = lock();
  RedoChange change(redo_);
  new_rows_.each([this](Rows rows, std::uint64_t n) { look_at_each(rows, n); });
  change.done();
}

// What catch_up() noted of a vector that is half changed is found by a look at all rows.
void ContentIndex::after_fork() {
  if (redo_.mutex.held()) new_rows_.after_fork();
  redo_.after_fork();
}

void ContentIndex::written(const std::int64_t* rows, std::uint64_t n, std::uint64_t) {
  const OwnRows own(rows, n, rows_);
  const RedoLock guard = lock(1);
  look_at_these({rows}, n);
}

void ContentIndex::edited(const std::int64_t* rows, std::uint64_t n, std::uint64_t t0, std::span<const std::uint64_t>, std::uint64_t) {
  ContentIndex::written(rows, n, t0);
}

void ContentIndex::lost(const std::int64_t* rows, std::uint64_t n) { ContentIndex::written(rows, n, 0); }

void ContentIndex::emptied() {
  const RedoLock guard = lock(1);
  rebuild();
}

}  // namespace engram
