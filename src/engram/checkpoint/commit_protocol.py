"""Attempts of a job at checkpoints: every rank joins the same ones, in the same order, and learns the same decision.

Nothing here is a collective: rank 0 names an attempt through the store, votes and the decision are files. So a rank that died
makes others wait for a deadline, and no longer.
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING

from engram.errors import RankFailed
from engram.format import disk, series
from engram.ranks import looks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engram.format.checkpoints import Manifest
    from engram.ranks import Ranks

#: Seconds after which a rank tries to decide without rank 0, which may be dead, or without all votes, of which one may be against.
_TRY_S = 2.0
#: Seconds that they leave rank 0 at the deadline, to give up for all.
_GRACE_S = 2.0


class Attempts:
    """One series of checkpoints of one job.

    Args:
        root: of the series; the same folder for all ranks.
        ranks: of the job. Each makes this in the same order, if there are several.
        known: what this process knows of the series.
    """

    def __init__(self, root: Path, ranks: Ranks, known: series.Known) -> None:
        self.root, self.ranks, self.known = root, ranks, known
        self.section = ranks.section()
        """Before all of its keys in the store."""
        self._epoch: int | None = None
        self._told: list[str] = []
        self._began = 0.0

    @property
    def epoch(self) -> int:
        """Of this incarnation of the job. Rank 0's first call claims it, and commits what an earlier one left undecided.

        Raises:
            RankFailed: rank 0 has not said it. OSError: the folder cannot be used.
        """
        if self._epoch is None:
            if self.ranks.rank:
                raise RankFailed("rank 0 has not begun anything here yet.")
            self._epoch = series.claim_epoch(self.root)
            series.recover(self.root, self._epoch)
        return self._epoch

    def claim(self, timeout: float) -> int:
        """The same on all ranks, which must all call this. Raises :class:`RankFailed`: some did not."""
        _, given = self.ranks.run_on_all("epoch", self._own_epoch, timeout)
        self._epoch = int(given[0])
        return self._epoch

    def _own_epoch(self) -> tuple[None, bytes]:
        return None, str(self.epoch).encode() if self.ranks.rank == 0 else b""

    def begin(self, number: int, begun: Callable[[], Path], timeout: float) -> Path:
        """The folder of the attempt of that number, which rank 0 begins; others hear of it, or of its error.

        Raises:
            RankFailed: rank 0 could not begin it, or did not in time; or this folder is not visible here. Where there is no other
                rank, whatever ``begun`` raised.
        """
        key = f"{self.section}attempt/{number}"
        if self.ranks.rank:
            return self._joined(key, timeout)
        self._began = time.monotonic()
        self._told += [key, _joined_of(key)]
        try:
            folder = begun()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.ranks.set(key, json.dumps({"error": text}).encode())
            self.joined(number, timeout)
            if self.ranks.world == 1 or not isinstance(error, Exception):
                raise
            raise RankFailed(f"save: rank 0: {text}") from error
        self.ranks.set(key, json.dumps({"name": folder.name, "epoch": self.epoch}).encode())
        return folder

    def joined(self, number: int, timeout: float) -> None:
        """Return on rank 0 when all others have heard of the attempt of that number, at the latest ``timeout`` seconds after it
        began.

        The vote of a rank says that, too. So this is for an attempt that ends without all votes.
        """
        if self.ranks.rank == 0:
            left = self._began + timeout - time.monotonic()
            self.ranks.leave(_joined_of(f"{self.section}attempt/{number}"), self.ranks.world - 1, left)

    def forget(self) -> None:
        """All ranks have voted for the last attempt: no rank reads its entries, or those of earlier ones, any more."""
        for key in self._told:
            self.ranks.forget(key)
        self._told.clear()

    def _joined(self, key: str, timeout: float) -> Path:
        started = time.monotonic()
        raw = self.ranks.wait([key], timeout)[0]
        if raw is None:
            raise RankFailed(f"save: rank 0 began no checkpoint within {timeout:g} s.")
        self.ranks.leave(_joined_of(key), 0, 0.0)
        said = json.loads(raw)
        if "error" in said:
            raise RankFailed(f"save: rank 0: {said['error']}")
        self._epoch = int(said["epoch"])
        name = series.Name.parse(said["name"])
        if name is None:
            raise RankFailed(f"save: expected the name of an attempt from rank 0, got {said['name']!r:.100}.")
        folder = self.root / str(name)
        for _ in looks(started + timeout - time.monotonic(), at_files=True):
            if os.path.lexists(folder / series.ATTEMPT):
                return folder
            disk.look_again(self.root, folder)
        raise RankFailed(
            f"save: rank {self.ranks.rank}: expected {folder}, which rank 0 made, found none in {timeout:g} s. Is it a file "
            "system that all ranks share?"
        )

    def decided(self, folder: Path, timeout: float) -> Manifest:
        """The decision on an attempt, when it is there; after ``timeout`` seconds votes that are missing are ones against.

        Raises:
            RuntimeError: a later incarnation of the job has taken over.
        """
        world, asked, when = self.ranks.world, 0.0, looks(math.inf, at_files=True)
        missing = [] if self.ranks.rank else [*range(world)]
        while (made := series.decision(folder)) is None:
            passed = next(when)
            late = passed > timeout + (_GRACE_S if self.ranks.rank else 0)
            while missing and series.has_voted(folder, missing[-1], world):
                missing.pop()
            if late or passed - asked > _TRY_S or not (missing or self.ranks.rank):
                asked = passed
                give_up = f"after {timeout:g} s" if late else None
                made = series.decide(folder, self.epoch, give_up=give_up, known=self.known)
                if made is not None:
                    break
        return made


def _joined_of(key: str) -> str:
    """The counter of ranks that have heard of an attempt."""
    return f"{key}/joined"
