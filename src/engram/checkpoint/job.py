"""What all saves and restores of one Checkpointer share."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from engram._progress import Work
from engram._words import warn
from engram.checkpoint.commit_protocol import Attempts
from engram.checkpoint.options import Heard
from engram.format import disk, series
from engram.format.checkpoints import rank_folder
from engram.persist import parts
from engram.persist.roles import doubts
from engram.persist.snapshot import RowsSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engram._progress import OnProgress
    from engram.checkpoint.options import Options
    from engram.format.parts import PartField, PartInfo, PartReader
    from engram.persist.parts import Snapshot
    from engram.persist.rows import SavedRows
    from engram.ranks import Ranks
    from engram.types import Checkpointable


class Parent(NamedTuple):
    """A checkpoint whose segments can be linked, as long as the lineage of the storage is this."""

    path: Path
    lineage: object


class Job:
    """A buffer, the ranks that save it together, and what one save leaves for the next.

    Args:
        root: the folder of the series.
        buffer: of this rank.
        ranks: of the job.
        options: of the Checkpointer.
        doubtful: warn once of fields that a restore on other ranks may misunderstand.
    """

    def __init__(self, root: Path, buffer: Checkpointable, ranks: Ranks, options: Options, *, doubtful: bool) -> None:
        self.root, self.buffer, self.ranks, self.options = root, buffer, ranks, options
        self.known = series.Known()
        """What this process read and wrote of the series, so that no document is decoded twice."""
        self.protocol = Attempts(root, ranks, self.known)
        self.heard = Heard()
        self.parent: Parent | None = None
        self._since_full = 0
        self._doubtful = doubtful

    def snapshot(self) -> Snapshot:
        """What a checkpoint is of: the buffer as it is now."""
        snapshot = self.buffer.snapshot(prefetched=self.options.prefetch)
        self.tell_doubts(snapshot.rows.fields(self.options.roles), snapshot)
        return snapshot

    def tell_doubts(self, fields: Sequence[PartField], snapshot: Snapshot) -> None:
        """Warn once of what a restore on other ranks would do to rows of these fields; a rank without rows, by those of others."""
        if not fields or not self._doubtful or snapshot.form.ranking is not None or snapshot.form.ndim > 1:
            return
        self._doubtful = False
        for text in doubts(fields, self.options.roles):
            warn(f"Checkpointer: {text}.")

    # ---- the parent ------------------------------------------------------------------------------------------------------

    def parent_of(self, snapshot: Snapshot) -> Parent | None:
        """The checkpoint to link from: the last one of this very storage, if it is still there."""
        parent, every = self.parent, self.options.full_every
        due = every is not None and self._since_full + 1 >= every
        if parent is None or due or snapshot.form.lineage is None or parent.lineage != snapshot.form.lineage:
            return None
        return None if series.look(parent.path, self.known) else parent

    def saved(self, path: Path, snapshot: Snapshot, parent: Parent | None) -> None:
        """There is a new checkpoint, which had this parent."""
        if self.parent is not None and self.ranks.rank:  # rank 0 forgets what it retires
            self.known.forget(self.parent.path.name)
        self.parent = Parent(path, snapshot.form.lineage)
        rows = snapshot.rows
        if isinstance(rows, RowsSnapshot) and not rows.store.readonly:
            rows.store.core.count_save()
        self._since_full = 0 if parent is None else self._since_full + 1

    # ---- the shard of this rank ------------------------------------------------------------------------------------------

    def write_shard(
        self, attempt: Path, step: int, snapshot: Snapshot, parent: Parent | None, progress: OnProgress | None = None
    ) -> None:
        """Write it, and vote for the attempt."""
        rank = self.ranks.rank
        rows, infos = self.write_parts(attempt / rank_folder(rank, self.ranks.world), snapshot, parent, progress)
        series.accept(attempt, rank, infos, rows.shard, step=step, known=self.known)

    def write_parts(
        self, folder: Path, snapshot: Snapshot, parent: Parent | None, progress: OnProgress | None
    ) -> tuple[SavedRows, list[PartInfo]]:
        """Write its parts, but for the vote."""
        options = self.options
        with contextlib.ExitStack() as stack, disk.batched_fsync():
            reader: PartReader | None = None
            if parent is not None:
                checkpoint = stack.enter_context(self.known.open(parent.path))
                reader = stack.enter_context(checkpoint.part(self.ranks.rank, parts.STORAGE))
            # Other ranks print to the same terminal.
            work = stack.enter_context(Work("saving", snapshot.rows.nbytes, progress, quiet=self.ranks.rank > 0))
            rows = snapshot.rows.save_segments(
                folder / parts.STORAGE,
                roles=options.roles,
                parent=reader,
                paranoid=options.paranoid,
                progress=work,
            )
            return rows, [rows.info, *parts.write_parts(folder, snapshot.parts)]

    def write_crash(self, attempt: Path) -> None:
        """Write the shard of this rank. If that fails, it is missing: there is no vote against what others can save."""
        snapshot = self.snapshot()
        self.write_shard(attempt, self.heard.step, snapshot, self.parent_of(snapshot))
