"""A handle is a row and the number of the write that it holds: it is good until the row is overwritten, whatever else happens to it."""

import multiprocessing

import pytest
import torch

from engram import (
    Checkpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
)

N = 12
EVERY = torch.arange(N)


def data(n=N, first=0):
    step = torch.arange(first, first + n)
    done = step % 6 == 5
    return {"step": step, "state": torch.zeros(n), "reward": step.float(), "done": done}


def made(storage, sampler=None, **more):
    rb = ReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(N, 0.6, 0.4) if sampler is None else sampler,
        writer=RoundRobinWriter(track_generations=True),
        batch_size=6,
        **more,
    )
    rb.extend(data() if not isinstance(storage, ListStorage) else [torch.tensor(float(i)) for i in range(N)])
    return rb


def shared():
    return made(LazyTensorStorage(N), shared=True)


KINDS = {
    "ram": lambda tmp: made(LazyTensorStorage(N)),
    "shared": lambda tmp: shared(),
    "directory": lambda tmp: made(LazyMemmapStorage(N, scratch_dir=tmp / "store")),
    "lanes": lambda tmp: made(LazyTensorStorage(N, lanes=1)),
}


@pytest.fixture(params=KINDS)
def rb(request, tmp_path):
    made = KINDS[request.param](tmp_path)
    yield made
    made.close()


def dropped(rb):
    return rb.stats()["priority_updates_dropped"]


EDITS = {
    "set_at_": lambda rb: rb.set_at_("state", torch.ones(N), EVERY),
    "one field": lambda rb: rb.set_("state", torch.ones(N)),
    "rows": lambda rb: rb.__setitem__(EVERY, data(first=100)),
    "update_": lambda rb: rb.update_({"state": torch.ones(N), "reward": torch.ones(N)}),
    "end_trajectory": lambda rb: (rb.set_at_("done", torch.zeros(N, dtype=torch.bool), EVERY), rb.end_trajectory()),
    "twice": lambda rb: [rb.set_at_("state", torch.full((N,), v), EVERY) for v in (1.0, 2.0)],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_leaves_it_good(rb, edit):
    handles = rb.writer.generations_of(EVERY)
    EDITS[edit](rb)
    assert rb.writer.generations_of(EVERY).equal(handles)
    rb.update_priority(EVERY, torch.arange(1.0, N + 1), generation=handles)
    assert dropped(rb) == 0
    for value in (3.0, 4.0):
        result = rb.update_if_present(index=EVERY, generation=handles, patch={"state": torch.full((N,), value)})
        assert result.updated.all()
        assert result.generation.equal(handles)
    assert (rb[:]["state"] == 4).all()
    _, info = rb.sample(return_info=True)
    assert info["index_generation"].equal(handles[info["index"]])
    assert rb.remove(EVERY[:3], generation=handles[:3]) == 3


def test_a_write_ends_it(rb):
    handles = rb.writer.generations_of(EVERY)
    rb.set_at_("state", torch.ones(N), EVERY)
    over = rb.extend(data(4, 50))
    rb.set_at_("state", torch.ones(N), EVERY)
    rb.update_priority(EVERY, torch.ones(N), generation=handles)
    assert dropped(rb) == 4
    result = rb.update_if_present(index=EVERY, generation=handles, patch={"state": torch.full((N,), 7.0)})
    assert result.updated.sum() == N - 4
    assert not result.updated[over].any()
    assert (rb[:]["state"][over] == 1).all()
    assert rb.remove(over, generation=handles[over]) == 0
    assert (rb.writer.generations_of(over) > handles.max()).all()


@pytest.mark.parametrize("into", ["new", "used", "same"])
@pytest.mark.parametrize("way", ["dump", "state", "checkpoint"])
def test_it_is_good_after_a_load(rb, tmp_path, into, way):
    handles = rb.writer.generations_of(EVERY)
    rb.set_at_("state", torch.ones(5), EVERY[:5])
    other = rb if into == "same" else made(LazyTensorStorage(N))
    if into == "used":
        other.extend(data(30))
        other.set_at_("state", torch.ones(N), EVERY)
    if into == "new":
        other.empty()
    if way == "dump":
        rb.dumps(tmp_path / "dump")
        other.loads(tmp_path / "dump")
    elif way == "state":
        other.load_state_dict(rb.state_dict())
    else:
        Checkpointer(tmp_path / "series", rb).save(1)
        Checkpointer(tmp_path / "series", other).restore()
    before = dropped(other)
    assert other.writer.generations_of(EVERY).equal(handles)
    other.update_priority(EVERY, torch.ones(N), generation=handles)
    assert dropped(other) == before
    # No write to come takes a number that a row has, and a second load says the same.
    fresh = other.extend(data(3, 70))
    later = other.writer.generations_of(EVERY)
    assert (later[fresh] > handles.max()).all()
    other.dumps(tmp_path / "again")
    third = made(LazyTensorStorage(N))
    third.loads(tmp_path / "again")
    assert third.writer.generations_of(EVERY).equal(later)
    new = third.extend(data(2, 90))
    assert (third.writer.generations_of(new) > later.max()).all()


def test_a_series_links_what_was_not_edited_and_writes_what_was(tmp_path):
    rb = made(LazyMemmapStorage(N, scratch_dir=tmp_path / "store"))
    series = Checkpointer(tmp_path / "series", rb)
    series.save(1)
    again = made(LazyTensorStorage(N))
    Checkpointer(tmp_path / "series", again).restore()
    again.set_at_("state", torch.tensor([5.0]), EVERY[2:3])
    Checkpointer(tmp_path / "series", again).save(2)
    third = made(LazyTensorStorage(N))
    Checkpointer(tmp_path / "series", third).restore()
    assert third[:]["state"].tolist() == [0, 0, 5] + [0] * (N - 3)
    assert third.writer.generations_of(EVERY).equal(rb.writer.generations_of(EVERY))


SAMPLERS = {
    "uniform": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(N, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=2, end_key="done"),
    "priority slices": lambda: PrioritizedSliceSampler(N, alpha=0.6, beta=0.4, slice_len=2, end_key="done"),
    "n-step": lambda: NStep(PrioritizedSampler(N, 0.6, 0.4), n=2, gamma=0.9, reward_key="reward", end_keys=["done"]),
}


@pytest.mark.parametrize("ahead", [None, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler_names_the_write(kind, ahead):
    rb = made(LazyTensorStorage(N), SAMPLERS[kind](), prefetch=ahead)
    handles = rb.writer.generations_of(EVERY)
    for value in (1.0, 2.0):
        rb.set_at_("state", torch.full((N,), value), EVERY)
        _, info = rb.sample(return_info=True)
        rows = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        assert info["index_generation"].equal(handles[rows])
    rb.close()


def test_records_of_sequences_name_their_writes():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(N),
        sampler=PrioritizedSampler(N, 0.6, 0.4),
        sample_unit=Sequence(length=2, burn_in=1, done_key="done"),
        writer=RoundRobinWriter(track_generations=True),
        batch_size=4,
    )
    rb.extend(data())
    handles = rb.writer.generations_of(EVERY)
    rb.set_at_("state", torch.ones(N), EVERY)
    _, info = rb.sample(return_info=True)
    assert info["index_generation"].equal(handles[info["index"]])
    assert info["anchor_generation"].equal(handles[info["anchor_index"]])


def test_items_of_lists_have_them_too(tmp_path):
    rb = made(ListStorage(N), collate_fn=lambda items: items)
    handles = rb.writer.generations_of(EVERY)
    rb[2] = torch.tensor(50.0)
    assert rb.writer.generations_of(EVERY).equal(handles)
    rb.update_priority(EVERY, torch.ones(N), generation=handles)
    rb.dumps(tmp_path / "dump")
    other = made(ListStorage(N), collate_fn=lambda items: items)
    other.extend([torch.tensor(1.0)] * 5)
    other.loads(tmp_path / "dump")
    assert other.writer.generations_of(EVERY).equal(handles)
    other.update_priority(EVERY, torch.ones(N), generation=handles)
    assert dropped(rb) == dropped(other) == 0
    new = other.extend([torch.tensor(2.0)] * 3)
    assert (other.writer.generations_of(new) > handles.max()).all()
    assert other.remove(EVERY, generation=handles) == N - 3


def _relabel(rb, going):
    going.set()
    value = 0.0
    while going.is_set():
        value += 1
        rb.set_at_("reward", torch.full((N,), value), EVERY)


def test_a_process_that_relabels_takes_nothing_from_a_learner(tmp_path):
    """No row is overwritten, so every priority and every state must arrive, and no edit of the other field be lost."""
    context = multiprocessing.get_context("fork")
    rb, going = made(LazyMemmapStorage(N, scratch_dir=tmp_path / "store")), context.Event()
    process = context.Process(target=_relabel, args=(rb, going))
    process.start()
    try:
        going.wait()
        for i in range(150):
            _, info = rb.sample(return_info=True)
            index, generation = info["index"], info["index_generation"]
            rb.update_priority(index, torch.rand(6) + 0.1, generation=generation)
            state = torch.full((6,), float(i))
            assert rb.update_if_present(index=index, generation=generation, patch={"state": state}).updated.all()
            assert (rb[index]["state"] == i).all()
            version = torch.full((6,), i)
            newer = rb.update_if_present(
                index=index, generation=generation, patch={"state": state}, version_key="step", version=version + 100
            )
            assert not newer.stale_count
    finally:
        going.clear()
        process.join()
    assert dropped(rb) == 0
    rb.close()
