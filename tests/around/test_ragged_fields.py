"""Steps around rows that have ragged fields beside others: each item is that of the step which the batch says."""

import pytest
import torch

from engram import (
    FinalObservations,
    FrameStack,
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    NextFromFollowing,
    NStep,
    PrioritizedSampler,
    Ragged,
    RandomSampler,
    ReplayBuffer,
    RewardToGo,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    Window,
    WindowSpec,
)

EPISODE = 6


def length_of(number):
    return number * 5 % 8


def is_last(number, n):
    """Whether a step is the last one of its episode that is there."""
    return number % EPISODE == EPISODE - 1 or number == n - 1


def rows(first, n):
    """Rows ``[first, first + n)``: each names itself, and the tokens of its own and of its next step."""
    numbers = torch.arange(first, first + n)
    return {
        "number": numbers,
        "episode": numbers // EPISODE,
        "frame": numbers.float().unsqueeze(1),
        "goal": torch.full((n, 1), -1.0),
        "tokens": [torch.full((length_of(i),), i, dtype=torch.int32) for i in numbers.tolist()],
        "text": [f"row {i}" for i in numbers.tolist()],
        "next": {
            "tokens": [torch.full((length_of(i + 1),), i + 1, dtype=torch.int32) for i in numbers.tolist()],
            "reached": numbers.float().unsqueeze(1) + 1,
            "reward": torch.ones(n),
            "done": numbers % EPISODE == EPISODE - 1,
        },
    }


def made(sampler, capacity=64, layout="list", folder=None, batch_size=16, **given):
    ragged = {
        "tokens": Ragged(torch.int32, max_length=8),
        "text": Ragged("utf-8", max_length=20),
        ("next", "tokens"): Ragged(torch.int32, max_length=8),
    }
    more = {"ragged": ragged, "layout": layout, "ragged_bytes": 1 << 16}
    storage = (
        LazyTensorStorage(capacity, **more)
        if folder is None
        else LazyMemmapStorage(capacity, scratch_dir=folder, **more)
    )
    return ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size, **given)


def check(batch, next_of=lambda number: number + 1):
    """That the items of each row are those of its step, and of the next one that is ``next_of`` it. The numbers."""
    numbers = batch["number"].tolist()
    assert [it.tolist() for it in batch["tokens"]] == [[i] * length_of(i) for i in numbers]
    assert batch["text"] == [f"row {i}" for i in numbers]
    following = [next_of(i) for i in numbers]
    assert [it.tolist() for it in batch["next"]["tokens"]] == [[i] * length_of(i) for i in following]
    return numbers


INNER = {
    "uniform": RandomSampler,
    "priority": lambda: PrioritizedSampler(alpha=1.0, beta=1.0),
    "epoch": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
}


# ---- several steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["RAM", "directory"])
@pytest.mark.parametrize("inner", INNER)
def test_returns_of_several_steps_have_the_items_of_their_last_step(tmp_path, inner, place):
    """The ring goes round in the middle of an episode: steps are read across its end."""
    torch.manual_seed(1)
    folder = tmp_path / "rows" if place == "directory" else None
    keys = {} if inner == "slices" else {"traj_key": "episode"}
    rb = made(NStep(INNER[inner](), 3, 0.5, **keys), capacity=40, folder=folder)
    total, seen = 57, set()
    for first in range(0, total, 19):
        rb.extend(rows(first, 19))

    def steps_of(number):
        return next(k for k in (1, 2, 3) if k == 3 or is_last(number + k - 1, total))

    for _ in range(12):
        batch = rb.sample()
        numbers = check(batch, lambda number: number + steps_of(number))
        steps = [steps_of(number) for number in numbers]
        assert batch["steps_to_next_obs"].flatten().tolist() == steps
        assert batch["next"]["reward"].tolist() == [sum(0.5**k for k in range(n)) for n in steps]
        assert batch["next"]["reached"].flatten().tolist() == [i + n for i, n in zip(numbers, steps, strict=True)]
        seen.update(numbers)
    assert seen <= set(range(total - 40, total))
    assert len(seen) > 30


@pytest.mark.parametrize(("call", "more"), [("read", 7), ("tickets_of", 12)])
def test_a_row_that_is_written_over_before_its_last_step_is_read_is_drawn_again(call, more):
    rb = made(NStep(RandomSampler(), 3, 0.5, traj_key="episode"), capacity=12, batch_size=12)
    rb.extend(rows(0, 12))
    check(rb.sample(), lambda number: min(number + 3, number // EPISODE * EPISODE + EPISODE))
    memory, written = rb.storage.memory, []
    inner = getattr(memory, call)

    def overtaken(which_rows, **given):
        if not written:  # between the read of the rows and that of their items, or of the items of later rows
            written.append(rb.extend(rows(12, more)))
        return inner(which_rows, **given)

    setattr(memory, call, overtaken)
    torch.manual_seed(3)
    numbers = check(rb.sample(), lambda number: min(number + 3, number // EPISODE * EPISODE + EPISODE, 12 + more))
    assert written
    assert set(numbers) <= set(range(more, 12 + more))


@pytest.mark.parametrize("inner", INNER)
def test_stacks_and_returns_to_the_end_leave_items_as_they_are(inner):
    torch.manual_seed(2)
    keys = {} if inner == "slices" else {"traj_key": "episode"}
    rb = made(RewardToGo(FrameStack(INNER[inner](), 3, None, ["frame"], **keys), 1.0, **keys))
    rb.extend(rows(0, 48))
    for _ in range(4):
        batch = rb.sample()
        numbers = check(batch)
        stacks = [[max(i - back, i // EPISODE * EPISODE) for back in (2, 1, 0)] for i in numbers]
        assert batch["frame"][:, :, 0].tolist() == stacks
        assert batch["reward_to_go"].tolist() == [EPISODE - i % EPISODE for i in numbers]


def test_next_observations_of_following_rows_stand_beside_items():
    torch.manual_seed(4)
    finals = FinalObservations(["frame"])
    rb = made(NextFromFollowing(RandomSampler(), finals), transform=finals)
    given = rows(0, 48)
    given["next"]["frame"] = given["next"]["reached"]
    rb.extend(given)
    for _ in range(6):
        batch = rb.sample()
        numbers = check(batch)
        assert batch["next"]["frame"].flatten().tolist() == [i + 1 for i in numbers]


@pytest.mark.parametrize("inner", ["uniform", "slices"])
def test_goals_in_hindsight_stand_beside_items_and_rewards_see_them(inner):
    torch.manual_seed(5)
    asked = []

    def reward(batch):
        asked.append(check(batch))
        return (batch["next"]["reached"] == batch["goal"])[:, 0].float()

    keys = {} if inner == "slices" else {"traj_key": "episode"}
    sampler = Hindsight(
        INNER[inner](), reward, goal_key="goal", achieved_goal_key=("next", "reached"), her_ratio=0.5, **keys
    )
    rb = made(sampler)
    rb.extend(rows(0, 48))
    for _ in range(4):
        batch = rb.sample()
        numbers = check(batch)
        assert asked[-1] == numbers[:8]
        goals = batch["goal"].flatten().tolist()
        assert goals[8:] == [-1.0] * 8
        assert all(i // EPISODE == (goal - 1) // EPISODE for i, goal in zip(numbers[:8], goals, strict=False))
        assert batch["next"]["reward"].tolist()[:8] == [float(goals[k] == numbers[k] + 1) for k in range(8)]


# ---- windows and units -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["list", "jagged"])
def test_flat_windows_have_the_items_of_each_step(layout):
    torch.manual_seed(6)
    spec = WindowSpec(length=3, burn_in=1, padding=0, period=1)
    rb = made(SliceSampler(window=spec, flat=True, traj_key="episode"), layout=layout)
    rb.extend(rows(0, 48))
    for _ in range(4):
        batch = rb.sample()
        if layout == "jagged":
            batch["tokens"], batch["next"]["tokens"] = batch["tokens"].unbind(), batch["next"]["tokens"].unbind()
        numbers = torch.tensor(check(batch)).reshape(-1, 4)
        assert bool((numbers.diff(dim=1) == 1).all())


def test_sequences_have_the_items_of_each_step_also_when_a_window_moves_meanwhile():
    torch.manual_seed(7)
    unit = Sequence(length=3, traj_key="episode", done_key=None)
    rb = made(RandomSampler(), capacity=12, sample_unit=unit, batch_size=12)
    rb.extend(rows(0, 12))
    check(rb.sample())
    memory, read, written = rb.storage.memory, rb.storage.memory.read, []

    def overtaken(which_rows, **given):
        if not written:
            written.append(rb.extend(rows(12, 7)))
        return read(which_rows, **given)

    memory.read = overtaken
    numbers = check(rb.sample())
    assert written
    assert set(numbers) <= set(range(7, 19))


def test_times_are_found_beside_items_of_the_drawn_row():
    torch.manual_seed(8)
    rb = made(RandomSampler(), sample_unit=Window(deltas={"frame": [-1.0, 0.0]}, time_key="time", traj_key="episode"))
    given = rows(0, 48)
    rb.extend({**given, "time": given["number"].double()})
    batch = rb.sample()
    numbers = check(batch)
    assert batch["frame"][:, 1, 0].tolist() == numbers
    assert batch["frame"][:, 0, 0].tolist() == [max(i - 1, i // EPISODE * EPISODE) for i in numbers]


# ---- what makes no sense ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: FrameStack(RandomSampler(), 3, None, ["tokens"], traj_key="episode"),
        lambda: NStep(RandomSampler(), 3, 0.9, reward_key="tokens", traj_key="episode"),
        lambda: RewardToGo(RandomSampler(), 0.9, reward_key=("next", "tokens"), traj_key="episode"),
        lambda: NextFromFollowing(RandomSampler(), ["text"], traj_key="episode"),
        lambda: Hindsight(
            RandomSampler(), lambda it: it, goal_key="tokens", achieved_goal_key=("next", "tokens"), traj_key="episode"
        ),
    ],
    ids=["stack", "reward", "return", "following", "goals"],
)
def test_a_ragged_field_that_would_be_changed_is_refused_by_name(sampler):
    rb = made(sampler())
    rb.extend(rows(0, 12))
    with pytest.raises(TypeError, match=r"sample: \w+: field .*(tokens|text).*expected rows of one size.*Name another"):
        rb.sample()
    rb.set_sampler(RandomSampler())
    check(rb.sample())


def test_times_of_ragged_fields_and_windows_of_two_dimensions_are_refused():
    rb = made(RandomSampler(), sample_unit=Window(deltas={"tokens": [0.0]}, time_key="number", traj_key="episode"))
    rb.extend(rows(0, 12))
    with pytest.raises(
        KeyError, match=r"deltas: \['tokens'\]: expected a stored field, one of .*, of rows of one size"
    ):
        rb.sample()
    spec = WindowSpec(length=2, burn_in=0, padding=0, period=1)
    rb = made(NStep(SliceSampler(window=spec, flat=False, traj_key="episode"), 2, 0.9))
    rb.extend(rows(0, 12))
    with pytest.raises(RuntimeError, match=r"expected one batch dimension of rows with ragged fields.*flat windows"):
        rb.sample()
