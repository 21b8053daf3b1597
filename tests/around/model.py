"""Windows around rows, as a model finds them: a list of steps per lane, oldest first, and plain Python."""

from typing import NamedTuple

import torch
from tensordict import TensorDict

from engram import Sequence

#: What :func:`check` looks at.
UNIT = Sequence(4, burn_in=2, bootstrap=1)


class Step(NamedTuple):
    row: int
    done: bool


class Window(NamedTuple):
    rows: list
    valid: list


def steps_of(storage, lanes, length, writes):
    """The steps of each lane, oldest first, after these writes: ``(lane, done flags)`` in turn. Rows of a lane are a ring."""
    del storage
    found = [[] for _ in range(lanes)]
    for lane, flags in writes:
        for done in flags:
            number = found[lane][-1][0] + 1 if found[lane] else 0
            found[lane].append((number, done))
    return [[Step(lane * length + n % length, done) for n, done in steps[-length:]] for lane, steps in enumerate(found)]


def window(steps, at, unit):
    """The window around step ``at``."""
    start, stop = 0, len(steps) - 1
    if not (unit.done_key is None or unit.episode_boundary == "include_reset"):
        start = next((i + 1 for i in range(at - 1, -1, -1) if steps[i].done), 0)
        stop = next((i for i in range(at, len(steps)) if steps[i].done), stop)
    if unit.episode_boundary == "stop":
        missing = unit.dilation * (unit.length + unit.bootstrap - 1) - (stop - at)
        at -= min(max(missing, 0), at - start)
    places = [at + (k - unit.burn_in) * unit.dilation for k in range(unit.burn_in + unit.length + unit.bootstrap)]
    return Window(
        [steps[min(max(place, start), stop)].row for place in places], [start <= place <= stop for place in places]
    )


def rows_of(first, flags):
    """Rows whose ``step`` counts from ``first``."""
    n = len(flags)
    return TensorDict(
        {
            "step": torch.arange(first, first + n),
            "is_init": torch.zeros(n, 1, dtype=torch.bool),
            "next": {"done": torch.tensor(flags).reshape(n, 1)},
        },
        [n],
    )


def episodes(first, count, length, lane=0):
    """So many episodes, whose ids count from ``first``."""
    n = count * length
    number = torch.arange(n)
    return TensorDict(
        {
            "episode": 1000 * lane + first + number // length,
            "step": number % length,
            "big": torch.arange(first * length, first * length + n).unsqueeze(1).expand(n, 64).double(),
            "next": {"done": (number % length == length - 1).unsqueeze(1)},
        },
        [n],
    )


def check(batch, unit=UNIT):
    """Windows of whole rows, each of one episode, with steps in their order."""
    n = len(batch) // unit.total
    assert bool((batch["big"] == batch["big"][:, :1]).all())
    episode, step, valid = (batch[key].reshape(n, -1) for key in ("episode", "step", "validity_mask"))
    assert bool((episode == episode[:, :1]).all())
    assert bool(valid[:, unit.burn_in].all())
    anchor = step[:, unit.burn_in : unit.burn_in + 1]
    wanted = anchor + unit.dilation * (torch.arange(unit.total) - unit.burn_in)
    assert bool((step == wanted)[valid].all())
    first, last = (step + 1000 * ~valid).amin(1, keepdim=True), (step - 1000 * ~valid).amax(1, keepdim=True)
    assert bool((step == wanted.clamp(min=first, max=last)).all())
