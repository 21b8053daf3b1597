"""What is said of saves and restores: values for the caller, lines for the log, a file beside the checkpoints."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from engram._words import count, said_bytes, warn
from engram.format import disk
from engram.persist.trajectory_table import KINDS
from engram.reshard.reports import reshard_lines, said_reshard

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from engram.format.checkpoints import Totals
    from engram.format.problems import Problem

_log = logging.getLogger("engram")
_FOLDER = "reports"


class SaveReport(NamedTuple):
    """What a checkpoint holds, and what it took.

    >>> import torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
    >>> checkpoints = Checkpointer("report-example", rb)
    >>> report = checkpoints.save(100)
    >>> report.step, report.steps
    (100, 10)
    """

    name: str
    step: int
    path: Path
    steps: int
    """Rows that were saved."""
    episodes: dict[str, dict[str, int]]
    """Trajectories and their steps, by what is there of them: ``complete``, ``open``, ``headless``, …"""
    lost_rows: int
    """Rows that were overwritten before they were copied."""
    bytes_written: int
    bytes_linked: int
    """Of files that are also an older checkpoint's."""
    paused_s: float
    """For how long writers waited."""
    seconds: float
    would_drop: dict[str, dict[str, int]] = {}  # noqa: RUF012 - a value
    """Of ``episodes``, those that are dropped if ranks of another number or size load them, unless ``restore(incomplete=…)`` says
    otherwise."""

    def __str__(self) -> str:
        episodes = ", ".join(f"{it['episodes']} {kind}" for kind, it in self.episodes.items())
        return (
            f"{self.name}: {self.steps} rows (episodes: {episodes or 'none'}; {self.lost_rows} overwritten meanwhile), "
            f"{said_bytes(self.bytes_written)} written and {said_bytes(self.bytes_linked)} linked in {self.seconds:.2f} s, "
            f"writers waited {self.paused_s * 1e3:.1f} ms"
        )


class RestoreReport(NamedTuple):
    """What was loaded.

    >>> import torch
    >>> from engram import Checkpointer, LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
    >>> checkpoints = Checkpointer("restored-example", rb)
    >>> _ = checkpoints.save(100)
    >>> checkpoints.restore().step
    100
    """

    name: str
    step: int
    path: Path
    steps: int
    """Rows that are there now."""
    user: dict[str, object]
    passed_over: list[Problem]
    """Newer ones that were damaged or not complete."""
    seconds: float
    missing: tuple[int, ...] = ()
    """Ranks whose shards there are none of."""
    dealt: dict[str, Any] | None = None
    """If trajectories were redistributed: episodes and steps ``saved``, by ``kinds``, ``kept``, ``dropped`` by reason and
    ``truncated``, in total and of each of the ``shards``; ``lost`` with missing ones, as far as an older checkpoint says it; the least
    and most steps of a rank and of a lane and the rows that are unused, in total and of each of the ``targets``; and the digest of
    the ``plan``. None: every rank has its own shard."""
    given_up: int = 0
    """Rows of the own shard that are not there: the oldest of each full lane whose newest trajectory was open, as its place marks
    that this ends."""
    converted: str = ""
    """With ``convert=True``, of a checkpoint of another sampler's buffer: how its rows are drawn now; else empty."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.steps} rows in {self.seconds:.2f} s"
        if self.given_up:
            text += f"; {self.given_up} more were saved: the oldest of full lanes mark where what was open ends"
        if self.dealt is not None:
            text += f"; {said_reshard(self.dealt)}"
        return f"{text}; {self.converted}" if self.converted else text


class Entry(NamedTuple):
    """A checkpoint of a series."""

    name: str
    step: int
    path: Path
    problem: Problem | None
    """Why it cannot be loaded; None: it can."""


def episodes_of(totals: Totals) -> dict[str, dict[str, int]]:
    """Episodes and steps by kind; without the kinds that there are none of."""
    counts = msgspec.to_builtins(totals)
    return {kind: counts[kind] for kind in KINDS if counts[kind]["episodes"]}


def note_restore(root: Path, report: RestoreReport, rank: int) -> None:
    """Log what was restored. Rank 0 also keeps in a file how trajectories were redistributed."""
    _log.info("restored %s", report)
    if report.dealt is None:
        return
    alone = len(report.dealt["shards"]) == len(report.dealt["targets"]) == 1
    for line in () if alone else reshard_lines(report.dealt):  # of one shard and one buffer, the report says all
        _log.info("%s: %s", report.name, line)
    if rank:
        return
    left = {reason: it["steps"] for reason, it in report.dealt["dropped"].items() if it["steps"]}
    if left:
        warn(_said_left(report, report.dealt["saved"]["steps"], left))
    folder = root / _FOLDER
    try:
        if not folder.is_dir():
            disk.make_folder(folder)
        said = msgspec.json.encode({"checkpoint": report.name, "step": report.step, **report.dealt})
        raw = msgspec.json.format(said, indent=1)
        disk.put(folder / f"load-{report.name}-{secrets.token_hex(4)}.json", raw)
    except OSError as error:  # the rows are there
        warn(f"restore: the report could not be written: {error}")


def _said_left(report: RestoreReport, saved: int, left: dict[str, int]) -> str:
    """What is said of steps that were dropped, by reason, of all that were saved."""
    said = f"restore: {report.path}: {count(sum(left.values()), 'step')} of {saved} were left out"
    over, more = left.pop("overflow", 0), ""
    counts = [f"{steps} of {reason} episodes" for reason, steps in left.items()]
    if over:
        counts.append(f"{count(over, 'step')} did not fit")
        more = ' Larger storages take more; overflow="fill" takes older trajectories that are shorter.'
    if set(left) - {"oversize"}:
        more += ' restore(incomplete={"open": "keep", "headless": "keep"}) keeps incomplete episodes.'
    return f"{said}: {', '.join(counts)}.{more}"


def forget_reports(root: Path, removed: Iterable[str]) -> None:
    """Remove what was noted of loads of checkpoints that are gone."""
    gone = tuple(f"load-{name}-" for name in removed)  # not patterns: pathlib and re would keep each
    if not gone:
        return
    for report in (root / _FOLDER).glob("load-*.json"):
        if report.name.startswith(gone):
            report.unlink(missing_ok=True)
