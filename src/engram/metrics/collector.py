"""Metrics of buffers, for a registry of prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as Collects

from engram.metrics.catalog import METRICS, HasStats


class Collector(Collects):
    """Shows buffers in a registry of your own: ``REGISTRY.register(Collector({"replay": rb}))``.

    Args:
        buffers: by the name that the label ``buffer`` will have; at least one. Their rows, samplers and counts are not changed, and
            no writer or learner waits. A buffer that was closed, or whose server is gone, has ``engram_up`` 0 and no other metric.

    Raises:
        TypeError: no buffers, or names that are no str. ValueError: none at all.

    Cost: a ``stats()`` of each buffer whenever the registry is read; of connected buffers a request.

    >>> import torch
    >>> from prometheus_client import CollectorRegistry
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> from engram.metrics import Collector
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> _ = rb.extend(torch.arange(3))
    >>> registry = CollectorRegistry()
    >>> registry.register(Collector({"replay": rb}))
    >>> registry.get_sample_value("engram_rows", {"buffer": "replay"})
    3
    """

    def __init__(self, buffers: Mapping[str, HasStats]) -> None:
        self._buffers = checked_buffers(buffers, "Collector")

    def collect(self) -> Iterator[Family]:
        found: dict[str, dict[str, float]] = {}
        up = GaugeMetricFamily("engram_up", "1: the buffer answers.", labels=("buffer",))
        for name, rb in self._buffers.items():
            try:
                found[name] = rb.stats()
            except Exception:  # noqa: BLE001 - it is said by `up`, and the others answer
                found[name] = {}
            up.add_metric((name,), bool(found[name]))
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
