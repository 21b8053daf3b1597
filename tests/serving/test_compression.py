"""Rows that are compressed on their way."""

import contextlib
import json
import socket
import threading

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer, serve
from engram.remote import connection


def rows(n, seed):
    """Of low entropy, as frames are, beside numbers that no codec makes smaller, an empty field and flags."""
    dice = torch.Generator().manual_seed(seed)
    frames = torch.zeros(n, 32, 32, dtype=torch.uint8)
    frames[:, :4] = torch.randint(256, (n, 4, 1), generator=dice, dtype=torch.uint8)
    return {
        "frame": frames,
        "noise": torch.rand(n, 5, generator=dice, dtype=torch.float64),
        "flag": torch.rand(n, generator=dice) < 0.5,
        "number": torch.arange(seed, seed + n),
        "none": torch.zeros(n, 0),
    }


@pytest.fixture
def server():
    storage = LazyTensorStorage(500)
    rb = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(500, 0.7, 0.5), batch_size=32).share()
    rb.extend(rows(3, 1000))
    with rb, serve(rb) as address:
        yield address


def test_rows_come_as_they_were_sent(server):
    with ReplayBuffer.connect(server, compression="zstd") as one, ReplayBuffer.connect(server) as other:
        sent = rows(200, 0)
        places = one.extend(sent)
        assert places.tolist() == [*range(3, 203)]
        other.extend(rows(20, 300))
        expected = {int(k): i for i, k in enumerate(sent["number"])}
        for rb in (one, other):
            seen = 0
            for _ in range(10):
                batch, info = rb.sample(return_info=True)
                rb.update_priority(info["index"], torch.rand(32))
                for i, k in enumerate(batch["number"].tolist()):
                    if k < 200:
                        seen += 1
                        assert all(torch.equal(batch[name][i], sent[name][expected[k]]) for name in sent)
            assert seen > 100
        assert len(one) == 223


class Relay:
    """A Unix socket in front of a server's: counts the bytes that go there and come back."""

    def __init__(self, path, target):
        self.sent = self.came = 0
        self.address = f"unix:{path}"
        self._target = target.removeprefix("unix:")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            here, _ = self._listening.accept()
            there = socket.socket(socket.AF_UNIX)
            there.connect(self._target)
            for of, to, name in ((here, there, "sent"), (there, here, "came")):
                threading.Thread(target=self._copy, args=(of, to, name), daemon=True).start()

    def _copy(self, of, to, name):
        with contextlib.suppress(OSError):
            while data := of.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                to.sendall(data)


def test_it_is_compressed_in_both_directions(server, tmp_path):
    frames = {**rows(100, 0), "noise": torch.zeros(100, 5, dtype=torch.float64)}
    sent, came = [], []
    for k, how in enumerate((None, "zstd")):
        relay = Relay(tmp_path / f"{k}.sock", server)
        with ReplayBuffer.connect(relay.address, compression=how, batch_size=100) as rb:
            rb.extend(frames)
            rb.sample()
        sent.append(relay.sent), came.append(relay.came)
    assert sent[0] > 100 * 1024
    assert came[0] > 100 * 1024
    assert sent[1] < sent[0] / 3
    assert came[1] < came[0] / 3


def test_writes_that_are_not_waited_for(server):
    with ReplayBuffer.connect(server, compression="zstd", full="block") as rb:
        for k in range(50):
            rb.add({name: value[0] for name, value in rows(1, 400 + k).items()})
        assert len(rb) == 53


def test_another_codec_is_refused(server):
    with pytest.raises(ValueError, match=r"compression: expected None or 'zstd', got 'gzip'"):
        ReplayBuffer.connect(server, compression="gzip")


def test_an_older_server_is_named(server, monkeypatch):
    answer = connection._answer

    def older(*arguments):
        return json.dumps({k: v for k, v in json.loads(answer(*arguments)).items() if k != "compressions"}).encode()

    monkeypatch.setattr(connection, "_answer", older)
    with pytest.raises(ConnectionError, match="Connect without compression="):
        ReplayBuffer.connect(server, compression="zstd", patience=0)


def test_tensordicts(tmp_path):
    with TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8).share() as rb:
        rb.extend(TensorDict(rows(3, 0), [3]))
        with serve(rb) as server, TensorDictReplayBuffer.connect(server, compression="zstd") as there:
            there.extend(TensorDict(rows(5, 3), [5]))
            assert sorted({*rb["number"].tolist()}) == [*range(8)]
            assert {*there.sample()["number"].tolist()} <= {*range(8)}
