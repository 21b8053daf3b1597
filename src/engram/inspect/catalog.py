"""Which numbers of ``stats()`` are shown, and as what: one table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class HasStats(Protocol):
    """A buffer, as far as its metrics go."""

    def stats(self) -> dict[str, float]: ...


class Metric(NamedTuple):
    """One metric. ``engram_`` comes before its name; ``_total`` behind that of a counter."""

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    stats: str | Mapping[str, str]
    """The number in ``stats()``; or by the value of ``label`` several."""
    label: str = ""
    unit: str = ""
    """Which the name ends with."""


_gauge, _counter = functools.partial(Metric, "gauge"), functools.partial(Metric, "counter")
METRICS = (
    _gauge("rows", "Live rows.", "size"),
    _gauge("capacity_rows", "Rows that fit.", "capacity"),
    _gauge("memory_bytes", "Memory or disk that the rows take.", "bytes", unit="bytes"),
    _gauge("lanes", "Rings that the storage is divided into.", "lanes"),
    _counter("inserted_rows", "Rows written since the buffer was emptied, by all processes.", "write_count"),
    _counter("sampled_rows", "Rows sampled since the buffer was emptied or loaded, by all processes.", "sample_count"),
    _gauge("replay_ratio", "Rows sampled for each row inserted since then.", "replay_ratio"),
    _gauge(
        "recent_rows_per_second",
        "Rows over the last 10 to 20 seconds.",
        {"insert": "add_per_s", "sample": "sample_per_s"},
        "call",
    ),
    _gauge(
        "sample_wait_ms",
        "How long calls took to get a batch, in the last two minutes in which there were some.",
        {"0.5": "sample_wait_ms_p50", "0.99": "sample_wait_ms_p99"},
        "quantile",
    ),
    _gauge(
        "stored_bytes",
        "Rows, tickets and indexes, when all rows are written.",
        {"ram": "bytes_ram", "disk": "bytes_disk"},
        "where",
        "bytes",
    ),
    _gauge(
        "age_writes",
        "How many rows were written since a row was, of 4,096 rows.",
        {"mean": "age_mean", "p99": "age_p99"},
        "of",
    ),
    _gauge("usage_counted", "1: samples of each row are counted.", "usage_counted"),
    _gauge("never_sampled_share", "Rows that were never sampled, of 4,096 rows.", "never_sampled_frac"),
    _gauge(
        "priority",
        "Priorities: the largest so far, and the mean of 4,096 rows.",
        {"max": "priority_max", "mean": "priority_mean"},
        "of",
    ),
    _gauge(
        "priority_effective_rows", "The number of equally likely rows that draws are as diverse as.", "priority_ess"
    ),
    _gauge("checkpoint_age_seconds", "Since a Checkpointer saved the rows.", "checkpoint_age_s", unit="seconds"),
    _gauge("drawable_rows", "Rows that a ConsumingSampler or a FilteredSampler can draw now.", "drawable_rows"),
    _gauge("groups", "Groups of rows that a PromptGroupSampler draws from.", "groups"),
    _counter("starved_draws", "Draws that found too few complete groups, or too few rows.", "starved_draws"),
    _counter(
        "gone_rows",
        "Rows that are in no group any more: used up, too old, or overwritten before they were used up.",
        {"used": "used_rows", "expired": "expired_rows", "evicted": "evicted_rows"},
        "of",
    ),
    _gauge("priority_mass", "Sum of what rows are drawn by: priority ** alpha.", "priority_mass"),
    _gauge("consumer_version", "Policy version that the learner has come to.", "consumer_version"),
    _gauge("prefetched_batches", "Batches that are ahead of the learner.", "prefetch_queue_size"),
    _gauge(
        "void_rows", "Rows that hold nothing: they were removed, or a process died while it wrote them.", "void_rows"
    ),
    _counter("lapped_rows", "Rows that a faster writer overwrote while they were being written.", "lapped_rows"),
    _counter("redraws", "Rows drawn again, as they were overwritten while they were read.", "redraws"),
    _counter(
        "dropped_updates",
        "Updates of rows that were overwritten since they were drawn.",
        {"priority": "priority_updates_dropped", "field": "field_updates_dropped"},
        "of",
    ),
    _counter("field_updates", "Rows that update_if_present has written.", "field_updates"),
    _counter(
        "file_transfers",
        "Reads and writes of the store's files, past the memory.",
        {"read": "file_reads", "write": "file_writes"},
        "way",
    ),
    _counter(
        "file_transferred_bytes",
        "Bytes that these moved.",
        {"read": "file_bytes_read", "write": "file_bytes_written"},
        "way",
        "bytes",
    ),
    _gauge("limit_ratio", "Samples per insert that SamplesPerInsert asks for; 0: no such limit.", "limit_ratio"),
    _gauge("limit_min_rows", "Live rows before the first is sampled.", "limit_min_size"),
    _gauge("limit_in_flight_rows", "Rows in flight that MaxInFlight allows; 0: no such limit.", "limit_max_in_flight"),
    _counter("limit_inserted_rows", "Rows inserted since the limits were set.", "limit_inserts"),
    _counter("limit_sampled_rows", "Rows sampled since the limits were set.", "limit_samples"),
    _gauge("limit_level", "Rows that may be sampled for those inserted: see docs/flow-control.md.", "limit_level"),
    _gauge("limit_bound", "The band of the level.", {"lowest": "limit_lowest", "highest": "limit_highest"}, "end"),
    _gauge(
        "limit_error",
        "How far the level is from the middle of its band, as a part of that. Above 0: inserts are ahead.",
        "limit_error",
    ),
    _gauge("in_flight_rows", "Rows inserted and not used up, for MaxInFlight.", "limit_in_flight"),
    _counter("waits", "Calls that a limit made wait.", {"insert": "insert_waits", "sample": "sample_waits"}, "call"),
    _counter(
        "waited_seconds",
        "How long they waited.",
        {"insert": "insert_waited_s", "sample": "sample_waited_s"},
        "call",
        "seconds",
    ),
    _gauge("waiting", "Calls that wait now.", {"insert": "inserts_waiting", "sample": "samples_waiting"}, "call"),
    _gauge("stores", "Stores of a fleet.", {"all": "shards", "missing": "shards_missing"}, "which"),
    _gauge("missing_rows", "Rows of its stores that are gone, as far as they were known.", "rows_missing"),
    _counter("lost_stores", "How often a store was gone.", "stores_lost"),
    _gauge("imbalance", "The largest mass of a store, over the mean of all.", "imbalance"),
    _counter("requests", "Parts of batches that stores were asked for.", "requests"),
    _counter("request_wait_seconds", "How long their answers were waited for.", "request_waited_s", unit="seconds"),
    _gauge("followed_step", "Step of the checkpoint that the buffer follows.", "followed_step"),
    _gauge("followed_age_seconds", "Its age.", "followed_age", unit="seconds"),
    _gauge("followed_damaged", "Damaged checkpoints that were passed over.", "followed_damaged"),
)
