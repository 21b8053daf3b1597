"""What buffers and ensembles of them have alike: their text, their generator, the batches ahead, and components by name."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from engram._support.closing import Closes
from engram.around.query import Query
from engram.buffer.display import Display
from engram.buffer.wiring import checked_generator

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from rich.tree import Tree

    from engram.buffer.configuration import Settings
    from engram.buffer.prefetching import Prefetching
    from engram.buffer.wiring import Wiring
    from engram.transforms import Compose

B = TypeVar("B")
T = TypeVar("T")


class Shows(Generic[B]):
    """Makes properties of a class ``B`` of buffers, each of which is what a function finds in the parts of one."""

    def __call__(self, get: Callable[[B], T], doc: str, put: Callable[..., None] | None = None) -> T:
        """``put``: sets it."""
        return cast("T", property(get, put, doc=doc))


_shows: Shows[BufferBase] = Shows()


class BufferBase(Closes):
    """Base of buffers and of ensembles: their generator, and batches ahead."""

    _wiring: Wiring
    _settings: Settings
    _prefetching: Prefetching | None

    transform: Compose = _shows(lambda self: self._wiring.transform, "Transforms of batches: a :class:`Compose`.")
    _transform = transform
    batch_size: int | None = _shows(lambda self: self._settings.batch_size, "Default batch size: an int, or None.")
    prefetch: int = _shows(lambda self: self._settings.prefetch, "Batches asked for ahead: an int.")
    shared: bool = _shows(lambda self: self._wiring.storage.shared, "Whether several processes may use all rows.")
    is_alive: bool = _shows(
        lambda self: self._wiring.gate.samples, "Whether sampling is possible: false after :meth:`shutdown`."
    )
    initialized: bool = _shows(
        lambda self: self._settings.unmade is None, "Whether the components are made: see ``delayed_init``."
    )
    register_save_hook = _shows(lambda self: self._wiring.storage.register_save_hook, "As of the storage.")
    register_load_hook = _shows(lambda self: self._wiring.storage.register_load_hook, "As of the storage.")
    _storage = _shows(lambda self: self._wiring.storage, "As ``storage``.", lambda self, value: self.set_storage(value))
    _sampler = _shows(lambda self: self._wiring.sampler, "As ``sampler``.", lambda self, value: self.set_sampler(value))
    _writer = _shows(lambda self: self._wiring.writer, "As ``writer``.", lambda self, value: self.set_writer(value))

    def set_rng(self, generator: torch.Generator | None) -> None:
        """The generator of all later draws; None: torch's default one. Raises ``ValueError`` for one not on the CPU.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.set_rng(torch.Generator().manual_seed(0))
        >>> first = rb.sample(return_info=True)[1]["index"]
        >>> rb.set_rng(torch.Generator().manual_seed(0))
        >>> torch.equal(first, rb.sample(return_info=True)[1]["index"])
        True
        """
        generator = checked_generator(generator)
        self._discard_prefetched("set_rng", keys=False)
        self._wiring.generator = generator

    def synchronize(self) -> None:
        """Wait until threads have made the batches that they were given. What that raised, :meth:`sample` raises.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.synchronize()
        """
        if self._prefetching is not None:
            self._prefetching.wait()

    def _materialize(self) -> None:
        """What happens to rows now is not for batches that were asked for before."""
        if self._prefetching is not None:
            self._prefetching.materialize()

    def _discard_prefetched(self, call: str, *, keys: bool = True) -> None:
        if self._prefetching is not None:
            self._prefetching.discard(call, keys=keys)


class Shown:
    """A buffer as text, in a terminal with rich, and in a notebook; and what is found in it."""

    _wiring: Wiring
    _settings: Settings
    query = cast("Query", property(Query, doc=Query.__doc__))

    def __repr__(self) -> str:
        if self._settings.unmade is not None:
            return f"{self._settings.kind}(delayed_init=True)"
        return Display(self._wiring, self._settings).text()

    def __rich__(self) -> Tree | str:
        if self._settings.unmade is not None:
            return repr(self)
        return Display(self._wiring, self._settings).tree()

    def _repr_html_(self) -> str:
        if self._settings.unmade is not None:
            return f"<table><caption>{escape(repr(self))}</caption></table>"
        return Display(self._wiring, self._settings).html()
