"""Make ``torchrl.tar.xz`` anew, the dumps and the state that tests read where there is no TorchRL: ``python -m tests.torchrl.make_golden``.

TorchRL 0.14.1 wrote what is committed. Pickles in it are TorchRL's, too; nothing opens them.
"""

import tempfile
import warnings
from pathlib import Path

import torch
from tensordict import NonTensorData, TensorDict

from tests.golden.archive import pack

ARCHIVE = Path(__file__).parent / "torchrl.tar.xz"

TENSORS = [torch.arange(6.0).view(2, 3) + i for i in range(3)]
#: One of each kind, in the order of rows; the list is full, and the oldest is in row 2.
ITEMS = [
    TensorDict({"a.b": torch.arange(3, dtype=torch.uint8), "c/d": torch.ones(2, 1, dtype=torch.float64)}),
    TensorDict({"text": "some", "flag": torch.tensor([True, False]), "note": NonTensorData({"x": 1})}),
    torch.arange(4, dtype=torch.int16),
    {"a": torch.tensor([1.5, float("inf")], dtype=torch.float16), "n": {"b": torch.zeros(0, 2), "c": 3}, "s": "x"},
    [torch.ones(2, dtype=torch.int8), torch.zeros(2, dtype=torch.int8)],
    7,
]


def rows(first, n):
    """Steps of one trajectory."""
    number = torch.arange(first, first + n)
    done = (number % 4 == 3)[:, None]
    after = TensorDict({"obs": number[:, None] + 1.0, "done": done}, [n])
    return TensorDict({"obs": number[:, None] + 0.0, "number": number, "next": after}, [n])


def ensemble(rl, path, *, empty=True):
    """A ring that is full, a list, and perhaps a buffer that holds nothing between them."""
    from torchrl.data.replay_buffers import samplers

    ring = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(5), sampler=samplers.SamplerWithoutReplacement())
    nothing = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(4), sampler=samplers.SliceSampler(slice_len=2, end_key=("next", "done"))
    )
    items = rl.ReplayBuffer(storage=rl.CompressedListStorage(4), collate_fn=list)
    members = (ring, nothing, items) if empty else (ring, items)
    rb = rl.ReplayBufferEnsemble(*members, batch_size=6, generator=torch.Generator().manual_seed(3), collate_fn=list)
    ring.extend(rows(0, 4))
    ring.extend(rows(4, 3))
    for item in TENSORS:
        items.add(item)
    rb.dumps(path)


def ensemble_state(rl):
    """Of a ring that is full, a buffer that holds nothing, a list, and a full list of streams whose oldest is in row 1."""
    ring, nothing = (rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(size)) for size in (5, 4))
    items = rl.ReplayBuffer(storage=rl.ListStorage(4), collate_fn=list)
    streams = rl.ReplayBuffer(storage=rl.CompressedListStorage(2), collate_fn=list)
    generator = torch.Generator().manual_seed(3)
    rb = rl.ReplayBufferEnsemble(ring, nothing, items, streams, batch_size=8, generator=generator, collate_fn=list)
    ring.extend(rows(0, 7))
    inner = TensorDict({"b": torch.ones(1) * 2, "x.y": torch.zeros(2)})
    for item in (*TENSORS, TensorDict({"a": torch.arange(4), "next": inner, "text": "number 2", "c.d": torch.ones(1)})):
        items.add(item)
    for item in TENSORS:
        streams.add(item)
    return rb.state_dict()


def main():
    import torchrl.data as rl

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for name, items, size in (
            ("tensors", TENSORS, 10),
            ("items", [*ITEMS[:2], *ITEMS[2:], *ITEMS[:2]], len(ITEMS)),
        ):
            rb = rl.ReplayBuffer(storage=rl.CompressedListStorage(size), batch_size=2, collate_fn=list)
            for item in items:
                rb.add(item)
            rb.dumps(folder / name)
        ensemble(rl, folder / "ensemble")
        (folder / "states").mkdir()
        torch.save(ensemble_state(rl), folder / "states" / "ensemble.pt")
        ARCHIVE.write_bytes(pack(folder))
    print(f"==> {ARCHIVE.name}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
