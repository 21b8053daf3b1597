"""A replay buffer whose rows an actor of Ray keeps."""

from __future__ import annotations

import inspect
import secrets
from typing import TYPE_CHECKING, Any, get_args

from engram._checks import check_count
from engram.buffer.compat import READING_ARGUMENTS
from engram.buffer.on_ray import NAMESPACE, OnRay, Transport, attached
from engram.buffer.prioritized import ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engram.cluster.placement import Placement

#: For how long a shard that does not answer is waited for: a node may be started again meanwhile.
_PATIENCE_S = 60.0


class _Checked(type):
    """Buffers that are made here are of the class that was asked for; this says where they run."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ReplayBuffer) and not instance.closed and instance.service_backend == "ray"


class _Owner(OnRay):
    """Of the buffer that was made with the shard, which ends with it."""

    def close(self) -> None:
        self._shard.close()


class RayReplayBuffer(metaclass=_Checked):
    """A buffer whose rows an actor of Ray keeps, for all processes of the cluster: TorchRL's, with engram's store and transport.

    On the node of the rows they are shared memory; elsewhere they travel by Arrow Flight. Nothing goes through Ray's object store.
    What is made is a buffer of ``replay_buffer_cls``: it writes, samples and takes priorities as one that :meth:`ReplayBuffer.connect`
    makes, or, on the node of the rows, as any other. It goes to actors and tasks by pickle, and is a client there.

    Args:
        size: as for :class:`ReplayBuffer`.
        replay_buffer_cls: its class.
        ray_init_config: keyword arguments of ``ray.init``, which is called if Ray is not initialized yet.
        remote_config: what Ray reserves for the actor, such as ``{"num_cpus": 1, "resources": {…}}``. Default: one CPU.
        transport: ``"auto"``; ``"flight"``, on the node of the rows, too; or ``"shared"``, which refuses other nodes.
        shards: actors that keep rows: 1.
        placement: where Ray keeps the rows: ``"learners"``, the node of this program; ``"actors"``, another one; ``"spread"``, any. Where
            ``remote_config`` names resources or a scheduling strategy, these say it.
        name: for ``ReplayBuffer.connect("ray:NAME")`` in other programs of the cluster.
        **kwargs: those of ``replay_buffer_cls``. Transforms and ``collate_fn`` run where the buffer is used; ``generator`` is that of this
            buffer alone. ``storage`` is a ``functools.partial`` of :class:`LazyTensorStorage` or :class:`LazyMemmapStorage`, or such a
            storage. With a ``scratch_dir`` the rows that lie there already are gone on with.

    An actor that dies is started again by Ray, and serves the same rows, also if they are in memory; if its node dies, rows in a
    directory are back with the machine, and rows in memory are lost. Calls wait for it 60 s. :meth:`close` of the buffer that was made
    here ends the actor, and removes temporary files. See docs/ray.md.

    Raises:
        TypeError: another class than one of engram's buffers; a storage that processes cannot share. ValueError: no such ``transport`` or
            ``placement``. ConnectionError: Ray has not started the actor within 60 s, for want of what it reserves.
        NotImplementedError: several shards. ModuleNotFoundError: ``engram-replay[ray]`` is not installed.
        What making the buffer raises.
    """

    def __new__(  # type: ignore[misc] # a buffer
        cls,
        size: int | None = None,
        *,
        replay_buffer_cls: object = ReplayBuffer,
        ray_init_config: Mapping[str, object] | None = None,
        remote_config: Mapping[str, object] | None = None,
        transport: Transport = "auto",
        transport_options: Mapping[str, object] | None = None,
        shards: int = 1,
        placement: Placement = "learners",
        name: str | None = None,
        **kwargs: Any,
    ) -> ReplayBuffer:
        """Start the actor, and connect to it."""
        if not inspect.isclass(replay_buffer_cls) or not issubclass(replay_buffer_cls, ReplayBuffer):
            raise TypeError(
                f"RayReplayBuffer: replay_buffer_cls: expected a buffer class of engram's, got {replay_buffer_cls!r}."
            )
        if transport not in get_args(Transport):
            raise ValueError(
                f"RayReplayBuffer: transport: expected 'auto', 'flight' or 'shared', got {transport!r}. Rows never travel by Ray's "
                "object store."
            )
        if transport_options:
            raise ValueError(f"RayReplayBuffer: transport_options: expected none, got {sorted(transport_options)}.")
        if check_count("RayReplayBuffer: shards", shards) > 1:
            raise NotImplementedError(f"RayReplayBuffer: shards: several are not supported yet; got {shards}.")
        ray = _ray()
        from engram.cluster.placement import checked_placement, resources_of
        from engram.cluster.shard import ShardActor
        from engram.remote.shards import Shard

        checked_placement(placement)
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1, **(remote_config or {})}
        if not options.keys() & {"resources", "scheduling_strategy"}:
            (options["resources"],) = resources_of(1, placement)
        if name is not None:
            options |= {"name": name, "namespace": NAMESPACE}
        actor, own = _started(ray.remote(**options)(ShardActor), replay_buffer_cls, {"size": size, **kwargs})
        shard = Shard(actor, _PATIENCE_S)
        try:
            rb = attached(shard, transport, own)
        except BaseException:
            ray.kill(actor)
            raise
        rb._service = _Owner(shard, transport, rb.transport_kind, own)  # noqa: SLF001 - of the facade
        return rb


def _started(actor: Any, kind: type[ReplayBuffer], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An actor for a buffer, and what is of the buffer here alone. Transforms and the like are those of clients."""
    of_clients = {name: given[name] for name in (*READING_ARGUMENTS, "priority_key") if name in given}
    generator = of_clients.pop("generator", None)
    ours = {*READING_ARGUMENTS, "delayed_init", "shared"} - {"batch_size"}
    made_of = {name: value for name, value in given.items() if name not in ours}
    made = actor.remote(kind, made_of, of_clients, secrets.token_hex(16))
    return made, {} if generator is None else {"generator": generator}


def _ray() -> Any:
    try:
        import pyarrow.flight  # noqa: F401
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'RayReplayBuffer: needs {error.name}: pip install "engram-replay[ray]".', name=error.name
        ) from error
    return ray
