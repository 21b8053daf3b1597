"""Prints descriptions and reports as lines of text, fitted to the terminal: the main facts on one page, or all of them.

In a pipe lines are never wrapped, so that names and numbers can be read and copied whole.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
import msgspec

from engram._support.words import count, format_number, format_share, format_size
from engram.errors import EngramError
from engram.format.schema import Field
from engram.format.sizes import ShownField
from engram.saved.description import KINDS
from engram.saved.documents import Problem
from engram.saved.inspection import Entries, Histogram, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from engram.cli.doctor import Finding

REFUSED, MISUSED, INTERRUPTED, UNREAD = 1, 2, 130, 141
#: A space that lines are not broken at.
_TIED = "\xa0"
#: Most characters of a sentence that another library wrote.
_LONGEST = 400

#: What is installed to have a module, by its first name.
_EXTRAS = {"matplotlib": "plot", "pyarrow": "serve", "prometheus_client": "metrics", "gymnasium": "gym", "ray": "ray"}


class Refusal(click.ClickException):
    """A command cannot do what it was asked to. With ``--json``, also tells so as JSON.

    Args:
        message: one sentence: what was expected, what was found, where, and what to do.
    """

    exit_code = REFUSED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
        context = click.get_current_context(silent=True)
        self._given: Mapping[str, object] = {} if context is None else context.params

    def show(self, file: IO[str] | None = None) -> None:
        super().show(file)
        if self._given.get("as_json"):
            paths = (str(value) for value in self._given.values() if isinstance(value, Path))
            print_json({"problems": [problem(self.message, next(paths, None))]})


class Misuse(Refusal):
    """An argument is wrong."""

    exit_code = MISUSED


class Command(click.Command):
    """A command that ends as this module says."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()


class Commands(click.Group):
    """The group of all commands."""

    command_class = Command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        with _told_apart():  # where --help is answered
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    if isinstance(stream, io.TextIOWrapper):
                        stream.reconfigure(errors="backslashreplace")  # of a terminal that has not all characters
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with _told_apart():
            return super().invoke(ctx)


@contextlib.contextmanager
def refusing(extra: str | None = None, *, oserror: type[Refusal] = Misuse) -> Iterator[None]:
    """Ends the command if something below raises, with what that says.

    Args:
        extra: what to install if a module is missing. Default: what brings that module.
        oserror: what an ``OSError`` becomes: by default a path was wrong.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # of the output: the command did nothing wrong
    except ModuleNotFoundError as error:
        command = click.get_current_context().info_name
        module = (error.name or "").partition(".")[0]
        brings = extra or _EXTRAS.get(module)
        install = f'pip install "engram-replay[{brings}]"' if brings else f"pip install {module}"
        raise Refusal(f"engram {command} needs {module}: {install}") from error
    except EngramError as error:
        raise Refusal(str(error)) from error
    except OSError as error:
        raise oserror(error_text(error)) from error
    except MemoryError as error:
        raise Refusal(str(error) or "there is not enough memory.") from error
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise Refusal(str(error.args[0]) if error.args else type(error).__name__) from error


def error_text(error: OSError) -> str:
    """An error of the system as a sentence that begins with the path."""
    if error.strerror and error.filename is not None:
        other = "" if error.filename2 is None else f" to {os.fspath(error.filename2)}"
        return f"{_text(error.filename)}{other}: {error.strerror[:1].lower()}{error.strerror[1:]}."
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def problem(what: str, file: str | None = None, offset: int | None = None) -> dict[str, str | int | None]:
    """One entry of ``problems``, which has the same form in the JSON of all commands."""
    return {"file": file, "offset": offset, "what": what}


def print_json(found: object) -> None:
    """Print one JSON object over several lines."""
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


def table(
    rows: Sequence[Sequence[object]], *, right: Sequence[int] = (), headed: bool = False, indent: int = 0
) -> Iterator[str]:
    """Lines of columns, each as wide as its widest cell. A row of fewer cells ends with a text that goes on to the right.

    Args:
        rows: the cells of each.
        right: numbers of the columns that stand to the right.
        headed: the first row names the columns. Where the terminal is narrower than the table, the names then stand at the cells, which
            follow the first cell on lines of their own.
        indent: by how much the caller indents the lines.
    """
    names, *_ = cells = [[str(cell) for cell in row] for row in rows] or [[]]
    aligned = [row if len(row) == len(names) else row[:-1] for row in cells]
    widths = [max(len(row[n]) for row in aligned if n < len(row)) for n in range(len(names))]
    if headed and indent + sum(widths) + 2 * (len(names) - 1) > _columns():
        for first, *rest in cells[1:]:
            labels = names[1:] if len(rest) == len(names) - 1 else [""]
            yield first
            pairs = (f"{name} {text}".strip() for name, text in zip(labels, rest, strict=True) if text)
            yield "    " + ", ".join(pair.replace(" ", _TIED) if labels[0] else pair for pair in pairs)
        return
    for row in cells:
        texts = (f"{text:{'>' if n in right else '<'}{width}}" for n, (text, width) in enumerate(zip(row, widths)))  # noqa: B905
        yield "  ".join(texts).rstrip()


def _columns() -> int:
    """Of the terminal; no terminal has no end."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns


def _text(name: object) -> str:
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(name)


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    """Ctrl-C, and output that cannot be written, have exit codes of their own."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        sys.exit(INTERRUPTED)
    except OSError as error:
        unread = isinstance(error, BrokenPipeError)
        if not unread:
            click.echo(f"Error: standard output: {error_text(error)}", err=True)
        with contextlib.suppress(OSError, ValueError):  # what is left in the buffer has no reader: not even at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD if unread else REFUSED)


#: Entries of up to so many characters share a line.
_SHORT = 60
#: Ranks that are named, at most.
_MOST_RANKS = 16


def show_description(found: Entries) -> None:
    """Print all that ``describe`` found."""
    entries = {key: value for key, value in found.items() if key not in ("problems", "notes", "checkpoints")}
    lines = [*_block(entries)]
    if found["kind"] == "series":
        lines += ["", *checkpoint_lines(found)]
    if "votes" in found:
        lines += ["", *what_to_do(found)]
    echo(lines)
    show_problems(found)


def echo(lines: Iterable[str], *, damaged: bool = False) -> None:
    """Print lines, fitted to the terminal; what is damaged in red."""
    for line in fitted(lines):
        click.echo(click.style(line, fg="red", bold=True) if damaged else line)


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """Lines, of which one that is wider than the terminal goes on below its second column, or indented."""
    width = _columns()
    for line in lines:
        gap = line.rfind("  ", 0, width * 2 // 3)
        at = gap + 2 if gap >= 0 else 0
        below = " " * max(at, 4)
        wrapped = textwrap.wrap(
            line[at:], width, initial_indent=line[:at], subsequent_indent=below, break_on_hyphens=False
        )
        yield from (it.replace(_TIED, " ") for it in (wrapped if len(line) > width else [line]))


def stat_lines(found: Mapping[str, object], unused: Iterable[str] = ()) -> Iterator[str]:
    """A line for each number of ``engram stats``."""
    for name, value in found.items():
        yield f"{name:<24}  {'none: no process has the store open' if name in unused else format_number(value)}"


def show_findings(found: Sequence[Finding]) -> None:
    """Print what ``engram doctor`` found, and below each thing what to do."""
    width = max(len(it.name) for it in found)
    for it in found:
        echo([f"{it.status:<4} {it.name:<{width}}  {plain(it.value)}"], damaged=it.status == "BAD")
        if it.advice:
            echo([f"     {'':<{width}}  {plain(it.advice)}"])


def show_problems(found: Entries) -> None:
    """Print what is damaged, and notes, but for what the lines above say already."""
    problems, notes = told(found, "problems"), told(found, "notes")
    known: set[str] = set()
    if found["kind"] == "series":
        known |= {f"{found['path']}/{row['name']}: {row['status']}." for row in found["checkpoints"]}
    if "votes" in found:
        path = found["path"]
        no_checkpoint = f"{path}: undecided", f"{path}/manifest.json: expected a complete checkpoint"
        known |= {str(problem) for problem in problems if str(problem).startswith(no_checkpoint)}
    _say(notes=[note for note in notes if str(note) not in known])
    _say(problems=[problem for problem in problems if str(problem) not in known])


def show_report(report: Report) -> None:
    """Print what ``verify`` found."""
    _say(report.notes, report.problems)
    if report.good:
        echo([f"ok  {report.kind} {plain(report.path)} ({report.level})"])


def told(found: Entries, entry: str) -> list[Problem]:
    """The ``problems`` or ``notes`` of a description."""
    return [Problem(Path(it["file"]), it["what"], it["offset"]) for it in found[entry]]


def _say(notes: Iterable[object] = (), problems: Iterable[object] = ()) -> None:
    echo(f"note: {plain(note)}" for note in notes)
    echo((f"DAMAGED {plain(problem)}" for problem in problems), damaged=True)


def checkpoint_lines(found: Entries) -> Iterator[str]:
    """A line for each checkpoint of a series: its name, and what it holds, or why it is no checkpoint."""
    lines: list[Sequence[object]] = [("checkpoint", "ranks", "steps", "episodes", "bytes", "linked", "age")]
    for row in found["checkpoints"]:
        name, status = row["name"], row["status"]
        if status == "complete":
            counts = (format_number(row[it]) for it in ("world", "steps", "episodes"))
            sizes = (format_size(row[it]) for it in ("bytes", "bytes_linked"))
            lines.append((name, *counts, *sizes, format_age(row.get("age_s", 0.0))))
        else:
            of_attempt = status.startswith(("undecided", "aborted"))
            lines.append((name, plain(status if of_attempt else f"damaged: {status}")))
    yield from table(lines, right=range(1, 7), headed=True)


def what_to_do(found: Entries) -> Iterator[str]:
    """What can be done with an attempt that is no checkpoint."""
    by_vote: dict[str, list[int]] = {"yes": [], "no": [], "none": []}
    for vote in found["votes"]:
        by_vote[vote["vote"]].append(vote["rank"])
    if found["status"] != "undecided":
        yield "This is no checkpoint: the ranks gave it up."
    elif by_vote["no"]:
        yield f"This is no checkpoint: {_ranks(by_vote['no'])} voted against it."
    elif not by_vote["none"]:
        yield "All ranks have saved. The next start of the job makes this a checkpoint."
    else:
        yield f"Missing: {_ranks(by_vote['none'])}; dead, or still writing."
        if by_vote["yes"]:
            steps, episodes = (count(found["totals"][f"{what}s"], what) for what in ("step", "episode"))
            yield (
                f"There: {_ranks(by_vote['yes'])}, with {steps} of {episodes}. "
                f"restore(name={found['name']!r}, allow_partial=True) of a Checkpointer loads that."
            )


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


# ---- values as lines -------------------------------------------------------------------------------------------------


def _block(entries: Entries, indent: int = 0) -> Iterator[str]:
    """A line for each entry. What is too long for one line stands below its name, indented."""
    texts = {key: _short(key, value) for key, value in entries.items()}
    width = max((len(key) for key, text in texts.items() if text is not None), default=0)
    for key, value in entries.items():
        text = texts[key]
        if text is not None:
            yield f"{plain(key):<{width}}  {text}"
            continue
        yield plain(key)
        if isinstance(value, dict):
            yield from (f"  {line}" for line in _block(value, indent + 2))
            continue
        parts: list[Entries] = value
        if any(_short(name, part[name]) is None for part in parts for name in part):
            below: Iterable[str] = (line for part in parts for line in _marked(_block(part, indent + 4)))
        else:
            below = _table(parts, list(dict.fromkeys(name for part in parts for name in part)), indent + 2)
        yield from (f"  {line}" for line in below)


def _marked(lines: Iterator[str]) -> Iterator[str]:
    """As an entry of a list."""
    for number, line in enumerate(lines):
        yield f"{'  ' if number else '- '}{line}"


def _table(rows: Sequence[Entries], columns: Sequence[str], indent: int) -> Iterator[str]:
    """A line of names, and one for each row; numbers to the right."""
    cells = [[_short(column, row[column]) or "" if column in row else "" for column in columns] for row in rows]
    right = [n for n, column in enumerate(columns) if all(isinstance(row.get(column, 0), int | float) for row in rows)]
    yield from table((columns, *cells), right=right, headed=True, indent=indent)


def _short(key: str, value: object) -> str | None:
    """A value on one line; None: it needs more."""
    if isinstance(value, dict) and value:
        parts = {name: _short(name, part) for name, part in value.items()}
        text = ", ".join(f"{name} {part}" for name, part in parts.items())
        return None if None in parts.values() or len(text) > _SHORT else text
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return None
    if key == "edges" and isinstance(value, list):
        return ", ".join(f"{edge:.4g}" for edge in value)
    if key == "key" and isinstance(value, list):
        return plain(".".join(value))
    if "bytes" in key and type(value) is int:
        return format_size(value)
    return "–" if value in (None, "", [], (), {}) and key != "shape" else plain(format_number(value))


def plain(value: object) -> str:
    """A value as text, without characters that move a terminal's cursor: texts come from files."""
    text = str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def format_age(seconds: float) -> str:
    """A time span in its largest unit: ``40 s``, ``12 min``, ``5 h``, ``3 days``."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


#: Fields that are listed, at most.
_FIELDS = 8
#: Characters of the longest bar.
_BAR = 30


def show_short(found: Entries) -> None:
    """Print the main facts of what ``describe`` found."""
    kind = found["kind"]
    if kind == "part" or "votes" in found or _NEEDED.get(kind, "kind") not in found:
        # Of a part or an attempt there is no shorter form; of what is damaged, all that could be read.
        show_description(found)
        return
    lines = [f"{kind} {plain(found['path'])}"]
    if kind == "store":
        lines += _store(found)
    elif kind == "series":
        lines += ["", *checkpoint_lines(found)]
    else:
        lines += _checkpoint(found)
    echo(lines)
    show_problems(found)


#: What is there by kind, unless it is damaged.
_NEEDED = {"store": "rows", "checkpoint": "shards", "dump": "shards"}


def _store(store: Entries) -> Iterator[str]:
    if store["clean"]:
        state = "no process has it open"
    else:
        named = ", ".join(map(str, store["processes"][:8])) or "none is noted"
        state = f"open, or not closed in order; processes: {named}"
    rows, capacity, lanes = store["rows"], store["capacity"], store["lanes"]
    of_lanes = f", {lanes['count']} lanes of {lanes['fewest_rows']:,} to {lanes['most_rows']:,}" * (lanes["count"] > 1)
    facts = [
        ("created", store.get("created", "–")),
        ("written", _ago(store, "written")),
        ("state", state),
        ("rows", f"{rows:,} of {capacity:,} ({format_share(rows / capacity)}){of_lanes}"),
        ("size", f"{format_size(store['bytes'])}, {format_size(store['row_bytes'])} a row"),
    ]
    if (items := store.get("items")) is not None:
        used, free = ([lane[what] for lane in items["lanes"]] for what in ("bytes_used", "bytes_free"))
        least = f", {format_size(min(free))} in the fullest lane" * (len(free) > 1)
        evicted = f"{count(items['evicted_rows'], 'row')} evicted for newer ones"
        facts.append(("items", f"{format_size(sum(used))}, {format_size(sum(free))} free{least}; {evicted}"))
    if (slots := store.get("open_rows")) is not None:
        abandoned = sum(it["abandoned"] for it in slots["growing"])
        ended = f", {abandoned:,} of them of processes that have ended: rb.unsealed()" * (abandoned > 0)
        facts.append(("open rows", f"{len(slots['growing']):,} of {slots['slots']:,}{ended}"))
    yield from table(facts)
    yield from _fields(store["fields"])
    for index in store["indexes"]:
        yield from _priorities(index)


def _ago(found: Entries, name: str) -> str:
    """A moment, and how long ago it was."""
    return f"{found[name]}, {format_age(found['age_s'])} ago" if name in found else "–"


def _checkpoint(found: Entries) -> Iterator[str]:
    totals = found["totals"]
    episodes = ", ".join(f"{totals[kind]['episodes']:,} {kind}" for kind in KINDS if totals[kind]["episodes"])
    size, linked = format_size(totals["bytes_logical"]), format_size(totals["bytes_linked"])
    facts = [
        ("saved", _ago(found, "saved")),
        ("step", f"{found['step']:,} ({plain(found['trigger'])}), {count(found['world'], 'rank')}"),
        ("rows", f"{totals['steps']:,} in {count(totals['episodes'], 'episode')}"),
        ("episodes", episodes or "–"),
        ("size", f"{size} in all, {linked} of it also the parent's"),
    ]
    facts += [(name, plain(found[name])) for name in ("parent", "user") if found[name]]
    yield from table(facts)
    parts = found["shards"][0].get("parts", {}).values()
    of = "" if found["world"] == 1 else " of rank 0"
    for part in parts:
        if "geometry" in part:
            yield from _fields(part.get("fields", []))
    for part in parts:
        for index in ([part["priorities"]] if "priorities" in part else []) + part.get("indexes", []):
            yield from _priorities(index, of)


def _fields(fields: Sequence[Entries]) -> Iterator[str]:
    yield ""
    shown = [ShownField.of(field_of(it), 1) for it in fields[:_FIELDS]]
    names = [plain(".".join(it["key"])) for it in fields]
    rows = [(name, it.dtype, it.shape, it.row) for name, it in zip(names, shown, strict=False)]
    yield from table([("field", "dtype", "shape", "a row"), *rows], right=[3], headed=True)
    if len(fields) > _FIELDS:
        yield f"and {len(fields) - _FIELDS} more: --all lists them"


def field_of(described: Entries) -> Field:
    """The field that an entry of ``fields`` describes."""
    known = ("key", "dtype", "shape", "ragged")
    return msgspec.convert({name: described[name] for name in known if name in described}, Field)


def _priorities(index: Entries, of: str = "") -> Iterator[str]:
    """Of an index that has priorities."""
    if "histogram" not in index:
        return
    parameters = [f"{name} {index[name]:g}" for name in ("alpha", "beta") if name in index]
    name = f" {plain(index['name'])}" if "name" in index else ""
    yield ""
    yield f"priorities{name}{of}: {', '.join([*parameters, count(index['drawable'], 'row')])} can be drawn"
    yield from _bars(index["histogram"])


def _bars(histogram: Histogram) -> Iterator[str]:
    """A line for each bar of a histogram, as wide as the terminal has place."""
    edges, counts = histogram["edges"], histogram["counts"]
    if not counts:
        return
    labels = [f"{low:.3g} – {high:.3g}" for low, high in itertools.pairwise(edges)]
    numbers = [f"{number:,}" for number in counts]
    aside = max(map(len, labels)) + max(map(len, numbers)) + 6
    longest = max(min(_BAR, shutil.get_terminal_size().columns - aside), 4)
    bars = ["█" * round(number / max(counts) * longest) or ("▏" if number else "") for number in counts]
    yield from (f"  {line}" for line in table([*zip(labels, bars, numbers, strict=True)], right=[0, 2]))
