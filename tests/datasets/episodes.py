"""Episodes to import, and what an import of them must hold, by plain loops."""

import lance
import minari
import numpy as np
import pyarrow as pa
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer


def steps(lengths, seed=0, last="flags"):
    """Columns in D4RL's layout. Episodes end by turns with a terminal and a timeout."""
    generator, n = np.random.default_rng(seed), sum(lengths)
    ends = np.cumsum(lengths) - 1
    columns = {
        "observations": generator.random((n, 3), np.float32),
        "actions": generator.integers(0, 9, n),
        "rewards": generator.random(n),
        "terminals": np.zeros(n, bool),
        "timeouts": np.zeros(n, bool),
        "infos": {"qpos": generator.random((n, 2))},
    }
    columns["terminals"][ends[::2]] = True
    columns["timeouts"][ends[1::2]] = True
    return columns


def numbers_and_returns(lengths, rewards):
    """The number and the return of the episode of each step."""
    numbers, returns, at = [], [], 0
    for number, length in enumerate(lengths):
        total = float(sum(np.float64(reward) for reward in rewards[at : at + length]))
        numbers += [number] * length
        returns += [total] * length
        at += length
    return np.array(numbers), np.array(returns)


def flat(rows):
    """Fields of rows as arrays, by path."""
    found = {}
    for key, value in rows.items():
        if hasattr(value, "items"):
            found |= {(key, *path): leaf for path, leaf in flat(value).items()}
        else:
            found[(key,)] = np.asarray(value)
    return found


def same(one, other):
    """Bit for bit, dtype and shape too."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def minari_episodes(lengths, seed=0):
    """Infos of resets are in ``pose``, and not in ``success``."""
    generator = np.random.default_rng(seed)
    return [
        EpisodeBuffer(
            observations={
                "image": generator.integers(0, 255, (n + 1, 4, 4, 3), np.uint8),
                "state": generator.random((n + 1, 2)),
            },
            actions=generator.random((n, 2), np.float32),
            rewards=generator.random(n),
            terminations=np.arange(n) == (n - 1 if number % 2 else n),
            truncations=np.arange(n) == (n if number % 2 else n - 1),
            infos={"pose": {"q": generator.random((n + 1, 3))}, "success": generator.random(n) > 0.5},
        )
        for number, n in enumerate(lengths)
    ]


def minari_dataset(folder, lengths, seed=0):
    """A data set of Minari's own making, in a folder."""
    storage = minari.dataset.minari_storage.MinariStorage.new(
        folder,
        spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "state": spaces.Box(-1, 1, (2,), np.float64)}),
        spaces.Box(-1, 1, (2,), np.float32),
        jpeg_encoding=False,
    )
    storage.update_episodes(minari_episodes(lengths, seed))
    storage.update_metadata({"dataset_id": "tests/small-v0", "minari_version": minari.__version__})
    return folder


def arrow(value):
    """Arrays as columns of Arrow's: dicts become structs, rows of several numbers lists of fixed size."""
    if isinstance(value, dict):
        return pa.StructArray.from_arrays([arrow(one) for one in value.values()], [*value])
    column = pa.array(value.reshape(-1))
    for size in reversed(value.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def lance_dataset(folder, columns, rows_per_file=77):
    """A data set that Lance writes, of several files."""
    table = pa.table({name: arrow(column) for name, column in columns.items()})
    return lance.write_dataset(table, folder, max_rows_per_file=rows_per_file)


def files(folder):
    """The bytes of the rows in a store's folder, by file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.memmap"))}
