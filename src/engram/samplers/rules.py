"""Rules that say which rows are drawn: those that are ready, fresh, and not used up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from engram._support.checks import check_count
from engram._support.field_paths import FieldPath, checked_path, plain, public
from engram._support.state import Change, check_keys, integer, tensor_in
from engram.errors import IncompatibleCheckpoint
from engram.samplers._base import NativeSampler
from engram.samplers.staleness import VERSION_LIMIT, ConsumerVersion, VersionedSampler
from engram.store.row_indexes import MAX_READY, MAX_USES, GroupRules
from engram.types import Commit

if TYPE_CHECKING:
    from torch import Tensor

    from engram.store.sampled import SampledStorage


class RuledSampler(VersionedSampler, NativeSampler):
    """Draws rows that follow rules, of which an index of the storage knows: :meth:`_attached`."""

    index_name: str
    _rules: GroupRules
    _storage: SampledStorage | None = None

    def _attached(self) -> Any:
        """The index; None while nothing was ever written."""
        raise NotImplementedError

    @property
    def max_uses(self) -> int | None:
        """After so many draws a group is used up; None: never."""
        return self._rules.max_uses

    @property
    def max_staleness(self) -> int:
        """Rows that are staler are not drawn; -1: they need no version."""
        return -1 if self._rules.version is None else self._rules.max_staleness

    @property
    def ready(self) -> tuple[str | FieldPath, ...]:
        """The fields without which a row does not count."""
        return tuple(map(public, self._rules.ready))

    def _floor(self) -> float:
        """The oldest version that is drawn; NaN: rows have none."""
        if self._rules.version is None:
            return math.nan
        return float(self._consumer.now - self._rules.max_staleness)

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
        state: dict[str, object] = {}
        if self._rules.max_uses is not None:
            index = self._attached()
            uses = torch.zeros(0, dtype=torch.int32, device="cpu") if index is None else index.uses()
            used = uses.nonzero()
            state["uses"] = uses[: int(used[-1]) + 1 if len(used) else 0].clone()
        if self._rules.version is not None:
            state["consumer_version"] = self.consumer_version
        return state

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        where, rules = type(self).__name__, self._rules
        wanted = [
            *(["uses"] if rules.max_uses is not None else []),
            *(["consumer_version"] if rules.version is not None else []),
        ]
        check_keys(state_dict, wanted, where)
        uses = version = None
        if rules.max_uses is not None:
            uses = tensor_in(state_dict, "uses", torch.int32, (None,), where).clone()
            rows = capacity or (0 if self._storage is None else self._storage.max_size)
            if len(uses) > rows:
                raise IncompatibleCheckpoint(f"{where}: uses: expected those of at most {rows} rows, got {len(uses)}.")
            if len(uses) and not (int(uses.min()) >= 0 and int(uses.max()) < MAX_USES):
                raise ValueError(f"{where}: uses: expected uses of rows in [0, {MAX_USES}), got others.")
        if rules.version is not None:
            version = integer(state_dict, "consumer_version", -VERSION_LIMIT + 1, VERSION_LIMIT, where)
        return Change(self._take, uses, version)

    def _take(self, uses: Tensor | None, version: int | None) -> None:
        if uses is not None and (index := self._attached()) is not None:
            index.restore_uses(uses)
        if version is not None:
            self._consumer.now = version

    def _rules_config(self) -> dict[str, object]:
        """The rules, as arguments."""
        rules = self._rules
        version = None if rules.version is None else plain(public(rules.version))
        more = {
            "ready": plain(list(map(public, rules.ready))) or None,
            "max_uses": rules.max_uses,
            "max_staleness": None if version is None else rules.max_staleness,
            "policy_version": version,
        }
        return {name: value for name, value in more.items() if value is not None}

    def __getstate__(self) -> dict[str, object]:
        own = {name: value for name, value in self.__dict__.items() if name != "_consumer"}
        return {**own, "_storage": None, "_index": None, "version": self.consumer_version}

    def __setstate__(self, state: dict[str, object]) -> None:
        version = cast("int", state.pop("version"))
        self.__dict__.update(state)
        self._consumer = ConsumerVersion(self.index_name)
        self._consumer.now = version


def row_rules(
    rules: GroupRules, who: str, ready: object, max_staleness: int, policy_version: str | FieldPath
) -> GroupRules:
    """These rules and which rows are ready and fresh. Raises ``TypeError``, ``ValueError``: arguments that say no such rules."""
    version = checked_path(policy_version, f"{who}: policy_version")
    staleness = check_count(f"{who}: max_staleness", max_staleness, least=-1, most=VERSION_LIMIT - 1)
    rules = rules._replace(ready=_ready_fields(ready, f"{who}: ready"))
    return rules if staleness < 0 else rules._replace(version=version, max_staleness=staleness)


def _ready_fields(given: object, where: str) -> tuple[FieldPath, ...]:
    """Fields that are to be ready. Raises ``TypeError``: no sequence of keys. ``ValueError``: too many."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f'{where}: expected a sequence of fields, such as ("reward",), got {given!r:.80}.')
    paths = tuple(dict.fromkeys(checked_path(key, where) for key in given))
    if len(paths) > MAX_READY:
        raise ValueError(f"{where}: expected at most {MAX_READY} fields, got {len(paths)}.")
    return paths


def rules_said(rules: GroupRules, floor: float) -> str:
    """Which rows are not drawn. ``floor``: the oldest version."""
    said = []
    if rules.ready:
        said.append(f"those that are not ready={tuple(map(public, rules.ready))!r}")
    if rules.max_uses is not None:
        said.append(f"those that were used max_uses={rules.max_uses} times")
    if rules.version is not None:
        said.append(f"those whose {public(rules.version)!r} is below {floor:g}")
    return f"rows do not count: {' or '.join(said)}"
