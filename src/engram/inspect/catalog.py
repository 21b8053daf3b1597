"""Which numbers of ``stats()`` are shown, and as what: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class HasStats(Protocol):
    """A buffer, as far as its metrics go."""

    def stats(self) -> dict[str, float]: ...


class Metric(NamedTuple):
    """One metric. ``engram_`` comes before its name; ``_total`` behind that of a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    stats: str | Mapping[str, str]
    """The number in ``stats()``; or by the value of ``label`` several."""
    label: str = ""
    unit: str = ""
    """Which the name ends with."""


METRICS = (
    Metric("rows", "gauge", "Live rows.", "size"),
    Metric("capacity_rows", "gauge", "Rows that fit.", "capacity"),
    Metric("memory_bytes", "gauge", "Memory or disk that the rows take.", "bytes", unit="bytes"),
    Metric("lanes", "gauge", "Rings that the storage is divided into.", "lanes"),
    Metric("inserted_rows", "counter", "Rows written since the buffer was emptied, by all processes.", "write_count"),
    Metric(
        "sampled_rows",
        "counter",
        "Rows sampled since the buffer was emptied or loaded, by all processes.",
        "sample_count",
    ),
    Metric("replay_ratio", "gauge", "Rows sampled for each row inserted since then.", "replay_ratio"),
    Metric(
        "recent_rows_per_second",
        "gauge",
        "Rows over the last 10 to 20 seconds.",
        {"insert": "add_per_s", "sample": "sample_per_s"},
        "call",
    ),
    Metric(
        "sample_wait_ms",
        "gauge",
        "How long calls took to get a batch, in the last two minutes in which there were some.",
        {"0.5": "sample_wait_ms_p50", "0.99": "sample_wait_ms_p99"},
        "quantile",
    ),
    Metric(
        "stored_bytes",
        "gauge",
        "Rows, tickets and indexes, when all rows are written.",
        {"ram": "bytes_ram", "disk": "bytes_disk"},
        "where",
        "bytes",
    ),
    Metric(
        "age_writes",
        "gauge",
        "How many rows were written since a row was, of 4,096 rows.",
        {"mean": "age_mean", "p99": "age_p99"},
        "of",
    ),
    Metric("usage_counted", "gauge", "1: samples of each row are counted.", "usage_counted"),
    Metric("never_sampled_share", "gauge", "Rows that were never sampled, of 4,096 rows.", "never_sampled_frac"),
    Metric(
        "priority",
        "gauge",
        "Priorities: the largest so far, and the mean of 4,096 rows.",
        {"max": "priority_max", "mean": "priority_mean"},
        "of",
    ),
    Metric(
        "priority_effective_rows",
        "gauge",
        "The number of equally likely rows that draws are as diverse as.",
        "priority_ess",
    ),
    Metric(
        "checkpoint_age_seconds", "gauge", "Since a Checkpointer saved the rows.", "checkpoint_age_s", unit="seconds"
    ),
    Metric("drawable_rows", "gauge", "Rows that a ConsumingSampler has not used up.", "drawable_rows"),
    Metric("groups", "gauge", "Groups of rows that a PromptGroupSampler draws from.", "groups"),
    Metric("starved_draws", "counter", "Draws that found too few complete groups.", "starved_draws"),
    Metric(
        "gone_rows",
        "counter",
        "Rows that are in no group any more: used up, too old, or overwritten before they were used up.",
        {"used": "used_rows", "expired": "expired_rows", "evicted": "evicted_rows"},
        "of",
    ),
    Metric("priority_mass", "gauge", "Sum of what rows are drawn by: priority ** alpha.", "priority_mass"),
    Metric("consumer_version", "gauge", "Policy version that the learner has come to.", "consumer_version"),
    Metric("prefetched_batches", "gauge", "Batches that are ahead of the learner.", "prefetch_queue_size"),
    Metric(
        "void_rows",
        "gauge",
        "Rows that hold nothing: they were removed, or a process died while it wrote them.",
        "void_rows",
    ),
    Metric(
        "lapped_rows", "counter", "Rows that a faster writer overwrote while they were being written.", "lapped_rows"
    ),
    Metric("redraws", "counter", "Rows drawn again, as they were overwritten while they were read.", "redraws"),
    Metric(
        "dropped_updates",
        "counter",
        "Updates of rows that were overwritten since they were drawn.",
        {"priority": "priority_updates_dropped", "field": "field_updates_dropped"},
        "of",
    ),
    Metric("field_updates", "counter", "Rows that update_if_present has written.", "field_updates"),
    Metric(
        "file_transfers",
        "counter",
        "Reads and writes of the store's files, past the memory.",
        {"read": "file_reads", "write": "file_writes"},
        "way",
    ),
    Metric(
        "file_transferred_bytes",
        "counter",
        "Bytes that these moved.",
        {"read": "file_bytes_read", "write": "file_bytes_written"},
        "way",
        "bytes",
    ),
    Metric(
        "limit_ratio", "gauge", "Samples per insert that SamplesPerInsert asks for; 0: no such limit.", "limit_ratio"
    ),
    Metric("limit_min_rows", "gauge", "Live rows before the first is sampled.", "limit_min_size"),
    Metric(
        "limit_in_flight_rows",
        "gauge",
        "Rows in flight that MaxInFlight allows; 0: no such limit.",
        "limit_max_in_flight",
    ),
    Metric("limit_inserted_rows", "counter", "Rows inserted since the limits were set.", "limit_inserts"),
    Metric("limit_sampled_rows", "counter", "Rows sampled since the limits were set.", "limit_samples"),
    Metric(
        "limit_level", "gauge", "Rows that may be sampled for those inserted: see docs/flow-control.md.", "limit_level"
    ),
    Metric(
        "limit_bound", "gauge", "The band of the level.", {"lowest": "limit_lowest", "highest": "limit_highest"}, "end"
    ),
    Metric(
        "limit_error",
        "gauge",
        "How far the level is from the middle of its band, as a part of that. Above 0: inserts are ahead.",
        "limit_error",
    ),
    Metric("in_flight_rows", "gauge", "Rows inserted and not used up, for MaxInFlight.", "limit_in_flight"),
    Metric(
        "waits",
        "counter",
        "Calls that a limit made wait.",
        {"insert": "insert_waits", "sample": "sample_waits"},
        "call",
    ),
    Metric(
        "waited_seconds",
        "counter",
        "How long they waited.",
        {"insert": "insert_waited_s", "sample": "sample_waited_s"},
        "call",
        "seconds",
    ),
    Metric(
        "waiting", "gauge", "Calls that wait now.", {"insert": "inserts_waiting", "sample": "samples_waiting"}, "call"
    ),
    Metric("stores", "gauge", "Stores of a fleet.", {"all": "shards", "missing": "shards_missing"}, "which"),
    Metric("missing_rows", "gauge", "Rows of its stores that are gone, as far as they were known.", "rows_missing"),
    Metric("lost_stores", "counter", "How often a store was gone.", "stores_lost"),
    Metric("imbalance", "gauge", "The largest mass of a store, over the mean of all.", "imbalance"),
    Metric("requests", "counter", "Parts of batches that stores were asked for.", "requests"),
    Metric(
        "request_wait_seconds", "counter", "How long their answers were waited for.", "request_waited_s", unit="seconds"
    ),
    Metric("followed_step", "gauge", "Step of the checkpoint that the buffer follows.", "followed_step"),
    Metric("followed_age_seconds", "gauge", "Its age.", "followed_age", unit="seconds"),
    Metric("followed_damaged", "gauge", "Damaged checkpoints that were passed over.", "followed_damaged"),
)
