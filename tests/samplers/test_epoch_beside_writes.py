"""An epoch is over the rows that were live when it began, whatever is written beside it."""

import multiprocessing
from collections import Counter

import pytest
import torch

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement


def _buffer(storage, rows, **arguments):
    rb = ReplayBuffer(
        storage=storage,
        sampler=SamplerWithoutReplacement(**arguments),
        batch_size=10,
        generator=torch.Generator().manual_seed(0),
    )
    if rows:
        rb.extend(torch.arange(rows))
    return rb


STORAGES = {
    "ram": lambda size, folder: LazyTensorStorage(size),
    "directory": lambda size, folder: LazyMemmapStorage(size, scratch_dir=folder / "store"),
    "list": lambda size, folder: ListStorage(size),
}


@pytest.fixture(params=STORAGES)
def storage(request, tmp_path):
    return lambda size: STORAGES[request.param](size, tmp_path)


def _epoch(rb, write, most=1000):
    """How often each value came in an epoch beside writes, and of how many batches it was."""
    seen, batches = Counter(), 0
    for batch in rb:
        seen.update(batch.tolist())
        batches += 1
        assert batches < most
        write()
    return seen, batches


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_ends_while_rows_arrive(storage, shuffle, prefetch):
    rb = ReplayBuffer(
        storage=storage(1000), sampler=SamplerWithoutReplacement(shuffle=shuffle), batch_size=10, prefetch=prefetch
    )
    rb.extend(torch.arange(55))
    count = iter(range(55, 1000))
    for live in (55, 61):  # the second epoch has what came during the first, one a batch
        seen, batches = _epoch(rb, lambda: rb.add(torch.tensor(next(count))))
        assert seen == Counter(range(live))
        assert batches == -(-live // 10)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("n", [5, 25, 60])
def test_an_epoch_ends_while_rows_are_overwritten(storage, n, drop_last):
    """Also if nothing that is left of it was there when it began."""
    rb = _buffer(storage(50), 50, drop_last=drop_last)
    begin = 50
    for _ in range(4):
        live, written = set(range(begin - 50, begin)), [begin]

        def write(written=written):
            rb.extend(torch.arange(written[0], written[0] + n))
            written[0] += n

        seen, _ = _epoch(rb, write)
        assert live.issuperset(seen)
        assert max(seen.values()) == 1
        assert not drop_last or len(list(seen)) % 10 == 0
        begin = written[0]


def test_lanes_that_grow_unevenly():
    rb = _buffer(LazyTensorStorage(90, lanes=3), 0)
    for lane, n in enumerate((5, 11, 30)):
        rb.extend(torch.arange(100 * lane, 100 * lane + n), lane=lane)
    expected = Counter(100 * lane + i for lane, n in enumerate((5, 11, 30)) for i in range(n))
    assert _epoch(rb, lambda: rb.extend(torch.arange(900, 902), lane=0))[0] == expected


def test_removed_rows_drop_out():
    rb = _buffer(LazyTensorStorage(100), 40)
    first = rb.sample().tolist()
    gone = [i for i in range(40) if i not in first][:15]
    rb.remove(torch.tensor(gone))
    rest = Counter(first)
    while not rb.sampler.ran_out:
        rest.update(rb.sample().tolist())
    assert rest == Counter(i for i in range(40) if i not in gone)


@pytest.mark.parametrize("kind", ["ram", "directory", "list"])
def test_a_saved_epoch_goes_on_without_later_rows(kind, tmp_path):
    rb = _buffer(STORAGES[kind](100, tmp_path), 40)
    seen = Counter(rb.sample().tolist())
    rb.extend(torch.arange(40, 60))
    rb.dumps(tmp_path / "dump")
    other = _buffer(STORAGES[kind](100, tmp_path / "other"), 3)
    other.loads(tmp_path / "dump")
    for one in (rb, other):
        again = Counter(seen)
        while not one.sampler.ran_out:
            again.update(one.sample().tolist())
        assert again == Counter(range(40))


@pytest.mark.parametrize("how", ["state", "dump"])
@pytest.mark.parametrize("kind", STORAGES)
def test_a_loaded_epoch_ends_where_its_rest_is_overwritten(kind, how, tmp_path):
    """Before its first draw, too."""
    rb, other = (_buffer(STORAGES[kind](40, tmp_path / name), n) for name, n in (("one", 40), ("other", 0)))
    rb.sample()
    if how == "state":
        other.load_state_dict(rb.state_dict())
    else:
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    for one in (rb, other):
        assert not one.sampler.ran_out
        one.extend(torch.arange(40, 80))
        assert one.sampler.ran_out
        assert one.sampler.state_dict()["ran_out"]


@pytest.mark.parametrize("kind", STORAGES)
def test_a_state_is_the_same_when_it_is_asked_for_again(kind, tmp_path):
    rb = _buffer(STORAGES[kind](40, tmp_path), 40, shuffle=False)
    rb.sample()
    rb.extend(torch.arange(40, 60))  # over those whose turn it was
    state = rb.sampler.state_dict()
    assert rb.sampler.state_dict() == state


def test_an_epoch_without_writes_says_what_it_said():
    rb = _buffer(LazyTensorStorage(100), 40)
    rb.sample()
    assert rb.sampler.state_dict().keys() == {"key", "rows", "visited", "ran_out"}
    rb.add(torch.tensor(1))
    assert rb.sampler.state_dict()["begun"] > 0


def _rest(rb, out):
    found = []
    while not rb.sampler.ran_out:
        found += rb.sample().tolist()
        rb.add(torch.tensor(7_000))
    out.put(found)


def test_processes_that_share_an_epoch(tmp_path):
    rb = _buffer(LazyMemmapStorage(1000, scratch_dir=tmp_path / "store"), 60)
    seen = rb.sample().tolist()
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    child = context.Process(target=_rest, args=(rb, out))
    child.start()
    seen += out.get(timeout=60)
    child.join()
    assert rb.sampler.ran_out
    assert sorted(seen) == list(range(60))


def _go_on(folder, how, ends):
    rb = ReplayBuffer.open(folder)
    written = 60
    while not ends.poll():
        if how == "remove":
            rb.remove([written % 60])
            rb.add(torch.tensor(written))
            written += 1
        else:
            rb.extend(torch.arange(written, written + 30))
            written += 30


@pytest.mark.parametrize("how", ["write", "remove"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_beside_a_process_that_changes_rows_are_full(tmp_path, how, drop_last):
    """Rows go between the choice of a batch and its read; without the mend some of these draws were empty, short, or failed."""
    rb = _buffer(LazyMemmapStorage(60, scratch_dir=tmp_path / "store"), 60, drop_last=drop_last)
    context = multiprocessing.get_context("fork")
    ends, end = context.Pipe(duplex=False)
    child = context.Process(target=_go_on, args=(tmp_path / "store", how, ends), daemon=True)
    child.start()
    written = rb.write_count
    while rb.write_count == written:
        rb.sample()
    for _ in range(3000):
        batch = rb.sample()
        assert len(batch) == 10 if drop_last else 1 <= len(batch) <= 10
        assert len(set(batch.tolist())) == len(batch)
    end.send(None)
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [11, 1 << 61])
def test_a_damaged_epoch_of_more_rows_than_the_store_has_ends(tmp_path, shuffle, ranks):
    rb = _buffer(LazyMemmapStorage(10, scratch_dir=tmp_path), 10, shuffle=shuffle)
    rb.sample()
    rb.sampler._bound[1].core.state = (5, ranks, 4, 0)
    assert rb.sampler.ran_out
    assert sorted(rb.sample().tolist()) == list(range(10))
