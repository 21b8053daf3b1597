"""Keys: the random bits that a sample follows from."""

from __future__ import annotations

import threading

import torch


class Key:
    """64 random bits, from which a sample follows. Drawing costs 0.6 µs; the core reads them at :attr:`address`, which saves a
    conversion.
    """

    def __init__(self) -> None:
        with torch.inference_mode(mode=False):  # else it could not be drawn into outside of inference mode
            self._bits = torch.zeros((), dtype=torch.int64, device="cpu")
        self.address = self._bits.data_ptr()
        self.draw = self._bits.random_
        """``draw()`` or ``draw(generator=…)``."""
        self.mix = self._bits.bitwise_xor_
        """``mix(stream)``: into the bits of a draw those of :func:`engram._support.fork.stream`."""

    @classmethod
    def of(cls, value: int) -> Key:
        """These bits, ``0 <= value < 2 ** 64``."""
        key = cls()
        key.set(value)
        return key

    def set(self, value: int) -> None:
        """To these bits, ``0 <= value < 2 ** 64``, in place of a draw."""
        self._bits.fill_(value - (1 << 64) if value >= 1 << 63 else value)

    @property
    def value(self) -> int:
        """The bits, as an int."""
        return int(self._bits)


class ThreadKey(Key, threading.local):
    """A key that is drawn again for every sample. Each thread has its own, so that no thread sees another's."""
