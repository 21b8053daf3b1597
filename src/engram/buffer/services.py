"""Where a buffer runs, and how others come to use it, too."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from engram._support import checks, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engram.remote.shards import ShardSavers
    from engram.storages import Storage
    from engram.transforms import Compose
    from engram.types import Form, Sampler, Write

    #: What makes a buffer again where a pickle of it arrives, and the arguments.
    Reduced: TypeAlias = tuple[Callable[..., object], tuple[object, ...]]
    Given: TypeAlias = Mapping[str, object]


#: Arguments of constructors that are of a service.
_OF_SERVICES = ("service_backend_options", "transport", "transport_options", "shards", "placement", "name", "missing")


class Facade(Protocol):
    """A :class:`~engram.ReplayBuffer`, as its parts know it."""

    closed: bool
    _prioritized: bool
    _service: Service

    def __init__(self, **arguments: object) -> None: ...
    @property
    def initialized(self) -> bool: ...
    @property
    def transport_kind(self) -> str: ...
    @property
    def sampler(self) -> Sampler: ...
    @property
    def storage(self) -> Storage: ...
    @property
    def transform(self) -> Compose: ...
    @property
    def form(self) -> Form: ...
    @property
    def listens(self) -> bool: ...
    def observe(self, write: Write | None, data: object) -> None: ...
    def moved(self) -> None: ...
    def share(self) -> object: ...
    @classmethod
    def open_arguments(cls, record: dict[str, object]) -> dict[str, object]: ...
    def _discard_prefetched(self, call: str, *, keys: bool = True) -> None: ...


B = TypeVar("B", bound=Facade)


class Service:
    """Makes what uses the same rows as one buffer: of one that runs in the processes that have it."""

    #: As TorchRL names it.
    backend = "direct"
    #: What rows travel by.
    transport = "direct"

    def client(self, buffer: Facade) -> Facade:
        """A buffer of its own for the same rows."""
        return buffer

    def reduced(self, buffer: Facade) -> Reduced | None:
        """What makes it again where a pickle of it arrives; None: it is pickled as other objects are."""

    def savers(self, buffer: Facade) -> ShardSavers | None:
        """What saves the buffer where its rows are; None: this process does."""

    def close(self) -> None:
        """The buffer was closed."""


def client(self: B) -> B:
    """Returns the buffer itself; on Ray one of its own for the same rows, which cannot end them."""
    return cast("B", self._service.client(self))


def clients(self: B, num_clients: int) -> list[B]:
    """So many clients, in a list. Raises ``TypeError``, ``ValueError``: no number from 1 on."""
    return [client(self) for _ in range(checks.check_count("clients", num_clients))]


def as_remote(cls: type[object], remote_config: Given | None = None) -> Any:
    """The class as an actor class of Ray, as TorchRL spells it: ``ReplayBuffer.as_remote(…).remote(storage=…)``.

    Every call of such an actor is a call of Ray, with pickled rows: :class:`RayReplayBuffer` is many times faster.

    Args:
        remote_config: what ``ray.remote`` takes, such as ``{"num_cpus": 1}``. Default: one CPU.

    Raises ``ModuleNotFoundError``: ``engram-replay[ray]`` is not installed.
    """
    return imported_ray("as_remote").remote(**({"num_cpus": 1} if remote_config is None else remote_config))(cls)


def service_in(given: dict[str, Any]) -> dict[str, Any] | None:
    """Take the arguments out of those of a constructor that are of a service; None: the buffer is to run here."""
    service = given.pop("service_backend", None)
    if service in (None, False, "direct"):
        return None
    return {"service": service} | {name: given.pop(name) for name in _OF_SERVICES if name in given}


def deployed(
    kind: type, told: Given, *, service: object, service_backend_options: Given | None = None, **given: object
) -> dict[str, Any]:
    """The state of a buffer of a class that runs elsewhere: ``ReplayBuffer(service_backend="ray", …)``, as TorchRL spells it.

    Raises: ``ValueError``: no such service. ``TypeError``: options that it does not have, or a list. As :class:`RayReplayBuffer`.
    """
    call, options = told["call"], dict(service_backend_options or {})
    if service != "ray":
        raise ValueError(f"{call}: service_backend: expected 'direct' or 'ray', got {service!r}.")
    unknown = sorted(options.keys() - {"ray_init_config", "remote_config"})
    if unknown:
        raise TypeError(f"{call}: service_backend_options: expected ray_init_config and remote_config, got {unknown}.")
    from engram import RayReplayBuffer  # by the table of public names: it stands above

    ours = {"call", "default_writer", "shared", "delayed_init"}
    made = {name: value for name, value in told.items() if name not in ours and value is not None}
    rb = RayReplayBuffer(**made, **options, **given, replay_buffer_cls=kind)  # type: ignore[arg-type] # it checks
    if rb.transport_kind == "ray":
        rb.close()
        raise TypeError(
            f"{call}: service_backend: expected a storage that processes share, got a list. Call RayReplayBuffer(…, replay_buffer_cls=…)."
        )
    return rb.__getstate__()


def imported_ray(call: str, *also: str) -> Any:
    """The module of Ray, and other modules with it. Raises ``ModuleNotFoundError``: one is not installed."""
    with unsupported.needs(call, "ray"):
        return [importlib.import_module(name) for name in (*also, "ray")][-1]
