"""submit_update_if_present: updates in the background, in their order, and seen by what is sampled afterwards."""

import threading
from concurrent.futures import Future

import pytest
import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter, TensorDictReplayBuffer, TensorDictRoundRobinWriter
from tests import fresh


def filled(**kwargs):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), writer=RoundRobinWriter(track_generations=True), batch_size=20, **kwargs
    )
    rows = rb.extend({"step": torch.arange(8), "state": torch.zeros(8, dtype=torch.int64)})
    return rb, {"index": rows, "generation": rb.writer.generations_of(rows)}


@pytest.fixture
def held(monkeypatch):
    """Hold the first update back: returns the events that it has begun, and that it may go on."""
    begun, free = threading.Event(), threading.Event()
    real = ReplayBuffer.update_if_present

    def slow(self, **named):
        begun.set()
        assert free.wait(60)
        return real(self, **named)

    monkeypatch.setattr(ReplayBuffer, "update_if_present", slow)
    yield begun, free
    free.set()


def test_the_result_is_that_of_the_call():
    rb, named = filled()
    rb.add({"step": torch.tensor(9), "state": torch.tensor(0)})
    stale = named["generation"].clone()
    stale[3] -= 1
    future = rb.submit_update_if_present(index=named["index"], generation=stale, patch={"state": torch.arange(8) + 1})
    assert isinstance(future, Future)
    result = future.result(60)
    assert result.updated.tolist() == [True] * 3 + [False] + [True] * 4
    assert rb["state"].tolist() == [1, 2, 3, 0, 5, 6, 7, 8, 0]
    assert result.generation.tolist() == [
        -1 if row == 3 else int(rb.writer.generations_of(torch.tensor([row]))) for row in range(8)
    ]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_is_sampled_afterwards_waits_and_sees_it(held, prefetch):
    begun, free = held
    rb, named = filled(prefetch=prefetch)
    future = rb.submit_update_if_present(**named, patch={"state": torch.full((8,), 7)})
    assert begun.wait(60)
    found = []
    thread = threading.Thread(target=lambda: found.append(rb.sample()["state"]))
    thread.start()
    assert not future.done()
    assert not found
    free.set()
    thread.join(60)
    assert future.result(60).updated_count == 8
    assert found[0].tolist() == [7] * 20
    rb.close()


def test_batches_that_are_ahead_have_the_rows_as_they_were():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=20,
        prefetch=2,
        transform=lambda td: td,
    )
    rows = rb.extend(TensorDict({"state": torch.zeros(8)}, [8]))
    rb.sample()  # two are ahead
    rb.submit_update_if_present(
        index=rows, generation=rb.writer.generations_of(rows), patch={"state": torch.ones(8)}
    ).result(60)
    seen = [rb.sample()["state"].unique().tolist() for _ in range(4)]
    assert seen == [[0.0], [0.0], [1.0], [1.0]]
    rb.close()


def test_they_are_made_in_their_order():
    rb, named = filled()
    generation = named["generation"]
    for value in range(1, 30):
        future = rb.submit_update_if_present(
            index=named["index"], generation=generation, patch={"state": torch.full((8,), value)}
        )
        generation = future.result(60).generation
    assert rb["state"].tolist() == [29] * 8
    several = [
        rb.submit_update_if_present(
            index=named["index"],
            generation=generation,
            patch={"step": torch.full((8,), value)},
            version_key="state",
            version=30 + value,
        )
        for value in range(5)
    ]
    assert [future.result(60).updated_count for future in several] == [
        8,
        8,
        8,
        8,
        8,
    ]  # a patch leaves the generation as it is


def test_what_one_raises_its_future_has_and_the_next_sample_raises_it_once():
    rb, named = filled()
    future = rb.submit_update_if_present(**named, patch={"stat": torch.ones(8)})
    with pytest.raises(KeyError, match="stat"):
        future.result(60)
    with pytest.raises(KeyError, match="stat"):
        rb.sample()
    assert len(rb.sample()["state"]) == 20
    wrong = rb.submit_update_if_present(**named, patch={"state": torch.ones(3)})
    assert isinstance(wrong.exception(60), ValueError)
    good = rb.submit_update_if_present(**named, patch={"state": torch.ones(8, dtype=torch.int64)})
    assert good.result(60).updated_count == 8


def test_in_a_forked_child_the_thread_is_its_own():
    said = fresh.run(
        """
        import os, threading
        import torch
        from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter

        rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=RoundRobinWriter(track_generations=True), batch_size=20)
        rows = rb.extend({"state": torch.zeros(8)})
        named = {"index": rows, "generation": rb.writer.generations_of(rows)}
        named["generation"] = rb.submit_update_if_present(**named, patch={"state": torch.ones(8)}).result().generation
        child = os.fork()
        if child == 0:
            try:
                assert rb.submit_update_if_present(**named, patch={"state": torch.full((8,), 2.0)}).result().updated_count == 8
                assert rb.sample()["state"].tolist() == [2.0] * 20
                os._exit(0)
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), rb.sample()["state"].unique().tolist())
        """
    )
    assert said == "0 [1.0]"


def test_one_that_is_not_over_when_the_buffer_is_closed(held):
    begun, free = held
    rb, named = filled()
    future = rb.submit_update_if_present(**named, patch={"state": torch.ones(8, dtype=torch.int64)})
    assert begun.wait(60)
    rb.close()
    free.set()
    with pytest.raises(RuntimeError, match="closed"):
        future.result(60)
