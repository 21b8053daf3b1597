"""Rows of fleets that are removed: all that are named or none, where their stores are."""

import contextlib
import operator

import pytest
import torch

from engram import PrioritizedSampler, RandomSampler, ReplayBuffer, RowError, SamplerWithoutReplacement
from tests.fleet.test_fleets import made, rows_of, seeded
from tests.remote.test_removal import old_server
from tests.serving.servers import serving

SHIFT = 48
SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priority": lambda: PrioritizedSampler(alpha=1.0, beta=1.0),
}


@contextlib.contextmanager
def stores(tmp_path, sampler=RandomSampler):
    """Stores of 20 and 30 rows that are open here, and a server of each."""
    folders = [tmp_path / "one", tmp_path / "other"]
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(made(folder, rows_of(n, first), sampler()))
            for folder, first, n in zip(folders, (0, 20), (20, 30), strict=True)
        ]
        servers = [stack.enter_context(serving(folder)) for folder in folders]
        yield opened, servers


def held(opened):
    return [rb[:]["a"].tolist() if len(rb) else [] for rb in opened]


def named(*rows):
    return torch.tensor([store << SHIFT | row for store, row in rows])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rows_of_several_stores_go(tmp_path, sampler):
    with stores(tmp_path, SAMPLERS[sampler]) as (opened, servers):
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses, generator=seeded(), batch_size=30) as rb:
            rb.sample()
            gone = named((0, 3), (1, 4), (1, 4), (1, 29))
            assert rb.remove(torch.cat([gone, torch.tensor([-1])])) == 3
            assert rb.remove(gone) == 0
            assert len(rb) == 47
            seen = {i for _ in range(20) for i in rb.sample()["a"].tolist()}
            assert not seen & {3, 24, 49}
        assert held(opened) == [[i for i in range(20) if i != 3], [i for i in range(20, 49) if i != 24]]


def test_rows_of_a_batch_go_unless_they_were_written_since(tmp_path):
    with stores(tmp_path, SAMPLERS["priority"]) as (opened, servers):
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses, generator=seeded(), batch_size=40) as rb:
            _, info = rb.sample(return_info=True)
            rows, generation = info["index"], info["index_generation"]
            assert set((rows >> SHIFT).tolist()) == {0, 1}
            opened[0][:] = opened[0][:]  # an edit leaves the generations as they are
            opened[0].writer.write_at(torch.arange(20), opened[0][:].exclude("index"))  # and a write does not
            gone = rows[rows >> SHIFT == 1].unique()
            assert rb.remove(rows, generation=generation) == len(gone)
        assert [len(one) for one in opened] == [20, 30 - len(gone)]


def test_a_store_without_rows_leaves_the_others_alone(tmp_path):
    """All rows of one go; what is drawn comes from the other."""
    with stores(tmp_path) as (opened, servers):
        with ReplayBuffer.connect([server.address for server in servers], generator=seeded()) as rb:
            rb.sample()
            assert rb.remove(named(*((0, row) for row in range(20)))) == 20
            assert all((rb.sample()["a"] >= 20).all() for _ in range(5))
        assert [len(one) for one in opened] == [0, 30]


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ([(0, 1), (0, 200)], RowError, "remove: expected rows that batches have"),
        ([(1, 0), (2, 0)], RowError, "2 stores of"),
        ([(0, -2)], RowError, "got -2"),
    ],
)
def test_bad_rows_remove_nothing(tmp_path, rows, error, text):
    with stores(tmp_path) as (opened, servers):
        with ReplayBuffer.connect([server.address for server in servers]) as rb, pytest.raises(error, match=text):
            rb.remove(named(*rows))
        assert [len(one) for one in opened] == [20, 30]


def test_a_store_whose_server_is_of_an_older_engram_keeps_the_rows_of_all(tmp_path):
    with (
        made(tmp_path / "one", rows_of(20), RandomSampler()) as one,
        serving(tmp_path / "one") as new,
        old_server(tmp_path / "old", lambda folder: made(folder, rows_of(40), RandomSampler())) as old,
    ):
        with ReplayBuffer.connect([new.address, old]) as rb:
            with pytest.raises(RuntimeError, match="older engram"):
                rb.remove(named((0, 1), (1, 1)))
            assert len(rb) == len(one) + 40 == 60
            assert rb.remove(named((0, 1))) == 1
        assert len(one) == 19


@pytest.mark.filterwarnings("ignore:the store .* is gone")
@pytest.mark.parametrize("missing", ["skip", "wait"])
def test_rows_of_a_store_that_is_gone_remove_nothing(tmp_path, missing):
    with stores(tmp_path) as (opened, servers):
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses, missing=missing, patience=0.2) as rb:
            servers[1].kill()
            for _ in range(2):  # it is found to be gone, and is known to be
                with pytest.raises(ConnectionError) as raised:
                    rb.remove(named((0, 1), (1, 1)))
                notes = getattr(raised.value, "__notes__", [])
                assert "Nothing is removed." in " ".join([str(raised.value), *notes])
            assert rb.remove(named((0, 1), (0, 2))) == 2
        assert [len(one) for one in opened] == [18, 30]


def test_a_store_that_dies_between_the_look_and_the_removal_says_what_went(tmp_path, monkeypatch):
    with stores(tmp_path) as (opened, servers):
        with ReplayBuffer.connect([server.address for server in servers], missing="wait", patience=0.2) as rb:
            storages = [shard.storage for shard in rb.storage.members.shards]
            remove = type(storages[0]).remove

            def dying(storage, rows, expected):
                if storage is storages[1]:
                    servers[1].kill()
                return remove(storage, rows, expected)

            monkeypatch.setattr(type(storages[0]), "remove", dying)
            with pytest.raises(ConnectionError) as raised:
                rb.remove(named((0, 1), (0, 2), (1, 1)))
            assert raised.value.__notes__ == ["remove: 2 rows of other stores are removed."]
        assert [len(one) for one in opened] == [18, 30]


@pytest.mark.parametrize("several", [False, True])
def test_what_needs_rows_here_is_refused_by_its_name(tmp_path, several):
    with stores(tmp_path) as (opened, servers):
        before = held(opened)
        addresses = [server.address for server in servers]
        with ReplayBuffer.connect(addresses if several else addresses[0], batch_size=2) as rb:
            rows = rb.sample()
            refused = {
                "read_all_in_order": rb.read_all_in_order,
                "read_all_in_order ": lambda: rb.read_all_in_order(2, lane=0),
                r"empty\(lane=\)": lambda: rb.empty(lane=0),
                "write_all": lambda: rb.write_all(rows),
                r"rb\[index\]": lambda: rb[:],
                r"rb\[index\] = value": lambda: operator.setitem(rb, slice(3), rows),
                r"rb\[index\] = value ": lambda: operator.setitem(rb, "a", torch.zeros(3)),
            }
            for call, use in refused.items():
                with pytest.raises(
                    RuntimeError, match=f"^{call.strip()}: the rows are on a server, and this needs them here"
                ):
                    use()
        assert held(opened) == before
