"""A series of checkpoints below one folder: attempts, votes and decisions, all derived from files alone.

::

    <root>/LATEST                               name of the newest one; a hint
           EPOCH-00000007                       create-only: the seventh incarnation of the job began
           ckpt-000000120000-e0007-00001c2d/    step, epoch, attempt: its number at this step, then at random
             attempt.json                       written first
             rank-00000-of-00004/shard.json     a rank's vote: yes.    error.json: no
             manifest.json                      the decision, create-only: complete or aborted
           trash-<name>/                        being removed

Commit and abort compete for one file name: the second process to decide reports the decision of the first. A process that sees a
later epoch than its own decides nothing and removes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from engram._support.words import count
from engram.errors import CorruptCheckpoint, IncompatibleCheckpoint
from engram.format import disk, files, leases, pins, strict
from engram.format.checkpoints import (
    ATTEMPT,
    LEFTOVER,
    MANIFEST,
    MAX_RANKS,
    REFUSAL,
    SHARD,
    Attempt,
    Checkpoint,
    Contents,
    Manifest,
    Shard,
    ShardEntry,
    ShardRows,
    rank_folder,
    read_shard,
    shard_of,
    sync_parts,
)
from engram.format.description import NO_SCHEMA
from engram.format.part_reader import PartReader
from engram.format.problems import Problem, corrupt, problem_of, read_small
from engram.format.schema import field_differences

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from engram.format.part_writer import PartInfo

__all__ = [
    "ATTEMPT",
    "LATEST",
    "Attempt",
    "Known",
    "Name",
    "Refusal",
    "Vote",
    "accept",
    "begin",
    "claim_epoch",
    "decide",
    "decision",
    "has_voted",
    "is_partial",
    "is_series",
    "latest",
    "manifest_of",
    "names",
    "newest_epoch",
    "open_partial",
    "prune",
    "read_attempt",
    "recover",
    "refuse",
    "retire",
    "set_latest",
    "sweep",
    "votes",
    "withdraw",
]

LATEST = "LATEST"

_NAME = re.compile(r"ckpt-([0-9]{12,18})-e([0-9]{4,9})-([0-9a-f]{8}|crash[0-9]{1,9})")
_EPOCH = re.compile(r"EPOCH-([0-9]{8})")
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


class Refusal(strict.Document, frozen=True, kw_only=True):
    """A rank's vote against an attempt."""

    attempt: str
    rank: int
    error: str
    format: Literal["engram.error"] = "engram.error"


class Vote(NamedTuple):
    """The vote of a rank, as far as it has voted."""

    rank: int
    shard: Shard | None
    """It voted yes."""
    entry: ShardEntry | None
    error: str | None
    """It voted no, or its vote cannot be read. Neither: it has not voted."""


class Known:
    """What a process remembers of the checkpoints of a series, so that it reads each document once, and none that it wrote.

    It still compares the manifest and the size of every file each time. Only a job uses this: verification reads everything.
    """

    def __init__(self) -> None:
        self._contents: dict[str, Contents] = {}

    def contents(self, folder: Path) -> Contents:
        """The documents of an attempt or a checkpoint of the series; empty if none is known yet."""
        return self._contents.setdefault(folder.name, Contents())

    def open(self, folder: Path, manifest: Manifest | None = None) -> Checkpoint:
        """A checkpoint of the series. Raises as :class:`Checkpoint`."""
        return Checkpoint(folder, manifest, self.contents(folder))

    def confirms(self, folder: Path) -> bool:
        """Whether a known checkpoint still has the same manifest and the exact size of every file. If not, it is forgotten."""
        contents = self._contents.get(folder.name)
        if contents is None or contents.manifest is None:
            return False
        with contextlib.suppress(CorruptCheckpoint, OSError, KeyError), _open(folder) as fd:
            raw = read_small(folder, fd, MANIFEST, strict.MAX_BYTES)
            if hashlib.sha256(raw).hexdigest() == contents.sha256 and disk.have_sizes(fd, contents.sizes):
                return True
        self.forget(folder.name)
        return False

    def forget(self, name: str) -> None:
        """Drop what is known of a checkpoint."""
        self._contents.pop(name, None)


# ---- epochs ----------------------------------------------------------------------------------------------------------


def newest_epoch(root: Path) -> int:
    """The latest incarnation of the job that began in this folder; 0: none did."""
    disk.look_again(root)
    return max([int(found[1]) for name in os.listdir(root) if (found := _EPOCH.fullmatch(name))], default=0)


def claim_epoch(root: Path) -> int:
    """Begin an incarnation of the job. From now on, earlier ones can neither commit nor remove anything.

    Removes temporary files that killed processes left.

    Raises:
        OSError: no space, no permission, or an I/O error; or a file system of which two processes could each make a file of one name.
    """
    for name in os.listdir(root):
        if LEFTOVER.fullmatch(name):
            disk.remove(root / name)
    disk.check_names_once(root)
    for epoch in itertools.count(newest_epoch(root) + 1):
        with contextlib.suppress(FileExistsError):
            disk.create(root / f"EPOCH-{epoch:08d}", 0).close()
            break
    disk.sync_folder(root)
    return epoch


def _check_epoch(root: Path, epoch: int) -> None:
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
    if not (0 <= step < 10**18 and 0 <= epoch < 10**8 and 1 <= world <= MAX_RANKS):
        raise ValueError(
            f"begin: expected a step, an epoch and 1 to {MAX_RANKS} ranks, got {step}, {epoch} and {world}."
        )
    attempt = _next_attempt(root, step, epoch) if attempt is None else attempt
    if not _ATTEMPT_ID.fullmatch(attempt):
        raise ValueError(f"begin: expected eight hex digits, or 'crash' and a number, got {attempt!r:.100}.")
    _check_epoch(root, epoch)
    name = str(Name(step, epoch, attempt))
    raw = strict.encode(
        Attempt(
            name=name,
            attempt=attempt,
            epoch=epoch,
            step=step,
            world=world,
            trigger=trigger,
            parent=parent,
            user=dict(user or {}),
        )
    )
    folder = root / name
    disk.make_folder(folder)
    try:
        with disk.batched_fsync():
            disk.put(f"{folder}/{ATTEMPT}", raw)
            disk.sync_folder(folder)
            disk.sync_folder(root)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(folder)
        raise
    return folder


def _next_attempt(root: Path, step: int, epoch: int) -> str:
    """A free name. Of several attempts at one step, the last one sorts as the newest."""
    before = [
        int(name.attempt[:4], 16)
        for name in names(root)
        if name[:2] == (step, epoch) and not name.attempt.startswith("crash")
    ]
    return f"{min(max(before, default=-1) + 1, 0xFFFF):04x}{secrets.token_hex(2)}"


def read_attempt(folder: Path, known: Known | None = None) -> Attempt:
    """What ``begin`` was told.

    Args:
        folder: of the attempt.
        known: what this process knows of the series.

    Raises:
        CorruptCheckpoint: it is missing or damaged, or of another folder.
    """
    contents = Contents() if known is None else known.contents(folder)
    if contents.attempt is not None:
        return contents.attempt
    with _open(folder) as fd:
        raw = read_small(folder, fd, ATTEMPT, strict.MAX_BYTES)
    attempt = strict.decode(raw, f"{folder}/{ATTEMPT}", Attempt)
    if attempt.name != folder.name or not 1 <= attempt.world <= MAX_RANKS:
        raise corrupt(folder / ATTEMPT, f"expected the attempt {folder.name}, got {attempt.name!r:.100}")
    contents.attempt = attempt
    return attempt


def accept(
    folder: Path,
    rank: int,
    parts: Sequence[PartInfo],
    rows: ShardRows,
    *,
    step: int | None = None,
    known: Known | None = None,
) -> Shard:
    """A rank's vote for an attempt: its parts are finished, in ``folder / rank_folder(rank, world)``.

    Args:
        folder: of the attempt.
        rank: which votes.
        parts: as ``PartWriter.finish`` returned them.
        rows: what it holds; bytes are filled in.
        step: of this rank. Default: that of the attempt.
        known: what this process knows of the series; this shard is added.

    Raises:
        FileExistsError: this rank has voted yes already.
        OSError: no space, or an I/O error. It has not voted.
    """
    attempt = read_attempt(folder, known)
    own = folder / rank_folder(rank, attempt.world)
    shard = shard_of(attempt, rank, own, parts, rows, "segments", step)
    raw = strict.encode(shard)
    if known is not None:
        known.contents(folder).wrote(rank_folder(rank, attempt.world), shard, raw, parts)
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
    disk.publish(own / REFUSAL, strict.encode(Refusal(attempt=attempt.attempt, rank=rank, error=error[:10_000])))


def withdraw(folder: Path, rank: int) -> None:
    """Remove what a rank wrote for an attempt that was aborted, to free the disk. The vote stays.

    Raises:
        CorruptCheckpoint: the attempt cannot be read. OSError: something cannot be removed.
    """
    own = folder / rank_folder(rank, read_attempt(folder).world)
    for name in set(os.listdir(own)) - {SHARD, REFUSAL}:
        disk.remove(own / name)


def votes(folder: Path, attempt: Attempt | None = None, known: Known | None = None) -> list[Vote]:
    """The vote of every rank, as far as it has voted.

    Args:
        folder: of the attempt.
        attempt: what :func:`read_attempt` says of it; None: it is read.
        known: what this process knows of the series.

    Raises:
        CorruptCheckpoint: the attempt cannot be read. A vote that cannot be read is one against.
    """
    attempt = read_attempt(folder, known) if attempt is None else attempt
    contents = Contents() if known is None else known.contents(folder)
    with _open(folder) as fd:
        return [_vote(folder, fd, attempt, rank, contents) for rank in range(attempt.world)]


def _vote(folder: Path, fd: int, attempt: Attempt, rank: int, contents: Contents) -> Vote:
    own = rank_folder(rank, attempt.world)
    if not has_voted(folder, rank, attempt.world):
        return Vote(rank, None, None, None)
    try:
        if os.path.lexists(f"{folder}/{own}/{REFUSAL}"):
            path = folder / own / REFUSAL
            refusal = strict.decode(read_small(folder, fd, f"{own}/{REFUSAL}", strict.MAX_BYTES), path, Refusal)
            return Vote(rank, None, None, refusal.error)
        shard, entry = read_shard(folder, fd, f"{own}/{SHARD}", contents)
        said = (shard.attempt, shard.epoch, shard.rank, shard.world)
        if said != (attempt.attempt, attempt.epoch, rank, attempt.world):
            raise corrupt(folder / own / SHARD, f"expected the vote of rank {rank} on {attempt.name}, got {said}")
    except (CorruptCheckpoint, IncompatibleCheckpoint) as error:
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
    path = f"{folder}/{MANIFEST}"
    if not os.path.lexists(path):
        disk.look_again(folder)
        if not os.path.lexists(path):
            return None
    with _open(folder) as fd:
        return Manifest.decode(read_small(folder, fd, MANIFEST, strict.MAX_BYTES), path)


def decide(folder: Path, epoch: int, *, give_up: str | None = None, known: Known | None = None) -> Manifest | None:
    """Commit an attempt if all ranks voted for it and every file has its size. Abort it if a rank voted against it.

    Any process may call this, any number of times: there is one decision, and every caller gets it.

    Args:
        folder: of the attempt.
        epoch: of the incarnation that calls.
        give_up: why not to wait for votes that are missing, at the deadline: aborts.
        known: what this process knows of the series; this checkpoint is added.

    Returns:
        The decision. None: votes are missing.

    Raises:
        CorruptCheckpoint: the attempt cannot be read, or its decision is damaged.
        RuntimeError: a later incarnation has begun, and nothing is decided.
    """
    made = decision(folder)
    if made is not None:
        return made
    _check_epoch(folder.parent, epoch)
    attempt = read_attempt(folder, known)
    given = votes(folder, attempt, known)
    reasons = [f"rank {vote.rank}: {vote.error.removesuffix('.')}" for vote in given if vote.error is not None]
    missing = [vote.rank for vote in given if vote.shard is None and vote.error is None]
    if missing and not reasons:
        if give_up is None:
            return None
        reasons = [f"{give_up}: no vote of ranks {missing}"[:10_000]]
    if not reasons:
        reasons = _unfit(folder, attempt, given, Known() if known is None else known)
    manifest = manifest_of(attempt, given, reasons).sealed()
    first = disk.publish(f"{folder}/{MANIFEST}", strict.encode(manifest))
    disk.sync_folder(folder.parent)
    return manifest if first else decision(folder)


def _unfit(folder: Path, attempt: Attempt, given: Sequence[Vote], known: Known) -> list[str]:
    """Why the shards make no checkpoint, although all ranks voted for theirs; empty: they make one."""
    by_schema: dict[str, list[int]] = {}
    for vote in given:
        if vote.shard is not None and vote.shard.schema_sum != NO_SCHEMA:
            by_schema.setdefault(vote.shard.schema_sum, []).append(vote.rank)
    if len(by_schema) > 1:
        return [_unlike(folder, attempt.world, by_schema)[:10_000]]
    with known.open(folder, manifest_of(attempt, given, [])) as checkpoint:
        return [str(problem).removesuffix(".") for problem in checkpoint.problems("meta")][:100]


def _unlike(folder: Path, world: int, by_schema: Mapping[str, Sequence[int]]) -> str:
    """Names the ranks by schema, and the first differences between the schemas."""
    alike = [
        (f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}", ranks[0]) for ranks in by_schema.values()
    ]
    text = f"expected one schema on all ranks, got {len(alike)}"
    fields = []
    for _, rank in alike:
        try:
            with PartReader(folder / rank_folder(rank, world) / "storage") as part:
                fields.append(part.schema or ())
        except (CorruptCheckpoint, IncompatibleCheckpoint, OSError):
            return f"{text}: of {', of '.join(name for name, _ in alike)}"
    first = alike[0][0]
    return f"{text}: " + "; ".join(
        f"{name}, beside {first}: {', '.join(field_differences(fields[0], theirs)) or 'their sums differ'}"
        for theirs, (name, _) in zip(fields[1:], alike[1:], strict=True)
    )


def manifest_of(attempt: Attempt, given: Sequence[Vote], reasons: Sequence[str]) -> Manifest:
    """The decision on an attempt: complete, or aborted for these reasons."""
    shards = [vote.shard for vote in given if vote.shard is not None]
    schema_sums = {shard.schema_sum for shard in shards} - {NO_SCHEMA}  # where nothing was ever written there is none
    complete = not reasons
    return Manifest(
        name=attempt.name,
        step=attempt.step,
        steps_by_rank=tuple(shard.step for shard in shards) if complete else (),
        world=attempt.world,
        trigger=attempt.trigger,
        status="complete" if complete else "aborted",
        reasons=tuple(reasons),
        parent=attempt.parent,
        schema_sum=min(schema_sums, default=NO_SCHEMA) if complete else "",
        shards=tuple(vote.entry for vote in given if vote.entry is not None) if complete else (),
        user=attempt.user if complete else {},
    )


def _open(folder: Path) -> files.Descriptor:
    try:
        return disk.open_folder(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise corrupt(folder, "expected the folder of an attempt, found none") from error


# ---- the series ------------------------------------------------------------------------------------------------------


def is_series(root: Path) -> bool:
    """Whether checkpoints were made below this folder."""
    with contextlib.suppress(OSError):
        return any(name == LATEST or _EPOCH.fullmatch(name) or Name.parse(name) for name in os.listdir(root))
    return False


def names(root: Path) -> list[Name]:
    """All attempts, the newest first, decided or not."""
    disk.look_again(root)
    found = [Name.parse(text) for text in os.listdir(root) if text.startswith("ckpt-")]
    return sorted(filter(None, found), reverse=True)


def recover(root: Path, epoch: int) -> list[str]:
    """Commit each attempt that all ranks voted for and that no process decided, because it died first. Returns their names."""
    committed = []
    for name in names(root):
        folder = root / str(name)
        with contextlib.suppress(CorruptCheckpoint, IncompatibleCheckpoint):  # latest() reports it
            if decision(folder) is None and all(vote.shard for vote in votes(folder)):
                made = decide(folder, epoch)
                if made is not None and made.status == "complete":
                    committed.append(made.name)
    return committed


def latest(
    root: Path, *, at_most: int | None = None, without: Collection[str] = (), known: Known | None = None
) -> tuple[Path | None, list[Problem]]:
    """The newest checkpoint that is complete, with the exact size of every file, and the newer ones that were passed over.

    Args:
        root: of the series.
        at_most: the largest step that is wanted.
        without: names that are passed over.
        known: what this process knows of the series.

    Returns:
        ``(folder, problems)``; None: there is none.
    """
    problems: list[Problem] = []
    found: Path | None = None
    for name in names(root):
        if (at_most is not None and name.step > at_most) or str(name) in without:
            continue
        wrong = look(root / str(name), known)
        if wrong is None:
            found = root / str(name)
            break
        problems.append(wrong)
    hint = _hint(root)
    if at_most is None and not without and hint != (found.name if found else None) and not _lags(root, hint, found):
        problems.append(
            Problem(
                root / LATEST, f"expected the name of {found.name if found else 'no checkpoint'}, got {hint!r:.100}"
            )
        )
    return found, problems


def _lags(root: Path, hint: str | None, found: Path | None) -> bool:
    """Whether a process may have died between its decision and the hint: the hint names an older good checkpoint, or is missing."""
    newest = Name.parse(found.name) if found else None
    if newest is None:
        return False
    before = Name.parse(hint or "")
    if before is not None:
        return before < newest and before.epoch <= newest.epoch and look(root / str(before)) is None
    return not os.path.lexists(root / LATEST) and not any(
        look(root / str(name)) is None for name in names(root) if name < newest
    )


def look(folder: Path, known: Known | None = None) -> Problem | None:
    """Why a folder of a series is no checkpoint; None: it is one, with the exact size of every file.

    Args:
        folder: of the checkpoint.
        known: what this process knows of the series.
    """
    if known is not None and known.confirms(folder):
        return None
    try:
        made = decision(folder)
        if made is None:
            given = votes(folder)
            said_yes = sum(vote.shard is not None for vote in given)
            return Problem(folder, f"undecided: {said_yes} of {count(len(given), 'rank')} voted for it")
        if made.status == "aborted":
            return Problem(folder, f"aborted: {', '.join(made.reasons)[:1000]}")
        if made.name != folder.name:
            return Problem(folder / MANIFEST, f"expected the checkpoint {folder.name}, got {made.name!r:.100}")
        with (Known() if known is None else known).open(folder) as checkpoint:
            return next(checkpoint.problems("meta"), None)
    except CorruptCheckpoint as error:
        return problem_of(error)
    except IncompatibleCheckpoint as error:
        return Problem(folder, str(error).removesuffix("."))


def is_unfinished(root: Path) -> bool:
    """Whether a series holds nothing but saves that were killed or given up, which never were checkpoints.

    What the living ranks of a crashed job saved is none of those: it is all that the job left.
    """
    try:
        every = [(name, decision(root / str(name))) for name in names(root)]
    except (CorruptCheckpoint, IncompatibleCheckpoint):
        return False
    left = any(name.attempt.startswith("crash") and is_partial(root / str(name)) for name, _ in every)
    ended = left or os.path.lexists(root / LATEST) or any(made and made.status != "aborted" for _, made in every)
    return not ended


def is_partial(folder: Path) -> bool:
    """Whether some ranks of an attempt voted for it, none against it, and nothing is decided."""
    try:
        given = votes(folder) if decision(folder) is None else []
    except (CorruptCheckpoint, IncompatibleCheckpoint):
        return False
    return any(vote.shard for vote in given) and not any(vote.error for vote in given)


def open_partial(folder: Path) -> Checkpoint:
    """The shards of the ranks that voted for an attempt. Raises ``CorruptCheckpoint``: they do not fit together, or there are none."""
    attempt = read_attempt(folder)
    given = [vote for vote in votes(folder) if vote.shard is not None and vote.entry is not None]
    if not given:
        raise corrupt(folder, "expected shards of some ranks, found none")
    manifest = msgspec.structs.replace(
        manifest_of(attempt, given, []),
        world=len(given),
        shards=tuple(
            msgspec.structs.replace(vote.entry, rank=i) for i, vote in enumerate(given) if vote.entry is not None
        ),
    )
    return Checkpoint.partial(folder, manifest, [vote.rank for vote in given], attempt.world)


def set_latest(root: Path, name: str, epoch: int) -> None:
    """Note the newest checkpoint: a hint for people and programs. Raises ``RuntimeError`` if a later incarnation has begun."""
    _check_epoch(root, epoch)
    disk.replace(f"{root}/{LATEST}", f"{name}\n".encode())


def _hint(root: Path) -> str | None:
    try:
        with disk.open_folder(root) as fd:
            return read_small(root, fd, LATEST, 256).decode("utf-8", "replace").strip()
    except CorruptCheckpoint:
        return None


def prune(root: Path, keep: int, epoch: int, known: Known | None = None) -> list[str]:
    """Remove old checkpoints and failed attempts: :func:`retire`, then :func:`sweep`. Names of what was removed."""
    removed = retire(root, keep, epoch, known)
    sweep(root)
    return removed


def retire(root: Path, keep: int, epoch: int, known: Known | None = None, saved: str | None = None) -> list[str]:
    """Rename old checkpoints and failed attempts, so that no process finds half a one: :func:`sweep` removes them.

    Kept are: the ``keep`` newest good checkpoints, by step and by epoch; whatever is of a later epoch, or of a later step than
    the newest good one; the newest crash attempt; undecided attempts of this epoch, which may be under way; good ones of steps
    that are pinned; the one that was just ``saved``; and what other processes read, as their leases say.

    Args:
        root: of the series.
        keep: at least 1.
        epoch: of this incarnation.
        known: what this process knows of the series.
        saved: the name of a checkpoint that stays even if it is of an earlier step than all that are kept.

    Returns:
        Their names.

    Raises:
        ValueError: ``keep`` is below 1.
        RuntimeError: a later incarnation has begun.
        OSError: something cannot be renamed.
    """
    if keep < 1:
        raise ValueError(f"prune: keep: expected at least 1, got {keep}.")
    _check_epoch(root, epoch)
    known = Known() if known is None else known
    retired = []
    for name in _superfluous(root, keep, epoch, known):
        if str(name) == saved:
            continue
        disk.rename(root / str(name), root / f"trash-{name}")
        retired.append(str(name))
        known.forget(str(name))
    if retired:
        disk.sync_folder(root)
    return retired


def sweep(root: Path) -> None:
    """Remove what :func:`retire` renamed, also in processes that were killed. Raises ``OSError``: something cannot be removed.

    Of files that a process of this machine has open, NFS keeps the bytes under other names: a later call removes those.
    """
    for left in sorted(os.listdir(root)):
        if left.startswith("trash-") and Name.parse(left.removeprefix("trash-")):
            try:
                disk.remove(root / left)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                    raise


def _superfluous(root: Path, keep: int, epoch: int, known: Known) -> list[Name]:
    every = names(root)
    # Looked at, all files of each, only as far as it is asked for.
    good = functools.cache(lambda name: look(root / str(name), known) is None)
    newest = [*itertools.islice(filter(good, every), keep)]
    if not newest:
        return []
    by_epoch = sorted(every, key=lambda name: (name.epoch, name.step), reverse=True)
    kept = {*newest, *itertools.islice(filter(good, by_epoch), keep)}
    kept |= set([name for name in every if name.attempt.startswith("crash")][:1])
    kept |= {name for name in every if name.epoch > epoch or name.step > newest[0].step}
    kept |= {name for name in every if name.epoch == epoch and not os.path.lexists(f"{root}/{name}/{MANIFEST}")}
    left = [name for name in every if name not in kept]
    steps = pins.pinned(root) if left else ()
    left = [name for name in left if not (name.step in steps and good(name))]
    leased = leases.leased(root) if left else ()
    return [name for name in left if str(name) not in leased]
