"""Metrics by HTTP, from a thread of the process that has the buffers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from time import monotonic

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as Collects

from engram._support.closing import Closes
from engram._support.http import Answer, Call, Server
from engram.inspect.catalog import METRICS, HasStats
from engram.remote.protocol import Address, address_of

PATH = "/metrics"
#: Connections at a time.
MAX_CONNECTIONS = 8
#: Seconds that all buffers have for an answer: less than a scraper waits for.
ANSWER_S = 5.0


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


class MetricsServer(Closes):
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
        self._server = Server(self._listener, self._answer, "engram-metrics", MAX_CONNECTIONS)

    def _answer(self, call: Call) -> Answer:
        if call.path.partition("?")[0] != PATH:
            return Answer(404)
        if call.method != "GET":
            return Answer(405)
        encode, kind = choose_encoder(call.headers.get("accept", ""))
        return Answer(200, encode(self._registry), kind)

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
