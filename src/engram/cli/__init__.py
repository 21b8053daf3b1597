"""The command line: ``engram doctor``, ``inspect``, ``plot``, ``report``, ``verify``, ``reshard``, ``plan``, ``serve``,
``health``, ``drain``, ``promote``, ``stats``, ``top``, ``import``, ``export``.

It starts without torch; each command imports what it needs. ``ending`` says how commands end.
"""

from __future__ import annotations

import contextlib
import re
import stat
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from engram._support.version import __version__
from engram._support.words import format_number
from engram.cli import show as shown
from engram.cli.show import Commands, Misuse, Refusal, echo, print_json, problem, refusing, stat_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Unpack

    from engram.buffer.configuration import Reaching
    from engram.cli.reshard import Resharding
    from engram.inspect.metrics import HasStats

__all__ = ["main"]

#: What ``engram plot`` draws.
_FIGURES = ("priority", "weights", "age", "usage", "returns", "map", "ratio", "throughput")
#: What ``engram import`` reads, and ``engram export`` writes.
_IMPORTED = ("hdf5", "lance", "lerobot", "minari", "numpy", "parquet", "sb3", "torchrl")
_EXPORTED = ("hdf5", "lerobot", "minari", "parquet", "torchrl")
_PATH, _FILE = click.Path(path_type=Path), click.Path(dir_okay=False)
_OUT = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(min=1)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="engram")
def main() -> None:
    """Experience replay that survives a crash: show and check stores and checkpoints.

    Every command exits with 0 if all is well, 1 if it found damage or cannot do what was asked, 2 if an argument is wrong, 130 after
    Ctrl-C, and 141 if the reader of its output has gone.
    """


@main.command()
@click.argument("directory", required=False, type=_PATH)
@click.option(
    "--load", is_flag=True, help="Also load torch, which takes seconds: whether it works, and what a GPU can do."
)
@_JSON
def doctor(directory: Path | None, load: bool, as_json: bool) -> None:
    """Judge what engram finds on this machine: Python, torch, the native core, memory, limits, extras.

    With DIRECTORY, also say on which file system it lies, measure its disk for two seconds, and say how many batches per second to
    expect of the store in it, or of one that would be there.

    "note" marks what makes something slower or unavailable, with the remedy; "BAD" what keeps engram from working.

    Exit code: 0, 1 if engram cannot work here, 2 if there is no DIRECTORY.
    """
    with refusing():
        from engram.cli.doctor import disk_speed, findings

        found = findings(None if directory is None else _folder(directory), load=load)
        if directory is not None:
            found += disk_speed(directory)
    bad = [it for it in found if it.status == "BAD"]
    if as_json:
        checks = [it._asdict() for it in found]
        problems = [problem(f"{it.name}: {it.value}. {it.advice}".strip()) for it in bad]
        print_json({"good": not bad, "checks": checks, "problems": problems})
    else:
        shown.show_findings(found)
    sys.exit(1 if bad else 0)


@main.command()
@click.argument("path", type=_PATH)
@click.option("--all", "everything", is_flag=True, help="Everything: all fields, parts, ranks and counts.")
@_JSON
def inspect(path: Path, everything: bool, as_json: bool) -> None:
    """Show what is at PATH: a checkpoint, a folder of checkpoints, a dump, a part of one, or a live store.

    Says when it was written, how full it is, and its fields, and draws how priorities are distributed. Reads descriptions, tables and
    priorities, but no rows, and changes nothing. JSON has everything.

    Exit code: 0, 1 if something is damaged, 2 if PATH holds nothing of engram's.
    """
    with refusing():
        from engram.saved.inspection import describe

        found = describe(_folder(path))
    if as_json:
        print_json(found)
    elif everything:
        shown.show_description(found)
    else:
        shown.show_short(found)
    sys.exit(1 if found["problems"] else 0)


@main.command()
@click.argument("path", type=_PATH)
@click.option("--out", required=True, type=_OUT, help="A .png, .svg or .pdf file.")
@click.option(
    "--what", multiple=True, type=click.Choice(_FIGURES), help="Figure to draw; may be repeated. Default: all."
)
def plot(path: Path, out: Path, what: tuple[str, ...]) -> None:
    """Draw what is in the live store at PATH, or in the newest checkpoint of a folder of checkpoints.

    Without --what, draws every figure for which the store has data, except throughput, which watches the store for two seconds.
    Processes that use the store go on. Rows of a checkpoint are copied to a temporary folder first.

    Exit code: 0, 1 if a figure cannot be drawn, 2 if PATH holds nothing of engram's or FILE cannot be written.
    """
    with refusing("plot"):
        from engram.cli.report import drawable, picture

        _check_out(out, ".png", ".svg", ".pdf")
        rows = _known(path) if drawable(_folder(path)) == "store" else {}
        of = f", {format_number(rows['size'])} of {format_number(rows['capacity'])} rows," if "size" in rows else ""
        echo([f"drawing {', '.join(what) or 'all figures'} of {path}{of} into {out}"])
        out.write_bytes(picture(_folder(path), what, out.suffix[1:].lower() or "png"))


@main.command()
@click.argument("path", type=_PATH)
@click.option("--out", required=True, type=_OUT, help="An .html file.")
def report(path: Path, out: Path) -> None:
    """Write one page about what is at PATH: a store, checkpoints, or the folder of a run, in which such lie.

    The page says fields, sizes, indexes, limits, checkpoints and what is damaged, and shows figures of the rows. It is one
    file, which loads nothing from elsewhere.

    Exit code: 0, 1 if the page cannot be made, 2 if PATH holds nothing of engram's or FILE cannot be written.
    """
    with refusing("plot"):
        from engram.cli.report import page

        _check_out(out, ".html", ".htm")
        out.write_bytes(page(_folder(path)).encode())


@main.command()
@click.argument("path", type=_PATH)
@click.option(
    "--level",
    type=click.Choice(["meta", "read", "full"]),
    default="full",
    help="meta: descriptions and sizes of files. read: also every block. full: also that no other file is there.",
)
@_JSON
def verify(path: Path, level: Literal["meta", "read", "full"], as_json: bool) -> None:
    """Check a checkpoint, a folder of checkpoints, a dump, a part of one, or a live store. Changes nothing.

    An attempt that was aborted, or that some ranks have not voted on yet, is reported as a note, not as damage.

    Exit code: 0 if everything is good, 1 if something is damaged, 2 if PATH holds nothing of engram's.
    """
    with refusing():
        from engram.saved import inspection as verifying

        report = verifying.verify(_folder(path), level)
    if as_json:
        found = {
            "path": str(path),
            "kind": report.kind,
            "level": report.level,
            "good": report.good,
            "problems": [it.entry() for it in report.problems],
            "notes": [it.entry() for it in report.notes],
        }
        print_json(found)
    else:
        shown.show_report(report)
    sys.exit(0 if report.good else 1)


@main.command()
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option("--ranks", type=_COUNT, required=True, help="Number of ranks that will load the checkpoint.")
@click.option("--lanes", type=_COUNT, required=True, help="Number of lanes of each rank.")
@click.option("--capacity", type=_COUNT, help="Rows of each rank. Default: the same total as in SOURCE.")
@click.option(
    "--open",
    "open_ones",
    type=click.Choice(["drop", "truncate", "keep"]),
    default="drop",
    help="What to do with trajectories that lack a last step.",
)
@click.option(
    "--headless",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    help="What to do with trajectories that lack their first steps.",
)
@click.option(
    "--overflow",
    type=click.Choice(["cut", "fill"]),
    default="cut",
    help="If not all fit: keep only the newest (cut), or also older, shorter ones where they fit (fill).",
)
@click.option(
    "--max-drop-fraction",
    type=click.FloatRange(0, 1),
    default=0.5,
    help="Largest fraction of the steps that may be dropped as incomplete, or as longer than a lane.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@_JSON
def reshard(
    source: Path, target: Path, ranks: int, lanes: int, dry_run: bool, as_json: bool, **how: Unpack[Resharding]
) -> None:
    """Redistribute the trajectories of SOURCE over other ranks and lanes, into a new checkpoint below TARGET.

    SOURCE is a checkpoint, or a folder of checkpoints, whose newest one is taken. It is not changed. A job of --ranks ranks with
    --lanes lanes each then restores exactly what the plan says. TARGET must be another folder than that of SOURCE. A job that
    saves into TARGET is replaced: it can save there no more.

    Exit code: 0, 1 if SOURCE is damaged or cannot be redistributed like this, 2 if there is no SOURCE or TARGET is the same folder.
    """
    _ours(source)
    with refusing():
        from engram.cli.reshard import reshard as act

        act(source, target, ranks, lanes, dry_run=dry_run, as_json=as_json, **how)


@main.command()
@click.argument("sample", required=False, type=_PATH)
@click.option("--capacity", type=_COUNT, required=True, help="Number of rows.")
@click.option(
    "--field",
    "given",
    multiple=True,
    metavar="NAME=DTYPE[SHAPE]",
    help="A field, such as obs=uint8[4,84,84] or next.reward=float32; may be repeated.",
)
@click.option("--batch", is_flag=True, help="The arrays of SAMPLE hold many rows: their first dimension is left out.")
@click.option(
    "--memory", metavar="SIZE", help="Memory for the store, such as 16GB: what does not fit is read from disk."
)
@click.option(
    "--device", metavar="NAME", help="Also what rows take on a GPU such as cuda, and what it pins. Loads torch."
)
@click.option("--batch-size", type=_COUNT, default=256, help="Rows of a batch for the --device.")
@_JSON
def plan(
    sample: Path | None, capacity: int, given: tuple[str, ...], batch: bool, memory: str | None, device: str | None, batch_size: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Say how much memory or disk a buffer will take, before it is made.

    SAMPLE is one row: an .npz or .npy file with its arrays; a .json file such as {"obs": "uint8[4,84,84]", "next": {"reward":
    "float32"}}; or a store, dump or checkpoint, whose fields are taken. --field adds fields, or replaces those of that name.

    Exit code: 0, 1 if such rows cannot be stored, 2 if SAMPLE or an option cannot be read.
    """
    with refusing():
        from engram.cli.plan import planned, show_plan

        found = planned(sample, given, capacity, batch=batch, memory=memory, device=device, batch_size=batch_size)
        if as_json:
            import msgspec

            print_json(msgspec.to_builtins(found))
        else:
            show_plan(found)


@main.command()
@click.argument("directory", type=_PATH)
@click.option(
    "--listen",
    default="unix:",
    help="unix: (a socket in a folder of your own), unix:/PATH, or HOST:PORT, where port 0 is any free one.",
)
@click.option("--token", type=_FILE, help="File of mode 0600 with the word that clients must know.")
@click.option("--tls-cert", type=_FILE, help="Certificate of the server, PEM.")
@click.option("--tls-key", type=_FILE, help="Its key, PEM.")
@click.option("--tls-clients", type=_FILE, help="Certificate that signs those of clients, PEM.")
@click.option("--insecure", is_flag=True, help="Listen on TCP without a token, or beyond this machine without TLS.")
@click.option("--metrics", metavar="HOST:PORT", help="Also answer http://HOST:PORT/metrics, for Prometheus.")
@click.option("--capacity", type=_COUNT, help="Make the store, of so many rows, where there is none.")
@click.option("--schema", type=_PATH, help='Its fields: JSON such as {"obs": "float32[4]"}, or a store.json.')
@click.option(
    "--like", type=_PATH, help="Its fields are those of this row (.npz, .npy), or of a store, dump or checkpoint."
)
@click.option("--lanes", type=_COUNT, default=1, help="Its lanes.")
@click.option("--batch-size", type=_COUNT, help="Rows of a batch.")
@click.option("--priorities", type=(float, float), metavar="ALPHA BETA", help="Draw by priority.")
@click.option("--tensordicts", is_flag=True, help="Rows are TensorDicts.")
@click.option("--follow", metavar="ADDRESS", help="Keep a copy of the store there, and serve it once it is promoted.")
@click.option("--sync-follower", is_flag=True, help="Acknowledge a write when the server that follows has its rows.")
@click.option("--lease", type=_PATH, help="File that the server of a store locks, and that a follower waits for.")
def serve(
    directory: Path,
    listen: str,
    insecure: bool,
    metrics: str | None,
    capacity: int | None,
    schema: Path | None,
    like: Path | None,
    lanes: int,
    batch_size: int | None,
    priorities: tuple[float, float] | None,
    tensordicts: bool,
    follow: str | None,
    sync_follower: bool,
    lease: Path | None,
    **secrets: str | None,
) -> None:
    """Serve the store in DIRECTORY to other processes and machines, which use ReplayBuffer.connect(ADDRESS).

    Prints the address when clients may come. On SIGTERM or Ctrl-C it finishes what is under way, and tells clients that it leaves.
    Several servers may serve one store: a client that knows both goes on at the other.

    TCP needs a token; an address that other machines reach needs a certificate, too.

    With --capacity there need not be a store yet: --schema or --like says what rows are, or else the first write of a client does. The
    same command serves it when it is there.

    With --follow DIRECTORY is free or empty. A copy of the other server's store is kept beside it, and is served after engram promote, or
    when that server has lost the --lease. The same command serves it again.

    Exit code: 0, 1 if the store or the address cannot be used, 2 if DIRECTORY holds nothing of engram's.
    """
    if capacity is None:
        if schema or like:
            raise Misuse("--schema and --like: expected --capacity, too, for a store that is made.")
        if follow is None:
            _ours(directory)
    with refusing("serve" if metrics is None else "serve,metrics", oserror=Refusal):
        from engram.serving.copies import begin
        from engram.serving.server import listening, run

        at = listening(listen, **secrets, insecure=insecure)._replace(sync=sync_follower)
        begin(directory, follow, at, lease)
        also = None if metrics is None else _showing(directory.resolve().name, metrics, insecure=insecure)
        made = None
        if capacity is not None:
            from engram.cli.plan import fields_of_row
            from engram.serving.awaiting import awaiting

            rows = fields_of_row(like, schema)
            made = partial(awaiting, directory, capacity, lanes, batch_size, priorities, rows, tensordicts=tensordicts)
        run(directory, at, lambda address: click.echo(str(address)), also, made)


@main.command()
@click.argument("directory", type=_PATH)
def promote(directory: Path) -> None:
    """Have the server that has --follow and DIRECTORY serve its copy, in place of the server that it follows.

    If that one answers, it hands over: it takes no more rows, and nothing is lost. If not, the newest copy is served. Make sure that
    clients reach the other server no more: rows that it takes afterwards are lost. When it answers again, it ends, and its store is
    served no more.

    Exit code: 0, 1 if there is no copy, it is served already, or it cannot be made.
    """
    with refusing("serve", oserror=Refusal):
        from engram.serving.copies import promoted

        note = promoted(directory)
        click.echo(f"{directory} is generation {note.generation}, and lacked at least {note.lost} rows of the other.")


def _reaching(command: Callable[..., None]) -> Callable[..., None]:
    """The options by which a server is reached."""
    file = partial(click.option, type=_FILE)
    for option in (
        file("--tls-key", help="Its key, PEM."),
        file("--tls-cert", help="Certificate of this client, PEM."),
        file("--tls-root", multiple=True, help="Certificate that signs the server's, PEM."),
        file("--token", help="File of mode 0600 with the server's word."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def _by_options() -> Iterator[None]:
    """What a connection refuses names keywords: the command has options."""
    try:
        yield
    except (PermissionError, ConnectionError) as error:
        if isinstance(error, BrokenPipeError):  # of the output
            raise
        text = re.sub(r"\b(token|tls_root|tls_cert|tls_key)=", lambda it: f"--{it[1].replace('_', '-')}", str(error))
        raise Refusal(text) from error


@main.command("import")
@click.argument("source")
@click.argument("directory", type=_PATH)
@click.option(
    "--from", "kind", type=click.Choice(_IMPORTED), help="What SOURCE is. Default: as its name and files say."
)
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    help="Store OLD as NEW, such as infos/qpos=qpos; without NEW leave it out.",
)
@click.option("--end-key", "end_keys", multiple=True, metavar="NAME", help="A field that is not zero at last steps.")
def import_(source: str, directory: Path, kind: str | None, rename: tuple[str, ...], end_keys: tuple[str, ...]) -> None:
    """Write the data set SOURCE to a store in DIRECTORY: a file or folder, or the name of a data set of Minari's.

    Says what its fields become, and shows progress. Killed, it goes on behind the last whole episode when it is started again.

    Exit code: 0, 1 if SOURCE is damaged or cannot be stored, 2 if there is no SOURCE or DIRECTORY holds something else.
    """
    with refusing("minari,datasets,robot,lance"):
        from engram.cli.data import load

        load(source, directory, kind, rename, end_keys)


@main.command()
@click.argument("directory", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--to", "kind", type=click.Choice(_EXPORTED), required=True, help="What OUT becomes.")
@click.option(
    "--repeat-final",
    is_flag=True,
    help="After last steps, write their own observations where no later ones are stored.",
)
@click.option("--fps", type=float, help="Of LeRobot: rows of a second. Default: as an import or a recording says.")
def export(directory: Path, out: Path, kind: str, repeat_final: bool, fps: float | None) -> None:
    """Write the episodes of the store in DIRECTORY to OUT, a file or folder that appears when it is whole.

    With --to lerobot DIRECTORY may also hold the recording of a robot.

    Exit code: 0, 1 if the rows have no place in such a file, 2 if DIRECTORY holds nothing of engram's or OUT is there.
    """
    if not (directory / "robot.json").is_file():
        _ours(directory)
    with refusing("minari,datasets,robot"):
        from engram.cli.data import export

        export(directory, out, kind, repeat_final=repeat_final, fps=fps)


@main.command()
@click.argument("address")
@_reaching
@_JSON
def health(address: str, as_json: bool, **how: Unpack[Reaching]) -> None:
    """Ask the server at ADDRESS whether it answers, and how old the second copy of its store is, where there was one.

    Exit code: 0 if it does, 1 if not.
    """
    with refusing("serve", oserror=Refusal), _by_options():
        from engram.buffer.connecting import Way
        from engram.remote.connection import Connection
        from engram.remote.protocol import Health

        with contextlib.closing(Connection(Way(patience=0.0, **how).access(address, "health"))) as connection:
            age_s = connection.ask("health", Health(), dict[str, object]).get("copy_age_s")
    if as_json:
        print_json({"address": address, "good": True, "copy_age_s": age_s, "problems": []})
    else:
        click.echo("ok" if age_s is None else f"ok, and its copy is {age_s:.1f} s old")


@main.command()
@click.argument("address")
@click.option("--to", required=True, metavar="LIST", help="Addresses with commas, file:PATH or dns:HOST:PORT.")
@click.option("--evict", is_flag=True, help="Where these stores are full, replace their oldest rows.")
@_reaching
def drain(address: str, to: str, evict: bool, **how: Unpack[Reaching]) -> None:
    """Move all rows of the store that the server at ADDRESS serves to the stores in LIST, then end the server.

    Clients go on meanwhile. For a minute after the last row has left, the server sends on new priorities of moved rows. Then its address
    is taken out of file:PATH, and it ends. LIST may name the server itself. If the server or this command is killed, run the command
    again: no row is lost, and none is there twice.

    Exit code: 0 when the server has left, 1 if rows stay where they are.
    """
    with refusing("serve", oserror=Refusal), _by_options():
        from engram.serving.draining import drained

        for left in drained(address, to, evict=evict, **how):
            click.echo(f"{left:,} rows left")
        click.echo(f"{address} has left")


@main.command()
@click.argument("path", type=_PATH)
@click.option("--prometheus", is_flag=True, help="Print them as Prometheus reads them.")
@_JSON
def stats(path: Path, prometheus: bool, as_json: bool) -> None:
    """Show the numbers of the store at PATH once: sizes, counts, rates, waits, ages and priorities.

    The store is only read, beside processes that use it. What they count is all there.

    Exit code: 0, 1 if the store cannot be read, 2 if PATH is no store.
    """
    _ours(path)
    with refusing("metrics"):
        known = {} if prometheus or as_json else _known(path)
        echo(stat_lines(known))
        from engram.cli.top import stats as found

        click.echo(found(path, "prometheus" if prometheus else "json" if as_json else "text", known))


@main.command()
@click.argument("store")
@_reaching
@click.option("--every", type=click.FloatRange(min=0.1), default=2.0, help="Seconds between two looks.")
@click.option("--count", type=_COUNT, help="Looks, then end. Default: until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each look, on a line of its own.")
def top(store: str, every: float, count: int | None, as_json: bool, **how: Unpack[Reaching]) -> None:
    """Show how STORE is doing: rows, inserts and samples per second, limits and who waits for them.

    STORE is a directory, which is only read, beside processes that write; or the address of a server, or several with commas: of one
    store, or of a fleet.

    Exit code: 0 after --count looks, 1 if the server is gone, 2 if there is nothing of engram's at STORE, 130 after Ctrl-C.
    """
    if ":" not in store or Path(store).is_dir():
        _ours(Path(store))
    with refusing("serve", oserror=Refusal), _by_options():
        from engram.cli.top import show

        show(store, every, count, sys.stdout, as_json=as_json, **how)


def _showing(name: str, address: str, *, insecure: bool) -> Callable[[HasStats], None]:
    """Lets metrics be asked for, as soon as there is a buffer; says where. Raises as ``engram.inspect.metrics.serve``."""
    from engram.inspect.metrics import metrics_address, serve

    metrics_address(address, insecure=insecure)  # before the store is opened

    def show(rb: HasStats) -> None:
        click.echo(serve({name: rb}, address, insecure=insecure).address, err=True)

    return show


def _folder(path: Path) -> Path:
    """The path of a folder that is there. Raises ``Misuse``: there is none. ``OSError``: no permission."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise Misuse(f"{path}: expected a folder, found nothing.") from error
    if not is_folder:
        raise Misuse(f"{path}: expected a folder, found a file.")
    return path


def _ours(path: Path) -> None:
    """Ends the command unless something of engram's is there: before torch is imported."""
    with refusing():
        from engram.saved.inspection import kind_of

        kind_of(_folder(path))


def _known(path: Path) -> dict[str, object]:
    """The numbers of a store that are known without torch, which takes seconds."""
    from engram.saved.inspection import describe

    found, names = describe(path), {"rows": "size", "capacity": "capacity", "bytes": "bytes"}
    return {names[key]: found[key] for key in names if key in found} if found["kind"] == "store" else {}


def _check_out(out: Path, *suffixes: str) -> None:
    """Before anything is read or drawn. Raises ``Misuse``: no such folder, or another suffix than these or none."""
    if not out.parent.is_dir():
        raise Misuse(f"{out}: expected a path in a folder that is there, found no folder {out.parent}.")
    if out.suffix.lower() not in ("", *suffixes):
        raise Misuse(f"{out}: expected a name that ends with {' or '.join(suffixes)}, got {out.suffix!r}.")
