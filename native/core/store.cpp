#include "store.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>

#include "check.h"
#include "fence.h"
#include "wait.h"

namespace engram {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(500);  // at who died
constexpr auto kWhileWaiting = std::chrono::milliseconds(10);

}  // namespace

Store::Store(Control control, std::vector<Field> fields, std::uint64_t participant)
    : control_(control), participant_(&control_.participant(participant)), needed_(fields.size()) {
  auto table = std::make_unique<Table>();
  for (const Field& field : fields) table->add(field, {});
  tables_->current.store(table.get(), std::memory_order_release);
  tables_->all.push_back(std::move(table));
  for (std::uint64_t f = fields.size(); f-- > 0;) {
    const Field& field = fields[f];
    if (field.contiguous()) continue;
    check(field.stride >= field.row_bytes && (group_.stride == 0 || field.stride == group_.stride), "one distance between rows");
    std::byte* const begin = group_.data == nullptr ? field.data : std::min(field.data, group_.data);
    group_ = {begin, field.stride};
    lead_ = f;
  }
}

void Store::Table::add(Field field, std::vector<std::byte> fill) {
  all.push_back(fields.size());
  fields.push_back(field);
  fills.push_back(std::move(fill));
  row_bytes += field.row_bytes;
}

// Of a store in files this one is read and written through its mapping: its file is known when the store is opened the next time.
void Store::add_fields(std::vector<NewField> more) {
  bool left_out = true;
  auto table = std::make_unique<Table>(this->table());
  for (NewField& one : more) {
    check(!one.fill || one.fill->size() == one.field.row_bytes, "a row to fill the field with");
    left_out &= one.fill.has_value();
    table->add(one.field, std::move(one.fill).value_or(std::vector<std::byte>{}));
  }
  tables_->all.push_back(std::move(table));
  tables_->current.store(tables_->all.back().get(), std::memory_order_release);
  if (!left_out) needed_ = fields();
}

void Store::set_fill(std::uint64_t f, std::vector<std::byte> fill) {
  check(f < fields() && fill.size() == row_bytes(f), "a row to fill a field of the store with");
  tables_->all.back()->fills[f] = std::move(fill);
}

void Store::check_columns(std::uint64_t columns) const {
  check(needed_ <= columns && columns <= fields(), "another number of columns than the store has fields");
}

void Store::find_fields() const {
  if (!on_new_fields_ || !has_new_fields()) [[likely]] return;
  let_go();
  on_new_fields_();
}

void Store::join(std::shared_ptr<Participants> participants) {
  control_.writable();
  std::uint64_t entry = participants->join();
  if (entry == Participants::kNoEntry) {  // dead participants may not have been recovered yet: live ones do so when they read or write
    participants->recover_dead([this](Participant& dead) { repair(dead); });
    entry = participants->join();
  }
  if (entry == Participants::kNoEntry) throw Stalled("as many processes share the store as can");
  participant_ = &control_.participant(entry);
  others_ = std::move(participants);
  in_memory_ = others_->in_memory();
}

void Store::look_after_others(Need need) const {
  if (others_ == nullptr) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::atomic<std::int64_t>& last = *last_look_;
  const auto before = last.load(std::memory_order_relaxed);
  const auto pause = need == Need::waiting ? kWhileWaiting : kBetweenLooks;
  if (now - before < std::chrono::duration_cast<std::chrono::steady_clock::duration>(pause).count()) return;
  last.store(now, std::memory_order_relaxed);
  let_go();
  reclaim();
}

void Store::attach(Index& index) {
  std::lock_guard<std::mutex> guard(indexes_->attaching);
  const auto* before = indexes_->current.load(std::memory_order_relaxed);
  auto list = before == nullptr ? std::vector<Index*>{} : *before;
  list.push_back(&index);
  indexes_->lists.push_back(std::make_unique<const std::vector<Index*>>(std::move(list)));
  indexes_->current.store(indexes_->lists.back().get(), std::memory_order_release);
  if (index.hears_samples()) indexes_->hear_samples.store(true, std::memory_order_release);
  fence(std::memory_order_seq_cst);
}

void Store::count_sampled(const std::int64_t* rows, std::uint64_t n) const {
  if (control_.only_reads()) return;
  meter().sampled(*participant_, n);
  const Word& asked = control_.meter_page().asked_usage;
  const std::uint64_t before = asked.load(std::memory_order_acquire);
  find_usage();
  if (rows == nullptr || !hears_samples()) return;
  const auto tell = [&](std::size_t from) {  // in the order in which they were made: counts before marks of what was counted
    const auto& list = *indexes_->current.load(std::memory_order_acquire);
    for (std::size_t i = from; i < list.size(); ++i) {
      if (list[i]->hears_samples()) list[i]->sampled(rows, n);
    }
    return list.size();
  };
  const std::size_t told = tell(0);
  fence(std::memory_order_seq_cst);
  if (asked.load(std::memory_order_seq_cst) == before) [[likely]] return;
  find_usage();  // an index that was made meanwhile, and has perhaps looked at the counts before they were raised
  tell(told);
}

// One that another process has made since. What is lacking then is counts for people: the sample is as good without.
void Store::find_usage() const {
  const std::uint64_t asked = control_.meter_page().asked_usage.load(std::memory_order_acquire);
  if (indexes_->asked_usage.load(std::memory_order_relaxed) == asked) [[likely]] return;
  indexes_->asked_usage.store(asked, std::memory_order_relaxed);
  if (!on_new_index_) return;
  let_go();
  try {
    on_new_index_();
  } catch (const std::exception&) {  // another process keeps the folder: it is found at the next opening
  }
}

Waiting Store::begin_wait() const {
  const std::uint32_t calls = control_.only_reads() ? 0 : wait_timer_->next();
  return calls == 0 ? Waiting{} : Waiting{std::chrono::steady_clock::now(), calls};
}

void Store::count_wait(const Waiting& call) const {
  if (call.calls == 0 || control_.only_reads()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - call.since).count();
  wait_timer_->counted(meter().waited(waited > 0 ? static_cast<std::uint64_t>(waited) : 0, call.calls));
}

void Store::knows_indexes(std::uint64_t epoch) { indexes_->epoch.store(epoch, std::memory_order_release); }

}  // namespace engram
