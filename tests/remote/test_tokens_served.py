"""Batches by tokens over connections and fleets: cut as where the store is, and what does not fit is not used up."""

import contextlib
import json
import random
from collections import Counter

import pytest
import torch
from pyarrow import flight

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    NoSampleable,
    PrioritizedSampler,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SamplesPerInsert,
    SliceSampler,
)
from tests.buffer.test_ragged_batches import greedy
from tests.remote.test_calls import served_here
from tests.serving.servers import serving_each, start
from tests.serving.test_exactly_once import Proxy

ROWS, LONGEST = 40, 30
LENGTHS = [random.Random(5 * number).randrange(1, LONGEST + 1) for number in range(ROWS)]
FIELDS = {"tokens": Ragged(torch.int32, max_length=LONGEST), "text": Ragged("utf-8", max_length=100)}


def made(folder, sampler=None, lengths=LENGTHS, first=0):
    storage = LazyMemmapStorage(100, scratch_dir=folder, ragged=FIELDS, ragged_bytes=1e5)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.extend(
        {
            "number": torch.arange(first, first + len(lengths)),
            "tokens": [torch.full((n,), first + i, dtype=torch.int32) for i, n in enumerate(lengths)],
            "text": ["x" * (i % 9) for i in range(len(lengths))],
        }
    )
    return rb


def check(batch, most, first=0, lengths=LENGTHS):
    """The rows of a batch that has packed items, which are theirs, and no more than so many."""
    numbers = batch["number"].tolist()
    ends = batch["tokens"].cu_seqlens.tolist()
    assert ends[-1] <= most
    for at, number in enumerate(numbers):
        assert batch["tokens"].values[ends[at] : ends[at + 1]].tolist() == [number] * lengths[(number - first) % 100]
    return numbers


@contextlib.contextmanager
def connected(folder, sampler=None, **more):
    with (
        made(folder, sampler) as rb,
        served_here(rb, folder) as address,
        ReplayBuffer.connect(address, **more) as remote,
    ):
        remote.storage.layout = "packed"
        yield rb, remote


@pytest.mark.parametrize(
    ("form", "cost", "more"),
    [
        ({"max_tokens": 70}, LENGTHS, {}),
        ({"max_tokens": {"tokens": 70}}, LENGTHS, {}),
        ({"max_tokens": {"text": 30}}, [i % 9 for i in range(ROWS)], {}),
        ({"max_tokens": 70, "batch_size": 3}, LENGTHS, {"most_rows": 3}),
        ({"max_tokens": 64, "layout": {"kind": "padded", "multiple": 16}}, LENGTHS, {"multiple": 16}),
    ],
)
@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_epochs_are_cut_where_the_budget_ends(form, cost, more, tmp_path):
    with connected(tmp_path / "store", SamplerWithoutReplacement(shuffle=False)) as (_, remote):
        most = form["max_tokens"] if isinstance(form["max_tokens"], int) else next(iter(form["max_tokens"].values()))
        for _ in range(2):
            found = []
            while not found or not remote.sampler.ran_out:
                found.append(remote.sample(**form)["number"].tolist())
            assert found == greedy(range(ROWS), most, cost, **more)


def test_rows_that_do_not_fit_are_not_used_up(tmp_path):
    with connected(tmp_path / "store", ConsumingSampler()) as (rb, remote):
        found = []
        while len(rb):
            found += check(remote.sample(max_tokens=60), 60)
        assert sorted(found) == [*range(ROWS)]
        with pytest.raises(NoSampleable):
            remote.sample(max_tokens=60)


@pytest.mark.filterwarnings("ignore:sample. batch_size")
def test_draws_follow_from_the_generator(tmp_path):
    with made(tmp_path / "store") as rb, served_here(rb, tmp_path / "store") as address:
        drawn = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(3)
            with ReplayBuffer.connect(address, generator=generator) as remote:
                remote.storage.layout = "packed"
                drawn.append([check(remote.sample(60, max_tokens=5000), 5000) for _ in range(3)])
        assert drawn[0] == drawn[1]
        assert rb.stats()["sample_count"] == 2 * 3 * 60


def test_what_a_server_cannot_do_is_refused_as_here(tmp_path):
    for name, sampler, error in (
        ("uniform", RandomSampler(), None),
        ("slices", SliceSampler(slice_len=2, end_key="number"), "a sampler that draws rows"),
    ):
        with connected(tmp_path / name, sampler) as (rb, remote):
            for buffer in (rb, remote):
                if error:
                    with pytest.raises(ValueError, match=error):
                        buffer.sample(max_tokens=60)
                    continue
                with pytest.raises(ValueError, match=r"max_tokens: expected the tokens of row \d+"):
                    [buffer.sample(max_tokens=2) for _ in range(100)]
                with pytest.raises(KeyError, match="expected one of the ragged fields"):
                    buffer.sample(max_tokens={"number": 4})
            if error is None:
                rb.limit(SamplesPerInsert(4.0, min_size=1))
                for buffer in (rb, remote):
                    with pytest.raises(ValueError, match="a store without limits"):
                        buffer.sample(max_tokens=60)


def test_batches_under_way_stay(tmp_path):
    with connected(tmp_path / "store", SamplerWithoutReplacement(), prefetch=2) as (_, remote):
        first = remote.sample()["number"].tolist()
        with pytest.raises(ValueError, match="expected a buffer without prefetch"):
            remote.sample(max_tokens=60)
        rest = [n for _ in range(ROWS // 4 - 1) for n in remote.sample()["number"].tolist()]
        assert sorted(first + rest) == [*range(ROWS)]


@pytest.mark.parametrize("killed", ["before", "after"])
def test_rows_are_used_once_where_a_server_dies_amid_a_draw(killed, tmp_path):
    folder = tmp_path / "store"
    with made(folder, ConsumingSampler()) as rb, contextlib.ExitStack() as ends:
        server = [start(folder, f"unix:{folder}.sock")]
        ends.callback(lambda: [it.kill() for it in server])
        proxy = ends.enter_context(Dying.before(folder))

        def kill():
            server[0].kill()
            server[0] = start(folder, f"unix:{folder}.sock")

        proxy.kill = kill
        remote = ends.enter_context(ReplayBuffer.connect(proxy.address))
        remote.storage.layout = "packed"
        found = check(remote.sample(max_tokens=60), 60)
        left = len(rb)
        assert left == ROWS - len(found)
        proxy.when = killed
        found += check(remote.sample(max_tokens=60), 60)
        while len(rb):
            found += check(remote.sample(max_tokens=60), 60)
        assert max(Counter(found).values()) == 1
        lost = {*range(ROWS)} - {*found}  # those of the batch that was drawn, and whose server died before it was here
        assert bool(lost) == (killed == "after")
        assert sum(LENGTHS[n] for n in lost) <= 60


class Dying(Proxy):
    """A proxy before a server that is killed once, before or after it has done the next message."""

    when = kill = None

    def do_exchange(self, _, descriptor, reader, writer):
        with flight.connect(self.server) as client:
            there, back = client.do_exchange(descriptor)
            begun = False
            with contextlib.suppress(StopIteration), contextlib.closing(there):
                while True:
                    chunk = reader.read_chunk()
                    when, self.when = self.when, None
                    if when == "before":
                        self.kill()
                        raise flight.FlightUnavailableError("away")
                    there.write_metadata(chunk.app_metadata)
                    answer = back.read_chunk()
                    if when == "after":
                        self.kill()
                        raise flight.FlightUnavailableError("away")
                    if answer.data is None:
                        writer.write_metadata(answer.app_metadata)
                        continue
                    if not begun:
                        writer.begin(answer.data.schema)
                        begun = True
                    writer.write_with_metadata(answer.data, answer.app_metadata)


# ---- fleets ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fleet_of(tmp_path, sampler, lengths, **more):
    folders = [tmp_path / str(k) for k in range(len(lengths))]
    with contextlib.ExitStack() as opened:
        buffers = [made(folder, sampler(), lengths[k], 100 * k) for k, folder in enumerate(folders)]
        opened.enter_context(serving_each(folders))
        [opened.enter_context(rb) for rb in buffers]
        fleet = opened.enter_context(ReplayBuffer.connect([f"unix:{folder}.sock" for folder in folders], **more))
        fleet.storage.layout = "packed"
        yield buffers, fleet


def whose(batch, lengths, most):
    """The rows of a batch of a fleet, all of one store."""
    numbers = batch["number"].tolist()
    store = numbers[0] // 100
    assert {number // 100 for number in numbers} == {store}
    return check(batch, most, 100 * store, lengths[store])


SHORT, LONG = [2] * 40, [20] * 40


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, ConsumingSampler])
def test_a_fleet_uses_each_row_once(sampler, tmp_path):
    lengths = [SHORT[:30], LENGTHS, LONG[:10]]
    with fleet_of(tmp_path, sampler, lengths) as (_, fleet):
        found = []
        with contextlib.suppress(NoSampleable):
            while not fleet.sampler.ran_out:
                found += whose(fleet.sample(max_tokens=64), lengths, 64)
        assert sorted(found) == [100 * k + i for k, each in enumerate(lengths) for i in range(len(each))]


def test_rows_of_all_stores_come_equally_often_whatever_their_lengths(tmp_path):
    lengths, generator = [SHORT, LONG], torch.Generator().manual_seed(0)
    with fleet_of(tmp_path, RandomSampler, lengths, generator=generator) as (_, fleet):
        batches = [whose(fleet.sample(max_tokens=60), lengths, 60) for _ in range(600)]
    rows = Counter(numbers[0] // 100 for numbers in batches for _ in numbers)
    # A batch has 30 rows of the one store, or 3 of the other: ten times as many batches come of that.
    assert abs(rows[0] / (rows[0] + rows[1]) - 0.5) < 0.12
    assert len({number for numbers in batches for number in numbers}) > 75


def test_a_fleet_weighs_rows_over_all_stores(tmp_path):
    lengths = [SHORT, LONG]
    with fleet_of(tmp_path, lambda: PrioritizedSampler(100, 1.0, 1.0, eps=0.0), lengths) as (buffers, fleet):
        for k, rb in enumerate(buffers):
            rb.update_priority(torch.arange(40), torch.arange(1.0, 41.0) * (1 + k))
        for _ in range(20):
            batch, info = fleet.sample(max_tokens=60, return_info=True)
            priorities = (batch["number"] % 100 + 1.0) * (1 + batch["number"] // 100)
            assert torch.allclose(info["priority_weight"].double(), 1.0 / priorities.double(), rtol=1e-4)


# ---- clients that break the rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": -1},
        {"max_tokens": 1 << 63},
        {"max_tokens": 5, "keys": [1, 2]},
        {"max_tokens": 5, "keys": []},
        {"max_tokens": 5, "tokens_of": ["number"]},
        {"max_tokens": 5, "tokens_of": "tokens"},
        {"max_tokens": 5, "multiple": -2},
        {"max_tokens": 1 << 61, "rows": -5},
    ],
)
def test_commands_that_are_none_are_refused(more, tmp_path):
    with made(tmp_path / "store", ConsumingSampler()) as rb, served_here(rb, tmp_path / "store") as address:
        with flight.connect(address.replace("unix:", "grpc+unix://")) as client:
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"learn"))
            with writer:
                writer.write_metadata(json.dumps({"do": "sample", "rows": 0, "keys": [1], **more}).encode())
                said = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        assert "error" in said, said
        assert "Traceback" not in said["message"]
        assert len(rb) == ROWS
