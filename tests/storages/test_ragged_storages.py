"""Ragged rows in tensor storages, from ``extend`` to ``sample``."""

import contextlib
import itertools
import logging
import multiprocessing
import threading

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    Ragged,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.errors import NoSampleable, RowError
from tests.storages import ragged_rows
from tests.storages.ragged_rows import nested, plain
from tests.storages.ragged_rows import text_of as TEXT  # noqa: N812 - of constants
from tests.storages.rows import reopened
from tests.waiting import ended, until

# ---- in and out ----------------------------------------------------------------------------------------------------------


def test_rows_come_out_as_they_went_in(make):
    rb = ReplayBuffer(storage=make(20, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    assert rb.extend(ragged_rows.rows(0, 5)).tolist() == [0, 1, 2, 3, 4]
    assert rb.add(ragged_rows.row(5)) == 5
    assert rb.extend([ragged_rows.row(6), ragged_rows.row(7)]).tolist() == [6, 7]
    for again in (False, True):
        rb = reopened(rb) if again else rb
        assert ragged_rows.check(rb[:]) == list(range(8))
        assert ragged_rows.check(rb[torch.tensor([3, 3, 1])]) == [3, 3, 1]
        assert ragged_rows.check(rb[2:7:2]) == [2, 4, 6]
        assert set(ragged_rows.check(rb.sample(200))) == set(range(8))
        one = rb[5]
        assert {key: value if isinstance(value, str) else value.tolist() for key, value in one.items()} == {
            "number": 5,
            "tokens": [5] * ragged_rows.length_of(5),
            "log_prob": [-5.0] * ragged_rows.length_of(5),
            "text": TEXT(5),
        }
        assert rb["text"] == [TEXT(number) for number in range(8)]
        assert rb["number"].tolist() == list(range(8))
        assert rb.storage[1:3]["text"] == [TEXT(1), TEXT(2)]
        assert len(rb.storage) == 8
        data, info = rb.sample(4, return_info=True)
        assert ragged_rows.check(data) == info["index"].tolist()
        assert [data["text"] for data in (rb.storage.get(0), rb.storage[0])] == [TEXT(0)] * 2


def test_tensordicts(make):
    fields = {("a", "tokens"): Ragged(torch.int64, max_length=9), "meta": Ragged("json", max_length=50)}
    rb = TensorDictReplayBuffer(storage=make(20, ragged=fields))
    meta = [{"b": 1, "a": [None]}, "x", 3]
    batch = TensorDict({"a": TensorDict({"tokens": nested([1], [], [2, 3])}, [3]), "r": torch.arange(3.0)}, [3])
    batch["meta"] = NonTensorStack(*meta)
    rb.extend(batch)
    rb.add(TensorDict({"a": {"tokens": torch.tensor([9, 9])}, "r": torch.tensor(3.0), "meta": "y"}, []))
    found = rb[:]
    assert found.batch_size == (4,)
    assert [row.tolist() for row in found["a", "tokens"].unbind()] == [[1], [], [2, 3], [9, 9]]
    assert list(found["meta"]) == [*meta, "y"]
    drawn = rb.sample(50)
    assert drawn.batch_size == (50,)
    for row in range(50):
        number = int(drawn["r"][row])
        assert drawn["index"][row] == number
        assert drawn["a", "tokens"][row].tolist() == [[1], [], [2, 3], [9, 9]][number]
        assert drawn["meta"][row] == [*meta, "y"][number]
    assert rb[0]["meta"] == {"b": 1, "a": [None]}
    assert rb[2]["a", "tokens"].tolist() == [2, 3]


def test_layouts(make):
    rb = ReplayBuffer(storage=make(20, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY, layout="packed"))
    rb.extend(ragged_rows.rows(0, 6))
    lengths = [ragged_rows.length_of(number) for number in range(6)]
    packed = rb[:]["tokens"]
    assert packed.values.tolist() == [number for number in range(6) for _ in range(lengths[number])]
    assert (packed.cu_seqlens.tolist(), packed.max_seqlen) == ([0, *np.cumsum(lengths)], max(lengths))
    assert packed.cu_seqlens.dtype is torch.int32
    assert rb.extend({**rb[:], "number": torch.arange(6)}).tolist() == [*range(6, 12)]  # what came out goes in

    rb.storage.layout = {"kind": "padded", "side": "left", "multiple": 8}
    padded = rb[:]["log_prob"]
    assert padded.values.shape == padded.mask.shape == (12, 16)
    assert padded.mask.sum(1).tolist() == lengths * 2
    assert padded.values.sum(1).tolist() == [-float(number * lengths[number]) for number in range(6)] * 2

    rb.storage.layout = "list"
    assert [len(row) for row in rb[:]["tokens"]] == lengths * 2
    rb.storage.layout = "jagged"
    assert ragged_rows.check(rb[:]) == [*range(6)] * 2
    assert rb.storage.layout == {"kind": "jagged", "side": "right", "multiple": 1}


@pytest.mark.parametrize("layout", ["packed", "padded", "list"])
def test_layouts_in_tensordicts(layout):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, layout=layout))
    rb.extend(TensorDict({"a": {"tokens": nested([1], [2, 3])}, "text": NonTensorStack("x", "yz")}, [2]))
    batch = rb[torch.tensor([1, 0, 1])]
    tokens = batch["a", "tokens"]
    assert list(batch["text"]) == ["yz", "x", "yz"]
    assert batch["index"].tolist() == [1, 0, 1]
    if layout == "packed":  # items of all rows: there is no dimension of rows
        assert batch.batch_size == ()
        assert (tokens["values"].tolist(), tokens["cu_seqlens"].tolist()) == ([2, 3, 1, 2, 3], [0, 2, 3, 5])
        assert tokens["max_seqlen"] == 2
    elif layout == "padded":
        assert batch.batch_size == (3,)
        assert tokens["values"].tolist() == [[2, 3], [1, 0], [2, 3]]
        assert tokens["mask"].tolist() == [[True, True], [True, False], [True, True]]
    else:
        assert [row.tolist() for row in tokens] == [[2, 3], [1], [2, 3]]


def test_fields_of_a_group_get_one_shape(make):
    rb = ReplayBuffer(storage=make(20, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 6))
    batch = rb.sample(10)
    ratio = batch["tokens"] * batch["log_prob"]
    assert [row.tolist() for row in ratio.unbind()] == [
        [-float(number * number)] * ragged_rows.length_of(number) for number in batch["number"].tolist()
    ]


@pytest.mark.parametrize("tensordicts", [False, True], ids=["dicts", "TensorDicts"])
def test_none_stands_for_items_that_come_later(make, tensordicts):
    fields = {"tokens": Ragged(torch.int32, max_length=9), "log_prob": Ragged(torch.float32, like="tokens")}
    rb = ReplayBuffer(storage=make(20, ragged=fields))

    def rows(*lengths, alone=False, late=True):
        tokens = [torch.full((length,), length, dtype=torch.int32) for length in lengths]
        given = {"tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged)}
        given["log_prob"] = (
            None if late else torch.nested.as_nested_tensor([it / 2 for it in tokens], layout=torch.jagged)
        )
        if alone:
            given = {"tokens": tokens[0], "log_prob": None if late else tokens[0] / 2}
        return TensorDict(given, [] if alone else [len(lengths)]) if tensordicts else given

    rb.extend(rows(3, 0, 9))  # also of the first write
    rb.extend(rows(2, 1, late=False))
    rb.add(rows(5, alone=True))
    rb.extend([rows(7, alone=True), rows(4, alone=True, late=False)])
    there = [row.tolist() for row in rb[:]["log_prob"].unbind()]
    assert there == [[0.0] * 3, [], [0.0] * 9, [1.0] * 2, [0.5], [0.0] * 5, [0.0] * 7, [2.0] * 4]


@pytest.mark.parametrize("written", [False, True], ids=["first", "later"])
def test_a_follower_that_is_forgotten_is_asked_for(make, written):
    storage = make(20, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY)
    rb = ReplayBuffer(storage=storage)
    if written:
        rb.extend(ragged_rows.rows(0, 2))
    rows = {key: value for key, value in ragged_rows.rows(2, 2).items() if key != "log_prob"}
    row = {key: value for key, value in ragged_rows.row(4).items() if key != "log_prob"}
    for write, data in ((rb.extend, rows), (rb.add, row), (rb.extend, [row, row])):
        with pytest.raises(KeyError, match="'log_prob'.*None"):
            write(data)
    assert len(rb) == 2 * written
    assert storage.initialized == written


def test_followers_may_come_first():
    fields = {"b": Ragged(torch.float32, like="a"), "a": Ragged(torch.int8, max_length=4, shape=(2,))}
    rb = ReplayBuffer(storage=LazyTensorStorage(4, ragged=fields))
    rb.extend(
        {"b": [torch.ones(1), torch.ones(2)], "a": [torch.ones(1, 2).to(torch.int8), torch.zeros(2, 2).to(torch.int8)]}
    )
    assert list(rb[:]) == ["b", "a"]
    assert plain(rb[:]) == {"b": [[1.0], [1.0, 1.0]], "a": [[[1, 1]], [[0, 0], [0, 0]]]}


# ---- what nobody declared --------------------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def lines():
    handler, log = _Lines(), logging.getLogger("engram")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(level)


FOUND = {
    "jagged": {"x": nested([1, 2], [3])},
    "arrays": {"x": [np.array([1, 2]), np.array([3])]},
    "strings": {"x": ["ab", "é"]},
    "a stack": {"x": NonTensorStack("ab", "é")},
    "bytes": {"x": [b"ab", b"\xff"]},
    "in a TensorDict": TensorDict({"x": NonTensorStack("ab", "é")}, [2]),
    "jagged in a TensorDict": TensorDict({"x": nested([1, 2], [3])}, [2]),
    "rows": [{"x": np.array([1, 2])}, {"x": np.array([3])}],
    "rows with strings": [{"x": "ab"}, {"x": "é"}],
    "TensorDicts": [TensorDict({"x": torch.tensor([1, 2])}), TensorDict({"x": torch.tensor([3])})],
    "a lazy stack": lazy_stack([TensorDict({"x": torch.tensor([1, 2])}), TensorDict({"x": torch.tensor([3])})]),
    "a tensor alone": nested([1, 2], [3]),
    "strings alone": ["ab", "é"],
}


@pytest.mark.parametrize("data", FOUND.values(), ids=FOUND)
def test_what_the_first_rows_say(make, lines, data):
    rb = ReplayBuffer(storage=make(6))
    for _ in range(4):
        rb.extend(data)
    for again in (False, True):
        rb = reopened(rb) if again else rb
        found = rb[:]
        there = found if isinstance(found, list | torch.Tensor) else found["x"]
        rows = [row.tolist() for row in there.unbind()] if isinstance(there, torch.Tensor) else list(there)
        assert rows[:2] in ([[1, 2], [3]], ["ab", "é"], [b"ab", b"\xff"])
        assert rows == rows[:2] * 3
    assert "[≤ 64]" in lines[0]
    assert sum("rows in" in line for line in lines) == 1


def test_one_row_with_a_text():
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.add({"x": "ab", "y": b"c", "z": torch.ones(2)})
    assert rb[0]["x"] == "ab"
    assert rb[:]["y"] == [b"c"]
    assert rb[:]["z"].shape == (1, 2)  # one row does not say that it is ragged


def test_jagged_rows_are_padded_to_the_longest_of_them():
    rb = ReplayBuffer(storage=LazyTensorStorage(9, ragged={"tokens": Ragged(torch.int32, max_length=9)}), batch_size=2)
    rb.extend({"tokens": [[], [1, 2], [3]]})
    assert rb[:]["tokens"].to_padded_tensor(0).tolist() == [[0, 0], [1, 2], [3, 0]]
    assert rb[:1]["tokens"].to_padded_tensor(0).tolist() == [[]]


def test_jagged_tensors_with_the_same_offsets_share_lengths():
    offsets = torch.tensor([0, 1, 3])
    jagged = torch.nested.nested_tensor_from_jagged
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend({"a": jagged(torch.arange(3), offsets), "b": jagged(torch.arange(3.0), offsets), "c": nested([1], [2])})
    assert [len(group.members) for group in rb.storage.store.schema.ragged_groups] == [2, 1]
    assert plain(rb[:]) == {"a": [[0], [1, 2]], "b": [[0.0], [1.0, 2.0]], "c": [[1], [2]]}


def test_the_default_storage_keeps_rows_with_strings_in_a_list():
    rb = ReplayBuffer(10)
    rb.extend([{"x": "ab", "y": torch.zeros(2)}, {"x": "c", "y": torch.zeros(3)}])
    assert type(rb.storage).__name__ == "ListStorage"


# ---- rings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged_bytes", [ragged_rows.ROOMY, 1_000], ids=["rows go first", "items go first"])
def test_a_ring_that_wraps_many_times(make, ragged_bytes):
    rb = ReplayBuffer(storage=make(16, ragged=ragged_rows.fields(), ragged_bytes=ragged_bytes), batch_size=16)
    written = 0
    for turn in range(60):
        n = 1 + turn % 7
        if turn % 3:
            rb.extend(ragged_rows.rows(written, n))
        else:
            for number in range(written, written + n):
                rb.add(ragged_rows.row(number))
        written += n
        there = sorted(ragged_rows.check(rb[:]))
        assert there == list(range(written - len(there), written))  # the newest, and none is missing
        assert set(ragged_rows.check(rb.sample())) <= set(there)
    assert len(rb) == 16 or ragged_bytes == 1_000
    assert (rb.stats()["evicted_rows"] > 0) == (ragged_bytes == 1_000)
    assert written > 10 * 16


@pytest.mark.parametrize("layout", ["ring", "slots"])
def test_calls_of_many_bytes(make, layout):
    """Such calls write past the caches, from 4 MB on: rows of a page and more, and their ends, which lie anywhere."""
    fields = {"a": Ragged(torch.uint8, max_length=20_000, shape=(3,)), "b": Ragged(torch.float64, like="a")}
    room = {"ragged_bytes": 16e6} if layout == "ring" else {}
    rb = ReplayBuffer(storage=make(120, ragged=fields, ragged_layout=layout, **room), batch_size=64)
    dice, written = np.random.default_rng(7), []
    for turn in range(6):
        lengths = dice.integers(0, 20_000, 60)
        lengths[:4] = 0, 1, 20_000, 5
        a = dice.integers(0, 256, (lengths.sum(), 3), dtype=np.uint8)
        b, ends = dice.random(lengths.sum()), [0, *lengths.cumsum()]
        assert a.nbytes + b.nbytes > 4 << 20
        rb.extend({"number": np.arange(60) + 60 * turn, "a": (a, np.array(ends)), "b": (b, np.array(ends))})
        written += [(a[i:j].tobytes(), b[i:j].tobytes()) for i, j in itertools.pairwise(ends)]
        for batch in (rb[:], rb.sample()):
            rows = zip(batch["number"].tolist(), batch["a"].unbind(), batch["b"].unbind(), strict=True)
            found = {number: (one.numpy().tobytes(), other.numpy().tobytes()) for number, one, other in rows}
            assert found == {number: written[number] for number in found}
            assert max(found) < len(written)
        assert len(written) - 1 in rb[:]["number"].tolist()


def test_a_batch_that_is_longer_than_the_ring(make):
    rb = ReplayBuffer(storage=make(4, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 11))
    assert sorted(ragged_rows.check(rb[:])) == [7, 8, 9, 10]


def test_lanes(make):
    rb = ReplayBuffer(
        storage=make(12, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY, lanes=3), batch_size=16
    )
    for turn in range(20):
        rb.extend(ragged_rows.rows(turn * 10, 2), lane=turn % 3)
        rb.extend(ragged_rows.rows(turn * 10 + 2, 6), lane=torch.tensor([0, 1, 2, 2, 1, 0]))
        rb.add(ragged_rows.row(turn * 10 + 8), lane=1)
        ragged_rows.check(rb.sample())
    by_lane = [[], [], []]
    for turn in range(20):
        by_lane[turn % 3] += [turn * 10, turn * 10 + 1]
        for number, lane in enumerate([0, 1, 2, 2, 1, 0]):
            by_lane[lane].append(turn * 10 + 2 + number)
        by_lane[1].append(turn * 10 + 8)
    for again in (False, True):
        rb = reopened(rb) if again else rb
        found = ragged_rows.check(rb[:])
        assert [sorted(found[4 * lane : 4 * lane + 4]) for lane in range(3)] == [sorted(it[-4:]) for it in by_lane]


def test_empty_and_removed_rows(make):
    rb = ReplayBuffer(storage=make(12, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 8))
    rb.remove(torch.tensor([1, 3]))
    assert set(ragged_rows.check(rb.sample(100))) == {0, 2, 4, 5, 6, 7}
    rb.empty()
    assert len(rb) == 0
    rb.extend(ragged_rows.rows(50, 5))
    assert ragged_rows.check(rb[:]) == [50, 51, 52, 53, 54]


# ---- samplers ------------------------------------------------------------------------------------------------------------


def test_priorities(make):
    rb = ReplayBuffer(
        storage=make(12, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY),
        sampler=PrioritizedSampler(12, 1.0, 1.0),
    )
    rb.extend(ragged_rows.rows(0, 8))
    rb.update_priority(torch.arange(8), torch.tensor([0.0, 0, 0, 3, 0, 1, 0, 0]) + 1e-9)
    data, info = rb.sample(50, return_info=True)
    assert ragged_rows.check(data) == info["index"].tolist()
    assert set(info["index"].tolist()) == {3, 5}


def test_epochs(make):
    rb = ReplayBuffer(
        storage=make(12, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
    )
    rb.extend(ragged_rows.rows(0, 8))
    assert sorted(ragged_rows.check(rb.sample()) + ragged_rows.check(rb.sample())) == list(range(8))


def test_flat_windows(make):
    sampler = SliceSampler(slice_len=3, traj_key="episode")
    rb = ReplayBuffer(
        storage=make(30, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY), sampler=sampler, batch_size=6
    )
    rb.extend({**ragged_rows.rows(0, 20), "episode": torch.arange(20) // 10})
    for _ in range(5):
        first = ragged_rows.check(rb.sample())
        assert [number - first[0] for number in first[:3]] == [0, 1, 2]


@pytest.mark.parametrize("ragged_bytes", [ragged_rows.ROOMY, 400], ids=["rows go first", "items go first"])
def test_rows_that_move_while_they_are_read(make, ragged_bytes):
    """Writers lap the ring while others sample and read by number: no row is torn, whatever comes first."""
    rb = ReplayBuffer(storage=make(8, ragged=ragged_rows.fields(), ragged_bytes=ragged_bytes), batch_size=8)
    weighed = ReplayBuffer(storage=rb.storage, sampler=PrioritizedSampler(8, 0.5, 0.5), batch_size=8)
    for first in (0, 4):
        rb.extend(ragged_rows.rows(first, 4))
    failed, stop = [], threading.Event()

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the test raises it
                failed.append(error)
                stop.set()

        return threading.Thread(target=run)

    def write():
        for turn in range(200):
            if stop.is_set():
                break
            rb.extend(ragged_rows.rows(8 + 3 * turn, 3))
        stop.set()

    def read():
        evicted = () if ragged_bytes == ragged_rows.ROOMY else (RowError, NoSampleable)
        while not stop.is_set():
            for drawn in (rb.sample, weighed.sample, lambda: rb[:]):
                with contextlib.suppress(*evicted):  # where items go first, a write may evict all rows that are there
                    ragged_rows.check(drawn())

    threads = [guarded(write), guarded(read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    newest = sorted(ragged_rows.check(rb[:]))
    assert newest == list(range(608 - len(newest), 608))
    assert len(newest) == 8 or ragged_bytes == 400


# ---- processes -----------------------------------------------------------------------------------------------------------


def _write(folder, first, n):
    rb = ReplayBuffer.open(folder)
    for number in range(first, first + n, 4):
        rb.extend(ragged_rows.rows(number, 4))
    rb.close()


def test_two_processes_write_and_a_third_one_samples(tmp_path):
    storage = LazyMemmapStorage(
        40, scratch_dir=tmp_path / "d", ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY
    )
    rb = ReplayBuffer(storage=storage, batch_size=8)
    rb.extend(ragged_rows.rows(0, 4))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path / "d", first, 200)) for first in (1_000, 2_000)]
    for writer in writers:
        writer.start()
    until(lambda: ragged_rows.check(rb.sample()) and not any(writer.is_alive() for writer in writers))
    assert [ended(writer) for writer in writers] == [0, 0]
    newest = ragged_rows.check(rb[:])
    assert len(newest) == 40
    for first in (1_000, 2_000):
        own = [number for number in newest if first <= number < first + 200]
        assert sorted(own) == list(range(first + 200 - len(own), first + 200))
    rb.close()


def test_shared_in_memory():
    rb = ReplayBuffer(storage=LazyTensorStorage(16, ragged=ragged_rows.fields(), ragged_bytes=ragged_rows.ROOMY))
    rb.extend(ragged_rows.rows(0, 3))
    rb.share()
    process = multiprocessing.get_context("fork").Process(target=lambda: rb.extend(ragged_rows.rows(3, 3)))
    process.start()
    assert ended(process) == 0
    assert ragged_rows.check(rb[:]) == list(range(6))
    rb.close()
