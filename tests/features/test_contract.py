"""Each feature on RAM, shared and in a folder, opened again, in two processes, and through saves, on other ranks included."""

import pytest

from engram import Checkpointer, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from tests import forkserver
from tests.features.rows import APART, whos_in, whos_of
from tests.features.table import FEATURES
from tests.ranks.jobs import done, job
from tests.store.processes import Child

KEEP = {"open": "keep", "headless": "keep"}
KINDS = ["RAM", "shared", "folder"]
BESIDE = 30  # draws beside a writer

pytestmark = [
    pytest.mark.parametrize("name", FEATURES),
    pytest.mark.filterwarnings("ignore:restore", "ignore:PromptGroupSampler", "ignore:this process was forked"),
]


def made(name, kind, folder, *, seed=0, broken=False, capacity=None):
    feature = FEATURES[name]
    rows = capacity or feature.capacity
    storage = LazyMemmapStorage(rows, scratch_dir=folder) if kind == "folder" else LazyTensorStorage(rows)
    rb = feature.buffer(storage, seed=seed, arguments=feature.broken() if broken else None)
    return rb.share() if kind == "shared" else rb


def go_on(name, rb, known, *, trajectory=APART):
    """Check the buffer, write to it, and check again."""
    feature = FEATURES[name]
    feature.stored(rb, known)
    if known.whos:
        feature.check(rb, known)
    feature.write(rb, known, trajectory, trajectory + 1)
    feature.stored(rb, known)
    feature.check(rb, known)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dump_goes_on_in_another_storage(name, kind, tmp_path):
    with made(name, kind, tmp_path / "first") as rb:
        known = FEATURES[name].play(rb, [0, 1, 2])
        rb.dumps(tmp_path / "dump")
        other = KINDS[KINDS.index(kind) - 1]
        with made(name, other, tmp_path / "second", seed=1) as again:
            again.loads(tmp_path / "dump")
            go_on(name, again, known)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_on_in_another_storage(name, kind, tmp_path):
    with made(name, kind, tmp_path / "first") as rb:
        known = FEATURES[name].play(rb, [0, 1, 2])
        Checkpointer(tmp_path / "saved", rb, timeout=60.0).save(1)
        other = KINDS[KINDS.index(kind) - 2]
        with made(name, other, tmp_path / "second", seed=1) as again:
            Checkpointer(tmp_path / "saved", again, timeout=60.0).restore()
            go_on(name, again, known)


@pytest.mark.parametrize("how", ["open", "open_or_create"])
def test_a_folder_is_opened_again(name, how, tmp_path):
    feature = FEATURES[name]
    with made(name, "folder", tmp_path / "store") as rb:
        known = feature.play(rb, [0, 1, 2])
    if how == "open":
        rb = ReplayBuffer.open(tmp_path / "store", **feature.reopening())
    else:
        more = {"batch_size": feature.batch_size, **feature.arguments()}
        rb = feature.cls.open_or_create(tmp_path / "store", feature.capacity, **more)
    with rb:
        go_on(name, rb, feature.reset(known, "reopened"))


@pytest.mark.parametrize("kind", ["shared", "folder"])
def test_two_processes_write_and_draw(name, kind, tmp_path):
    """One writes while the other one draws, then the other way round; both have it all in the end."""
    feature = FEATURES[name]
    with made(name, kind, tmp_path / "store") as rb:
        known = feature.play(rb, [0, 1, 2])
        here, there = forkserver.CONTEXT.Pipe()
        child = Child(other_process, name, rb, known, there, method="forkserver")
        assert here.poll(60)
        here.recv()
        beside(feature, rb, known, range(APART, APART + 4))
        assert here.poll(60)
        assert here.recv() == "wrote"
        feature.write(rb, known, *range(APART + 4, APART + 8))
        here.send(known.drawn)
        assert here.poll(60)
        drawn = here.recv()
        child.join()
        if feature.common:
            known.drawn |= drawn
        go_on(name, rb, known, trajectory=APART + 8)


def beside(feature, rb, known, trajectories):
    """Draw while another process writes these trajectories."""
    whos = known.whos | whos_in(*trajectories)
    for _ in range(BESIDE):
        feature.draw(rb, known, whos)
    feature.wrote(known, *trajectories)


def other_process(name, rb, known, pipe):
    feature = FEATURES[name]
    feature.stored(rb, known)
    pipe.send("began")
    feature.write(rb, known, *range(APART, APART + 4))
    pipe.send("wrote")
    beside(feature, rb, known, range(APART + 4, APART + 8))
    assert pipe.poll(60)
    drawn = pipe.recv()
    if feature.common:
        known.drawn |= drawn
    feature.stored(rb, known)
    feature.check(rb, known)
    pipe.send(known.drawn)
    rb.close()


def save(ranks, rank, name, root):
    rb = made(name, "RAM", None, seed=rank)
    known = FEATURES[name].play(rb, [3 * rank + number for number in range(3)])
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).save(1)
    return known


def restore(ranks, rank, name, root, capacity):
    rb = made(name, KINDS[rank], root.with_name(f"rank-{rank}"), seed=10 + rank, capacity=capacity)
    Checkpointer(root, rb, ranks=ranks, timeout=60.0).restore(incomplete=KEEP)
    return rb


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_ranks_go_on_as_another_number(name, ranks, tmp_path):
    feature = FEATURES[name]
    saved = done(job(2, save, name, tmp_path / "saved"))
    every = done(job(ranks, restore, name, tmp_path / "saved", feature.capacity * 2 // min(ranks, 2)))
    shares = [whos_of(rb) for rb in every]
    assert sum(map(len, shares)) == sum(len(known.whos) for known in saved)
    assert set().union(*shares) == set().union(*(known.whos for known in saved))
    drawn = set().union(*(known.drawn for known in saved))
    for number, (rb, share) in enumerate(zip(every, shares, strict=True)):
        known = type(saved[0])(share, drawn=set(drawn))
        go_on(name, rb, feature.reset(known, "moved"), trajectory=APART + 2 * number)
        rb.close()


def test_the_check_sees_a_buffer_that_does_it_wrong(name):
    """A negative control: the feature set up a little differently, or its rows changed."""
    feature = FEATURES[name]
    with pytest.raises((AssertionError, KeyError)):
        play_wrong(feature, made(name, "RAM", None, broken=feature.broken() is not None))


def play_wrong(feature, rb):
    known = feature.play(rb, [0, 1, 2])
    if feature.broken() is None:
        feature.spoil(rb, known)
    feature.check(rb, known)


def test_the_check_sees_wrong_steps(name):
    """A negative control: told of a trajectory more or less than there is, each check fails."""
    feature = FEATURES[name]
    for wrong in (lambda whos: whos - whos_in(2), lambda whos: whos | whos_in(APART)):
        rb = made(name, "RAM", None)
        known = feature.play(rb, [0, 1, 2])
        feature.check(rb, known)
        feature.write(rb, known, 4)
        known.whos = wrong(known.whos)
        with pytest.raises((AssertionError, KeyError)):
            feature.check(rb, known)
