"""``engram inspect`` without ``--all``: the main facts, on one page."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING

import msgspec

from engram._support.words import count, said_share, said_size
from engram.cli import show
from engram.cli.show import checkpoint_lines, plain, said_age, show_description, show_problems, table
from engram.format.histograms import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Entries = Mapping[str, object]

#: Fields that are listed, at most.
_FIELDS = 8
#: Characters of the longest bar.
_BAR = 30
_KINDS = ("complete", "open", "headless", "both", "mid", "orphan")


class _Field(msgspec.Struct):
    key: list[str]
    dtype: str
    shape: list[int]
    row_bytes: int


class _Priorities(msgspec.Struct):
    drawable: int = 0
    alpha: float | None = None
    beta: float | None = None
    max_priority: float | None = None
    histogram: Histogram | None = None
    name: str = ""


class _Lanes(msgspec.Struct):
    fewest_rows: int
    most_rows: int
    count: int = 0


class _Store(msgspec.Struct):
    capacity: int
    rows: int
    row_bytes: int
    bytes: int
    clean: bool
    lanes: _Lanes
    fields: list[_Field]
    indexes: list[_Priorities]
    processes: list[int]
    created: str = ""
    written: str = ""
    age_s: float = 0.0


class _Geometry(msgspec.Struct):
    capacity: int


class _Trajectories(msgspec.Struct):
    lengths: Histogram


class _Part(msgspec.Struct):
    type: str
    rows: int = 0
    geometry: _Geometry | None = None
    lanes: _Lanes | None = None
    fields: list[_Field] = []
    trajectories: _Trajectories | None = None
    priorities: _Priorities | None = None
    indexes: list[_Priorities] = []


class _Shard(msgspec.Struct):
    parts: dict[str, _Part] = {}


class _Checkpoint(msgspec.Struct):
    step: int
    world: int
    trigger: str
    parent: object
    user: dict[str, object]
    totals: dict[str, object]
    shards: list[_Shard]
    saved: str = ""
    age_s: float = 0.0


def show_short(found: dict[str, object]) -> None:
    """Print the main facts of what ``describe`` found."""
    kind = found["kind"]
    if (
        kind == "part"
        or "votes" in found
        or (kind == "store" and "rows" not in found)
        or (kind in _SAVED and "shards" not in found)
    ):
        # Of a part or an attempt there is no shorter form; of what is damaged, all that could be read.
        show_description(found)
        return
    lines = [f"{kind} {plain(found['path'])}"]
    if kind == "store":
        lines += _store(msgspec.convert(found, _Store))
    elif kind == "series":
        lines += ["", *checkpoint_lines(found)]
    else:
        lines += _checkpoint(msgspec.convert(found, _Checkpoint))
    show.echo(lines)
    show_problems(found)


_SAVED = ("checkpoint", "dump")


def _store(store: _Store) -> Iterator[str]:
    if store.clean:
        state = "no process has it open"
    else:
        named = ", ".join(map(str, store.processes[:8])) or "none is noted"
        state = f"open, or not closed in order; processes: {named}"
    share = f" ({said_share(store.rows / store.capacity)})"
    lanes = f", {store.lanes.count} lanes of {store.lanes.fewest_rows:,} to {store.lanes.most_rows:,}"
    yield from table(
        [
            ("created", store.created or "–"),
            ("written", f"{store.written}, {said_age(store.age_s)} ago" if store.written else "–"),
            ("state", state),
            ("rows", f"{store.rows:,} of {store.capacity:,}{share}{lanes if store.lanes.count > 1 else ''}"),
            ("size", f"{said_size(store.bytes)}, {said_size(store.row_bytes)} a row"),
        ]
    )
    yield from _fields(store.fields)
    for index in store.indexes:
        yield from _priorities(index)


def _checkpoint(found: _Checkpoint) -> Iterator[str]:
    totals = found.totals
    kinds = ((kind, totals.get(kind)) for kind in _KINDS)
    episodes = ", ".join(f"{it['episodes']:,} {kind}" for kind, it in kinds if isinstance(it, dict) and it["episodes"])
    size, linked = (said_size(_whole(totals, f"bytes_{which}")) for which in ("logical", "linked"))
    facts = [
        ("saved", f"{found.saved}, {said_age(found.age_s)} ago" if found.saved else "–"),
        ("step", f"{found.step:,} ({plain(found.trigger)}), {count(found.world, 'rank')}"),
        ("rows", f"{_whole(totals, 'steps'):,} in {count(_whole(totals, 'episodes'), 'episode')}"),
        ("episodes", episodes or "–"),
        ("size", f"{size} in all, {linked} of it also the parent's"),
    ]
    if found.parent:
        facts.append(("parent", plain(found.parent["name"] if isinstance(found.parent, dict) else found.parent)))
    if found.user:
        facts.append(("user", plain(found.user)))
    yield from table(facts)
    parts = found.shards[0].parts if found.shards else {}
    of = "" if found.world == 1 else " of rank 0"
    for part in parts.values():
        if part.geometry is not None:
            yield from _fields(part.fields)
    for part in parts.values():
        for index in ([] if part.priorities is None else [part.priorities]) + part.indexes:
            yield from _priorities(index, of)
        if part.trajectories is not None and part.trajectories.lengths["counts"]:
            yield from _lengths(part.trajectories.lengths, of)


def _whole(totals: Entries, name: str) -> int:
    value = totals.get(name)
    return value if isinstance(value, int) else 0


def _fields(fields: list[_Field]) -> Iterator[str]:
    yield ""
    rows = [(plain(".".join(it.key)), it.dtype, str(it.shape), said_size(it.row_bytes)) for it in fields[:_FIELDS]]
    yield from table([("field", "dtype", "shape", "a row"), *rows], right=[3], headed=True)
    if len(fields) > _FIELDS:
        yield f"and {len(fields) - _FIELDS} more: --all lists them"


def _priorities(index: _Priorities, of: str = "") -> Iterator[str]:
    """Of an index that has priorities."""
    if index.histogram is None:
        return
    parameters = [
        f"{name} {value:g}" for name, value in (("alpha", index.alpha), ("beta", index.beta)) if value is not None
    ]
    name = f" {plain(index.name)}" if index.name else ""
    yield ""
    yield f"priorities{name}{of}: {', '.join([*parameters, count(index.drawable, 'row')])} can be drawn"
    yield from _bars(index.histogram)


def _lengths(lengths: Histogram, of: str) -> Iterator[str]:
    yield ""
    yield f"lengths of {count(sum(lengths['counts']), 'whole trajectory')}{of}"
    yield from _bars(lengths, whole=True)


def _bars(histogram: Histogram, *, whole: bool = False) -> Iterator[str]:
    """A line for each bar of a histogram, as wide as the terminal has place."""
    edges, counts = histogram["edges"], histogram["counts"]
    if not counts:
        return
    if whole:
        ranges = [(low, high - 1) for low, high in itertools.pairwise(edges)]
        labels = [f"{low:.0f}" if low == high else f"{low:.0f}–{high:.0f}" for low, high in ranges]
    else:
        labels = [f"{low:.3g} – {high:.3g}" for low, high in itertools.pairwise(edges)]
    numbers = [f"{number:,}" for number in counts]
    aside = max(map(len, labels)) + max(map(len, numbers)) + 6
    longest = max(min(_BAR, shutil.get_terminal_size().columns - aside), 4)
    bars = ["█" * round(number / max(counts) * longest) or ("▏" if number else "") for number in counts]
    yield from (f"  {line}" for line in table([*zip(labels, bars, numbers, strict=True)], right=[0, 2]))
