"""Batches of an ensemble ahead of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engram.buffer.prefetching import Prefetching, go_back, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engram.buffer.read_path import ReadPath
    from engram.buffer.settings import Settings
    from engram.buffer.wiring import Wiring
    from engram.ensembles.members import Member


class EnsemblePrefetching(Prefetching):
    """Draws batches ahead. Where it drops some, their rows go back to the epochs of members."""

    def __init__(self, wiring: Wiring, settings: Settings, reading: ReadPath, members: Sequence[Member]) -> None:
        super().__init__(wiring, settings, reading)
        self._members = members

    def place(self) -> dict[str, object] | None:
        """The states of samplers of members by number, of those that can go back; None: there are none."""
        places = {str(member.number): place_of(member.wiring) for member in self._members}
        found = {number: place for number, place in places.items() if place is not None}
        return cast("dict[str, object]", found) or None

    def go_back(self, before: dict[str, object]) -> None:
        for number, place in before.items():
            go_back(self._members[int(number)].wiring, cast("dict[str, object]", place))
