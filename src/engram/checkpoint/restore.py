"""One restore: which checkpoint, where its rows go, and the load, each agreed on by all ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import cast

from engram._support.progress import Work
from engram._support.words import raise_as, warn
from engram.checkpoint.reports import LatestStep, RestoreOptions, RestoreReport, Wanted, lost_with
from engram.checkpoint.save import Job, Parent
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint, RankFailed
from engram.reshard.driver import Reshard, disagreements, reshard, reshard_report
from engram.reshard.plan import Policy, Target, checked_incomplete, open_shards
from engram.saved import attempts, checkpoints, documents, parts
from engram.saved.series import Series
from engram.types import BufferLoad

_log = logging.getLogger("engram")

#: How trajectories that are not whole come back all the same.
_WAYS = {
    "open": 'incomplete={"open": "keep"} (or "truncate") keeps those without a last step',
    "headless": 'incomplete={"headless": "keep"} keeps those without a first one',
}
_OTHERWISE = "max_drop_fraction=1.0 loads the rest. The buffer is as it was"


class Restore:
    """A restore. With several ranks, each of them runs one.

    Args:
        job: whose buffer is restored.
        wanted: which checkpoint.
        options: how it is loaded; checked where all ranks hear of an error.
        work: counts the bytes that are read.
    """

    def __init__(self, job: Job, wanted: Wanted, options: RestoreOptions, work: Work) -> None:
        self._job, self._ranks, self._wanted, self._options = job, job.ranks, wanted, options
        self._work = work
        self._started = time.perf_counter()
        #: Each restore reads documents itself: what this process wrote may have been damaged since.
        self._series = Series(job.root)
        #: Newer checkpoints that were damaged or not complete.
        self._passed_over: list[documents.Problem] = []

    def run(self) -> RestoreReport:
        """Load the checkpoint that is wanted, or the next older one while they turn out to be damaged."""
        while True:
            path = self._choose()
            try:
                with contextlib.ExitStack() as stack:
                    load = _Load(self._job, self._options, path, self._series, stack, self._work)
                    return load.run(self._passed_over, self._started)
            except (CorruptCheckpoint, RankFailed) as error:
                # All ranks heard of the same, so all of them go on alike.
                whole = isinstance(error, RankFailed) and {*error.causes.values()} != {CorruptCheckpoint.__name__}
                if not self._wanted.is_open or whole:
                    raise
                damaged = (*self._wanted.damaged, documents.Problem(path, str(error)))
                self._wanted = self._wanted._replace(damaged=damaged)

    def _choose(self) -> Path:
        """The checkpoint that all ranks load, as rank 0 finds it."""
        self._passed_over, given = self._ranks.run_on_all("restore", self._find, self._job.options.timeout)
        kind, said = json.loads(given[0])
        if kind:
            raise (FileNotFoundError if kind == FileNotFoundError.__name__ else CorruptCheckpoint)(said)
        return cast("Path", self._job.root / said)

    def _find(self) -> tuple[list[documents.Problem], bytes]:
        self._options.check()
        self._wanted.check()
        if self._ranks.rank:
            return [], b""
        root = self._job.root
        try:  # all may have voted, and rank 0 died before it decided
            self._series.recover(attempts.newest_epoch(root))
        except (OSError, RuntimeError) as error:  # it may be a folder that is only read, or one where a job begins
            _log.warning("restore: what is undecided stays so: %s", error)
        try:
            path, problems = self._wanted.find(self._series)
        except (FileNotFoundError, CorruptCheckpoint) as error:
            return [], json.dumps([type(error).__name__, str(error)]).encode()
        return problems, json.dumps(["", path.name]).encode()


class _Load:
    """The load of one checkpoint, on this rank.

    Args:
        job, options: of the restore.
        path: of the checkpoint, the same on all ranks.
        series: what was read when it was chosen.
        stack: closes what was opened.
        work: counts the bytes that are read.
    """

    def __init__(
        self, job: Job, options: RestoreOptions, path: Path, series: Series, stack: contextlib.ExitStack, work: Work
    ) -> None:
        self._job, self._ranks, self._options, self._path = job, job.ranks, options, path
        self._series, self._stack, self._work = series, stack, work
        self._checkpoint: checkpoints.Checkpoint
        #: Of all ranks, where trajectories are redistributed; empty: every rank gets back its shard.
        self._targets: list[Target] = []
        #: Every block is checked before anything changes, as some rank holds rows that damage would cost.
        self._checks_blocks = False
        self._loaded = False
        self._converted = ""

    def run(self, passed_over: list[documents.Problem], started: float) -> RestoreReport:
        job, buffer, rank = self._job, self._job.buffer, self._ranks.rank
        self._open()
        checkpoint = self._checkpoint
        if not self._targets:
            saved, held = checkpoint.shard(rank).totals, len(buffer.storage) > 0
            self._work.total += saved.bytes_logical * (1 + (held or self._checks_blocks))
            self._checks_blocks &= not held  # a buffer that holds rows checks its shard itself
            self._commit_on_all(None)
            dealt, steps = None, len(buffer.storage)
            given_up = max(0, saved.steps - steps)
        else:
            made = self._plan()  # which has read all shards
            known = [shard.totals.bytes_logical for shard, _ in checkpoint.contents.shards.values()]
            self._work.total += sum(known) // self._ranks.world * (1 + self._checks_blocks)
            self._commit_on_all(made)
            dealt = reshard_report(made, checkpoint.ranks, lost_with(checkpoint, job.root))
            steps, given_up = dealt["targets"][rank]["steps"], 0
        manifest, path = checkpoint.manifest, self._path
        job.latest = LatestStep(manifest.step, manifest.user, manifest.step)
        job.parent = Parent(path, buffer.form.lineage) if dealt is None else None
        name, step, user, seconds = path.name, manifest.step, manifest.user, time.perf_counter() - started
        missing, converted = checkpoint.missing, self._converted
        return RestoreReport(name, step, path, steps, user, passed_over, seconds, missing, dealt, given_up, converted)

    # ---- opening ---------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._checkpoint, given = self._ranks.run_on_all("restore", self._opened, self._job.options.timeout)
        said = [json.loads(one) for one in given]
        self._checks_blocks = self._options.verify == "read" and any(holds for _, holds, *_ in said)
        if not all(same for same, *_ in said):
            self._targets = [Target(lanes, length) for *_, lanes, length in said]

    def _opened(self) -> tuple[checkpoints.Checkpoint, bytes]:
        """The checkpoint; whether this rank can get back its shard, whether it holds rows, and what it has room for."""
        path, options = self._path, self._options
        # Rank 0 has looked at it: no damage that an older one would be better than.
        with raise_as(RankFailed, f"expected {path.name} as rank 0 sees it", CorruptCheckpoint):
            if attempts.is_partial(path):
                checkpoint = attempts.open_partial(path)
            else:  # to verify is to read all again
                checkpoint = checkpoints.Checkpoint(path) if options.verify == "full" else self._series.open(path)
            self._stack.enter_context(checkpoint)
        checkpoint.progress = self._work
        if options.verify == "full" and self._ranks.rank == 0:
            self._work.total += checkpoint.nbytes
            for problem in checkpoint.problems("full"):
                raise documents.corrupt(*problem)
        planned = options.incomplete is not None or checkpoint.missing
        same = not planned and checkpoint.manifest.world == self._ranks.world and self._fits(checkpoint)
        buffer = self._job.buffer
        said = [same, len(buffer.storage) > 0, buffer.form.lanes, buffer.form.lane_length]
        return checkpoint, json.dumps(said).encode()

    def _fits(self, checkpoint: checkpoints.Checkpoint) -> bool:
        """Whether this rank's shard is of a storage like the one here."""
        form = self._job.buffer.form
        with parts.open_storage(checkpoint, self._ranks.rank) as reader:
            geometry = reader.geometry
        if geometry is None or geometry.columns:
            return geometry is None or form.ndim > 1
        return form.ndim == 1 and (geometry.capacity, geometry.lanes) == (form.capacity, form.lanes)

    # ---- planning --------------------------------------------------------------------------------------------------------

    def _plan(self) -> Reshard:
        (made, differing), digests = self._ranks.run_on_all("restore", self._planned, self._job.options.timeout)
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise RankFailed(f"restore: expected the plan of rank 0 on all ranks, got others on ranks {other}.")
        for text in differing if self._ranks.rank == 0 else ():
            warn(f"restore: {self._path.name}: {text}.")
        return made

    def _planned(self) -> tuple[tuple[Reshard, list[str]], bytes]:
        """The plan, and where ranks have saved different states."""
        self._check_takes_rows()
        options, checkpoint = self._options, self._checkpoint
        policy = Policy(checked_incomplete(options.incomplete), options.overflow, self._job.buffer.form.ranking)
        made = reshard(open_shards(checkpoint, self._stack), self._targets, policy)
        made.check_dropped(options.max_drop_fraction, f"restore: {self._path}", _WAYS, _OTHERWISE)
        return (made, disagreements(checkpoint, made)), made.plan.digest.encode()

    def _check_takes_rows(self) -> None:
        """Raise ``IncompatibleCheckpoint`` unless trajectories can be placed in the storage here."""
        form = self._job.buffer.form
        if form.ndim > 1:
            got = f"one with ndim={form.ndim}, whose columns advance together"
        elif not form.takes_rows:
            got = f"a {form.kind}"
        else:
            return
        raise IncompatibleCheckpoint(
            f"restore: {self._path}: expected a storage of tensors with lanes to redistribute trajectories to, got {got}. Make it "
            "with lanes=, or restore with as many ranks and into storages of the same kind and sizes as saved it."
        )

    # ---- loading ---------------------------------------------------------------------------------------------------------

    def _commit_on_all(self, made: Reshard | None) -> None:
        """Prepare the load on all ranks, then commit it. If one of them fails then, all buffers are empty."""
        timeout = self._job.options.timeout
        load, _ = self._ranks.run_on_all("restore", lambda: (self._prepared(made), b""), timeout)
        try:
            self._ranks.run_on_all("restore", partial(self._committed, load), timeout)
        except BaseException:
            if self._loaded:
                self._job.buffer.empty()
            raise

    def _prepared(self, made: Reshard | None) -> BufferLoad:
        buffer, options, rank = self._job.buffer, self._options, self._ranks.rank
        default_rng, convert = options.default_rng, options.convert
        if made is None:
            close_open = options.resume == "env_reset" and buffer.form.ranking is None
            load = buffer.prepare_load(
                self._checkpoint, rank, default_rng=default_rng, close_open=close_open, convert=convert
            )
        else:
            offset = sum(target.lanes for target in self._targets[:rank]) if options.env_id == "global" else 0
            load = buffer.prepare_placed(
                self._checkpoint, made, rank, env_offset=offset, default_rng=default_rng, convert=convert
            )
        if self._checks_blocks:  # the ranks share out the shards
            for shard in range(rank, self._checkpoint.manifest.world, self._ranks.world):
                with parts.open_storage(self._checkpoint, shard) as reader:
                    parts.check_blocks(reader)
        return load

    def _committed(self, load: BufferLoad) -> tuple[None, bytes]:
        load.commit()
        self._loaded, self._converted = True, load.converted
        return None, b""
