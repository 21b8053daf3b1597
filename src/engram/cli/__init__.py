"""The command line: ``engram demo``, ``engram doctor``. Starts without torch; each command loads what it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engram._version import __version__
from engram.demo.task import MOST_ACTORS, SAMPLERS

__all__ = ["main"]


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
    type=click.IntRange(0, MOST_ACTORS),
    default=0,
    show_default=True,
    help="Processes that play while this one learns. 0: one process plays and learns.",
)
def demo(steps: int, directory: Path | None, seed: int, sampler: str, actors: int) -> None:
    """Train DQN on CartPole-v1 from a replay buffer on disk, and replace a process half-way.

    That is the training process, which ends in order; with --actors it is one of them, which is killed with SIGKILL while the
    others go on.

    Ends when the mean return of the last 20 episodes passes 195. Ctrl-C leaves a store that reopens.
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
