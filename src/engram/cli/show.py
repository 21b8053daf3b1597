"""Showing a description and a report on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from engram.format.verify import Report

__all__ = ["show_description", "show_report"]

MAX_COLUMNS = 9


def show_description(found: dict[str, Any]) -> None:
    """Print what ``describe`` found."""
    rows = {key: value for key, value in found.items() if key not in ("problems", "notes")}
    console = Console(highlight=False)
    console.print(_value(rows))
    for note in found["notes"]:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for problem in found["problems"]:
        console.print(Text(f"DAMAGED {problem}", style="bold red"), soft_wrap=True)


def show_report(report: Report) -> None:
    """Print what ``verify`` found."""
    console = Console(highlight=False)
    for note in report.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for problem in report.problems:
        console.print(Text(f"DAMAGED {problem}", style="bold red"), soft_wrap=True)
    if report.good:
        console.print(Text(f"ok  {report.kind} {report.path} ({report.level})"), soft_wrap=True)


def _value(value: Any) -> RenderableType:
    if isinstance(value, dict) and value:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for key, part in value.items():
            table.add_row(str(key), Text(_size(part)) if key.endswith("bytes") and part else _value(part))
        return table
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        if any(
            isinstance(part.get(key), dict | list) and key not in ("key", "shape") for part in value for key in part
        ):
            return Group(*(_value(part) for part in value))
        return _rows(value)
    if isinstance(value, float):
        return Text(f"{value:.6g}")
    return Text("–" if value in (None, "", [], (), {}) else str(value))


def _rows(rows: list[dict[str, Any]]) -> Table:
    """Dicts with about the same keys, one a line."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(column, row.get(column)) for column in columns))
    return table


def _cell(column: str, value: Any) -> Text:
    if column == "key" and isinstance(value, list):
        return Text(".".join(value))
    if "bytes" in column and isinstance(value, int):
        return Text(_size(value))
    return Text("" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value))


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
