"""Claim: importing a data set takes at most 1.3 times as long as reading its arrays, in the same memory for any size.

Steps of D4RL's kind, 17 + 6 numbers, a reward and two flags: 102 B each. The other side reads every column of the same file into
arrays, with h5py, or with pyarrow, column by column. Both sides read a file that the kernel has in memory. HDF5 is compressed with
gzip, as D4RL's files and Minari's are, and not compressed; Parquet with zstd. Then the memory that an import adds to its process, of
files of two sizes, and what opening a finished import takes.
"""

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import rivals
from benchmarks.claims import Comparison, Row, timed
from benchmarks.timing import Effort, Side, Spread, alternate

ROWS, EPISODE = 500_000, 1_000
EFFORT = Effort(calls=1, blocks=9, warmup=1, lead=0)
OPENED = Effort(calls=5, blocks=20, lead=1)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Imports beside reads of the same file, their memory, and the second opening."""
    if libraries["engram"].module is None:
        return
    import h5py
    import pyarrow.parquet as pq

    from engram.datasets import from_hdf5, from_numpy, from_parquet, to_hdf5, to_parquet

    def read_hdf5(path: Path) -> None:
        with h5py.File(path) as file:
            columns: list[np.ndarray] = []
            file.visititems(lambda _, it: columns.append(it[()]) if isinstance(it, h5py.Dataset) else None)

    def read_parquet(path: Path) -> None:
        for name in (file := pq.ParquetFile(path)).schema_arrow.names:
            column = file.read([name], use_threads=False)[name].combine_chunks()
            (column.flatten() if hasattr(column, "flatten") else column).to_numpy(zero_copy_only=False)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from_numpy(_steps(ROWS), folder / "store").close()
        to_hdf5(folder / "store", folder / "plain.hdf5")
        to_hdf5(folder / "store", folder / "gzip.hdf5", compression="gzip")
        to_parquet(folder / "store", folder / "steps.parquet")
        imports: dict[str, tuple[Callable[[Path], object], Callable[..., object], str]] = {
            "hdf5": (read_hdf5, from_hdf5, "plain.hdf5"),
            "hdf5-gzip": (read_hdf5, from_hdf5, "gzip.hdf5"),
            "parquet": (read_parquet, from_parquet, "steps.parquet"),
        }
        for kind, (read, load, file) in imports.items():

            def imported(load: Callable[..., object] = load, file: str = file) -> None:
                load(folder / file, folder / "out").close()

            def removed() -> None:
                shutil.rmtree(folder / "out")

            sides = [
                Side("read", lambda read=read, file=file: read(folder / file)),
                Side("engram", imported, between=removed),
            ]
            timing = alternate(sides, EFFORT.scaled(share))
            yield timed(f"datasets/{kind}", f"import of {ROWS:,} steps, {kind}", timing, share=("read",))
        yield _memory(folder)
        timing = alternate(
            [Side("engram", lambda: from_hdf5(folder / "plain.hdf5", folder / "1").close())], OPENED.scaled(share)
        )
        yield timed("datasets/open", f"second opening of an import of {ROWS:,} steps", timing)


def _steps(rows: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "observations": generator.random((rows, 17), np.float32),
        "actions": generator.random((rows, 6), np.float32),
        "rewards": generator.random(rows),
        "terminals": np.zeros(rows, bool),
        "timeouts": np.arange(rows) % EPISODE == EPISODE - 1,
    }


def _memory(folder: Path) -> Row:
    """Of imports of one and of four times the rows, in processes of their own, in MB."""
    from engram.datasets import from_numpy, to_hdf5

    from_numpy(_steps(4 * ROWS), folder / "large").close()
    to_hdf5(folder / "large", folder / "4.hdf5")
    (folder / "plain.hdf5").rename(folder / "1.hdf5")
    context = multiprocessing.get_context("spawn")
    found = {}
    for times in (1, 4):
        with context.Pool(1) as pool:
            found[times] = pool.apply(_grown, (folder / f"{times}.hdf5", folder / f"{times}"))
    (folder / "1.hdf5").rename(folder / "plain.hdf5")
    shutil.rmtree(folder / "1")
    spreads = {f"{times} x": Spread.of([grown / 1e6]) for times, grown in found.items()}
    ratio = Spread.of([found[4] / found[1]])
    return Row(
        "datasets/memory", "memory of an import, by size", spreads, [Comparison("1 x", "share", ratio, None)], unit="MB"
    )


def _grown(source: Path, directory: Path) -> int:
    """How much memory an import adds at its peak to what the process has, in bytes."""
    from engram.datasets import from_hdf5

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    from_hdf5(source, directory).close()
    return status("VmHWM") - before
