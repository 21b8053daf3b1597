"""What engram's own samplers share beyond the protocol: TorchRL's verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engram import _fork
from engram._words import warn
from engram.components import Component, adopt
from engram.errors import EMPTY, NoSampleable
from engram.field_paths import as_paths, public
from engram.samplers.field_reader import FieldReader
from engram.state import prepare_load, saved
from engram.types import Declared, Traits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.store import Key, Masses
    from engram.types import Commit, Draw, Entry, Extent, Info, NativeBatch, SampledStorage, Sampler, Shown, Write


def check_drawable(size: int) -> None:
    """Raise ``NoSampleable`` if no row is live."""
    if size < 1:
        raise NoSampleable(EMPTY)


class DeclaredSampler(Component):
    """What a buffer asks of a sampler. Of one that follows the protocol only, :func:`declared` makes one."""

    part = "sampler"
    traits = Traits(has_epochs=False, listens=False, takes_priorities=False)

    #: Whether the last batch ended an epoch. The buffer sets it.
    ran_out = False
    #: Whether rows that do not fill a batch are skipped at the end of an epoch.
    drop_last = False
    #: After how many draws a row is used up; None: never.
    draws_of_a_row: int | None = None
    #: Keys of the fields that ``draw`` is handed; None: it is handed none.
    reads: object = None
    #: Keys of the entries of :meth:`sample_natively`'s info that are fields of the batch, too, and whether ``[B, 1]`` is ``[B]`` there.
    computed_keys: Mapping[Entry, bool] = {}

    @property
    def max_size(self) -> int:
        """How many rows it can draw from; 0: as many as its storage has."""
        return 0

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        raise NotImplementedError

    def draw_again(self, extent: Extent, drawn: Draw, moved: list[int], key: int) -> tuple[list[int], Draw]:
        """Others for the places of a draw whose rows moved, and for those that must be drawn together with them: which, and what."""
        return moved, self.draw(extent, len(moved), key)

    def bind(self, storage: SampledStorage) -> None:
        """Meet the storage whose rows are drawn; raises to refuse it."""

    def sample_natively(
        self, storage: SampledStorage, key: Key, n: int, *, numbered: bool = False, shown: Shown = "beside"
    ) -> NativeBatch:
        """:meth:`draw` and the rows' data in one native call, if the traits say so: ``(columns, rows, info)``.

        ``numbered``: the info has tickets. ``shown="nothing"``: the rows may be None, and the info need only have ``computed_keys``.
        """
        raise NotImplementedError

    def moved(self) -> None:
        """The storage's rows lie elsewhere now, with their indexes; or a buffer that draws from it is closed."""

    def observe(self, write: Write | None, data: object) -> None:
        """No effect: rows are known from the store."""

    def update_priority(self, index: object, priority: object, *, generation: Tensor | None = None) -> None:
        """No effect, with a warning: this sampler has no priorities."""
        warn(f"{type(self).__name__} has no priorities: update_priority has no effect.")

    def check_priority(self, priority: object, n: int) -> None:
        """Raise as :meth:`update_priority` would for priorities of ``n`` rows."""

    def reduced(self, value: Tensor) -> Tensor:
        """Priorities ``[n, ...]`` as one number per row, ``[n]``: the largest."""
        return value.flatten(1).amax(1)

    def mark_update(self, index: object) -> None:
        """Rows were rewritten: they get the default priority again. No effect: this sampler has no priorities."""

    def drawable(self, storage: SampledStorage) -> int:
        """How many rows may be drawn."""
        return len(storage)

    def masses(self, storage: SampledStorage) -> Masses | None:
        """What draws over several stores choose this one by. None: they cannot."""
        return None

    def epoch(self, storage: SampledStorage) -> tuple[int, int]:
        """The key of the newest epoch, and how much of it is left: 0 where the next draw begins another one."""
        return 0, 0

    def rows_together(self) -> tuple[int, int]:
        """Steps of each window, and how many of a batch size it is; zeros: windows differ, or follow from the batch size."""
        return 1, 1

    def can_sample(self, storage: SampledStorage, batch_size: int) -> bool:
        """Whether a draw of this size would succeed now."""
        return len(storage) > 0 and batch_size > 0

    def were_read(self, draw: Draw) -> None:
        """The rows of a draw were read, and may be written over where they are used up. Told to one that ``consumes``."""
        raise NotImplementedError

    def used_rows(self, n: int) -> Tensor:
        """int64: live rows that will never be drawn again, ``n`` at most. Asked of one that ``consumes``."""
        raise NotImplementedError

    @property
    def own_indexes(self) -> tuple[tuple[str, str], ...]:
        """Names and kinds of the store's indexes whose content the state has: a buffer's state has it there only."""
        return ()


class NativeSampler(DeclaredSampler):
    """Base of the samplers that draw in the native core, with TorchRL's verbs."""

    #: Priority of rows without one.
    default_priority = 1.0

    @property
    def prioritized(self) -> bool:
        """Whether draws are by priority."""
        return self.traits.prioritized

    def mark_update(self, index: object, *, storage: object = None) -> None:
        """No effect: this sampler has no priorities."""

    def add(self, index: object) -> None:
        """No effect, because rows are known from the store."""

    def extend(self, index: object) -> None:
        """No effect, because rows are known from the store."""

    def sample(self, storage: SampledStorage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], Info]:
        """Draw from a storage with a key of torch's default generator: ``(int64 [B], info)``."""
        key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        draw = self.draw(storage.extent(), batch_size, key)
        if self.traits.consumes:
            self.were_read(draw)
        return draw.rows, dict(draw.info)


#: Methods of a user's sampler that a buffer calls, if they are there.
_METHODS = ("observe", "update_priority", "bind", "moved", "can_sample", "check_priority", "mark_update")


def _said(inner: object, name: str, default: object = None) -> object:
    """An attribute that a user's sampler may have."""
    return getattr(inner, name, default)


class _Adapted(DeclaredSampler):
    """A sampler that follows the protocol only, with the rest of what a buffer asks of one.

    The optional attributes of such a sampler are looked up here and nowhere else.
    """

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner
        own = _said(inner, "traits")
        if not isinstance(own, Traits):
            prioritized = _said(inner, "prioritized")
            own = Traits(
                listens=bool(_said(inner, "listens", True)),
                prioritized=bool(prioritized),
                takes_priorities=prioritized is None or bool(prioritized),
            )
        #: What counts is its ``draw``.
        self.traits = own._replace(draws_uniformly=False, reads_natively=False)
        adopt(self, inner, _METHODS)

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        return self._checked(self._inner.draw(extent, batch_size, key))

    def _checked(self, draw: Draw) -> Draw:
        """What was drawn. Raises ``TypeError``: no ``Draw`` of tensors."""
        rows, tickets = _said(draw, "rows", draw), _said(draw, "tickets")
        if rows is not draw and isinstance(rows, Tensor) and isinstance(tickets, Tensor | None):
            return draw
        got = tickets if rows is not draw and isinstance(rows, Tensor) else rows
        raise TypeError(
            f"sample: {type(self._inner).__name__}.draw: expected a Draw of tensors, Draw(rows, tickets=None, info={{}}), got "
            f"{type(got).__name__}. Return Draw(torch.as_tensor(rows))."
        )

    @property
    def ran_out(self) -> bool:
        return bool(_said(self._inner, "ran_out"))

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        if hasattr(self._inner, "ran_out"):
            self._inner.ran_out = value

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        return bool(_said(self._inner, "drop_last"))

    def state_dict(self) -> dict[str, object]:
        return saved(self._inner, "_sampler")

    def prepare_load(self, state_dict: dict[str, object], capacity: int | None = None) -> Commit:
        return prepare_load(self._inner, state_dict, "_sampler")

    def __repr__(self) -> str:
        return repr(self._inner)


class _Reading(_Adapted):
    """A sampler that is handed fields of the rows at each draw."""

    _reader: FieldReader | None = None

    def __init__(self, inner: Sampler, reads: object) -> None:
        super().__init__(inner)
        self._keys = as_paths(reads, f"{type(inner).__name__}: reads") or ()
        self._drawing = _fork.rlock()
        for name in ("bind", "moved"):
            vars(self).pop(name, None)

    def bind(self, storage: SampledStorage) -> None:
        """Raises ``TypeError``: the storage has no fields. ``KeyError``: not those. What the sampler raises."""
        if not storage.traits.has_fields:
            raise TypeError(
                f"{type(self._inner).__name__}: expected a tensor storage, as it declares reads={list(map(public, self._keys))}; "
                f"a {type(storage).__name__} has no fields."
            )
        if self._reader is None or self._reader.storage is not storage:
            self._reader = FieldReader(storage, self._keys)
        self._call("bind", storage)

    def moved(self) -> None:
        if self._reader is not None:
            self._reader.forget()
        self._call("moved")

    def draw(self, extent: Extent, batch_size: int, key: int) -> Draw:
        assert self._reader is not None  # a buffer binds it first
        with self._drawing:  # another thread's draw would change what is read
            self._reader.refresh()
            return self._checked(cast("Any", self._inner).draw(extent, batch_size, key, self._reader))

    def _call(self, name: str, *arguments: object) -> None:
        """Call an optional method."""
        if callable(method := _said(self._inner, name)):
            method(*arguments)


def declared(sampler: Sampler) -> DeclaredSampler:
    """The sampler, or of one that follows the protocol only, one around it that answers all that buffers ask."""
    reads = sampler.reads if isinstance(sampler, DeclaredSampler) else _said(sampler, "reads")
    if reads is not None:
        return _Reading(sampler, reads)
    return cast("DeclaredSampler", sampler) if isinstance(sampler, Declared) else _Adapted(sampler)
