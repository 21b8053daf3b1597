"""Names of TorchRL's replay classes that engram does not have, and what to use."""

from __future__ import annotations

_INSTEAD = {
    "RemoteTensorDictReplayBuffer": "RayReplayBuffer and ReplayBuffer.connect reach rows on other machines.",
    "StoreStorage": "engram serve hands a directory store to other machines.",
    "InPlaceSampler": "TorchRL has deprecated it.",
    "stack_tensors": "TorchRL has deprecated it. Batches are stacked without it.",
}


def said_of(name: str) -> str:
    """A sentence on a name of TorchRL's that is not here; empty for other names."""
    instead = _INSTEAD.get(name)
    return "" if instead is None else f". It is a name of TorchRL's that engram does not have. {instead}"
