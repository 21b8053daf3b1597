"""Checkpoints of buffers whose rows several actors of Ray keep: each actor is a rank, and saves its own."""

import threading
from functools import partial

import pytest
import torch

from engram import Checkpointer, LazyMemmapStorage, PrioritizedSampler, RankFailed, Ranks, ReplayBuffer, RestoreReport
from engram.saved.checkpoints import Checkpoint
from tests import stress
from tests.cluster.on_nodes import AWAY, HERE, made, rows
from tests.ranks.jobs import episode, steps_of, whos

ray = pytest.importorskip("ray", reason="engram-replay[ray] is not installed")
shard = pytest.importorskip("engram.serving.actors", reason="engram-replay[ray] is not installed")
SAVED, RESTORED = stress.size((3, 2), (8, 6))
LANES, LENGTH = 2, 64


def sharded(root, shards, **more):
    """A buffer whose shards have directories."""
    storage = partial(LazyMemmapStorage, lanes=LANES, scratch_dir=root)
    where = [AWAY if k % 2 else HERE for k in range(shards)]
    sampler = partial(PrioritizedSampler, alpha=0.7, beta=0.5)
    return made(where, storage, LANES * LENGTH, shards=shards, sampler=sampler, missing="wait", **more)


def play(rb, writer):
    """Whole trajectories to both lanes of the store of one client, each step with a priority of its own."""
    for lane, lengths in enumerate(([5, 7, 3], [9, 4])):
        for number, steps in enumerate(lengths):
            data = episode(writer, lane, number, steps)
            index = rb.extend(data, lane=lane)
            rb.update_priority(index, data["who"].to(torch.float64).sqrt() + 0.1)
    len(rb)


def stored(root, shards):
    """The steps in the directories of shards, of each."""
    found = []
    for k in range(shards):
        with ReplayBuffer.open(root / f"shard-{k:05d}-of-{shards:05d}", unclean="accept") as store:
            found.append(steps_of(store))
    return found


def trajectories_of(root, shards):
    """By the lane of a shard, who is there."""
    found = {}
    for k in range(shards):
        with ReplayBuffer.open(root / f"shard-{k:05d}-of-{shards:05d}", unclean="accept") as store:
            at = (
                torch.arange(len(store))
                if store.storage.lanes == 1
                else torch.cat(
                    [
                        torch.arange(lane * LENGTH, lane * LENGTH + filled)
                        for lane, filled in enumerate(store.storage.extent().filled)
                    ]
                )
            )
            found[k] = {int(row): int(who) for row, who in zip(at, store[:]["who"], strict=True)}
    return found


@pytest.mark.timeout(stress.LIMIT_S)
def test_every_step_of_some_shards_is_in_others_once(nodes, tmp_path):
    with sharded(tmp_path / "from", SAVED) as rb:
        writers = rb.clients(SAVED)
        for number, writer in enumerate(writers):
            play(writer, number)
        [writer.close() for writer in writers]
        n = len(rb)
        checkpoints = Checkpointer(tmp_path / "series", rb, keep=2)
        report = checkpoints.save(10, user={"model": "a"})
        assert (report.step, report.steps, n) == (10, 28 * SAVED, 28 * SAVED)
        assert report.episodes == {"complete": {"episodes": 5 * SAVED, "steps": 28 * SAVED}}
        again = checkpoints.save(20)
        assert again.bytes_linked > again.bytes_written  # what did not change is not written again
        assert [it.step for it in checkpoints.list()] == [20, 10]
        assert checkpoints.verify(again.name) == []
        assert checkpoints.prune(keep=1) == [report.name]
    with Checkpoint(again.path) as checkpoint:
        assert checkpoint.manifest.world == SAVED
        assert [checkpoint.shard(rank).totals.steps for rank in range(SAVED)] == [28] * SAVED
    before = stored(tmp_path / "from", SAVED)
    with sharded(tmp_path / "to", RESTORED) as rb:
        assert len(rb) == 0
        restored = Checkpointer(tmp_path / "series", rb).restore()
        assert (restored.step, restored.steps, len(rb)) == (20, n, n)
        batch = rb.sample()
        assert set(batch["who"].tolist()) <= set().union(*map(whos, before))
    after = stored(tmp_path / "to", RESTORED)
    assert sum(map(len, after)) == len(set().union(*after)) == n
    assert set().union(*after) == set().union(*before)  # who, bytes and bits of the priority
    for shard in trajectories_of(tmp_path / "to", RESTORED).values():
        for row, who in shard.items():  # a step follows the one before it
            if who % 1000:
                assert shard[row - 1] == who - 1


def test_the_same_shards_get_back_their_rows_while_clients_go_on(nodes, tmp_path):
    with sharded(tmp_path / "store", 2, prefetch=2) as rb, rb.client() as other:
        play(rb, 0)
        play(other, 1)
        checkpoints = Checkpointer(tmp_path / "series", rb, every_steps=10)
        assert checkpoints.poll(5, user={"model": "a"}) is None
        handle = checkpoints.poll(12, user={"model": "b"})
        assert handle.wait(600).steps == 56
        rb.sample()
        rb.extend(episode(5, 0, 9, 10), lane=0)
        other.empty()
        report = checkpoints.restore()
        assert (report.user, report.steps, len(rb), len(other)) == ({"model": "b"}, 56, 56, 56)
        known = {
            ((w * 100 + lane) * 1000 + n) * 1000 + t
            for w in (0, 1)
            for lane in (0, 1)
            for n in range(3)
            for t in range(9)
        }
        assert set(rb.sample()["who"].tolist()) <= known
        with pytest.raises(RuntimeError, match="guard"), checkpoints.guard():
            pass
        with pytest.raises(ValueError, match="each shard of this buffer is a rank"):
            Checkpointer(tmp_path / "series", rb, ranks=Ranks.local())
        with pytest.raises(FileNotFoundError):
            checkpoints.restore(step=77)
        assert len(rb) == 56


def test_one_shard_over_a_connection_saves_where_its_rows_are(nodes, tmp_path):
    with made(AWAY) as rb:
        rb.extend(rows(20))
        checkpoints = Checkpointer(tmp_path / "series", rb)
        assert checkpoints.save(1).steps == 20
        rb.extend(rows(10, 20))
        assert checkpoints.restore().steps == 20
        assert set(rb.sample()["a"].tolist()) <= set(range(20))


def test_a_shard_that_dies_in_a_save_ends_it_and_the_next_one_has_all(nodes, tmp_path):
    def hang(actor):
        actor._saver._checkpointer._job.write_shard = lambda *_: threading.Event().wait()

    with sharded(tmp_path / "store", 2) as rb, rb.client() as other:
        play(rb, 0)
        play(other, 1)
        checkpoints = Checkpointer(tmp_path / "series", rb)
        checkpoints.save(1)
        for victim in (1, 0):  # rank 0 holds the board, too
            actor = rb._service.shards.each[victim].actor
            ray.get(actor.__ray_call__.remote(hang))
            handle = checkpoints.save(2, wait=False)
            ray.kill(actor, no_restart=False)
            with pytest.raises(RankFailed, match=f"rank {victim}"):
                handle.wait(600)
        assert checkpoints.save(3).steps == 56
        assert [it.step for it in checkpoints.list() if it.problem is None] == [3, 1]


@pytest.mark.parametrize("error", [None, RankFailed("restore: rank 1 is gone", {}), KeyboardInterrupt()])
def test_batches_drawn_before_a_restore_are_dropped_whatever_becomes_of_it(monkeypatch, error):
    class Actor:
        @property
        def actor(self):
            return self

        saver = property(actor.fget)

        def options(self, **_):
            return self

        def remote(self, *_):
            return object()

    def answers(*_, **__):
        if error is not None:
            raise error
        return [RestoreReport("name", 1, None, 5, {}, [], 0.0, (), None, 0, "")]

    kind, dropped = pytest.importorskip("engram.remote.shards").ShardSavers, []
    monkeypatch.setattr(kind, "_ready", lambda self: None)
    monkeypatch.setattr(kind, "_timeout", 1.0)
    monkeypatch.setattr(kind, "_answers", answers)
    savers = kind(lambda: [Actor()], lambda: dropped.append(1))
    if error is None:
        assert savers.restore(None, None).steps == 5
    else:
        with pytest.raises(type(error)):
            savers.restore(None, None)
    assert dropped == [1]


def test_a_board_answers_its_own_job_alone(monkeypatch):
    class Holder:
        """Calls at once what an actor would be asked for."""

        def __init__(self, board):
            self.board = self._call(board.do)

        @staticmethod
        def _call(method):
            class Call:
                @staticmethod
                def options(**_):
                    return Call

                @staticmethod
                def remote(*arguments):
                    return method(*arguments)

            return Call

    board = shard.Board("now")
    ranks = [shard.RanksOnRay(rank, 2, Holder(board), "now") for rank in range(2)]
    monkeypatch.setattr(shard, "answer_of", lambda asked, *_: asked)
    ranks[0].set("a", b"1")
    assert (ranks[1].get("a"), ranks[1].get("b")) == (b"1", None)
    assert (ranks[1].claim("b", b"2"), ranks[0].claim("b", b"3")) == (b"2", b"2")
    assert (ranks[0].add("c", 2), ranks[1].add("c", 3)) == (2, 5)
    assert ranks[0]._look(["a", "b", "z"]) == {"a": b"1", "b": b"2"}
    ranks[1].forget("a")
    ranks[1].forget("c")
    assert (ranks[0].get("a"), ranks[0].add("c", 1)) == (None, 1)
    board.break_off("other", "for another one")
    assert ranks[0].get("b") == b"2"
    board.break_off("now", "rank 1 is gone")
    with pytest.raises(RankFailed, match="rank 1 is gone"):
        ranks[0].get("b")
    with pytest.raises(RankFailed, match="started again"):
        shard.Board("").do("now", "get", "b")
