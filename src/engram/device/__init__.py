"""Batches on the learner's device: read by itself, or copied through pinned memory."""

from engram.device.loader import DeviceLoader as DeviceLoader
from engram.device.replay import DeviceReplay as DeviceReplay
