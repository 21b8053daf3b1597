"""Windows and n-step returns over small rings that writers go round again and again: each is of one lap, and of one writer.

Every row says which step of its lane it is and which writer wrote it. A writer that is killed leaves a gap; the next one has
another number. So the rows of a window have one writer, and their steps follow one another.
"""

import itertools

import pytest
import torch
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    NoSampleable,
    NStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests import stress
from tests.fresh import start

pytestmark = [pytest.mark.stress, pytest.mark.timeout(stress.LIMIT_S)]

GAMMA = 0.5
N = 3
BATCH = 64 * N

# A writer extends all of its lanes at once, by one to three rows each; so most places of the rings are reserved and not yet
# written for most of the time. Where there is one lane for all writers, each extends it by some consecutive steps.
WRITER = """
import torch
from engram import ReplayBuffer
from tensordict import TensorDict
rb = ReplayBuffer.open(folder)
mine = torch.arange(lanes) if lanes < writers else torch.arange(place, lanes, writers)
step = 0
for turn in range(10**9):
    n = 1 + turn % 3 if lanes >= writers else ring // 3
    steps = torch.arange(step, step + n).repeat_interleave(len(mine))
    rows = TensorDict({
        "episode": torch.full((len(steps),), number),
        "words": steps[:, None].expand(-1, words).contiguous(),
        "next": {"reward": steps.double()[:, None], "step": steps + 1},
    }, [len(steps)])
    rb.extend(rows, lane=mine.repeat(n))
    step += n
"""


def check_windows(batch):
    """How many windows there are, and how many are wrong."""
    episodes, words = batch["episode"].reshape(-1, N), batch["words"].reshape(-1, N, batch["words"].shape[-1])
    steps = words[..., 0]
    torn = (words != steps[..., None]).any(2).any(1)
    wrong = torn | (episodes != episodes[:, :1]).any(1) | (steps.diff(dim=1) != 1).any(1)
    return len(wrong), int(wrong.sum())


def check_returns(batch):
    """The same of rows with returns of up to N steps."""
    first, n = batch["words"][:, 0], batch["steps_to_next_obs"].reshape(-1)
    ahead = torch.arange(N)
    rewards = torch.where(ahead < n[:, None], GAMMA**ahead * (first[:, None] + ahead).double(), 0.0).sum(1)
    wrong = ((batch["next"]["reward"].reshape(-1) - rewards).abs() > 1e-6) | (batch["next"]["step"] != first + n)
    return len(wrong), int(wrong.sum())


SAMPLERS = {
    "windows": (lambda rows: SliceSampler(slice_len=N, traj_key="episode"), check_windows),
    "prioritized windows": (
        lambda rows: PrioritizedSliceSampler(rows, 0.7, 0.5, slice_len=N, traj_key="episode"),
        check_windows,
    ),
    "n-step": (lambda rows: NStep(RandomSampler(), N, GAMMA, traj_key="episode"), check_returns),
    "prioritized n-step": (
        lambda rows: NStep(PrioritizedSampler(rows, 0.7, 0.5), N, GAMMA, traj_key="episode"),
        check_returns,
    ),
}
#: lanes, steps of each, writers, int64 words of a row
SHAPES = [(16, 8, 1, 1000), (64, 32, 1, 1000), (16, 16, 2, 3500), (1, 128, 2, 500), (8, 24, 3, 1)]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("lanes", "ring", "writers", "words"), SHAPES)
def test_rows_of_two_laps_are_never_mixed(name, lanes, ring, writers, words, ram):
    make, check = SAMPLERS[name]
    storage = LazyMemmapStorage(lanes * ring, scratch_dir=ram / "store", lanes=lanes)
    rb = TensorDictReplayBuffer(storage=storage, sampler=make(lanes * ring), batch_size=BATCH)
    first = torch.arange(lanes)
    row = {"episode": torch.zeros(lanes, dtype=torch.int64), "words": torch.zeros(lanes, words, dtype=torch.int64)}
    row["next"] = {"reward": torch.zeros(lanes, 1, dtype=torch.float64), "step": torch.ones(lanes, dtype=torch.int64)}
    rb.extend(TensorDict(row, [lanes]), lane=first)
    numbers = itertools.count(1)

    def begin(place):
        names = {"folder": str(ram / "store"), "lanes": lanes, "ring": ring, "writers": writers, "words": words}
        return start(WRITER, **names, place=place, number=next(numbers))

    programs = [begin(place) for place in range(writers)]
    chance = stress.chance(name, lanes, ring)
    wanted, laps = stress.size((6_000, 5), (500_000, 200))
    seen = wrong = 0
    try:
        while seen < wanted or rb.write_count < laps * lanes * ring:
            for program in programs:
                assert program.poll() is None, program.err
            for _ in range(20):
                try:
                    count, bad = check(rb.sample())
                except NoSampleable:  # a killed writer's rows may be all there is for a moment
                    continue
                seen, wrong = seen + count, wrong + bad
            if writers > 1 and chance.random() < 0.2:
                place = chance.randrange(writers)
                programs[place].kill()
                programs[place] = begin(place)
    finally:
        for program in programs:
            program.kill()
        rb.close()
    assert wrong == 0, f"{wrong} of {seen}"
