"""Data sets of Minari, dumps of TorchRL, and data sets of LeRobot, format v3.0: tables in Parquet files, frames in videos, and what
``meta/`` says of them.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, Unpack, cast

import numpy as np
import torch
from tensordict import TensorDict

from engram._support import checks, words
from engram._support.field_paths import FieldPath, nested, public
from engram.datasets import importing as of
from engram.datasets.tables import ParquetRows, Stored, arrow_table, check_dtypes, distinct, stored, written_whole
from engram.datasets.videos import Frames, VideoFrames, Videos
from engram.env.robot import RobotRecorder, record_robot
from engram.errors import DatasetError
from engram.store.memory import torch_dtype
from engram.torchrl.dumps import read
from engram.torchrl.items import TorchRLDump
from engram.types import StrPath

if TYPE_CHECKING:
    import pyarrow as pa
    from gymnasium import Space
    from minari import MinariDataset


class _Episodes(of.Source):
    """The episodes of a data set of Minari's, by its own reader."""

    def __init__(self, call: str, where: StrPath, dataset: MinariDataset, arguments: of.ImportArguments) -> None:
        super().__init__(call, where)
        self._storage, self.rows, self.finals = dataset.storage, int(dataset.total_steps), int(dataset.total_episodes)
        self.files = sorted(path for path in Path(self._storage.data_path).rglob("*") if path.is_file())
        first = next(self._read(0), {})
        self.names = of.new_names(call, [*first], arguments.get("rename"))
        steps = len(first.get(("rewards",), ()))
        #: Of which there is an entry after the last step: all observations, and infos that were recorded at resets, too.
        infos = (path for path, leaf in first.items() if path[0] == "infos" and len(leaf) > steps)
        self._after = {*infos, *(path for path in first if path[0] == "observations")}

    def _read(self, first: int) -> Iterator[of.Columns]:
        found = iter(self._storage.get_episodes(range(first, self.finals)))
        for n in range(first, self.finals):
            try:
                episode = next(found)
            except (OSError, LookupError, ValueError, StopIteration) as error:
                raise self.refuse(f"episode {n} of {self.finals} is missing or damaged ({error}).") from error
            kept = ("observations", "actions", "rewards", "terminations", "truncations")
            named = {name: episode[name] for name in kept} | {"infos": episode["infos"] or {}}
            yield cast("of.Columns", dict(of.flat_names(named)))

    def _checked(self, n: int, episode: of.Columns) -> of.Columns:
        columns, steps = {}, len(episode["rewards",])
        for path in [old for old, new in self.names.items() if new is not None or old == ("rewards",)]:
            expected, got = steps + (path in self._after), len(episode.get(path, ()))
            if got != expected:
                raise self.refuse(f"episode {n}: {public(path)!r}: expected {expected} entries, got {got}.")
            columns[path] = np.asarray(episode[path])
        return columns

    def blocks(self, row: int, episode: int) -> Iterator[of.Block]:  # noqa: ARG002 - it is known by its number
        gathered: list[of.Columns] = []
        nbytes = 0
        for n, one in enumerate(self._read(episode), episode):
            gathered.append(self._checked(n, one))
            nbytes += sum(column.nbytes for column in gathered[-1].values())
            if nbytes > of.BLOCK_BYTES:
                yield self._block(gathered)
                gathered, nbytes = [], 0
        if gathered:
            yield self._block(gathered)

    def _block(self, episodes: list[of.Columns]) -> of.Block:
        kept = {old: new for old, new in self.names.items() if new is not None}
        lengths = np.array([len(episode["rewards",]) for episode in episodes])
        seen = {old: new for old, new in kept.items() if old in self._after}
        finals = {new: np.stack([one[old][-1] for one in episodes]) for old, new in seen.items()}
        pieces = {new: [one[old][:n] for one, n in zip(episodes, lengths, strict=True)] for old, new in kept.items()}
        return of.Block({new: np.concatenate(some) for new, some in pieces.items()}, lengths, finals)


def from_minari(
    source: StrPath, directory: StrPath, *, download: bool = False, **more: Unpack[of.ImportArguments]
) -> of.DataSet:
    """Write a data set of Minari's to a store in a directory, and open it read-only.

    Of the T + 1 observations of an episode, T are in its rows, and the last one is in the folder ``finals`` of the directory: a
    :class:`NextFromFollowing` reads the next observations of all steps. So it is with infos that were also recorded at resets. Dict and
    Tuple spaces and infos are nested fields.

    Args:
        source: the folder of a data set, or its name, such as ``"D4RL/door/human-v2"``, among those on this machine.
        directory, rename, batch_size, progress, show: as for :func:`from_numpy`.
        download: let Minari download a data set that is not on this machine.

    Raises:
        DatasetError: an episode is missing or damaged, or a field holds text: ``rename={"infos": None}`` leaves infos out.
            FileNotFoundError: there is no such data set. ConnectionError: it cannot be downloaded.
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
    Observations, actions, rewards, end flags, and fields of a group ``"infos"`` are written, as they are stored; others have no place.

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
        lasting = [key for key in columns if key[0] == "observation" or (key[0] == "infos" and key in block.finals)]
        after = {key: store.after(block, key, final) for key in lasting}
        whole = {
            "rewards": columns.get(of.REWARD, zeros.astype(np.float32)),
            "terminations": columns.get(of.TERMINATED, zeros),
            "truncations": columns.get(of.TRUNCATED, last),
        }
        for number, (start, end) in enumerate(zip(ends - block.lengths, ends, strict=True)):
            part = {key: column[start:end] for key, column in columns.items()}
            part |= {key: np.append(part[key], one[number, None], 0) for key, one in after.items()}
            groups = {
                name: _entries({key[1:]: column for key, column in part.items() if key[0] == group})
                for name, group in (("observations", "observation"), ("actions", "action"), ("infos", "infos"))
            }
            yield {**groups, **{name: column[start:end].reshape(-1) for name, column in whole.items()}}


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
    return of.import_source(_Dump("from_torchrl", checks.check_path("from_torchrl: path", path), more), directory, more)


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


#: Columns by name; and what ``meta/`` says of an episode.
Named: TypeAlias = dict[str, of.Array]
Row: TypeAlias = dict[str, object]
_VERSION, _INFO, _EPISODES, _TASKS = "v3.0", "meta/info.json", "meta/episodes", "meta/tasks.parquet"
_LEFT_OUT = (of.TRAJECTORY, of.RETURN, ("next", "observation"))
_CHUNK = "chunk-{chunk_index:03d}/file-{file_index:03d}"
#: Columns that say where a row belongs.
_PLACE = ("episode_index", "frame_index", "timestamp")
#: Megabytes of a file, and files of a chunk, after which LeRobot begins the next one.
DATA_MB, VIDEO_MB, CHUNK_FILES = 100, 200, 1000


class _LeRobot(ParquetRows):
    """The episodes of a data set, in the order of their numbers. A number is no place: there may be gaps."""

    def __init__(self, call: str, path: Path, video: str, arguments: of.ImportArguments) -> None:
        of.Source.__init__(self, call, path)
        checks.check_choice(f"{call}: video", video, ("decode", "reference"))
        self._refers, self._folder = video == "reference", path
        table = of.required("pyarrow.parquet", "datasets", call).read_table
        damage = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
        with words.raise_as(self.refuse, f"meta/: expected whole files of format {_VERSION}", damage):
            info, sides = json.loads((path / _INFO).read_bytes()), ("from", "to")
            if info["codebase_version"] != _VERSION:
                raise LookupError(f"codebase_version is {info['codebase_version']!r}")
            features, self._half = info["features"], 0.5 / checks.check_number("fps", info["fps"], least=0.001)
            found = [(key, tuple(one["shape"]), one["dtype"]) for key, one in features.items()]
            self._shapes, self._images = ({k: s for k, s, of_ in found if of_ == kind} for kind in ("video", "image"))
            if bad := [one for one in (self._shapes | self._images).items() if _unsafe(*one)]:
                raise LookupError(f"cameras: expected names without '/' and three positive ints each, got {bad}")
            kinds = ["data", *map("videos/{}".format, self._shapes)]
            wanted = [f"{kind}/{part}_index" for kind in kinds for part in ("chunk", "file")]
            wanted += ["episode_index", "length", *(f"{kind}/{side}_timestamp" for kind in kinds[1:] for side in sides)]
            listed: list[dict[str, float]] = table(path / _EPISODES, columns=wanted).to_pylist()
            tasks = table(path / _TASKS).sort_by("task_index").to_pydict()
            totals = [info["total_episodes"], info["total_frames"]]
        self._listed = sorted(listed, key=lambda one: one["episode_index"])
        files = {kind: dict.fromkeys(_file(path, kind, one) for one in self._listed) for kind in kinds}
        super().__init__(call, path, [*files.pop("data")], arguments)
        self.ends = ()  # the number alone tells episodes apart
        numbers, rows = {one["episode_index"] for one in listed}, sum(one["length"] for one in listed)
        got = [len(numbers), len(listed), rows, self.rows]
        self._expect(got, [totals[0], *totals, totals[1]], f"{_EPISODES}: numbers, episodes, rows; and rows in data/")
        lacking = {*_PLACE} - {".".join(path) for path, new in self.names.items() if new is not None}
        self._expect(lacking, set(), "missing columns in data/, or columns that were left out")
        self.files = [*self.files, path / _INFO, path / _TASKS, *(one for each in files.values() for one in each)]
        [one.stat() for one in self.files]  # raises FileNotFoundError, which names it
        texts: list[str] = next((tasks[key] for key in tasks if key != "task_index"), [])
        axes = {key: feature.get("names") for key, feature in features.items()}
        self.about = {"fps": info["fps"], "tasks": texts, "names": axes}
        self._cameras = {key: new for key in self._shapes | self._images if (new := self.names[tuple(key.split("."))])}
        if self._cameras:  # of which one video each is open
            self._reader = lru_cache(len(self._cameras))(of.required("engram.env.video", "robot", call).Reader)
        if self._refers:
            self.about |= {"videos": self._referred()}

    def identity(self) -> dict[str, object]:
        found = super().identity()
        return found | {"names": [found["names"], "references"]} if self._refers else found

    def _referred(self) -> Videos:
        """The videos that rows refer to. Raises ``DatasetError``: one is damaged, or has fewer frames than rows."""
        rows, cameras = Counter[Path](), {key: new for key, new in self._cameras.items() if key in self._shapes}
        for key, one in product(cameras, self._listed):
            rows[_file(self._folder, f"videos/{key}", one)] += int(one["length"])
        for file, expected in rows.items():
            with self._readable(name := file.relative_to(self._folder)):
                if 0 < (count := self._reader(file).count) < expected:
                    raise self.refuse(f"{name}: expected {expected} frames, got {count}: it has fewer than rows.")
        self._numbers = {file: number for number, file in enumerate(rows)}
        names = [str(file.relative_to(self._folder)) for file in rows]
        shapes = [(new, self._shapes[key]) for key, new in cameras.items()]
        return Videos(str(self._folder.absolute()), names, self._half, shapes)

    def _readable(self, name: object) -> AbstractContextManager[None]:
        return words.raise_as(self.refuse, f"{name}: expected whole frames", OSError)

    def _array(self, name: str, column: pa.Array) -> of.Array:
        """As of every table; of images, the bytes of their files."""
        if name not in self._images:
            return super()._array(name, column)
        files = column.field("bytes").to_pylist() if self._arrow.types.is_struct(column.type) else [None]
        if None in files:
            raise self.refuse(f"column {name!r}: expected images in the table, got {column.type} without bytes.")
        return np.fromiter(files, object, len(files))

    def _expect(self, got: object, expected: object, what: str) -> None:
        if got != expected:
            raise self.refuse(f"{what}: expected {expected}, got {got}.")

    def named(self, found: Iterable[FieldPath], arguments: of.ImportArguments, usual: of.Usual = of.USUAL) -> None:
        super().named([*found, *(tuple(key.split(".")) for key in self._shapes)], arguments, {**usual, "index": None})

    def blocks(self, row: int, episode: int) -> Iterator[of.Block]:
        for block in super().blocks(row, episode):
            pairs = zip(islice(self._listed, episode, None), block.episodes(), strict=False)
            frames = [self._checked(listed, columns) for listed, columns in pairs]
            if self._images or (not self._refers and self._cameras):
                whole = [columns | found for columns, found in zip(block.episodes(), frames, strict=True)]
                yield from (of.Block(one, np.array([n]), {}) for one, n in zip(whole, block.lengths, strict=True))
            else:
                refs = {new: np.concatenate([found[new] for found in frames]) for new in frames[0]}
                yield of.Block(block.columns | refs, block.lengths, {})
            episode += len(frames)

    def _checked(self, listed: Mapping[str, float], columns: of.Columns) -> of.Columns:
        """The frames of an episode. Raises ``DatasetError``: it is not the one that follows in ``meta/``."""
        numbers, frame, time = (columns[cast("FieldPath", self.names[key,])].reshape(-1) for key in _PLACE)
        place = listed["episode_index"], listed["length"]
        self._expect((int(numbers[0]), len(frame)), place, "the next episode, and its rows")
        if (frame != np.arange(len(frame))).any() or (np.diff(time) <= 0).any():
            raise self.refuse(f"episode {numbers[0]}: expected frame_index from 0 on, and timestamps that grow.")
        found = of.Columns()
        for key, new in self._cameras.items():
            shape, n = (self._shapes | self._images)[key], len(time)
            if key in self._images:
                frames = self._decoded(columns[new], key, shape)
            else:
                begin, end = (listed[f"videos/{key}/{side}_timestamp"] for side in ("from", "to"))
                file, times = _file(self._folder, f"videos/{key}", listed), time.astype(np.float64) + begin
                frames = self._frames(file, shape, times[-1:] if self._refers else times, end)
                if self._refers:
                    next(frames)  # the last one is missing in a file that was cut
                    found[new] = np.stack([np.full(n, float(self._numbers[file])), times], 1)
                    continue
            found[new] = cast("of.Array", Frames((n, *shape), frames))
        return found

    def _decoded(self, files: of.Array, key: str, shape: tuple[int, ...]) -> Iterator[of.Array]:
        for file in files:
            with self._readable(f"an image of {key!r}"):
                frame = next(iter(self._reader.__wrapped__(io.BytesIO(file))), np.zeros(0))
            self._expect(frame.shape, shape, f"{key}: the shape of its images")
            yield frame

    def _frames(self, path: Path, shape: tuple[int, ...], times: of.Array, end: float) -> Iterator[of.Array]:
        """The frames of a video at times, which grow and lie before its end."""
        name = path.relative_to(self._folder)
        with self._readable(name):
            for time in times.tolist():
                frame = self._reader(path).at(time, self._half, end)
                if frame is None:
                    raise self.refuse(f"{name}: expected a frame at {time:.3f} s: it has fewer than there are rows.")
                self._expect(frame.shape, shape, f"{name}: the shape of its frames")
                yield frame


def _unsafe(name: str, shape: tuple[object, ...] = (1, 1, 1)) -> bool:
    """Whether the name of a feature cannot be that of a folder, as files would lie elsewhere, or a shape not that of frames."""
    leads_astray = not name.strip(".") or not {*"/\0"}.isdisjoint(name)
    return leads_astray or [isinstance(n, int) and n > 0 for n in shape] != [True] * 3


def _file(root: Path, kind: str, listed: Mapping[str, object]) -> Path:
    """Where the data, or a video, of an episode lies."""
    at = {f"{part}_index": listed[f"{kind}/{part}_index"] for part in ("chunk", "file")}
    return root / kind / (_CHUNK.format(**at) + (".mp4" if kind.startswith("videos") else ".parquet"))


def from_lerobot(
    path: StrPath,
    directory: StrPath,
    *,
    video: Literal["decode", "reference"] = "decode",
    **more: Unpack[of.ImportArguments],
) -> of.DataSet:
    """Write a data set of LeRobot's, format v3.0, to a store in a directory, and open it read-only.

    A feature ``observation.state`` is the field ``("observation", "state")``, ``episode_index`` is ``("collector", "traj_ids")``, and
    ``index`` is left out. Videos and images are decoded: a camera is a field of uint8 frames ``[H, W, 3]``, a few of which are in memory
    at a time. With ``video="reference"`` frames stay in the videos of the data set, which must stay where they are: rows have the
    number of a file and a time, and the :class:`VideoFrames` of the buffer decodes the frames of each batch.
    ``import.json`` in the directory keeps the texts of tasks, which ``task_index`` numbers: ``["about"]["tasks"]``.

    Args:
        path: the folder of the data set on this machine; nothing is downloaded.
        directory, rename, batch_size, progress, show: as for :func:`from_numpy`.
            ``rename={("observation", "images", "top"): None}`` leaves a camera out, and its video is not decoded.
        video: whether frames are decoded into the store, or their videos are referred to.

    Raises:
        DatasetError: the data set is of another version; a file is damaged; an episode is missing, has another number of rows than
            ``meta/`` says, timestamps that do not grow, or fewer frames than rows; a feature is of text.
        FileNotFoundError: there is no such data set, or a file is missing.
        ModuleNotFoundError: pyarrow or PyAV is missing, which ``engram-replay[datasets,robot]`` brings. Others as :func:`from_numpy`.

    >>> import tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_lerobot, from_numpy, to_lerobot
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"action": np.arange(4.0), "episode": [0, 0, 1, 1]}, folder + "/data").close()
    >>> to_lerobot(folder + "/data", folder + "/dataset", fps=10)
    >>> rb = from_lerobot(folder + "/dataset", folder + "/again")
    >>> rb["action"].tolist(), rb["collector", "traj_ids"].tolist()
    ([0.0, 1.0, 2.0, 3.0], [0, 0, 1, 1])
    """
    source = _LeRobot("from_lerobot", checks.check_path("from_lerobot: path", path), video, more)
    rb = of.import_source(source, directory, more)
    if video == "reference":
        rb.append_transform(VideoFrames(directory))
    return rb


# ---- out ----------------------------------------------------------------------------------------------------------------


class _Writer(Protocol):
    def write(self, part: object) -> None: ...

    def close(self) -> None: ...


class _Files:
    """Files of one kind, one after the other, each of the size that LeRobot gives them."""

    def __init__(self, root: Path, kind: str) -> None:
        self._root, self._kind, self._limit = root, kind, (DATA_MB if kind == "data" else VIDEO_MB) * 2**20
        self._number, self._frames, self._path = 0, 0, root
        self._writer: _Writer | None = None

    def take(self, frames: int, make: Callable[[Path], _Writer], row: Row) -> tuple[_Writer, int]:
        """What writes the next frames, and how many its file had before. ``row``, of ``meta/``, gets the numbers of the file."""
        written = self._path.stat().st_size if self._path.exists() else 0  # of a few frames nothing is written yet
        if self._writer is not None and written * (1 + frames / self._frames) >= self._limit:
            self.close()
            self._number += 1
        row[f"{self._kind}/chunk_index"], row[f"{self._kind}/file_index"] = divmod(self._number, CHUNK_FILES)
        if self._writer is None:
            self._path, self._frames = _file(self._root, self._kind, row), 0
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = make(self._path)
        self._frames += frames
        return self._writer, self._frames - frames

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


_QUANTILES = {"min": 0.0, "max": 1.0, "q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def _stats(values: of.Array, steps: int, shape: tuple[int, ...]) -> Named:
    """What LeRobot normalizes by, from values ``[N, *]`` of an episode."""
    values = values.astype(np.float64)
    quantiles = zip(_QUANTILES, np.quantile(values, [*_QUANTILES.values()], axis=0), strict=True)
    found = {"mean": values.mean(0), "std": values.std(0), **dict(quantiles)}
    return {key: value.reshape(shape) for key, value in found.items()} | {"count": np.array([steps])}


def _together(episodes: list[Named]) -> dict[str, object]:
    """The statistics of several episodes. Quantiles are means of theirs, as LeRobot's are."""
    one = {key: np.stack([found[key] for found in episodes]) for key in episodes[0]}
    count = one.pop("count")
    mean = {key: np.average(value, 0, weights=count[:, 0]) for key, value in one.items()}
    spread = np.average(one["std"] ** 2 + (one["mean"] - mean["mean"]) ** 2, 0, weights=count[:, 0])
    exact = {"min": one["min"].min(0), "max": one["max"].max(0), "std": np.sqrt(spread), "count": count.sum(0)}
    return {key: value.tolist() for key, value in (mean | exact).items()}


def _encoded(frames: of.Array, encoder: _Writer) -> of.Array:
    """Write frames to a video. Returns pixels ``[N, 3]`` of some: at most 100 frames, of about 150 x 150."""
    samples, found = {*np.linspace(0, len(frames) - 1, 100).round().astype(int).tolist()}, []
    step = max(1, max(frames.shape[1:]) // 150)
    for number in range(len(frames)):
        encoder.write(frame := frames[number : number + 1][0])
        if number in samples:
            found.append(frame[::step, ::step].reshape(-1, 3) / 255)
    return np.concatenate(found)


def _write(root: Path, episodes: Iterator[Named], fps: float, tasks: list[str], names: Mapping[str, object]) -> None:
    """Write episodes as a data set: columns, of which those of cameras are ``[T, H, W, 3]``."""
    parquet = of.required("pyarrow.parquet", "datasets", "to_lerobot")
    meta, features, total = list[Row](), dict[str, object](), 0
    stats, files = dict[str, list[Named]](), dict[str, _Files]()
    for number, columns in enumerate(episodes):
        rows, steps = of.Columns(), np.arange(len(next(iter(columns.values()))))
        n, task = len(steps), columns.get("task_index", steps * 0) * (len(tasks) > 1 or tasks == [""])
        if bad := [name for name in columns if _unsafe(name)]:
            raise DatasetError(f"to_lerobot: features {bad}: expected names without '/'. Store them by others.")
        if task.dtype.kind not in "iu" or task.shape != (n,) or not 0 <= task.min() <= task.max() < len(tasks):
            raise DatasetError(f"to_lerobot: task_index: expected {n} ints < {len(tasks)}, got {task.dtype} {task}.")
        columns |= {"task_index": task, "timestamp": (steps / fps).astype(np.float32), "frame_index": steps}
        columns |= {"episode_index": steps * 0 + number, "index": steps + total}
        row: Row = {"episode_index": number, "length": n, "dataset_from_index": total}
        row |= {"dataset_to_index": (total := total + n), "tasks": [tasks[one] for one in {*task.tolist()}]}
        for name, column in columns.items():
            shape, dtype, kind = column.shape[1:] or (1,), str(column.dtype), f"videos/{name}"
            if dtype == "uint8" and column.ndim == 4 and shape[2] == 3:
                make = partial(of.required("engram.env.video", "robot", "to_lerobot").Encoder, fps=fps, keys=2)
                encoder, before = files.setdefault(kind, _Files(root, kind)).take(n, make, row)
                row |= {f"{kind}/from_timestamp": before / fps, f"{kind}/to_timestamp": (before + n) / fps}
                found, dtype = _stats(_encoded(column, encoder), n, (3, 1, 1)), "video"
            else:
                rows[name,] = column = column.reshape(n) if shape == (1,) else column
                found = _stats(column.reshape(-1, shape[-1]), n, (shape[-1],))
            row |= {f"stats/{name}/{key}": value.tolist() for key, value in found.items()}
            stats.setdefault(name, []).append(found)
            features[name] = {"dtype": dtype, "shape": shape, "names": names.get(name)}
        table = arrow_table(rows, "to_lerobot")
        make = partial(parquet.ParquetWriter, schema=table.schema)
        files.setdefault("data", _Files(root, "data")).take(n, make, row)[0].write(table)
        meta.append(row | {f"{_EPISODES}/chunk_index": 0, f"{_EPISODES}/file_index": 0})
    for one in files.values():
        one.close()
    info: Row = {"fps": int(fps) if fps == int(fps) else fps, "features": features, "total_frames": total}
    info |= {"video_path": f"videos/{{video_key}}/{_CHUNK}.mp4" if len(files) > 1 else None}
    _describe(root, meta, info, tasks, {name: _together(found) for name, found in stats.items()})


def _describe(root: Path, meta: list[Row], info: Row, tasks: list[str], stats: object) -> None:
    """Write ``meta/``. Raises ``DatasetError``: there is no episode."""
    arrow, parquet = (of.required(module, "datasets", "to_lerobot") for module in ("pyarrow", "pyarrow.parquet"))
    if not meta:
        raise DatasetError(f"to_lerobot: expected an episode that was ended, at a rate of fps={info['fps']}, got none.")
    path = _file(root, _EPISODES, meta[0])
    path.parent.mkdir(parents=True)
    parquet.write_table(arrow.Table.from_pylist(meta), path)
    task = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    pandas = {"index_columns": ["task"], "columns": [task], "column_indexes": [], "pandas_version": "2.0.0"}
    table = arrow.table({"task_index": np.arange(len(tasks)), "task": tasks})
    parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), root / _TASKS)
    info |= {"codebase_version": _VERSION, "total_episodes": len(meta), "total_tasks": len(tasks), "robot_type": None}
    info |= {"chunks_size": CHUNK_FILES, "data_files_size_in_mb": DATA_MB, "video_files_size_in_mb": VIDEO_MB}
    info |= {"data_path": f"data/{_CHUNK}.parquet", "splits": {"train": f"0:{len(meta)}"}}
    (root / _INFO).write_text(json.dumps(info, indent=4))
    (root / "meta/stats.json").write_text(json.dumps(stats, indent=4))


def _steps(store: Stored, fps: float, videos: VideoFrames | None) -> Iterator[Named]:
    """The episodes of a store. What LeRobot takes from the next row, and what an import has added, is left out."""
    for found in (one for block in store.blocks(0, 0) for one in block.episodes()):
        kept = {path: one for path, one in found.items() if path[:2] not in _LEFT_OUT}
        if videos is not None:
            refs = {path: kept[path] for path in kept.keys() & videos.shapes.keys()}
            kept |= {path: cast("of.Array", videos.column(path, one)) for path, one in refs.items()}
        columns = dict(zip(distinct([*map(".".join, kept)], store.call), kept.values(), strict=True))
        for name, unit in (("timestamp", 1 / fps), ("frame_index", 1), ("index", 1)):
            at = columns.get(name, np.zeros(1)).reshape(-1) * 1.0
            off = abs(at - at[0] - np.arange(len(at)) * unit).max()
            if not off <= unit / 2:
                raise store.refuse(f"{name}: expected rows {unit:g} apart, one is {off:.3f} off. Give fps, or rename.")
        yield columns


def _recorded(recorder: RobotRecorder, fps: float, tolerance: float) -> Iterator[Named]:
    """The episodes of a robot that were ended: a row for each one of the sensors of a rate, or else of a camera."""
    streams = sorted(recorder.streams, key=lambda one: (one.spec.fps != fps, one.spec.is_video))
    for episode in recorder.episodes() if streams[0].spec.fps == fps else ():
        rows, columns = episode.timestamps(next(iter(streams[0].spec.features))), Named()
        for stream in streams if episode.complete else ():
            times = episode.timestamps(next(iter(stream.spec.features)))
            near = np.searchsorted((times[1:] + times[:-1]) / 2, rows)
            far = abs(times[near] - rows).max() if len(times) and len(rows) else np.inf
            if far > tolerance:
                said = f"episode {episode.number}: expected {[*stream.spec.features]} within {tolerance:g} s of a row"
                raise DatasetError(f"to_lerobot: {recorder.directory}: {said}, got one {far:.3f} s away.")
            for name, leaf in stream.spec.features.items():
                if stream.spec.is_video:
                    pairs = zip(episode.frames(name), np.bincount(near, minlength=len(times)).tolist(), strict=True)
                    frames = (frame for frame, often in pairs for _ in range(often))
                    columns[name] = cast("of.Array", Frames((len(rows), *leaf.shape), frames))
                else:
                    columns[name] = episode.read(name)[near]
        if columns:
            yield columns


def to_lerobot(
    directory: StrPath, path: StrPath, *, fps: float | None = None, task: str | None = None, tolerance: float = 0.1
) -> None:
    """Write the episodes of a store, or of a robot's recording, as a data set of LeRobot's, format v3.0.

    A field ``("observation", "state")`` is the feature ``observation.state``. Fields of uint8 ``[H, W, 3]`` become videos, of which
    every second frame is a key frame; others are columns, as they are. Timestamps, numbers of episodes and statistics are computed.
    Next observations are left out, since LeRobot reads them from the next row.

    Of what :func:`record_robot` has recorded, the episodes that were ended are written. Every row of the sensors whose rate is ``fps``,
    or of a camera if there are none, is a row; of the other streams it has what was recorded nearest to its timestamp.

    Args:
        directory: of the store, which is only read, or of the recording, which is not recorded to meanwhile.
        path: the folder. It must not exist, and appears when it is whole.
        fps: the rows of a second. Default: that of the data set which was imported, or of the recording.
        task: the text of the task of all episodes. Default: those of the data set which was imported, or none.
        tolerance: how many seconds from a row what it gets of other streams may lie.

    Raises:
        DatasetError: there is no episode; stored timestamps are not ``1 / fps`` apart; ``index`` or ``frame_index`` does not count rows,
            or ``task_index`` numbers no text; the name of a field has a ``/``; of a stream nothing is near enough to a row, or
            none has the rate ``fps``; a field is of a dtype that Arrow lacks. FileExistsError: the folder is there.
        TypeError, ValueError: ``fps`` is not known, or no number. StoreInUse: the robot is recorded.
        ModuleNotFoundError: pyarrow, or PyAV for frames, is missing; ``engram-replay[datasets,robot]`` brings both.

    Cost: the longest episode of a store is in memory; of a recording, the sensors of the longest one and a few frames.

    >>> import json, pathlib, tempfile
    >>> import numpy as np
    >>> from engram.datasets import from_numpy, to_lerobot
    >>> folder = tempfile.mkdtemp()
    >>> from_numpy({"action": np.arange(4.0), "episode": [0, 0, 1, 1]}, folder + "/data").close()
    >>> to_lerobot(folder + "/data", folder + "/dataset", fps=10, task="push")
    >>> json.loads(pathlib.Path(folder, "dataset/meta/info.json").read_text())["total_episodes"]
    2
    """
    call = "to_lerobot"
    folder = checks.check_path(f"{call}: directory", directory)
    robot, note = folder / "robot.json", folder / of.NOTE
    known = json.loads(next((one.read_bytes() for one in (robot, note) if one.is_file()), b"{}"))
    about = {"fps": None, "tasks": None, **known, **known.get("about", {})}
    rate = checks.check_number(f"{call}: fps", about["fps"] if fps is None else fps, least=0.001)
    tasks = (about["tasks"] or [""]) if task is None else [task]
    names = about.get("names") or {key: one.get("names") for key, one in about.get("features", {}).items()}
    opened = record_robot(folder, encode=False) if robot.is_file() else stored(folder, call)
    with opened as source, written_whole(path, call) as whole:
        whole.mkdir()
        videos = VideoFrames(folder) if "videos" in about else None
        episodes = _steps(source, rate, videos) if isinstance(source, Stored) else _recorded(source, rate, tolerance)
        _write(whole, episodes, rate, tasks, names)
