"""Buffers of a shard that an actor of Ray keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.remote.shards import Shard

Transport = Literal["auto", "flight", "shared"]
#: Names in Ray are looked for here, so that drivers of other jobs find them.
NAMESPACE = "engram"


class OnRay:
    """Of a client of a shard: it, and its pickles, make others."""

    backend = "ray"

    def __init__(self, shard: Shard, wanted: Transport, transport: str, own: Mapping[str, object]) -> None:
        """``own``: arguments of this buffer, in place of those that the shard knows."""
        self._shard, self._wanted, self.transport = shard, wanted, transport
        self._own = {name: value for name, value in own.items() if name != "generator"}

    def client(self, buffer: ReplayBuffer) -> ReplayBuffer:
        made, arguments = self.reduced(buffer)
        return made(*arguments)

    def reduced(self, buffer: ReplayBuffer) -> tuple[Callable[..., ReplayBuffer], tuple[object, ...]]:
        own = self._own
        if buffer.initialized and len(buffer.transform):
            own = {**own, "transform": buffer.transform}
            own.pop("transform_factory", None)
        return attached, (self._shard, self._wanted, own)

    def close(self) -> None:
        """Others use the shard."""


def attached(shard: Shard, transport: Transport, own: Mapping[str, object]) -> ReplayBuffer:
    """A buffer of a shard: on its node over the same memory, elsewhere over a connection.

    Args:
        shard: it.
        transport: ``"flight"``: a connection in any case; ``"shared"``: never one.
        own: arguments of the constructor, in place of those that the shard knows. None: the shard's.

    Raises:
        ConnectionError: the shard does not answer. RuntimeError: ``"shared"``, on another node. What making its buffer raised.
    """
    import ray

    from engram.remote.components import RemoteSampler, RemoteWriter
    from engram.remote.shards import AwaitedStorage

    described = shard.describe()
    near = described.node == ray.get_runtime_context().get_node_id()
    if transport == "shared" and not near:
        raise RuntimeError(
            f"transport='shared': the rows are on node {described.node:.8}, and this process is not. Use transport='auto'."
        )
    shares = near and transport != "flight"
    if shares:
        storage, sampler, writer = shard.components()
    else:
        served = described.served
        storage, sampler, writer = AwaitedStorage(shard, described), RemoteSampler(served), RemoteWriter(served)
    own = {name: value for name, value in own.items() if value is not None}
    given = {**described.arguments, **own}
    for name, other in (("transform", "transform_factory"), ("transform_factory", "transform")):
        if name in own and other not in own:  # they exclude each other
            given.pop(other, None)
    rb: ReplayBuffer = described.kind(storage=storage, sampler=sampler, writer=writer, **given)
    rb._service = OnRay(shard, transport, "shared" if shares else "flight", own)  # noqa: SLF001 - of the facade
    return rb


def attached_by_name(name: str, patience: float, arguments: dict[str, object]) -> ReplayBuffer:
    """A buffer of the shard of this name. Raises as ``ReplayBuffer.connect``."""
    import ray

    from engram.remote.shards import Shard

    if not ray.is_initialized():
        raise ConnectionError(
            "connect: expected a Ray cluster that this program has joined. Call ray.init(address=…) first."
        )
    try:
        actor = ray.get_actor(name, NAMESPACE)
    except ValueError as error:
        raise ConnectionError(f"connect: no RayReplayBuffer(name={name!r}) is known in this Ray cluster.") from error
    return attached(Shard(actor, patience), "auto", arguments)
