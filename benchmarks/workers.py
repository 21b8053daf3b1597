"""Processes that work concurrently, in time windows. Sides take turns, as in ``timing``: only one works at a time."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from benchmarks.timing import Turn, Window, during

_LATE_S = 60
_TRIES = 20


@dataclass(frozen=True)
class Shift:
    """How much is measured: per side, ``windows`` of ``length_s`` after ``warmup`` windows that are not counted."""

    length_s: float
    windows: int
    warmup: int = 1
    lead_s: float = 0.03

    def scaled(self, share: float) -> "Shift":
        """The same windows, but fewer: at least five, because quartiles of fewer mean nothing."""
        return Shift(self.length_s, max(5, round(self.windows * share)), self.warmup, self.lead_s)


class Worker(Protocol):
    """A process that waits, without using a core, until it is told to work in a window."""

    def begin(self, window: Window) -> None: ...
    def turn(self) -> Turn: ...
    def stop(self) -> None: ...


class Forked:
    """A child of this process. ``prepare`` runs there, and returns the unit of work."""

    def __init__(self, prepare: Callable[[], Callable[[], object]]) -> None:
        self._pipe, theirs = get_context("fork").Pipe()
        self._process = get_context("fork").Process(target=_serve, args=(theirs, prepare), daemon=True)
        self._process.start()
        theirs.close()  # so that the death of the child is an end of file here
        self._hear()
        self.calls = 0
        """All calls so far, including those outside windows."""

    def begin(self, window: Window) -> None:
        self._pipe.send(window)

    def turn(self) -> Turn:
        turn = self._hear()
        assert isinstance(turn, Turn)
        self.calls += turn.calls + turn.uncounted
        return turn

    def _hear(self) -> object:
        if not self._pipe.poll(_LATE_S):
            raise TimeoutError(f"Forked: expected an answer within {_LATE_S} s, got none.")
        return self._pipe.recv()

    def begin_without_end(self) -> None:
        """Work until it is killed."""
        self.begin(Window.soon(0, 1e6))

    def kill(self) -> None:
        """Kill it with SIGKILL and reap it: it runs no exit handler."""
        self._process.kill()
        self._process.join(_LATE_S)

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(_LATE_S)


def _serve(pipe: Connection, prepare: Callable[[], Callable[[], object]]) -> None:
    call = prepare()
    gc.collect()
    gc.freeze()  # do not scan objects inherited from the parent after each window
    pipe.send("ready")
    while (window := pipe.recv()) is not None:
        pipe.send(during(call, window))


class Program:
    """A Python of another environment that runs ``module`` and communicates by lines of JSON: see ``reverb_peer``."""

    def __init__(self, python: str, module: str, *arguments: str, path: Path | None = None) -> None:
        root = Path(__file__).parents[1]
        where = os.pathsep.join(str(folder) for folder in (root, path) if folder is not None)
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR", "PYTHONPATH": where}
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=root,
            env={**os.environ, **quiet},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.said = self._hear()

    def begin(self, window: Window) -> None:
        assert self._process.stdin is not None
        print(json.dumps(asdict(window)), file=self._process.stdin, flush=True)

    def turn(self) -> Turn:
        return Turn(**self._hear())

    def _hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"{self._process.args}: expected a line, got the end of the program.")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_LATE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode


def answer_lines(call: Callable[[], object], finish: Callable[[], object] | None, greeting: dict[str, object]) -> None:
    """The loop of a :class:`Program`: greet, then take one turn for every window, until its input ends."""
    print(json.dumps(greeting), flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(during(call, Window(**json.loads(line)), finish))), flush=True)


def in_turns(sides: Mapping[str, Sequence[Worker]], shift: Shift) -> dict[str, list[list[Turn]]]:
    """Per side and counted window, the turns of its workers in their order. A worker may be on several sides.

    Raises:
        TimeoutError: at every attempt a worker came late to the window, so that they did not work concurrently.
    """
    found: dict[str, list[list[Turn]]] = {name: [] for name in sides}
    for round_ in range(-shift.warmup, shift.windows):
        for name, workers in sides.items():
            turns = _one_window(name, workers, shift)
            if round_ >= 0:
                found[name].append(turns)
    return found


def _one_window(name: str, workers: Sequence[Worker], shift: Shift) -> list[Turn]:
    for _ in range(_TRIES):
        window = Window.soon(shift.lead_s, shift.length_s)
        for worker in workers:
            worker.begin(window)
        turns = [worker.turn() for worker in workers]
        if all(turn.uncounted for turn in turns):
            return turns
    raise TimeoutError(f"{name}: expected all processes at work within {shift.lead_s} s, got late ones {_TRIES} times.")
