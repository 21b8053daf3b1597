"""Rows that lie on the GPU: calls on a storage there, the same in a CUDA graph, and its mirror on the disk."""

import time
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.gpu import Bench, Call
from benchmarks.gpu_host import Learner, check_steps, filled, steps

#: Microseconds of a call, and of its replay.
CALL_US = {"uniform": (40, 10), "cycle": (70, 30), "extend": (90, 20)}
#: How much slower a mirror may make a learner, and how far it may trail behind, in seconds.
MIRROR_SHARE, MIRROR_LAG_S = 0.97, 2.0
#: Bytes of a mirrored row.
ROW_BYTES = 500


def _appending(bench: Bench, module: Any, storage: Any) -> dict[str, Call]:
    """Calls on a storage of a library that is drawn from uniformly."""
    rb, appended = filled(bench, module, "uniform", storage=storage), steps(bench.sizes.appended).to(bench.gpu.device)
    return {"uniform": rb.sample, "extend": lambda: rb.extend(appended)}


def _cycle(bench: Bench, module: Any, storage: Any, *, generations: bool) -> Call:
    """A draw by priority and its update."""
    rb = filled(bench, module, "prioritized", storage=storage)
    errors = torch.rand(bench.sizes.batch, device=bench.gpu.device) + 0.1

    def cycle() -> object:
        batch = rb.sample()
        late = {"generation": batch["index_generation"]} if generations else {}
        rb.update_priority(batch["index"], errors, **late)
        return batch

    return cycle


def _plain(bench: Bench) -> dict[str, Call]:
    """Without a library: tensors on the device, an index, and a position."""
    sizes, device = bench.sizes, bench.gpu.device
    columns = {name: column.to(device) for name, column in steps(sizes.rows).items()}
    appended, at = dict(steps(sizes.appended).to(device).items()), [0]

    def sample() -> object:
        index = torch.randint(sizes.rows, (sizes.batch,), device=device)
        return {name: column[index] for name, column in columns.items()}

    def extend() -> None:
        first = at[0] if at[0] + sizes.appended <= sizes.rows else 0
        at[0] = first + sizes.appended
        for name, column in columns.items():
            column[first : at[0]] = appended[name]

    return {"uniform": sample, "extend": extend}


def calls(bench: Bench) -> None:
    """Uniform draws, cycles by priority and appends, as calls and in a graph; and how often the host waits in them."""
    gpu, sizes, engram = bench.gpu, bench.sizes, bench.engram
    ours = _appending(bench, engram, gpu.storage(sizes.rows))
    ours["cycle"] = _cycle(bench, engram, gpu.storage(sizes.rows), generations=True)
    plain = _plain(bench)

    def theirs(module: Any, name: str) -> Call:
        storage = module.LazyTensorStorage(sizes.rows, device=gpu.device)
        if name == "cycle":
            return _cycle(bench, module, storage, generations=False)
        return _appending(bench, module, storage)[name]

    for name, (eager, replayed) in CALL_US.items():
        call = ours[name]
        if name != "extend":
            check_steps(call(), sizes.rows, sizes.batch)
        sides = {"engram": call, "TorchRL": bench.beside(partial(theirs, name=name)), "plain": plain.get(name)}
        what = f"{name} {f'{sizes.appended:,} rows ' * (name == 'extend')}on the GPU, {sizes.rows:,} rows"
        bench.add_time(f"device/{name}", what, bench.race(sides, sizes.calls), "engram", eager)
        waits = gpu.waits(call, sizes.waits)
        bench.add(
            f"device/{name}/waits",
            f"{name} on the GPU: the host waits in {sizes.waits:,} calls",
            str(waits),
            "0",
            waits == 0,
        )
        graph = gpu.captured(call)
        bench.add_time(
            f"device/{name}/graph",
            f"{what}, in a graph",
            bench.race({"engram": graph}, sizes.calls),
            "engram",
            replayed,
        )


def mirror(bench: Bench) -> None:
    """How much a mirror slows a learner down whose rows are on the GPU, and how far it trails behind many rows."""
    _beside_a_learner(bench)
    _trailing(bench)


def _beside_a_learner(bench: Bench) -> None:
    gpu, sizes = bench.gpu, bench.sizes
    new = steps(64).to(gpu.device)
    buffers = {
        name: filled(bench, bench.engram, "uniform", storage=gpu.storage(sizes.rows, **kwargs))
        for name, kwargs in {"no mirror": {}, "mirror": {"mirror": str(bench.folder / "learner")}}.items()
    }

    def learning(rb: Any) -> Call:
        mine = Learner(gpu)

        def step() -> None:
            rb.extend(new)
            mine.learn(rb.sample())

        return step

    taken = bench.race({name: learning(rb) for name, rb in buffers.items()}, sizes.steps)
    what = "a small learner's speed, 64 new rows a step, with a mirror, of that without"
    bench.add_share("mirror/learner", what, taken, ("mirror", "no mirror"), MIRROR_SHARE)
    for rb in buffers.values():
        rb.close()


def _trailing(bench: Bench) -> None:
    """Rows are appended at a rate; the mirror says how far it is behind."""
    gpu, sizes = bench.gpu, bench.sizes
    width = ROW_BYTES - 8
    numbers = torch.arange(sizes.appended, device=gpu.device)
    part = TensorDict({"number": numbers, "bytes": numbers.to(torch.uint8)[:, None].repeat(1, width)}, [sizes.appended])
    rb = bench.engram.TensorDictReplayBuffer(
        storage=gpu.storage(sizes.rows, mirror=str(bench.folder / "trailing")), batch_size=sizes.batch
    )
    rb.extend(part)
    begin, count, lags = time.monotonic(), 0, []
    looked = begin
    while time.monotonic() - begin < sizes.seconds:
        rb.extend(part)
        count += sizes.appended
        if time.monotonic() - looked > 0.2:
            lags.append(rb.stats()["mirror_lag_s"])
            looked = time.monotonic()
        ahead = count / sizes.rate - (time.monotonic() - begin)
        if ahead > 0:
            time.sleep(ahead)
    rate, found = count / (time.monotonic() - begin), rb.stats()
    begin = time.monotonic()
    rb.storage.flush()
    rest = time.monotonic() - begin
    worst = max(lags, default=0.0)
    bench.add(
        "mirror/lag",
        f"a mirror trails behind {rate:,.0f} rows a second of {ROW_BYTES} bytes",
        f"{worst:.2f} s at most, {found['mirror_lost']:,.0f} rows lost, {rest:.2f} s to the end",
        f"≤ {MIRROR_LAG_S:g} s at {sizes.rate:,} rows a second",
        worst <= MIRROR_LAG_S and rate >= 0.95 * sizes.rate and not found["mirror_lost"],
        lags_s=[round(one, 3) for one in lags],
        rows_per_s=round(rate),
    )
    rb.close()
