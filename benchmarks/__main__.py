"""``python -m benchmarks``: compare engram with TorchRL and cpprb, judge the claims, save results and
charts.
"""

import datetime as dt
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import torch
from tensordict import __version__ as tensordict_version

from benchmarks import (
    bench_batches,
    bench_checkpoints,
    bench_cleanrl,
    bench_cluster,
    bench_datasets,
    bench_ensembles,
    bench_everyday,
    bench_frames,
    bench_hindsight,
    bench_indexes,
    bench_larger,
    bench_limits,
    bench_memory,
    bench_meter,
    bench_prefetch,
    bench_ragged,
    bench_ranks,
    bench_removers,
    bench_sampling,
    bench_sb3,
    bench_sharing,
    bench_single,
    bench_slices,
    bench_staleness,
    bench_threads,
    bench_transfer_queue,
    bench_units,
    bench_updates,
    bench_windows,
    bench_writing,
    machine,
    report,
    rivals,
)
from benchmarks.claims import Row

BENCHMARKS: dict[str, Callable[[rivals.Libraries, float], Iterator[Row]]] = {
    "everyday": bench_everyday.run,
    "cleanrl": bench_cleanrl.run,
    "sb3": bench_sb3.run,
    "batches": bench_batches.run,
    "sampling": bench_sampling.run,
    "writing": bench_writing.run,
    "indexes": bench_indexes.run,
    "windows": bench_windows.run,
    "slices": bench_slices.run,
    "hindsight": bench_hindsight.run,
    "units": bench_units.run,
    "staleness": bench_staleness.run,
    "updates": bench_updates.run,
    "ensembles": bench_ensembles.run,
    "frames": bench_frames.run,
    "memory": bench_memory.run,
    "meter": bench_meter.run,
    "larger": bench_larger.run,
    "sharing": bench_sharing.run,
    "threads": bench_threads.run,
    "limits": bench_limits.run,
    "prefetch": bench_prefetch.run,
    "checkpoints": bench_checkpoints.run,
    "ragged": bench_ragged.run,
    "removers": bench_removers.run,
    "ranks": bench_ranks.run,
    "cluster": bench_cluster.run,
    "single": bench_single.run,
    "datasets": bench_datasets.run,
    "transfer_queue": bench_transfer_queue.run,
}
RESULTS = Path(__file__).parent / "results"
QUICK_SHARE = 0.2
QUIET_LOAD = 0.5


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Run a fifth of the blocks; save to results/quick.")
@click.option("--only", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Run only this benchmark; repeatable.")
@click.option("--large", is_flag=True, help="Save checkpoints of 20 GB, which takes 60 GB of disk.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for JSON and charts.")
def main(quick: bool, only: tuple[str, ...], large: bool, out: Path | None) -> None:
    warnings.simplefilter("ignore")  # rivals warn about their own deprecations
    load = machine.load()
    libraries = rivals.load()
    rivals.set_threads(libraries, 1)
    folder = out or (RESULTS / "quick" if quick else RESULTS)
    share = QUICK_SHARE if quick else 1.0
    header = {
        "machine": machine.describe(),
        "load_before": load,
        "commit": machine.commit(),
        "versions": {
            **{name: library.version for name, library in libraries.items()},
            "torch": torch.__version__,
            "tensordict": tensordict_version,
        },
        "notes": [note for library in libraries.values() for note in library.notes],
        "command": " ".join(
            [
                "python -m benchmarks",
                *(f"--{name}" for name, given in (("quick", quick), ("large", large)) if given),
                *(f"--only {name}" for name in only),
            ]
        ),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    place = _place(header["machine"], header["date"])
    rows: list[Row] = []
    saved: list[Path] = []
    benchmarks = dict(BENCHMARKS)
    if large:
        benchmarks["checkpoints"] = partial(bench_checkpoints.run, store_gb=bench_checkpoints.LARGE_GB)
    for name in only or benchmarks:
        found = []
        for row in benchmarks[name](libraries, share):
            click.echo(f"{name}: {row.what}", err=True)
            found.append(row)
        saved.append(report.save(folder, name, found, header))
        if name == "sampling":
            saved.append(report.draw_sampling(folder, found, libraries, place))
        if name == "indexes" and libraries["engram"].module is not None:
            saved.append(report.draw_scaling(folder, found, libraries["engram"].version, place))
        rows += found
    out_console = report.console()
    report.print_table(out_console, rows, libraries, share)
    if load > QUIET_LOAD:
        out_console.print(f"The machine was busy before the start (load {load}): rely only on the ratios.")
    out_console.print(f"Saved: {', '.join(os.path.relpath(path) for path in saved)}", markup=False, soft_wrap=True)


def _place(described: object, date: object) -> str:
    """One line for the charts: where and when."""
    assert isinstance(described, dict)
    return f"{described['cpu']}, {described['cores']} cores, {described['os']}; {date}"


if __name__ == "__main__":
    main()
