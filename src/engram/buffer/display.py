"""A buffer for people: its text, its table in a notebook, and its numbers."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import torch

from engram.limits import limit_stats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engram.buffer.settings import Settings
    from engram.buffer.wiring import Wiring


#: Writers that are worth no mention.
_USUAL_WRITERS = ("RoundRobinWriter()", "TensorDictRoundRobinWriter()")
#: What a text says last.
_DISPENSABLE = ("asked for", "transform", "writer", "fields", "lanes", "batch_size", "prefetch", "memory")
#: Characters of a text, at most.
_LONGEST = 120
#: Characters of the end of a path, which tells more than its beginning.
_PLACE = 20


class Display:
    """What a buffer is at this moment."""

    def __init__(self, wiring: Wiring, settings: Settings) -> None:
        self._wiring = wiring
        self._settings = settings

    def text(self) -> str:
        """For ``repr``, of at most 120 characters: what does not fit is said in short, or in the table alone."""
        facts = dict(self._facts())
        for name, said in self._shorter(facts):
            if len(self._joined(facts)) <= _LONGEST:
                break
            facts[name] = said
        while len(self._joined(facts)) > _LONGEST and len(facts) > 1:
            facts.pop(next((name for name in _DISPENSABLE if name in facts), [*facts][-1]))
        return self._joined(facts)

    def _shorter(self, facts: dict[str, str]) -> Iterator[tuple[str, str]]:
        """Facts in fewer characters, the least important ones first."""
        if "fields" in facts:
            yield "fields", str(len(self._wiring.storage.store.schema.fields))
        number, unit, place = [*facts.get("memory", "").split(" ", 2), "", ""][:3]
        if len(place) > _PLACE:
            yield "memory", f"{number} {unit} …{place[-_PLACE:]}"
        for name in ("writer", "transform", "sampler", "storage"):
            if "(" in facts.get(name, "") and not facts[name].endswith("()"):
                yield name, f"{facts[name].partition('(')[0]}(…)"

    def _joined(self, facts: dict[str, str]) -> str:
        return f"{self._settings.kind}({', '.join(f'{name}={value}' for name, value in facts.items())})"

    def html(self) -> str:
        """For notebooks: all facts, how full it is, and the fields."""
        storage = self._wiring.storage
        rows = "".join(_row(name, escape(value)) for name, value in self._facts() if name != "fields")
        if not storage.closed and not storage.traits.is_remote:
            size, capacity = len(storage), storage.max_size
            if _is_bounded(capacity):
                rows = _row("filled", f"<progress value='{size}' max='{capacity}'></progress>") + rows
            if storage.memory is not None:
                for field in storage.memory.schema.fields:
                    shape, nbytes = list(field.shape), _human(field.row_bytes * capacity)
                    rows += _row(field.name, f"{field.dtype} {shape}, {field.row_bytes} B a row, {nbytes}")
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
        facts.append(("sampler", repr(wiring.sampler)))
        if repr(wiring.writer) not in _USUAL_WRITERS:
            facts.append(("writer", repr(wiring.writer)))
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


def _row(name: str, cell: str) -> str:
    """A line of the table. ``cell``: HTML."""
    return f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{cell}</td></tr>"


def _is_bounded(capacity: int) -> bool:
    return capacity < torch.iinfo(torch.int64).max


def _human(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # 1000 in three figures
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
