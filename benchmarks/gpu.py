"""What benchmarks on a GPU ask of CUDA, and how their sides are timed and their figures told.

Everything that only a GPU can run is in :class:`Gpu`; tests put another one in its place.
"""

import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.rivals import Libraries
from benchmarks.timing import Effort, Side, alternate

Figure = dict[str, Any]
Call = Callable[[], object]
#: Calls of the driver in which the host waits, as the profiler names them.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)

    def finish(self) -> None:
        """Wait for all that is queued."""
        torch.cuda.synchronize(self.device)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory."""
        return tensor.pin_memory()

    def storage(self, capacity: int, **kwargs: Any) -> Any:
        """engram's storage there."""
        from engram import LazyTensorStorage

        return LazyTensorStorage(capacity, device=self.device, **kwargs)

    def captured(self, call: Call) -> Call:
        """A CUDA graph of a call, which was made thrice before: what replays it."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.finish()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def adam(self, parameters: Any) -> torch.optim.Optimizer:
        """An optimizer whose steps a graph may capture."""
        return torch.optim.Adam(parameters, fused=True, capturable=True)

    def event(self) -> Any:
        """A moment on the device, by which ``elapsed_time`` measures."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep(self, cycles: int) -> None:
        """Keep the device busy."""
        torch.cuda._sleep(cycles)  # noqa: SLF001 - torch's own tests use it

    def waits(self, call: Call, calls: int) -> int:
        """How often the host waits for the device in that many calls."""
        from torch.profiler import ProfilerActivity, profile

        call()
        self.finish()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                call()
        counted = sum(event.count for event in seen.key_averages() if event.key in WAITS)
        return max(counted - 1, 0)  # the profiler's own at the end


class Sizes(NamedTuple):
    """How much is measured."""

    rows: int = 1_000_000
    """Of small rows, and of a storage on the device."""
    frames: int = 20_000
    large_frames: int = 300_000
    """Of a store that is larger than those with a floor; 0: none."""
    frame: tuple[int, ...] = (4, 84, 84)
    batch: int = 256
    appended: int = 4_096
    calls: int = 50
    """Of small batches, in a block; of large ones a fifth."""
    blocks: int = 20
    steps: int = 500
    """Of a learner, in a block."""
    waits: int = 1_000
    seconds: float = 10.0
    """In which a mirror trails behind."""
    rate: int = 640_000
    """Rows per second then."""


QUICK = Sizes(large_frames=0, blocks=7, steps=250, seconds=5.0)


@dataclass
class Bench:
    """What every section is given."""

    gpu: Gpu
    sizes: Sizes
    libraries: Libraries
    folder: Path
    """For stores on a disk."""
    figures: list[Figure] = field(default_factory=list)
    why_not: str = ""
    """Why TorchRL is not beside the last side that was asked for; empty: it is."""

    @property
    def engram(self) -> Any:
        """The module."""
        return self.libraries["engram"].module

    @property
    def torchrl(self) -> Any:
        """The module, or None."""
        return self.libraries["TorchRL"].module

    def beside(self, make: Callable[[Any], Call]) -> Call | None:
        """A side of TorchRL's; None where it is absent, or cannot do that, which is noted."""
        self.why_not = "TorchRL absent"
        if self.torchrl is None:
            return None
        try:
            call = make(self.torchrl)
            call()
        except Exception as error:  # noqa: BLE001 - whatever it raises
            self.why_not = f"TorchRL cannot: {type(error).__name__}: {error}".splitlines()[0][:120]
            return None
        self.why_not = ""
        return call

    def race(
        self, sides: Mapping[str, Call | None], calls: int, *, prepare: Call | None = None
    ) -> dict[str, list[float]]:
        """Microseconds per call of each block of each side, by turns; the device has finished at the end of a block."""
        gpu = self.gpu

        def block(call: Call) -> Call:
            def run() -> None:
                for _ in range(calls):
                    call()
                gpu.finish()

            return run

        them = [Side(name, block(call), prepare) for name, call in sides.items() if call is not None]
        timing = alternate(them, Effort(calls=1, blocks=self.sizes.blocks, warmup=1, lead=0))
        return {name: [us / calls for us in taken] for name, taken in timing.blocks_us.items()}

    def add(self, key: str, what: str, measured: str, floor: str = "", met: bool | None = None, **numbers: Any) -> None:
        """A figure."""
        self.figures.append({"key": key, "what": what, "measured": measured, "floor": floor, "met": met, **numbers})

    def add_time(
        self, key: str, what: str, taken: Mapping[str, Sequence[float]], name: str, most_us: float | None
    ) -> None:
        """A time of one side, with those of the others beside it."""
        took = {side: statistics.median(us) for side, us in taken.items()}
        beside = [f"{side} {us:.1f}" for side, us in took.items() if side != name]
        beside += [self.why_not] if self.why_not and "graph" not in key else []
        said = f"{took[name]:.1f} µs" + (f" ({', '.join(beside)})" if beside else "")
        floor, met = ("", None) if most_us is None else (f"≤ {most_us:g} µs", took[name] <= most_us)
        self.add(key, what, said, floor, met, us={side: [round(one, 2) for one in us] for side, us in taken.items()})

    def add_share(
        self, key: str, what: str, taken: Mapping[str, Sequence[float]], sides: tuple[str, str], least: float | None
    ) -> None:
        """The speed of the first side as a share of the second's: the median over blocks that ran one after the other."""
        one, other = (taken[side] for side in sides)
        share = statistics.median(best / us for us, best in zip(one, other, strict=True))
        floor, met = ("", None) if least is None else (f"≥ {100 * least:g} %", share >= least)
        said = f"{100 * share:.0f} % ({statistics.median(one):.1f} and {statistics.median(other):.1f} µs)"
        self.add(
            key,
            what,
            said,
            floor,
            met,
            share=share,
            us={side: [round(one, 2) for one in taken[side]] for side in sides},
        )

    def run(self, sections: Sequence[Callable[["Bench"], object]], saved: Callable[[], object]) -> bool:
        """Run every section; what one raises is a figure. ``saved`` is called after each. Whether none raised."""
        good = True
        for section in sections:
            try:
                section(self)
            except Exception as error:  # noqa: BLE001 - a GPU is lent for minutes: the others must have their turn
                traceback.print_exc()
                good = False
                self.add(
                    section.__name__, f"section {section.__name__}", f"{type(error).__name__}: {error}"[:300], "", False
                )
            saved()
        return good


def forever(batches: Iterator[Any]) -> Call:
    """The next of some batches."""
    return lambda: next(batches)
