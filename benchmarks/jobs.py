"""Jobs of ranks: processes with gloo between them, each of which does what it is told, all at the same time."""

import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self

More = ParamSpec("More")
_LATE_S = 300.0


@dataclass
class Member:
    """One process of a job."""

    rank: int
    world: int
    ranks: Any
    """``engram.Ranks``."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What it keeps from one task to the next."""


@dataclass(frozen=True)
class _Failure:
    text: str


class Job:
    """``world`` processes that wait, without using a core, until they are told what to do."""

    def __init__(self, world: int) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            pipe, theirs = context.Pipe()
            arguments = (theirs, rank, world, Path(self._folder.name, "meet"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a process that died is an end of file here, not silence
            self._pipes.append(pipe)
            self._processes.append(process)
        self._answers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()  # they end when their pipe is closed
        for process in self._processes:
            process.join(_LATE_S)
        self._folder.cleanup()

    def each(
        self, task: Callable[Concatenate[Member, More], Any], *arguments: More.args, **named: More.kwargs
    ) -> list[Any]:
        """What the task returned in each process, by rank.

        Raises:
            RuntimeError: it raised in one of them. TimeoutError: one did not answer.
        """
        for pipe in self._pipes:
            pipe.send((task, arguments, named))
        return self._answers()

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(waiting, _LATE_S)
            if not ready:
                raise TimeoutError(f"Job: expected answers within {_LATE_S:g} s, got none of {len(waiting)} processes.")
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    found[rank] = pipe.recv()
                    if isinstance(found[rank], _Failure):
                        raise RuntimeError(f"Job: rank {rank}: {found[rank].text}")
        return [found[rank] for rank in range(len(found))]


def _serve(pipe: Connection, rank: int, world: int, meet: Path) -> None:
    import logging
    import warnings

    import torch
    from torch import distributed

    from engram import Ranks

    warnings.simplefilter("ignore")
    logging.getLogger("engram").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    member = Member(rank, world, Ranks.from_torch())
    pipe.send("ready")
    while True:
        try:
            task, arguments, named = pipe.recv()
        except EOFError:
            break
        try:
            answer = task(member, *arguments, **named)
        except Exception:  # noqa: BLE001 - told in the process that asked
            answer = _Failure(traceback.format_exc())
        pipe.send(answer)
    member.kept.clear()
    member.ranks.close()
    distributed.destroy_process_group()
