"""Data sets of Minari, and dumps of TorchRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from tensordict import TensorDict

from engram._support.checks import check_path
from engram._support.field_paths import nested, public
from engram.datasets import importing as of
from engram.datasets.tables import Stored, check_dtypes, stored, written_whole
from engram.errors import DatasetError
from engram.store.memory import torch_dtype
from engram.torchrl.dumps import read
from engram.torchrl.items import TorchRLDump
from engram.types import StrPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gymnasium import Space
    from minari import MinariDataset


class _Episodes(of.Source):
    """The episodes of a data set of Minari's, by its own reader."""

    def __init__(self, call: str, where: StrPath, dataset: MinariDataset, arguments: of.ImportArguments) -> None:
        super().__init__(call, where)
        self._storage, self.rows, self.finals = dataset.storage, int(dataset.total_steps), int(dataset.total_episodes)
        self.files = sorted(path for path in Path(self._storage.data_path).rglob("*") if path.is_file())
        self.names = of.new_names(call, [*next(self._read(0), {})], arguments.get("rename"))

    def _read(self, first: int) -> Iterator[of.Columns]:
        found = iter(self._storage.get_episodes(range(first, self.finals)))
        for n in range(first, self.finals):
            try:
                episode = next(found)
            except (OSError, LookupError, ValueError, StopIteration) as error:
                raise self.refuse(f"episode {n} of {self.finals} is missing or damaged ({error}).") from error
            kept = ("observations", "actions", "rewards", "terminations", "truncations")
            columns = {path: np.asarray(leaf) for path, leaf in of.flat_names({name: episode[name] for name in kept})}
            steps = len(columns["rewards",])
            for path, column in columns.items():
                if len(column) != (expected := steps + (path[0] == "observations")):
                    raise self.refuse(f"episode {n}: {public(path)!r}: expected {expected} entries, got {len(column)}.")
            yield columns

    def blocks(self, row: int, episode: int) -> Iterator[of.Block]:  # noqa: ARG002 - it is known by its number
        gathered: list[of.Columns] = []
        nbytes = 0
        for columns in self._read(episode):
            gathered.append(columns)
            nbytes += sum(column.nbytes for column in columns.values())
            if nbytes > of.BLOCK_BYTES:
                yield self._block(gathered)
                gathered, nbytes = [], 0
        if gathered:
            yield self._block(gathered)

    def _block(self, episodes: list[of.Columns]) -> of.Block:
        kept = {old: new for old, new in self.names.items() if new is not None}
        lengths = np.array([len(episode["rewards",]) for episode in episodes])
        seen = {old: new for old, new in kept.items() if old[0] == "observations"}
        finals = {new: np.stack([one[old][-1] for one in episodes]) for old, new in seen.items()}
        pieces = {new: [one[old][:n] for one, n in zip(episodes, lengths, strict=True)] for old, new in kept.items()}
        return of.Block({new: np.concatenate(some) for new, some in pieces.items()}, lengths, finals)


def from_minari(
    source: StrPath, directory: StrPath, *, download: bool = False, **more: Unpack[of.ImportArguments]
) -> of.DataSet:
    """Write a data set of Minari's to a store in a directory, and open it read-only.

    Of the T + 1 observations of an episode, T are in its rows, and the last one is in the folder ``finals`` of the directory: a
    :class:`NextFromFollowing` reads the next observations of all steps. Dict and Tuple spaces are nested fields. Infos are left out.

    Args:
        source: the folder of a data set, or its name, such as ``"D4RL/door/human-v2"``, among those on this machine.
        directory, rename, batch_size, progress, show: as for :func:`from_numpy`.
        download: let Minari download a data set that is not on this machine.

    Raises:
        DatasetError: an episode is missing or damaged, or a space holds text. FileNotFoundError: there is no such data set.
            ConnectionError: it cannot be downloaded.
        ModuleNotFoundError: Minari is missing, which ``engram-replay[minari]`` brings. Others as :func:`from_numpy`.

    Cost: that of Minari's own reader, episode by episode, and of a copy.

    >>> from engram.datasets import from_minari
    >>> from_minari("no/such-v0", "data")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] from_minari: expected the folder of a data set, or the name of one on this machine...
    """
    call = "from_minari"
    minari = of.required("minari", "minari", call)
    folder = next((path for path in (Path(source), Path(source) / "data") if (path / "metadata.json").is_file()), None)
    try:
        dataset = minari.MinariDataset(folder) if folder else minari.load_dataset(str(source), download=download)
    except FileNotFoundError as error:
        expected = "the folder of a data set, or the name of one on this machine (download=True fetches it)"
        raise FileNotFoundError(2, f"{call}: expected {expected}", str(source)) from error
    except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
        text = f"{call}: {source}: expected a data set that Minari {minari.__version__} reads, and a hub within reach for downloads"
        raise DatasetError(f"{text} ({type(error).__name__}: {error}).") from error
    return of.import_source(_Episodes(call, folder or str(source), dataset, more), directory, more)


def to_minari(
    directory: StrPath, path: StrPath, *, dataset_id: str | None = None, observation_space: Space[object] | None = None,
    action_space: Space[object] | None = None, final: str = "refuse",
) -> None:  # fmt: skip
    """Write the episodes of a store as a data set of Minari's.

    It lies in ``path/data``: with ``MINARI_DATASETS_PATH`` set to the folder around ``path``, ``minari.load_dataset`` finds it.
    Observations, actions, rewards and end flags are written, as they are stored; other fields have no place there.

    Args:
        directory: of the store; it is only read.
        path: the folder. It must not exist.
        dataset_id: default: the name of the folder, which must end in ``-v0`` or another version.
        observation_space, action_space: Gymnasium's. Default: boxes without bounds.
        final: what the observation after the last step is, where none is stored: ``"repeat"``, that of the last step, or ``"refuse"``.

    Raises:
        DatasetError: there is no observation after the last step, or a field is missing. FileExistsError: the folder is there.
        ValueError: the name is none of Minari's.
        ModuleNotFoundError: Minari is missing, which ``engram-replay[minari]`` brings.

    >>> import tempfile
    >>> import minari, numpy as np
    >>> from engram.datasets import from_numpy, to_minari
    >>> folder = tempfile.mkdtemp()
    >>> steps = {"obs": np.zeros((4, 2)), "actions": np.zeros(4), "rewards": np.ones(4), "terminals": np.arange(4) % 2 == 1}
    >>> from_numpy(steps, folder + "/data").close()
    >>> to_minari(folder + "/data", folder + "/small-v0", final="repeat")
    >>> minari.MinariDataset(folder + "/small-v0/data").total_episodes
    2
    """
    call = "to_minari"
    minari, name = of.required("minari", "minari", call), Path(path).name if dataset_id is None else dataset_id
    of.required("minari.dataset.minari_dataset", "minari", call).parse_dataset_id(name)
    storage = of.required("minari.dataset.minari_storage", "minari", call).MinariStorage
    with stored(directory, call) as store, written_whole(path, call) as partial:
        if lacking := {"observation", "action"} - {key[0] for key in store.names}:
            raise store.refuse(f"expected the fields {sorted(lacking)}, got {[*map(public, store.names)]}.")
        episodes = _episodes_of(store, final)
        first = next(episodes)
        spaces = [observation_space or _space(first["observations"]), action_space or _space(first["actions"])]
        partial.mkdir()
        data = storage.new(partial / "data", *spaces, jpeg_encoding=False)
        data.update_episodes(minari.data_collector.EpisodeBuffer(**one) for one in _episodes_of(store, final))
        data.update_metadata({"dataset_id": name, "minari_version": minari.__version__})


def _episodes_of(store: Stored, final: str) -> Iterator[dict[str, object]]:
    """The arguments of Minari's ``EpisodeBuffer``."""
    for block in store.blocks(0, 0):
        columns, ends = block.columns, np.cumsum(block.lengths)
        zeros, last = np.zeros((2, ends[-1]), bool)
        last[ends - 1] = not {of.TERMINATED, of.TRUNCATED} & columns.keys()  # no flag says how episodes end
        after = {key: store.after(block, key, final) for key in columns if key[0] == "observation"}
        whole = {
            "rewards": columns.get(of.REWARD, zeros.astype(np.float32)),
            "terminations": columns.get(of.TERMINATED, zeros),
            "truncations": columns.get(of.TRUNCATED, last),
        }
        for number, (start, end) in enumerate(zip(ends - block.lengths, ends, strict=True)):
            seen = {key[1:]: np.append(columns[key][start:end], one[number, None], 0) for key, one in after.items()}
            done = {key[1:]: column[start:end] for key, column in columns.items() if key[0] == "action"}
            steps = {name: column[start:end].reshape(-1) for name, column in whole.items()}
            yield {"observations": _entries(seen), "actions": _entries(done), **steps}


def _entries(columns: of.Columns) -> of.Array | dict[str, object]:
    return columns[()] if () in columns else nested(columns)


def _space(column: object) -> object:
    """Boxes without bounds, of the shapes of columns."""
    spaces = of.required("gymnasium.spaces", "gym", "to_minari")
    if isinstance(column, dict):
        return spaces.Dict({key: _space(part) for key, part in column.items()})
    assert isinstance(column, np.ndarray)
    if column.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, column.shape[1:], column.dtype)
    limits = (0, 1) if column.dtype == bool else (np.iinfo(column.dtype).min, np.iinfo(column.dtype).max)
    return spaces.Box(*limits, column.shape[1:], column.dtype)


# ---- TorchRL ------------------------------------------------------------------------------------------------------------


class _Dump(of.Table):
    """The live rows of a dump, oldest first."""

    sorted = False

    def __init__(self, call: str, path: Path, arguments: of.ImportArguments) -> None:
        super().__init__(call, path)
        dump = read(path)
        if not isinstance(dump, TorchRLDump):
            raise self.refuse("expected a dump of rows that are tensors, got one of a list.")
        self.files = sorted(one for one in path.rglob("*") if one.is_file())
        self._dump, self.rows = dump, dump.length
        self.named([field.key for field in dump.fields if field.key != ("index",)], arguments, {})
        self._fields = [(field, new) for field in dump.fields if (new := self.names.get(field.key)) is not None]
        check_dtypes(self, dump.fields)
        self._piece = max(1, of.BLOCK_BYTES // max(1, sum(field.row_bytes for field, _ in self._fields)))
        self._oldest = dump.position % dump.length if dump.length == dump.capacity else 0

    def pieces(self, row: int) -> Iterator[of.Columns]:
        while row < self.rows:
            first = (self._oldest + row) % self.rows
            n, piece = min(self._piece, self.rows - row, self.rows - first), {}
            for field, new in self._fields:
                out = torch.empty((n, *field.shape), dtype=torch_dtype(field), device="cpu")
                self._dump.read_rows(field.key, out, first)
                piece[new] = out.numpy()
            yield piece
            row += n


def from_torchrl(path: StrPath, directory: StrPath, **more: Unpack[of.ImportArguments]) -> of.DataSet:
    """Write the rows of a folder that TorchRL's ``ReplayBuffer.dumps`` wrote to a store in a directory, and open it read-only.

    Fields keep their names. ``ReplayBuffer.loads`` also takes such folders, into a buffer that is written to; an import is for data sets,
    adds the numbers and returns of episodes, and goes on after a kill.

    Args:
        path: the folder.
        directory, rename, batch_size, progress, show: as for :func:`from_numpy`.

    Raises:
        CorruptCheckpoint: a file is damaged. IncompatibleCheckpoint: it is a dump of an ensemble.
        DatasetError: nothing tells episodes apart. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy, from_torchrl, to_torchrl
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"obs": np.arange(4.0), "reward": np.ones(4), "done": np.arange(4) == 3}, folder + "/data").close()
    >>> to_torchrl(folder + "/data", folder + "/dump", final="repeat")
    >>> from_torchrl(folder + "/dump", folder + "/again")["next", "observation"].tolist()
    [1.0, 2.0, 3.0, 3.0]
    """
    return of.import_source(_Dump("from_torchrl", check_path("from_torchrl: path", path), more), directory, more)


def to_torchrl(directory: StrPath, path: StrPath, *, final: str = "refuse") -> None:
    """Write the rows of a store as a dump that ``loads`` of TorchRL's ``TensorDictReplayBuffer`` reads.

    Rows have TorchRL's form: next observations beside the observations, ``("next", "done")``, and rewards and flags of shape ``[N, 1]``.
    The buffer that reads them has a ``LazyMemmapStorage`` or ``LazyTensorStorage`` of as many rows.

    Args:
        directory: of the store; it is only read.
        path: the folder. It must not exist.
        final: what the observation after the last step is, where none is stored: ``"repeat"``, that of the last step, or ``"refuse"``.

    Raises:
        DatasetError: there is no observation after the last step, or nothing tells episodes apart. FileExistsError: the folder is there.

    >>> import json, pathlib, tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy, to_torchrl
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"obs": np.arange(4.0), "reward": np.ones(4), "done": np.arange(4) == 3}, folder + "/data").close()
    >>> to_torchrl(folder + "/data", folder + "/dump", final="repeat")
    >>> json.loads(pathlib.Path(folder, "dump/storage/storage_metadata.json").read_text())["len"]
    4
    """
    with stored(directory, "to_torchrl") as store, written_whole(path, "to_torchrl") as partial:
        partial.mkdir()
        rows, at = None, 0
        for block in store.blocks(0, 0):
            columns, n = store.steps(block, final, "observation"), int(block.lengths.sum())
            ends = [columns[flag].reshape(n) != 0 for flag in (of.TERMINATED, of.TRUNCATED) if flag in columns]
            columns.setdefault(of.DONE, np.any(ends, axis=0) if ends else np.zeros(n, bool))
            columns |= {key: columns[key].reshape(n, -1) for key in (of.REWARD, *of.FLAGS) if key in columns}
            data = TensorDict(nested({key: torch.from_numpy(column) for key, column in columns.items()}), [n])
            if rows is None:
                rows = data[:1].expand(store.rows).memmap_like(partial / "storage")
            rows[at : at + n] = data
            at += n
        (partial / "writer").mkdir()
        for name, entries in {
            "buffer_metadata.json": {"batch_size": 256, "consume_after_n_samples": None},
            "storage/storage_metadata.json": {"metadata": {}, "is_pytree": False, "len": store.rows},
            "writer/metadata.json": {"cursor": 0, "write_count": store.rows},
        }.items():
            (partial / name).write_text(json.dumps(entries))
