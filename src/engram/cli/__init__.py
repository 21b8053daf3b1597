"""The command line: ``engram demo``, ``doctor``, ``inspect``, ``plot``, ``report``, ``verify``, ``reshard``, ``serve``, ``health``,
``top``.

It starts without torch; each command imports what it needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar

import click

from engram._version import __version__
from engram.demo.run import MOST_ACTORS, SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from engram.format.problems import Problem
    from engram.metrics.catalog import HasStats

__all__ = ["main"]

T = TypeVar("T")
#: What ``engram plot`` draws.
_FIGURES = ("priority", "weights", "age", "usage", "returns", "map", "ratio", "throughput")


class _Resharding(TypedDict):
    """Options of ``engram reshard`` that go to the planner as they are."""

    capacity: int | None
    open_ones: str
    headless: str
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="engram")
def main() -> None:
    """Experience replay that survives a crash: show and check stores and checkpoints, and run a demo."""


@main.command()
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=100_000,
    help="Maximum number of environment steps.",
)
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Folder of the run. Default: engram-demo/run-…"
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Seed of networks, environments and exploration.",
)
@click.option(
    "--sampler",
    type=click.Choice(SAMPLERS),
    default=SAMPLERS[0],
    help="Sampler of the replay buffer.",
)
@click.option(
    "--actors",
    type=click.IntRange(1, MOST_ACTORS),
    default=2,
    help="Number of processes that play while another one learns.",
)
def demo(steps: int, directory: Path | None, seed: int, sampler: str, actors: int) -> None:
    """Train DQN on CartPole-v1 from a replay buffer on disk, while its processes are killed.

    Half-way, the demo saves a checkpoint, kills one actor with SIGKILL, and then the learner. A new learner opens the store and
    continues with all rows.

    Training ends when the mean return of the last 20 episodes passes 195. After Ctrl-C, the store can be opened again.
    """
    from engram.demo import run

    try:
        code = run.run(steps=steps, directory=directory, seed=seed, sampler=sampler, actors=actors)
    except ModuleNotFoundError as error:
        raise click.ClickException(f'the demo needs {error.name}: pip install "engram-replay[demo]"') from error
    except FileExistsError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


@main.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
def doctor(directory: Path | None) -> None:
    """Show what engram finds on this machine: Python, torch, the native core, memory and disk.

    With DIRECTORY, also measure its disk for two seconds, and say how many batches per second to expect of the store in it, or of
    one that would be there.

    Exit code: 0, or 1 if engram cannot work here.
    """
    from engram.cli.disk_speed import disk_speed
    from engram.cli.doctor import findings

    found = findings() + ([] if directory is None else _usable(lambda: disk_speed(directory)))
    for name, value, ok in found:
        click.echo(f"{'ok ' if ok else 'BAD'}  {name:<16} {value}")
    sys.exit(0 if all(ok for _, _, ok in found) else 1)


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def inspect(path: Path, as_json: bool) -> None:
    """Show what is at PATH: a checkpoint, a folder of checkpoints, a dump, a part of one, or a live store.

    Reads descriptions, tables and priorities, but no rows, and changes nothing.

    Exit code: 0, 1 if something is damaged, 2 if PATH holds nothing of engram's.
    """
    from engram.format.describe import describe

    found = _usable(lambda: describe(path))
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        from engram.cli.show import show_description

        show_description(found)
    sys.exit(1 if found["problems"] else 0)


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="A .png, .svg or .pdf file."
)
@click.option(
    "--what", multiple=True, type=click.Choice(_FIGURES), help="Figure to draw; may be repeated. Default: all."
)
def plot(path: Path, out: Path, what: tuple[str, ...]) -> None:
    """Draw what is in the live store at PATH, or in the newest checkpoint of a folder of checkpoints.

    Without --what, draws every figure for which the store has data, except throughput, which watches the store for two seconds.
    Processes that use the store go on. Rows of a checkpoint are copied to a temporary folder first.

    Exit code: 0, 1 if a figure cannot be drawn, 2 if PATH holds nothing of engram's or FILE cannot be written.
    """
    from engram.cli.report import picture

    _written(out, lambda: picture(path, what, out.suffix[1:] or "png"))


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="An .html file.")
def report(path: Path, out: Path) -> None:
    """Write one page about what is at PATH: a store, checkpoints, or the folder of a run, in which such lie.

    The page says fields, sizes, indexes, limits, checkpoints and what is damaged, and shows figures of the rows. It is one
    file, which loads nothing from elsewhere.

    Exit code: 0, 1 if the page cannot be made, 2 if PATH holds nothing of engram's or FILE cannot be written.
    """
    from engram.cli.report import page

    _written(out, lambda: page(path).encode())


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--level",
    type=click.Choice(["meta", "read", "full"]),
    default="full",
    help="meta: descriptions and sizes of files. read: also every block. full: also that no other file is there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def verify(path: Path, level: Literal["meta", "read", "full"], as_json: bool) -> None:
    """Check a checkpoint, a folder of checkpoints, a dump, a part of one, or a live store. Changes nothing.

    An attempt that was aborted, or that some ranks have not voted on yet, is reported as a note, not as damage.

    Exit code: 0 if everything is good, 1 if something is damaged, 2 if PATH holds nothing of engram's.
    """
    from engram.format import verify as verifying

    report = _usable(lambda: verifying.verify(path, level))
    if as_json:
        found = {
            "path": str(path),
            "kind": report.kind,
            "level": report.level,
            "good": report.good,
            "problems": _listed(report.problems),
            "notes": _listed(report.notes),
        }
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        from engram.cli.show import show_report

        show_report(report)
    sys.exit(0 if report.good else 1)


@main.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks that will load the checkpoint."
)
@click.option("--lanes", type=click.IntRange(min=1), required=True, help="Number of lanes of each rank.")
@click.option("--capacity", type=click.IntRange(min=1), help="Rows of each rank. Default: the same total as in SOURCE.")
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
def reshard(source: Path, target: Path, ranks: int, lanes: int, dry_run: bool, **how: Unpack[_Resharding]) -> None:
    """Redistribute the trajectories of SOURCE over other ranks and lanes, into a new checkpoint below TARGET.

    SOURCE is a checkpoint, or a folder of checkpoints, whose newest one is taken. It is not changed. A job of --ranks ranks with
    --lanes lanes each then restores exactly what the plan says. TARGET must be another folder than that of SOURCE. A job that
    saves into TARGET is replaced: it can save there no more.

    Exit code: 0, 1 if SOURCE is damaged or cannot be redistributed like this, 2 if there is no SOURCE or TARGET is the same folder.
    """
    from engram.cli.reshard import reshard as act
    from engram.errors import EngramError

    try:
        _usable(lambda: act(source, target, ranks, lanes, dry_run=dry_run, **how))
    except EngramError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--listen",
    default="unix:",
    help="unix: (a socket in a folder of your own), unix:/PATH, or HOST:PORT, where port 0 is any free one.",
)
@click.option(
    "--token", type=click.Path(dir_okay=False), help="File of mode 0600 with the word that clients must know."
)
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="Certificate of the server, PEM.")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="Its key, PEM.")
@click.option("--insecure", is_flag=True, help="Listen on TCP without a token, or beyond this machine without TLS.")
@click.option("--metrics", metavar="HOST:PORT", help="Also answer http://HOST:PORT/metrics, for Prometheus.")
def serve(
    directory: Path,
    listen: str,
    token: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool,
    metrics: str | None,
) -> None:
    """Serve the store in DIRECTORY to other processes and machines, which use ReplayBuffer.connect(ADDRESS).

    Prints the address when clients may come. On SIGTERM or Ctrl-C it finishes what is under way, and tells clients that it leaves.
    Several servers may serve one store: a client that knows both goes on at the other.

    TCP needs a token; an address that other machines reach needs a certificate, too.

    Exit code: 0, 1 if the store or the address cannot be used, 2 if DIRECTORY is missing.
    """
    from engram.errors import EngramError

    try:
        from engram.serving.listening import listening
        from engram.serving.run import run

        at = listening(listen, token, tls_cert, tls_key, insecure=insecure)
        also = None if metrics is None else _showing(directory.resolve().name, metrics, insecure=insecure)
        run(directory, at, lambda address: click.echo(str(address)), also)
    except ModuleNotFoundError as error:
        extra = "serve" if metrics is None else "serve,metrics"
        raise click.ClickException(f'serve needs {error.name}: pip install "engram-replay[{extra}]"') from error
    except (EngramError, OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("address")
@click.option("--token", type=click.Path(dir_okay=False), help="File of mode 0600 with the server's word.")
@click.option("--tls-root", type=click.Path(dir_okay=False), help="Certificate that signs the server's, PEM.")
def health(address: str, token: str | None, tls_root: str | None) -> None:
    """Ask the server at ADDRESS whether it answers.

    Exit code: 0 if it does, 1 if not.
    """
    try:
        from engram.remote.addresses import addresses_of
        from engram.remote.connection import Access, Connection

        Connection(Access(tuple(addresses_of(address, "health")), token, tls_root, 0.0)).close()
    except ModuleNotFoundError as error:
        raise click.ClickException(f'health needs {error.name}: pip install "engram-replay[serve]"') from error
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo("ok")


@main.command()
@click.argument("store")
@click.option("--token", type=click.Path(dir_okay=False), help="File of mode 0600 with the server's word.")
@click.option("--tls-root", type=click.Path(dir_okay=False), help="Certificate that signs the server's, PEM.")
@click.option("--every", type=click.FloatRange(min=0.1), default=2.0, help="Seconds between two looks.")
@click.option("--count", type=click.IntRange(min=1), help="Looks, then end. Default: until Ctrl-C.")
def top(store: str, token: str | None, tls_root: str | None, every: float, count: int | None) -> None:
    """Show how STORE is doing: rows, inserts and samples per second, limits and who waits for them.

    STORE is a directory, which is only read, beside processes that write; or the address of a server.

    Exit code: 0, 1 if there is no such store or the server is gone.
    """
    from engram.cli.top import show
    from engram.errors import EngramError

    try:
        show(store, token, tls_root, every, count, sys.stdout)
    except KeyboardInterrupt:
        click.echo()
    except ModuleNotFoundError as error:
        raise click.ClickException(f'top needs {error.name}: pip install "engram-replay[serve]"') from error
    except (EngramError, OSError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error


def _showing(name: str, address: str, *, insecure: bool) -> Callable[[HasStats], None]:
    """Lets metrics be asked for, as soon as there is a buffer; says where. Raises as ``engram.metrics.serve``."""
    from engram.metrics import serve
    from engram.metrics.server import metrics_address

    metrics_address(address, insecure=insecure)  # before the store is opened

    def show(rb: HasStats) -> None:
        click.echo(serve({name: rb}, address, insecure=insecure).address, err=True)

    return show


def _written(out: Path, draw: Callable[[], bytes]) -> None:
    """Write what ``draw`` returns to a file."""
    from engram.cli.report import REFUSALS

    try:
        made = _usable(draw)
    except ModuleNotFoundError as error:
        raise click.ClickException(f'plots need {error.name}: pip install "engram-replay[plot]"') from error
    except REFUSALS as error:
        raise click.ClickException(str(error)) from error
    _usable(lambda: out.write_bytes(made))


def _usable(act: Callable[[], T]) -> T:
    """What ``act`` returns. A path that is missing or cannot be read is the caller's mistake: exit code 2."""
    try:
        return act()
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)


def _listed(problems: list[Problem]) -> list[dict[str, str | int | None]]:
    return [{"file": str(it.path), "offset": it.offset, "what": it.what} for it in problems]
