"""Minari's data sets: episodes of T steps and T + 1 observations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from engram._support.field_paths import FieldPath
from engram.datasets.blocks import (
    BLOCK_BYTES,
    FLAGS,
    REWARD,
    Block,
    Rename,
    Source,
    file_identity,
    flat_names,
    nested,
    new_names,
    required,
    shown_names,
)
from engram.datasets.episodes import stored, written_whole
from engram.datasets.importing import ImportArguments, import_source
from engram.errors import DatasetError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from gymnasium import Space

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.datasets.blocks import Columns

_OBSERVATIONS = "observations"
#: Of an episode, besides observations and actions.
_PER_STEP = ("rewards", "terminations", "truncations")


class _Episodes(Source):
    """The episodes of a data set, by Minari's own reader."""

    def __init__(self, call: str, where: str, dataset: Any, rename: Rename | None) -> None:
        super().__init__(call, where)
        self._storage = dataset.storage
        self.rows, self.finals = int(dataset.total_steps), int(dataset.total_episodes)
        if not self.finals:
            raise self.refuse("expected episodes, got none.")
        self.names = new_names(call, self._fields(0, next(self._read(0))), rename)

    def identity(self) -> dict[str, object]:
        path = Path(self._storage.data_path)
        return {
            **file_identity(sorted(one for one in path.rglob("*") if one.is_file())),
            "names": shown_names(self.names),
        }

    def _read(self, first: int) -> Iterator[dict[str, Any]]:
        found = iter(self._storage.get_episodes(range(first, self.finals)))
        for number in range(first, self.finals):
            try:
                episode: dict[str, Any] = next(found)
            except (OSError, KeyError, ValueError, StopIteration) as error:
                raise self.refuse(
                    f"episode {number} of {self.finals} cannot be read ({type(error).__name__}: {error}). It is missing or damaged."
                ) from error
            yield episode

    def _fields(self, number: int, episode: Mapping[str, Any]) -> dict[FieldPath, Any]:
        if int(episode["id"]) != number:
            raise self.refuse(f"expected episode {number}, got {episode['id']}: episodes of it are missing.")
        some = {name: _mapping(episode[name]) for name in (_OBSERVATIONS, "actions", *_PER_STEP)}
        found = {path: np.asarray(leaf) for path, leaf in flat_names(some, self.call)}
        steps = len(found["rewards",])
        for path, column in found.items():
            expected = steps + (path[0] == _OBSERVATIONS)
            if len(column) != expected:
                raise self.refuse(
                    f"episode {number}: {'/'.join(path)}: expected {expected} entries of {steps} steps, got {len(column)}."
                )
        return found

    def blocks(self, row: int, episode: int) -> Iterator[Block]:  # noqa: ARG002 - it is known by its episode
        gathered: list[dict[FieldPath, Any]] = []
        nbytes = 0
        for number, one in enumerate(self._read(episode), episode):
            gathered.append(self._fields(number, one))
            nbytes += sum(column.nbytes for column in gathered[-1].values())
            if nbytes > BLOCK_BYTES:
                yield self._block(gathered)
                gathered, nbytes = [], 0
        if gathered:
            yield self._block(gathered)

    def _block(self, episodes: list[dict[FieldPath, Any]]) -> Block:
        columns: Columns = {}
        finals: Columns = {}
        for old, new in self.names.items():
            if new is None:
                continue
            pieces = [episode[old] for episode in episodes]
            if old[0] == _OBSERVATIONS:
                finals[new] = np.stack([piece[-1] for piece in pieces])
                pieces = [piece[:-1] for piece in pieces]
            columns[new] = np.concatenate(pieces)
        return Block(columns, np.array([len(episode["rewards",]) for episode in episodes]), finals)


def _mapping(entry: Any) -> Any:
    """Tuples of spaces as mappings by number."""
    if isinstance(entry, tuple):
        return {str(number): _mapping(part) for number, part in enumerate(entry)}
    return {key: _mapping(part) for key, part in entry.items()} if isinstance(entry, dict) else entry


def from_minari(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    download: bool = False,
    **more: Unpack[ImportArguments],
) -> ReplayBuffer[Any]:
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
    minari = required("minari", "minari", call)
    folder = next((path for path in (Path(source), Path(source) / "data") if (path / "metadata.json").is_file()), None)
    try:
        dataset = (
            minari.load_dataset(str(source), download=download) if folder is None else minari.MinariDataset(folder)
        )
    except FileNotFoundError as error:
        text = (
            f"{call}: expected the folder of a data set, or the name of one on this machine (download=True fetches it)"
        )
        raise FileNotFoundError(2, text, str(source)) from error
    except OSError as error:
        if not download or folder is not None:
            raise DatasetError(f"{call}: {source}: cannot be read ({error}).") from error
        raise ConnectionError(f"{call}: {source}: cannot be downloaded ({type(error).__name__}: {error}).") from error
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise DatasetError(
            f"{call}: {source}: expected a data set that Minari {minari.__version__} reads ({error})."
        ) from error
    return import_source(_Episodes(call, str(source), dataset, rename), directory, more)


def to_minari(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    dataset_id: str | None = None,
    observation_space: Space[Any] | None = None,
    action_space: Space[Any] | None = None,
    final: str = "refuse",
) -> None:
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
    minari = required("minari", "minari", call)
    minari_storage = required("minari.dataset.minari_storage", "minari", call)
    name = Path(path).name if dataset_id is None else dataset_id
    required("minari.dataset.minari_dataset", "minari", call).parse_dataset_id(name)
    with stored(directory, call) as store, written_whole(path, call) as partial:
        for key in ("observation", "action"):
            if not any(field[0] == key for field in store.names):
                raise store.refuse(f"expected a field {key!r}, got {[*store.names]}.")
        partial.mkdir()
        first = next(store.episodes(final))[0]
        spaces = [
            space or _space(_entries({field[1:]: column for field, column in first.items() if field[0] == key}))
            for key, space in (("observation", observation_space), ("action", action_space))
        ]
        data = minari_storage.MinariStorage.new(partial / "data", *spaces, jpeg_encoding=False)
        data.update_episodes(_buffers(store.episodes(final), minari.data_collector.EpisodeBuffer))
        data.update_metadata({"dataset_id": name, "minari_version": minari.__version__})


def _space(column: Any) -> Any:
    """Boxes without bounds, of the shapes of columns."""
    spaces = required("gymnasium.spaces", "gym", "to_minari")
    if isinstance(column, dict):
        return spaces.Dict({key: _space(part) for key, part in column.items()})
    if column.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, column.shape[1:], column.dtype)
    limits = (0, 1) if column.dtype == bool else (np.iinfo(column.dtype).min, np.iinfo(column.dtype).max)
    return spaces.Box(*limits, column.shape[1:], column.dtype)


def _buffers(episodes: Iterator[tuple[Columns, Columns]], buffer: Any) -> Iterator[Any]:
    for columns, after in episodes:
        observations = {key[1:]: np.concatenate([columns[key], last[None]]) for key, last in after.items()}
        actions = {key[1:]: column for key, column in columns.items() if key[0] == "action"}
        n = len(next(iter(columns.values())))
        flags = [columns[flag].reshape(-1) if flag in columns else np.zeros(n, bool) for flag in FLAGS[:2]]
        if FLAGS[0] not in columns and FLAGS[1] not in columns:
            flags[1][-1] = True  # no flag says how it ended
        yield buffer(
            observations=_entries(observations),
            actions=_entries(actions),
            rewards=columns[REWARD].reshape(-1) if REWARD in columns else np.zeros(n),
            terminations=flags[0],
            truncations=flags[1],
        )


def _entries(columns: Columns) -> Any:
    return columns[()] if () in columns else nested(columns)
