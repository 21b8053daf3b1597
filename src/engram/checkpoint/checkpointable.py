"""What a Checkpointer asks of a buffer, and of the processes that have its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sized
    from pathlib import Path

    from engram.checkpoint.reports import Options, RestoreOptions, RestoreReport, SaveReport, Wanted
    from engram.reshard.driver import Reshard
    from engram.saved.checkpoints import Checkpoint
    from engram.saved.snapshot import Snapshot
    from engram.types import BufferLoad, Form


class Savers(Protocol):
    """The processes that have the rows of a buffer: each is a rank, and saves and restores its own."""

    def open(self, root: Path, options: Options) -> None:
        """Make a Checkpointer in each. Raises what making them raises; ``RankFailed``: one is gone."""

    def begin(self, step: int, user: Mapping[str, object]) -> None:
        """Begin a save, and return when all have taken their snapshots. Raises as ``Checkpointer.save``."""

    def end(self) -> SaveReport:
        """Wait for the save. Raises as ``Checkpointer.save``."""

    def restore(self, wanted: Wanted, options: RestoreOptions) -> RestoreReport:
        """Load a checkpoint. Raises as ``Checkpointer.restore``."""

    def prune(self, keep: int | None) -> list[str]:
        """As ``Checkpointer.prune``."""


class Checkpointable(Protocol):
    """A buffer, as a Checkpointer saves and restores it."""

    closed: bool

    @property
    def savers(self) -> Savers | None:
        """What saves and restores it where its rows are; None: this process does."""

    @property
    def storage(self) -> Sized:
        """Its rows."""

    @property
    def form(self) -> Form:
        """How it keeps its rows."""

    def empty(self) -> None:
        """Forget all rows."""

    def snapshot(self, *, prefetched: Literal["save", "drop"]) -> Snapshot:
        """All that a checkpoint saves, as it is now."""

    def prepare_load(
        self, checkpoint: Checkpoint, rank: int, *, default_rng: bool, close_open: bool, convert: bool
    ) -> BufferLoad:
        """Check the shard of a rank of a checkpoint, which must stay open until the load is committed."""

    def prepare_placed(
        self, checkpoint: Checkpoint, made: Reshard, rank: int, *, env_offset: int, default_rng: bool, convert: bool
    ) -> BufferLoad:
        """Check what a plan gives to a rank."""
