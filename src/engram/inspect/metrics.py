"""Which numbers of ``stats()`` are metrics, in one table; and metrics by HTTP, from a thread of the process that has the buffers."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as Collects

from engram._support import closing, http
from engram.remote.protocol import Address, address_of

PATH = "/metrics"
#: Connections at a time.
MAX_CONNECTIONS = 8
#: Seconds that all buffers have for an answer: less than a scraper waits for.
ANSWER_S = 5.0


@runtime_checkable
class HasStats(Protocol):
    """A buffer, as far as its metrics go."""

    def stats(self) -> dict[str, float]: ...


Kind: TypeAlias = Literal["gauge", "counter"]


class Metric(NamedTuple):
    """One metric. ``engram_`` comes before its name; ``_total`` behind that of a counter."""

    kind: Kind
    name: str
    help: str
    #: The number in ``stats()``; or by the value of ``label`` several.
    stats: str | Mapping[str, str]
    label: str = ""

    @property
    def unit(self) -> str:
        """With which the name ends."""
        last = self.name.rpartition("_")[2]
        return last if last in ("bytes", "seconds") else ""


def _metric(kind: Kind, name: str, text: str, stats: str = "", **label: dict[str, str]) -> Metric:
    """``label``: its name, and by each of its values the number in ``stats()``."""
    for labelled, by_value in label.items():
        return Metric(kind, name, text, by_value, labelled)
    return Metric(kind, name, text, stats)


_gauge, _counter = functools.partial(_metric, "gauge"), functools.partial(_metric, "counter")
METRICS = (
    _gauge("rows", "Live rows.", "size"),
    _gauge("capacity_rows", "Rows that fit.", "capacity"),
    _gauge("memory_bytes", "Memory or disk that the rows take.", "bytes"),
    _gauge("lanes", "Rings that the storage is divided into.", "lanes"),
    _counter("inserted_rows", "Rows written since the buffer was emptied, by all processes.", "write_count"),
    _counter("sampled_rows", "Rows sampled since the buffer was emptied or loaded, by all processes.", "sample_count"),
    _gauge("replay_ratio", "Rows sampled for each row inserted since then.", "replay_ratio"),
    _gauge(
        "recent_rows_per_second",
        "Rows over the last 10 to 20 seconds.",
        call={"insert": "add_per_s", "sample": "sample_per_s"},
    ),
    _gauge(
        "sample_wait_ms",
        "How long calls took to get a batch, in the last two minutes in which there were some.",
        quantile={"0.5": "sample_wait_ms_p50", "0.99": "sample_wait_ms_p99"},
    ),
    _gauge(
        "stored_bytes",
        "Rows, tickets and indexes, when all rows are written.",
        where={"ram": "bytes_ram", "disk": "bytes_disk"},
    ),
    _gauge(
        "age_writes",
        "How many rows were written since a row was, of 4,096 rows.",
        of={"mean": "age_mean", "p99": "age_p99"},
    ),
    _gauge("usage_counted", "1: samples of each row are counted.", "usage_counted"),
    _gauge("never_sampled_share", "Rows that were never sampled, of 4,096 rows.", "never_sampled_frac"),
    _gauge(
        "priority",
        "Priorities: the largest so far, and the mean of 4,096 rows.",
        of={"max": "priority_max", "mean": "priority_mean"},
    ),
    _gauge(
        "priority_effective_rows", "The number of equally likely rows that draws are as diverse as.", "priority_ess"
    ),
    _gauge("checkpoint_age_seconds", "Since a Checkpointer saved the rows.", "checkpoint_age_s"),
    _gauge("drawable_rows", "Rows that a ConsumingSampler or a FilteredSampler can draw now.", "drawable_rows"),
    _gauge("groups", "Groups of rows that a PromptGroupSampler draws from.", "groups"),
    _counter("starved_draws", "Draws that found too few complete groups, or too few rows.", "starved_draws"),
    _counter(
        "gone_rows",
        "Rows that are drawn no more: used up, too old, or overwritten, removed or lost before they were used up.",
        of={"used": "used_rows", "expired": "expired_rows", "evicted": "evicted_rows", "dropped": "dropped_rows"},
    ),
    _gauge("priority_mass", "Sum of what rows are drawn by: priority ** alpha.", "priority_mass"),
    _gauge("consumer_version", "Policy version that the learner has come to.", "consumer_version"),
    _gauge("copy_age_seconds", "Since the second copy of the store had all of its rows.", "copy_age_s"),
    _gauge("server_streams", "Streams of clients, of which a server takes 1,024.", "server_streams"),
    _gauge("prefetched_batches", "Batches that are ahead of the learner.", "prefetch_queue_size"),
    _gauge(
        "void_rows", "Rows that hold nothing: they were removed, or a process died while it wrote them.", "void_rows"
    ),
    _counter("lapped_rows", "Rows that a faster writer overwrote while they were being written.", "lapped_rows"),
    _counter("redraws", "Rows drawn again, as they were overwritten while they were read.", "redraws"),
    _counter(
        "dropped_updates",
        "Updates of rows that were overwritten since they were drawn.",
        of={"priority": "priority_updates_dropped", "field": "field_updates_dropped"},
    ),
    _counter("field_updates", "Rows that update_if_present has written.", "field_updates"),
    _counter(
        "file_transfers",
        "Reads and writes of the store's files, past the memory.",
        way={"read": "file_reads", "write": "file_writes"},
    ),
    _counter(
        "file_transferred_bytes",
        "Bytes that these moved.",
        way={"read": "file_bytes_read", "write": "file_bytes_written"},
    ),
    _gauge("limit_ratio", "Samples per insert that SamplesPerInsert asks for; 0: no such limit.", "limit_ratio"),
    _gauge("limit_min_rows", "Live rows before the first is sampled.", "limit_min_size"),
    _gauge("limit_in_flight_rows", "Rows in flight that MaxInFlight allows; 0: no such limit.", "limit_max_in_flight"),
    _counter("limit_inserted_rows", "Rows inserted since the limits were set.", "limit_inserts"),
    _counter("limit_sampled_rows", "Rows sampled since the limits were set.", "limit_samples"),
    _gauge("limit_level", "Rows that may be sampled for those inserted: see docs/flow-control.md.", "limit_level"),
    _gauge("limit_bound", "The band of the level.", end={"lowest": "limit_lowest", "highest": "limit_highest"}),
    _gauge(
        "limit_error",
        "How far the level is from the middle of its band, as a part of that. Above 0: inserts are ahead.",
        "limit_error",
    ),
    _gauge("in_flight_rows", "Rows inserted and not used up, for MaxInFlight.", "limit_in_flight"),
    _counter("waits", "Calls that a limit made wait.", call={"insert": "insert_waits", "sample": "sample_waits"}),
    _counter(
        "waited_seconds", "How long they waited.", call={"insert": "insert_waited_s", "sample": "sample_waited_s"}
    ),
    _gauge("waiting", "Calls that wait now.", call={"insert": "inserts_waiting", "sample": "samples_waiting"}),
    _gauge("stores", "Stores of a fleet.", which={"all": "shards", "missing": "shards_missing"}),
    _gauge("missing_rows", "Rows of its stores that are gone, as far as they were known.", "rows_missing"),
    _counter("lost_stores", "How often a store was gone.", "stores_lost"),
    _gauge("imbalance", "The largest mass of a store, over the mean of all.", "imbalance"),
    _counter("requests", "Parts of batches that stores were asked for.", "requests"),
    _counter("request_wait_seconds", "How long their answers were waited for.", "request_waited_s"),
    _gauge("followed_step", "Step of the checkpoint that the buffer follows.", "followed_step"),
    _gauge("followed_age_seconds", "Its age.", "followed_age"),
    _gauge("followed_damaged", "Damaged checkpoints that were passed over.", "followed_damaged"),
)


class _Question:
    """Asks a buffer, in a thread of its own: one whose server is gone looks for it for its whole ``patience``."""

    def __init__(self, rb: HasStats) -> None:
        self.stats: dict[str, float] = {}
        self.answered = threading.Event()
        threading.Thread(target=self._ask, args=(rb,), name="engram-metrics", daemon=True).start()

    def _ask(self, rb: HasStats) -> None:
        try:
            self.stats = rb.stats()
        except Exception:  # noqa: BLE001 - `engram_up` says it, and the others answer
            self.stats = {}
        finally:
            self.answered.set()


class Collector(Collects):
    """Shows buffers in a registry of your own: ``REGISTRY.register(Collector({"replay": rb}))``.

    Args:
        buffers: by the name that the label ``buffer`` will have; at least one. Their rows, samplers and counts are not changed, and
            no writer or learner waits. A buffer that was closed, or that does not answer within 5 seconds, as its server is gone, has
            ``engram_up`` 0 and no other metric.

    Raises:
        TypeError: no buffers, or names that are no str. ValueError: none at all.

    Cost: a thread with a ``stats()`` of each buffer whenever the registry is read; of connected buffers a request.

    >>> import torch
    >>> from prometheus_client import CollectorRegistry
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> from engram.inspect.metrics import Collector
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> _ = rb.extend(torch.arange(3))
    >>> registry = CollectorRegistry()
    >>> registry.register(Collector({"replay": rb}))
    >>> registry.get_sample_value("engram_rows", {"buffer": "replay"})
    3
    """

    def __init__(self, buffers: Mapping[str, HasStats]) -> None:
        self._buffers = checked_buffers(buffers, "Collector")
        self._lock = threading.Lock()
        self._asked: dict[str, _Question] = {}

    def collect(self) -> Iterator[Family]:
        found = self._stats()
        up = GaugeMetricFamily("engram_up", "1: the buffer answers.", labels=("buffer",))
        for name, stats in found.items():
            up.add_metric((name,), bool(stats))
        yield up
        for it in METRICS:
            makes = GaugeMetricFamily if it.kind == "gauge" else CounterMetricFamily
            labels = ("buffer", it.label) if it.label else ("buffer",)
            family = makes(f"engram_{it.name}", it.help, labels=labels, unit=it.unit)
            keys = {"": it.stats} if isinstance(it.stats, str) else it.stats
            for name, stats in found.items():
                for value, key in keys.items():
                    if key in stats:
                        family.add_metric((name, value)[: len(labels)], stats[key])
            if family.samples:
                yield family

    def _stats(self) -> dict[str, dict[str, float]]:
        """Of each buffer, empty where none came in time. A buffer that was asked and has not answered yet is not asked again."""
        with self._lock:
            for name, rb in self._buffers.items():
                if name not in self._asked or self._asked[name].answered.is_set():
                    self._asked[name] = _Question(rb)
            asked = dict(self._asked)
        deadline = monotonic() + ANSWER_S
        return {
            name: it.stats if it.answered.wait(max(0.0, deadline - monotonic())) else {} for name, it in asked.items()
        }

    def describe(self) -> list[Family]:
        """Nothing: registering asks no buffer for anything."""
        return []


def checked_buffers(buffers: object, call: str) -> dict[str, HasStats]:
    """Buffers by name. Raises as :class:`Collector`."""
    if not isinstance(buffers, Mapping):
        raise TypeError(f"{call}: expected buffers by name, {{'replay': rb}}, got {type(buffers).__name__}.")
    if not buffers:
        raise ValueError(f"{call}: expected at least one buffer, got none.")
    for name, rb in buffers.items():
        if not isinstance(name, str) or not isinstance(rb, HasStats):
            raise TypeError(
                f"{call}: expected buffers by name, {{'replay': rb}}, got a {type(rb).__name__} of the name {name!r:.80}."
            )
    return dict(buffers)


class MetricsServer(closing.Closes):
    """Answers ``GET /metrics``, until it is closed or the process ends. :func:`serve` makes it; ``with`` closes it."""

    def __init__(self, buffers: Mapping[str, HasStats], at: Address) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(Collector(buffers))
        try:
            family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
            self._listener = socket.create_server((at.host, at.port), family=family)
        except OSError as error:
            # Python's own text says the address a second time; names that no resolver knows have numbers below zero.
            code = error.errno or 0
            said = os.strerror(code) if code > 0 else error.strerror
            raise OSError(error.errno, said, at.place) from error
        self._at = at._replace(port=self._listener.getsockname()[1])
        self._server = http.Server(self._listener, self._answer, "engram-metrics", MAX_CONNECTIONS)

    def _answer(self, call: http.Call) -> http.Answer:
        if call.path.partition("?")[0] != PATH:
            return http.Answer(404)
        if call.method != "GET":
            return http.Answer(405)
        encode, kind = choose_encoder(call.headers.get("accept", ""))
        return http.Answer(200, encode(self._registry), kind)

    @property
    def address(self) -> str:
        """``"http://HOST:PORT/metrics"``."""
        return f"http://{self._at.place}{PATH}"

    def close(self) -> None:
        """End it. Repeatable."""
        self._server.close()
        self._listener.close()


def serve(
    buffers: HasStats | Mapping[str, HasStats], address: str = "127.0.0.1:9469", *, insecure: bool = False
) -> MetricsServer:
    """Answer ``GET /metrics`` with the numbers of buffers, for Prometheus and the like: see docs/metrics.md.

    Args:
        buffers: a buffer, which is called ``"replay"`` there; or several by name. Of any kind: connected, following or
            read-only ones, too.
        address: ``"HOST:PORT"``; port 0 is any that is free. A host that only this machine reaches, unless ``insecure``.
        insecure: listen where other machines can come, too. All of them may read the numbers, and nothing else.

    Returns:
        The server, which runs in a thread. Its ``address`` is the URL; ``close()`` or the end of ``with`` ends it. A forked child has
        none.

    At most 8 connections are served at a time, each for a few seconds; a new one takes the place of the one that has said nothing for the
    longest. Nothing can be changed by them.

    Raises:
        TypeError, ValueError: other buffers, or no such address; one that other machines reach, without ``insecure``.
        OSError: the address is taken.
        ModuleNotFoundError: ``engram-replay[metrics]`` is not installed.

    Cost: as :class:`Collector`, for each request.

    >>> import torch, urllib.request
    >>> import engram.inspect.metrics
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> _ = rb.extend(torch.arange(3))
    >>> with engram.inspect.metrics.serve(rb, "127.0.0.1:0") as server:
    ...     text = urllib.request.urlopen(server.address).read().decode()
    >>> [line for line in text.splitlines() if line.startswith("engram_rows")]
    ['engram_rows{buffer="replay"} 3.0']
    """
    at = metrics_address(address, insecure=insecure)
    given = buffers if isinstance(buffers, Mapping) else {"replay": buffers}
    return MetricsServer(checked_buffers(given, "metrics"), at)


def metrics_address(address: object, *, insecure: bool) -> Address:
    """Where to listen. Raises as :func:`serve`."""
    at = address_of(address, "metrics")
    if at.scheme != "grpc" or "://" in str(address):
        raise ValueError(f"metrics: address: expected HOST:PORT, got {address!r}.")
    if not at.is_loopback and not insecure:
        raise ValueError(
            f"metrics: address: expected one that only this machine reaches, such as 127.0.0.1:{at.port}, got {address!r}. Pass "
            "insecure=True (--insecure) in a network that you trust."
        )
    return at
