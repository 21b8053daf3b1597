"""The client's side of a shard, a store that an actor of Ray serves: where it is, and a storage before there is a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from engram._unsupported import refused
from engram.errors import EMPTY, NoSampleable
from engram.format.schema import encode
from engram.remote.connection import Connection, Found
from engram.remote.storage import RemoteStorage
from engram.storages import Storage, check_count, leading_size
from engram.storages._columns import rows_of_batch, rows_of_slot
from engram.storages._structure import Structure, as_tensor, stacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from engram.persist.roles import Roles
    from engram.remote.commands import Served
    from engram.remote.served import Drawn
    from engram.storages import Count
    from engram.storages._geometry import Geometry
    from engram.store import Store
    from engram.types import Sampler, Writer

#: For how long an actor may take to end what it does.
_LEAVE_S = 10.0


class Described(NamedTuple):
    """What a shard says of its buffer, also before anything was written."""

    kind: type
    """Of clients' buffers."""
    served: Served
    """Without a schema as long as nothing was written."""
    geometry: Geometry
    """Of the storage."""
    node: str
    """Where it is, as Ray numbers its nodes."""
    arguments: Mapping[str, object]
    """Of clients' buffers, besides the components."""


class Shard:
    """A shard, as its clients know it. It goes by pickle to all processes of the Ray cluster.

    Args:
        actor: the handle of its actor.
        patience: seconds for which it is waited for where it does not answer.
    """

    #: Servers in the cluster have no certificates of their own.
    root_certificates = None
    #: Writes wait for their acknowledgement.
    full = None
    #: Rows in memory are lost with their node.
    replaces_lost = True

    def __init__(self, actor: Any, patience: float) -> None:
        self._actor = actor
        self.patience_s = patience

    def _answer(self, asked: object, seconds: float | None = None) -> Any:
        """What a call of the actor returns.

        Raises: what it raises. ``ConnectionError``: the actor is gone, or does not answer.
        """
        try:
            return ray.get(asked, timeout=self.patience_s if seconds is None else seconds)
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, GetTimeoutError) as error:
            why = str(error).strip().splitlines()
            raise ConnectionError(
                f"{self}: the shard does not answer: {why[0] if why else type(error).__name__}"
            ) from error

    def describe(self) -> Described:
        """Raises what making its buffer raised; ``ConnectionError``."""
        described: Described = self._answer(self._actor.describe.remote())
        return described

    def components(self) -> tuple[Storage, Sampler, Writer]:
        """Those of its buffer, which share its memory: for processes of its node. Raises ``ConnectionError``."""
        parts: tuple[Storage, Sampler, Writer] = self._answer(self._actor.components.remote())
        return parts

    def serve(self, schema: str | None) -> Found | None:
        """Where its store is served, which is made of the schema if there is none. None: there is neither.

        Raises ``ConnectionError``; ``OSError``: no space.
        """
        found: Found | None = self._answer(self._actor.serve.remote(schema))
        return found

    def find(self, known: Served | None) -> Found:
        """As ``Servers``. A store in memory that was lost with its node begins without rows."""
        found = self.serve(known.schema if known is not None else None)
        if found is None:
            raise ConnectionError("nothing was ever written.")
        return found

    def close(self) -> None:
        """End the actor, for good. Its files go, if they are temporary."""
        try:
            self._answer(self._actor.close.options(max_task_retries=0).remote(), _LEAVE_S)
        except ConnectionError:  # it is gone
            pass
        finally:
            if ray.is_initialized():
                ray.kill(self._actor)

    def __str__(self) -> str:
        return f"ray:{self._actor._ray_actor_id.hex()[:8]}"  # noqa: SLF001 - Ray has no other name of it


class _Awaited:
    """``memory`` of a storage whose store is looked for, until it is there and lies before this in the instance."""

    def __get__(self, storage: AwaitedStorage | None, _: type) -> Store | None:
        return None if storage is None else storage.look()


class AwaitedStorage(RemoteStorage):
    """A shard's store, which the first write of any client creates.

    Args:
        shard: where to find it.
        described: what the shard said of itself.
    """

    memory: Store | None = _Awaited()  # type: ignore[assignment]
    structure: Structure | None = None  # type: ignore[assignment] # until there is a store

    def __init__(self, shard: Shard, described: Described) -> None:
        Storage.__init__(self)
        self._shard, self._described = shard, described
        self.ndim = described.geometry.ndim

    def look(self) -> Store | None:
        """Connect to the store, if it is there. Raises as ``ReplayBuffer.connect``."""
        with self._lock:
            if "memory" not in vars(self) and self._shard.serve(None) is not None:
                self._connect(Connection(self._shard))
            found: Store | None = vars(self).get("memory")
        return found

    def _create(self, data: object, n: int | None, columns: tuple[int, ...], call: str) -> None:
        """Have the store made, for rows as these, unless it is there."""
        with self._lock:
            if self.memory is None:
                geometry = self._described.geometry
                structure = Structure.of(data, batched=n is not None, call=call, dtypes=geometry.dtypes)
                structure.flatten(data, n, call)
                self._shard.serve(encode(geometry.schema(structure, columns)).decode())
                self.look()

    # ---- before there is a store ---------------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        return self._described.served if self.memory is None else super().served

    @property
    def initialized(self) -> bool:  # type: ignore[override]
        return self.memory is not None

    @property
    def max_size(self) -> int:
        return self._described.geometry.capacity if self.memory is None else super().max_size

    @property
    def requested_size(self) -> int:
        return self._described.geometry.max_size

    @property
    def lanes(self) -> int:
        return self._described.geometry.lanes

    @property
    def columns(self) -> tuple[int, ...]:
        return () if self.memory is None else super().columns

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else super().nbytes

    def __len__(self) -> int:
        return 0 if self.memory is None else super().__len__()

    @property
    def write_count(self) -> int:
        return 0 if self.memory is None else super().write_count

    def counters(self) -> dict[str, float]:
        return {} if self.memory is None else super().counters()

    def prepare(
        self, data: object, call: str, *, batched: bool, ignored: Iterable[str] = (), count: Count | None = None
    ) -> tuple[list[Tensor], int]:
        if self.memory is None:
            if batched and isinstance(data, list):
                data = stacked(data, call, self._described.geometry.dtypes)
            first, several = data, batched
            columns: tuple[int, ...] = ()
            if self.ndim > 1:
                first, columns = (rows_of_batch if batched else rows_of_slot)(data, self.ndim, call)
                several = True
            n = leading_size(first, call) if several else 1
            check_count(call, count, n)
            self._create(first, n if several else None, columns, call)
        return super().prepare(data, call, batched=batched, ignored=ignored, count=count)

    def number(self, value: object, path: tuple[str, ...]) -> object:
        return as_tensor(value, path, "add") if self.memory is None else super().number(value, path)

    def batches_in_message(self, rows: int) -> int:
        return 1 if self.memory is None else super().batches_in_message(rows)

    def ask_for(self, keys: Sequence[int], rows: int) -> None:
        self._check_written()
        super().ask_for(keys, rows)

    def draw(self, key: int, rows: int) -> Drawn:
        self._check_written()
        return super().draw(key, rows)

    def extent(self) -> NoReturn:
        """Raise: it is asked for to draw here."""
        self._check_written()
        super().extent()

    def _check_written(self) -> None:
        if self.memory is None:
            raise NoSampleable(EMPTY)

    def settle(self) -> None:
        if self.memory is not None:
            super().settle()

    def forget_asked(self) -> None:
        if self.memory is not None:
            super().forget_asked()

    def can_sample(self, rows: int) -> bool:
        return self.memory is not None and super().can_sample(rows)

    def empty(self, *, keep_write_count: bool) -> None:
        if self.memory is not None:
            super().empty(keep_write_count=keep_write_count)

    def end_trajectories(self, lanes: Tensor, roles: Roles | None, *, terminated: bool) -> Tensor:
        if self.memory is None:
            return torch.full((len(lanes),), -1, device="cpu")
        return super().end_trajectories(lanes, roles, terminated=terminated)

    # ---- life ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, object]:
        raise refused("copy of the storage", "Copy its buffer, or pickle that.")

    def close(self) -> None:
        if "memory" in vars(self):
            super().close()
        else:
            Storage.close(self)

    def __repr__(self) -> str:
        return f"RemoteStorage({self._shard})"
