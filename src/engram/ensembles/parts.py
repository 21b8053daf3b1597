"""What the components of an ensemble have in common: one of each member, and a state of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from engram.ensembles.selection import members_named, split_index
from engram.state import Loads, check_keys, prepare_load, saved

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from engram.types import Commit

T = TypeVar("T")


class OnePerMember(Generic[T]):
    """Components of one kind, one of each member, and their states by number."""

    #: One of each member.
    _all: tuple[T, ...]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def __getitem__(self, index: object) -> T | Self:
        """One of them, or an ensemble of some. Raises as ``ReplayBufferEnsemble[index]``."""
        of_members, rows = split_index(index, type(self).__name__)
        if rows is not None:
            raise IndexError(f"{type(self).__name__}: expected an index of members alone, got {index!r}.")
        named = members_named(of_members, len(self), type(self).__name__)
        return self._all[named] if isinstance(named, int) else self.some(named)

    def some(self, members: Sequence[int]) -> Self:
        """An ensemble of some of them."""
        return type(self)(*(self._all[member] for member in members))

    def state_dict(self) -> dict[str, object]:
        """The state of each, by its number."""
        return {str(number): saved(one, f"{type(self).__name__}[{number}]") for number, one in enumerate(self._all)}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        """Check a state. Raises what one of them raises for its own; nothing is changed."""
        del capacity  # each knows its own
        who = type(self).__name__
        check_keys(state_dict, tuple(map(str, range(len(self)))), who)
        states = enumerate(self._all)
        return Loads([prepare_load(one, state_dict[str(number)], f"{who}[{number}]") for number, one in states])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._all))})"
