"""A buffer for people: its text, its table in a notebook, and its numbers."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import torch

from engram.limits import limit_stats

if TYPE_CHECKING:
    from engram.buffer.settings import Settings
    from engram.buffer.wiring import Wiring


class Display:
    """What a buffer is at this moment."""

    def __init__(self, wiring: Wiring, settings: Settings) -> None:
        self._wiring = wiring
        self._settings = settings

    def text(self) -> str:
        """For ``repr``."""
        facts = ", ".join(f"{name}={value}" for name, value in self._facts())
        return f"{self._settings.kind}({facts})"

    def html(self) -> str:
        """For notebooks."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in self._facts()
        )
        return f"<table><caption>{escape(self._settings.kind)}</caption>{rows}</table>"

    def stats(self, prefetched: int) -> dict[str, float]:
        """A flat dict of numbers. ``prefetched``: batches that are ahead."""
        storage = self._wiring.storage
        size, capacity = len(storage), storage.max_size
        stats: dict[str, float] = {
            "size": size,
            "write_count": 0 if self._wiring.of_writer.read_only else storage.write_count,
            "prefetch_queue_size": prefetched,
            "initialized": 1,
            "lanes": storage.lanes,
            "bytes": storage.nbytes,
        }
        if _is_bounded(capacity):
            stats |= {"capacity": capacity, "utilization": size / capacity}
        stats.update(storage.counters())
        if storage.memory is not None:
            stats.update(limit_stats(storage.memory))
        return stats

    def _facts(self) -> list[tuple[str, str]]:
        wiring, settings = self._wiring, self._settings
        storage = wiring.storage  # a text does not ask a server
        aside = storage.closed or storage.traits.is_remote
        facts = [("storage", repr(storage))] if aside else self._facts_of_storage()
        facts += [("sampler", repr(wiring.sampler)), ("writer", repr(wiring.writer))]
        if len(wiring.transform):
            facts.append(("transform", repr(wiring.transform)))
        if settings.batch_size is not None:
            facts.append(("batch_size", str(settings.batch_size)))
        if settings.prefetch:
            facts.append(("prefetch", str(settings.prefetch)))
        return facts

    def _facts_of_storage(self) -> list[tuple[str, str]]:
        storage = self._wiring.storage
        size, capacity = len(storage), storage.max_size
        rows = f"{size:_}/{capacity:_} ({100 * size / capacity:.3g} %)" if _is_bounded(capacity) else f"{size:_}"
        facts = [("size", rows.replace("_", " "))]
        store = storage.memory
        if store is None:
            facts.append(("storage", type(storage).__name__))
        else:
            names = [field.name for field in store.schema.fields]
            shown = ", ".join(names[:8])
            facts.append(("memory", f"{_human(storage.nbytes)} {store.place}"))
            facts.append(("fields", shown if len(names) <= 8 else f"{len(names)}: {shown}, …"))
        if storage.lanes > 1:
            facts.append(("lanes", str(storage.lanes)))
        if storage.requested_size != capacity:
            facts.append(("asked for", str(storage.requested_size)))
        return facts


def _is_bounded(capacity: int) -> bool:
    return capacity < torch.iinfo(torch.int64).max


def _human(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
