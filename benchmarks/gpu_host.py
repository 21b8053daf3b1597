"""Rows in the host's memory, or on its disk, that a GPU learns from: small fields, frames, and a small learner."""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from benchmarks.gpu import Bench, Call, Gpu, forever

#: Microseconds of a batch of six small fields: from a loader, and in the user's graph.
SMALL_US = {"uniform": (45, 35), "prioritized": (70, 45)}
#: Shares: of one pinned copy, of the host's gather, of a learner without data.
OF_A_COPY, OF_THE_GATHER, OF_A_LEARNER = 0.8, 0.8, 0.93


def steps(n: int, first: int = 0) -> TensorDict:
    """Rows of six small fields; the first value of each is the row's number."""
    number = torch.arange(first, first + n)
    fields = {
        "obs": torch.randn(n, 17),
        "action": torch.randn(n, 6),
        "next_obs": torch.randn(n, 17),
        "reward": torch.randn(n, 1),
        "done": torch.zeros(n, 1, dtype=torch.bool),
        "number": torch.stack([number, number], 1).to(torch.int32),
    }
    return TensorDict(fields, [n])


def check_steps(batch: Any, rows: int, size: int) -> None:
    """Raises ``ValueError``: a batch is not of that many whole rows."""
    number = batch["number"].cpu()
    if number.shape != (size, 2) or not bool(((number[:, 0] == number[:, 1]) & (number[:, 0] < rows)).all()):
        raise ValueError(f"expected a batch of {size} whole rows, got {number.tolist()!r:.200}.")


def filled(bench: Bench, module: Any, how: str, cls: str = "TensorDictReplayBuffer", storage: Any = None) -> Any:
    """A buffer of small rows, of engram or TorchRL."""
    rows = bench.sizes.rows
    sampler = module.PrioritizedSampler(rows, alpha=0.6, beta=0.4) if how == "prioritized" else module.RandomSampler()
    rb = getattr(module, cls)(
        storage=module.LazyTensorStorage(rows) if storage is None else storage,
        sampler=sampler,
        batch_size=bench.sizes.batch,
    )
    for first in range(0, rows, max(rows // 10, 1)):
        part = steps(min(max(rows // 10, 1), rows - first), first)
        rb.extend(part if cls == "TensorDictReplayBuffer" else dict(part.items()))
    return rb


def small(bench: Bench) -> None:
    """Six small fields: iterated, with priorities flowing back, and in the user's graph; others beside."""
    for how in SMALL_US:
        _small(bench, how)


def _small(bench: Bench, how: str) -> None:
    engram, sizes, device = bench.engram, bench.sizes, bench.gpu.device
    errors = torch.rand(sizes.batch, device=device) + 0.1
    buffers = [
        filled(bench, engram, how, cls) for cls in ("TensorDictReplayBuffer", "ReplayBuffer", "TensorDictReplayBuffer")
    ]
    tensordicts, dicts = (engram.DeviceLoader(rb, device, return_info=rb is buffers[1]) for rb in buffers[:2])
    replay = engram.DeviceReplay(buffers[2], device, graphs=1)
    iterated, of_dicts = iter(tensordicts), iter(dicts)

    def cycle() -> object:
        batch = next(iterated)
        if how == "prioritized":
            tensordicts.update_priority(batch["index"], errors, generation=batch["index_generation"])
        return batch

    def cycle_of_dicts() -> object:
        batch, info = next(of_dicts)
        if how == "prioritized":
            dicts.update_priority(info["index"], errors, generation=info["index_generation"])
        return batch

    def in_a_graph() -> object:
        batch, info = replay.sample(return_info=True)
        if how == "prioritized":
            replay.update_priority(info["index"], errors, generation=info["index_generation"])
        return batch

    for call in (cycle, cycle_of_dicts, in_a_graph):
        check_steps(call(), sizes.rows, sizes.batch)
    sides: dict[str, Call | None] = {
        "engram": cycle,
        "as dicts": cycle_of_dicts,
        "sample().to": _to_device(filled(bench, engram, how), bench, how),
        "plain": _plain(bench) if how == "uniform" else None,
    }
    sides["TorchRL"] = bench.beside(lambda module: _to_device(filled(bench, module, how), bench, how))
    taken = bench.race(sides, sizes.calls)
    in_loader, in_graph = SMALL_US[how]
    cycle_of = "a cycle by priority" if how == "prioritized" else "a batch"
    way = f"{cycle_of} of six small fields, {tensordicts.transport}"
    bench.add_time(f"small/{how}", f"{way}, DeviceLoader", taken, "engram", in_loader)
    replayed = bench.gpu.captured(in_a_graph)
    bench.add_time(
        f"small/{how}/graph",
        f"{way}, in the user's graph",
        bench.race({"graph": replayed}, sizes.calls),
        "graph",
        in_graph,
    )
    bench.add(
        f"small/{how}/stats", "the same: what the loader counted", _counts(tensordicts), counted=tensordicts.stats()
    )
    replay.check()
    for opened in (tensordicts, dicts, replay):
        opened.close()


def _counts(loader: Any) -> str:
    found = loader.stats()
    said = [
        f"{name} {found[name]}" for name in ("redraws", "repeated", "missing", "dropped", "reason") if name in found
    ]
    return f"{found['transport']}: {found['batches']:,} batches, {', '.join(said)}"


def _to_device(rb: Any, bench: Bench, how: str) -> Call:
    """As a program has it that uses the buffer alone."""
    device = bench.gpu.device
    priority = torch.rand(bench.sizes.batch) + 0.1

    def sample() -> object:
        batch = rb.sample()
        there = batch.to(device)
        if how == "prioritized":
            rb.update_priority(batch["index"], priority)
        return there

    return sample


def _plain(bench: Bench) -> Call:
    """Without a library: tensors and an index."""
    rows, batch, gpu = bench.sizes.rows, bench.sizes.batch, bench.gpu
    columns = dict(steps(rows).items())

    def sample() -> object:
        index = torch.randint(rows, (batch,))
        return {name: gpu.pinned(column[index]).to(gpu.device, non_blocking=True) for name, column in columns.items()}

    return sample


# ---- frames ----------------------------------------------------------------------------------------------------------------


def _frames(bench: Bench, frames: int, **kwargs: Any) -> Any:
    """A buffer of frames, each of which is a number, modulo 251, in all bytes."""
    rb = bench.engram.TensorDictReplayBuffer(batch_size=bench.sizes.batch, **kwargs)
    for first in range(0, frames, 1_000):
        numbers = torch.arange(first, min(first + 1_000, frames))
        pixels = (
            (numbers % 251).to(torch.uint8).view(-1, *(1 for _ in bench.sizes.frame)).expand(-1, *bench.sizes.frame)
        )
        rb.extend(TensorDict({"pixels": pixels, "number": numbers}, [len(numbers)]))
    return rb


def _check_frames(batch: Any, frames: int) -> None:
    pixels, number = batch["pixels"].flatten(1).cpu(), batch["number"].cpu()
    if not bool(((number < frames) & (pixels == (number % 251)[:, None]).all(1)).all()):
        raise ValueError("expected whole frames, got others.")


def _bytes(bench: Bench) -> int:
    return bench.sizes.batch * (torch.Size(bench.sizes.frame).numel() + 8)


def _copy(bench: Bench) -> Call:
    """One copy of the bytes of a batch out of pinned memory."""
    source = bench.gpu.pinned(torch.zeros(_bytes(bench), dtype=torch.uint8))
    target = torch.empty(_bytes(bench), dtype=torch.uint8, device=bench.gpu.device)
    return lambda: target.copy_(source, non_blocking=True)


def direct(bench: Bench) -> None:
    """Frames in RAM and in shared memory, which the GPU reads by itself, against one pinned copy of the same bytes."""
    engram, sizes = bench.engram, bench.sizes
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "RAM": (sizes.frames, {}),
        "shared memory": (sizes.frames, {"shared": True}),
        **({"RAM, large": (sizes.large_frames, {})} if sizes.large_frames else {}),
    }
    for where, (frames, kwargs) in kinds.items():
        rb = _frames(bench, frames, storage=engram.LazyTensorStorage(frames), **kwargs)
        with engram.DeviceLoader(rb, bench.gpu.device) as loader:
            batches = iter(loader)
            _check_frames(next(batches), frames)
            sides: dict[str, Call | None] = {"copy": _copy(bench), "engram": forever(batches)}
            if where == "RAM":
                sides |= {
                    "sample().to": _to_device(
                        _frames(bench, frames, storage=engram.LazyTensorStorage(frames)), bench, "uniform"
                    )
                }
                sides |= {"TorchRL": bench.beside(partial(_torchrl_frames, bench, frames=frames))}
            taken = bench.race(sides, max(sizes.calls // 5, 1))
            size = frames * _bytes(bench) / sizes.batch / 1e9
            what = f"{sizes.batch} frames from {where} ({size:.1f} GB), {loader.transport}: speed of one pinned copy"
            least = None if "large" in where else OF_A_COPY
            bench.add_share(
                f"frames/{where.replace(', ', '-').replace(' ', '-')}", what, taken, ("engram", "copy"), least
            )
            if where == "RAM":
                bench.add_time("frames/time", "the same: time of a batch", taken, "engram", None)
        rb.close()


def _torchrl_frames(bench: Bench, module: Any, frames: int) -> Call:
    rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(frames), batch_size=bench.sizes.batch)
    rb.extend(TensorDict({"pixels": torch.zeros(frames, *bench.sizes.frame, dtype=torch.uint8)}, [frames]))
    return _to_device(rb, bench, "uniform")


def block(bench: Bench) -> None:
    """Frames in a directory, and with transforms on the host, which are copied in one block per batch."""
    engram, sizes = bench.engram, bench.sizes

    def flipped(batch: TensorDict) -> TensorDict:
        return batch.set("number", batch["number"] + 0)

    folders = count()

    def in_a_directory() -> Any:
        return engram.LazyMemmapStorage(sizes.frames, scratch_dir=bench.folder / f"frames{next(folders)}")

    kinds: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "a directory": (in_a_directory, {}),
        "host transforms": (lambda: engram.LazyTensorStorage(sizes.frames), {"transform": flipped}),
    }
    for where, (storage, kwargs) in kinds.items():
        rb = _frames(bench, sizes.frames, storage=storage(), **kwargs)
        pinning = _frames(bench, sizes.frames, storage=storage(), pin_memory=True, **kwargs)

        def sent(rb: Any = pinning) -> object:
            return rb.sample().to(bench.gpu.device, non_blocking=True)

        with engram.DeviceLoader(rb, bench.gpu.device) as loader:
            batches = iter(loader)
            _check_frames(next(batches), sizes.frames)
            next(batches)
            sides: dict[str, Call | None] = {"gather": rb.sample, "sample().to": sent, "engram": forever(batches)}
            taken = bench.race(sides, max(sizes.calls // 5, 1))
            key, what = where.rpartition(" ")[2], f"{sizes.batch} frames from {where}, {loader.transport}"
            threads = f"{engram._support.native.num_threads()} threads"  # noqa: SLF001 - no public call says so
            bench.add_share(
                f"block/{key}",
                f"{what}: speed of the gather on the host, {threads}",
                taken,
                ("engram", "gather"),
                OF_THE_GATHER,
            )
            bench.add_share(
                f"block/{key}/to", f"{what}: speed of sample().to(device)", taken, ("engram", "sample().to"), 1.0
            )
        rb.close()
        pinning.close()


# ---- a learner -------------------------------------------------------------------------------------------------------------


class Learner:
    """A small network and its step."""

    def __init__(self, gpu: Gpu) -> None:
        layers = nn.Linear(23, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        self.net = nn.Sequential(*layers).to(gpu.device)
        self.optimizer = gpu.adam(self.net.parameters())

    def learn(self, batch: Any) -> torch.Tensor:
        """A step; the error of each row."""
        with torch.no_grad():
            goal = batch["reward"] + 0.99 * self.net(torch.cat([batch["next_obs"], batch["action"]], 1))
        error = self.net(torch.cat([batch["obs"], batch["action"]], 1)) - goal
        self.optimizer.zero_grad(set_to_none=True)
        error.square().mean().backward()
        self.optimizer.step()
        return error.detach().abs().squeeze(1)


def _learning(bench: Bench, how: str, source: Any, draw: Callable[[], Any]) -> Call:
    """A step of a learner whose batches, with their info, come from ``draw``; priorities go back to the ``source``."""
    mine = Learner(bench.gpu)

    def step() -> None:
        batch, info = draw()
        errors = mine.learn(batch)
        if how == "prioritized":
            source.update_priority(info["index"], errors, generation=info["index_generation"])

    return step


def _drawing(bench: Bench, module: Any) -> Call:
    """A step of a learner that draws on the host."""
    mine, sample = Learner(bench.gpu), _to_device(filled(bench, module, "uniform"), bench, "uniform")
    return lambda: mine.learn(sample())


def learner(bench: Bench) -> None:
    """Steps per second of a small learner, as a share of its speed without data."""
    engram, gpu, device = bench.engram, bench.gpu, bench.gpu.device
    fixed = {name: value.to(device) for name, value in steps(bench.sizes.batch).items()}
    loaders = {
        how: engram.DeviceLoader(filled(bench, engram, how, "ReplayBuffer"), device, return_info=True)
        for how in SMALL_US
    }
    iterated = {how: _learning(bench, how, loader, forever(iter(loader))) for how, loader in loaders.items()}
    alone = Learner(gpu)
    sides: dict[str, Call | None] = {
        "no data": lambda: alone.learn(fixed),
        **iterated,
        "sample().to": _drawing(bench, engram),
    }
    sides["TorchRL"] = bench.beside(partial(_drawing, bench))
    taken = bench.race(sides, bench.sizes.steps)
    for how in [side for side in taken if side != "no data"]:
        least = OF_A_LEARNER if how in SMALL_US else None
        bench.add_share(
            f"learner/{how}", f"a small learner's speed, {how}, of that without data", taken, (how, "no data"), least
        )
    still = Learner(gpu)
    graphs: dict[str, Call | None] = {"no data": gpu.captured(lambda: still.learn(fixed))}
    replays = {
        how: engram.DeviceReplay(filled(bench, engram, how, "ReplayBuffer"), device, graphs=1) for how in SMALL_US
    }
    for how, replay in replays.items():
        graphs[how] = gpu.captured(_learning(bench, how, replay, partial(replay.sample, return_info=True)))
    taken = bench.race(graphs, bench.sizes.steps)
    for how in SMALL_US:
        bench.add_share(f"learner/{how}/graph", f"the same in one graph, {how}", taken, (how, "no data"), None)
    for one in (*loaders.values(), *replays.values()):
        one.close()


# ---- pinned batches, and a learner that waits ------------------------------------------------------------------------------


def _add_key(batch: TensorDict) -> TensorDict:
    return batch.set("more", batch["obs"] * 2)


#: Transforms on the host whose results are pinned as a whole.
TRANSFORMS: dict[str, Callable[[Any], Any] | None] = {
    "no transform": None,
    "a new TensorDict": lambda td: TensorDict({"x": td["obs"] * 2, "deep": {"y": td["obs"] + 1}}, td.batch_size),
    "a TensorDict on the CPU": lambda td: TensorDict({"x": td["obs"] * 2}, td.batch_size, device="cpu"),
    "entries are added": _add_key,
    "a dict within": lambda td: TensorDict({"d": {"a": td["obs"], "b": td["obs"].flip(0)}}, td.batch_size),
}


def pinned(bench: Bench) -> None:
    """What is pinned, for every kind of batch."""
    engram = bench.engram
    for name, transform in TRANSFORMS.items():
        rb = engram.TensorDictReplayBuffer(
            storage=engram.LazyTensorStorage(1_000), transform=transform, pin_memory=True
        )
        rb.extend(TensorDict({"obs": torch.randn(1_000, 16), "next": {"reward": torch.zeros(1_000, 1)}}, [1_000]))
        found = leaves(rb.sample(32, return_info=True))
        good = sum(leaf.is_pinned() for leaf in found)
        bench.add(f"pinned/{name}", f"pinned · {name}", f"{good} of {len(found)}", "all", good == len(found))


def leaves(data: Any) -> list[torch.Tensor]:
    """All tensors of a batch and its info."""
    if isinstance(data, torch.Tensor):
        return [data]
    values = data.values() if hasattr(data, "values") else data if isinstance(data, tuple) else ()
    return [leaf for value in values for leaf in leaves(value)]


#: Of a step of a learner that waits, in seconds.
STEP_S = 5e-3


def waiting(bench: Bench) -> None:
    """What part of a step of 5 ms the device stands still in ``next(loader)``: because the copy has not come, or the host was late."""
    sizes = bench.sizes
    sampler = bench.engram.PrioritizedSampler(sizes.frames, alpha=0.6, beta=0.4)
    rb = _frames(bench, sizes.frames, storage=bench.engram.LazyTensorStorage(sizes.frames), sampler=sampler)
    cycles = _cycles_of(bench.gpu, STEP_S)
    for transport, most in (("block", 0.01), (None, None)):  # what is read directly is read in the consumer's own time
        with bench.engram.DeviceLoader(rb, bench.gpu.device, transport=transport) as loader:
            waits = _waits(bench, loader, cycles)
            mean = statistics.fmean(waits)
            bench.add(
                f"waiting/{transport or 'default'}",
                f"a learner's GPU waits in next(loader), of a step of 5 ms, priorities flowing back, {loader.transport}",
                f"{100 * mean / STEP_S:.2f} % (worst {1e3 * max(waits):.2f} ms)",
                "" if most is None else f"≤ {100 * most:g} %",
                None if most is None else mean <= most * STEP_S,
                waits_us=[round(1e6 * one, 1) for one in waits],
            )  # fmt: skip
    rb.close()


def _waits(bench: Bench, loader: Any, cycles: int) -> list[float]:
    """Seconds in which the device stands still, of each step."""
    gpu, batches, before = bench.gpu, iter(loader), None
    warmup, around = min(20, bench.sizes.steps), []
    for _ in range(max(bench.sizes.steps // 2, 1) + warmup):
        begin = gpu.event()
        batch = next(batches)
        around.append((begin, gpu.event()))
        gpu.sleep(cycles)
        error = batch["pixels"].flatten(1)[:, :64].float().mean(1)
        loader.update_priority(batch["index"], error, generation=batch["index_generation"])
        if before is not None:
            before.synchronize()  # as a program does that reads its loss of the step before
        before = gpu.event()
    gpu.finish()
    return [1e-3 * begin.elapsed_time(end) for begin, end in around[warmup:]]


def _cycles_of(gpu: Gpu, seconds: float) -> int:
    """How many cycles torch's sleeping kernel takes that long for."""
    probe = 10_000_000
    gpu.sleep(probe)
    gpu.finish()
    begin = gpu.event()
    gpu.sleep(probe)
    end = gpu.event()
    gpu.finish()
    return round(probe * seconds / max(1e-3 * begin.elapsed_time(end), 1e-6))
