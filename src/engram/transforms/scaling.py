"""Affine transforms of entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engram.state import Change, Stateful, check_keys, tensor_in
from engram.transforms._base import KeyedTransform

if TYPE_CHECKING:
    from engram.transforms._base import Keys
    from engram.types import Commit


class ObservationNorm(KeyedTransform, Stateful):
    """Computes ``x * scale + loc``, or ``(x - loc) / scale`` with ``standard_normal``. On writing, the inverse.

    Args:
        loc, scale: a number, or a tensor that broadcasts against the entries. ``scale`` is raised to at least ``eps``.
        in_keys: the entries to transform on reading. A batch that is one tensor is always transformed.
        out_keys: the names of the results; default ``in_keys``.
        in_keys_inv: the entries to transform back on writing; default none.
        out_keys_inv: the names of these entries in the written data; default ``in_keys_inv``.
        standard_normal: which of the two formulas.
        eps: default the ``eps`` of the dtype of ``scale``, or 1e-6 for a number.

    Raises:
        ValueError: ``loc`` or ``scale`` is not finite, or ``scale`` is not positive.
        TypeError: ``loc`` or ``scale`` is neither a number nor a tensor, or there are no keys.
        KeyError: on use: there is no such entry.

    Integers become floats. The dtype of a result is the common dtype of the entry and ``loc``; its device is the entry's.

    >>> import torch
    >>> from engram import ObservationNorm
    >>> ObservationNorm(loc=0.0, scale=1 / 255, in_keys=["pixels"])({"pixels": torch.tensor([0, 255], dtype=torch.uint8)})
    {'pixels': tensor([0., 1.])}
    """

    shown = ("loc", "scale", "in_keys", "in_keys_inv")

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        standard_normal: bool = False,
        eps: float | None = None,
    ) -> None:
        name = type(self).__name__
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if not self.in_keys and not self.in_keys_inv:
            raise TypeError(f"{name}: in_keys: expected the keys of the entries to transform, got none.")
        known = isinstance(scale, Tensor) and scale.dtype.is_floating_point
        self.eps = eps if eps is not None else torch.finfo(scale.dtype).eps if known else 1e-6  # type: ignore[union-attr]
        self.loc, given = _constants(loc, scale, name)
        self.scale = given.clamp_min(self.eps)
        self.standard_normal = bool(standard_normal)

    def apply(self, value: Tensor) -> Tensor:
        return self._standardized(value) if self.standard_normal else self._scaled(value)

    def apply_inv(self, value: Tensor) -> Tensor:
        return self._scaled(value) if self.standard_normal else self._standardized(value)

    def _scaled(self, value: Tensor) -> Tensor:
        return value * self.scale.to(value.device) + self.loc.to(value.device)

    def _standardized(self, value: Tensor) -> Tensor:
        return (value - self.loc.to(value.device)) / self.scale.to(value.device)

    def state_dict(self) -> dict[str, Tensor]:
        """``loc``, ``scale`` and ``standard_normal``: copies.

        >>> from engram import ObservationNorm
        >>> sorted(ObservationNorm(loc=0.0, scale=2.0, in_keys=["obs"]).state_dict())
        ['loc', 'scale', 'standard_normal']
        """
        return {
            "loc": self.loc.clone(),
            "scale": self.scale.clone(),
            "standard_normal": torch.tensor(self.standard_normal, device="cpu"),
        }

    def prepare_load(self, state_dict: dict[str, Tensor]) -> Commit:
        name = type(self).__name__
        check_keys(state_dict, ("loc", "scale", "standard_normal"), name)
        loc, scale = _constants(state_dict["loc"], state_dict["scale"], name)
        standard_normal = bool(tensor_in(state_dict, "standard_normal", torch.bool, (), name))
        return Change(vars(self).update, loc=loc, scale=scale, standard_normal=standard_normal)


class RewardScaling(ObservationNorm):
    """:class:`ObservationNorm` of rewards, on reading.

    Args:
        loc, scale: a number, or a tensor that broadcasts against the entries. ``scale`` is at least 1e-6.
        in_keys: default ``"reward"`` at the root. The reward of a transition is ``("next", "reward")``.
        out_keys: default ``in_keys``.
        standard_normal: ``(x - loc) / scale`` instead of ``x * scale + loc``.

    Raises: as :class:`ObservationNorm`.

    >>> import torch
    >>> from engram import RewardScaling
    >>> RewardScaling(loc=0.0, scale=0.5)({"reward": torch.tensor([2.0])})
    {'reward': tensor([1.])}
    """

    def __init__(
        self,
        loc: float | Tensor,
        scale: float | Tensor,
        in_keys: Keys = None,
        out_keys: Keys = None,
        standard_normal: bool = False,
    ) -> None:
        keys = ["reward"] if in_keys is None else in_keys
        super().__init__(loc, scale, keys, out_keys, standard_normal=standard_normal, eps=1e-6)


def _constants(loc: object, scale: object, name: str) -> tuple[Tensor, Tensor]:
    checked = _constant(loc, f"{name}: loc"), _constant(scale, f"{name}: scale")
    if not bool((checked[1] > 0).all()):
        raise ValueError(f"{name}: scale: expected positive values, got {float(checked[1].min())}.")
    return checked


def _constant(value: object, name: str) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError(f"{name}: expected a number or a tensor, got {type(value).__name__}.")
    made = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{name}: expected finite values, got {value}.")
    return made
