"""``python -m benchmarks.bench_gpu``: what a learner on a GPU gets from a buffer on the host, or on the GPU itself.

Measured on the current CUDA device, beside what the same machine does at best in the same minute:

* what is pinned, for every kind of batch and with a transform that builds a new TensorDict;
* host to device: batches of 256 frames of 28 kB through ``DeviceLoader``, against one large pinned copy;
* waiting: what part of a training step of 5 ms passes in ``next(loader)``, with priorities flowing back;
* a sample of 256 rows from a storage on the GPU, against TorchRL's;
* uniform draws, cycles by priority and ``extend`` of 4,096 rows on such a storage of 10^6 rows: as calls, in a CUDA graph, and how
  often the host waits in 1,000 of them.

Without a GPU it says so and exits with status 2.
"""

import datetime as dt
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from tensordict import TensorDict

from benchmarks import machine, report, rivals
from benchmarks.timing import Effort, Side, alternate

FRAMES, FRAME = 4_096, (4, 84, 84)
BATCH = 256
STEP_S = 5e-3
RESULTS = Path(__file__).parent / "results"

Figure = dict[str, Any]


def main() -> None:
    if not torch.cuda.is_available():
        print("bench-gpu: no CUDA device on this machine: nothing was measured.", file=sys.stderr)
        sys.exit(2)
    run()


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A fifth of the rounds, saved under results/quick.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for the JSON.")
def run(quick: bool, out: Path | None) -> None:
    share = 0.2 if quick else 1.0
    libraries = rivals.load()
    figures: list[Figure] = [*_pinned(), *_throughput(share), *_waiting(share), *_cuda_storage(libraries, share)]
    figures += _device_storage(libraries, share)
    folder = out or (RESULTS / "quick" if quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpu.json"
    header = {
        "machine": machine.describe(),
        "gpu": torch.cuda.get_device_name(),
        "commit": machine.commit(),
        "versions": {
            **{name: libraries[name].version for name in ("engram", "TorchRL")},
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    path.write_text(json.dumps({**header, "benchmark": "gpu", "figures": figures}, indent=1) + "\n", encoding="utf-8")
    _show(figures, header["gpu"])
    print(f"Saved: {path}")


def _show(figures: list[Figure], gpu: Any) -> None:
    table = Table(title=f"engram on {gpu}")
    for column in ("what", "measured", "floor", "met?"):
        table.add_column(column, overflow="fold")
    for figure in figures:
        met = figure["met"]
        table.add_row(
            figure["what"], figure["measured"], figure["floor"], "" if met is None else "yes" if met else "no"
        )
    report.console().print(table)


def _figure(key: str, what: str, measured: str, floor: str, met: bool | None, **numbers: Any) -> Figure:
    return {"key": key, "what": what, "measured": measured, "floor": floor, "met": met, **numbers}


# ---- what is pinned --------------------------------------------------------------------------------------------------------


def _pinned() -> list[Figure]:
    figures = []
    for name, transform in _TRANSFORMS.items():
        rb = _rows(transform=transform, pin_memory=True)
        sample = rb.sample(32, return_info=True)
        leaves = _leaves(sample)
        pinned = sum(leaf.is_pinned() for leaf in leaves)
        figures.append(
            _figure(f"pinned/{name}", f"pinned · {name}", f"{pinned} of {len(leaves)}", "all", pinned == len(leaves))
        )
    return figures


_TRANSFORMS: dict[str, Callable[[Any], Any] | None] = {
    "no transform": None,
    "a new TensorDict": lambda td: TensorDict({"x": td["obs"] * 2, "deep": {"y": td["obs"] + 1}}, td.batch_size),
    "a TensorDict on the CPU": lambda td: TensorDict({"x": td["obs"] * 2}, td.batch_size, device="cpu"),
    "entries are added": lambda td: td.set("more", td["obs"] * 2),
    "a dict within": lambda td: TensorDict({"d": {"a": td["obs"], "b": td["obs"].flip(0)}}, td.batch_size),
}


def _rows(**kwargs: Any) -> Any:
    from engram import LazyTensorStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000), **kwargs)
    rb.extend(TensorDict({"obs": torch.randn(1_000, 16), "next": {"reward": torch.zeros(1_000, 1)}}, [1_000]))
    return rb


def _leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    values = data.values() if hasattr(data, "values") else data if isinstance(data, tuple) else ()
    return [leaf for value in values for leaf in _leaves(value)]


# ---- host to device --------------------------------------------------------------------------------------------------------


def _frames(**kwargs: Any) -> Any:
    from engram import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(FRAMES), batch_size=BATCH, pin_memory=True, **kwargs
    )
    rb.extend(TensorDict({"pixels": torch.randint(0, 255, (FRAMES, *FRAME), dtype=torch.uint8)}, [FRAMES]))
    return rb


def _throughput(share: float) -> list[Figure]:
    """Rounds alternate, so that all meet the same machine. The peak is one copy of the bytes of all batches of a round."""
    from engram import DeviceLoader

    count, rounds = 200, max(5, round(20 * share))
    nbytes = count * BATCH * torch.Size(FRAME).numel()
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rb = _frames()
    few = [rb.sample() for _ in range(8)]
    with DeviceLoader(rb, "cuda", depth=4) as loader:
        batches = iter(loader)

        def peak() -> None:
            target.copy_(source, non_blocking=True)

        def copies() -> None:
            for i in range(count):
                few[i % len(few)].to("cuda", non_blocking=True)

        def loaded() -> None:
            for _ in range(count):
                next(batches)

        speeds: dict[str, list[float]] = {call.__name__: [] for call in (peak, copies, loaded)}
        for number in range(-1, rounds):
            for call in (peak, copies, loaded):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize()
                if number >= 0:
                    speeds[call.__name__].append(nbytes / (time.perf_counter() - begin) / 1e9)
    return [
        _part(
            "copies", f"host to device · pinned batches of {BATCH} × 28 kB, against one large pinned copy", speeds, 0.9
        ),
        _part("loaded", f"the same through DeviceLoader: {BATCH} rows drawn and gathered, too", speeds, None),
    ]


def _part(key: str, what: str, speeds: dict[str, list[float]], floor: float | None) -> Figure:
    part = statistics.median(one / best for one, best in zip(speeds[key], speeds["peak"], strict=True))
    middle, peak = statistics.median(speeds[key]), statistics.median(speeds["peak"])
    return _figure(
        key,
        what,
        f"{middle:.1f} of {peak:.1f} GB/s ({100 * part:.0f} %)",
        "" if floor is None else f"≥ {100 * floor:.0f} %",
        None if floor is None else part >= floor,
        gb_per_s=speeds[key],
        peak_gb_per_s=speeds["peak"],
    )


# ---- a learner -------------------------------------------------------------------------------------------------------------


def _waiting(share: float) -> list[Figure]:
    """A step keeps the device busy for 5 ms and computes new priorities. What counts is how long the device stands still between
    two events around ``next(loader)``: because the copy has not come, or because the host was late.
    """
    from engram import DeviceLoader

    steps, warmup = max(50, round(400 * share)), 20
    cycles = _cycles_of(STEP_S)
    around: list[tuple[Any, Any]] = []
    on_host = []
    with DeviceLoader(_frames(), "cuda", depth=2) as loader:
        batches = iter(loader)
        done: Any = None
        for _ in range(steps + warmup):
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            begin = time.perf_counter()
            batch = next(batches)
            on_host.append(time.perf_counter() - begin)
            events[1].record()
            around.append(events)
            torch.cuda._sleep(cycles)  # noqa: SLF001 - torch's own tests use it
            error = batch["pixels"].flatten(1)[:, :64].float().mean(1)
            loader.update_priority(batch["index"], error, generation=batch["index_generation"])
            if done is not None:
                done.synchronize()  # as a program does that reads its loss of the step before
            done = torch.cuda.current_stream().record_event()
        torch.cuda.synchronize()
    waits = [1e-3 * begin.elapsed_time(end) for begin, end in around[warmup:]]
    mean, host = statistics.fmean(waits), statistics.fmean(on_host[warmup:])
    return [
        _figure(
            "waiting",
            "the GPU of a learner waits in next(loader), of a step of 5 ms, priorities flowing back",
            f"{100 * mean / STEP_S:.2f} % (worst {1e3 * max(waits):.2f} ms; the host {1e6 * host:.0f} µs)",
            "≤ 1 %",
            mean <= 0.01 * STEP_S,
            waits_us=[round(1e6 * one, 1) for one in waits],
            host_us=[round(1e6 * one, 1) for one in on_host[warmup:]],
        )
    ]


def _cycles_of(seconds: float) -> int:
    """How many cycles torch's sleeping kernel takes that long for."""
    probe = 10_000_000
    torch.cuda._sleep(probe)  # noqa: SLF001 - torch's own tests use it
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(probe)  # noqa: SLF001 - torch's own tests use it
    torch.cuda.synchronize()
    return round(probe * seconds / (time.perf_counter() - begin))


# ---- a storage on the GPU --------------------------------------------------------------------------------------------------


def _cuda_storage(libraries: rivals.Libraries, share: float) -> list[Figure]:
    what = f"sample {BATCH} · storage on the GPU, TorchRL takes"
    if libraries["TorchRL"].module is None:
        return [_figure("cuda-storage", what, "TorchRL is not installed", "≥ 5 times", None)]
    sides = [Side(name, _sampler_of(libraries[name].module)) for name in ("engram", "TorchRL")]
    timing = alternate(sides, Effort(calls=50, blocks=40).scaled(share))
    spreads = {name: timing.spread(name) for name in ("engram", "TorchRL")}
    times = timing.ratio("TorchRL", "engram").median
    return [
        _figure(
            "cuda-storage",
            what,
            f"{times:.1f} times as long ({spreads['engram'].median:.0f} and {spreads['TorchRL'].median:.0f} µs)",
            "≥ 5 times",
            times >= 5,
        )
    ]


def _sampler_of(module: Any) -> Callable[[], object]:
    rb = module.TensorDictReplayBuffer(storage=module.LazyTensorStorage(100_000, device="cuda"), batch_size=BATCH)
    rb.extend(
        TensorDict({"obs": torch.randn(100_000, 12), "next": {"reward": torch.zeros(100_000, 1)}}, [100_000]).cuda()
    )

    def sample() -> object:
        batch = rb.sample()
        torch.cuda.synchronize()
        return batch

    return sample


# ---- calls on a storage on the GPU, and the same in a graph ------------------------------------------------------------------

ROWS, APPENDED, IN_A_BLOCK = 1_000_000, 4_096, 20
#: Microseconds of a call, and of its replay.
CALL_US = {"uniform": (40, 10), "cycle": (70, 30), "extend": (90, 20)}


def _steps(n: int) -> TensorDict:
    fields = {"obs": torch.randn(n, 17), "action": torch.randn(n, 6), "done": torch.zeros(n, 1, dtype=torch.bool)}
    return TensorDict({**fields, "next": {"obs": torch.randn(n, 17), "reward": torch.zeros(n, 1)}}, [n]).cuda()


def _calls_on(module: Any, *, generations: bool) -> dict[str, Callable[[], object]]:
    """Calls on two storages of a library: one that is drawn from uniformly, and one by priority."""
    plain, prioritized = (
        module.TensorDictReplayBuffer(
            storage=module.LazyTensorStorage(ROWS, device="cuda"), batch_size=BATCH, **arguments
        )
        for arguments in ({}, {"sampler": module.PrioritizedSampler(ROWS, alpha=0.6, beta=0.4)})
    )
    for rb in (plain, prioritized):
        for _ in range(0, ROWS, ROWS // 10):
            rb.extend(_steps(ROWS // 10))
    steps, errors = _steps(APPENDED), torch.rand(BATCH, device="cuda")

    def cycle() -> object:
        batch = prioritized.sample()
        late = {"generation": batch["index_generation"]} if generations else {}
        prioritized.update_priority(batch["index"], errors, **late)
        return batch

    return {"uniform": plain.sample, "cycle": cycle, "extend": lambda: plain.extend(steps)}


def _in_a_block(call: Callable[[], object]) -> Callable[[], None]:
    def block() -> None:
        for _ in range(IN_A_BLOCK):
            call()
        torch.cuda.synchronize()

    return block


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _waits(call: Callable[[], object]) -> int:
    """How often the host waits for the device in 1,000 calls."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(1_000):
            call()
    names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return sum(event.count for event in seen.key_averages() if event.key in names) - 1  # the profiler's own at the end


def _device_storage(libraries: rivals.Libraries, share: float) -> list[Figure]:
    figures, rival = [], libraries["TorchRL"].module
    for name, floors in CALL_US.items():
        call = _calls_on(libraries["engram"].module, generations=True)[name]
        sides = [Side("engram", _in_a_block(call))]
        if rival is not None:
            sides.append(Side("TorchRL", _in_a_block(_calls_on(rival, generations=False)[name])))
        waits = _waits(call)
        timings = [(floors[0], "", alternate(sides, Effort(calls=5, blocks=20).scaled(share)))]
        graph = [Side("engram", _in_a_block(_captured(call)))]
        timings.append((floors[1], " in a graph", alternate(graph, Effort(calls=5, blocks=20).scaled(share))))
        for floor, where, timing in timings:
            took = {
                side: timing.spread(side).median / IN_A_BLOCK for side in (s.name for s in sides[: 1 if where else 2])
            }
            said = ", ".join(f"{side} {us:.1f} µs" for side, us in took.items())
            what = f"{name} on the GPU{where}, {ROWS:,} rows"
            figures.append(
                _figure(f"device-{name}{where.replace(' ', '-')}", what, said, f"≤ {floor} µs", took["engram"] <= floor)
            )
        what = f"{name} on the GPU: the host waits in 1,000 calls"
        figures.append(_figure(f"device-{name}-waits", what, str(waits), "0", waits <= 0))
    return figures


if __name__ == "__main__":
    main()
