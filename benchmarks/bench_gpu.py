"""``python -m benchmarks.bench_gpu``: what a learner on a GPU gets from a buffer on the host, or on the GPU itself.

Measured on the current CUDA device, by turns in one process, beside TorchRL, plain code, and what the same machine does at best in
the same minute:

* what is pinned, for every kind of batch;
* six small fields: from a loader, with priorities flowing back, and in the user's CUDA graph;
* frames: read by the GPU out of RAM and shared memory, and in one block from a directory and through transforms on the host;
* a small learner: its speed as a share of that without data; and what part of a step a learner's GPU waits;
* calls on a storage of 10^6 rows on the GPU, in a graph too, and how often the host waits in 1,000 of them; its mirror.

Each figure says whether it reaches its floor. Without a GPU it says so and exits with status 2; 1: a section failed, and the others
were measured.
"""

import datetime as dt
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table

from benchmarks import gpu_host, gpu_storage, machine, report, rivals
from benchmarks.gpu import QUICK, Bench, Figure, Gpu, Sizes

RESULTS = Path(__file__).parent / "results"
#: In the order of what is wanted most, should there be no time for all.
SECTIONS = {
    section.__name__: section
    for section in (
        gpu_host.small,
        gpu_host.direct,
        gpu_storage.calls,
        gpu_host.learner,
        gpu_host.block,
        gpu_storage.mirror,
        gpu_host.waiting,
        gpu_host.pinned,
    )
}


def main() -> None:
    if not torch.cuda.is_available():
        print("bench-gpu: no CUDA device on this machine: nothing was measured.", file=sys.stderr)
        sys.exit(2)
    run()


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Fewer rounds, and no store above 4 GB; saved under results/quick.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for the JSON.")
@click.option("--only", type=click.Choice([*SECTIONS]), multiple=True, help="Sections to run; may be repeated.")
def run(quick: bool, out: Path | None, only: tuple[str, ...]) -> None:
    folder = out or (RESULTS / "quick" if quick else RESULTS)
    sys.exit(0 if measure(Gpu(), QUICK if quick else Sizes(), folder, [*only] or [*SECTIONS]) else 1)


def measure(gpu: Gpu, sizes: Sizes, folder: Path, names: list[str]) -> bool:
    """Measure, print and save. Whether no section failed."""
    folder.mkdir(parents=True, exist_ok=True)
    path, libraries, began = folder / "gpu.json", rivals.load(), time.monotonic()
    header = {
        "machine": machine.describe(),
        "gpu": gpu.name,
        "commit": machine.commit(),
        "versions": {
            **{name: libraries[name].version for name in ("engram", "TorchRL")},
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _triton(),
        },
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "sizes": sizes._asdict(),
    }
    with tempfile.TemporaryDirectory(prefix="engram-bench-gpu-") as stores:
        bench = Bench(gpu, sizes, libraries, Path(stores))

        def save() -> None:
            said = {**header, "benchmark": "gpu", "seconds": round(time.monotonic() - began), "figures": bench.figures}
            text = json.dumps(said, indent=1) + "\n"
            part = path.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)

        good = bench.run([SECTIONS[name] for name in names], save)
    show(bench.figures, gpu.name)
    print(f"Saved: {path}")
    return good


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


def show(figures: list[Figure], gpu: Any) -> None:
    """Print a table, and how many floors were reached."""
    table = Table(title=f"engram on {gpu}")
    for column in ("what", "measured", "floor", "met?"):
        table.add_column(column, overflow="fold")
    for figure in figures:
        met = figure["met"]
        table.add_row(
            figure["what"], figure["measured"], figure["floor"], "" if met is None else "yes" if met else "NO"
        )
    report.console().print(table)
    judged = [figure for figure in figures if figure["met"] is not None]
    missed = [figure["key"] for figure in judged if not figure["met"]]
    print(
        f"{len(judged) - len(missed)} of {len(judged)} floors reached"
        + (f"; missed: {', '.join(missed)}" if missed else "")
    )


if __name__ == "__main__":
    main()
