"""The demo: processes that are replaced, and a replay buffer on disk that stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from engram.demo.task import FAILED, INTERRUPTED, REPLACE
from engram.format import layout

__all__ = ["new_folder", "run"]

TELL_AGAIN_S = 0.5
"""Between two requests to end."""


def run(*, steps: int, directory: Path | None, seed: int, sampler: str, actors: int = 0) -> int:
    """Train, replace a process half-way, go on, report. The exit code: 0, 1 if a process failed, or 130 after Ctrl-C.

    Args:
        steps: environment steps, at most.
        directory: folder of the run, new or empty; None: a numbered one under ``engram-demo``.
        seed: of everything.
        sampler: ``"uniform"`` or ``"prioritized"``.
        actors: processes that play while another one learns, one of which is killed; 0: one process does both, and another
            one goes on after it.

    Raises:
        FileExistsError: the folder holds something already.
        ModuleNotFoundError: gymnasium or matplotlib is missing.
    """
    _check_packages()
    folder = new_folder(Path("engram-demo")) if directory is None else directory
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"--dir {str(folder)!r}: expected a new or empty folder, found files. Choose another, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(
        f"DQN on CartPole-v1, replay in {folder / 'replay'} ({sampler} sampling, seed {seed})", soft_wrap=True
    )
    if actors:
        code = _train_with_actors(folder, steps, seed, sampler, actors, console)
    else:
        code = _train_in_turn(folder, steps, seed, sampler, console)
    if code == INTERRUPTED:
        if (folder / "replay" / layout.FOLDER / layout.STORE).exists():
            console.print(
                f'\nInterrupted. The store is whole: engram.ReplayBuffer.open("{folder / "replay"}")', soft_wrap=True
            )
        return INTERRUPTED
    if code != 0:
        console.print(f"Training ended with code {code}.")
        return code
    from engram.demo.progress import Progress
    from engram.demo.report import plot, summary

    progress, _ = Progress.load(folder)
    console.print(summary(progress, folder), soft_wrap=True)
    picture = plot(progress, folder / "demo.png")
    console.print(f"Learning curve and age of the sampled rows: {picture}", soft_wrap=True)
    return 0


def _check_packages() -> None:
    """Raise ``ModuleNotFoundError`` for what the training process would lack."""
    for name in ("gymnasium", "matplotlib"):
        if sys.modules.get(name, name) is None or find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _train_in_turn(folder: Path, steps: int, seed: int, sampler: str, console: Console) -> int:
    """Two processes, one after the other."""
    code = _train(folder, steps, seed, sampler, "first")
    if code == REPLACE:
        console.print("Half-way: the training process has ended. A new one opens the store it left.")
        code = _train(folder, steps, seed, sampler, "second")
    return code


def _train_with_actors(folder: Path, steps: int, seed: int, sampler: str, actors: int, console: Console) -> int:
    """This process learns, others play."""
    interrupted = threading.Event()
    handler = signal.signal(signal.SIGINT, lambda *_: interrupted.set())  # also while torch is imported
    try:
        from engram.demo import crowd
        from engram.demo.actors import ActorFailed

        return crowd.run(folder, seed=seed, steps=steps, sampler=sampler, actors=actors, interrupted=interrupted.is_set)
    except (ActorFailed, crowd.RowsLost) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return FAILED
    finally:
        signal.signal(signal.SIGINT, handler)


def _train(folder: Path, steps: int, seed: int, sampler: str, phase: str) -> int:
    command = [
        sys.executable,
        "-m",
        "engram.demo.training",
        str(folder),
        str(steps),
        str(seed),
        sampler,
        phase,
        str(os.getpid()),
    ]
    # Until the child listens, Ctrl-C does nothing to it: it is told again until it ends in order.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command)  # noqa: S603 - this interpreter, our own module
    finally:
        signal.signal(signal.SIGINT, handler)
    interrupted = False
    while True:
        try:
            code = process.wait(TELL_AGAIN_S if interrupted else None)
            return INTERRUPTED if interrupted else code
        except KeyboardInterrupt:
            interrupted = True
        except subprocess.TimeoutExpired:
            pass
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def new_folder(parent: Path) -> Path:
    """``parent/run-001``, or the next number that is free."""
    number = 1
    while (parent / f"run-{number:03d}").exists():
        number += 1
    return parent / f"run-{number:03d}"
