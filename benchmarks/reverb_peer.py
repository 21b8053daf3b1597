"""Reverb's side of ``bench_sharing``: a program for an environment of its own, since its TensorFlow pins clash with
torch's.

``python -m benchmarks.reverb_peer server ROWS`` holds the tables, in a process of its own as Reverb is meant to be used;
``write``, ``write-together``, ``sample`` and ``prioritized`` with its address are its clients. Writers are
``TrajectoryWriter``, which keeps one step alive, makes one item per row (so that rows are drawn one by one), streams,
and waits for its acknowledgements at the end of a window; ``write-together`` makes one step and item of 64 rows, which is
a replay of batches. Samplers are ``TrajectoryDataset`` with ``batch(256)`` and prefetching: of those that were tried
(``Client.sample``, ``TimestepDataset``, more workers, more in flight) none was faster by more than the noise.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import cycle
from typing import Any

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.workers import answer_lines

CHUNK, BATCH = 64, 256
FILLED = 20_000
"""Rows in the tables that are sampled: more would only take longer to write."""
FIELDS = {"a": ((3, 4), np.float32), "b": ((3, 4), np.float32), "c": ((), np.bool_)}


def main(role: str, argument: str) -> None:
    if role == "server":
        _serve(int(argument))
    elif role.startswith("write"):
        write, flush = _writer(argument, together=role == "write-together")
        write()
        flush()
        answer_lines(write, flush, {})
    else:
        answer_lines(_sampler(argument, role), None, {})


def _serve(rows: int) -> None:
    """Tables for the writers, and two for the samplers, which are not written to any more."""

    def table(name: str, size: int, selector: Any) -> Any:
        limiter = reverb.rate_limiters.MinSize(1)
        return reverb.Table(name, selector, reverb.selectors.Fifo(), size, limiter)

    uniform = reverb.selectors.Uniform
    tables = [table("write", rows, uniform()), table("write-together", rows // CHUNK, uniform())]
    tables += [table("sample", rows, uniform()), table("prioritized", rows, reverb.selectors.Prioritized(0.6))]
    server = reverb.Server(tables)
    client = reverb.Client(f"localhost:{server.port}")
    generator = np.random.default_rng(0)
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for i, row in zip(range(FILLED), cycle(_rows(generator, 1024))):
            writer.append(row)
            item = {key: writer.history[key][-1:] for key in FIELDS}
            writer.create_item("sample", 1.0, item)
            writer.create_item("prioritized", generator.random(), item)
            if i % 1024 == 0:
                writer.flush()
    answer_lines(
        lambda: None, None, {"port": server.port, "reverb": version("dm-reverb"), "tensorflow": version("tensorflow")}
    )


def _rows(generator: Any, count: int) -> list[dict[str, Any]]:
    return [{key: generator.random(shape).astype(kind) for key, (shape, kind) in FIELDS.items()} for _ in range(count)]


def _writer(address: str, *, together: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call that writes 64 rows, and one that waits until the server has them."""
    writer = reverb.Client(address).trajectory_writer(num_keep_alive_refs=1)
    rows = _rows(np.random.default_rng(1), 200 * CHUNK)
    chunks = [rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK)]
    upcoming = cycle(chunks).__next__
    stacked = cycle([{key: np.stack([row[key] for row in chunk]) for key in FIELDS} for chunk in chunks]).__next__

    def put(step: dict[str, Any], table: str) -> None:
        writer.append(step)
        history = writer.history
        writer.create_item(table, 1.0, {key: history[key][-1:] for key in FIELDS})

    def one_by_one() -> None:
        for row in upcoming():
            put(row, "write")

    def as_one() -> None:
        put(stacked(), "write-together")

    return (as_one if together else one_by_one), writer.flush


def _sampler(address: str, table: str) -> Callable[[], object]:
    dataset = reverb.TrajectoryDataset(
        address,
        table,
        dtypes={key: tf.as_dtype(kind) for key, (_, kind) in FIELDS.items()},
        shapes={key: tf.TensorShape([1, *shape]) for key, (shape, _) in FIELDS.items()},
        max_in_flight_samples_per_worker=2 * BATCH,
        num_workers_per_iterator=1,
    )
    batches = dataset.batch(BATCH, drop_remainder=True).prefetch(2).as_numpy_iterator()
    if next(batches).data["a"].shape != (BATCH, 1, 3, 4):
        raise ValueError("reverb_peer: expected batches of 256 rows.")
    return batches.__next__


if __name__ == "__main__":
    main(*sys.argv[1:])
