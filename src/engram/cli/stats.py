"""``engram stats``: the numbers of a store, once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engram.buffer.prioritized import ReplayBuffer
from engram.store.readonly import ReaderStore

if TYPE_CHECKING:
    from pathlib import Path


#: Of the last seconds, which say nothing of a store that no process uses.
_RATES = ("add_per_s", "sample_per_s")


def stats(directory: Path, form: str) -> str:
    """``rb.stats()`` of the store in a directory, which is only read.

    Args:
        directory: of the store.
        form: ``"text"``, ``"json"`` or ``"prometheus"``.

    Raises what opening the store raises. ``ModuleNotFoundError``: prometheus-client is missing.
    """
    with ReplayBuffer.open(directory, readonly=True) as rb:
        if form == "prometheus":
            return _exposed(rb, directory.resolve().name)
        found, store = rb.stats(), rb.storage.memory
        unused = _RATES if isinstance(store, ReaderStore) and not store.in_use else ()
    if form == "json":
        rates = dict.fromkeys(unused)
        return json.dumps({"store": str(directory), **found, **rates, "problems": []}, indent=2)
    width = max(map(len, found))
    lines = [
        f"{name:<{width}}  {'none: no process has the store open' if name in unused else f'{value:,.6g}'}"
        for name, value in found.items()
    ]
    if not found["usage_counted"]:
        lines.append(f"{'never_sampled_frac':<{width}}  not counted: rb.count_usage() begins")
    return "\n".join(lines)


def _exposed(rb: ReplayBuffer, name: str) -> str:
    """As a server shows them to Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest

    from engram.metrics import Collector

    registry = CollectorRegistry()
    registry.register(Collector({name: rb}))
    return generate_latest(registry).decode().rstrip("\n")
