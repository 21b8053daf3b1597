"""The storages of an ensemble."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from engram._support.checks import as_numbers
from engram._support.nested import is_tensordict
from engram._support.state import Loads, check_keys, typed
from engram._support.tensordicts import is_tensor_collection
from engram.storages import Storage
from engram.types import Traits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import TypeAlias

    from engram.saved.checkpointers import LoadHook, SaveHook
    from engram.saved.parts import PartSnapshot, Preparation
    from engram.types import StorageLoad

    Change: TypeAlias = Callable[[object], object]


T = TypeVar("T")


@contextmanager
def naming(member: int, after: str = "") -> Iterator[None]:
    """Errors of a member say its number, and what has come of the call."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised by member {member} of the ensemble.{after and ' ' + after}")
        raise


def asks_a_member(call: str, kind: type[Exception] = RuntimeError) -> Callable[..., NoReturn]:
    """A method of a buffer, or of a storage, that an ensemble does not have."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise kind(
            f"{call}: an ensemble has no rows of its own. Ask a member, ensemble[i], or its storage, ensemble.storage[i]."
        )

    refuse.__doc__ = f"Raises ``{kind.__name__}``: it is asked of a member."
    return refuse


#: All members, in order.
ALL = slice(None)


def members_named(index: object, n: int, who: str) -> int | list[int]:
    """The member that an index names, or those.

    Args:
        index: an int, a slice, ``...``, or a list, range, array or tensor of ints.
        n: how many members there are.
        who: what messages begin with.

    Raises:
        TypeError: no index, or floats. RuntimeError: one of more than one dimension. IndexError: there is no such member, or none.
    """
    if index is Ellipsis:
        index = ALL
    if isinstance(index, slice):
        numbers = list(range(n))[index]
    else:
        if isinstance(index, bool) or not isinstance(index, int | list | range | np.ndarray | np.integer | Tensor):
            raise TypeError(f"{who}: expected an int, a slice, or ints that name members, got {type(index).__name__}.")
        named = as_numbers(f"{who}: members", index)
        if named.ndim > 1:
            raise RuntimeError(f"{who}: expected an int or a list of ints, got an index of shape {list(named.shape)}.")
        if named.numel() and (named.dtype.is_floating_point or named.dtype.is_complex or named.dtype is torch.bool):
            raise TypeError(f"{who}: expected ints that name members, got {named.dtype}.")
        for member in named.reshape(-1).tolist():
            if not -n <= member < n:
                raise IndexError(f"{who}: expected a member in [0, {n}), got {member}.")
        if named.ndim == 0:
            return int(named) % n
        numbers = [member % n for member in named.tolist()]
    if not numbers:
        raise IndexError(f"{who}: expected one member at least, got none of {n}.")
    return numbers


def split_index(index: object, who: str) -> tuple[object, object | None]:
    """An index of members, and one of their rows. None: of members alone. Raises ``IndexError``: an empty tuple."""
    if not isinstance(index, tuple):
        return index, None
    if not index:
        raise IndexError(f"{who}: expected an index of members, got ().")
    rows = index[1:]
    return index[0], None if not rows else rows[0] if len(rows) == 1 else rows


def check_ids(ids: object, n: int, what: str) -> Tensor:
    """Numbers of members, int64 on the CPU, of any shape. Raises ``TypeError``: no ints. ``ValueError``: there is no such member."""
    numbers = as_numbers(what, ids)
    if numbers.numel() and (numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype is torch.bool):
        raise TypeError(f"{what}: expected ints, the numbers of members, got {numbers.dtype}.")
    numbers = numbers.to("cpu", torch.int64)
    bad = numbers[(numbers < 0) | (numbers >= n)]
    if len(bad):
        raise ValueError(f"{what}: expected members in [0, {n}), got {int(bad[0])}.")
    return numbers


def routed(index: object, n: int, who: str) -> tuple[Tensor, Tensor]:
    """The members and their rows that an index of an ensemble names: int64 ``[*batch]`` and ``[*batch, ...]``.

    Args:
        index: what ``extend`` returned, or ``"index"`` of a batch: a TensorDict or dict with ``"buffer_ids"`` and ``"index"``.
        n: how many members there are.
        who: what messages begin with.

    Raises:
        TypeError: something else, or no ints. ValueError: no such member, or shapes that do not go together.
    """
    entries = index if isinstance(index, dict) or (is_tensor_collection(index) and is_tensordict(index)) else None
    ids, rows = (None, None) if entries is None else (entries.get("buffer_ids", None), entries.get("index", None))
    if ids is None or rows is None:
        got = type(index).__name__ if entries is None else f"one with {sorted(map(str, entries.keys()))}"
        raise TypeError(
            f"{who}: index: expected what extend returned, or batch['index'], with 'buffer_ids' and 'index', got {got}."
        )
    members, named = check_ids(ids, n, f"{who}: buffer_ids"), as_numbers(f"{who}: index", rows)
    if named.shape[: members.ndim] != members.shape:
        raise ValueError(
            f"{who}: expected an index that begins with the shape of buffer_ids, {list(members.shape)}, got {list(named.shape)}."
        )
    return members, named


class _Storages(Storage):
    """What a buffer asks of the storages of an ensemble."""

    traits = Traits()
    _storages: tuple[Storage, ...]

    @property
    def initialized(self) -> bool:
        return all(one.initialized for one in self._storages)

    @property
    def max_size(self) -> int:
        return sum(one.max_size for one in self._storages)

    @property
    def device(self) -> torch.device | None:
        devices = {one.device for one in self._storages}
        return devices.pop() if len(devices) == 1 else None

    @property
    def write_count(self) -> int:
        return sum(one.write_count for one in self._storages)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._storages)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self._storages)])

    def counters(self) -> dict[str, float]:
        found = [one.counters() for one in self._storages]
        names = dict.fromkeys(name for counts in found for name in counts)
        return {name: sum(counts.get(name, 0) for counts in found) for name in names}

    def next_number(self) -> int:
        """Each has tickets of its own."""
        return 0

    @property
    def shared(self) -> bool:
        return all(one.shared for one in self._storages)

    def share(self, maker: str | None = None) -> None:
        del maker  # each would take the other's place
        for one in self._storages:
            one.share()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._storages)

    def __iter__(self) -> Iterator[Storage]:
        return iter(self._storages)

    def empty(self, *, keep_write_count: bool) -> None:
        for one in self._storages:
            one.empty(keep_write_count=keep_write_count)
            one.notify(None, None)

    add = extend = set = asks_a_member("write")
    __setitem__ = asks_a_member("storage[index] = value")
    extent = asks_a_member("extent")
    contains = asks_a_member("contains")
    tickets_of = hold_nothing = field = locate = resolve = read = patch = pack = batch = asks_a_member("storage[index]")
    prepare = write = edit = prepare_at = asks_a_member("write")
    check_removal = remove = asks_a_member("remove")
    settled = priorities = consumption = groups = limit = asks_a_member("sampler")

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self, *, without: Collection[tuple[str, str]] = ()) -> dict[str, object]:
        """The state of each, by its number."""
        del without
        return {str(number): one.state_dict() for number, one in enumerate(self._storages)}

    def prepare_load(self, state_dict: dict[str, object]) -> StorageLoad:
        who = type(self).__name__
        check_keys(state_dict, tuple(map(str, range(len(self)))), who)
        states = [typed(state_dict, str(number), dict, who) for number in range(len(self))]
        loads = []
        for number, state in enumerate(states):
            with naming(number, "Nothing was changed."):
                loads.append(self._storages[number].prepare_load(state))
        return _Loads(loads)

    def prepare_snapshot(
        self, *, without: Collection[tuple[str, str]] = (), whole: bool = True
    ) -> Preparation[PartSnapshot]:
        del without, whole
        return super(Storage, self).prepare_snapshot()

    def close(self) -> None:
        for one in self._storages:
            one.close()
        super().close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._storages))})"


class StorageEnsemble(_Storages):
    """The storages of an ensemble.

    Args:
        *storages: one of each member.
        transforms: applied to what :meth:`get` returns, one for each storage, of which some may be None.

    Raises:
        TypeError: no storages, another number of transforms, or one that cannot be called.

    >>> import torch
    >>> from engram import ReplayBuffer, LazyTensorStorage, StorageEnsemble
    >>> storage = StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(20))
    >>> len(storage), storage.max_size
    (2, 30)
    """

    def __init__(self, *storages: Storage, transforms: Sequence[Change | None] | None = None) -> None:
        super().__init__()
        who = type(self).__name__
        if not storages or not all(isinstance(one, Storage) for one in storages):
            raise TypeError(f"{who}: expected storages, got {[type(one).__name__ for one in storages] or 'none'}.")
        given: object = () if transforms is None else transforms
        changes = tuple(given) if isinstance(given, Iterable) else (given,)
        if not isinstance(given, Iterable) or not all(one is None or callable(one) for one in changes):
            raise TypeError(
                f"{who}: transforms: expected a list of callables, or None for some, got {transforms!r:.80}."
            )
        if transforms is not None and len(changes) != len(storages):
            raise TypeError(
                f"{who}: transforms: expected {len(storages)}, one for each storage, got {len(changes)}. None stands for no transform."
            )
        self._storages = storages
        self._transforms = None if transforms is None else changes

    # ---- what it is ----------------------------------------------------------------------------------------------------

    @property
    def storages(self) -> tuple[Storage, ...]:
        """One of each member."""
        return self._storages

    @property
    def transforms(self) -> tuple[Change | None, ...] | None:
        """What is applied to the rows of each; None: nothing."""
        return self._transforms

    def flatten(self) -> StorageEnsemble:
        """The storages with ``ndim`` 1, around the same rows, as :meth:`TensorStorage.flatten`.

        >>> from engram import ListStorage, StorageEnsemble
        >>> len(StorageEnsemble(ListStorage(12), ListStorage(12)).flatten())
        2
        """
        return StorageEnsemble(*(one.flatten() for one in self._storages), transforms=self._transforms)

    def register_save_hook(self, hook: SaveHook) -> None:
        """As of each of the storages: ``hook`` sees the rows of one after the other.

        >>> from engram import LazyTensorStorage, StorageEnsemble, TED2Flat
        >>> StorageEnsemble(LazyTensorStorage(10)).register_save_hook(TED2Flat())
        """
        for one in self._storages:
            one.register_save_hook(hook)

    def register_load_hook(self, hook: LoadHook) -> None:
        """As of each of the storages: ``hook`` sees the rows of one after the other.

        >>> from engram import Flat2TED, LazyTensorStorage, StorageEnsemble
        >>> StorageEnsemble(LazyTensorStorage(10)).register_load_hook(Flat2TED())
        """
        for one in self._storages:
            one.register_load_hook(hook)

    # ---- rows ----------------------------------------------------------------------------------------------------------

    def get(self, index: object) -> list[tuple[int, object]]:
        """Rows by number: ``[(member, rows), …]``, where the rows went through its transform.

        Args:
            index: a TensorDict or dict with ``"buffer_ids"`` ``[n]`` and ``"index"`` ``[n, rows]``, as ``SamplerEnsemble.sample``
                returns it.

        Raises:
            TypeError: something else. ValueError: no such member. RowError: no such row.

        >>> import torch
        >>> from engram import ListStorage, StorageEnsemble
        >>> storage = StorageEnsemble(ListStorage(4), ListStorage(4))
        >>> storage[1].set(range(2), ["a", "b"])
        >>> storage.get({"buffer_ids": torch.tensor([1]), "index": torch.tensor([[1, 0]])})
        [(1, ['b', 'a'])]
        """
        ids, rows = routed(index, len(self._storages), "get")
        return [(member, self._read(member, one)) for member, one in zip(ids.tolist(), rows, strict=True)]

    def _read(self, member: int, rows: object) -> object:
        with naming(member):
            data = self._storages[member].get(rows)
            change = None if self._transforms is None else self._transforms[member]
            return data if change is None else change(data)

    def _rows(self, member: int, rows: object) -> object:
        with naming(member):
            return self._storages[member][rows]

    def __getitem__(self, index: object) -> object:
        """``storage[i]``: one of the storages; ``storage[i, j]``: rows of it; ``storage[[i, k]]``: an ensemble of some;
        ``storage[:, j]``: a list of the rows of each. Raises as ``ReplayBufferEnsemble[index]``.
        """
        of_members, rows = split_index(index, type(self).__name__)
        named = members_named(of_members, len(self._storages), type(self).__name__)
        if isinstance(named, int):
            return self._storages[named] if rows is None else self._storages[named][rows]
        if rows is not None:
            return [self._rows(member, rows) for member in named]
        some = None if self._transforms is None else [self._transforms[member] for member in named]
        return StorageEnsemble(*(self._storages[member] for member in named), transforms=some)


class _Loads(Loads):
    """Those of all storages."""

    @property
    def capacity(self) -> int:
        return 0

    def allocate(self) -> None:
        """Each does when it is committed."""
