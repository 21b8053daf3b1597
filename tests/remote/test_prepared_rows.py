"""Single rows on their way to a server: the core takes them as they are handed over, and they arrive as the long way sends them."""

import contextlib
import random
import threading

import numpy as np
import pytest
import torch

from engram import LazyMemmapStorage, ReplayBuffer
from engram.remote.protocol import address_of
from engram.serving.server import Server
from engram.serving.service import Service

GOOD = {"obs": torch.zeros(4), "action": 1, "reward": 0.5, "next": {"done": False}}
OTHERS = {
    "obs": [
        torch.arange(4.0),
        np.arange(4, dtype=np.float32),
        [1, 2.5, 3, 4],
        np.arange(8, dtype=np.float32)[::2],
        torch.zeros(3),
        None,
    ],
    "action": [7, np.int64(3), torch.tensor(2), 1.5, 2**70, "no"],
    "reward": [1, np.float64(0.25), True, 1e300, 2**60 + 2**36 + 1],
    "next": [{"done": True}, {"done": np.bool_(True)}, {"done": 1}, {}],
}


@contextlib.contextmanager
def connected(here, place):
    """A buffer whose rows are those of ``here``, which this process serves meanwhile."""
    server = Server(Service(here), address_of(f"unix:{place}", "test"))
    try:
        with ReplayBuffer.connect(f"unix:{place}", batch_size=2, full="block") as there:
            yield there
    finally:
        threading.Thread(target=server.shutdown, daemon=True).start()


def outcome(call):
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - that both raise the same is what is tested
        return type(error), str(error)


@pytest.mark.parametrize("lanes", [1, 2])
def test_rows_arrive_as_by_the_long_way(tmp_path, lanes):
    draw, arrived = random.Random(lanes), []
    rows = []
    for _ in range(60):
        row = dict(GOOD)
        for name in draw.sample(sorted(OTHERS), draw.randrange(3)):
            row[name] = draw.choice(OTHERS[name])
        rows.append((row, draw.randrange(lanes)))
    said = []
    for way in ("short", "long"):
        here = ReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=str(tmp_path / way), lanes=lanes), batch_size=2)
        here.add(GOOD, lane=0)
        with connected(here, tmp_path / f"{way}.sock") as there:
            if way == "long":
                vars(there.storage.structure)["intake"] = None
            said.append([outcome(lambda row=row, lane=lane: there.add(row, lane=lane)) for row, lane in rows])
            assert len(there) == len(here)
        live = torch.cat(
            [torch.arange(int(n)) + lane * (200 // lanes) for lane, n in enumerate(here.storage.extent().filled)]
        )
        found = here[live]
        arrived.append(
            {key: leaf.numpy().tobytes() for key, leaf in [*found.items(), *found["next"].items()] if key != "next"}
        )
    assert said[0] == said[1]
    assert None in said[0]
    assert any(isinstance(it, tuple) for it in said[0])
    assert arrived[0] == arrived[1]


def test_the_short_way_is_taken(tmp_path, monkeypatch):
    here = ReplayBuffer(storage=LazyMemmapStorage(200, scratch_dir=str(tmp_path / "store")), batch_size=2)
    here.add(GOOD)
    with connected(here, tmp_path / "sock") as there:
        there.add(GOOD)  # the first row of a connection says what the buffer is
        observation = torch.ones(4)
        with monkeypatch.context() as patch:
            patch.setattr(there.storage, "prepare", None)
            assert there.add({**GOOD, "obs": observation}) is None
        observation.fill_(3)  # it was copied
        assert len(there) == 3
    assert here[2]["obs"].tolist() == [1, 1, 1, 1]
