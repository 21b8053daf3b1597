"""Ensembles that prefetch: what is dropped, saved or loaded loses no row of an epoch, and no row comes twice."""

import threading

import pytest
import torch

from engram import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SamplerWithoutReplacement
from engram.buffer.prefetch import Prefetcher

ROWS, BATCH = 100, 10
#: Batches that give all rows of two members.
BATCHES = 2 * ROWS // BATCH
GUARD_S = 120


@pytest.fixture(params=["caller", "threads"], autouse=True)
def who(request, monkeypatch):
    """Who makes batches, from the second on."""
    monkeypatch.setattr(Prefetcher, "slow_s", 0.0 if request.param == "threads" else 1e9)
    monkeypatch.setattr(Prefetcher, "slow_in_a_row", 1)
    return request.param


class Heard(SamplerWithoutReplacement):
    """Says when it is loaded."""

    def __init__(self, heard):
        super().__init__()
        self.heard = heard

    def _go_on(self, *progress):
        self.heard()
        super()._go_on(*progress)


def made(n=ROWS, sampler=SamplerWithoutReplacement):
    some = [ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler()) for _ in range(2)]
    for number, one in enumerate(some):
        if n:
            one.extend(torch.arange(n) + 1000 * number)
    generator = torch.Generator().manual_seed(0)
    return ReplayBufferEnsemble(*some, sample_from_all=True, batch_size=BATCH, prefetch=4, generator=generator)


def drawn(rb, n):
    return [rb.sample() for _ in range(n)]


def check_whole(batches):
    rows = torch.cat([batch.flatten() for batch in batches])
    assert rows.sort().values.tolist() == [1000 * number + i for number in range(2) for i in range(ROWS)]


@pytest.mark.parametrize("how", ["state", "folder"])
def test_nothing_is_ahead_while_members_are_loaded(tmp_path, how):
    ahead = []
    source = made(sampler=lambda: Heard(lambda: None))
    other = made(sampler=lambda: Heard(lambda: ahead.append(len(other._prefetching))))
    seen = drawn(source, 3)
    drawn(other, 2)
    assert len(other._prefetching) > 0
    ahead.clear()
    if how == "state":
        other.load_state_dict(source.state_dict())
    else:
        source.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    assert ahead
    assert not any(ahead)
    check_whole(seen + drawn(other, BATCHES - 3))
    source.close()
    other.close()


def test_a_dump_has_batches_that_were_under_way_once(tmp_path, who):
    rb, other = made(), made(0)
    seen = drawn(rb, 2)
    rb.synchronize()
    read, may = rb._prefetching._reading._drawn, threading.Event()
    settle = rb._prefetching.materialize

    def reads(*arguments):
        assert may.wait(GUARD_S)
        return read(*arguments)

    def materialize(*arguments):
        may.set()
        settle(*arguments)

    if who == "caller":
        may.set()
    rb._prefetching._reading._drawn = reads
    seen += drawn(rb, 1)  # asks for one that is not read yet
    rb._prefetching.materialize = materialize
    rb.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_whole(seen + drawn(other, BATCHES - 3))
    check_whole(seen + drawn(rb, BATCHES - 3))
    rb.close()
    other.close()


def test_rows_of_batches_that_a_dump_drops_come_again(tmp_path):
    rb, other = made(), made(0)
    seen = drawn(rb, 3)
    rb.synchronize()
    rb.dumps(tmp_path / "saved", prefetch="drop")
    other.loads(tmp_path / "saved")
    check_whole(seen + drawn(other, BATCHES - 3))
    check_whole(seen + drawn(rb, BATCHES - 3))
    rb.close()
    other.close()


def test_rows_of_batches_that_a_transform_drops_come_again():
    rb, plain = made(), made()
    seen = drawn(rb, 3)
    rb.synchronize()
    rb.append_transform(lambda batch: batch + 0)
    rest = drawn(rb, BATCHES - 3)
    check_whole(seen + rest)
    assert torch.equal(torch.cat(seen + rest), torch.cat(drawn(plain, BATCHES)))
    rb.close()
    plain.close()


def test_the_dropped_come_again_of_members_that_are_not_shared():
    rb = made()
    rb[1].share()
    seen = drawn(rb, 3)
    rb.synchronize()
    rb.append_transform(lambda batch: batch + 0)
    rows = torch.cat(seen + drawn(rb, BATCHES - 3), 1)[0]
    assert rows.sort().values.tolist() == list(range(ROWS))
    rb.close()
