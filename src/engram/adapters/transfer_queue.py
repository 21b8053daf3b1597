"""TransferQueue's values in a store of engram's: ``storage_backend: Engram`` in its configuration.

Importing this module registers the backend, in the process that calls ``transfer_queue.init`` first. What that stores of the
configuration registers it in every other process that connects.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram.adapters.keyed_values import KeyedValues

try:
    from transfer_queue.storage import StorageKeyNotFoundError, StorageManagerFactory
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.clients import StorageClientFactory, StorageKVClient
    from transfer_queue.storage.managers.base import KVStorageManager
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"engram.adapters.transfer_queue: expected TransferQueue and what it needs, got {error}. "
        "pip install 'engram-replay[transfer-queue]'.",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

#: What the configuration and TransferQueue's registries call the backend and its client.
BACKEND, CLIENT = "Engram", "EngramClient"
_OF_USERS = ("path", "max_keys", "max_bytes", "unclean")
_ENTRIES = {*_OF_USERS, "machine", "registration", "client_name"}


class EngramClient(StorageKVClient):  # type: ignore[misc] # it ships no types
    """Puts, gets and clears values by key. TransferQueue makes one in each process, and calls it from several threads.

    Args:
        config: ``path``: a folder of this machine, which all processes share. ``max_keys``, ``max_bytes``, ``unclean``: as for
            :class:`~engram.adapters.keyed_values.KeyedValues`.

    Raises:
        ValueError: another entry, or no ``path``. RuntimeError: the folder is on another machine. TypeError, ValueError: as
            ``KeyedValues``.
    """

    def __init__(self, config: Mapping[str, object] | None) -> None:
        super().__init__(dict(config or {}))
        odd = sorted(map(str, self.config.keys() - _ENTRIES))
        if odd or "path" not in self.config:
            raise ValueError(f"{BACKEND}: expected the entries {list(_OF_USERS)}, at least path, got {odd or 'no path'}.")
        machine = self.config.get("machine", socket.gethostname())
        if machine != socket.gethostname():
            raise RuntimeError(
                f"{BACKEND}: expected a process on {machine}, where the folder {self.config['path']!r} is, got one on "
                f"{socket.gethostname()}: a store is shared by the processes of one machine."
            )
        self.values = KeyedValues(**{name: self.config[name] for name in _OF_USERS[1:] if name in self.config}, folder=self.config["path"])
        """The values, with what TransferQueue does not ask for: ``keys``, ``save``, ``load``."""

    def put(self, keys: list[str], values: list[object]) -> None:
        """As :meth:`KeyedValues.put <engram.adapters.keyed_values.KeyedValues.put>`."""
        self.values.put(keys, values)

    def get(self, keys: list[str], shapes: object = None, dtypes: object = None, custom_backend_meta: object = None) -> list[Any]:
        """As :meth:`KeyedValues.get <engram.adapters.keyed_values.KeyedValues.get>`. The other arguments are ignored: values know them.

        Raises:
            StorageKeyNotFoundError: keys without values, such as others cleared since.
        """
        del shapes, dtypes, custom_backend_meta
        try:
            return self.values.get(keys)
        except KeyError as error:
            missing = error.args[0]
            raise StorageKeyNotFoundError(
                f"get: expected keys with values, got {len(missing)} of {len(keys)} without, such as {missing[0]!r}. They were cleared, "
                "or never put."
            ) from None

    def clear(self, keys: list[str], custom_backend_meta: object = None) -> None:
        """As :meth:`KeyedValues.clear <engram.adapters.keyed_values.KeyedValues.clear>`."""
        del custom_backend_meta
        self.values.clear(keys)

    def close(self) -> None:
        """Close the store in this process. The values stay."""
        self.values.close()


class EngramStorageManager(KVStorageManager):  # type: ignore[misc] # it ships no types
    """TransferQueue's manager of an :class:`EngramClient`. Arguments are those of its other managers."""

    def __init__(
        self, controller_info: object, config: Mapping[str, object] | None, zmq_context: object = None
    ) -> None:
        super().__init__(controller_info, {**(config or {}), "client_name": CLIENT}, zmq_context=zmq_context)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save all values in a checkpoint of TransferQueue's. Called by ``transfer_queue.save_checkpoint``."""
        self.storage_client.values.save(Path(checkpoint_dir, "engram"))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replace all values by those of a checkpoint. Called by ``transfer_queue.load_checkpoint``."""
        self.storage_client.values.load(Path(checkpoint_dir, "engram"))

    def close(self) -> None:
        """Close the client, and what TransferQueue closes."""
        if "storage_client" in vars(self):  # else it was not made
            self.storage_client.close()
        super().close()


class Registration:
    """Stands in a configuration. A process that unpickles it imports this module, which registers the backend."""


def _initialize(conf: DictConfig) -> dict[str, object]:
    """What TransferQueue's first process does: complete the configuration that all others get."""
    settings = dict(conf.backend.get(BACKEND) or {})
    settings.setdefault("machine", socket.gethostname())
    conf.backend[BACKEND] = {**settings, "registration": Registration()}
    return {}


StorageBootstrapProvider.register_provider(BACKEND)(_initialize)
StorageClientFactory.register(CLIENT)(EngramClient)
StorageManagerFactory.register(BACKEND)(EngramStorageManager)
