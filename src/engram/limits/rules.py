"""What may be limited, and limits that would stop everything, which are refused."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from engram._checks import check_count

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class SamplesPerInsert:
    """As many rows are sampled as ``ratio`` times those inserted, within a band: for :meth:`ReplayBuffer.limit`.

    Rows that are inserted raise a level by ``ratio`` each, rows that are sampled lower it by 1. It stays within
    ``ratio * min_size * (1 - tolerance)`` and ``ratio * min_size * (1 + tolerance)``: an insert that would raise it beyond waits, and
    so does a sample that would lower it below. Where one insert or one sample is more than half of the band, it may have as much as it
    needs; so both never wait for each other, whatever their sizes.

    Args:
        ratio: rows sampled per row inserted, above 0.
        min_size: live rows before the first is sampled. Until then no insert waits.
        tolerance: half of the band, as a part of ``ratio * min_size``; at least 0.

    Raises:
        TypeError: no numbers. ValueError: one that is out of range, or not finite.

    >>> from engram import SamplesPerInsert
    >>> SamplesPerInsert(8, min_size=1_000)
    SamplesPerInsert(ratio=8.0, min_size=1000, tolerance=0.1)
    """

    ratio: float
    _: KW_ONLY
    min_size: int
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        vars(self)["ratio"] = _number("SamplesPerInsert: ratio", self.ratio, above=True)
        vars(self)["min_size"] = check_count("SamplesPerInsert: min_size", self.min_size, "row", most=1 << 48)
        vars(self)["tolerance"] = _number("SamplesPerInsert: tolerance", self.tolerance, above=False)


@dataclass(frozen=True)
class MinSize:
    """Samples wait until so many rows are live; inserts never wait. Raises as :class:`SamplesPerInsert`.

    >>> from engram import MinSize
    >>> MinSize(1_000)
    MinSize(rows=1000)
    """

    rows: int

    def __post_init__(self) -> None:
        vars(self)["rows"] = check_count("MinSize: rows", self.rows, "row", most=1 << 48)


@dataclass(frozen=True)
class MaxInFlight:
    """Inserts wait while so many rows are inserted that no sampler has used up: a queue. Raises as :class:`SamplesPerInsert`.

    For a sampler that uses rows up, after a number of draws. A row that is removed, evicted, overwritten, or lost with its writer is in
    flight no longer, and one that may be drawn again (``mark_update``) is in flight again.

    >>> from engram import MaxInFlight
    >>> MaxInFlight(5_000)
    MaxInFlight(rows=5000)
    """

    rows: int

    def __post_init__(self) -> None:
        vars(self)["rows"] = check_count("MaxInFlight: rows", self.rows, "row", most=1 << 48)


Limit: TypeAlias = SamplesPerInsert | MinSize | MaxInFlight
L = TypeVar("L")


class Rules(NamedTuple):
    """Limits as a store keeps them. 0: there is no such limit."""

    ratio: float = 0.0
    tolerance: float = 0.0
    min_size: int = 0
    in_flight: int = 0

    def limits(self) -> tuple[Limit, ...]:
        """The limits that these are."""
        found: list[Limit] = []
        if self.ratio:
            found.append(SamplesPerInsert(self.ratio, min_size=self.min_size, tolerance=self.tolerance))
        elif self.min_size:
            found.append(MinSize(self.min_size))
        if self.in_flight:
            found.append(MaxInFlight(self.in_flight))
        return tuple(found)

    def check(self, capacity: int, draws_of_a_row: int | None, call: str) -> None:
        """Refuse what would stop inserts and samples for ever.

        Args:
            capacity: rows of the storage.
            draws_of_a_row: after how many draws the sampler uses a row up; None: never.
            call: what to call it in errors.

        Raises:
            ValueError: it would.
        """
        if self.min_size > capacity:
            raise ValueError(
                f"{call}: expected a storage of at least {self.min_size} rows, which samples would wait for, got one of {capacity}. "
                "Take a smaller min_size."
            )
        if self.in_flight and draws_of_a_row is None:
            raise ValueError(
                f"{call}: MaxInFlight({self.in_flight}): expected a sampler that uses rows up, such as a ConsumingSampler: with others "
                "inserts would wait for ever. SamplesPerInsert limits inserts for every sampler."
            )
        if self.in_flight and self.in_flight < self.min_size:
            raise ValueError(
                f"{call}: MaxInFlight({self.in_flight}): expected at least the {self.min_size} rows that samples wait for: inserts would "
                "wait for samples, and samples for inserts."
            )
        if draws_of_a_row is not None and self.ratio > draws_of_a_row:
            raise ValueError(
                f"{call}: SamplesPerInsert: ratio: expected at most {draws_of_a_row}, as often as the sampler draws a row, got "
                f"{self.ratio:g}: inserts would wait for samples that cannot come."
            )


def rules_of(limits: Iterable[object]) -> Rules:
    """The rules that limits make together; of None, or of no limit, none.

    Raises:
        TypeError: something else. ValueError: two of a kind; ``MinSize`` beside ``SamplesPerInsert``, which has its own.
    """
    given = list(limits)
    if not given:
        raise TypeError("limit: expected SamplesPerInsert, MinSize or MaxInFlight, or None for no limit, got nothing.")
    for limit in given:
        if not isinstance(limit, SamplesPerInsert | MinSize | MaxInFlight | None):
            kind = limit if isinstance(limit, type) else type(limit)
            raise TypeError(f"limit: expected SamplesPerInsert, MinSize, MaxInFlight or None, got {kind.__name__}.")
    ratio, size, in_flight = _one(given, SamplesPerInsert), _one(given, MinSize), _one(given, MaxInFlight)
    if ratio is not None and size is not None:
        raise ValueError(f"limit: expected one of {ratio} and {size}, got both. SamplesPerInsert has a min_size.")
    rules = Rules() if ratio is None else Rules(ratio.ratio, ratio.tolerance, ratio.min_size)
    if size is not None:
        rules = Rules(min_size=size.rows)
    return rules if in_flight is None else rules._replace(in_flight=in_flight.rows)


def _one(limits: Iterable[object], kind: type[L]) -> L | None:
    """The limit of a kind. Raises ``ValueError``: there are two."""
    found = [limit for limit in limits if isinstance(limit, kind)]
    if len(found) > 1:
        raise ValueError(f"limit: expected one {kind.__name__}, got {found[0]} and {found[1]}.")
    return found[0] if found else None


def _number(what: str, value: object, *, above: bool) -> float:
    """A finite number of at least 0, or ``above`` it. Raises ``TypeError``, ``ValueError``: another value."""
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__}.")
    try:
        number = float(value)  # type: ignore[arg-type] # that is the question
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__}.") from None
    if not (math.isfinite(number) and (number > 0 if above else number >= 0)) or number > 1e12:
        raise ValueError(f"{what}: expected a finite number {'above' if above else 'of at least'} 0, got {value}.")
    return number
