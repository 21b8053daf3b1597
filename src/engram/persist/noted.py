"""The base of engram's own samplers and writers: traits, a state, and the arguments that a store notes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from engram._support.field_paths import plain
from engram._support.state import Loads, check_keys
from engram.persist.components import Dumpable
from engram.types import Declared

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from engram.types import Commit


class Noted:
    """What a store notes of an object: the arguments of its constructor, with which it is made again."""

    #: Arguments of the constructor that a store notes: attributes of these names.
    noted: tuple[str, ...] = ()

    def config(self) -> dict[str, object]:
        """The constructor's arguments, as plain values: a store notes them to make the component again.

        >>> from engram import SamplerWithoutReplacement
        >>> SamplerWithoutReplacement(drop_last=True).config()["drop_last"]
        True
        """
        return {name: plain(getattr(self, name)) for name in self.noted}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make the component that a store noted.

        >>> from engram import SamplerWithoutReplacement
        >>> sampler = SamplerWithoutReplacement(drop_last=True)
        >>> SamplerWithoutReplacement.from_config(sampler.config())
        SamplerWithoutReplacement(drop_last=True)
        """
        return cls(**config)

    def __repr__(self) -> str:
        """Arguments that differ from their defaults."""
        defaults = {name: plain(it.default) for name, it in inspect.signature(type(self).__init__).parameters.items()}
        given = [(name, value) for name, value in self.config().items() if not _is_default(value, defaults.get(name))]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


class Component(Noted, Declared, Dumpable):
    """A sampler or writer of engram's own."""

    @property
    def recordable(self) -> bool:
        """Whether :meth:`config` says all."""
        return True

    def _empty(self, empty_write_count: bool = True) -> None:
        """TorchRL's; no effect, because rows and cursors are the store's."""

    def state_dict(self) -> dict[str, object]:
        """All state, as tensors and plain values: copies.

        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> import torch
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=PrioritizedSampler(10, alpha=0.6, beta=0.4))
        >>> _ = rb.extend(torch.arange(3))
        >>> rb.sampler.state_dict()["alpha"]
        0.6
        """
        return {}

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        """Check a state. ``capacity``: rows that the storage will have when it is committed; None: as now.

        Returns:
            What makes the change: call its ``commit()`` once. Until then nothing is changed.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: one out of range.
            IncompatibleCheckpoint: the state of a component with other arguments (a ``ValueError``).

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
        >>> _ = rb.extend(torch.arange(10))
        >>> saved = rb.sampler.state_dict()
        >>> _ = rb.sample()
        >>> load = rb.sampler.prepare_load(saved)  # changes nothing
        >>> load.commit()
        >>> len(list(rb))  # again the whole epoch: batches of 3, 3, 3 and 1
        4
        """
        del capacity  # an empty state fits all
        check_keys(state_dict, (), type(self).__name__)
        return Loads()


def _is_default(value: object, default: object) -> bool:
    """Whether a plain value of :meth:`Component.config` means a default, of which a dtype is known by its name there."""
    return value == default or f"torch.{value}" == str(default)


def adopt(wrapper: Component, inner: object, methods: Iterable[str]) -> None:
    """Let a wrapper around a user's component answer with those of these methods that the component has."""
    for name in methods:
        if hasattr(inner, name):
            setattr(wrapper, name, getattr(inner, name))
