"""Claim: a step of an ordinary training loop is written faster than by any other buffer.

Measured: what such a loop does once per step, with NumPy arrays and Python's numbers in a dict: an observation and the next
one, 4 float32 each, an action, a reward and a done flag. One environment: ``add``, and an appender; a vector of 1 and of 8:
``extend`` without lanes, with a lane per row named by an array, and with ``lane="each"``. The ring is full before the clock
starts, and every call writes other rows than the one before. cpprb's ``add`` gets the same fields by keyword, Stable-Baselines3's
``add`` by position, with the ``infos`` that it asks for. TorchRL gets a TensorDict that is made of the arrays, as it takes no
dicts of them. One thread.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

WRITE = Effort(calls=200, blocks=60)
ROWS, STEPS = 20_000, 512


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """One environment, then vectors."""
    effort = WRITE.scaled(share)
    for what in ("add", "appender"):
        timing = alternate(list(_one(libraries, what)), effort)
        row = "add a step of one environment · NumPy dict" + (" · appender" if what == "appender" else "")
        yield timed(f"everyday/{what}", row, timing, times=("TorchRL", "cpprb", "SB3"))
    for n in (1, 8):
        for lane in ("", "array", "each"):
            timing = alternate(list(_vector(libraries, n, lane)), effort)
            row = f"extend by a step of {n} environments · NumPy dict" + (f" · lane: {lane}" if lane else "")
            yield timed(f"everyday/extend-{n}{lane and '-' + lane}", row, timing, times=("TorchRL", "cpprb", "SB3"))


def _steps(n: int) -> list[dict[str, Any]]:
    """Steps of a vector of ``n``."""
    random = np.random.default_rng(0)
    observations = random.standard_normal((STEPS + 1, n, 4)).astype(np.float32)
    return [
        {
            "obs": observations[t],
            "next_obs": observations[t + 1],
            "action": random.integers(0, 2, n),
            "reward": random.random(n).astype(np.float32),
            "done": random.random(n) < 0.05,
        }
        for t in range(STEPS)
    ]


def _single(step: dict[str, Any]) -> dict[str, Any]:
    """The same of one environment, as Gymnasium returns it: its reward and flags are Python's."""
    return {key: value[0] if value.ndim > 1 else value[0].item() for key, value in step.items()}


def _one(libraries: rivals.Libraries, what: str) -> Iterator[Side]:
    steps = _steps(1)
    if (library := libraries["engram"]).module is not None:
        rb = _buffer(library, 1)
        rb.extend(_many(steps))
        write = rb.add if what == "add" else _by_keyword(rb.appender(lane=0).add)
        yield Side("engram", _each(write, [_single(step) for step in steps]))
    if (library := libraries["TorchRL"]).module is not None:
        rb = _buffer(library, 1)
        yield Side(
            "TorchRL",
            _each(
                lambda step: rb.add(TensorDict({k: torch.as_tensor(v) for k, v in step.items()}, [])),
                [_single(s) for s in steps],
            ),
        )
    yield from _others(libraries, 1, steps)


def _vector(libraries: rivals.Libraries, n: int, lane: str) -> Iterator[Side]:
    steps = _steps(n)
    if (library := libraries["engram"]).module is not None:
        rb = _buffer(library, n if lane else 1)
        named = {"": 0, "array": np.arange(n), "each": "each"}[lane]
        rb.extend(steps[0], lane=named)
        yield Side(
            "engram", _each(lambda step: rb.extend(step, lane=named), steps) if lane else _each(rb.extend, steps)
        )
    if (library := libraries["TorchRL"]).module is not None:
        rl = _buffer(library, 1)
        yield Side(
            "TorchRL",
            _each(lambda step: rl.extend(TensorDict({k: torch.as_tensor(v) for k, v in step.items()}, [n])), steps),
        )
    yield from _others(libraries, n, steps)


def _others(libraries: rivals.Libraries, n: int, steps: list[dict[str, Any]]) -> Iterator[Side]:
    if libraries["cpprb"].module is not None:
        columns = [{k: v if v.ndim > 1 else v[:, None] for k, v in step.items()} for step in steps]
        replay = rivals.cpprb_buffer(libraries["cpprb"], columns[0], ROWS)
        yield Side("cpprb", _each(_by_keyword(replay.add), columns))
    if libraries["SB3"].module is not None:
        import gymnasium

        box, discrete = gymnasium.spaces.Box(-np.inf, np.inf, (4,)), gymnasium.spaces.Discrete(2)
        sb3 = libraries["SB3"].module.ReplayBuffer(ROWS, box, discrete, n_envs=n, handle_timeout_termination=False)
        infos: list[dict[str, Any]] = [{} for _ in range(n)]
        yield Side(
            "SB3", _each(lambda s: sb3.add(s["obs"], s["next_obs"], s["action"], s["reward"], s["done"], infos), steps)
        )


def _buffer(library: rivals.Library, lanes: int) -> Any:
    options = {"lanes": lanes} if lanes > 1 else {}
    storage = library.module.LazyTensorStorage(ROWS, **options)
    return library.module.ReplayBuffer(storage=storage, batch_size=32)


def _many(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.concatenate([step[key] for step in steps]) for key in steps[0]}


def _each(write: Callable[[Any], object], steps: list[Any]) -> Callable[[], object]:
    upcoming = cycle(steps).__next__
    return lambda: write(upcoming())


def _by_keyword(write: Callable[..., object]) -> Callable[[Any], object]:
    return lambda step: write(**step)
