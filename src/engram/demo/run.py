"""``engram demo``: starts the learner process, and another one after the first was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import click

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def run(*, steps: int, directory: Path | None, seed: int, sampler: str, actors: int) -> int:
    """Train an agent while an actor and the learner are killed. The exit code: 0, 1 if a process failed, 130 after Ctrl-C.

    Args:
        steps: environment steps, at most.
        directory: folder of the run, new or empty; None: a numbered one under ``engram-demo``.
        seed: of networks, environments and exploration.
        sampler: ``"uniform"`` or ``"prioritized"``.
        actors: number of processes that play.

    Raises:
        FileExistsError: the folder is not empty.
        ModuleNotFoundError: gymnasium or matplotlib is missing.
    """
    for name in ("gymnasium", "matplotlib"):
        if sys.modules.get(name, name) is None or find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    folder = new_folder(Path("engram-demo")) if directory is None else directory
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"--dir {str(folder)!r}: expected a new or empty folder, found files. Choose another, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"DQN on CartPole-v1. Replay in {folder / 'replay'} ({sampler} sampling, seed {seed}).")
    command = [sys.executable, "-m", "engram.demo.learner"]
    command += map(str, (folder, steps, seed, sampler, actors, time.time()))
    code = _wait(command)
    if code == -signal.SIGKILL:
        code = _wait(command)
    if code not in (0, INTERRUPTED):
        click.echo(f"Training ended with exit code {code}.")
        return 1
    return code


def _wait(command: list[str]) -> int:
    """Run a learner. It ignores Ctrl-C and stops in order when its stdin is closed, also if this process dies."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the learner and its actors
    try:
        learner = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - this interpreter, our own module
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        return learner.wait()
    except KeyboardInterrupt:
        learner.communicate()  # closes stdin
        return INTERRUPTED


def new_folder(parent: Path) -> Path:
    """``parent/run-001``, or the next number that is free."""
    number = 1
    while (parent / f"run-{number:03d}").exists():
        number += 1
    return parent / f"run-{number:03d}"
