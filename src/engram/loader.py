"""Where the loader was, for programs that import it from here."""

from engram.device.loader import DeviceLoader
from engram.store.device.accelerator import Accelerator as Streams

__all__ = ["DeviceLoader", "Streams"]
