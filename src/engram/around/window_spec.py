"""What a window is: how many steps, how far apart, and which of them are learned from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from engram._checks import check_count

__all__ = ["WindowSpec"]


@dataclass(frozen=True)
class WindowSpec:
    """Windows of trajectories: ``burn_in + length`` steps each, ``dilation`` apart.

    The windows of a trajectory begin ``period`` steps apart, the first one ``padding`` window steps before the trajectory.
    Where a window reaches beyond its trajectory, the trajectory's first or last step stands for the steps that are missing;
    ``"validity_mask"`` is false there. ``"learning_mask"`` is false in the burn-in, and true in the ``length`` steps after it.

    Of a full ring, a trajectory begins with its oldest step that is still stored.

    Args:
        length: steps to learn from.
        period: steps of the trajectory from the beginning of one window to that of the next. With ``period=length`` and
            ``padding=burn_in``, the steps to learn from follow each other from the first step of a trajectory on.
        dilation: steps of the trajectory from one step of a window to the next. 1: consecutive ones.
        burn_in: steps of a window before those to learn from, with which a recurrent network warms up.
        padding: how many steps of a window may lie before its trajectory, less than all of them. With ``padding=burn_in``
            a trajectory is learned from its first step on.

    Raises:
        TypeError: not an int.
        ValueError: ``length``, ``period`` or ``dilation`` below 1, ``burn_in`` or ``padding`` below 0, or a window that is all
            padding.

    >>> from engram import WindowSpec
    >>> # Windows of R2D2 that share no step to learn from:
    >>> WindowSpec(length=40, burn_in=20, padding=20, period=40)
    WindowSpec(length=40, period=40, dilation=1, burn_in=20, padding=20)
    """

    length: int
    period: int = 1
    dilation: int = 1
    burn_in: int = 0
    padding: int = 0

    #: Steps at most of a trajectory that a window spans, and that its numbers count.
    _MOST: ClassVar[int] = 1 << 40

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name in ("burn_in", "padding") else 1
            number = check_count(
                f"WindowSpec: {field.name}", getattr(self, field.name), "steps", least=least, most=self._MOST
            )
            object.__setattr__(self, field.name, number)
        if self.padding >= self.steps:
            raise ValueError(
                f"WindowSpec: padding: expected less than burn_in + length = {self.steps} steps, so that one of them is real, got "
                f"{self.padding}."
            )
        if self.reach > self._MOST:
            raise ValueError(f"WindowSpec: expected windows over at most {self._MOST} steps, got {self.reach}.")

    @property
    def steps(self) -> int:
        """Steps of a window: ``burn_in + length``."""
        return self.burn_in + self.length

    @property
    def reach(self) -> int:
        """Steps of a trajectory from the first to the last step of a window, both included."""
        return (self.steps - 1) * self.dilation + 1
