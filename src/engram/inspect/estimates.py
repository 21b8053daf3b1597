"""Numbers for ``stats()`` that are looked up or estimated when they are asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from engram.expanders import Expander
from engram.format import layout
from engram.plotting.plots import looked_at
from engram.priorities import KIND as PRIORITIES
from engram.priorities import PriorityIndex
from engram.samplers import PrioritizedSampler, SliceSampler
from engram.samplers._base import DeclaredSampler
from engram.store import read_block, shared_memory
from engram.usage import UsageIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from engram.priorities import PriorityConfig
    from engram.storages import Storage
    from engram.store import Store

#: Rows that estimates are of.
MOST = 4096


def gauges(storage: Storage, sampler: object) -> dict[str, float]:
    """What ``ReplayBuffer.stats`` says beyond sizes and counters. What is not known is not there.

    Args:
        storage: whose rows are looked at; of one whose rows are on a server, which knows them, nothing.
        sampler: of the buffer.

    Cost: looks at 4,096 rows at most, a word or two each, however many there are.
    """
    if storage.traits.is_remote:
        return {}
    store = storage.memory
    found = _bytes(storage, store) | ({} if store is None else store.core.meter())
    usage = None if store is None else UsageIndex.in_use(store)
    found["usage_counted"] = int(usage is not None)
    extent = storage.extent()
    rows, tickets = looked_at(storage, extent, MOST) if extent.size else (torch.empty(0),) * 2
    if not len(rows):
        return found
    ages = np.maximum(storage.next_number() - 1 - tickets.numpy(), 0)
    found |= {"age_mean": float(ages.mean()), "age_p99": float(np.quantile(ages, 0.99))}
    if usage is not None:
        found["never_sampled_frac"] = float((usage.counts(rows).numpy() == 0).mean())
    index = priorities_of(storage, sampler)
    return found if index is None else found | _priorities(index, rows, extent.size)


def effective_size(storage: Storage) -> float | None:
    """Of a store in a folder that is only read: the effective sample size of its priorities now, whatever the sampler of the buffer.

    None: it has no priorities, or several, or its rows are elsewhere. Raises as reading their file. Cost: copies them.
    """
    if storage.traits.is_remote:
        return None
    store = storage.memory
    folder = None if store is None else store.folder
    if store is None or folder is None:
        return None
    paths = [*(folder / layout.FOLDER / layout.INDEXES).glob(f"*/{PRIORITIES}")]
    extent = storage.extent()
    rows, _ = looked_at(storage, extent, MOST) if extent.size else (torch.empty(0),) * 2
    if len(paths) != 1 or not len(rows):
        return None
    block = PriorityIndex.copied(read_block(paths[0], paths[0].stat().st_size).tensor)
    return _priorities(PriorityIndex(block, None), rows, extent.size)["priority_ess"]


def priorities_of(storage: Storage, sampler: object) -> PriorityIndex | None:
    """The priorities that a sampler draws by, if there are any."""
    names = sampler.own_indexes if isinstance(sampler, DeclaredSampler) else ()
    name = next((name for name, kind in names if kind == PRIORITIES), None)
    if name is None:
        return None
    if storage.memory is not None:
        index: PriorityIndex | None = storage.memory.indexes.get((name, PRIORITIES))
        return index
    return sampler.priorities() if isinstance(sampler, PrioritizedSampler) and len(storage) else None  # of a list


def drawing_by(sampler: object) -> object:
    """The sampler whose priorities rows are drawn by: the one inside expanders; of windows, their anchors."""
    inner = sampler.innermost if isinstance(sampler, Expander) else sampler
    return inner.anchors if isinstance(inner, SliceSampler) and inner.anchors is not None else inner


def is_over_batch(sampler: object) -> bool:
    """Whether weights are over the largest of each batch."""
    by = drawing_by(sampler)
    return isinstance(by, PrioritizedSampler) and by.normalize == "batch"


def values_of(leaves: NDArray[np.float64], config: PriorityConfig) -> NDArray[np.float64]:
    """The priorities of leaves. With ``alpha=0`` leaves do not tell them: all are 1."""
    if not config.alpha:
        return np.ones_like(leaves)
    with np.errstate(over="ignore"):
        return np.clip(leaves ** (1 / config.alpha) - config.eps, 0, np.finfo(np.float64).max)


def effective(leaves: NDArray[np.float64]) -> float:
    """The number of equally likely rows that draws in proportion to these are as diverse as."""
    largest = leaves.max(initial=0.0)
    shares = leaves / largest if largest else leaves  # squares of large ones would overflow
    squares = float((shares**2).sum())
    return float(shares.sum()) ** 2 / squares if squares else 0.0


def _priorities(index: PriorityIndex, rows: Tensor, size: int) -> dict[str, float]:
    """Of rows that stand for all ``size``."""
    leaves = index.leaves_of(rows).numpy()
    values = values_of(leaves, index.config)
    largest = float(values.max(initial=0.0))
    return {
        "priority_max": float(index.core.default_priority),
        "priority_mean": largest * float((values / largest).mean()) if largest else 0.0,
        "priority_ess": effective(leaves) * size / len(rows),
    }


def _bytes(storage: Storage, store: Store | None) -> dict[str, float]:
    """Memory and disk of rows, their tickets and indexes, when all rows are written."""
    if store is None:
        return {"bytes_ram": storage.nbytes, "bytes_disk": 0}
    nbytes = store.nbytes + sum(len(memory) for memory in store.control_memory)
    nbytes += sum(store.indexes[key].block.nbytes for key in tuple(store.indexes))  # another thread may add one
    on_disk = store.folder is not None and not _is_memory(os.stat(store.folder).st_dev)
    return {"bytes_ram": 0 if on_disk else nbytes, "bytes_disk": nbytes if on_disk else 0}


def _is_memory(device: int) -> bool:
    """Whether files of this device lie in memory."""
    place = shared_memory()
    return place.parent.name == "dev" and os.stat(place).st_dev == device
