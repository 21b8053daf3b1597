"""``engram reshard``: a checkpoint of some ranks as one of others, without the program that made it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import click

from engram._support.progress import Work
from engram._support.words import count, format_number
from engram.cli.show import echo, print_json, problem, table
from engram.format import layout
from engram.reshard.driver import Reshard, disagreements, reshard_report
from engram.reshard.driver import reshard as run
from engram.reshard.plan import Policy, Target, checked_incomplete, open_shards
from engram.saved import attempts, disk, documents, parts, series
from engram.saved.checkpoints import Checkpoint, is_checkpoint
from engram.saved.parts import check_blocks, read_state, write_part
from engram.storages import LazyMemmapStorage
from engram.storages.announcing import temporary
from engram.types import Ranking
from engram.writers import TensorDictMaxValueWriter

#: How trajectories that are not whole are taken along all the same.
_WAYS = {
    "open": "--open keep (or truncate) keeps those without a last step",
    "headless": "--headless keep keeps those without a first one",
}
_OTHERWISE = "--max-drop-fraction 1 takes the rest"


class Resharding(TypedDict):
    """Options that say what becomes of rows."""

    capacity: int | None
    open_ones: str
    headless: str
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float


def reshard(
    source: Path, target: Path, ranks: int, lanes: int, *, dry_run: bool, as_json: bool, **how: Unpack[Resharding]
) -> None:
    """Plan, print the plan, and write it unless it is a dry run.

    Every block is read before that, so what a dry run prints can be written, and damaged rows leave nothing at the target.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CorruptCheckpoint: the checkpoint is damaged.
        IncompatibleCheckpoint: the checkpoint cannot be resharded like this.
        FileExistsError: the source lies at ``target``, or another checkpoint or a file does.
        OSError: no space, or an I/O error; nothing new is to be seen below ``target``.
    """
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(_found(source)))
        _check_target(target, checkpoint)
        targets = [Target(lanes, _lane_length(checkpoint, ranks, lanes, how["capacity"]))] * ranks
        incomplete = checked_incomplete({"open": how["open_ones"], "headless": how["headless"]})
        policy = Policy(incomplete, how["overflow"], _ranking(checkpoint))
        made = run(open_shards(checkpoint, stack), targets, policy)
        made.check_dropped(how["max_drop_fraction"], str(checkpoint.folder), _WAYS, _OTHERWISE)
        made.make_room()
        for rank in range(ranks):
            made.rows(rank)
            made.parts(checkpoint, rank)
        _check_rows(made)
        if not as_json:
            _show(checkpoint, made, disagreements(checkpoint, made))
        wrote = None if dry_run else target / _write(checkpoint, made, target)
        if as_json:
            notes = [problem(text, str(checkpoint.folder)) for text in disagreements(checkpoint, made)]
            found = {"source": str(checkpoint.folder), "wrote": None if wrote is None else str(wrote)}
            print_json({**found, **reshard_report(made, checkpoint.ranks), "problems": [], "notes": notes})
        elif wrote is not None:
            click.echo(f"wrote {wrote}")


def _check_rows(made: Reshard) -> None:
    """Read every block of the shards. Raises ``CorruptCheckpoint``: the first that is not as it was."""
    with Work("checking", sum(sum(one.reader.files.values()) for one in made.shards)) as progress:
        for one in made.shards:
            check_blocks(one.reader)
            progress(sum(one.reader.files.values()))


def _ranking(checkpoint: Checkpoint) -> Ranking | Literal["newest"] | None:
    """Which rows stay, if the writer that was saved puts them in no order."""
    state: dict[str, Any] = next(read_state(reader) for reader in checkpoint.parts(0) if reader.part == "writer")
    if state == {"ranking": "newest"}:
        return "newest"
    if state.keys() != {"rank_key", "reduction"}:
        return None
    return TensorDictMaxValueWriter(tuple(state["rank_key"]), state["reduction"]).ranking


def _found(source: Path) -> Path:
    if is_checkpoint(source):
        return source
    path = series.Series(source).latest()[0] if layout.is_series(source) else None
    if path is None:
        raise FileNotFoundError(f"{source}: expected a checkpoint that is whole, or a folder of them, found none.")
    return path


def _check_target(target: Path, checkpoint: Checkpoint) -> None:
    """Raise ``FileExistsError`` unless the source's own folder, and its job, stay as they are."""
    folder, where = checkpoint.folder.resolve(), target.resolve()
    if folder in (where, *where.parents) or (not checkpoint.is_dump and where == folder.parent):
        raise FileExistsError(
            f"{target}: expected another folder than that of SOURCE: a job that saves there would be replaced by what is written. "
            "Name a new one, and let the job of as many ranks restore from that."
        )
    if is_checkpoint(where) or (where.exists() and not where.is_dir()):
        raise FileExistsError(f"{target}: expected a new folder, or one of checkpoints, found something else.")


def _lane_length(checkpoint: Checkpoint, ranks: int, lanes: int, capacity: int | None) -> int:
    if capacity is None:
        total = 0
        for rank in range(checkpoint.manifest.world):
            with parts.open_storage(checkpoint, rank) as reader:
                total += reader.geometry.capacity if reader.geometry else 0
        capacity = -(-total // ranks)
    return max(1, -(-capacity // lanes))


def _show(checkpoint: Checkpoint, made: Reshard, differing: Iterable[str]) -> None:
    found = reshard_report(made, checkpoint.ranks)
    click.echo(f"{checkpoint.folder}: {count(len(found['shards']), 'rank')} → {len(found['targets'])}")
    columns = ("rank", "lanes", "rows", "episodes", "steps", "smallest", "largest", "unused")
    rows = [columns, *(map(format_number, it.values()) for it in found["targets"])]
    echo(table([[*row] for row in rows], right=range(len(columns)), headed=True))
    click.echo("rows: of a lane; smallest, largest: rows in the lane that has fewest, most; unused: of all lanes")
    counts = {"saved": found["saved"], "kept": found["kept"], "truncated": found["truncated"]}
    counts |= {f"dropped: {reason}": it for reason, it in found["dropped"].items() if it["episodes"]}
    for what, it in counts.items():
        click.echo(f"{what}: {count(it['episodes'], 'episode')}, {count(it['steps'], 'step')}")
    click.echo(f"plan {found['plan']}")
    for text in differing:
        click.echo(text)


def _write(checkpoint: Checkpoint, made: Reshard, root: Path) -> str:
    """One rank after the other, each through a store on the disk of the target: memory does not depend on their sizes."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    epoch = attempts.claim_epoch(root)
    manifest, world = checkpoint.manifest, len(made.targets)
    attempt = attempts.begin(root, step=manifest.step, epoch=epoch, world=world, trigger="reshard", user=manifest.user)
    total = sum(target.capacity for target in made.targets) * sum(f.row_bytes for f in made.fields)
    try:
        with Work("resharding", total) as progress:
            for rank in range(world):
                _write_rank(checkpoint, made, rank, attempt / documents.rank_folder(rank, world), attempt, progress)
        decided = attempts.decide(attempt, epoch)
        assert decided is not None  # all have voted
        if decided.status != "complete":
            raise OSError(f"{attempt}: {'; '.join(decided.reasons)}")
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(attempt)
        raise
    series.Series(root).set_latest(attempt.name, epoch)
    return attempt.name


def _write_rank(
    checkpoint: Checkpoint, made: Reshard, rank: int, folder: Path, attempt: Path, progress: Callable[[int], None]
) -> None:
    placed, target = made.rows(rank), made.targets[rank]
    roles = {field.key: field.role for field in made.shards[made.leader].reader.schema or ()}
    with tempfile.TemporaryDirectory(prefix=".reshard-", dir=attempt.parent) as scratch, temporary():
        storage = LazyMemmapStorage(target.capacity, lanes=target.lanes, scratch_dir=scratch)
        try:
            storage.prepare_rows(placed.state, placed.source).commit()
            snapshot = storage.prepare_snapshot(whole=False).take()
            with disk.batched_fsync():
                rows = snapshot.save_segments(folder / parts.STORAGE, roles=roles, progress=progress)
                others = made.parts(checkpoint, rank)
                infos = [rows.info, *(write_part(folder / part, part, kind, state) for part, kind, state in others)]
        finally:
            storage.close()
        attempts.accept(attempt, rank, infos, rows.shard)
