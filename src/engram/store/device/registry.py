"""Which memory of the host is registered in this process, so that accelerators read it.

Pages are registered once, however many users they have: two loaders of one store, or two blocks that share a page. Registered memory
stays mapped: the registry keeps its tensors until it has unregistered their pages, which it does after the work that reads them.

A fork that Python does not know of, such as one by native code, is not noticed. A CUDA graph that a program replays reads the addresses
of its capture, whatever happened since.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from engram._support import fork
from engram._support.mappings import shared_pieces
from engram._support.memory import available_memory
from engram._support.words import no_space
from engram.errors import ForkedHandle
from engram.store.device.accelerator import ALREADY_REGISTERED, Accelerator, DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import Tensor


__all__ = ["REGISTRY", "NotRegistered", "Registered", "Registry"]

#: The driver's codes for calls that a capture does not allow.
_CAPTURE_CODES = range(900, 909)
_PAGE = mmap.PAGESIZE
#: How many pages the kernel is asked about at a time.
_PAGES_ASKED = 1 << 18


class NotRegistered(RuntimeError):
    """Memory cannot be registered, or cannot stay so. The text is the cause; rows can be read through the host instead."""


class _Span:
    """Pages that were registered by one call, or that another part of the program had registered."""

    def __init__(self, start: int, end: int, owner: Accelerator, *, readonly: bool) -> None:
        self.start, self.end = start, end
        self.owner, self.readonly = owner, readonly
        #: Whether the registry registered them, and so unregisters them.
        self.owned = False
        #: How many handles need them.
        self.users = 0
        #: The memory on these pages, by address and size. It stays mapped.
        self.tensors: dict[tuple[int, int], Tensor] = {}
        #: Whether a fork may move them (they are copied on write), and how many forks there had been when they were registered.
        self.private, self.forks = False, 0
        #: On which streams of which devices work was queued that reads them; None: in a graph, which may be replayed on any stream.
        self.uses: set[tuple[Accelerator, torch.Stream | None]] = set()
        #: Why they cannot be read any more.
        self.gone: Exception | None = None

    def register(self, forks: int) -> None:
        """Raises ``NotRegistered``."""
        self.forks = forks  # before: a fork that happens meanwhile counts
        try:
            self.owner.register(self.start, self.end - self.start, readonly=self.readonly)
            self.owned = True
        except DriverError as error:
            if error.code != ALREADY_REGISTERED:
                raise NotRegistered(str(error)) from error

    def renew(self, forks: int) -> None:
        """Register them again. Raises ``DriverError``, ``NotRegistered``."""
        self.finish()
        if self.owned:
            self.owned = False
            self.owner.unregister(self.start)
            self.register(forks)
        if not self.owned:
            raise NotRegistered("another part of this program registered it, and the fork may have moved it")

    def finish(self) -> None:
        """Wait for the work that reads them."""
        for accelerator, stream in self.uses:
            accelerator.finish(stream)
        self.uses.clear()

    def free(self) -> bool:
        """Unregister them after the work that reads them. False: a capture is under way, or the device failed; try again later."""
        looked = {*self.uses, (self.owner, None)}
        if self.owner.captures or any(accelerator.capturing(stream) for accelerator, stream in looked):
            return False
        try:
            self.finish()
            if self.owned:
                self.owner.unregister(self.start)
        except DriverError as error:
            return error.code not in _CAPTURE_CODES  # else they are not registered any more
        except RuntimeError:
            return False
        return True


class Registered:
    """Memory that an accelerator reads, until it is closed or collected. Made by :meth:`Registry.register`."""

    def __init__(
        self, registry: Registry, accelerator: Accelerator, extents: Sequence[tuple[int, int]], spans: Sequence[_Span]
    ) -> None:
        self._registry, self._accelerator = registry, accelerator
        #: Hold it from :meth:`use` until the work is queued: other threads register nothing again meanwhile.
        self.turn = registry.turn
        self._extents, self._spans = extents, spans
        self._streams = set[object]()
        self._forks = min([span.forks for span in spans if span.private], default=registry.forks)
        #: Where the device sees the first byte of each tensor; 0 for one without bytes.
        self.addresses: tuple[int, ...] = ()
        self._finalizer = weakref.finalize(self, registry.end, spans)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.alive

    def use(self, stream: torch.Stream | None = None) -> bool:
        """Call this before each time that work is queued which reads the memory. The memory stays registered until that has ended.

        Args:
            stream: where the work is queued; None: on the stream in use.

        Returns:
            Whether :attr:`addresses` are others than before: a fork may have moved private memory, which was registered again.

        Raises:
            RuntimeError: it was closed; or a fork happened, and a graph is being captured.
            ForkedHandle: this is a forked child. NotRegistered: the memory could not be registered again.
        """
        if self.closed:
            raise RuntimeError("use: expected registered memory, got some that was closed. Register it again.")
        moved, forks = False, self._registry.forks
        if self._forks != forks:
            self._streams.clear()
            self._registry.renew(self._spans, self._accelerator)
            self._forks, moved = forks, self.locate()
        on = None if self._accelerator.capturing(stream) else stream or self._accelerator.current()
        if on not in self._streams:
            self._streams.add(on)
            for span in self._spans:
                span.uses.add((self._accelerator, on))
        self._registry.settle()
        return moved

    def close(self) -> None:
        """Give it up. The pages are unregistered after the work that reads them, unless others need them. Repeatable."""
        self._finalizer()

    def locate(self) -> bool:
        """Look up the :attr:`addresses`. Whether they are others than before.

        Raises ``NotRegistered``: the device does not see each tensor in one piece.
        """
        look, before = self._accelerator.device_address, self.addresses
        try:
            found = [(look(start), look(start + size - 1)) if size else (0, -1) for start, size in self._extents]
        except DriverError as error:
            raise NotRegistered(f"{self._accelerator.device} does not see all of it: {error}") from error
        if any(last - first != size - 1 for (first, last), (_, size) in zip(found, self._extents, strict=True)):
            raise NotRegistered(f"{self._accelerator.device} does not see it in one piece")
        self.addresses = tuple(first for first, _ in found)
        return self.addresses != before


class Registry:
    """The registered memory of a process. One object stands for a process: :data:`REGISTRY`.

    Args:
        available: says how many bytes of memory are available.
    """

    def __init__(self, available: Callable[[], int] = available_memory) -> None:
        self._available = available
        self._lock, self.turn = fork.lock(), fork.rlock()
        #: By address; no two overlap.
        self._spans: list[_Span] = []
        #: What handles needed that have ended. A finalizer may run anywhere, and waits for no lock.
        self._ended: collections.deque[Sequence[_Span]] = collections.deque()
        self._pid = os.getpid()
        #: How often this process has forked.
        self.forks = 0
        #: How many registrations that no handle needs wait for the end of a capture.
        self.waiting = 0
        fork.registered(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are registered."""
        return sum(span.end - span.start for span in self._spans)

    def register(self, accelerator: Accelerator, tensors: Sequence[Tensor], *, readonly: bool = False) -> Registered:
        """Let a device read tensors on the host: all of them, or none.

        Args:
            accelerator: the device.
            tensors: on the CPU, dense or strided. They stay in memory until their pages are unregistered.
            readonly: they are mapped without the right to write.

        Raises:
            NotRegistered: there is too little memory, because registering pins all pages; the driver refuses; or a tensor is not on the
                CPU.
        """
        elsewhere = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
        if elsewhere is not None:
            raise NotRegistered(f"expected rows in memory of the host, got some on {elsewhere}")
        extents = [_extent(tensor) for tensor in tensors]
        try:
            with self._lock:
                self._add(_pages(extents), accelerator, readonly=readonly)
                needed: dict[_Span, None] = {}  # in order
                for tensor, piece, extent in zip(tensors, shared_pieces(tensors), extents, strict=True):
                    for span in self._over(extent[0], sum(extent)):
                        needed[span] = None
                        span.tensors[extent] = tensor
                        span.private |= piece is None
                for span in needed:
                    span.users += 1
                made = Registered(self, accelerator, extents, list(needed))
            try:
                made.locate()
            except BaseException:
                made.close()
                raise
        finally:
            self.settle()
        return made

    def _add(self, ranges: Iterable[tuple[int, int]], accelerator: Accelerator, *, readonly: bool) -> None:
        """Register what is not registered yet of some pages. Raises ``NotRegistered``."""
        new = [_Span(*gap, accelerator, readonly=readonly) for pages in ranges for gap in self._gaps(*pages)]
        needed, free = sum(_absent(span.start, span.end) for span in new), self._available()
        if needed > free:
            raise NotRegistered(f"it pins all rows: {no_space(needed, free, 'Use fewer rows or a smaller dtype')}")
        self.waiting += len(new)  # if one is refused, those before it have no user and are unregistered
        for span in new:
            span.register(self.forks)
            bisect.insort(self._spans, span, key=lambda span: span.start)

    def _over(self, start: int, end: int) -> list[_Span]:
        """Registered pages that overlap with an extent, which is not empty."""
        first = bisect.bisect_right(self._spans, start, key=lambda span: span.end)
        return self._spans[first : bisect.bisect_left(self._spans, end, key=lambda span: span.start)]

    def _gaps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of some pages is not registered yet."""
        for span in self._over(start, end):
            if start < span.start:
                yield start, span.start
            start = span.end
        if start < end:
            yield start, end

    def renew(self, spans: Iterable[_Span], accelerator: Accelerator) -> None:
        """Register private pages again, which a fork may have moved.

        Raises:
            ForkedHandle, NotRegistered, RuntimeError: as :meth:`Registered.use`.
        """
        with self.turn, self._lock:
            for span in spans:
                if span.gone is None and span.private and span.forks != self.forks:
                    accelerator.check_not_capturing("use", "the process has forked: memory must be registered again")
                    try:
                        span.renew(self.forks)
                    except (DriverError, NotRegistered) as error:
                        self._spans.remove(span)
                        span.gone = NotRegistered(f"after a fork: {error}")
                if span.gone is not None:
                    raise span.gone

    def end(self, spans: Sequence[_Span]) -> None:
        """A handle no longer needs these."""
        self._ended.append(spans)
        self.settle()

    def settle(self) -> None:
        """Unregister what no handle needs, unless a capture is under way. Called by itself with every use, registration and close."""
        tried = False
        while (self._ended or (self.waiting and not tried)) and self._lock.acquire(blocking=False):
            tried = True
            try:
                while self._ended:
                    for span in self._ended.popleft():
                        span.users -= 1
                if os.getpid() == self._pid:  # else a forked child, whose hook has not run
                    unused = [span for span in self._spans if not span.users]
                    self.waiting = len(unused)
                    for span in unused:
                        if span.free():
                            self._spans.remove(span)
                            self.waiting -= 1
            finally:
                self._lock.release()

    # ---- forks -------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Private memory may move when one of the two processes writes to it: it is registered again before it is used next."""
        self.forks += 1

    def after_fork(self) -> None:
        """In a child: nothing is registered, and the parent's registrations are none of its."""
        for span in self._spans:
            span.gone = ForkedHandle(
                "use: expected a handle of this process, got one to registered memory of its parent, which no device reads for a forked "
                "child. Start the process by spawn, or make the loader in it."
            )
        self._spans, self.waiting, self._pid = [], 0, os.getpid()
        self._ended.clear()


#: The registry of this process.
REGISTRY = Registry()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor, with the gaps between its rows."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (steps + 1) * tensor.element_size() if tensor.numel() else 0


def _pages(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages of memory; those of blocks that share a page as one range."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(extents):
        start, end = address // _PAGE * _PAGE, -(-(address + nbytes) // _PAGE) * _PAGE
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif nbytes:
            found.append((start, end))
    return found


def _absent(start: int, end: int) -> int:
    """Bytes of the pages that are not in memory yet: those take some when they are pinned."""
    library, absent = ctypes.CDLL(None), 0
    for at in range(start, end, _PAGES_ASKED * _PAGE):
        nbytes = min(end - at, _PAGES_ASKED * _PAGE)
        present = np.zeros(nbytes // _PAGE, np.uint8)
        library.mincore(ctypes.c_void_p(at), ctypes.c_size_t(nbytes), ctypes.c_void_p(present.ctypes.data))
        absent += nbytes - int(np.count_nonzero(present & 1)) * _PAGE
    return absent
