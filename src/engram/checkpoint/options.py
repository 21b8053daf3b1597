"""What a Checkpointer and its calls are told, checked."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from engram._checks import check_count
from engram.format import strict
from engram.persist.roles import check_roles
from engram.reshard.driver import Policy, checked_incomplete

if TYPE_CHECKING:
    from engram._progress import OnProgress
    from engram.persist.roles import Roles
    from engram.types import Ranking


class SeldomArguments(TypedDict, total=False):
    """Arguments of the constructor that few programs give: see :class:`Checkpointer`."""

    full_every: int | None
    paranoid: bool
    poll_every: int


class RestoreArguments(TypedDict, total=False):
    """Arguments of a restore whose checkpoint is known: see :meth:`Checkpointer.restore`."""

    incomplete: Mapping[str, str] | None
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float
    env_id: Literal["lane", "global"]
    resume: Literal["env_reset", "exact"]
    verify: Literal["read", "full"]
    allow_partial: bool
    default_rng: bool
    convert: bool
    progress: OnProgress | None


class Options(NamedTuple):
    """What the constructor is told: see :class:`Checkpointer`."""

    every_steps: int | None
    every_minutes: float | None
    keep: int
    on_failure: str
    prefetch: Literal["save", "drop"]
    roles: Roles | None
    timeout: float
    full_every: int | None = None
    paranoid: bool = False
    poll_every: int = 10

    def check(self) -> None:
        """Raise ``ValueError``, ``TypeError`` unless all can be."""
        _check_choices(
            "Checkpointer",
            ("on_failure", self.on_failure, ("raise", "warn")),
            ("prefetch", self.prefetch, ("save", "drop")),
        )
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"Checkpointer: every_minutes: expected minutes above 0, got {self.every_minutes!r}.")
        if not self.timeout > 0:
            raise ValueError(f"Checkpointer: timeout: expected seconds above 0, got {self.timeout!r}.")
        for name in ("keep", "full_every", "every_steps", "poll_every"):
            value = self._asdict()[name]
            if value is None and name in ("full_every", "every_steps"):
                continue
            check_count(f"Checkpointer: {name}", value)
        check_roles(self.roles)


def _check_choices(call: str, *given: tuple[str, object, tuple[str, ...]]) -> None:
    """Raise ``ValueError`` for an argument whose value is not allowed. ``given``: name, value and those that are."""
    for argument, value, allowed in given:
        if value not in allowed:
            raise ValueError(f"{call}: {argument}: expected {' or '.join(map(repr, allowed))}, got {value!r}.")


class Asked(NamedTuple):
    """What a checkpoint is asked for with, checked."""

    step: int
    user: dict[str, object]
    """A copy."""


def checked_step(what: str, step: object) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{what}: step: expected an int of at least 0, got {step!r}.")
    return number


def checked_user(what: str, user: object) -> dict[str, object] | None:
    """As it comes back from a checkpoint."""
    if user is None:
        return None
    if not isinstance(user, Mapping):
        raise TypeError(f"{what}: user: expected a dict of JSON, got {type(user).__name__}.")
    return strict.copied(user)


class Heard(NamedTuple):
    """What this rank was told of the latest step: a crash checkpoint is of that."""

    step: int = 0
    user: dict[str, object] = {}  # noqa: RUF012 - a value
    user_step: int = 0
    """Of the call that gave ``user``."""

    def then(self, step: int, user: dict[str, object] | None) -> Heard:
        """After another call: that of an earlier step changes nothing that a later one has said."""
        latest = self if user is None or step < self.user_step else self._replace(user=user, user_step=step)
        return latest._replace(step=max(step, self.step))


class RestoreOptions(NamedTuple):
    """How a checkpoint is loaded: see :meth:`Checkpointer.restore`."""

    incomplete: Mapping[str, str] | None
    overflow: Literal["cut", "fill"]
    max_drop_fraction: float
    env_id: str
    resume: str
    verify: str
    default_rng: bool
    convert: bool

    def check(self) -> None:
        """Raise ``ValueError``: one is out of its range."""
        _check_choices(
            "restore",
            ("resume", self.resume, ("env_reset", "exact")),
            ("verify", self.verify, ("read", "full")),
            ("overflow", self.overflow, ("cut", "fill")),
            ("env_id", self.env_id, ("lane", "global")),
        )
        if not 0.0 <= self.max_drop_fraction <= 1.0:
            raise ValueError(
                f"restore: max_drop_fraction: expected a number from 0 to 1, got {self.max_drop_fraction!r}."
            )
        checked_incomplete(self.incomplete)

    def policy(self, ranking: Ranking | Literal["newest"] | None) -> Policy:
        """What a reshard is told."""
        return Policy(checked_incomplete(self.incomplete), self.overflow, ranking)
