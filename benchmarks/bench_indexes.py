"""Claim: drawing by priority and by trajectory costs the batch, not the buffer, and many times less than elsewhere.

Measured: 100,000 rows of an environment-like TensorDict (obs [17], action [6], reward [1], next obs [17], done [1],
episode id; episodes of 200 steps), in RAM, one thread.

Prioritized: batches of 256, priorities uniform in [0, 1), alpha 0.6, beta 0.4; updates of 256 rows. cpprb and rlox
hold the same fields as NumPy arrays, without the episode. rlox cannot add batches, so it is filled row by row,
outside the clock. TorchRL's prioritized samplers need its extension; where that does not load, their cells are
empty.

Slices: 8 windows of 32 steps; "while written" adds one row before every sample.

Returns of 3 steps: engram sums them when it samples, TorchRL when rows are written; both sample 256.

Then the same at growing numbers of rows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

DRAW = Effort(calls=50, blocks=60)

ROWS, EPISODE, BATCH, SLICES = 100_000, 200, 256, 8
ALPHA, BETA = 0.6, 0.4
NO_EXTENSION = "TorchRL: its prioritized samplers need its C++ extension, which did not load."
NO_SLICES = "cpprb: no slices of trajectories."
TREE_ROWS = (10**4, 10**5, 10**6, 10**7, 10**8)
SLICE_ROWS = (10**4, 10**5, 10**6, 10**7)
GROUPED, GROUPS = 10**6, 32
GROUP_DRAW = Effort(calls=4, blocks=40)
GROUP_ROWS = (10**5, 10**6, 10**7)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Prioritized, uniform and slice sampling beside the rivals, then engram alone at growing sizes."""
    data = steps(ROWS)
    yield from _prioritized(libraries, data, share)
    yield _uniform(libraries, data, share)
    yield _without_replacement(libraries, data, share)
    yield from _slices(libraries, data, share)
    yield _best(libraries, data, share)
    yield from _groups(libraries, share)
    yield _query(libraries, share)
    if libraries["engram"].module is not None:
        yield _returns(libraries, data, share)
        yield from _scaling(libraries["engram"].module, share)


def steps(rows: int) -> TensorDict:
    number = torch.arange(rows)
    obs = torch.randn(rows, 17)
    obs[:, 0] = number % 2**24
    done = (number % EPISODE == EPISODE - 1).unsqueeze(1)
    return TensorDict(
        {
            "obs": obs,
            "action": torch.randn(rows, 6),
            "next": {"reward": torch.rand(rows, 1), "obs": torch.randn(rows, 17), "done": done},
            "episode": number // EPISODE,
        },
        batch_size=[rows],
    )


def _arrays(data: TensorDict) -> dict[str, np.ndarray]:
    following = data["next"]
    fields = {"obs": data["obs"], "act": data["action"], "rew": following["reward"], "next_obs": following["obs"]}
    return {key: value.numpy() for key, value in {**fields, "done": following["done"].float()}.items()}


def _buffer(
    library: rivals.Library, data: TensorDict, sampler: Any, batch_size: int = BATCH, writer: Any = None
) -> Any:
    module = library.module
    replay = module.TensorDictReplayBuffer(
        storage=module.LazyTensorStorage(len(data)),
        sampler=sampler,
        batch_size=batch_size,
        **({} if writer is None else {"writer": writer}),
    )
    replay.extend(data)
    return replay


def _torch_likes(libraries: rivals.Libraries) -> list[rivals.Library]:
    return [libraries[name] for name in rivals.TORCH_LIKE if libraries[name].module is not None]


# ---- by priority -----------------------------------------------------------------------------------------------------


def _prioritized(libraries: rivals.Libraries, data: TensorDict, share: float) -> Iterator[Row]:
    priority = torch.rand(ROWS)
    rows, fresh = torch.randint(ROWS, (BATCH,)), torch.rand(BATCH)
    sample: dict[str, Callable[[], Any]] = {}
    update: dict[str, Callable[[], Any]] = {}
    notes = {}
    for library in _torch_likes(libraries):
        try:
            replay = _buffer(library, data, library.module.PrioritizedSampler(ROWS, ALPHA, BETA))
            replay.update_priority(torch.arange(ROWS), priority)
            replay.sample()
        except (ImportError, NameError, RuntimeError, AttributeError):
            notes[library.name] = NO_EXTENSION
            continue
        sample[library.name] = replay.sample
        update[library.name] = partial(replay.update_priority, rows, fresh)
    if libraries["cpprb"].module is not None:
        arrays = _arrays(data)
        schema = {key: {"shape": value.shape[1:]} for key, value in arrays.items()}
        cpprb = libraries["cpprb"].module.PrioritizedReplayBuffer(ROWS, schema, alpha=ALPHA)
        cpprb.add(**arrays)
        cpprb.update_priorities(np.arange(ROWS), priority.numpy())
        sample["cpprb"] = partial(cpprb.sample, BATCH, beta=BETA)
        update["cpprb"] = partial(cpprb.update_priorities, rows.numpy(), fresh.numpy())
    if libraries["rlox"].module is not None:
        rlox = _rlox(libraries["rlox"].module.PrioritizedReplayBuffer(ROWS, 17, 6, ALPHA, BETA), data, priority)
        sample["rlox"] = _seeded(rlox.sample)
        update["rlox"] = partial(rlox.update_priorities, rows.numpy().astype(np.uint64), fresh.double().numpy())
    effort = DRAW.scaled(share)

    def row(key: str, what: str, calls: dict[str, Callable[[], Any]]) -> Row:
        timing = alternate([Side(name, call) for name, call in calls.items()], effort)
        return timed(f"prioritized/{key}", what, timing, times=("TorchRL", "cpprb", "rlox"), notes=notes)

    yield row("sample", "sample 256 · prioritized", sample)
    yield row("update", "update 256 priorities", update)
    both = {name: _one_after_the_other(sample[name], update[name]) for name in sample}
    yield row("both", "sample and update 256 · prioritized", both)


def _one_after_the_other(*calls: Callable[[], Any]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def _seeded(sample: Callable[[int, int], Any]) -> Callable[[], Any]:
    """rlox wants a seed for every batch; the same one would draw the same rows."""
    seeds = iter(range(1, 1 << 62))
    return lambda: sample(BATCH, next(seeds))


def _rlox(buffer: Any, data: TensorDict, priority: torch.Tensor | None = None) -> Any:
    arrays = _arrays(data)
    for i in range(len(data)):
        obs, following = arrays["obs"][i], arrays["next_obs"][i]
        ended = bool(arrays["done"][i, 0])
        more = {} if priority is None else {"priority": float(priority[i])}
        buffer.push(obs, arrays["act"][i], float(arrays["rew"][i, 0]), ended, False, following, **more)
    return buffer


def _uniform(libraries: rivals.Libraries, data: TensorDict, share: float) -> Row:
    calls = {
        library.name: _buffer(library, data, library.module.RandomSampler()).sample
        for library in _torch_likes(libraries)
    }
    if libraries["cpprb"].module is not None:
        arrays = _arrays(data)
        replay = rivals.cpprb_buffer(libraries["cpprb"], arrays, ROWS)
        replay.add(**arrays)
        calls["cpprb"] = partial(replay.sample, BATCH)
    if libraries["rlox"].module is not None:
        calls["rlox"] = _seeded(_rlox(libraries["rlox"].module.ReplayBuffer(ROWS, 17, 6), data).sample)
    timing = alternate([Side(name, call) for name, call in calls.items()], DRAW.scaled(share))
    return timed("indexes/uniform", "sample 256 · uniform", timing, times=("TorchRL", "cpprb", "rlox"))


def _without_replacement(libraries: rivals.Libraries, data: TensorDict, share: float) -> Row:
    calls = {
        library.name: _buffer(library, data, library.module.SamplerWithoutReplacement()).sample
        for library in _torch_likes(libraries)
    }
    timing = alternate([Side(name, call) for name, call in calls.items()], DRAW.scaled(share))
    return timed("indexes/without-replacement", "sample 256 · without replacement", timing, times=("TorchRL",))


# ---- by trajectory ---------------------------------------------------------------------------------------------------


def _slices(libraries: rivals.Libraries, data: TensorDict, share: float) -> Iterator[Row]:
    kinds: dict[str, tuple[str, dict[str, Any], bool]] = {
        "by-end": ("by end key, uncached", {"end_key": ("next", "done")}, False),
        "by-id": ("by id, cached", {"traj_key": "episode", "cache_values": True}, False),
        "written": ("by id, while written", {"traj_key": "episode", "cache_values": True}, True),
    }
    step = data[0].clone()
    for key, (what, arguments, writes) in kinds.items():
        sides = []
        for library in _torch_likes(libraries):
            sampler = library.module.SliceSampler(num_slices=SLICES, **arguments)
            replay = _buffer(library, data, sampler)
            call = _one_after_the_other(partial(replay.add, step), replay.sample) if writes else replay.sample
            sides.append(Side(library.name, call))
        timing = alternate(sides, DRAW.scaled(share))
        notes = {"cpprb": NO_SLICES}
        yield timed(f"slices/{key}", f"slices 8 x 32 · {what}", timing, times=("TorchRL",), notes=notes)


def _best(libraries: rivals.Libraries, data: TensorDict, share: float) -> Row:
    sides = []
    pieces = [steps(64) for _ in range(50)]
    for library in _torch_likes(libraries):
        replay = _buffer(
            library, data, library.module.RandomSampler(), writer=library.module.TensorDictMaxValueWriter()
        )
        sides.append(Side(library.name, _cycled(replay.extend, pieces)))
    timing = alternate(sides, DRAW.scaled(share))
    return timed("indexes/max-value", "extend 64 · the best 100,000 rows", timing, times=("TorchRL",))


# ---- by group --------------------------------------------------------------------------------------------------------


def _groups(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches of 32 groups; TorchRL finds the groups of all rows before the clock runs, and again after each write."""
    data = grouped(GROUPED)
    for strategy in ("random", "recency", "reward", "variance"):
        sides = []
        for library in _torch_likes(libraries):
            sampler = library.module.PromptGroupSampler if library.name == "engram" else _torchrl_groups()
            sides.append(
                Side(library.name, _buffer(library, data, sampler(num_groups=GROUPS, strategy=strategy)).sample)
            )
        timing = alternate(sides, GROUP_DRAW.scaled(share))
        yield timed(f"groups/{strategy}", f"sample {GROUPS} x 8 · groups, {strategy}", timing, times=("TorchRL",))


def grouped(rows: int) -> TensorDict:
    """16 rows of each key, one after another."""
    keys = torch.randperm(rows // 16, generator=torch.Generator().manual_seed(0)).repeat_interleave(16)
    fields = {"query": keys, "obs": torch.rand(rows, 8), "next": {"reward": torch.rand(rows, 1)}}
    return TensorDict(fields, batch_size=[rows])


def _query(libraries: rivals.Libraries, share: float) -> Row:
    """Of 10,000 episodes of 50 steps those with a large sum of rewards, about one in six."""
    number = torch.arange(500_000)
    following = {"obs": torch.rand(500_000, 8), "reward": torch.rand(500_000, 1)}
    fields = {"obs": torch.rand(500_000, 8), "episode": number // 50, "next": following}
    data = TensorDict(fields, batch_size=[500_000])
    sides = []
    for library in _torch_likes(libraries):
        replay = _buffer(library, data, library.module.RandomSampler())
        sides.append(Side(library.name, partial(replay.query, library.module.traj.reward.sum() > 27)))
    timing = alternate(sides, Effort(calls=1, blocks=10).scaled(share))
    return timed("query/reward-sum", "query 10,000 episodes · sum of rewards", timing, times=("TorchRL",))


def _torchrl_groups() -> Any:
    from torchrl.data.replay_buffers.samplers import PromptGroupSampler

    return PromptGroupSampler


def _returns(libraries: rivals.Libraries, data: TensorDict, share: float) -> Row:
    """TorchRL has nothing to sum here: it is timed for what a user waits for when sampling, not for its writes."""
    engram = libraries["engram"]
    made = {
        "engram": _buffer(engram, data, engram.module.NStep(engram.module.RandomSampler(), 3, 0.99)),
        "plain sample": _buffer(engram, data, engram.module.RandomSampler()),
    }
    batch = made["engram"].sample()
    left = EPISODE - batch["obs"][:, 0].long() % EPISODE  # obs[0] is the row's number
    if not bool((batch["steps_to_next_obs"].flatten() == left.clamp(max=3)).all()):
        raise RuntimeError("NStep: returns of other steps than expected")
    if libraries["TorchRL"].module is not None:
        made["TorchRL"] = _buffer(libraries["TorchRL"], data, libraries["TorchRL"].module.RandomSampler())
    timing = alternate([Side(name, replay.sample) for name, replay in made.items()], DRAW.scaled(share))
    notes = {
        "TorchRL": "TorchRL: a plain sample, of returns that were summed when written.",
        "cpprb": "cpprb: not measured.",
    }
    what = "sample 256 · returns of 3 steps"
    return timed("indexes/n-step", what, timing, times=("TorchRL",), share=("plain sample",), notes=notes)


def _cycled(call: Callable[[Any], Any], arguments: list[Any]) -> Callable[[], Any]:
    state = {"next": 0}

    def one() -> Any:
        state["next"] = (state["next"] + 1) % len(arguments)
        return call(arguments[state["next"]])

    return one


# ---- with the number of rows -----------------------------------------------------------------------------------------


def _scaling(engram: Any, share: float) -> Iterator[Row]:
    """Sides are sizes: they take turns as libraries do."""
    from engram.store.priorities import PriorityConfig, PriorityIndex

    generator = torch.Generator().manual_seed(1)
    sides = []
    for rows in TREE_ROWS:
        index = PriorityIndex.of_no_store(rows, PriorityConfig(ALPHA, BETA, 1e-8, False))
        index.core.written(torch.arange(rows))

        def turn(index: PriorityIndex = index, rows: int = rows) -> None:
            which = torch.randint(rows, (BATCH,), generator=generator)
            index.update(which, torch.rand(BATCH, generator=generator), None)
            index.draw(int(which[0]), BATCH)

        sides.append(Side(f"{rows:.0e} rows", turn))
    timing = alternate(sides, DRAW.scaled(share))
    what = "256 updates and 256 draws of the tree alone"
    yield timed("scaling/tree", what, timing, ours="1e+08 rows", share=[side.name for side in sides[:-1]])
    sides = []
    for rows in SLICE_ROWS:
        replay = engram.TensorDictReplayBuffer(
            storage=engram.LazyTensorStorage(rows),
            sampler=engram.SliceSampler(num_slices=SLICES, traj_key="episode"),
            batch_size=BATCH,
        )
        number = torch.arange(rows)
        replay.extend(TensorDict({"obs": number.float().unsqueeze(1), "episode": number // EPISODE}, batch_size=[rows]))
        sides.append(Side(f"{rows:.0e} rows", replay.sample))
    timing = alternate(sides, DRAW.scaled(share))
    yield timed("scaling/slices", "slices 8 x 32", timing, ours="1e+07 rows", share=[side.name for side in sides[:-1]])
    sides = []
    for rows in GROUP_ROWS:
        replay = engram.TensorDictReplayBuffer(
            storage=engram.LazyTensorStorage(rows),
            sampler=engram.PromptGroupSampler(num_groups=GROUPS),
            batch_size=BATCH,
        )
        replay.extend(grouped(rows))
        sides.append(Side(f"{rows:.0e} rows", replay.sample))
    timing = alternate(sides, DRAW.scaled(share))
    yield timed("scaling/groups", "groups 32 x 8", timing, ours="1e+07 rows", share=[side.name for side in sides[:-1]])
