"""Normalization by running statistics."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import torch

from engram._support.nested import is_tensordict
from engram._support.state import Change, Stateful, check_keys, tensor_in
from engram.transforms._base import Compose, Key, KeyedTransform, Keys, entry, find, is_tensor, put, shallow
from engram.types import Commit

Number: TypeAlias = "float | torch.Tensor"


class _Moments(NamedTuple):
    """float64: the number of values (earlier ones weigh less), their mean, and the sum of squared distances to it."""

    weight: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    def joined(self, other: _Moments) -> _Moments:
        """The moments of both sets of values (Chan et al.), without subtracting large numbers from each other."""
        weight = self.weight + other.weight
        share = other.weight / weight
        gap = other.mean - self.mean
        return _Moments(weight, self.mean + gap * share, self.squares + other.squares + gap**2 * self.weight * share)


class VecNorm(KeyedTransform, Stateful):
    """Computes ``(x - mean) / std`` on reading, from statistics of everything read so far. Later batches weigh more.

    As in TorchRL, each call first adds its batch to the statistics, then normalizes with them. Written rows are not changed.
    ``append_transform(VecNorm(…), invert=True)`` normalizes written rows instead.

    Args:
        in_keys: default ``["observation", "reward"]``. Missing entries are skipped. A batch that is one tensor uses the first.
        out_keys: the names of the results; default ``in_keys``.
        decay: the weight of earlier batches at each call, in ``(0, 1]``. With 1 all batches weigh the same.
        eps: a lower bound of variance and standard deviation.
        shapes: the shape of one value, per key. Default: the dimensions after the batch dimensions (one, for a dict or a
            tensor).

    Raises:
        ValueError: ``decay`` or ``eps`` is out of range, or the number of ``shapes`` is not that of keys. On use: values are
            NaN or infinite; then the statistics of all keys stay unchanged.
        RuntimeError: on use: values have another shape than before.

    Statistics are float64, also for float16 and integer entries, on the device of the first batch. The check for NaN waits
    for an accelerator. Several threads may use one ``VecNorm``; every process has its own statistics.

    >>> import torch
    >>> from engram import VecNorm
    >>> norm = VecNorm(["obs"], decay=1.0)
    >>> norm({"obs": torch.tensor([1.0, 3.0])})["obs"].tolist()
    [-1.0, 1.0]
    >>> norm.freeze()({"obs": torch.tensor([4.0])})["obs"].tolist()
    [2.0]
    """

    shown = ("in_keys", "out_keys", "decay", "eps")

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        *,
        decay: float = 0.9999,
        eps: float = 1e-4,
        shapes: list[torch.Size] | None = None,
    ) -> None:
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys, None, None)
        if not 0 < decay <= 1:
            raise ValueError(f"VecNorm: decay: expected a number in (0, 1], got {decay}.")
        if not eps > 0:
            raise ValueError(f"VecNorm: eps: expected a positive number, got {eps}.")
        if shapes is not None and len(shapes) != len(self.in_keys):
            raise ValueError(f"VecNorm: shapes: expected one per key, {len(self.in_keys)}, got {len(shapes)}.")
        self.decay, self.eps = float(decay), float(eps)
        self.frozen = False
        self._shapes = [None] * len(self.in_keys) if shapes is None else [torch.Size(shape) for shape in shapes]
        self._moments: list[_Moments | None] = [None] * len(self.in_keys)
        self._lock = threading.Lock()

    def forward(self, data: object) -> object:
        if is_tensor(data):
            value = torch.as_tensor(data)
            with self._lock:
                self._add({0: (value, value.shape[1:])})
                return self._normalized(0, value)
        normalized = shallow(data, "VecNorm")
        found = {}
        for i, key in enumerate(self.in_keys):
            if find(data, key) is not None:
                value = torch.as_tensor(entry(data, key, "VecNorm"))
                found[i] = (value, value.shape[len(data.batch_size) if is_tensordict(data) else 1 :])
        with self._lock:
            self._add(found)
            for i, (value, _) in found.items():
                put(normalized, self.out_keys[i], self._normalized(i, value))
        return normalized

    def inv(self, data: object) -> object:
        """Return data unchanged. :meth:`denorm` undoes the normalization.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=1.0)
        >>> _ = norm({"obs": torch.tensor([1.0, 3.0])})
        >>> norm.inv({"obs": torch.tensor([4.0])})["obs"].tolist()
        [4.0]
        """
        return data

    def _add(self, found: dict[int, tuple[torch.Tensor, torch.Size]]) -> None:
        """Add values of some keys to the statistics: all of them, or none after an error."""
        if self.frozen:
            return
        new = {i: self._after(i, value, shape) for i, (value, shape) in found.items()}
        for i, moments in new.items():
            self._moments[i] = moments

    def _after(self, i: int, value: torch.Tensor, shape: torch.Size) -> _Moments:
        before = self._moments[i]
        expected = before.mean.shape if before is not None else self._shapes[i]
        shape = shape if expected is None else expected
        if value.shape[value.ndim - len(shape) :] != shape or value.ndim < len(shape):
            raise RuntimeError(f"VecNorm: {self.in_keys[i]!r}: expected shape {list(shape)}, got {list(value.shape)}.")
        rows = value.detach().reshape(-1, *shape).to(torch.float64)
        if not len(rows):
            raise RuntimeError(f"VecNorm: {self.in_keys[i]!r}: expected at least one value, got an empty batch.")
        mean = rows.mean(0)
        weight = torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device)
        moments = _Moments(weight, mean, ((rows - mean) ** 2).sum(0))
        if not bool(torch.isfinite(moments.squares).all()):
            raise ValueError(
                f"VecNorm: {self.in_keys[i]!r}: expected finite values, got NaN or infinite ones. The statistics are unchanged."
            )
        if before is None:
            return moments
        decayed = _Moments(before.weight * self.decay, before.mean, before.squares * self.decay)
        return decayed.joined(_Moments(*(part.to(before.mean.device) for part in moments)))

    def _normalized(self, i: int, value: torch.Tensor) -> torch.Tensor:
        dtype = value.dtype if value.dtype.is_floating_point else torch.get_default_dtype()
        loc, scale = (part.to(value.device, dtype) for part in self._loc_scale(i))
        return (value - loc) / scale

    def _loc_scale(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        moments = self._moments[i]
        if moments is None:
            raise RuntimeError(f"VecNorm: expected statistics of {self.in_keys[i]!r}, but nothing was read yet.")
        return moments.mean, (moments.squares / moments.weight).clamp_min(self.eps).sqrt().clamp_min(self.eps)

    # ---- looking at the statistics -------------------------------------------------------------------------------------

    @property
    def loc(self) -> dict[Key, torch.Tensor]:
        """Mean of each key that was read, float64."""
        return {k: self._loc_scale(i)[0].clone() for i, k in enumerate(self.in_keys) if self._moments[i] is not None}

    @property
    def scale(self) -> dict[Key, torch.Tensor]:
        """Standard deviation of each key that was read, float64, at least ``eps``."""
        return {key: self._loc_scale(i)[1] for i, key in enumerate(self.in_keys) if self._moments[i] is not None}

    def freeze(self) -> Self:
        """Stop updating the statistics. Returns the transform.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=0.99)
        >>> batch = norm.forward({"obs": torch.randn(64, 4)})
        >>> norm = norm.freeze()
        >>> batch = norm.forward({"obs": torch.randn(64, 4)})  # changes no statistics
        """
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Update the statistics again. Returns the transform.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=0.99)
        >>> batch = norm.forward({"obs": torch.randn(64, 4)})
        >>> norm = norm.freeze()
        >>> norm = norm.unfreeze()
        """
        self.frozen = False
        return self

    def frozen_copy(self) -> VecNorm:
        """A frozen copy with the current statistics.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=0.99)
        >>> batch = norm.forward({"obs": torch.randn(64, 4)})
        >>> evaluation = norm.frozen_copy()
        >>> batch = evaluation.forward({"obs": torch.randn(64, 4)})  # with the statistics of the training so far
        """
        return copy.deepcopy(self).freeze()

    def denorm(self, data: object) -> Any:
        """Undo the normalization with the current statistics: compute ``in_keys`` from ``out_keys``.

        Raises:
            RuntimeError: nothing was read yet.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=1.0)
        >>> _ = norm({"obs": torch.tensor([1.0, 3.0])})
        >>> norm.freeze().denorm({"obs": norm({"obs": torch.tensor([4.0])})["obs"]})["obs"].tolist()
        [4.0]
        """
        if is_tensor(data):
            return self._restored(0, torch.as_tensor(data))
        restored = shallow(data, "VecNorm")
        for i, key in enumerate(self.out_keys):
            value = find(data, key)
            if value is not None:
                put(restored, self.in_keys[i], self._restored(i, value))
        return restored

    def _restored(self, i: int, value: torch.Tensor) -> torch.Tensor:
        loc, scale = (part.to(value.device, value.dtype) for part in self._loc_scale(i))
        return value * scale + loc

    def to_observation_norm(self) -> ObservationNorm | Compose:
        """A fixed transform with the current statistics; a :class:`Compose` if there are several keys.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=0.99)
        >>> batch = norm.forward({"obs": torch.randn(64, 4)})
        >>> norm.to_observation_norm()
        ObservationNorm(loc=tensor(...), scale=tensor(...), in_keys=['obs'])
        """
        norms = []
        for i, (key, out_key) in enumerate(zip(self.in_keys, self.out_keys, strict=True)):
            loc, scale = (part.to(torch.get_default_dtype()) for part in self._loc_scale(i))
            norms.append(ObservationNorm(loc, scale, [key], [out_key], standard_normal=True))
        return norms[0] if len(norms) == 1 else Compose(*norms)

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors: ``frozen``, and ``i.weight``, ``i.mean`` and ``i.squares`` for the i-th key, if it was read.

        >>> import torch
        >>> from engram import VecNorm
        >>> norm = VecNorm(["obs"], decay=1.0)
        >>> _ = norm({"obs": torch.tensor([1.0, 3.0])})
        >>> norm.state_dict()["0.mean"]
        tensor(2., dtype=torch.float64)
        """
        state = {"frozen": torch.tensor(self.frozen, device="cpu")}
        with self._lock:
            for i, moments in enumerate(self._moments):
                if moments is not None:
                    state |= {f"{i}.{name}": value.clone() for name, value in moments._asdict().items()}
        return state

    def prepare_load(self, state_dict: dict[str, torch.Tensor]) -> Commit:
        names = {i: [f"{i}.{name}" for name in _Moments._fields] for i in range(len(self.in_keys))}
        known = {i: entries for i, entries in names.items() if entries[0] in state_dict}
        check_keys(state_dict, ["frozen", *(name for entries in known.values() for name in entries)], "VecNorm")
        moments = [self._checked_moments(i, known[i], state_dict) if i in known else None for i in names]
        frozen = bool(tensor_in(state_dict, "frozen", torch.bool, (), "VecNorm"))
        return Change(self._take, moments, frozen)

    def _take(self, moments: list[_Moments | None], frozen: bool) -> None:
        with self._lock:
            self._moments, self.frozen = moments, frozen

    def _checked_moments(self, i: int, names: list[str], state: Mapping[str, object]) -> _Moments:
        """The statistics of a key, copied."""
        known, mean = self._shapes[i], state[names[1]]
        shape = known if known is not None else mean.shape if isinstance(mean, torch.Tensor) else ()
        parts = []
        for name, expected in zip(names, ((), shape, shape), strict=True):
            value = state[name]
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                raise TypeError(f"VecNorm: {name}: expected a tensor of floats, got {type(value).__name__}.")
            if value.shape != torch.Size(expected):
                raise ValueError(f"VecNorm: {name}: expected the shape {list(expected)}, got {list(value.shape)}.")
            parts.append(value.detach().to(torch.float64).clone())
        moments = _Moments(*parts)
        finite = all(bool(torch.isfinite(part).all()) for part in moments)
        if not finite or not float(moments.weight) > 0 or bool((moments.squares < 0).any()):
            raise ValueError(f"VecNorm: {names}: expected finite statistics, a weight above 0, squares of at least 0.")
        return moments

    def __getstate__(self) -> dict[str, object]:
        with self._lock:
            state = dict(self.__dict__)
            state["_moments"] = list(self._moments)
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


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
        loc: Number,
        scale: Number,
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
        known = isinstance(scale, torch.Tensor) and scale.dtype.is_floating_point
        self.eps = eps if eps is not None else torch.finfo(scale.dtype).eps if known else 1e-6  # type: ignore[union-attr]
        self.loc, given = _constants(loc, scale, name)
        self.scale = given.clamp_min(self.eps)
        self.standard_normal = bool(standard_normal)

    def apply(self, value: torch.Tensor) -> torch.Tensor:
        return self._standardized(value) if self.standard_normal else self._scaled(value)

    def apply_inv(self, value: torch.Tensor) -> torch.Tensor:
        return self._scaled(value) if self.standard_normal else self._standardized(value)

    def _scaled(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale.to(value.device) + self.loc.to(value.device)

    def _standardized(self, value: torch.Tensor) -> torch.Tensor:
        return (value - self.loc.to(value.device)) / self.scale.to(value.device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``loc``, ``scale`` and ``standard_normal``: copies.

        >>> from engram import ObservationNorm
        >>> sorted(ObservationNorm(loc=0.0, scale=2.0, in_keys=["obs"]).state_dict())
        ['loc', 'scale', 'standard_normal']
        """
        standard = torch.tensor(self.standard_normal, device="cpu")
        return {"loc": self.loc.clone(), "scale": self.scale.clone(), "standard_normal": standard}

    def prepare_load(self, state_dict: dict[str, torch.Tensor]) -> Commit:
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
        self, loc: Number, scale: Number, in_keys: Keys = None, out_keys: Keys = None, standard_normal: bool = False
    ) -> None:
        keys = ["reward"] if in_keys is None else in_keys
        super().__init__(loc, scale, keys, out_keys, standard_normal=standard_normal, eps=1e-6)


def _constants(loc: object, scale: object, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    checked = _constant(loc, f"{name}: loc"), _constant(scale, f"{name}: scale")
    if not bool((checked[1] > 0).all()):
        raise ValueError(f"{name}: scale: expected positive values, got {float(checked[1].min())}.")
    return checked


def _constant(value: object, name: str) -> torch.Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor):
        raise TypeError(f"{name}: expected a number or a tensor, got {type(value).__name__}.")
    made = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value), device="cpu")
    if not bool(torch.isfinite(made).all()):
        raise ValueError(f"{name}: expected finite values, got {value}.")
    return made
