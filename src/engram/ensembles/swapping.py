"""Other components for the members of an ensemble: all of them get one, or none."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engram.buffer.replay_buffer import ReplayBuffer

T = TypeVar("T")
Components = TypeVar("Components", bound=Sized)


def check_components(call: str, given: object, kind: type[Components], members: int) -> Components:
    """Components of one kind, one for each member. Raises ``TypeError``: something else. ``ValueError``: another number."""
    if not isinstance(given, kind):
        raise TypeError(f"{call}: expected a {kind.__name__}, one for each member, got {type(given).__name__}.")
    if len(given) != members:
        raise ValueError(f"{call}: expected a {kind.__name__} of {members}, one for each member, got {len(given)}.")
    return given


def swap(members: Sequence[ReplayBuffer], components: Sequence[T], put: Callable[[ReplayBuffer, T], T]) -> None:
    """Give each member one of the components, by ``put``, which returns the one before.

    Raises what one of them raises, whose number it says. The others have theirs back then.
    """
    before: list[T] = []
    try:
        for member, component in zip(members, components, strict=True):
            before.append(put(member, component))
    except BaseException as error:  # an interrupt, too
        error.add_note(f"Raised by member {len(before)} of the ensemble. Nothing was changed.")
        for member, component in zip(members, before, strict=False):
            put(member, component)
        raise
