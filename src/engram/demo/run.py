"""``engram demo``: starts the learner process, and another one after the first was killed."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import click

#: What a demo of several nodes needs besides.
ON_RAY = ("ray", "pyarrow")
#: Exit code after Ctrl-C.
INTERRUPTED = 130


def tell(text: str, color: str | None = None) -> None:
    """Print a line, wherever what others print goes."""
    click.secho(text, fg=color, file=sys.__stdout__)


class Settings(NamedTuple):
    """What a run is started with.

    Attributes:
        folder: it gets the store in ``replay``, checkpoints in ``checkpoints``, networks in ``network-STEP.npz``.
        steps: of all actors together, at most.
        seed: of networks, environments and exploration.
        sampler: one of ``SAMPLERS``.
        actors: number of processes that play.
        started: by ``time.time()``.
        nodes: of a Ray cluster; 1: no cluster.
    """

    folder: Path
    steps: int
    seed: int
    sampler: str
    actors: int
    started: float
    nodes: int = 1

    def say(self, text: str, color: str | None = None) -> None:
        """Print a line with the time since the demo started."""
        tell(f"[{time.time() - self.started:5.1f} s] {text}", color)

    def say_progress(self, steps: int, mean_return: float, goal: float, rates: str) -> None:
        """Print how far the agent is, with a bar."""
        bar = "█" * int(20 * min(mean_return / goal, 1))
        self.say(f"step {steps:6,}  return {mean_return:4.0f} {bar:░<20} {rates}")


def run(*, steps: int, directory: Path | None, seed: int, sampler: str, actors: int, nodes: int) -> int:
    """Train an agent while processes are killed. The exit code: 0, 1 if a process failed, 130 after Ctrl-C.

    Args:
        directory: folder of the run; None: a numbered one under ``engram-demo``.
        steps, seed, sampler, actors, nodes: see :class:`Settings`.

    Raises:
        FileExistsError: the folder is not empty.
        ModuleNotFoundError: gymnasium or matplotlib is missing; for several nodes, Ray or pyarrow.
    """
    for name in ("gymnasium", "matplotlib", *(ON_RAY if nodes > 1 else ())):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    folder = directory or new_folder(Path("engram-demo"))
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"--dir {str(folder)!r}: expected a new or empty folder, found files. Choose another, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    where = f" on {nodes} nodes of a Ray cluster, which are processes of this machine" if nodes > 1 else ""
    click.echo(f"DQN on CartPole-v1{where}. Replay in {folder / 'replay'} ({sampler} sampling, seed {seed}).")
    settings = Settings(folder, steps, seed, sampler, actors, time.time(), nodes)
    if nodes > 1:
        settings.say("Ray starts two nodes.")
    code = _run_learner(settings)
    if code == -signal.SIGKILL:
        code = _run_learner(settings)
    if code not in (0, INTERRUPTED):
        click.echo(f"Training ended with exit code {code}.")
        return 1
    return code


def _run_learner(settings: Settings) -> int | None:
    """Run a learner. It ignores Ctrl-C and stops in order when its pipe is closed, also if this process dies."""
    context = multiprocessing.get_context("spawn")  # returns at once, and leaves this end of the pipe to this process
    theirs, ours = context.Pipe(duplex=False)
    learner = context.Process(target=_learn, args=(theirs, settings))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the learner and its actors
    learner.start()
    signal.signal(signal.SIGINT, handler)
    try:
        learner.join()
    except KeyboardInterrupt:
        ours.close()
        learner.join()
        return INTERRUPTED
    return learner.exitcode


def _learn(parent: Connection, settings: Settings) -> None:
    if settings.nodes > 1:
        from engram.demo.nodes import train  # imports torch, which the command does without
    else:
        from engram.demo.learner import learn as train

    train(parent, settings)


def new_folder(parent: Path) -> Path:
    """``parent/run-001``, or the next number that is free."""
    folders = (parent / f"run-{number:03d}" for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())
