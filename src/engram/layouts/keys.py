"""Which entries of steps are flags and rewards, and how entries of rows become entries of a layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from engram.errors import IncompatibleCheckpoint
from engram.trajectories import DEFAULT_DONE_KEYS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Key: TypeAlias = tuple[str, ...]

#: What a layout notes beside the entries: whether all slots are live, the oldest slot, and sizes of the dimensions that index rows.
FULL, SHIFT, SHAPE = "is_full", "shift", "_storage_shape"


_FLAGS: frozenset[Key] = frozenset((name,) for name in DEFAULT_DONE_KEYS)


def as_key(key: object, where: str) -> Key:
    """A key of one part or of several. Raises ``TypeError``: it is none."""
    parts = (key,) if isinstance(key, str) else key
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"{where}: expected a key, a str or a tuple of them, got {key!r:.80}.")
    return parts


class Keys(NamedTuple):
    """Entries that are not observations, as they are called at the root."""

    done: Key = ("next", "done")
    """The entry of a step that says whether its trajectory ends."""
    flags: frozenset[Key] = _FLAGS
    rewards: frozenset[Key] = frozenset({("reward",)})
    shift: str = SHIFT
    full: str = FULL

    @classmethod
    def of(cls, where: str, done_keys: Iterable[object] | None, reward_keys: Iterable[object] | None) -> Keys:
        """With other flags and rewards. Raises ``TypeError``: no keys."""
        made = cls()
        if done_keys is not None:
            made = made._replace(flags=_all(done_keys, f"{where}: done_keys"))
        if reward_keys is not None:
            made = made._replace(rewards=_all(reward_keys, f"{where}: reward_keys"))
        return made

    @property
    def reserved(self) -> tuple[str, ...]:
        """Entries that a layout needs for itself."""
        return (self.full, self.shift, SHAPE)

    @property
    def of_next(self) -> frozenset[Key]:
        """Entries that are saved as those below ``next``."""
        return self.flags | self.rewards


def _all(keys: Iterable[object], where: str) -> frozenset[Key]:
    if isinstance(keys, str):
        raise TypeError(f"{where}: expected keys, got the str {keys!r}. Put it in a tuple: ({keys!r},).")
    if not isinstance(keys, Iterable):
        raise TypeError(f"{where}: expected keys, strs or tuples of them, got a {type(keys).__name__}.")
    return frozenset(as_key(key, where) for key in keys)


class Entry(NamedTuple):
    """An entry of a layout."""

    key: Key
    root: Key | None
    """The field that has its value of each step; None: there is none, or it is not saved."""
    after: Key | None
    """The field below ``next``."""

    @property
    def expanded(self) -> bool:
        """Whether its value after the last step of a trajectory is saved, too."""
        return self.root is not None and self.after is not None


def entries_of(fields: Collection[Key], keys: Keys, where: str) -> list[Entry]:
    """The entries of the layout for rows with these fields.

    Raises:
        IncompatibleCheckpoint: they are no steps with ``next``, or would not all be saved.
    """
    if keys.done not in fields:
        raise IncompatibleCheckpoint(
            f"{where}: expected the field {keys.done}, which says where trajectories end, got {sorted(fields)}."
        )
    after = {key[1:] for key in fields if key[0] == "next" and len(key) > 1}
    root = {key for key in fields if key[0] != "next"}
    if taken := sorted({key[0] for key in root | after} & {*keys.reserved}):
        raise IncompatibleCheckpoint(f"{where}: the layout needs the names {taken} for itself. Rename these fields.")
    if lost := sorted(root & keys.rewards):
        raise IncompatibleCheckpoint(
            f'{where}: expected rewards below "next" only, as those at the root are not saved, got the fields {lost}.'
        )
    if alone := sorted((after - root - keys.of_next) | ((root & keys.flags) - after)):
        raise IncompatibleCheckpoint(
            f'{where}: expected the fields {alone} both at the root and below "next", where the ones continue the others. Name flags '
            "and rewards that are not: done_keys=…, reward_keys=…."
        )
    made = []
    for key in sorted(root | after):
        flag = key in keys.of_next
        made.append(Entry(key, None if flag else key, ("next", *key) if key in after else None))
    return made


class Origin(NamedTuple):
    """Where a field's rows are in a layout."""

    key: Key | None
    """The entry; None: the field is False, or zero, in each row."""
    ahead: int
    """By how many observations: 1 of next observations."""
    expanded: bool


def origins_of(entries: Mapping[Key, bool], keys: Keys) -> dict[Key, tuple[Key, Origin]]:
    """Where fields of rows come from, by their keys, with the entry that has their shape.

    Args:
        entries: of a layout, by key: whether they have next observations.
        keys: which are flags and rewards.
    """
    found: dict[Key, tuple[Key, Origin]] = {}
    for key, expanded in entries.items():
        if key in keys.of_next:
            found["next", *key] = key, Origin(key, 0, expanded=False)
            if key in keys.flags:
                found[key] = key, Origin(None, 0, expanded=False)
        else:
            found[key] = key, Origin(key, 0, expanded=expanded)
            if expanded:
                found["next", *key] = key, Origin(key, 1, expanded=True)
    return found
