"""Fresh rows more often than stale ones, and rules that say which rows are drawn at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch

from engram._support import native
from engram._support.checks import check_callable, check_count, check_type
from engram._support.field_paths import FieldPath, checked_path, plain, public
from engram._support.state import Change, check_keys, integer, tensor_in
from engram.errors import IncompatibleCheckpoint, NoSampleable
from engram.samplers._base import DeclaredSampler, NativeSampler, check_drawable
from engram.store import blocks, indexes, row_indexes
from engram.store.row_indexes import MAX_READY, MAX_USES, ConsumerVersionIndex, ConsumptionIndex, GroupRules, Groups
from engram.types import Commit, Draw, Extent

if TYPE_CHECKING:
    from engram.store.sampled import SampledStorage


#: Versions are counted in int64, and drawn by in float64.
VERSION_LIMIT = 1 << 53
#: What knows which rows may be drawn.
_Index = TypeVar("_Index", bound=ConsumptionIndex | Groups)


class ConsumerVersion:
    """Up to which version the consumer of a storage's rows has come. Before the first write there it is this object's own.

    Args:
        name: of the storage's index.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._storage: SampledStorage | None = None
        self._own = ConsumerVersionIndex.alone(native.consumer_version_bytes)
        self._index: ConsumerVersionIndex | None = None

    def bind(self, storage: SampledStorage) -> None:
        """Take that of a storage from now on."""
        if storage is not self._storage:
            self._storage, self._index = storage, None
        self.index()

    def index(self) -> ConsumerVersionIndex:
        """That of the storage, or its own."""
        storage = self._storage
        memory = None if storage is None or storage.closed else storage.memory
        if memory is not None and (self._index is None or memory.readonly):  # others may make it later
            self._index = ConsumerVersionIndex.of_store(memory, self._name)
            self._index.core.raise_to(self._own.core.version)
        return self._own if self._index is None else self._index

    @property
    def now(self) -> int:
        """The version."""
        return self.index().core.version

    @now.setter
    def now(self, version: int) -> None:
        self.index().core.version = version

    def moved(self) -> None:
        """The storage's rows lie elsewhere now."""
        self._own.core.version = self.now
        self._index = None


class VersionedSampler(DeclaredSampler):
    """What draws by how far the versions of rows are behind that of their consumer."""

    _consumer: ConsumerVersion
    _rules: GroupRules

    @property
    def ready(self) -> tuple[str | FieldPath, ...]:
        """The fields without which a row is not drawn, or does not count."""
        return tuple(map(public, self._rules.ready))

    def moved(self) -> None:
        super().moved()
        self._consumer.moved()

    @property
    def consumer_version(self) -> int:
        """Up to which version the learner has come. Setting it to a smaller one has no effect."""
        return self._consumer.now

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        self._consumer.index().core.raise_to(check_version(value, type(self).__name__))

    def _ready_config(self) -> dict[str, object]:
        return {"ready": plain(list(self.ready))} if self.ready else {}

    def increment_consumer_version(self) -> None:
        """The learner has come to the next version.

        >>> from engram import LazyTensorStorage, ReplayBuffer, StalenessAwareSampler
        >>> sampler = StalenessAwareSampler(max_staleness=2, version_key="version")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
        >>> _ = rb.add({"obs": 0.0, "version": 0})
        >>> sampler.increment_consumer_version()
        >>> sampler.consumer_version
        1
        """
        self._consumer.index().core.increment()

    def __getstate__(self) -> dict[str, object]:
        own = {name: value for name, value in self.__dict__.items() if name != "_consumer"}
        return {**own, "_storage": None, "_index": None, "_table": None, "version": self.consumer_version}

    def __setstate__(self, state: dict[str, object]) -> None:
        version = cast("int", state.pop("version"))
        self.__dict__.update(state)
        self._consumer = ConsumerVersion(self.index_name)
        self._consumer.now = version


class StalenessAwareSampler(VersionedSampler, NativeSampler):
    """Draws rows in proportion to a weight of their staleness, ``consumer_version - stored version``. For asynchronous training.

    Rows bring the version of the policy that made them along, in the field ``version_key``: one number per row. The learner says
    which version it has come to, ``sampler.consumer_version = v`` or :meth:`increment_consumer_version`. A batch has each row once, but
    if it is larger than the number of rows that can be drawn, rows may repeat. ``info`` and TensorDict batches have ``"staleness"``,
    float32 ``[B]``.

    A :class:`FilteredSampler` around it takes ``max_staleness`` as one of its rules, beside ``ready`` and ``max_uses``.

    The consumer's version belongs to the storage, under the name ``index``, and only grows: all samplers, threads and processes that
    draw from a directory see the largest that any has set, also after a restart. ``rb.empty()`` sets it to 0, and a state that is
    loaded to what was saved. A version that is NaN is never drawn.

    Args:
        max_staleness: rows that are staler are not drawn. -1: there is no limit. May be set at any time, for this sampler.
        staleness_weight_fn: makes weights of a float32 tensor of stalenesses ``[V]``, one for each version that rows have: ``[V]``,
            finite, at least 0. Default ``1 / (s + 1)``, where rows that are newer than the consumer count as fresh, ``s = 0``.
        version_key: the field with the version: a key, or a path of keys.
        index: samplers with different names have versions of their own.
        ready: fields of floating numbers, 16 at most: a row is not drawn while one of them holds a NaN in it.

    Raises:
        TypeError: no int, ``staleness_weight_fn`` is no callable, or ``ready`` no sequence of keys. ValueError: ``max_staleness`` below
            -1, or too many fields.
        KeyError (when drawing): no such field. TypeError: a list storage, which has no fields, or versions that are no real numbers,
            one per row. ValueError: weights that are none, negative or infinite, or another number of them.
        NoSampleable (when drawing): no row, or all are too stale or have weight zero (a ``RuntimeError``).

    Cost: drawing ``B`` rows takes O(B log V + V), and O(rows written) after appends, for versions that are read; after an edit, or a
    write by number, a look at a word per row of the storage. Writers do nothing. Memory: 32 bytes per row and process, and on an
    accelerator the versions once more.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer, StalenessAwareSampler
    >>> sampler = StalenessAwareSampler(max_staleness=1)
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
    >>> _ = rb.extend({"x": torch.arange(6), "policy_version": torch.tensor([0, 0, 1, 1, 2, 2])})
    >>> sampler.consumer_version = 2
    >>> rb.sample()["x"].sort().values.tolist()
    [2, 3, 4, 5]
    """

    _index_kind = ConsumerVersionIndex.kind
    _storage: SampledStorage | None = None
    _table: native.Versions | None = None

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: str | FieldPath = "policy_version",
        *,
        index: str = "main",
        ready: Sequence[str | FieldPath] = (),
    ) -> None:
        check_callable("StalenessAwareSampler: staleness_weight_fn", staleness_weight_fn, "a callable", optional=True)
        indexes.check_index_name(index, "StalenessAwareSampler: index")
        self.max_staleness = max_staleness
        self._weigh = staleness_weight_fn
        self._key = checked_path(version_key, "StalenessAwareSampler: version_key")
        self.index_name = index
        self._consumer = ConsumerVersion(index)
        self.require(ready)

    # ---- settings ------------------------------------------------------------------------------------------------------

    @property
    def max_staleness(self) -> int:
        """Rows that are staler are not drawn; -1: there is no limit."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        self._max_staleness = check_count(
            "StalenessAwareSampler: max_staleness", value, least=-1, most=VERSION_LIMIT - 1
        )

    @property
    def version_key(self) -> str | FieldPath:
        """The field with the version of each row."""
        return public(self._key)

    # ---- where the version is ------------------------------------------------------------------------------------------

    def bind(self, storage: SampledStorage) -> None:
        if storage is not self._storage:
            self._storage, self._table = storage, None
        self._consumer.bind(storage)

    def moved(self) -> None:
        super().moved()
        self._table = None

    def require(self, ready: Sequence[str | FieldPath]) -> None:
        """Draw only rows in which none of these fields holds a NaN, in place of :attr:`ready`. Raises as the class does.

        A store notes it with the first write. Later, ``rb.set_sampler(rb.sampler)`` notes it.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, StalenessAwareSampler
        >>> sampler = StalenessAwareSampler()
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=1)
        >>> _ = rb.extend({"policy_version": torch.zeros(2), "reward": torch.tensor([1.0, torch.nan])})
        >>> sampler.require(["reward"])
        >>> rb.sample()["reward"].tolist()
        [1.0]
        """
        self._rules, self._table = GroupRules(_ready_fields(ready, "StalenessAwareSampler: ready")), None

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        check_drawable(extent.size)
        storage = self._storage
        assert storage is not None  # the buffer bound it
        table = self._rows(storage)
        versions, counts = table.versions()
        consumer = self.consumer_version
        drawn = table.draw(key, batch_size, versions, self._weights(consumer - versions))
        if drawn is None:
            raise NoSampleable(
                f"sample: expected rows with a staleness of at most max_staleness={self.max_staleness} and a weight above zero: "
                f"consumer_version={consumer}, and the {int(counts.sum())} rows have versions of "
                f"{[float(v) for v in versions[[0, -1]]] if len(versions) else []}. Raise max_staleness, or let actors take newer weights."
            )
        rows, tickets, of_rows = drawn
        return Draw(rows, tickets, {"staleness": (consumer - of_rows).float()})

    def masses(self, storage: SampledStorage) -> blocks.Masses:
        size, total = len(storage), 0.0
        if size:
            self.bind(storage)
            versions, counts = self._rows(storage).versions()
            total = float((self._weights(self.consumer_version - versions) * counts).sum())
        return blocks.Masses(total, 1.0, size)

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        """Whether a row is fresh enough, and has a weight. Raises as drawing, but not ``NoSampleable``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, StalenessAwareSampler
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=2)
        >>> _ = rb.extend({"policy_version": torch.zeros(3)})
        >>> fresh = sampler.can_sample(rb.storage, 2)
        >>> sampler.consumer_version = 2
        >>> fresh, sampler.can_sample(rb.storage, 2)
        (True, False)
        """
        return super().can_sample(storage, batch_size) and self.masses(storage).total > 0

    def _weights(self, staleness: torch.Tensor) -> torch.Tensor:
        """float64 ``[V]``: of each staleness. Raises ``ValueError``, ``TypeError``: the function makes other ones."""
        if self._weigh is None:
            weights = 1 / (staleness.clamp(min=0) + 1)
        else:
            made = self._weigh(staleness.float())
            made = check_type("sample: staleness_weight_fn", made, torch.Tensor, "a tensor of weights")
            weights = made.detach().to("cpu", torch.float64)
            if weights.shape != staleness.shape or not bool((weights.isfinite() & (weights >= 0)).all()):
                raise ValueError(
                    f"sample: staleness_weight_fn: expected {len(staleness)} finite weights of at least 0, [V], got "
                    f"{weights.tolist()!r:.80} of shape {list(weights.shape)}."
                )
        if self.max_staleness >= 0:
            weights = torch.where(staleness <= self.max_staleness, weights, 0.0)
        return weights.contiguous()

    def _rows(self, storage: SampledStorage) -> native.Versions:
        """The rows by version."""
        if self._table is None:
            if not storage.traits.has_fields:
                raise TypeError(
                    f"StalenessAwareSampler: expected a tensor storage, which has the field {self.version_key!r}; a "
                    f"{type(storage).__name__} has no fields."
                )
            assert storage.memory is not None  # it has rows
            self._table = row_indexes.rows_by_version(storage.memory, self._key, self._rules.ready)
        return self._table

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """``consumer_version`` and ``max_staleness``: ints.

        >>> from engram import StalenessAwareSampler
        >>> sampler = StalenessAwareSampler(max_staleness=3)
        >>> sampler.increment_consumer_version()
        >>> sampler.state_dict()
        {'consumer_version': 1, 'max_staleness': 3}
        """
        return {"consumer_version": self.consumer_version, "max_staleness": self.max_staleness}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where = "StalenessAwareSampler"
        check_keys(state_dict, ("consumer_version", "max_staleness"), where)
        version = integer(state_dict, "consumer_version", -VERSION_LIMIT + 1, VERSION_LIMIT, where)
        return Change(self._take, version, integer(state_dict, "max_staleness", -1, VERSION_LIMIT, where))

    def _take(self, version: int, max_staleness: int) -> None:
        self._consumer.now = version
        self.max_staleness = max_staleness

    def config(self) -> dict[str, object]:
        own = {"max_staleness": self.max_staleness, "version_key": plain(self.version_key), "index": self.index_name}
        return {**own, **self._ready_config()}

    @property
    def recordable(self) -> bool:
        return self._weigh is None


class IndexedSampler(NativeSampler, Generic[_Index]):
    """Draws rows that an index of the storage knows, under a name: those that follow rules."""

    _rules: GroupRules
    _storage: SampledStorage | None = None
    _index: _Index | None = None

    @property
    def draws_of_a_row(self) -> int | None:  # type: ignore[override]
        """After so many draws a row, or its group, is used up; None: never."""
        return self._rules.max_uses

    def _index_of(self, storage: SampledStorage) -> _Index | None:
        """The index of a storage; None while nothing was ever written there."""
        raise NotImplementedError

    def _attached(self) -> _Index | None:
        """The index; None while nothing was ever written."""
        storage = self._storage
        follows = self._index is not None and storage and storage.memory and storage.memory.readonly
        if storage is not None and not storage.closed and (self._index is None or follows):  # others may make it later
            self._index = self._index_of(storage)
        return self._index

    def moved(self) -> None:
        self._index = None

    def _uses(self) -> torch.Tensor:
        """int32 ``[n]``: how often each row was used, up to the last that was. A copy."""
        index = self._attached()
        uses = torch.zeros(0, dtype=torch.int32, device="cpu") if index is None else index.uses()
        used = uses.nonzero()
        return uses[: int(used[-1]) + 1 if len(used) else 0].clone()

    def _restore_uses(self, uses: torch.Tensor) -> None:
        if (index := self._attached()) is not None:
            index.restore_uses(uses)


class RuledSampler(VersionedSampler, IndexedSampler[_Index]):
    """Draws rows that are ready, fresh and not used up."""

    def _follow(
        self, who: str, rules: GroupRules, ready: object, max_staleness: int, version: str | FieldPath, index: str
    ) -> None:
        """Draw by these rules, and only rows that are ready and fresh. Raises ``TypeError``, ``ValueError``: arguments say no rules."""
        indexes.check_index_name(index, f"{who}: index")
        path = checked_path(version, f"{who}: policy_version")
        staleness = check_count(f"{who}: max_staleness", max_staleness, least=-1, most=VERSION_LIMIT - 1)
        self._rules = rules._replace(ready=_ready_fields(ready, f"{who}: ready"))
        if staleness >= 0:
            self._rules = self._rules._replace(version=path, max_staleness=staleness)
        self.index_name, self._consumer = index, ConsumerVersion(index)

    #: After so many draws a row, or its group, is used up; None: never.
    max_uses = IndexedSampler.draws_of_a_row

    @property
    def max_staleness(self) -> int:
        """Rows that are staler are not drawn; -1: they need no version."""
        return -1 if self._rules.version is None else self._rules.max_staleness

    def _floor(self) -> float:
        """The oldest version that is drawn; NaN: rows have none."""
        if self._rules.version is None:
            return math.nan
        return float(self._consumer.now - self._rules.max_staleness)

    def _passed_over(self) -> str:
        """Which rows are not drawn, as it is said in messages."""
        said = []
        if self.ready:
            said.append(f"those that are not ready={self.ready!r}")
        if self.max_uses is not None:
            said.append(f"those that were used max_uses={self.max_uses} times")
        if self._rules.version is not None:
            said.append(f"those whose {public(self._rules.version)!r} is below {self._floor():g}")
        return f"rows do not count: {' or '.join(said)}"

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """With ``max_uses`` the ``uses``, int32 ``[n]``: of each row, up to the last that was used; with versions ``consumer_version``.

        >>> import torch
        >>> from engram import LazyTensorStorage, PromptGroupSampler, ReplayBuffer
        >>> sampler = PromptGroupSampler(samples_per_group=2, max_uses=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=2)
        >>> _ = rb.extend({"query": torch.tensor([9, 9])})
        >>> _ = rb.sample()
        >>> sampler.state_dict()
        {'uses': tensor([1, 1], dtype=torch.int32)}
        """
        uses = {} if self._rules.max_uses is None else {"uses": self._uses()}
        version = {} if self._rules.version is None else {"consumer_version": self.consumer_version}
        return {**uses, **version}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where, rules = type(self).__name__, self._rules
        told = {"uses": rules.max_uses, "consumer_version": rules.version}
        check_keys(state_dict, [name for name, rule in told.items() if rule is not None], where)
        uses = version = None
        if rules.max_uses is not None:
            rows = capacity or (0 if self._storage is None else self._storage.max_size)
            uses = checked_uses(state_dict, "uses", MAX_USES - 1, rows, where)
        if rules.version is not None:
            version = integer(state_dict, "consumer_version", -VERSION_LIMIT + 1, VERSION_LIMIT, where)
        return Change(self._take, uses, version)

    def _take(self, uses: torch.Tensor | None, version: int | None) -> None:
        if uses is not None:
            self._restore_uses(uses)
        if version is not None:
            self._consumer.now = version

    def _rules_config(self) -> dict[str, object]:
        """The rules, as arguments."""
        rules, ready = self._rules, self._ready_config()
        uses = {} if rules.max_uses is None else {"max_uses": rules.max_uses}
        if rules.version is None:
            return {**ready, **uses}
        version = plain(public(rules.version))
        return {**ready, **uses, "max_staleness": rules.max_staleness, "policy_version": version}


def checked_uses(state: dict[str, object], name: str, most: int, rows: int, where: str) -> torch.Tensor:
    """A copy of the uses of rows in a state. Raises ``TypeError``, ``ValueError``, ``IncompatibleCheckpoint``: they are of no such rows."""
    uses = tensor_in(state, name, torch.int32, (None,), where).clone()
    if len(uses) > rows:
        raise IncompatibleCheckpoint(f"{where}: {name}: expected those of at most {rows} rows, got {len(uses)}.")
    if len(uses) and not (int(uses.min()) >= 0 and int(uses.max()) <= most):
        raise ValueError(f"{where}: {name}: expected uses of rows in [0, {most}], got others.")
    return uses


def _ready_fields(given: object, where: str) -> tuple[FieldPath, ...]:
    """Fields that are to be ready. Raises ``TypeError``: no sequence of keys. ``ValueError``: too many."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f'{where}: expected a sequence of fields, such as ("reward",), got {given!r:.80}.')
    paths = tuple(dict.fromkeys(checked_path(key, where) for key in given))
    if len(paths) > MAX_READY:
        raise ValueError(f"{where}: expected at most {MAX_READY} fields, got {len(paths)}.")
    return paths


def check_version(value: object, who: str = "StalenessAwareSampler") -> int:
    """A consumer's version. Raises ``TypeError``, ``ValueError``: none."""
    return check_count(f"{who}: consumer_version", value, least=-VERSION_LIMIT + 1, most=VERSION_LIMIT - 1)
