"""TransferQueue's values in a store of engram's: ``storage_backend: Engram`` in its configuration.

Importing this module registers the backend, in the process that calls ``transfer_queue.init`` first. What that stores of the
configuration registers it in every other process that connects.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engram._support.unsupported import needs
from engram.adapters.keyed_values import KeyedValues

with needs("engram.adapters.transfer_queue", "transfer-queue"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from transfer_queue.storage import StorageKeyNotFoundError, StorageManagerFactory
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.clients import StorageClientFactory, StorageKVClient
    from transfer_queue.storage.managers.base import KVStorageManager

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

#: What the configuration and TransferQueue's registries call the backend and its client.
BACKEND, CLIENT = "Engram", "EngramClient"
_NAMESPACE = "transfer_queue"
_OF_VALUES = ("path", "max_keys", "max_bytes", "unclean")
_ENTRIES = {*_OF_VALUES, "storage_process", "machine", "process", "registration", "client_name"}


class EngramClient(StorageKVClient):  # type: ignore[misc] # it ships no types
    """Puts, gets and clears values by key. TransferQueue makes one in each process, and calls it from several threads.

    On the machine of the store it is one of the processes that share it. On another one it asks the storage process, an actor of Ray.

    Args:
        config: ``path``: the folder of the store, on the machine where ``transfer_queue.init`` was called first. ``max_keys``,
            ``max_bytes``, ``unclean``: as for :class:`~engram.adapters.keyed_values.KeyedValues`. ``storage_process``: whether to
            start one; default: if Ray has several machines.

    Raises:
        ValueError: another entry, or no ``path``. RuntimeError: the store is on another machine, without a storage process. TypeError,
            ValueError: as ``KeyedValues``.
    """

    def __init__(self, config: Mapping[str, object] | None) -> None:
        super().__init__(dict(config or {}))
        odd = sorted(map(str, self.config.keys() - _ENTRIES)) or "no path"
        if odd != "no path" or "path" not in self.config:
            raise ValueError(f"{BACKEND}: expected {[*_OF_VALUES, 'storage_process']}, at least path, got {odd}.")
        here, machine = socket.gethostname(), self.config.get("machine")
        self._values = KeyedValues(**_of_values(self.config)) if machine in (None, here) else None  # type: ignore[arg-type]
        if self._values is None and "process" not in self.config:
            expected = f"a process on {machine}, where the store is, or a storage process there"
            raise RuntimeError(f"{BACKEND}: expected {expected}, got one on {here}. Set {BACKEND}.storage_process.")
        self._process = None if self._values else ray.get_actor(self.config["process"], namespace=_NAMESPACE)

    def put(self, keys: list[str], values: list[object]) -> None:
        """As :meth:`KeyedValues.put <engram.adapters.keyed_values.KeyedValues.put>`."""
        self.call("put", keys, values)

    def get(self, keys: list[str], *_: object, **__: object) -> list[object]:
        """As :meth:`KeyedValues.get <engram.adapters.keyed_values.KeyedValues.get>`. The other arguments are ignored: values know them.

        Raises:
            StorageKeyNotFoundError: keys without values, such as others cleared since.
        """
        try:
            return cast("list[object]", self.call("get", keys))
        except KeyError as error:
            cause = error.args[0]  # Ray hands an error on as that of another one
            missing = cause.args[0] if isinstance(cause, KeyError) else cause
            got = f"{len(missing)} of {len(keys)} without, such as {missing[0]!r}"
            raise StorageKeyNotFoundError(f"get: expected keys with values, got {got}. Were they cleared?") from None

    def clear(self, keys: list[str], *_: object, **__: object) -> None:
        """As :meth:`KeyedValues.clear <engram.adapters.keyed_values.KeyedValues.clear>`."""
        self.call("clear", keys)

    def call(self, name: str, *arguments: object) -> object:
        """Call a method of the values, such as ``"keys"``, here or in the storage process. Raises what it raises."""
        method = getattr(self._values or self._process, name)
        return ray.get(method.remote(*arguments)) if self._values is None else method(*arguments)

    def close(self) -> None:
        """Close the store in this process. The values stay."""
        if self._values is not None:
            self._values.close()


def _of_values(config: Mapping[str, object]) -> dict[str, object]:
    """The entries that are arguments of the values."""
    return {name: config[name] for name in _OF_VALUES if name in config}


class EngramStorageManager(KVStorageManager):  # type: ignore[misc] # it ships no types
    """TransferQueue's manager of an :class:`EngramClient`. Arguments are those of its other managers."""

    def __init__(
        self, controller_info: object, config: Mapping[str, object] | None, zmq_context: object = None
    ) -> None:
        super().__init__(controller_info, {**(config or {}), "client_name": CLIENT}, zmq_context=zmq_context)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save all values in a checkpoint of TransferQueue's. Called by ``transfer_queue.save_checkpoint``."""
        self.storage_client.call("save", Path(checkpoint_dir, "engram"))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replace all values by those of a checkpoint. Called by ``transfer_queue.load_checkpoint``."""
        self.storage_client.call("load", Path(checkpoint_dir, "engram"))

    def close(self) -> None:
        """Close the client, and what TransferQueue closes."""
        if "storage_client" in vars(self):  # else it was not made
            self.storage_client.close()
        super().close()


def _initialize(conf: DictConfig) -> dict[str, object]:
    """What TransferQueue's first process does: complete the configuration that all others get, and start the storage process.

    A process that unpickles the configuration imports this module for the function in it, and so has the backend registered.
    """
    settings = dict(conf.backend.get(BACKEND) or {})
    EngramClient(settings).close()  # which checks them
    settings |= {"machine": socket.gethostname(), "registration": _initialize}
    handles: dict[str, object] = {}
    if settings.setdefault("storage_process", sum(node["Alive"] for node in ray.nodes()) > 1):
        settings["process"] = name = f"EngramStorage-{secrets.token_hex(8)}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Ray starts it again if it dies, and asks it again.
        kind = ray.remote(num_cpus=0, max_concurrency=8, max_restarts=-1, max_task_retries=-1)(KeyedValues)
        actor = kind.options(name=name, namespace=_NAMESPACE, scheduling_strategy=here)
        handles[name] = actor.remote(**_of_values(settings))
    conf.backend[BACKEND] = settings
    return handles


StorageBootstrapProvider.register_provider(BACKEND)(_initialize)
StorageClientFactory.register(CLIENT)(EngramClient)
StorageManagerFactory.register(BACKEND)(EngramStorageManager)
