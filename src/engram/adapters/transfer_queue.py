"""TransferQueue's values in engram: ``storage_backend: Engram`` in its configuration.

Importing this module registers the backend, in the process that calls ``transfer_queue.init`` first. What that stores of the
configuration registers it in every other process that connects.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from engram.adapters.payloads import decode, encode

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
    from collections.abc import Mapping, Sequence

    from omegaconf import DictConfig
    from typing_extensions import Buffer

#: What the configuration and TransferQueue's registries call the backend and its client.
BACKEND, CLIENT = "Engram", "EngramClient"
_SETTINGS = {"port", "process", "registration", "client_name"}


class Port(Protocol):
    """Holds bytes by key. Any thread may call it at any time. It is pickled where it stands in a configuration."""

    def put(self, keys: list[str], payloads: Sequence[Buffer]) -> None:
        """Hold these bytes under these keys, in place of what they held. Of a key that comes twice the last ones count.

        When it returns, every process that gets a key gets these bytes or later ones.
        """

    def get(self, keys: list[str]) -> list[memoryview]:
        """The bytes of these keys, in memory of the caller's own.

        Raises ``KeyError``: there are keys without bytes; its argument is the list of them.
        """

    def clear(self, keys: list[str]) -> None:
        """Hold nothing under these keys any more. Other keys are ignored."""

    def close(self) -> None:
        """Release what this process holds of it. The bytes stay where others see them. Later calls of it do nothing."""


class ProcessPort:
    """A :class:`Port` in the memory of this process: what it holds is gone with it, and no other process sees it."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, keys: list[str], payloads: Sequence[Buffer]) -> None:
        with self._lock:
            self._held.update(zip(keys, map(bytes, payloads), strict=True))

    def get(self, keys: list[str]) -> list[memoryview]:
        with self._lock:
            missing = [key for key in keys if key not in self._held]
            if missing:
                raise KeyError(missing)
            return [memoryview(bytearray(self._held[key])) for key in keys]

    def clear(self, keys: list[str]) -> None:
        with self._lock:
            for key in keys:
                self._held.pop(key, None)

    def close(self) -> None:
        pass


#: That of all clients in this process for which the configuration names none.
_port_of_process = ProcessPort()


class EngramClient(StorageKVClient):  # type: ignore[misc] # it ships no types
    """Puts, gets and clears values by key. TransferQueue makes one in each process, and calls it from several threads.

    Args:
        config: ``port``: holds the bytes. Default: the memory of this process, for programs of a single one.

    Raises:
        ValueError: another entry. RuntimeError: the memory of another process is meant.
    """

    def __init__(self, config: Mapping[str, object] | None) -> None:
        super().__init__(dict(config or {}))
        odd = sorted(map(str, self.config.keys() - _SETTINGS))
        if odd:
            raise ValueError(f"{BACKEND}: expected the entries {sorted(_SETTINGS)}, got {odd}.")
        port: Port | None = self.config.get("port")
        self._port: Port = _port_of_process if port is None else port
        made_in = self.config.get("process")
        if self._port is _port_of_process and made_in not in (None, _this_process()):
            raise RuntimeError(
                f"{BACKEND}: expected a port that all processes share, got none, and values in the memory of {made_in}. Set "
                f"backend.{BACKEND}.port."
            )

    def put(self, keys: list[str], values: list[object]) -> None:
        """Store values under keys, in place of what they had.

        Raises:
            ValueError: not as many keys as values, or containers that are too deep.
            TypeError: keys that are no strings; a value that has no bytes without pickle, with its key. Nothing is stored then.
        """
        _check_keys("put", keys)
        if len(values) != len(keys):
            raise ValueError(f"put: expected a value for each of {len(keys)} keys, got {len(values)}.")
        try:
            payloads = [encode(value, key) for key, value in zip(keys, values, strict=True)]
        except (TypeError, ValueError) as error:
            raise type(error)(f"put: {error}") from None
        self._port.put(keys, payloads)

    def get(
        self, keys: list[str], shapes: object = None, dtypes: object = None, custom_backend_meta: object = None
    ) -> list[object]:
        """The values of keys, each in memory of its own; tensors are on the CPU. The other arguments are ignored: values know them.

        Raises:
            StorageKeyNotFoundError: keys without values, such as others cleared since.
            TypeError: keys that are no strings. ValueError: what is stored is damaged.
        """
        del shapes, dtypes, custom_backend_meta
        _check_keys("get", keys)
        try:
            payloads = self._port.get(keys)
        except KeyError as error:
            missing = error.args[0]
            raise StorageKeyNotFoundError(
                f"get: expected keys with values, got {len(missing)} of {len(keys)} without, such as {missing[0]!r}. They were cleared, "
                "or never put."
            ) from None
        return [decode(payload, key) for key, payload in zip(keys, payloads, strict=True)]

    def clear(self, keys: list[str], custom_backend_meta: object = None) -> None:
        """Forget the values of keys. Keys without are ignored. Raises ``TypeError``: keys that are no strings."""
        del custom_backend_meta
        _check_keys("clear", keys)
        self._port.clear(keys)

    def close(self) -> None:
        """Close the port."""
        self._port.close()


def _check_keys(call: str, keys: object) -> None:
    odd = keys if not isinstance(keys, list) else next((key for key in keys if not isinstance(key, str)), None)
    if odd is not None:
        raise TypeError(f"{call}: keys: expected a list of strings, got {odd!r:.80}.")


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


class EngramStorageManager(KVStorageManager):  # type: ignore[misc] # it ships no types
    """TransferQueue's manager of an :class:`EngramClient`. Arguments are those of its other managers."""

    def __init__(
        self, controller_info: object, config: Mapping[str, object] | None, zmq_context: object = None
    ) -> None:
        super().__init__(controller_info, {**(config or {}), "client_name": CLIENT}, zmq_context=zmq_context)

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
    settings.setdefault("process", _this_process())
    conf.backend[BACKEND] = {**settings, "registration": Registration()}
    return {}


StorageBootstrapProvider.register_provider(BACKEND)(_initialize)
StorageClientFactory.register(CLIENT)(EngramClient)
StorageManagerFactory.register(BACKEND)(EngramStorageManager)
