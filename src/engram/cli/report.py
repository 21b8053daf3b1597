"""``engram plot`` and ``engram report``: figures of what lies in a folder, as a picture or on one page."""

from __future__ import annotations

import base64
import io
import warnings
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from engram._support.words import count, format_number, format_share, format_size
from engram.cli.show import told
from engram.errors import EngramError
from engram.format.sizes import ShownField
from engram.saved.inspection import describe, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from engram.buffer import ReplayBuffer

#: Figures that need no time to watch, in the order of the page.
_AT_ONCE = ("priority", "weights", "age", "usage", "returns", "map", "ratio")
_LACKS = (RuntimeError, ValueError, KeyError)
#: What keeps rows from being opened, or a file from being drawn.
REFUSALS = (EngramError, RuntimeError, TypeError, ValueError)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ddd }
h1, h2, p { overflow-wrap: anywhere } h3 { font-size: 1rem; margin-bottom: .3rem }
table { border-collapse: collapse } th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #eee }
.wide { overflow-x: auto } .figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem }
.figures img { width: 100%; height: auto } .less { color: #777 } .bad { color: #b00020 }
.fill { background: #e8e8e8; height: .8rem; max-width: 30rem } .fill div { background: #1f77b4; height: 100% }
"""


def drawable(path: Path) -> str:
    """Its kind, if rows can be drawn of it; needs no torch. Raises as :func:`opened`, but for what opening raises."""
    kind = kind_of(path)
    if kind not in ("store", "series"):
        raise ValueError(f"{path}: expected a live store or a folder of checkpoints, got: {kind}.")
    _figure(1, 1)
    return kind


def opened(path: Path) -> ReplayBuffer:
    """The rows of a store, or of the newest checkpoint of a series, to be read only.

    Raises:
        FileNotFoundError: nothing of ours lies there. ValueError: something else of ours.
        OSError, :data:`REFUSALS`: as ``ReplayBuffer.open`` and ``follow``.
    """
    kind = drawable(path)
    from engram.buffer.tensordict import ReplayBuffer  # by which every class of buffers is known

    if kind == "store":
        return ReplayBuffer.open(path, readonly=True)
    followed: ReplayBuffer = ReplayBuffer.follow(path, timeout=0.1)
    return followed


def picture(path: Path, what: Sequence[str], form: str) -> bytes:
    """Figures of what lies at ``path``, as one picture. ``what``: empty: all that there are, except those that take time.

    Raises:
        OSError, :data:`REFUSALS`: as :func:`opened`; a figure is asked for by name, and there is nothing to show; no such form.
        ModuleNotFoundError: matplotlib is missing.
    """
    with opened(path) as buffer:
        names = what or [name for name, (drawn, _) in _figures(buffer).items() if drawn is not None]
        if not names:
            buffer.plot.age()  # raises: it is empty
        figure = _figure(2 if len(names) > 1 else 1, -(-len(names) // 2))
        for number, name in enumerate(names):
            _draw(buffer, name, figure.add_subplot(-(-len(names) // 2), min(len(names), 2), number + 1))
    figure.suptitle(str(path).replace("$", r"\$"))
    return _encoded(figure, form)


def page(path: Path) -> str:
    """A page, in HTML, about a store, a checkpoint, a series, or a folder in which such lie.

    Raises ``FileNotFoundError``: nothing of ours lies there. ``ModuleNotFoundError``: matplotlib is missing.
    """
    paths = [path] if _is_ours(path) else sorted(it for it in path.iterdir() if it.is_dir() and _is_ours(it))
    if not paths:
        kind_of(path)  # raises: it says what was expected
    _figure(1, 1)  # raises before anything is read
    body = "".join(part for each in paths for part in _about(each))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(str(path))}</title><style>{_STYLE}</style></head><body><h1>{escape(str(path.resolve()))}</h1>"
        f'<p class="less">{now}</p>{body}</body></html>\n'
    )


# ---- what is on the page ---------------------------------------------------------------------------------------------


def _about(path: Path) -> Iterator[str]:
    found = describe(path)
    yield f"<h2>{escape(path.name or str(path))} <span class='less'>({escape(str(found['kind']))})</span></h2>"
    for name in ("problems", "notes"):
        style = "bad" if name == "problems" else "less"
        yield from (f"<p class='{style}'>{escape(str(it))}</p>" for it in told(found, name))
    plain = {name: value for name, value in found.items() if not isinstance(value, list | dict)}
    hidden = ("path", "kind", "sha256")
    yield _table([], [(name, _cell(name, value)) for name, value in plain.items() if name not in hidden])
    for name in ("lanes", "totals"):
        if isinstance(said := found.get(name), dict):
            yield _table(said, [[_cell(key, value) for key, value in said.items()]], name)
    for name in ("checkpoints", "indexes"):
        yield _records(name, found.get(name))
    if found["kind"] not in ("store", "series"):
        yield _records("fields", found.get("fields"))
        return
    try:
        with opened(path) as buffer:
            yield from _rows(buffer)
    except (OSError, *REFUSALS) as error:
        yield f"<p class='bad'>The rows cannot be opened: {escape(str(error))}</p>"
        yield _records("fields", found.get("fields"))


def _rows(buffer: ReplayBuffer) -> Iterator[str]:
    """Of rows that can be read: how full, fields, limits, figures."""
    stats, memory = buffer.stats(), buffer.storage.memory
    size, capacity = int(stats["size"]), int(stats.get("capacity", 0))
    share = size / capacity if capacity else 0
    yield f"<h3>{size:,} of {count(capacity, 'row')} live ({format_share(share)})</h3>"
    yield f"<div class='fill'><div style='width:{share:.1%}'></div></div>"
    yield f"<p>{escape(repr(buffer.sampler))}<br>{escape(repr(buffer.writer))}</p>"
    if memory is not None:
        schema = memory.schema
        fields = [(".".join(it.key), ShownField.of(it, capacity, schema.lanes)) for it in schema.fields]
        rows = [(name, it.dtype, it.shape, it.row, format_size(it.nbytes)) for name, it in fields]
        yield _table(("field", "dtype", "shape", "a row", "in all"), rows, "fields")
    if buffer.limits:
        names = {name: value for name, value in stats.items() if "limit" in name or "wait" in name}
        yield _table([], [[repr(limit)] for limit in buffer.limits], "limits")
        yield _table([], [(name, format_number(value)) for name, value in names.items()])
    figures = _figures(buffer)
    yield "<h3>figures</h3><div class='figures'>"
    for name, (drawn, _) in figures.items():
        if drawn is not None:
            data = base64.b64encode(_encoded(drawn, "png")).decode()
            yield f"<img alt='{name}' src='data:image/png;base64,{data}'>"
    yield "</div>"
    for name, (_, why) in figures.items():
        if why:
            yield f"<p class='less'>No {name}: {escape(why.partition(': ')[2] or why)}</p>"


def _records(name: str, records: object) -> str:
    """A table of dictionaries; nothing, if there are none."""
    rows = [row for row in (records if isinstance(records, list) else []) if isinstance(row, dict)]
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], dict)))
    return _table(columns, [[_cell(key, row.get(key, "")) for key in columns] for row in rows], name) if rows else ""


def _table(header: Iterable[object], rows: Iterable[Iterable[object]], title: str = "") -> str:
    head = "".join(f"<th>{escape(str(name))}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<h3>{escape(title)}</h3>" if title else ""
    return f"{above}<div class='wide'><table>{f'<tr>{head}</tr>' if head else ''}{body}</table></div>"


def _cell(name: str, value: object) -> str:
    if "bytes" in name and isinstance(value, int):
        return format_size(value)
    if isinstance(value, list):
        return ".".join(value) if name == "key" else str(value)
    return format_number(value)


# ---- figures ---------------------------------------------------------------------------------------------------------


def _figures(buffer: ReplayBuffer) -> dict[str, tuple[Figure | None, str]]:
    """Each figure that needs no time, or why there is none."""
    found: dict[str, tuple[Figure | None, str]] = {}
    for name in _AT_ONCE:
        figure = _figure(1, 1)
        try:
            _draw(buffer, name, figure.add_subplot())
        except _LACKS as error:
            found[name] = None, str(error)
        else:
            found[name] = figure, ""
    return found


def _draw(buffer: ReplayBuffer, name: str, axes: Axes) -> None:
    draw: Callable[..., Axes] = getattr(buffer.plot, name)
    draw(ax=axes)


def _figure(columns: int, lines: int) -> Figure:
    """An empty figure, of no display. Raises ``ModuleNotFoundError``: matplotlib is missing."""
    from matplotlib.figure import Figure

    return Figure(figsize=(7 * columns, 4 * lines), layout="constrained")


def _encoded(figure: Figure, form: str) -> bytes:
    into = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name of a folder that the font cannot write
        figure.savefig(into, format=form, dpi=110)
    return into.getvalue()


def _is_ours(path: Path) -> bool:
    try:
        kind_of(path)
    except FileNotFoundError:
        return False
    return True
