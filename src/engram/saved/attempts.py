"""One attempt at a checkpoint of a series: it begins, ranks vote, and one decision is made, all derived from files alone.

Commit and abort compete for one file name: the second process to decide reports the decision of the first. A process that sees a
later epoch than its own decides nothing and removes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engram.format import schema, strict
from engram.saved import description, disk, documents, part_reader, part_writer
from engram.saved.checkpoints import Checkpoint, Contents, Vote, manifest_of, read_shard, shard_of, sync_parts
from engram.saved.documents import REFUSAL, SHARD, Attempt, Manifest, Refusal, corrupt, rank_folder

_NAME = re.compile(r"ckpt-([0-9]{12,18})-e([0-9]{4,9})-([0-9a-f]{8}|crash[0-9]{1,9})")
EPOCH = re.compile(r"EPOCH-([0-9]{8})")
_ATTEMPT_ID = re.compile(r"[0-9a-f]{8}|crash[0-9]{1,9}")


class Name(NamedTuple):
    """The parts of a folder's name. Names compare by age: the newest is the largest."""

    step: int
    epoch: int
    attempt: str

    def __str__(self) -> str:
        return f"ckpt-{self.step:012d}-e{self.epoch:04d}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The parts of a name; None: it is not the name of an attempt."""
        found = _NAME.fullmatch(text)
        name = cls(int(found[1]), int(found[2]), found[3]) if found else None
        return name if str(name) == text else None


# ---- epochs ----------------------------------------------------------------------------------------------------------


def newest_epoch(root: Path) -> int:
    """The latest incarnation of the job that began in this folder; 0: none did."""
    disk.look_again(root)
    return max([int(found[1]) for name in os.listdir(root) if (found := EPOCH.fullmatch(name))], default=0)


def claim_epoch(root: Path) -> int:
    """Begin an incarnation of the job. From now on, earlier ones can neither commit nor remove anything.

    Removes temporary files that killed processes left.

    Raises:
        OSError: no space, no permission, or an I/O error; or a file system of which two processes could each make a file of one name.
    """
    for name in os.listdir(root):
        if documents.LEFTOVER.fullmatch(name):
            disk.remove(root / name)
    disk.check_names_once(root)
    for epoch in itertools.count(newest_epoch(root) + 1):
        with contextlib.suppress(FileExistsError):
            disk.create(root / f"EPOCH-{epoch:08d}", 0).close()
            break
    disk.sync_folder(root)
    return epoch


def check_epoch(root: Path, epoch: int) -> None:
    newest = newest_epoch(root)
    if newest > epoch:
        raise RuntimeError(
            f"{root}: expected no later incarnation of this job than {epoch}, got {newest}. This process was replaced: "
            "it may decide nothing and remove nothing here. End it."
        )


# ---- an attempt ------------------------------------------------------------------------------------------------------


def begin(
    root: Path,
    *,
    step: int,
    epoch: int,
    world: int,
    trigger: str,
    parent: str | None = None,
    user: Mapping[str, object] | None = None,
    attempt: str | None = None,
) -> Path:
    """Make the folder of an attempt, for all ranks. It is on disk when this returns.

    Args:
        root: of the series.
        step: of the training.
        epoch: of this incarnation.
        world: how many ranks must vote.
        trigger: who asked for it, in a word.
        parent: name of the checkpoint that segments are linked from.
        user: the user's own state, as JSON.
        attempt: eight hex digits, or ``crash`` and a number. Default: one that is larger than those before at this step.

    Raises:
        TypeError: ``user`` has something that JSON has no word for; names it.
        ValueError: a number or id that is out of range; ``user`` is too long or too deep.
        RuntimeError: a later incarnation has begun.
    """
    if not (0 <= step < 10**18 and 0 <= epoch < 10**8 and 1 <= world <= documents.MAX_RANKS):
        raise ValueError(
            f"begin: expected a step, an epoch and 1 to {documents.MAX_RANKS} ranks, got {step}, {epoch} and {world}."
        )
    attempt = _next_attempt(root, step, epoch) if attempt is None else attempt
    if not _ATTEMPT_ID.fullmatch(attempt):
        raise ValueError(f"begin: expected eight hex digits, or 'crash' and a number, got {attempt!r:.100}.")
    check_epoch(root, epoch)
    name, told = str(Name(step, epoch, attempt)), dict(user or {})
    begun = Attempt(
        name=name, attempt=attempt, epoch=epoch, step=step, world=world, trigger=trigger, parent=parent, user=told
    )
    raw, folder = documents.encode(begun), root / name
    disk.make_folder(folder)
    try:
        with disk.batched_fsync():
            disk.put(f"{folder}/{documents.ATTEMPT}", raw)
            disk.sync_folder(folder)
            disk.sync_folder(root)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(folder)
        raise
    return folder


def _next_attempt(root: Path, step: int, epoch: int) -> str:
    """A free name. Of several attempts at one step, the last one sorts as the newest."""
    of_the_step = [name.attempt for name in names(root) if name[:2] == (step, epoch)]
    before = [int(attempt[:4], 16) for attempt in of_the_step if not attempt.startswith("crash")]
    return f"{min(max(before, default=-1) + 1, 0xFFFF):04x}{secrets.token_hex(2)}"


def read_attempt(folder: Path, contents: Contents | None = None) -> Attempt:
    """What ``begin`` was told.

    Args:
        folder: of the attempt.
        contents: what this process knows of the attempt.

    Raises:
        CorruptCheckpoint: it is missing or damaged, or of another folder.
    """
    if contents is not None and contents.attempt is not None:
        return contents.attempt
    with documents.open_folder(folder, "an attempt") as fd:
        attempt = documents.read(folder, fd, documents.ATTEMPT, Attempt)
    if attempt.name != folder.name or not 1 <= attempt.world <= documents.MAX_RANKS:
        raise corrupt(folder / documents.ATTEMPT, f"expected the attempt {folder.name}, got {attempt.name!r:.100}")
    if contents is not None:
        contents.attempt = attempt
    return attempt


def accept(
    folder: Path,
    rank: int,
    parts: Sequence[part_writer.PartInfo],
    rows: documents.ShardRows,
    *,
    step: int | None = None,
    contents: Contents | None = None,
) -> documents.Shard:
    """A rank's vote for an attempt: its parts are finished, in ``folder / rank_folder(rank, world)``.

    Args:
        folder: of the attempt.
        rank: which votes.
        parts: as ``PartWriter.finish`` returned them.
        rows: what it holds; bytes are filled in.
        step: of this rank. Default: that of the attempt.
        contents: what this process knows of the attempt; this shard is added.

    Raises:
        FileExistsError: this rank has voted yes already.
        OSError: no space, or an I/O error. It has not voted.
    """
    attempt = read_attempt(folder, contents)
    own = folder / rank_folder(rank, attempt.world)
    shard = shard_of(attempt, rank, own, parts, rows, "segments", step)
    raw = documents.encode(shard)
    if contents is not None:
        contents.wrote(rank_folder(rank, attempt.world), shard, raw, parts)
    with disk.batched_fsync():
        sync_parts(own, shard)
        disk.sync_folder(own)
        disk.sync_folder(folder)
    if not disk.publish(f"{own}/{SHARD}", raw):
        raise FileExistsError(f"{own / SHARD}: expected no vote of rank {rank} yet.")
    return shard


def refuse(folder: Path, rank: int, error: str) -> None:
    """Vote against an attempt. Removes what the rank has written there, unless the rank voted for it before.

    Raises:
        OSError: it could not say so: the attempt ends at its deadline.
    """
    attempt = read_attempt(folder)
    own = folder / rank_folder(rank, attempt.world)
    if not os.path.lexists(own / SHARD):
        with contextlib.suppress(OSError):
            disk.remove(own)
    with contextlib.suppress(FileExistsError):
        disk.make_folder(own)
    disk.publish(own / REFUSAL, documents.encode(Refusal(attempt=attempt.attempt, rank=rank, error=error[:10_000])))


def withdraw(folder: Path, rank: int) -> None:
    """Remove what a rank wrote for an attempt that was aborted, to free the disk. The vote stays.

    Raises:
        CorruptCheckpoint: the attempt cannot be read. OSError: something cannot be removed.
    """
    own = folder / rank_folder(rank, read_attempt(folder).world)
    for name in set(os.listdir(own)) - {SHARD, REFUSAL}:
        disk.remove(own / name)


def votes(folder: Path, attempt: Attempt | None = None, contents: Contents | None = None) -> list[Vote]:
    """The vote of every rank, as far as it has voted.

    Args:
        folder: of the attempt.
        attempt: what :func:`read_attempt` says of it; None: it is read.
        contents: what this process knows of the attempt.

    Raises:
        CorruptCheckpoint: the attempt cannot be read. A vote that cannot be read is one against.
    """
    attempt = read_attempt(folder, contents) if attempt is None else attempt
    contents = contents or Contents()
    with documents.open_folder(folder, "an attempt") as fd:
        return [_vote(folder, fd, attempt, rank, contents) for rank in range(attempt.world)]


def _vote(folder: Path, fd: int, attempt: Attempt, rank: int, contents: Contents) -> Vote:
    own = rank_folder(rank, attempt.world)
    if not has_voted(folder, rank, attempt.world):
        return Vote(rank, None, None, None)
    try:
        if os.path.lexists(f"{folder}/{own}/{REFUSAL}"):
            return Vote(rank, None, None, documents.read(folder, fd, f"{own}/{REFUSAL}", Refusal).error)
        shard, entry = read_shard(folder, fd, f"{own}/{SHARD}", contents)
        said = (shard.attempt, shard.epoch, shard.rank, shard.world)
        if said != (attempt.attempt, attempt.epoch, rank, attempt.world):
            raise corrupt(folder / own / SHARD, f"expected the vote of rank {rank} on {attempt.name}, got {said}")
    except documents.UNREADABLE as error:
        return Vote(rank, None, None, str(error))
    return Vote(rank, shard, entry, None)


def has_voted(folder: Path, rank: int, world: int) -> bool:
    """Whether a rank has voted for an attempt or against it."""
    own = f"{folder}/{rank_folder(rank, world)}"
    if os.path.lexists(f"{own}/{SHARD}") or os.path.lexists(f"{own}/{REFUSAL}"):
        return True
    disk.look_again(folder, own)
    return os.path.lexists(f"{own}/{SHARD}") or os.path.lexists(f"{own}/{REFUSAL}")


def decision(folder: Path) -> Manifest | None:
    """The decision on an attempt; None: there is none yet.

    Raises:
        CorruptCheckpoint: the manifest is damaged.
    """
    path = f"{folder}/{documents.MANIFEST}"
    if not os.path.lexists(path):
        disk.look_again(folder)
        if not os.path.lexists(path):
            return None
    with documents.open_folder(folder, "an attempt") as fd:
        return Manifest.decode(documents.read_small(folder, fd, documents.MANIFEST, strict.MAX_BYTES), path)


def decide(
    folder: Path, epoch: int, *, give_up: str | None = None, contents: Contents | None = None
) -> Manifest | None:
    """Commit an attempt if all ranks voted for it and every file has its size. Abort it if a rank voted against it.

    Any process may call this, any number of times: there is one decision, and every caller gets it.

    Args:
        folder: of the attempt.
        epoch: of the incarnation that calls.
        give_up: why not to wait for votes that are missing, at the deadline: aborts.
        contents: what this process knows of the attempt; what is read is added.

    Returns:
        The decision. None: votes are missing.

    Raises:
        CorruptCheckpoint: the attempt cannot be read, or its decision is damaged.
        RuntimeError: a later incarnation has begun, and nothing is decided.
    """
    made = decision(folder)
    if made is not None:
        return made
    check_epoch(folder.parent, epoch)
    attempt = read_attempt(folder, contents)
    given = votes(folder, attempt, contents)
    reasons = [f"rank {vote.rank}: {vote.error.removesuffix('.')}" for vote in given if vote.error is not None]
    missing = [vote.rank for vote in given if vote.shard is None and vote.error is None]
    if missing and not reasons:
        if give_up is None:
            return None
        reasons = [f"{give_up}: no vote of ranks {missing}"[:10_000]]
    if not reasons:
        reasons = _unfit(folder, attempt, given, contents)
    manifest = manifest_of(attempt, given, reasons).sealed()
    first = disk.publish(f"{folder}/{documents.MANIFEST}", documents.encode(manifest))
    disk.sync_folder(folder.parent)
    return manifest if first else decision(folder)


def _unfit(folder: Path, attempt: Attempt, given: Sequence[Vote], contents: Contents | None) -> list[str]:
    """Why the shards make no checkpoint, although all ranks voted for theirs; empty: they make one."""
    by_schema: dict[str, list[int]] = {}
    for vote in given:
        if vote.shard is not None and vote.shard.schema_sum != description.NO_SCHEMA:
            by_schema.setdefault(vote.shard.schema_sum, []).append(vote.rank)
    if len(by_schema) > 1:
        return [_unlike(folder, attempt.world, by_schema)[:10_000]]
    with Checkpoint(folder, manifest_of(attempt, given, []), contents) as checkpoint:
        return [str(problem).removesuffix(".") for problem in checkpoint.problems("meta")][:100]


def _unlike(folder: Path, world: int, by_schema: Mapping[str, Sequence[int]]) -> str:
    """Names the ranks by schema, and the first differences between the schemas."""
    alike = [(f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}", of[0]) for of in by_schema.values()]
    text = f"expected one schema on all ranks, got {len(alike)}"
    fields = []
    for _, rank in alike:
        try:
            with part_reader.PartReader(folder / rank_folder(rank, world) / "storage") as part:
                fields.append(part.schema or ())
        except (*documents.UNREADABLE, OSError):
            return f"{text}: of {', of '.join(name for name, _ in alike)}"
    first = alike[0][0]
    return f"{text}: " + "; ".join(
        f"{name}, beside {first}: {', '.join(schema.field_differences(fields[0], theirs)) or 'their sums differ'}"
        for theirs, (name, _) in zip(fields[1:], alike[1:], strict=True)
    )


def names(root: Path) -> list[Name]:
    """All attempts, the newest first, decided or not."""
    disk.look_again(root)
    found = [Name.parse(text) for text in os.listdir(root) if text.startswith("ckpt-")]
    return sorted(filter(None, found), reverse=True)


def is_partial(folder: Path) -> bool:
    """Whether some ranks of an attempt voted for it, none against it, and nothing is decided."""
    try:
        given = votes(folder) if decision(folder) is None else []
    except documents.UNREADABLE:
        return False
    return any(vote.shard for vote in given) and not any(vote.error for vote in given)


def open_partial(folder: Path) -> Checkpoint:
    """The shards of the ranks that voted for an attempt. Raises ``CorruptCheckpoint``: they do not fit together, or there are none."""
    attempt = read_attempt(folder)
    given = [vote for vote in votes(folder) if vote.shard is not None]
    if not given:
        raise corrupt(folder, "expected shards of some ranks, found none")
    return Checkpoint.partial(folder, manifest_of(attempt, given, []), [vote.rank for vote in given])
