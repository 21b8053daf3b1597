"""A replay buffer whose rows actors of Ray keep."""

from __future__ import annotations

import atexit
import inspect
import secrets
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from engram._support.checks import check_choice, check_count
from engram.buffer import configuration, services
from engram.buffer.connecting import NAMESPACE, OnRay, Shards, Transport, attached, name_of
from engram.buffer.tensordict import ReplayBuffer

if TYPE_CHECKING:
    from engram.remote.fleet.members import Missing
    from engram.remote.shards import Handle


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


class _Checked(type):
    """The metaclass of :class:`RayReplayBuffer`: any open buffer whose rows are on Ray is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ReplayBuffer) and not instance.closed and instance.service_backend == "ray"


class _Owner(OnRay):
    """The service of the buffer that was made with the shards, which end with it."""

    def __init__(self, shards: Shards, transport: str, own: Mapping[str, object]) -> None:
        super().__init__(shards, transport, own)
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)  # it comes before Ray's own, which would leave temporary files

    def close(self) -> None:
        from engram.remote.shards import close_shards

        atexit.unregister(self._at_exit)
        close_shards(self.shards.each)


def _close(known: weakref.ref[_Owner]) -> None:
    """At the end of a program that has not closed its buffer."""
    owner = known()
    if owner is not None:
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
        name: for ``ReplayBuffer.connect("ray:NAME")`` in other programs of the cluster.
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
            ``placement`` or ``missing``; a sampler, writer or storage that cannot have several shards. ConnectionError: Ray has not started
            the actors within 60 s, for want of what they reserve. ModuleNotFoundError: ``engram-replay[ray]`` is not installed.
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
        from engram.remote.shards import Shard
        from engram.serving.actors import LIST_OPTIONS, is_kept_in_list, opened

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
        options = options_of(remote_config, shards, placement, LIST_OPTIONS if in_list else _SHARD_OPTIONS)
        if name is not None:
            named = [{"name": name_of(name, k, shards), "namespace": NAMESPACE} for k in range(shards)]
            options = [{**one, **its} for one, its in zip(options, named, strict=True)]
        given = {"size": size, **kwargs}
        actors, own = _started(options, replay_buffer_cls, given, in_list=in_list)
        made = Shards(tuple(Shard(actor, _PATIENCE_S) for actor in actors), transport, missing)
        try:
            if in_list:
                return opened(actors[0], replay_buffer_cls, given, _PATIENCE_S)
            for shard in made.each:
                if (alone := shard.describe().served.alone) and shards > 1:
                    raise ValueError(f"RayReplayBuffer: expected one shard, got {shards}: {alone}.")
            rb = attached(made, own)
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        rb._service = _Owner(made, rb.transport_kind, own)  # noqa: SLF001 - of the facade
        return cast("ReplayBuffer", rb)


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


def _started(
    options: list[dict[str, object]], kind: type[ReplayBuffer], given: dict[str, object], *, in_list: bool
) -> tuple[list[Handle], dict[str, object]]:
    """Actors for a buffer, and what is of the buffer here alone. Transforms and the like are those of clients."""
    import ray

    from engram.serving.actors import ListActor, Place, ShardActor

    if in_list:
        return [ray.remote(**options[0])(ListActor).remote()], {}
    of_clients = {name: given[name] for name in (*configuration.READING_ARGUMENTS, "priority_key") if name in given}
    generator = of_clients.pop("generator", None)
    of_client = {*configuration.READING_ARGUMENTS, "delayed_init", "shared"} - {"batch_size"}
    made_of = {name: value for name, value in given.items() if name not in of_client}
    actors = [
        ray.remote(**one)(ShardActor).remote(kind, made_of, of_clients, Place(secrets.token_hex(16), k, len(options)))
        for k, one in enumerate(options)
    ]
    return actors, {} if generator is None else {"generator": generator}
