"""The command line: ``engram demo``, ``doctor``, ``inspect``, ``verify``, ``reshard``.

Starts without torch; each command loads what it needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from engram._version import __version__
from engram.demo.task import MOST_ACTORS, SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.format.problems import Problem

__all__ = ["main"]

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="engram")
def main() -> None:
    """Experience replay that survives."""


@main.command()
@click.option(
    "--steps", type=click.IntRange(min=1), default=100_000, show_default=True, help="Environment steps, at most."
)
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Folder of the run. Default: engram-demo/run-…"
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the environment and the agent."
)
@click.option("--sampler", type=click.Choice(SAMPLERS), default=SAMPLERS[0], show_default=True, help="Of the replay.")
@click.option(
    "--actors",
    type=click.IntRange(1, MOST_ACTORS),
    default=2,
    show_default=True,
    help="Processes that play, while another one learns.",
)
def demo(steps: int, directory: Path | None, seed: int, sampler: str, actors: int) -> None:
    """Train DQN on CartPole-v1 from a replay buffer on disk, and kill processes on the way.

    Half-way a checkpoint is saved. Then one actor is killed with SIGKILL, and after it the learner. A new learner opens the
    store and goes on with all rows.

    Ends when the mean return of the last 20 episodes passes 195. Ctrl-C leaves a store that can be opened again.
    """
    from engram.demo import run

    try:
        code = run.run(steps=steps, directory=directory, seed=seed, sampler=sampler, actors=actors)
    except ModuleNotFoundError as error:
        raise click.ClickException(f'the demo needs {error.name}: pip install "engram[demo]"') from error
    except FileExistsError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


@main.command()
def doctor() -> None:
    """Say what engram finds on this machine: Python, torch, the core, memory and disk."""
    from engram.cli.doctor import findings

    healthy = True
    for name, value, ok in findings():
        healthy &= ok
        click.echo(f"{'ok ' if ok else 'BAD'}  {name:<16} {value}")
    sys.exit(0 if healthy else 1)


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def inspect(path: Path, as_json: bool) -> None:
    """Say what lies at PATH: a checkpoint, a folder of them, a dump, a part of one, or a live store.

    Reads descriptions, tables and priorities, no rows. Exit code: 0, 1 if something is damaged, 2 if nothing of engram's is there.
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
    "--level",
    type=click.Choice(["meta", "read", "full"]),
    default="full",
    show_default=True,
    help="meta: descriptions and sizes. read: every block too. full: and no file that is not listed.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def verify(path: Path, level: Literal["meta", "read", "full"], as_json: bool) -> None:
    """Check a checkpoint, a folder of them, a dump, a part of one, or a live store, and change nothing.

    That an attempt was aborted, or is not decided as ranks have not voted, is a note and no damage.

    Exit code: 0 if all is good, 1 if something is damaged, 2 if nothing of engram's is there.
    """
    from engram.format import verify as verifying

    report = _usable(lambda: verifying.verify(path, level))
    if as_json:
        found = {"path": str(path), "kind": report.kind, "level": report.level, "good": report.good}
        found |= {"problems": _listed(report.problems), "notes": _listed(report.notes)}
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        from engram.cli.show import show_report

        show_report(report)
    sys.exit(0 if report.good else 1)


@main.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="How many will load it.")
@click.option("--lanes", type=click.IntRange(min=1), required=True, help="Of each of them.")
@click.option("--capacity", type=click.IntRange(min=1), help="Rows of each. Default: as many in all as there are now.")
@click.option(
    "--open",
    "open_ones",
    type=click.Choice(["drop", "truncate", "keep"]),
    default="drop",
    show_default=True,
    help="What becomes of trajectories without a last step.",
)
@click.option(
    "--headless",
    type=click.Choice(["drop", "keep"]),
    default="drop",
    show_default=True,
    help="What becomes of those without their first steps.",
)
@click.option(
    "--overflow",
    type=click.Choice(["cut", "fill"]),
    default="cut",
    show_default=True,
    help="Of more than there is room for: keep the newest alone, or older, shorter ones where they fit.",
)
@click.option(
    "--max-drop-fraction",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Of the steps that may be left out as incomplete, or longer than a lane.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, and write nothing.")
def reshard(source: Path, target: Path, ranks: int, lanes: int, dry_run: bool, **how: Any) -> None:
    """Deal the trajectories of SOURCE out to other ranks and lanes, into a new checkpoint below TARGET.

    SOURCE is a checkpoint, or a folder of them, of which the newest is taken. Its bytes stay as they are. A job of --ranks ranks
    with --lanes lanes each then gets back exactly what is planned here. TARGET is another folder than that of SOURCE; where a job
    saves into it, that is replaced and can save no more.

    Exit code: 0, 1 if SOURCE is damaged or cannot be dealt out so, 2 if there is none, or TARGET is no other folder.
    """
    from engram.cli.reshard import reshard as act
    from engram.errors import EngramError

    try:
        _usable(lambda: act(source, target, ranks, lanes, dry_run=dry_run, **how))
    except EngramError as error:
        raise click.ClickException(str(error)) from error


def _usable(act: Callable[[], T]) -> T:
    """What ``act`` returns; whatever is not there, or may not be read, is the caller's mistake."""
    try:
        return act()
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)


def _listed(problems: list[Problem]) -> list[dict[str, Any]]:
    return [{"file": str(it.path), "offset": it.offset, "what": it.what} for it in problems]
