"""What lies beside the rows, where they are dealt out to other ranks: what must agree, what is one rank's, what begins anew."""

import logging
import warnings

import pytest
import torch

from engram import (
    FinalObservations,
    IncompatibleCheckpoint,
    LazyTensorStorage,
    NextFromFollowing,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    VecNorm,
)
from engram.cli.reshard import reshard
from engram.saved import attempts
from tests.ranks.jobs import buffer, checkpointer, columns_of, done, episode, job, layout, play, steps_of


def nothing(rb, rank):
    """Changes nothing."""


def write(ranks, rank, root, change=nothing, made=buffer, **more):
    rb = made()
    play(rb, rank, 0, [5, 3]) if made is buffer else rb.extend(episode(rank, 0, 0, 8), lane=0)
    change(rb, rank)
    checkpointer(root, rb, ranks).save(4, **more)
    return rb


def load(ranks, rank, root, made=buffer, **more):
    rb = made()
    return checkpointer(root, rb, ranks).restore(**more), rb


def told(root, n, made=buffer):
    """What a restore on ``n`` ranks warns of, and the buffers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = done(job(n, load, root, made))
    return [str(one.message) for one in caught if "expected the same" in str(one.message)], [rb for _, rb in loaded]


# ---- what must agree -------------------------------------------------------------------------------------------------


def test_another_beta_is_told_once_and_that_of_rank_0_taken(tmp_path):
    def change(rb, rank):
        rb.sampler.beta = [0.5, 0.5, 0.75][rank]

    done(job(3, write, tmp_path, change))
    said, loaded = told(tmp_path, 2)
    assert len(said) == 1
    assert (
        "priorities.main.beta: expected the same on all ranks, got that of rank 0 (0.5), rank 2 (0.75); that of rank 0"
        in said[0]
    )
    assert [rb.sampler.beta for rb in loaded] == [0.5, 0.5]
    assert told(tmp_path, 3)[0] == [], "each has its own again"


def test_what_agrees_is_not_told_of(tmp_path):
    done(job(3, write, tmp_path, lambda rb, rank: [rb.sample() for _ in range(rank)]))
    assert told(tmp_path, 2)[0] == []


def test_of_a_partial_checkpoint_ranks_are_called_as_they_were(tmp_path):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [5])
        rb.sampler.beta = [0.1, 0.2, 0.3][rank]
        ck = checkpointer(tmp_path, rb, ranks)
        epoch = ck._job.protocol.claim(5.0)
        folder = b""
        if rank == 0:
            folder = attempts.begin(
                tmp_path, step=9, epoch=epoch, world=3, trigger="crash", attempt="crash1"
            ).name.encode()
        folder = ranks.gather(folder, 5.0)[0].decode()
        if rank:
            ck._job.write_crash(tmp_path / folder)

    done(job(3, act))
    with pytest.warns(UserWarning, match=r"rank 1 \(0.2\), rank 2 \(0.3\); that of rank 1 is taken"):
        done(job(1, lambda ranks, _: checkpointer(tmp_path, buffer(), ranks).restore(allow_partial=True)))


def normed():
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(64, lanes=2), transform=VecNorm(["obs"]), sampler=RandomSampler(), batch_size=8
    )


def test_statistics_of_a_transform_that_differ_are_told_of(tmp_path):
    def change(rb, rank):
        for _ in range(rank + 1):
            rb.sample()

    done(job(2, write, tmp_path, change, normed))
    said, _ = told(tmp_path, 3, normed)
    assert said
    assert all("transforms." in text and "that of rank 0 is taken" in text for text in said)


def following():
    kept = FinalObservations(["obs"], LazyTensorStorage(20))
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(64, lanes=2),
        sampler=NextFromFollowing(RandomSampler(), kept),
        transform=kept,
        batch_size=8,
    )


def write_following(ranks, rank, root, writers):
    rb = following()
    if rank in writers:
        for number in range(3):
            data = episode(rank, 0, number, 4)
            rb.extend(data.set(("next", "obs"), data["obs"] + 1), lane=0)
    checkpointer(root, rb, ranks).save(4)


def test_final_observations_of_several_ranks_are_refused_and_nothing_changes(tmp_path):
    """They lie beside the rows, which say where."""
    done(job(2, write_following, tmp_path, (0, 1)))

    def act(ranks, rank):
        rb = following()
        data = episode(5, 0, 0, 3)
        rb.extend(data.set(("next", "obs"), data["obs"] + 1), lane=0)
        with pytest.raises(
            IncompatibleCheckpoint, match=r"transforms\.0\.storage: expected no state with rows of its own"
        ):
            checkpointer(tmp_path, rb, ranks).restore()
        return len(rb)

    assert done(job(3, act)) == [3, 3, 3]


def test_those_of_one_rank_go_everywhere(tmp_path):
    done(job(2, write_following, tmp_path, (1,)))
    for report, rb in done(job(3, load, tmp_path, following)):
        assert report.steps == 4
        batch = rb.sample()
        assert torch.equal(batch["next", "obs"][batch["next", "done"]], batch["obs"][batch["next", "done"]] + 1)


def test_offline_says_it_too(tmp_path, capsys):
    def change(rb, rank):
        rb.sampler.beta = [0.5, 0.75][rank]

    done(job(2, write, tmp_path / "old", change))
    reshard(tmp_path / "old", tmp_path / "new", 3, 2, capacity=64, open_ones="drop", headless="drop", overflow="cut",
            max_drop_fraction=0.5, dry_run=True, as_json=False)  # fmt: skip
    assert "priorities.main.beta: expected the same on all ranks" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["alpha", "eps"])
def test_other_priorities_are_refused(tmp_path, name):
    def act(ranks, rank):
        settings = {"alpha": 0.5, "beta": 0.4, "eps": 1e-6} | {name: [0.5, 0.6][rank]}
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(64, lanes=2), sampler=PrioritizedSampler(64, **settings), batch_size=8
        )
        rb.extend(episode(rank, 0, 0, 5), lane=0)
        checkpointer(tmp_path, rb, ranks).save(4)

    done(job(2, act))
    for error in job(3, load, tmp_path):
        assert isinstance(error, IncompatibleCheckpoint)
        assert f"expected {name}=0.5" in str(error)


def test_user_state_of_other_ranks_is_logged_if_it_differs(tmp_path, caplog):
    def act(ranks, rank):
        rb = buffer()
        play(rb, rank, 0, [5])
        ck = checkpointer(tmp_path, rb, ranks)
        ck.save(1, user={"lr": (1, 2)})
        ck.save(2, user={"lr": 1} if rank == 0 else None)
        assert "user: expected" not in caplog.text
        ranks.gather(b"", 60.0)
        ck.save(3, user={"lr": 1, "rank": rank})

    with caplog.at_level(logging.WARNING, logger="engram"):
        done(job(3, act))
    lines = [line for line in caplog.messages if "user: expected the same on all ranks" in line]
    assert len(lines) == 2
    assert any("on rank 2; those of rank 0 are saved: ['lr', 'rank']" in line for line in lines)
    assert done(job(1, load, tmp_path))[0][0].user == {"lr": 1, "rank": 0}


# ---- what begins anew ------------------------------------------------------------------------------------------------


def seeded(seed):
    return lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(64, lanes=2),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        generator=torch.Generator().manual_seed(seed),
    )


def test_generators_come_from_the_checkpoint_and_the_rank(tmp_path):
    done(job(2, write, tmp_path, nothing, seeded(1)))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again = (done(job(3, load, tmp_path, seeded(seed))) for seed in (2, 3))
    other = done(job(4, load, tmp_path, seeded(2)))
    assert torch.equal(torch.get_rng_state(), before), "torch's own stays as it is"
    assert [rb.state_dict()["_rng"][0].tolist() for _, rb in first] == [
        rb.state_dict()["_rng"][0].tolist() for _, rb in again
    ]
    assert len({tuple(rb.state_dict()["_rng"][0].tolist()) for _, rb in (*first, *other)}) == 7


def test_torchs_own_generator_is_seeded_on_request(tmp_path):
    done(job(2, write, tmp_path))
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        done(job(1, load, tmp_path, buffer))
        assert torch.initial_seed() == seed
        job(1, lambda ranks, _: checkpointer(tmp_path, buffer(), ranks).restore(default_rng=True))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("written", [0, 1])
def test_a_pass_over_rows_begins_anew(tmp_path, written):
    def change(rb, rank):
        rb.sample()
        for _ in range(written):
            rb.extend(episode(rank, 1, 1, 4), lane=1)

    done(job(2, write, tmp_path, change, seeded(1)))
    for _, rb in done(job(1, load, tmp_path, seeded(2))):
        assert sorted(i for _ in range(4 + 2 * written) for i in rb.sample()["who"].tolist()) == sorted(
            who for lane in layout_of(rb) for who in lane
        )


def layout_of(rb):
    numbers = rb.state_dict()["_storage"]["numbers"]
    return [columns_of(rb)["who"][: len(numbers)][numbers != 0].tolist()]


def sliced():
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(64, lanes=2),
        sampler=SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
        batch_size=2,
    )


@pytest.mark.parametrize("drawn", [0, 1])
def test_a_pass_over_trajectories_begins_anew(tmp_path, drawn):
    def change(rb, rank):
        rb.extend(episode(rank, 1, 1, 4), lane=1)
        for _ in range(drawn):
            rb.sample()

    done(job(2, write, tmp_path, change, sliced))
    said, (rb,) = told(tmp_path, 1, sliced)
    assert said == []
    whos = [rb.sample()["who"].tolist()[0] // 1000 for _ in range(4)]
    assert len(set(whos)) == 4


@pytest.mark.parametrize("drawn", [0, 1])
def test_so_it_does_in_a_dump_that_is_converted(tmp_path, drawn):
    rb = sliced()
    for number in range(4):
        rb.extend(episode(0, number % 2, number, 4), lane=number % 2)
    for _ in range(drawn):
        rb.sample()
    rb.dumps(tmp_path / "x")
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(90, lanes=3),
        sampler=SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
        batch_size=2,
    )
    other.loads(tmp_path / "x", convert=True)
    whos = [other.sample()["who"].tolist()[0] // 1000 for _ in range(4)]
    assert len(set(whos)) == 4


def test_batches_that_were_drawn_ahead_are_dropped(tmp_path):
    def ahead():
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(64, lanes=2), sampler=RandomSampler(), batch_size=4, prefetch=2
        )

    done(job(2, write, tmp_path, lambda rb, _: rb.sample(), ahead))
    for report, rb in done(job(3, load, tmp_path, ahead)):
        assert rb.state_dict()["_prefetch_state"] is None
        if report.steps:
            assert set(rb.sample()["who"].tolist()) <= {step for lane in layout(rb) for step in lane}


# ---- cursors and tickets ---------------------------------------------------------------------------------------------


def test_the_next_write_follows_the_newest_step_and_a_full_lane_wraps_to_its_oldest(tmp_path):
    def act(ranks, rank):
        rb = buffer(1, 64)
        play(rb, rank, 0, [4, 4])
        checkpointer(tmp_path, rb, ranks).save(1)

    done(job(2, act))
    _, rb = done(job(1, lambda ranks, rank: (checkpointer(tmp_path, rb := buffer(1, 18), ranks).restore(), rb)))[0]
    before = layout(rb)[0]
    assert len(before) == 16
    play(rb, 7, 0, [2])
    assert layout(rb)[0][:16] == before
    play(rb, 7, 0, [3], first=1)
    assert layout(rb)[0][:-5] == before[3:]


def test_draws_from_before_a_load_match_nothing_any_more(tmp_path):
    done(job(2, write, tmp_path))
    rb = buffer()
    play(rb, 9, 0, [10])
    drawn = rb.sample()
    before = rb.storage.store.tickets_of(torch.arange(64)).max()
    done(job(1, lambda ranks, _: checkpointer(tmp_path, rb, ranks).restore()))
    after = steps_of(rb)
    numbers = rb.storage.store.tickets_of(torch.arange(64))
    assert (numbers >= 0).sum() == 16
    assert numbers[numbers >= 0].min() > before
    rb.update_tensordict_priority(drawn.set("td_error", torch.full((8,), 100.0)))
    assert steps_of(rb) == after


def test_anchors_of_slices_are_those_of_the_new_shard(tmp_path):
    def windows():
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(64, lanes=2),
            sampler=SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=True),
            batch_size=16,
        )

    done(job(2, write, tmp_path, nothing, windows))
    for report, rb in done(job(3, load, tmp_path, windows)):
        assert rb.can_sample(16) == (report.steps >= 4)
        if report.steps:
            who = rb.sample()["who"].reshape(4, 4)
            assert (who.diff(dim=1) == 1).all()


# ---- priorities ------------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_new_shard(tmp_path):
    """By their definition, from the leaves that are here; and every row is drawn as often as its leaf says."""
    done(job(3, write, tmp_path))
    for _, rb in done(job(2, load, tmp_path)):
        leaves = rb.sampler.state_dict()["leaves"]
        batch = torch.cat([rb.sample() for _ in range(500)])
        expected = (leaves[batch["index"]] / leaves[leaves > 0].min()) ** -rb.sampler.beta
        torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-6, atol=0)
        share = torch.bincount(batch["index"], minlength=64).double() / 4000
        assert (share - leaves / leaves.sum()).abs().max() < 0.05


@pytest.mark.parametrize("within", [False, True])
def test_new_rows_get_the_largest_priority_of_all_or_the_largest_here(tmp_path, within):
    def made():
        sampler = PrioritizedSampler(64, alpha=1.0, beta=0.5, eps=0.0, max_priority_within_buffer=within)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(64, lanes=2), sampler=sampler, batch_size=8)

    def change(rb, rank):
        rb.update_priority(torch.arange(8), torch.full((8,), [2.0, 7.0][rank]))

    done(job(2, write, tmp_path, change, made))
    loaded = [rb for _, rb in done(job(2, lambda *args: load(*args, made, incomplete={"open": "drop"}), tmp_path))]
    here = [float(rb.sampler.state_dict()["leaves"].max()) for rb in loaded]
    assert sorted(here) == [2.0, 7.0]
    for rb, largest in zip(loaded, here, strict=True):
        assert rb.sampler.default_priority == (largest if within else 7.0)
