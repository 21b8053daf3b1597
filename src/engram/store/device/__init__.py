"""What stores need of an accelerator: rows that lie on one, and rows of the host that one reads."""

from engram.store.device.mirror import Mirror as Mirror
from engram.store.device.mirror import copy_rows as copy_rows
from engram.store.device.rows import DevicePriorities as DevicePriorities
from engram.store.device.store import DeviceStore as DeviceStore
from engram.store.device.store import HostedStore as HostedStore
