"""Claim: an actor that writes one row at a time over a connection spends at most 30 µs of its CPU on each, and has 30,000 acknowledged
rows a second.

A program writes rows of four fields (29 bytes) in a plain loop of ``rb.add(row)``, streamed, and waits for all acknowledgements at the end
of each window, within its time. The server is a process of its own, over TCP of this machine. With ``own_lanes=True`` each call returns the
number of its row. CPU is that of all threads of the client.

Echo (id-echo), only if ``ECHO_PYTHON`` names the Python of an environment that has it: see ``echo_peer``. It has the same rows and fields,
acknowledges each, keeps none and has no numbers: batches go to the one consumer that its server is.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks import rivals, rows_of_actors
from benchmarks.bench_cluster import served
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.timing import Timing, together
from benchmarks.workers import Program, Shift, Worker, in_turns

SHIFT = Shift(length_s=0.5, windows=15, warmup=2)
CAPACITY = 100_000
NO_ECHO = "Not measured: ECHO_PYTHON does not name the Python of an environment that has id-echo."


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Microseconds of a row until it is acknowledged, and of the client's CPU."""
    engram, python = libraries["engram"].module, os.environ.get("ECHO_PYTHON")
    if engram is None:
        return
    notes = {} if python else {"echo": NO_ECHO}
    here = Path(engram.__file__).parents[1]  # the same engram
    sides: dict[str, list[Worker]] = {}
    with ExitStack() as stack:
        for name, role in (("engram", "single"), ("engram, numbered", "numbered")):
            rb = stack.enter_context(engram.ReplayBuffer(storage=engram.LazyTensorStorage(CAPACITY), shared=True))
            rb.add(rows_of_actors.row())
            address, token = stack.enter_context(served(engram, rb))
            sides[name] = [_begun(stack, sys.executable, "served_peer", role, address, token, path=here)]
        if python:
            server = _begun(stack, python, "echo_peer", "server")
            sides["echo"] = [_begun(stack, python, "echo_peer", "write", str(server.said["port"]))]
            notes["engram"] = f"Beside id-echo {server.said['echo']}, over loopback."
        turns = in_turns(sides, SHIFT.scaled(share))
    times = {side: [together(turn) for turn in each] for side, each in turns.items()}
    cpu = {side: [turn.cpu_us / turn.calls for (turn,) in each] for side, each in turns.items()}
    for key, what, found, bound in (
        ("single/acknowledged", "one row until it is acknowledged", times, "33.3 µs"),
        ("single/cpu", "… the client's CPU", cpu, "30 µs"),
    ):
        row = timed(key, what, Timing(1, found), times=("echo",), notes=notes)
        row.comparisons.append(Comparison(bound, "value", row.spreads["engram, numbered"], FLOORS[key, bound]))
        yield row


def _begun(stack: ExitStack, python: str, module: str, *arguments: str, path: Path | None = None) -> Program:
    program = Program(python, f"benchmarks.{module}", *arguments, path=path)
    stack.callback(program.stop)
    return program
