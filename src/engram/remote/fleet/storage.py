"""The storage of a buffer whose rows are in several stores."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from engram._support import fork
from engram._support.native import NotAdmitted
from engram._support.unsupported import refusing
from engram.errors import RowError
from engram.remote import protocol
from engram.remote.fleet import plans
from engram.remote.fleet.draws import Draws
from engram.remote.fleet.members import Ledger, Members
from engram.remote.served import Drawn, ServedStorage
from engram.storages import Storage
from engram.types import Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from engram.persist.roles import Roles
    from engram.remote.fleet.members import Joining, Missing, Shard
    from engram.remote.storage import RemoteStorage
    from engram.store.limits import Rules
    from engram.types import WritePlan


#: Counters of stores of which the fleet's is the largest, not the sum.
_LARGEST = ("consumer_version", "larger_than_memory", "reads_from_files", "writes_to_files")
_ROW = (1 << plans.SHIFT) - 1


_SUMS = ("bytes_ram", "bytes_disk", "sample_count", "add_per_s", "sample_per_s")
#: Of which the largest is the worst, or the largest of all rows.
_WORST = ("sample_wait_ms_p50", "sample_wait_ms_p99", "checkpoint_age_s", "age_p99", "priority_max")
#: Shares and means, which rows of all stores count in alike.
_MEANS = ("age_mean", "never_sampled_frac", "priority_mean")
#: What a store need not have to be left out: no call has waited there.
_WHERE_KNOWN = ("sample_wait_ms_p50", "sample_wait_ms_p99")
#: What a store without rows lacks.
_OF_ROWS = ("age_p99", "priority_max", *_MEANS)


def combined(stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> dict[str, float]:
    """What ``RemoteStorage.gauges`` says of each of these stores, as of one store with all their rows.

    Sizes, counts and rates are summed. Means are those of all rows. Of waits, of the age of the last checkpoint and of ``age_p99``, the
    worst store decides. ``priority_ess`` is that of draws which choose a store by its mass, as a fleet does. A number is not there if
    a store that answers does not know it; so nothing is, if one has a server of an older engram.
    """
    if not stores or not all(gauges for _, gauges in stores):
        return {}
    found = {name: value for name in (*_SUMS, *_WORST, *_MEANS) for value in _one(name, stores)}
    found |= {"replay_ratio": _ratio(stores), "usage_counted": min(gauges["usage_counted"] for _, gauges in stores)}
    effective = _effective(stores)
    return found if effective is None else found | {"priority_ess": effective}


def _one(name: str, stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> Iterator[float]:
    """The number of all stores, or nothing."""
    numbers = [(state.size, gauges.get(name)) for state, gauges in stores if state.size or name not in _OF_ROWS]
    known = [(size, value) for size, value in numbers if value is not None]
    if not known or (len(known) < len(numbers) and name not in _WHERE_KNOWN):
        return
    values = [value for _, value in known]
    if name in _MEANS:
        yield sum(size * value for size, value in known) / sum(size for size, _ in known)
    else:
        yield sum(values) if name in _SUMS else max(values)


def _ratio(stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> float:
    """Rows sampled for each row inserted. Of a store that was never sampled, all rows written count as inserted."""
    inserted = (
        gauges["sample_count"] / gauges["replay_ratio"] if gauges["replay_ratio"] else state.write_count
        for state, gauges in stores
    )
    return sum(gauges["sample_count"] for _, gauges in stores) / max(sum(inserted), 1)


def _effective(stores: Sequence[tuple[protocol.State, dict[str, float]]]) -> float | None:
    """Of rows with leaves ``p``: ``(sum p)² / sum p²``. Of each store the first sum is its mass. None: not all stores say it."""
    whole = squares = 0.0
    for state, gauges in stores:
        if not state.size:
            continue
        if state.mass is None or "priority_ess" not in gauges:
            return None
        whole += state.mass.total
        if gauges["priority_ess"]:
            squares += state.mass.total**2 / gauges["priority_ess"]
    return whole**2 / squares if squares else None


def random_turn() -> int:
    """Where nothing tells clients that begin to write at the same time apart."""
    return random.getrandbits(48)


class FleetStorage(ServedStorage):
    """The rows of several stores that servers have open, as one storage.

    Args:
        storages: of each.
        missing, stratum: as ``ReplayBuffer.connect`` has them.
        joining: finds stores that did not answer at first.
        turn: of clients that begin to write at the same time, each gets another number.
    """

    def __init__(
        self,
        storages: Sequence[RemoteStorage],
        missing: Missing,
        stratum: int | None,
        joining: Joining | None = None,
        turn: Callable[[], int] = random_turn,
    ) -> None:
        super().__init__()
        self._turn = turn
        self._join(storages, missing, stratum, joining)

    def _join(
        self, storages: Sequence[RemoteStorage], missing: Missing, stratum: int | None, joining: Joining | None
    ) -> None:
        first = storages[0]
        assert first.memory is not None  # it is described
        schema, self._stratum = first.memory.schema, stratum
        self.members = Members(storages, missing, joining, epochs="has_epochs" in first.served.traits_of_sampler)
        self.ledger = Ledger(self.members)
        self.describe(schema, f"in {len(storages)} served stores", self.ledger, first.memory.participant)
        self.draws = Draws(self.members, first.served, schema.row_bytes, stratum)
        #: Rows of the batches in each message under way.
        self._ahead: deque[int] = deque()
        self._homes = fork.rlock()
        #: The store that rows of this buffer go to.
        self._home: Shard | None = None
        #: Updates for rows of stores that were gone.
        self._dropped = 0

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def served(self) -> protocol.Served:
        return self.members.shards[0].storage.served

    @property
    def max_size(self) -> int:
        return sum(shard.storage.max_size for shard in self.members.shards)

    @property
    def requested_size(self) -> int:
        return sum(shard.storage.requested_size for shard in self.members.shards)

    @property
    def nbytes(self) -> int:
        return sum(shard.storage.nbytes for shard in self.members.shards)

    def state(self) -> protocol.State:
        found = [state for _, state in self.members.answers(self.members.ask)]
        names = dict.fromkeys(name for state in found for name in state.counters)
        counters: dict[str, int | float] = {}
        for name in names:
            values = [state.counters.get(name, 0) for state in found]
            counters[name] = max(values) if name in _LARGEST else sum(values)
        counters["priority_updates_dropped"] += self._dropped
        members = {"shards": len(self.members.shards), "shards_missing": len(self.members.shards) - len(found)}
        counters |= {
            **members,
            "rows_missing": self.members.rows_missing,
            **self.members.counters(),
            **self.draws.counters(),
        }
        sizes = sum(state.size for state in found), sum(state.write_count for state in found)
        return protocol.State(*sizes, counters, (0.0, 0.0, 0, 0), {}, None, sum(state.writers for state in found))

    def gauges(self) -> dict[str, float]:
        ask = self.members.ask
        return combined([both for _, both in self.members.answers(lambda it: (ask(it), it.storage.gauges()))])

    def consumer_version(self, at_least: int | None = None) -> int:
        """The largest of all stores, which those learn that are there now; and those that are gone, when they are back."""
        with self._homes:
            known = max(self._versions(at_least))
            if at_least is None:
                return known
            self.members.version = known
            return max(self._versions(known))

    def _versions(self, at_least: int | None) -> Iterator[int]:
        """Of those that are there."""
        for shard, version in self.members.answers(lambda it: it.storage.consumer_version(at_least)):
            if at_least is not None:
                shard.change()
            yield version

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def batches_in_message(self, rows: int) -> int:
        return 1 if self.members.epochs else super().batches_in_message(rows)

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        """As many batches as the limits of the fleet admit. Raises ``NotAdmitted``: none."""
        admitted = self._admitted(rows, len(keys))
        try:
            self.draws.ask_for(keys[:admitted], rows)
        except BaseException:
            self.ledger.counted(rows * admitted, samples=True)
            raise
        self._ahead.append(rows * admitted)

    def _admitted(self, rows: int, calls: int) -> int:
        admitted = self.ledger.admit(rows, calls, samples=True)
        if not admitted:
            raise NotAdmitted(rows)
        return admitted

    def _count(self) -> None:
        """Messages that came, or were forgotten, are counted."""
        while len(self._ahead) > self.draws.messages:
            self.ledger.counted(self._ahead.popleft(), samples=True)

    def answer(self, rows: int) -> list[Callable[[], Drawn]]:  # noqa: ARG002 - the plan of the batch says it
        try:
            return [partial(Drawn, *batch) for batch in self.draws.answer()]
        finally:
            self._count()

    def settle(self) -> None:
        self.draws.settle()

    def forget_asked(self) -> None:
        self.draws.forget_asked()
        self._count()

    def draw(self, key: int, rows: int) -> Drawn:
        self._admitted(rows, 1)
        try:
            return self.draws.draw(key, rows)
        finally:
            self.ledger.counted(rows, samples=True)

    def can_sample(self, rows: int) -> bool:
        return rows > 0 and self.draws.can_sample()

    def check_rows(self, rows: Tensor, call: str = "update_priority") -> None:
        sizes = torch.tensor([shard.storage.max_size for shard in self.members.shards], device="cpu")
        stores, inside = rows >> plans.SHIFT, rows & _ROW
        known = (stores >= 0) & (stores < len(sizes))
        bad = rows[(rows != -1) & ~(known & (inside < sizes[stores.clamp(0, len(sizes) - 1)]))]
        if len(bad):
            raise RowError(
                f"{call}: expected rows that batches have, store << {plans.SHIFT} | row, of {len(sizes)} stores of "
                f"{sizes.tolist()} rows, or -1, got {int(bad[0])}."
            )

    def prioritize(self, rows: Tensor, priorities: Tensor, tickets: Tensor | None) -> None:
        for shard, at in self._owners(rows):
            if not shard.lost:
                with self.members.reaching(shard):
                    own = None if tickets is None else tickets[at]
                    shard.storage.prioritize(rows[at] & _ROW, priorities[at], own)
                    continue
            self._dropped += len(at)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def home(self) -> Shard:
        """The store that rows of this buffer go to: while it is there, it stays the one. Raises ``ConnectionError``: none is there."""
        with self._homes:
            if self._home is None or self._home.lost:
                turn, stores = self._turn(), len(self.members.shards)
                found = self.members.answers(self.members.ask)
                self._home = min((state.writers, (it.number - turn) % stores, it) for it, state in found)[2]
            return self._home

    def limit(self, rules: Rules, unconsumed: int) -> None:  # noqa: ARG002 - each store knows its own
        self.ledger.set(rules)

    def write(self, plan: WritePlan, prepared: list[Tensor], n: int) -> Write:
        if not self.ledger.admit(n, samples=False):
            raise NotAdmitted(n)
        try:
            shard = self.home()
            with self.members.needing(shard):
                written = shard.storage.write(plan, prepared, n)
        finally:
            self.ledger.counted(n, samples=False)
        shard.change()
        return Write(plans.number(written.rows, shard.number), 0)

    def check_removal(self, rows: Tensor) -> None:
        """Raises, too: ``RuntimeError``, ``ConnectionError``: as a store of rows does, or it is gone."""
        self.check_rows(rows, "remove")
        for shard, at in self._owners(rows):
            if shard.lost:
                raise ConnectionError(
                    f"remove: expected the stores of all rows, but {shard.storage!r} is gone. Nothing is removed."
                )
            with self.members.needing(shard, "Nothing is removed."):
                shard.storage.check_removal(rows[at] & _ROW)

    def remove(self, rows: Tensor, expected: Tensor | None) -> int:
        removed = 0
        for shard, at in self._owners(rows):
            with self.members.needing(shard, f"remove: {removed} rows of other stores are removed."):
                removed += shard.storage.remove(rows[at] & _ROW, None if expected is None else expected[at])
            shard.change()
        return removed

    def _owners(self, rows: Tensor) -> list[tuple[Shard, Tensor]]:
        """The stores of rows, and which of the rows each has: int64 ``[k]``."""
        places = plans.places_of(torch.where(rows < 0, -1, rows >> plans.SHIFT))
        return [(self.members.shards[number], at) for number, at in places.items() if number >= 0]

    def empty(self, *, keep_write_count: bool) -> None:
        self.members.check_all_present("empty", " Nothing is emptied.")
        for shard in self.members.shards:
            shard.storage.empty(keep_write_count=keep_write_count)
            shard.change()
        self.ledger.emptied()

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        """Of the store that rows of this buffer go to."""
        shard = self.home()
        rows: Tensor = shard.storage.end_trajectories(lanes, roles, terminated=terminated)
        return plans.number(rows, shard.number)

    fetch_dump = refusing("dumps", "Dump each of the stores, or save checkpoints of ranks, where they are.")

    # ---- life ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        storages = [shard.storage for shard in self.members.shards]
        members = self.members
        return {"storages": storages, "missing": members.missing, "stratum": self._stratum, "joining": members.joining}

    def __setstate__(self, state: dict[str, object]) -> None:
        Storage.__init__(self)
        self._turn = random_turn
        self._join(*cast("tuple[list[RemoteStorage], Missing, int | None, Joining | None]", (*state.values(),)))

    def close(self) -> None:
        members = self.members
        super().close()
        members.close()

    def __repr__(self) -> str:
        return f"FleetStorage({', '.join(repr(shard.storage) for shard in self.members.shards)})"
