"""Rows that grow: they are put together in slots of the store, outlive their process, and are sealed once."""

import os
import signal

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    MaxInFlight,
    Ragged,
    RateLimited,
    ReplayBuffer,
)
from engram.errors import CorruptStore, ReadOnlyStore
from tests import stress

FIELDS = {
    "tokens": Ragged(torch.int32, max_length=40),
    "log_prob": Ragged(torch.float32, like="tokens"),
    "text": Ragged("utf-8", max_length=20),
}
LATE = {"reward": 0.0}


def made(folder=None, *, open_rows=3, capacity=10, sampler=None):
    how = {"ragged": FIELDS, "open_rows": open_rows}
    storage = (
        LazyTensorStorage(capacity, **how) if folder is None else LazyMemmapStorage(capacity, scratch_dir=folder, **how)
    )
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=2)


@pytest.fixture(params=["private", "folder"])
def rb(request, tmp_path):
    with made(tmp_path / "store" if request.param == "folder" else None) as buffer:
        yield buffer


def killed(work):
    """Runs work in a child that dies by SIGKILL at its end."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_row_grows_and_is_sealed(rb):
    row = rb.open_row(prompt=7, late=LATE)
    row.append(tokens=torch.tensor([1, 2], dtype=torch.int32), log_prob=[0.5, 0.25])
    row.append({"tokens": [3]}, text="hé")
    row.append(text="llo")
    assert row.lengths == {"tokens": 3, "text": 6}
    assert len(rb) == 0
    with pytest.raises(RuntimeError, match="Cannot sample"):
        rb.sample()
    index = row.seal(reward=1.5, tokens=[4])
    read = rb[index]
    assert read["tokens"].tolist() == [1, 2, 3, 4]
    assert read["log_prob"].tolist() == [0.5, 0.25, 0.0, 0.0]
    assert (read["text"], int(read["prompt"]), float(read["reward"])) == ("héllo", 7, 1.5)
    assert len(rb) == 1
    assert rb.unsealed() == []
    rb.add({"prompt": 8, "reward": 0.0, "tokens": [5], "log_prob": [1.0], "text": ""})
    assert rb[1]["tokens"].tolist() == [5]


def test_rows_are_listed_and_given_up(rb):
    first, second = rb.open_row(prompt=1, late=LATE), rb.open_row(prompt=2, reward=3.0)
    first.append(tokens=[1])
    found = rb.unsealed()
    assert [int(row.fields["prompt"]) for row in found] == [1, 2]
    assert [row.lengths["tokens"] for row in found] == [1, 0]
    assert not any(row.is_abandoned for row in found)
    assert sorted(second.fields) == ["prompt", "reward"]
    second.discard()
    assert len(rb.unsealed()) == 1
    again = rb.open_row(prompt=4)  # in the slot that the other one had
    assert sorted(again.fields) == ["prompt"]
    assert again.lengths == {"tokens": 0, "text": 0}
    with pytest.raises(RuntimeError, match="sealed or discarded"):
        second.append(tokens=[1])


@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ({"tokens": list(range(41))}, RuntimeError, "at most max_length=40 items, got 41"),
        ({"tokens": list(range(39))}, RuntimeError, "got 2 and 39 more"),
        ({"tokens": [1], "log_prob": [0.0, 1.0]}, RuntimeError, "as many items in fields of one length"),
        ({"log_prob": [0.0]}, RuntimeError, "'log_prob': expected it beside 'tokens', whose lengths it has"),
        ({"tokens": torch.zeros(2)}, RuntimeError, "expected int32 items, got float32"),
        ({"prompt": 3}, KeyError, "expected ragged fields"),
        ({"other": 3}, KeyError, "'other'"),
        ({"text": 3}, TypeError, "expected strings"),
    ],
)
def test_what_does_not_fit_changes_nothing(rb, given, error, what):
    row = rb.open_row(prompt=1, late=LATE)
    row.append(tokens=[1, 2], text="a")
    before = row.fields
    with pytest.raises(error, match=what):
        row.append(given)
    with pytest.raises(KeyError, match=r"got none for 'reward'|'other'") if error is KeyError else pytest.raises(error):
        row.seal({key: value for key, value in given.items() if key != "prompt"})
    after = row.fields
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert row.lengths == {"tokens": 2, "text": 1}
    assert len(rb) == 0
    row.seal(reward=0.0)
    with pytest.raises(RuntimeError, match="sealed or discarded"):
        row.seal(reward=0.0)
    assert len(rb) == 1


def test_there_is_a_slot_for_each_open_row(rb):
    rows = [rb.open_row(prompt=i, late=LATE) for i in range(3)]
    with pytest.raises(RateLimited, match="3 rows are open"):
        rb.open_row(timeout=0)
    rows[1].discard()
    assert int(rb.open_row(prompt=9).fields["prompt"]) == 9


def test_without_slots_or_ragged_fields(tmp_path):
    with pytest.raises(RuntimeError, match="open_rows="):
        made(open_rows=0).open_row(prompt=1, late=LATE)
    with pytest.raises(RuntimeError, match="open_rows="):
        ReplayBuffer(storage=LazyTensorStorage(3)).open_row(prompt=1)
    with pytest.raises(ValueError, match="open_rows: expected at least 0"):
        LazyTensorStorage(3, open_rows=-1)
    with made(tmp_path / "store") as rb:
        row = rb.open_row(prompt=1, late=LATE)
        row.append(tokens=[1])
    with ReplayBuffer.open(tmp_path / "store") as rb:  # which needs no arguments
        assert len(rb.unsealed()) == 1
        rb.open_row(prompt=1).discard()


def test_whoever_opens_the_folder_may_open_rows_first(tmp_path):
    with made(tmp_path / "store") as rb:
        rb.add({"tokens": [1], "text": "a", "prompt": 1, "reward": 0.0, "log_prob": None})
        with ReplayBuffer.open(tmp_path / "store") as other:
            other.open_row(prompt=2).append(tokens=[5, 6])
        assert [row.lengths["tokens"] for row in rb.unsealed()] == [2]


def test_a_field_that_the_first_row_did_not_name(tmp_path):
    with made(tmp_path / "store") as rb:
        row = rb.open_row(prompt=1)
        with pytest.raises(KeyError, match=r"seal: expected fields of .*, got 'reward'\. .*late="):
            row.seal(reward=1.0)
        assert len(rb.unsealed()) == 1  # it grows on
        assert len(rb) == 0


def test_json_is_written_whole():
    fields = {"said": Ragged("json", max_length=100)}
    rb = ReplayBuffer(storage=LazyTensorStorage(4, ragged=fields, open_rows=1))
    row = rb.open_row(x=1)
    with pytest.raises(KeyError, match="got none for 'said'"):
        row.seal()
    row.append(said={"a": [1, None]})
    with pytest.raises(ValueError, match="no JSON behind"):
        row.append(said=3)
    assert rb[row.seal()]["said"] == {"a": [1, None]}


def test_a_seal_waits_for_the_limits_of_the_store():
    rb = made(sampler=ConsumingSampler(max_sample_count=1))
    rb.limit(MaxInFlight(1))
    rb.open_row(prompt=1, late=LATE).seal(reward=0.0)
    row = rb.open_row(prompt=2, tokens=[1])
    with pytest.raises(RateLimited, match="not admitted in time"):
        row.seal(reward=0.0, tokens=[2], timeout=0.01)
    assert row.lengths == {"tokens": 1, "text": 0}  # to be given again
    assert row.is_abandoned is False
    assert len(rb.unsealed()) == 1


def test_the_row_of_a_process_that_died_is_resumed(tmp_path):
    with made(tmp_path / "store") as rb:
        rb.add({"prompt": 0, "reward": 0.0, "tokens": [0], "log_prob": [0.0], "text": ""})

        def generate():
            row = rb.open_row(prompt=3)
            row.append(tokens=[1, 2], text="ab")

        killed(generate)
        mine = rb.open_row(prompt=4)
        found = {int(row.fields["prompt"]): row for row in rb.unsealed()}
        assert found[3].is_abandoned
        assert not found[4].is_abandoned
        row = found[3].resume()
        with pytest.raises(RuntimeError, match="that a process still has"):
            next(it for it in rb.unsealed() if int(it.fields["prompt"]) == 3 and _as_another(it)).resume()
        row.append(tokens=[3])
        index = row.seal(reward=2.0)
        assert rb[index]["tokens"].tolist() == [1, 2, 3]
        mine.discard()
        assert rb.unsealed() == []


def _as_another(row):
    """The row, as a process sees it that does not own it."""
    row._slot.owner ^= 1 << 32
    return row


def test_processes_that_are_killed_lose_and_double_nothing(tmp_path):
    """Each row is either in the buffer, once and whole, or grows on with all that was appended."""
    with made(tmp_path / "store", open_rows=8, capacity=10_000) as rb:
        rb.add({"prompt": -1, "reward": 0.0, "tokens": [0], "log_prob": [0.0], "text": ""})
        rounds = stress.size(12, 2_000)
        for number in range(rounds):

            def generate(number=number):
                row = rb.open_row(prompt=number)
                row.append(tokens=[number] * (number % 5 + 1))
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (number * 7 % 40 + 1))
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                row.seal(reward=float(number))

            killed(generate)
            there = [row for row in range(len(rb)) if int(rb[row]["prompt"]) == number]
            left = [row for row in rb.unsealed() if int(row.fields["prompt"]) == number]
            assert len(there) + len(left) == 1
            tokens = rb[there[0]]["tokens"] if there else left[0].fields["tokens"]
            assert tokens.tolist() == [number] * (number % 5 + 1)
            if left:
                left[0].resume().seal(reward=float(number))
        assert len(rb) == rounds + 1


def test_the_next_to_open_the_folder_finds_each_row_once(tmp_path):
    """As above, where the process that is killed is the only one that has the store open."""
    with made(tmp_path / "store", open_rows=8, capacity=1_000) as rb:
        rb.add({"prompt": -1, "reward": 0.0, "tokens": [0], "log_prob": [0.0], "text": ""})
    rounds = stress.size(8, 500)
    for number in range(rounds):

        def generate(number=number):
            row = ReplayBuffer.open(tmp_path / "store").open_row(prompt=number)
            row.append(tokens=[number] * (number % 5 + 1))
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (number * 7 % 40 + 1))
            row.seal(reward=float(number))

        killed(generate)
        with ReplayBuffer.open(tmp_path / "store") as rb:
            left = [row for row in rb.unsealed() if int(row.fields["prompt"]) == number]
            there = [row for row in range(len(rb)) if int(rb[row]["prompt"]) == number]
            assert len(there) + len(left) == 1
            tokens = rb[there[0]]["tokens"] if there else left[0].fields["tokens"]
            assert tokens.tolist() == [number] * (number % 5 + 1)
            if left:
                left[0].resume().seal(reward=float(number))
            assert (len(rb), rb.unsealed()) == (number + 2, [])


def test_a_row_that_was_moved_is_sealed_where_it_is_now():
    rb = made()
    rb.add({"prompt": 0, "reward": 0.0, "tokens": [0], "log_prob": [0.0], "text": ""})
    row = rb.open_row(prompt=1, tokens=[1])
    with rb.share():
        for change in (lambda: row.append(tokens=[2]), lambda: row.seal(reward=1.0), row.discard):
            with pytest.raises(RuntimeError, match=r"share\(\) has moved"):
                change()
        rb.unsealed()[0].seal(reward=1.0)
        assert rb[:]["prompt"].tolist() == [0, 1]


def test_the_lane_of_a_row_is_said_when_it_is_opened():
    rb = ReplayBuffer(storage=LazyTensorStorage(8, lanes=2, ragged=FIELDS, open_rows=1))
    with pytest.raises(RuntimeError, match=r"open_row: expected the lane of a row.*open_row\(\.\.\., lane=k\)"):
        rb.open_row(prompt=1, late=LATE)
    assert rb.open_row(prompt=1, late=LATE, lane=1).seal(reward=0.0) == 4
    assert rb.on_lane(0).open_row(prompt=1).seal(reward=0.0) == 0


def test_no_field_is_added_where_slots_have_no_room_for_it(rb):
    rb.open_row(prompt=1, late=LATE).discard()
    with pytest.raises(RuntimeError, match="slots have no room for more fields"):
        rb.add_field("value", 0.0)
    row = rb.open_row(prompt=1)
    assert len(rb.unsealed()) == 1
    assert set(rb[row.seal(reward=1.0)]) == {"prompt", "reward", "tokens", "log_prob", "text"}


@pytest.mark.parametrize("length", [-1, 41])
def test_a_length_that_no_row_has_is_refused(length):
    rb = made()
    row = rb.open_row(prompt=1, late=LATE)
    row._slot._bytes(8, 4).view(torch.int32).fill_(length)  # of the first group
    for change in (lambda: row.append(tokens=[1]), lambda: row.seal(reward=1.0), lambda: row.lengths):
        with pytest.raises(CorruptStore, match="expected at most"):
            change()
    assert len(rb) == 0


def test_a_store_that_is_only_read_says_so(tmp_path):
    fields = {"tokens": Ragged(torch.int32, max_length=8)}
    with ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path, ragged=fields, open_rows=1)) as rb:
        rb.extend({"tokens": [torch.ones(2, dtype=torch.int32)]})
        with ReplayBuffer.open(tmp_path, readonly=True) as reader:
            with pytest.raises(ReadOnlyStore, match="opened with readonly=True"):
                reader.open_row()
            assert reader.unsealed() == []
