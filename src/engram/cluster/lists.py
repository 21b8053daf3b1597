"""Buffers whose rows no other process sees, such as lists: an actor of Ray has them, and answers by messages."""

from __future__ import annotations

import inspect
from functools import partial, partialmethod
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from engram._support.checks import check_count
from engram._support.nested import map_tensors
from engram.remote.shards import answer_of
from engram.storages import ListStorage, Storage
from engram.types import RowStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.remote.shards import Handle

#: Another actor in its place would be empty. Threads let a write through while a draw waits for it.
LIST_OPTIONS = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 16}


def is_kept_in_list(storage: object) -> bool:
    """Whether ``storage=`` asks for a list, as None does, or for a storage of one's own."""
    made = storage.func if isinstance(storage, partial) else storage() if inspect.isroutine(storage) else storage
    kind = made if inspect.isclass(made) else type(made)
    own = issubclass(kind, RowStorage) and not issubclass(kind, Storage)
    return made is None or issubclass(kind, ListStorage) or own


class ListActor:
    """The actor: keeps the buffer and runs its methods."""

    def open(self, kind: type[ReplayBuffer], given: Mapping[str, object]) -> None:
        """Make it. Raises what that raises."""
        self._rb = kind(**given)  # type: ignore[arg-type] # it checks
        self._iterations: dict[object, Iterator[object]] = {}

    def iterate(self) -> int:
        """Begin to iterate over batches: the number of the iteration."""
        self._iterations[number := len(self._iterations)] = iter(self._rb)
        return number

    def do(self, name: str, *arguments: object, **named: object) -> object:
        """Call a method. ``...`` stands for the buffer itself. Raises ``AttributeError``: an attribute of which a copy would do nothing."""
        if name == "following":
            return next(self._iterations[arguments[0]], None)
        found = getattr(self._rb, name)(*arguments, **named)
        if name == "__getattribute__" and not isinstance(found, int | float | str | tuple | None):
            raise AttributeError(
                f"RayReplayBuffer: {arguments[0]} stays in the actor that keeps the rows. Use methods of the buffer, such as set_sampler."
            )
        return ... if found is self._rb else found


class ListBuffer:
    """Stands for a buffer of class ``kind`` kept by an actor; each call is a message. Pickles and clients cannot end the actor."""

    service_backend = transport_kind = "ray"

    def __init__(self, actor: Handle, kind: type[ReplayBuffer], *, owns: bool = False) -> None:
        vars(self).update(_actor=actor, _kind=kind, _owns=owns, closed=False)

    __class__ = property(lambda self: self._kind)  # what isinstance() looks at

    def __reduce__(self) -> tuple[type[ListBuffer], tuple[Handle, type[ReplayBuffer]]]:
        return ListBuffer, (self._actor, self._kind)

    def _call(self, name: str, *arguments: object, **named: object) -> object:
        if self.closed:
            raise RuntimeError(f"{name}: the buffer was closed. Make another one.")
        try:
            arguments, named = map_tensors((arguments, named), Tensor.cpu)
            found = ray.get(self._actor.do.remote(name, *arguments, **named))
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise ConnectionError(
                f"RayReplayBuffer: {name}: the actor does not answer. Its rows are in its memory alone, and lost if it is gone. Load a "
                f"state or dump into another buffer, or use partial(LazyMemmapStorage, …), whose rows stay. {str(error).strip():.300}"
            ) from error
        return self if found is ... else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{name}: no attribute of a buffer that an actor has.")
        if callable(getattr(self._kind, name, None)) or name in ("query", "register_save_hook", "register_load_hook"):
            return partial(self._call, name)
        return self._call("__getattribute__", name)

    __len__ = partialmethod(_call, "__len__")
    __getitem__ = partialmethod(_call, "__getitem__")
    __setitem__ = partialmethod(_call, "__setitem__")
    __setattr__ = partialmethod(_call, "__setattr__")  # type: ignore[assignment, misc]

    def __iter__(self) -> Iterator[object]:
        number = ray.get(self._actor.iterate.remote())
        while (batch := self._call("following", number)) is not None:
            yield batch

    def start(self) -> ListBuffer:
        return self

    __enter__ = start

    def __exit__(self, *error: object) -> None:
        self.close()

    is_alive = property(lambda self: not self.closed)

    def clients(self, num_clients: int) -> list[ListBuffer]:
        return [ListBuffer(self._actor, self._kind) for _ in range(check_count("clients", num_clients))]

    def client(self) -> ListBuffer:
        return self.clients(1)[0]

    def close(self, timeout: float | None = None) -> None:
        """End the actor, and with it its rows, where the buffer was made. Repeatable."""
        del timeout
        if self._owns and not self.closed and ray.is_initialized():
            ray.kill(self._actor)
        vars(self)["closed"] = True

    shutdown = close

    def __repr__(self) -> str:
        return f"RayReplayBuffer({self._kind.__name__}, in an actor)"


def opened(actor: Handle, kind: type[ReplayBuffer], given: Mapping[str, object], patience: float) -> ReplayBuffer:
    """The buffer of an actor, which makes it. Raises what making it raises; ``ConnectionError``: the actor has not started in time."""
    answer_of(actor.open.remote(kind, given), patience, "RayReplayBuffer")
    return ListBuffer(actor, kind, owns=True)  # type: ignore[return-value] # it stands for one
