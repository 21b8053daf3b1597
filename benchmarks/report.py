"""Showing and keeping what was measured: a table, JSON files, two charts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.claims import Comparison, Row
from benchmarks.rivals import STORAGES, Libraries
from benchmarks.timing import Spread

LIBRARIES = ("engram", "TorchRL", "cpprb")
WIDTH = 165
"""Columns where there is no terminal to ask."""

_COLOURS = {"engram": "#0072b2", "TorchRL": "#e69f00", "cpprb": "#999999"}
_WHISKER = {"lw": 0.8, "capsize": 2, "capthick": 0.8, "ecolor": "#333333"}
_FOOT: dict[str, Any] = {"ha": "center", "fontsize": 8.5, "color": "#444444"}
_VERDICTS = {"aim": "[green]aim[/]", "yes": "[green]yes[/]", "no": "[bold red]no[/]", "": ""}
_LEGEND = """\
Times: median of the blocks, per call. Ratios: median and quartiles of the ratios of neighbouring blocks.
“12×”: 12 times as fast; “0.98 of”: engram takes 0.98 of their time. One thread, unless another number is named."""
_CAPTION = """\
Every bar uses the storage named under it. Rows: a, b: float32 [3, 4], c: bool (tensor: a alone). One thread.
The script behind the original figure used ListStorage for its TensorDict bars, despite their labels.
cpprb holds and returns dicts of NumPy arrays, also in the TensorDict bars. Whiskers: quartiles of blocks."""
#: What a line is called, its colour and marker, and how far below or above their points its numbers stand.
_SCALING = {
    "scaling/slices": ("a sample of 8 windows of 32 steps", "#009e73", "s", 5),
    "scaling/tree": ("256 updates and 256 draws of the priority tree alone", "#0072b2", "o", -13),
}


def console() -> Console:
    """A console that stays readable in a log: no colours, fixed width."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def print_table(out: Console, rows: Sequence[Row], libraries: Libraries, share: float) -> None:
    """All rows with their verdicts, then the numbered notes."""
    table = Table(box=box.SIMPLE_HEAD if out.is_terminal else box.ASCII2)
    table.add_column("what", overflow="fold")
    for name in LIBRARIES:
        table.add_column(f"{name} µs", justify="right", no_wrap=True)
    table.add_column("ratio \\[quartiles]", overflow="fold")
    for name in ("floor", "aim", "met?"):
        table.add_column(name, no_wrap=True)
    notes: list[str] = []
    for row in rows:
        cells = [_cell(row, name, libraries, notes) for name in LIBRARIES]
        lines = [_comparison(row, one) for one in row.comparisons]
        table.add_row(row.what, *cells, *(lines[0] if lines else ()))
        for line in lines[1:]:
            table.add_row("", "", "", "", *line)
    out.print(table)
    for number, note in enumerate(notes, 1):
        out.print(f"({number}) {note}", markup=False)
    for library in libraries.values():
        for note in library.notes:
            out.print(f"Note: {note}", markup=False)
    out.print(_LEGEND, markup=False)
    missed = [one for row in rows for one in row.comparisons if one.verdict == "no"]
    judged = [one for row in rows for one in row.comparisons if one.floor is not None]
    quick = " (--quick: few blocks, so read the quartiles)" if share < 1 else ""
    out.print(f"{len(judged) - len(missed)} of {len(judged)} floors met{quick}.", markup=False)


def _cell(row: Row, name: str, libraries: Libraries, notes: list[str]) -> str:
    """A number, or a dash, with the mark of the note that explains it."""
    note = row.notes.get(name)
    if libraries[name].module is None:
        note = f"{name} is not installed."
    text = _number(row.spreads[name].median, row.unit) if name in row.spreads else "—"
    if note is None:
        return text
    if note not in notes:
        notes.append(note)
    return f"{text} ({notes.index(note) + 1})"


def _number(value: float, unit: str) -> str:
    if unit == "rows/s":
        return f"{value / 1e6:.2f} M/s"
    if unit == "B/row":
        return f"{value:.2f} B"
    if unit in ("s", "ms", "MB", "MiB", "%"):
        return f"{value:.1f} {unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _with_unit(value: float, unit: str) -> str:
    return f"{_number(value, unit)} µs" if unit == "µs" else _number(value, unit)


def _comparison(row: Row, one: Comparison) -> tuple[str, str, str, str]:
    """Ratio, floor, aim and verdict of one comparison."""
    floor = str(one.floor) if one.floor else ""
    aim = f"{one.floor.aim:g}" if one.floor and one.floor.aim else ""
    return _ratio(row, one), floor, aim, _VERDICTS[one.verdict]


def _ratio(row: Row, one: Comparison) -> str:
    middle, low, high = one.measured.median, one.measured.low, one.measured.high
    if one.kind == "value":
        if row.unit in ("s", "ms", "µs", "MB", "MiB", "%", "×", "poll_every"):
            return f"{middle:.1f} \\[{low:.1f}–{high:.1f}] {row.unit}"
        return f"{middle:.2f} bytes per row"
    theirs = "" if one.against in LIBRARIES else f" ({_with_unit(row.spreads[one.against].median, row.unit)})"
    if one.kind == "times":
        return f"{_times(middle)}× \\[{_times(low)}–{_times(high)}] {one.against}{theirs}"
    digits = 2 if middle >= 0.1 else 3
    return f"{middle:.{digits}f} \\[{low:.{digits}f}–{high:.{digits}f}] of {one.against}{theirs}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def save(folder: Path, name: str, rows: Sequence[Row], header: dict[str, Any]) -> Path:
    """``<folder>/<name>.json``: the header, and every row with all its blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {**header, "benchmark": name, "rows": [_row(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _row(row: Row) -> dict[str, Any]:
    sides = {
        name: _spread(spread) | ({"blocks_us": [round(us, 3) for us in row.blocks_us[name]]} if row.blocks_us else {})
        for name, spread in row.spreads.items()
    }
    return {
        "key": row.key,
        "what": row.what,
        "unit": row.unit,
        "calls_per_block": row.calls,
        "sides": sides,
        "comparisons": [
            {
                "against": one.against,
                "kind": one.kind,
                **_spread(one.measured),
                "floor": one.floor.bound if one.floor else None,
                "aim": one.floor.aim if one.floor else None,
                "met": one.verdict in {"yes", "aim"} if one.floor else None,
            }
            for one in row.comparisons
        ],
        "notes": row.notes,
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {name: round(getattr(spread, name), 3) for name in ("median", "low", "high")}


def draw_sampling(folder: Path, rows: Sequence[Row], libraries: Libraries, machine: str) -> Path:
    """``<folder>/sampling.png``: the nine cells of the figure.

    One panel per storage, each with a linear axis from zero: on a shared one the lists would flatten
    everything else, and on a logarithmic one the length of a bar would mean nothing. The two tensor storages
    share theirs.
    """
    import matplotlib as mpl  # here, so that everything but the charts works without it

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    found = {row.key: row for row in rows}
    figure, axes = plt.subplots(1, 3, figsize=(13, 5.6))
    panels = [[found[f"sample/{kind}/{storage}"] for kind in ("tensor", "dict", "tensordict")] for storage in STORAGES]
    tops = [max((spread.high for row in cells for spread in row.spreads.values()), default=1) for cells in panels]
    tops[1] = tops[2] = max(tops[1:])
    for axis, cells, label, top in zip(axes, panels, STORAGES.values(), tops, strict=True):
        _panel(axis, cells)
        axis.set_ylim(0, 1.1 * top)
        axis.set_title(label, y=-0.16, fontsize=11)
    axes[0].set_ylabel("µs per sample of 128 rows (less is better)")
    handles = [Patch(color=_COLOURS[name]) for name in LIBRARIES]
    versions = [f"{name} {libraries[name].version}" for name in LIBRARIES]
    axes[0].legend(handles, versions, frameon=False, loc="upper left")
    figure.suptitle(f"Drawing 128 of 100,000 rows: {', '.join(versions)}", fontsize=13)
    figure.text(0.5, 0.012, f"{_CAPTION}\n{machine}", **_FOOT)
    figure.subplots_adjust(left=0.06, right=0.99, top=0.91, bottom=0.27, wspace=0.16)
    path = folder / "sampling.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def _panel(axis: Any, cells: Sequence[Row]) -> None:
    """Three groups of bars: median, quartiles as whiskers, the number above; a dash where there is none."""
    width = 0.28
    for group, row in enumerate(cells):
        for offset, name in enumerate(LIBRARIES):
            place, spread = group + (offset - 1) * width, row.spreads.get(name)
            if spread is None:
                height, text = 0.0, "—"
            else:
                height, text = spread.high, _number(spread.median, "µs")
                whisker = [[spread.median - spread.low], [spread.high - spread.median]]
                axis.bar(place, spread.median, width, color=_COLOURS[name], yerr=whisker, error_kw=_WHISKER)
            above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axis.annotate(text, (place, height), **above)
    axis.set_xticks(range(len(cells)), ["tensor", "dict", "TensorDict"])
    axis.set_xlim(-0.6, len(cells) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="x", length=0)


def draw_scaling(folder: Path, rows: Sequence[Row], version: str, machine: str) -> Path:
    """``<folder>/scaling.png``: times against the number of rows, whose axis is logarithmic; that of times begins at zero."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    found = {row.key: row for row in rows}
    figure, axis = plt.subplots(figsize=(9, 5))
    for key, (label, colour, marker, offset) in _SCALING.items():
        spreads = found[key].spreads
        sizes = [float(side.removesuffix(" rows")) for side in spreads]
        medians = [spread.median for spread in spreads.values()]
        whiskers = [
            [spread.median - spread.low for spread in spreads.values()],
            [spread.high - spread.median for spread in spreads.values()],
        ]
        axis.errorbar(sizes, medians, whiskers, label=label, color=colour, marker=marker, **_WHISKER)
        for size, median in zip(sizes, medians, strict=True):
            beside = {"xytext": (6, offset), "textcoords": "offset points", "fontsize": 8}
            axis.annotate(_number(median, "µs"), (size, median), **beside)
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows in the buffer")
    axis.set_ylabel("µs (less is better)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.suptitle(f"What a batch costs as the buffer grows: engram {version}", fontsize=13)
    figure.text(0.5, 0.012, f"One thread. Whiskers: quartiles of blocks.\n{machine}", **_FOOT)
    figure.subplots_adjust(left=0.08, right=0.97, top=0.92, bottom=0.2)
    path = folder / "scaling.png"
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path
