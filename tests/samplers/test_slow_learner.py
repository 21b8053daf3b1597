"""Learners that pause while others write and edit: no draw fails, each row of a batch is of one step, and nothing is drawn no longer."""

import threading

import pytest
import torch

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    NoSampleable,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)

ROWS, WRITTEN, BATCHES = 1024, 16, 12

SAMPLERS = {
    "random": RandomSampler,
    "epoch": SamplerWithoutReplacement,
    "epoch in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "consuming": lambda: ConsumingSampler(2),
    "staleness": StalenessAwareSampler,
    "staleness with a limit": lambda: StalenessAwareSampler(max_staleness=1_000),
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.9),
    "slices": lambda: SliceSampler(slice_len=4, traj_key="episode", strict_length=False),
    "slices by end": lambda: SliceSampler(slice_len=4, end_key="end"),
    "slices of rows anywhere": lambda: SliceSampler(slice_len=4, traj_key="episode", step_key="at"),
    "epoch of slices": lambda: SliceSamplerWithoutReplacement(slice_len=4, traj_key="episode"),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.9, slice_len=4, traj_key="episode"),
    "streaming": lambda: StreamingSliceSampler(slice_len=4, traj_key="episode"),
    "groups": lambda: PromptGroupSampler(samples_per_group=4, group_key="group"),
}


def rows(start, n):
    step = torch.arange(start, start + n)
    return {
        "step": step,
        "x": step[:, None].repeat(1, 32),
        "state": torch.zeros_like(step),
        "episode": step // 16,
        "at": step % 16,
        "end": step % 16 == 15,
        "group": step // 8,
        "policy_version": step // WRITTEN,
    }


class Others:
    """A thread that writes and one that edits, through buffers of their own. They begin when the first draw did."""

    def __init__(self, storage):
        self.rounds = [0, 0]
        self._moved, self._over, self._failed = threading.Condition(), False, []
        self._threads = [threading.Thread(target=self._run, args=(i, storage)) for i in (0, 1)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._over = True
        for thread in self._threads:
            thread.join()
        assert not self._failed

    def _run(self, who, storage):
        rb, generator = ReplayBuffer(storage=storage), torch.Generator().manual_seed(who)
        try:
            while not self._over:
                if who == 0:
                    rb.extend(rows(ROWS + self.rounds[0] * WRITTEN, WRITTEN))
                else:
                    some = torch.randint(0, ROWS, (64,), generator=generator).unique()
                    rb.set_at_("state", torch.ones(len(some), dtype=torch.int64), some)
                with self._moved:
                    self.rounds[who] += 1
                    self._moved.notify_all()
        except BaseException as error:
            self._failed.append(error)
            raise

    def wait(self):
        """What a slow learner does: until both have gone on."""
        before = list(self.rounds)
        with self._moved:
            assert self._moved.wait_for(lambda: self._failed or self._gone_on(before), timeout=60)

    def _gone_on(self, before):
        return all(now > then + 1 for now, then in zip(self.rounds, before, strict=True))


@pytest.fixture(params=["memory", "directory"])
def storage(request, tmp_path):
    directory = request.param == "directory"
    storage = LazyMemmapStorage(ROWS, scratch_dir=tmp_path / "store") if directory else LazyTensorStorage(ROWS)
    ReplayBuffer(storage=storage).extend(rows(0, ROWS))
    yield storage
    storage.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_no_draw_of_a_slow_learner_fails(storage, kind):
    rb = ReplayBuffer(storage=storage, sampler=SAMPLERS[kind](), batch_size=16)
    rb.sample()
    with Others(storage) as others:
        for _ in range(BATCHES):
            others.wait()
            try:
                batch, info = rb.sample(return_info=True)
            except NoSampleable:
                assert kind in ("consuming", "streaming")  # whose rows run out
                continue
            assert bool((batch["x"] == batch["step"][..., None]).all())
            if "prioritized" in kind:
                rows = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
                rb.update_priority(rows, torch.rand(len(rows)))
    if kind == "staleness":  # all live rows are drawn again once nothing moves
        assert len(set(rb.sample(ROWS)["step"].tolist())) == ROWS


# ---- between the look at the versions and the draw -------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_rows_that_move_between_the_look_and_the_draw_are_drawn_as_they_are_then(storage, every):
    """All rows, or half of them, get another version and state meanwhile: what is handed out is what the rows hold then."""
    editor = ReplayBuffer(storage=storage)
    moved = torch.arange(0, ROWS, every)

    def weigh(staleness):
        if not edits:
            edits.append(1)
            editor.set_at_("policy_version", torch.full((len(moved),), 10_000), moved)
            editor.set_at_("state", torch.ones(len(moved), dtype=torch.int64), moved)
        return torch.ones_like(staleness)

    edits = []
    rb = ReplayBuffer(storage=storage, sampler=StalenessAwareSampler(staleness_weight_fn=weigh))
    batch = rb.sample(ROWS)
    assert ((batch["policy_version"] == 10_000) == (batch["state"] == 1)).all()
    batch, info = rb.sample(ROWS, return_info=True)
    assert len(set(batch["step"].tolist())) == ROWS
    assert ((batch["policy_version"] == 10_000) == (batch["step"] % every == 0)).all()
    assert info["staleness"].tolist() == (-batch["policy_version"]).tolist()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_draw_that_fails_takes_no_row_from_later_ones(storage, error):
    def weigh(staleness):
        if broken:
            raise error
        return torch.ones_like(staleness)

    broken = []
    rb = ReplayBuffer(storage=storage, sampler=StalenessAwareSampler(staleness_weight_fn=weigh))
    rb.sample(16)
    ReplayBuffer(storage=storage).extend(rows(ROWS, WRITTEN))
    ReplayBuffer(storage=storage).set_at_("state", torch.ones(8, dtype=torch.int64), torch.arange(100, 108))
    broken.append(1)
    for _ in range(2):
        with pytest.raises(type(error)):
            rb.sample(16)
    broken.clear()
    assert sorted(rb.sample(ROWS)["step"].tolist()) == list(range(WRITTEN, ROWS + WRITTEN))


def test_weights_that_draw_themselves_draw_from_the_table_as_it_is(storage):
    """A weight function may draw by the same sampler: its weights are of the versions that it was asked about."""
    others = ReplayBuffer(storage=storage)

    def weigh(staleness):
        if not weighing:
            weighing.append(1)
            others.extend(rows(10_000 + len(asked) * WRITTEN, WRITTEN))
            rb.sample()
        asked.append(len(staleness))
        return torch.ones_like(staleness)

    weighing, asked = [1], []
    rb = ReplayBuffer(storage=storage, sampler=StalenessAwareSampler(staleness_weight_fn=weigh), batch_size=16)
    rb.sample()
    weighing.clear()
    assert len(rb.sample()["step"]) == 16


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("moved", [False, True])
def test_rows_whose_draw_failed_are_drawn_by_another(storage, monkeypatch, times, moved):
    """``moved``: it is the rows in place of those that moved which cannot be read."""
    rb = ReplayBuffer(storage=storage, sampler=ConsumingSampler(times), batch_size=16)
    writer, read, calls = ReplayBuffer(storage=storage), type(storage).read, []

    def broken(self, *arguments):
        calls.append(1)
        if len(calls) == 1 + moved:
            raise OSError("disk")
        if moved and len(calls) == 1:
            assert writer.remove(arguments[0][3:4]) == 1
        return read(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "read", broken)
        with pytest.raises(OSError, match="disk"):
            rb.sample()
    assert int(rb.sampler.state_dict()["counts"].sum()) == 0
    assert len(rb) == ROWS - moved
    drawn = []
    while len(rb):
        drawn += rb.sample()["step"].tolist()
    assert len(set(drawn)) == ROWS - moved
    assert sorted(drawn) == sorted([*set(drawn)] * times)
