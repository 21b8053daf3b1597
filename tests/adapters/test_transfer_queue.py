"""The backend of TransferQueue: its client by itself, and its manager as TransferQueue makes it, without a controller."""

import asyncio
import pickle
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

pytest.importorskip("transfer_queue", reason="not of CI: TransferQueue needs Ray")

from omegaconf import OmegaConf
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage import StorageKeyNotFoundError, StorageManagerFactory
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients import StorageClientFactory
from transfer_queue.storage.managers.base import KVStorageManager

from engram.adapters import transfer_queue as adapter

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture(params=["of its own", "of the process"])
def client(request):
    config = {"port": adapter.ProcessPort()} if request.param == "of its own" else {}
    made = adapter.EngramClient(config)
    yield made
    made.clear([f"{i}@{field}" for i in range(100) for field in "abc"])


def test_values_come_back_in_the_order_of_keys(client):
    assert client.put(["0@a", "1@a", "2@b"], [torch.arange(3), "text", {"k": [1]}]) is None
    found = client.get(["2@b", "0@a"], shapes=[None, [9]], dtypes=[None, torch.int8], custom_backend_meta=[None, None])
    assert found[0] == {"k": [1]}
    assert found[1].tolist() == [0, 1, 2]


def test_the_last_value_of_a_key_counts(client):
    client.put(["0@a", "0@a"], [1, 2])
    assert client.get(["0@a"]) == [2]
    client.put(["0@a"], ["longer than before"])
    assert client.get(["0@a", "0@a"]) == ["longer than before"] * 2


def test_what_was_read_or_written_is_not_what_is_stored(client):
    given = torch.zeros(3)
    client.put(["0@a"], [given])
    given[0] = 1
    client.get(["0@a"])[0][1] = 2
    assert client.get(["0@a"])[0].tolist() == [0, 0, 0]


def test_keys_without_values_are_told(client):
    client.put(["0@a"], [1])
    client.clear(["0@a", "7@c"])
    client.clear(["0@a"], custom_backend_meta=[None])
    client.put(["1@a"], [1])
    with pytest.raises(StorageKeyNotFoundError, match="got 2 of 3 without, such as '0@a'"):
        client.get(["0@a", "1@a", "2@a"])


def test_bad_input_changes_nothing(client):
    client.put(["0@a"], [1])
    with pytest.raises(TypeError, match=r"^put: 1@a\['x'\]: expected .* got a builtins.object"):
        client.put(["0@a", "1@a"], [2, {"x": object()}])
    with pytest.raises(ValueError, match="a value for each of 2 keys, got 1"):
        client.put(["0@a", "1@a"], [2])
    for call in (lambda keys: client.put(keys, [2, 2]), client.get, client.clear):
        for keys in (["0@a", 1], ("0@a", "1@a")):
            with pytest.raises(TypeError, match="keys: expected a list of strings"):
                call(keys)
    assert client.get(["0@a"]) == [1]
    with pytest.raises(StorageKeyNotFoundError):
        client.get(["1@a"])


def test_threads_put_get_and_clear_at_once(client):
    failures = []

    def work(number):
        try:
            for step in range(50):
                key = f"{number}@a"
                client.put([key, "99@a"], [torch.full((number + 1,), step), number])
                assert client.get([key])[0].tolist() == [step] * (number + 1)
                assert client.get(["99@a"])[0] in range(4)
                client.clear([key])
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- configuration -----------------------------------------------------------------------------------------------------


def test_unknown_entries_are_refused():
    with pytest.raises(ValueError, match=r"Engram: expected the entries .* got \['pth'\]"):
        adapter.EngramClient({"pth": "x"})


def test_a_port_that_is_empty_is_used():
    class Empty(adapter.ProcessPort):
        def __len__(self):
            return 0

    port = Empty()
    adapter.EngramClient({"port": port}).put(["0@a"], [1])
    assert adapter.EngramClient({"port": port}).get(["0@a"]) == [1]


def test_the_memory_of_another_process_is_refused():
    with pytest.raises(RuntimeError, match=r"values in the memory of process 1 on x\. Set backend.Engram.port"):
        adapter.EngramClient({"process": "process 1 on x"})
    adapter.EngramClient({"process": "process 1 on x", "port": adapter.ProcessPort()})


def test_one_line_of_configuration_is_completed_and_registers_the_others():
    conf = OmegaConf.create({"backend": {"storage_backend": "Engram"}}, flags={"allow_objects": True})
    assert StorageBootstrapProvider.get_provider(conf.backend.storage_backend)(conf) is not None
    settings = pickle.dumps(conf)
    adapter.EngramClient(conf.backend.Engram)
    program = "\n".join(
        [
            "import pickle, sys",
            "from transfer_queue.storage import StorageManagerFactory",
            "assert 'Engram' not in StorageManagerFactory._registry",
            "pickle.load(sys.stdin.buffer)",
            "assert 'Engram' in StorageManagerFactory._registry",
        ]
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], input=settings, check=True)


# ---- through TransferQueue's manager -----------------------------------------------------------------------------------


@pytest.fixture
def manager():
    with mock.patch.object(KVStorageManager, "_connect_to_controller", return_value=None):
        made = StorageManagerFactory.create(
            "Engram", mock.MagicMock(), {"port": adapter.ProcessPort()}, zmq_context=None
        )
    with mock.patch.object(KVStorageManager, "notify_data_update", mock.AsyncMock()):
        yield made
    made.close()


def batch(data, indexes):
    return BatchMeta(
        global_indexes=indexes,
        partition_ids=["p"] * len(indexes),
        field_schema=extract_field_schema(data),
        production_status=np.ones(len(indexes), np.int8),
    )


def test_batches_of_all_fields_come_back(manager):
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    data = TensorDict(
        {
            "dense": torch.arange(6).reshape(2, 3),
            "half": torch.ones(2, 3, dtype=torch.bfloat16),
            "jagged": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
            "text": NonTensorStack("a", "é"),
            "record": NonTensorStack({"a": 1}, {"b": (1, torch.zeros(2))}),
        },
        batch_size=2,
    )
    meta = batch(data, [8, 9])
    asyncio.run(manager.put_data(data, meta))
    found = asyncio.run(manager.get_data(meta))
    assert [row.tolist() for row in found["dense"].unbind()] == [[0, 1, 2], [3, 4, 5]]
    assert found["half"].dtype is torch.bfloat16
    assert [row.tolist() for row in found["jagged"].unbind()] == [[1, 2], [3]]
    assert list(found["text"]) == ["a", "é"]
    assert found["record"][1]["b"][1].tolist() == [0, 0]
    asyncio.run(manager.clear_data(meta))
    with pytest.raises(StorageKeyNotFoundError):
        asyncio.run(manager.get_data(meta))


def test_the_manager_closes_the_port(manager):
    closed = []
    manager.storage_client._port.close = lambda: closed.append(1)
    manager.close()
    assert closed == [1]


def test_registered_by_name():
    assert StorageClientFactory.create("EngramClient", {}).get([]) == []
