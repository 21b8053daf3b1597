"""Stores: rows, tickets, cursors and indexes in one memory. Modules import those above them in this list: keys and memory;
blocks; locks; lifetime; indexes; adding; store; requests, device and readonly; elsewhere; opening.
"""

from engram.store.adding import add_field, fill_rows
from engram.store.blocks import GENERATION, INDEX, WEIGHT, BlockLayout, DrawingInto, DrawingPart, Key, Masses, ThreadKey
from engram.store.device import DevicePriorities, DeviceStore, Mirror, copy_rows
from engram.store.elsewhere import ForeignStore
from engram.store.indexes import INDEX_KINDS, Host, Index, LockedIndex, TicketIndex, check_index_name
from engram.store.lifetime import (
    Process,
    erase,
    forget_temporary,
    maker_of,
    occupied,
    shared_memory,
    sweep_shared_memory,
)
from engram.store.memory import (
    DTYPE_NAMES,
    DTYPE_OF,
    Block,
    Copied,
    as_rows,
    dlpack_specs,
    private_block,
    read_block,
    torch_dtype,
)
from engram.store.opening import (
    create_store,
    holds_store,
    moved,
    open_readonly,
    open_store,
    origin_of,
    reattach,
    skip_numbers,
)
from engram.store.requests import OutOfOrder, Requests, Written
from engram.store.store import Repair, Saved, Store, StoreState

__all__ = [
    "DTYPE_NAMES",
    "DTYPE_OF",
    "GENERATION",
    "INDEX",
    "INDEX_KINDS",
    "WEIGHT",
    "Block",
    "BlockLayout",
    "Copied",
    "DevicePriorities",
    "DeviceStore",
    "DrawingInto",
    "DrawingPart",
    "ForeignStore",
    "Host",
    "Index",
    "Key",
    "LockedIndex",
    "Masses",
    "Mirror",
    "OutOfOrder",
    "Process",
    "Repair",
    "Requests",
    "Saved",
    "Store",
    "StoreState",
    "ThreadKey",
    "TicketIndex",
    "Written",
    "add_field",
    "as_rows",
    "check_index_name",
    "copy_rows",
    "create_store",
    "dlpack_specs",
    "erase",
    "fill_rows",
    "forget_temporary",
    "holds_store",
    "maker_of",
    "moved",
    "occupied",
    "open_readonly",
    "open_store",
    "origin_of",
    "private_block",
    "read_block",
    "reattach",
    "shared_memory",
    "skip_numbers",
    "sweep_shared_memory",
    "torch_dtype",
]
