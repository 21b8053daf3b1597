"""Keys: the random bits that a sample follows from."""

from __future__ import annotations

import threading

import torch

from engram import _native


class Key:
    """64 random bits, from which a sample follows. Drawing costs 0.5 µs; the core reads them at :attr:`address`, which saves a
    conversion.
    """

    def __init__(self) -> None:
        with torch.inference_mode(mode=False):  # else it could not be drawn into outside of inference mode
            bits = torch.zeros((), dtype=torch.int64, device="cpu")
            self.address = bits.data_ptr()
            self._random = _native.RandomBits(self.address, bits.random_)
        self.draw = self._random.draw
        """``draw()`` or ``draw(generator=…)``. Without one, Python's lock is kept: torch's own method hands it over."""

    @classmethod
    def of(cls, value: int) -> Key:
        """These bits, ``0 <= value < 2 ** 64``."""
        key = cls()
        key._random.value = value
        return key

    @property
    def value(self) -> int:
        """The bits, as an int."""
        return self._random.value


class ThreadKey(Key, threading.local):
    """A key that is drawn again for every sample. Each thread has its own, so that no thread sees another's."""
