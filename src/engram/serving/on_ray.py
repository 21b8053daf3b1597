"""A replay buffer whose rows actors of Ray keep."""

from __future__ import annotations

import atexit
import inspect
import itertools
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from engram._support.checks import check_choice, check_count
from engram.buffer import configuration, services
from engram.buffer.connecting import OnRay, Shards, Transport, attached
from engram.buffer.tensordict import ReplayBuffer

if TYPE_CHECKING:
    from engram.remote.fleet.members import Missing
    from engram.remote.shards import Shard


Placement = Literal["learners", "spread", "actors"]
#: Of the resource that Ray gives each node by its IP: an actor stays with the machine, also where the node is started again.
_NODE_SHARE = 0.001


def resources_of(shards: int, placement: Placement) -> list[dict[str, float]]:
    """What each shard asks of its node, so that it is where the placement says.

    ``"learners"``: the node of this program. ``"actors"``: the others, where there are some. ``"spread"``: all in turn.
    """
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # As when the cluster starts again.
    nodes.sort(key=lambda node: (str(node["NodeManagerAddress"]), str(node["NodeID"])))
    if placement != "spread":
        chosen = [node for node in nodes if (node["NodeID"] == here) == (placement == "learners")]
        nodes = chosen or nodes
    return [{f"node:{nodes[k % len(nodes)]['NodeManagerAddress']}": _NODE_SHARE} for k in range(shards)]


def options_of(
    given: object, shards: int, placement: Placement, defaults: Mapping[str, object]
) -> list[dict[str, object]]:
    """Of the actor of each shard, as Ray takes them. ``given``: one dict for all, or one for each; None: the default.

    Raises ``TypeError``: no dicts. ``ValueError``: another number of them than of shards.
    """
    each = [given or {}] * shards if given is None or isinstance(given, Mapping) else given
    if not isinstance(each, Sequence) or not all(isinstance(one, Mapping) for one in each):
        raise TypeError(f"RayReplayBuffer: remote_config: expected a dict, or one for each shard, got {given!r:.100}.")
    if len(each) != shards:
        raise ValueError(f"RayReplayBuffer: remote_config: expected {shards} dicts, one a shard, got {len(each)}.")
    options: list[dict[str, object]] = [{"num_cpus": 1, **defaults, **one} for one in each]
    for one, resources in zip(options, resources_of(shards, placement), strict=True):
        if not one.keys() & {"resources", "scheduling_strategy"}:
            one["resources"] = resources
    return options


#: Of the actor of a shard.
_SHARD_OPTIONS = {"max_restarts": -1, "max_task_retries": -1, "concurrency_groups": {"saving": 1, "board": 1}}
#: For how long a shard that does not answer is waited for: a node may be started again meanwhile.
_PATIENCE_S = 60.0
#: For how long one may take to move some of its rows: a save may go on, or an actor be started again.
_MOVE_TIMEOUT_S = 600.0


class _Checked(type):
    """The metaclass of :class:`RayReplayBuffer`: any open buffer whose rows are on Ray is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ReplayBuffer) and not instance.closed and instance.service_backend == "ray"


class _Owner(OnRay):
    """The service of the buffer that was made with the shards, which end with it. ``start``: makes another one, of a number."""

    def __init__(self, shards: Shards, transport: str, own: Mapping[str, object], start: Start) -> None:
        super().__init__(shards, transport, own)
        self.start, self.numbers = start, itertools.count(len(shards.each))
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # it comes before Ray's own, which would leave temporary files

    def close(self) -> None:
        from engram.remote.shards import close_shards

        atexit.unregister(self._at_exit)
        close_shards(self.shards.each)


def _close(known: weakref.ref[_Owner]) -> None:
    """At the end of a program that has not closed its buffer."""
    if (owner := known()) is not None:
        owner.close()


class RayReplayBuffer(metaclass=_Checked):
    """A buffer whose rows actors of Ray keep, for all processes of the cluster: TorchRL's, with engram's stores and transport.

    With one shard, on the node of the rows they are shared memory; else they travel by Arrow Flight. Nothing goes through Ray's object
    store. What is made is a buffer of ``replay_buffer_cls``: it writes, samples and takes priorities as one that
    :meth:`ReplayBuffer.connect` makes, or, on the node of the rows, as any other. It goes to actors and tasks by pickle, and is a client
    there.

    Args:
        size: as for :class:`ReplayBuffer`; of each shard.
        replay_buffer_cls: its class.
        ray_init_config: keyword arguments of ``ray.init``, which is called if Ray is not initialized yet.
        remote_config: what Ray reserves for each actor, such as ``{"num_cpus": 1, "resources": {…}}``, or a list of such dicts, one for
            each shard. Default: one CPU.
        transport: ``"auto"``; ``"flight"``, on the node of the rows, too; or ``"shared"``, which refuses other nodes and several shards.
        shards: actors, each of which keeps a store: together they are one buffer. What ``connect`` refuses for several stores is refused
            here: see docs/cluster.md.
        placement: where Ray keeps the rows: ``"learners"``, the node of this program; ``"actors"``, the others in turn; ``"spread"``, all
            in turn. Where ``remote_config`` names resources or a scheduling strategy, these say it.
        name: for ``ReplayBuffer.connect("ray:NAME")`` in other programs of the cluster. Without ``/``: shards are called ``NAME/0``.
        missing: of several shards, one that does not answer is left out after 10 seconds, with a warning, until it is back (``"skip"``);
            or it is waited for, and ``ConnectionError`` is raised after 60 (``"wait"``).
        **kwargs: those of ``replay_buffer_cls``. Transforms and ``collate_fn`` run where the buffer is used; ``generator`` is that of this
            buffer alone. ``storage`` is a ``functools.partial`` of :class:`LazyTensorStorage` or :class:`LazyMemmapStorage`, or such a
            storage; each shard makes its own. With a ``scratch_dir`` the rows that lie there already are gone on with; of several shards
            each has a folder in it. A list, such as ``partial(LazyStackStorage, 1_000)``, a storage of one's own, or None: see below.

    An actor that dies is started again by Ray, and serves the same rows, also if they are in memory; if its node dies, rows in a
    directory are back with the machine, and rows in memory are lost. Calls of a buffer with one shard wait for it 60 s. :meth:`close` of
    the buffer that was made here, and the end of its program, end the actors and remove temporary files. See docs/ray.md.

    Processes cannot share a list or a storage of one's own. One actor keeps such a buffer, transforms and all, and answers by messages of
    Ray, with pickled rows: what is made passes for a buffer of ``replay_buffer_cls``, and each call of it is one of the buffer in the
    actor, with its errors. Its components stay there. ``shards``, ``name`` and the transports ``"flight"`` and ``"shared"`` are refused.
    The rows end with the actor: ``ConnectionError`` from then on.

    Raises:
        TypeError: another class than one of engram's buffers. ValueError: no such ``transport``,
            ``placement`` or ``missing``; a ``name`` that another buffer has, or one with ``/``; a sampler, writer or storage that cannot
            have several shards. ConnectionError: Ray has not started the actors within 60 s, for want of what they reserve.
            ModuleNotFoundError: ``engram-replay[ray]`` is not installed.
        What making the buffer raises.

    >>> from functools import partial
    >>> import torch
    >>> from engram import LazyTensorStorage, RayReplayBuffer
    >>> rb = RayReplayBuffer(storage=partial(LazyTensorStorage, 1_000), batch_size=4)  # in an actor
    >>> _ = rb.extend(torch.arange(10))
    >>> rb.sample().shape
    torch.Size([4])
    >>> rb.close()
    """

    def __new__(  # type: ignore[misc] # a buffer
        cls,
        size: int | None = None,
        *,
        replay_buffer_cls: object = ReplayBuffer,
        ray_init_config: Mapping[str, object] | None = None,
        remote_config: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        transport: Transport = "auto",
        transport_options: Mapping[str, object] | None = None,
        shards: int = 1,
        placement: Placement = "learners",
        name: str | None = None,
        missing: Missing = "skip",
        **kwargs: Any,
    ) -> ReplayBuffer:
        """Start the actors, and connect to them."""
        if not inspect.isclass(replay_buffer_cls) or not issubclass(replay_buffer_cls, ReplayBuffer):
            raise TypeError(
                f"RayReplayBuffer: replay_buffer_cls: expected a buffer class of engram's, got {replay_buffer_cls!r}."
            )
        ray = services.imported_ray("RayReplayBuffer", "pyarrow.flight")
        from engram.remote.shards import close_shards, names_of, shards_of
        from engram.serving.actors import LIST_OPTIONS, ListActor, is_kept_in_list, opened

        in_list = is_kept_in_list(kwargs.get("storage"))
        if in_list and (shards != 1 or name is not None or transport not in ("auto", "ray")):
            raise ValueError(
                "RayReplayBuffer: expected partial(LazyTensorStorage, …) for shards=, name= or transport=, got a list: one actor keeps it."
            )
        _check("auto" if in_list else transport, transport_options, check_count("RayReplayBuffer: shards", shards))
        check_choice("RayReplayBuffer: missing", missing, ("skip", "wait"))
        check_choice("RayReplayBuffer: placement", placement, get_args(Placement))
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        if name is not None and ("/" in name or [*names_of(name), *shards_of([name], _PATIENCE_S)]):
            raise ValueError(f"RayReplayBuffer: name: expected one without '/' that no buffer here has, got {name!r}.")
        given = {"size": size, **kwargs}
        if in_list:
            options = options_of(remote_config, 1, placement, LIST_OPTIONS)[0]
            return opened(ray.remote(**options)(ListActor).remote(), replay_buffer_cls, given, _PATIENCE_S)
        fleet = (name or secrets.token_hex(16)) if shards > 1 else ""
        start = partial(_started, replay_buffer_cls, given, placement, fleet or name or "", shards)
        own = {one: given[one] for one in ("generator",) if given.get(one) is not None}
        made = Shards(start(remote_config, [*range(shards)]), transport, missing, name=fleet)
        try:
            for shard in made.each:
                if (alone := shard.describe().served.alone) and shards > 1:
                    raise ValueError(f"RayReplayBuffer: expected one shard, got {shards}: {alone}.")
            rb = attached(made, own)
        except BaseException:
            close_shards(made.each)
            raise
        rb._service = _Owner(made, rb.transport_kind, own, start)  # noqa: SLF001 - of the facade
        return cast("ReplayBuffer", rb)

    @staticmethod
    def add_shard(rb: ReplayBuffer, remote_config: Mapping[str, object] | None = None) -> None:
        """Add a shard to a buffer that was made with several. Its clients, wherever they are, use it within seconds.

        Args:
            rb: the buffer that was made here.
            remote_config: as for one shard; it may name the resources of a node. Default: one CPU of a node that ``placement`` chooses.

        Raises:
            ValueError: a client, or a buffer with one shard. ConnectionError: Ray has not started the actor within 60 s. What making its
                buffer raises. Then there is no such shard.

        >>> from functools import partial
        >>> import torch
        >>> from engram import LazyTensorStorage, RayReplayBuffer
        >>> free = {"num_cpus": 0}
        >>> rb = RayReplayBuffer(storage=partial(LazyTensorStorage, 1_000), batch_size=4, shards=2, remote_config=free)
        >>> _ = rb.extend(torch.arange(10))
        >>> RayReplayBuffer.add_shard(rb, free)
        >>> with rb.client() as client:
        ...     len(client), client.stats()["shards"]
        (10, 3)
        >>> rb.close()
        """
        from engram.remote.shards import close_shards

        owner = _owner(rb, "add_shard")
        (shard,) = owner.start(remote_config, [next(owner.numbers)])
        try:
            shard.describe()
            with rb.client() as client:
                len(client)  # it makes the store as those of the others are
        except BaseException:
            close_shards([shard])
            raise
        owner.shards = owner.shards._replace(each=(*owner.shards.each, shard))

    @staticmethod
    def drain_node(rb: ReplayBuffer, node: str, *, evict: bool = False) -> None:
        """Move all rows from the shards of a node to the other shards, and end their actors. Clients go on meanwhile.

        See docs/cluster.md for what moves, and what is refused. It takes a minute longer than the rows, for which new priorities are sent
        on to rows that have moved.

        Args:
            rb: the buffer that was made here.
            node: as ``ray.nodes()`` has it under ``"NodeID"``.
            evict: the oldest rows of the other shards may be replaced, where they have no room.

        Raises:
            ValueError: a client, or a buffer with one shard; no shard is there, or all are; rows that cannot be moved. ConnectionError: a
                shard is away. Then the shards that are left take rows again within a minute, and it can be called again.

        >>> import ray
        >>> from functools import partial
        >>> from engram import LazyTensorStorage, RayReplayBuffer
        >>> rb = RayReplayBuffer(storage=partial(LazyTensorStorage, 9), batch_size=4, shards=2, remote_config={"num_cpus": 0})
        >>> here = ray.get_runtime_context().get_node_id()
        >>> RayReplayBuffer.drain_node(rb, here)
        Traceback (most recent call last):
            ...
        ValueError: drain_node: expected a node of some shards, not of all, got '...'. Nothing moves.
        >>> rb.close()
        """
        from engram.remote import protocol
        from engram.remote.shards import answer_of, close_shards
        from engram.serving import draining

        owner = _owner(rb, "drain_node")
        at = {shard: shard.describe().node for shard in owner.shards.each}
        leaving, to = [it for it in at if at[it] == node], tuple(it for it in at if at[it] != node)
        if not leaving or not to:
            raise ValueError(f"drain_node: expected a node of some shards, not of all, got {node!r}. Nothing moves.")
        command = protocol.Drain([shard.name for shard in to], evict)

        def move() -> int:
            asked = [(it.actor.drain.options(concurrency_group="saving").remote(command), str(it)) for it in leaving]
            return sum(answer_of(pending, _MOVE_TIMEOUT_S, who) for pending, who in asked)

        for _ in draining.turns(move):
            pass
        close_shards(leaving)
        owner.shards = owner.shards._replace(each=to)


def _owner(rb: ReplayBuffer, call: str) -> _Owner:
    """The service of a buffer that was made here with several shards. Raises ``ValueError``: of another one."""
    service = rb._service  # noqa: SLF001 - of the facade
    if not isinstance(service, _Owner) or not service.shards.name:
        raise ValueError(f"{call}: expected the buffer that was made here, with shards=2 or more, got {rb!r:.80}.")
    return service


def _check(transport: object, transport_options: object, shards: int) -> None:
    """Raise ``ValueError``: rows cannot travel like that."""
    if transport not in get_args(Transport):
        raise ValueError(
            f"RayReplayBuffer: transport: expected 'auto', 'flight' or 'shared', got {transport!r}. Rows never travel by Ray's "
            "object store."
        )
    if transport == "shared" and shards > 1:
        raise ValueError(
            f"RayReplayBuffer: transport: expected 'auto' or 'flight' with {shards} shards, whose rows come from several stores, got "
            "'shared'."
        )
    if transport_options:
        raise ValueError(f"RayReplayBuffer: transport_options: expected none, got {transport_options!r:.100}.")


#: Starts shards of some numbers, as ``remote_config`` says.
Start: TypeAlias = "Callable[[object, list[int]], tuple[Shard, ...]]"


def _started(
    kind: type, given: Mapping[str, object], placement: Placement, name: str, of: int, config: object, each: list[int]
) -> tuple[Shard, ...]:
    """Start shards of a buffer that is made with ``of``, as ``remote_config`` says. Transforms and the like are those of clients."""
    import ray

    from engram.remote.shards import NAMESPACE, Shard
    from engram.serving.actors import Place, ShardActor

    of_clients = {one: given[one] for one in (*configuration.READING_ARGUMENTS, "priority_key") if one in given}
    of_clients.pop("generator", None)
    of_client = {*configuration.READING_ARGUMENTS, "delayed_init", "shared"} - {"batch_size"}
    made_of = {name: value for name, value in given.items() if name not in of_client}
    found, options = [], options_of(config, each[-1] + 1, placement, _SHARD_OPTIONS)
    for k in each:
        named = name if of == 1 else f"{name}/{k}"
        its = {**options[k], "name": named, "namespace": NAMESPACE} if named else options[k]
        actor = ray.remote(**its)(ShardActor).remote(kind, made_of, of_clients, Place(secrets.token_hex(16), k, of))
        found.append(Shard(actor, _PATIENCE_S, named))
    return tuple(found)
