"""Claim: values of TransferQueue come and go at least 5 times as fast through engram's store as through its ``SimpleStorage``.

Measured: put and get of 2,048 jagged responses of 200 to 2,000 tokens, int32 and float32, 18 MB, beside ``SimpleStorage`` with two
units in the same program, in a ring that was written once. At three levels: by the client alone, from and to lists of tensors (of
``SimpleStorage`` the requests to its units); by the storage manager, from and to TensorDicts, without what it tells the controller;
and by ``kv_batch_put`` and ``kv_batch_get``, which tell and ask the controller. The last two have work that is no storage's.
Needs ``pip install 'engram-replay[transfer-queue]'``; ``python -m benchmarks --only transfer_queue``.
"""

import asyncio
import importlib.util
import os
import tempfile
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

ROWS, UNITS = 2_048, 2
FIELDS = ["log_prob", "tokens"]
EFFORT = Effort(calls=1, blocks=15, lead=1)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Both storages, in turns."""
    if libraries["engram"].module is None or importlib.util.find_spec("transfer_queue") is None:
        return
    os.environ["TQ_LOGGING_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        levels = _Levels(folder, stack)
        for key, what, ours, theirs in (
            ("client", "put + get by the client, 18 MB", levels.our_client, levels.their_client),
            ("manager", "put + get by the manager", levels.our_manager, levels.their_manager),
            ("api", "kv_batch_put + kv_batch_get", levels.our_api, levels.their_api),
        ):
            sides = [Side("SimpleStorage", theirs), Side("engram", ours)]
            timing = alternate(sides, EFFORT.scaled(share))
            yield timed(f"transfer_queue/{key}", what, timing, ours="engram", times=["SimpleStorage"])


class _Levels:
    def __init__(self, folder: str, stack: ExitStack) -> None:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf
        from transfer_queue import interface
        from transfer_queue.metadata import BatchMeta, extract_field_schema

        from engram.adapters import transfer_queue as adapter

        ray.init(num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        simple = {"total_storage_size": 10 * ROWS, "num_data_storage_units": UNITS}
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": simple}
        conf = transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
        stack.callback(transfer_queue.close)
        self._queue, self._client = transfer_queue, interface._TQ_CLIENT  # noqa: SLF001 - to put managers in turns into it
        self._simple = self._client.storage_manager
        settings = {"path": folder, "max_keys": 16 * ROWS, "max_bytes": 2e8}
        self._engram = adapter.EngramStorageManager(conf.controller.zmq_info, settings)
        stack.callback(self._engram.close)
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)

        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(200, 2_001, (ROWS,), generator=generator).tolist()
        tokens = [torch.randint(50_000, (n,), dtype=torch.int32, generator=generator) for n in lengths]
        rows = {"log_prob": [torch.rand(n, generator=generator) for n in lengths], "tokens": tokens}
        jagged = {name: torch.nested.as_nested_tensor(it, layout=torch.jagged) for name, it in rows.items()}
        self._data, indexes = TensorDict(jagged, batch_size=ROWS), list(range(10**6, 10**6 + ROWS))
        self._keys = [f"{index}@{name}" for name in FIELDS for index in indexes]
        self._values = [row for name in FIELDS for row in rows[name]]
        self._uids = [str(index) for index in indexes]
        places = self._simple._group_by_hash(indexes)  # noqa: SLF001 - as it does
        self._units = [
            (unit, group.global_indexes, {name: [rows[name][at] for at in group.batch_positions] for name in FIELDS})
            for unit, group in places.items()
        ]
        self._meta = BatchMeta(
            global_indexes=indexes,
            partition_ids=["p"] * ROWS,
            field_schema=extract_field_schema(self._data),
            production_status=torch.ones(ROWS, dtype=torch.int8).numpy(),
        )
        for _ in range(15):  # the ring was written once
            self.our_client()

    def our_client(self) -> None:
        self._engram.storage_client.put(self._keys, self._values)
        self._check(self._engram.storage_client.get(self._keys)[-1])

    def their_client(self) -> None:
        put, get = self._simple._put_to_single_storage_unit, self._simple._get_from_single_storage_unit  # noqa: SLF001
        self._all([put(at, rows, target_storage_unit=unit) for unit, at, rows in self._units])
        found = self._all([get(at, FIELDS, target_storage_unit=unit) for unit, at, _ in self._units])
        self._check(found[-1][1]["tokens"][-1])

    def our_manager(self) -> None:
        self._by_manager(self._engram)

    def their_manager(self) -> None:
        self._by_manager(self._simple)

    def our_api(self) -> None:
        self._by_api(self._engram)

    def their_api(self) -> None:
        self._by_api(self._simple)

    def _by_manager(self, manager: Any) -> None:
        with mock.patch.object(manager, "notify_data_update", mock.AsyncMock()):
            self._all([manager.put_data(self._data, self._meta)])
            self._check(self._all([manager.get_data(self._meta)])[0]["tokens"][-1])

    def _by_api(self, manager: Any) -> None:
        with mock.patch.object(self._client, "storage_manager", manager):
            self._queue.kv_batch_put(keys=self._uids, partition_id="p", fields=self._data, tags=[{}] * ROWS)
            found = self._queue.kv_batch_get(keys=self._uids, partition_id="p", select_fields=FIELDS)
        self._check(found["tokens"][-1])

    def _all(self, calls: list[Awaitable[Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return await asyncio.gather(*calls)

        return self._loop.run_until_complete(gathered())

    def _check(self, last: torch.Tensor) -> None:
        assert torch.equal(last, self._values[-1])


if __name__ == "__main__":
    for row in run({"engram": SimpleNamespace(module=True)}, 1.0):  # type: ignore[dict-item]
        times = {side: f"{spread.median / 1e3:.1f} ms" for side, spread in row.spreads.items()}
        print(row.key, times, f"{row.comparisons[0].measured.median:.1f} x")
