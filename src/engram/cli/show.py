"""Prints a description or a report as lines of text: the same on a terminal of any width and in a pipe.

Lines are never wrapped, so that names and numbers can be read and copied whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from rich.console import Console
from rich.text import Text

from engram._words import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from engram.format.verify import Report

#: Entries of up to so many characters share a line.
_SHORT = 60
#: Ranks that are named, at most.
_MOST_RANKS = 16


class _Row(msgspec.Struct):
    """A checkpoint of a series, or an attempt at one."""

    name: str
    status: str
    world: int = 0
    """0: it is none."""
    steps: int = 0
    episodes: int = 0
    bytes: int = 0
    bytes_linked: int = 0


class _Vote(msgspec.Struct):
    rank: int
    vote: Literal["yes", "no", "none"]


class _Count(msgspec.Struct):
    steps: int
    episodes: int


class _Attempt(msgspec.Struct):
    """An attempt that is no checkpoint."""

    name: str
    status: str
    votes: list[_Vote]
    totals: _Count


def show_description(found: dict[str, object]) -> None:
    """Print what ``describe`` found."""
    entries = {key: value for key, value in found.items() if key not in ("problems", "notes", "checkpoints")}
    lines = [*_block(entries)]
    problems, notes = (msgspec.convert(found[entry], list[str]) for entry in ("problems", "notes"))
    known: set[str] = set()
    if found["kind"] == "series":
        rows = msgspec.convert(found["checkpoints"], list[_Row])
        lines += ["", *_checkpoints(rows)]
        known |= {f"{found['path']}/{row.name}: {row.status}." for row in rows}
    if "votes" in found:
        lines += ["", *_what_to_do(msgspec.convert(found, _Attempt))]
        no_checkpoint = (
            f"{found['path']}: undecided",
            f"{found['path']}/manifest.json: expected a complete checkpoint",
        )
        known |= {problem for problem in problems if problem.startswith(no_checkpoint)}
    console = Console(highlight=False)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    _say(console, "note: ", (note for note in notes if note not in known), "")
    _say(console, "DAMAGED ", (problem for problem in problems if problem not in known), "bold red")


def show_report(report: Report) -> None:
    """Print what ``verify`` found."""
    console = Console(highlight=False)
    _say(console, "note: ", report.notes, "")
    _say(console, "DAMAGED ", report.problems, "bold red")
    if report.good:
        console.print(Text(f"ok  {report.kind} {report.path} ({report.level})"), soft_wrap=True)


def _say(console: Console, what: str, each: Iterable[object], style: str) -> None:
    for it in each:
        console.print(Text(f"{what}{_plain(it)}", style=style), soft_wrap=True)


def _checkpoints(rows: Sequence[_Row]) -> Iterator[str]:
    """A line for each: its name, and what it holds, or why it is no checkpoint."""
    columns = ("ranks", "steps", "episodes", "bytes", "linked")
    whole = ((row.world, row.steps, row.episodes, row.bytes, _size(row.bytes_linked)) for row in rows if row.world)
    header, *said = _table([dict(zip(columns, values, strict=True)) for values in whole], columns)
    width = max((len(row.name) for row in rows), default=0)
    yield f"{'checkpoint':<{width}}  {header}"
    rest = iter(said)
    for row in rows:
        status = row.status if row.status.startswith(("undecided", "aborted")) else f"damaged: {row.status}"
        yield f"{row.name:<{width}}  {next(rest) if row.world else _plain(status)}"


def _what_to_do(attempt: _Attempt) -> Iterator[str]:
    """What can be done with an attempt that is no checkpoint."""
    by_vote: dict[str, list[int]] = {"yes": [], "no": [], "none": []}
    for vote in attempt.votes:
        by_vote[vote.vote].append(vote.rank)
    if attempt.status != "undecided":
        yield "This is no checkpoint: the ranks gave it up."
    elif by_vote["no"]:
        yield f"This is no checkpoint: {_ranks(by_vote['no'])} voted against it."
    elif not by_vote["none"]:
        yield "All ranks have saved. The next start of the job makes this a checkpoint."
    else:
        yield f"Missing: {_ranks(by_vote['none'])}; dead, or still writing."
        if by_vote["yes"]:
            steps, episodes = count(attempt.totals.steps, "step"), count(attempt.totals.episodes, "episode")
            yield (
                f"There: {_ranks(by_vote['yes'])}, with {steps} of {episodes}. "
                f"restore(name={attempt.name!r}, allow_partial=True) of a Checkpointer loads that."
            )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


# ---- values as lines -------------------------------------------------------------------------------------------------


def _block(entries: Mapping[str, object]) -> Iterator[str]:
    """A line for each entry. What is too long for one line stands below its name, indented."""
    texts = {key: _short(key, value) for key, value in entries.items()}
    width = max((len(key) for key, text in texts.items() if text is not None), default=0)
    for key, value in entries.items():
        text = texts[key]
        if text is not None:
            yield f"{_plain(key):<{width}}  {text}"
            continue
        yield _plain(key)
        if isinstance(value, dict):
            yield from (f"  {line}" for line in _block(value))
            continue
        parts = msgspec.convert(value, list[dict[str, object]])
        if any(_short(name, part[name]) is None for part in parts for name in part):
            below: Iterable[str] = (line for part in parts for line in _marked(_block(part)))
        else:
            below = _table(parts, list(dict.fromkeys(name for part in parts for name in part)))
        yield from (f"  {line}" for line in below)


def _marked(lines: Iterator[str]) -> Iterator[str]:
    """As an entry of a list."""
    for number, line in enumerate(lines):
        yield f"{'  ' if number else '- '}{line}"


def _table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> Iterator[str]:
    """A line of names, and one for each row; numbers to the right."""
    cells = [[_short(column, row[column]) or "" if column in row else "" for column in columns] for row in rows]
    right = [
        all(isinstance(row.get(column, 0), int | float) or column == "linked" for row in rows) for column in columns
    ]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        texts = (f"{text:{'>' if to else '<'}{width}}" for text, width, to in zip(line, widths, right, strict=True))
        yield "  ".join(texts).rstrip()


def _short(key: str, value: object) -> str | None:
    """A value on one line; None: it needs more."""
    if isinstance(value, dict) and value:
        parts = {name: _short(name, part) for name, part in value.items()}
        text = ", ".join(f"{name} {part}" for name, part in parts.items())
        return None if None in parts.values() or len(text) > _SHORT else text
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return None
    if key == "key" and isinstance(value, list):
        return _plain(".".join(value))
    if "bytes" in key and type(value) is int:
        return _size(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value in (None, "", [], (), {}) and key != "shape" else _plain(value)


def _plain(value: object) -> str:
    """A value as text, without characters that move a terminal's cursor: texts come from files."""
    text = str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
