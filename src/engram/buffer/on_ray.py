"""Buffers of a shard that an actor of Ray keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from engram.buffer.replay_buffer import ReplayBuffer
    from engram.remote.shards import Shard

Transport = Literal["auto", "flight", "shared"]
#: Names in Ray are looked for here, so that drivers of other jobs find them.
NAMESPACE = "engram"


class OnRay:
    """Of a client of a shard: it, and its pickles, make others."""

    backend = "ray"

    def __init__(self, shard: Shard, wanted: Transport, transport: str) -> None:
        self._shard, self._wanted, self.transport = shard, wanted, transport

    def client(self, buffer: object) -> ReplayBuffer:  # noqa: ARG002 - all are alike
        return attached(self._shard, self._wanted)

    def reduced(self, buffer: object) -> tuple[Callable[..., ReplayBuffer], tuple[object, ...]]:  # noqa: ARG002 - all are alike
        return attached, (self._shard, self._wanted)

    def close(self) -> None:
        """Others use the shard."""


def attached(shard: Shard, transport: Transport = "auto", **arguments: object) -> ReplayBuffer:
    """A buffer of a shard: on its node over the same memory, elsewhere over a connection.

    Args:
        shard: it.
        transport: ``"flight"``: a connection in any case; ``"shared"``: never one.
        **arguments: of the constructor, in place of those that the shard knows.

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
    given = {**described.arguments, **arguments}
    rb: ReplayBuffer = described.kind(storage=storage, sampler=sampler, writer=writer, **given)
    rb._service = OnRay(shard, transport, "shared" if shares else "flight")  # noqa: SLF001 - of the facade
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
    return attached(Shard(actor, patience), "auto", **arguments)
