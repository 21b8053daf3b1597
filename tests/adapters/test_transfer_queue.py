"""The backend of TransferQueue by its own client and manager, and its storage process. Values themselves: test_keyed_values.py."""

import asyncio
import os
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

pytest.importorskip("transfer_queue", reason="not of CI: TransferQueue needs Ray")

import ray
from omegaconf import OmegaConf
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage import StorageKeyNotFoundError, StorageManagerFactory
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.clients import StorageClientFactory
from transfer_queue.storage.managers.base import KVStorageManager

from engram.adapters import transfer_queue as adapter
from engram.adapters.keyed_values import KeyedValues

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


@pytest.fixture
def config(tmp_path):
    return {"path": str(tmp_path), "max_keys": 1_000, "max_bytes": 1e6}


@pytest.fixture
def client(config):
    made = StorageClientFactory.create("EngramClient", config)
    yield made
    made.close()


def test_a_client_puts_gets_and_clears(client, config):
    assert client.put(["0@a", "1@a", "2@b"], [torch.arange(3), "text", {"k": [1]}]) is None
    found = client.get(["2@b", "0@a"], shapes=[None, [9]], dtypes=[None, torch.int8], custom_backend_meta=[None, None])
    assert found[0] == {"k": [1]}
    assert found[1].tolist() == [0, 1, 2]
    client.clear(["0@a"], custom_backend_meta=[None])
    with pytest.raises(StorageKeyNotFoundError, match="got 2 of 3 without, such as '0@a'"):
        client.get(["0@a", "1@a", "3@a"])
    assert adapter.EngramClient(config).call("keys") == ["1@a", "2@b"]


@pytest.mark.parametrize("given", [None, {}, {"pth": "x"}, {"path": "x", "pth": "x"}])
def test_unknown_and_missing_entries_are_refused(given):
    with pytest.raises(
        ValueError, match=r"Engram: expected \['path', .*'storage_process'\], .* got (no path|\['pth'\])"
    ):
        adapter.EngramClient(given)


def test_a_store_on_another_machine_needs_a_storage_process(config):
    with pytest.raises(RuntimeError, match=r"a process on elsewhere, .* Set Engram\.storage_process"):
        adapter.EngramClient({**config, "machine": "elsewhere"})


def test_verl_imports_the_module_that_registers_the_backend():
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"engram": adapter.__name__}
    assert any(it.startswith("transferqueue>=0.1.11") for it in project["optional-dependencies"]["transfer-queue"])


# ---- configuration and the storage process -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, namespace="engram", logging_level="error", log_to_driver=False)
    yield
    ray.shutdown()


def initialized(**settings):
    conf = OmegaConf.create(
        {"backend": {"storage_backend": "Engram", "Engram": settings}}, flags={"allow_objects": True}
    )
    return conf, StorageBootstrapProvider.get_provider("Engram")(conf)


@pytest.mark.usefixtures("cluster")
def test_one_line_of_configuration_is_completed_and_registers_the_others(config):
    conf, handles = initialized(**config)
    assert handles == {}  # of one machine
    client = adapter.EngramClient(conf.backend.Engram)
    client.put(["0@a"], [1])
    program = "\n".join(
        [
            "import pickle, sys",
            "from transfer_queue.storage.clients import StorageClientFactory",
            "assert 'EngramClient' not in StorageClientFactory._registry",
            "conf = pickle.load(sys.stdin.buffer)",
            "assert StorageClientFactory.create('EngramClient', conf.backend.Engram).get(['0@a']) == [1]",
        ]
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], input=pickle.dumps(conf), check=True)


@pytest.mark.usefixtures("cluster")
def test_wrong_settings_are_refused_before_anything_starts(config):
    with pytest.raises(ValueError, match="max_keys: expected at least 16"):
        initialized(**{**config, "max_keys": 1})


@pytest.mark.usefixtures("cluster")
def test_clients_of_other_machines_ask_the_storage_process_which_may_be_killed(config, tmp_path):
    conf, handles = initialized(**config, storage_process=True)
    assert len(handles) == 1
    far = adapter.EngramClient({**conf.backend.Engram, "machine": "elsewhere"})
    near = adapter.EngramClient(conf.backend.Engram)
    process = next(iter(handles.values()))
    for life in range(3):
        value = {"tokens": torch.arange(life + 3), "text": "x"}
        far.put(["0@a", f"{life}@b"], [value, life])
        assert near.get(["0@a"])[0]["tokens"].tolist() == list(range(life + 3))
        near.put(["1@a"], [torch.full((4,), life)])
        before = ray.get(process.__ray_call__.remote(lambda _: os.getpid()))
        putting = [process.put.remote([f"{n}@c"], [torch.full((50,), life)]) for n in range(100)]
        os.kill(before, 9)
        ray.get(putting)  # Ray starts it again, and asks it again
        assert far.get(["0@a"])[0]["tokens"].tolist() == list(range(life + 3))
        assert far.get(["1@a"])[0].tolist() == [life] * 4
        assert [it.tolist() for it in far.get([f"{n}@c" for n in range(100)])] == [[life] * 50] * 100
    with pytest.raises(StorageKeyNotFoundError, match="got 1 of 2 without, such as '9@z'"):
        far.get(["0@a", "9@z"])
    with pytest.raises(TypeError, match="objects are not pickled"):
        far.put(["0@a"], [{1, 2}])
    far.call("save", tmp_path / "saved")
    far.clear(["0@a"])
    far.call("load", tmp_path / "saved")
    assert near.get(["0@a"])[0]["text"] == "x"
    far.close()
    assert KeyedValues(config["path"], max_keys=1_000, max_bytes=1e6).get(["2@b"]) == [2]


# ---- through TransferQueue's manager -----------------------------------------------------------------------------------


@pytest.fixture
def manager(config):
    with mock.patch.object(KVStorageManager, "_connect_to_controller", return_value=None):
        made = StorageManagerFactory.create("Engram", mock.MagicMock(), config, zmq_context=None)
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


@pytest.mark.usefixtures("cluster")
def test_batches_of_all_fields_come_back(manager, tmp_path):
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    data = TensorDict(
        {
            "dense": torch.arange(6).reshape(2, 3),
            "half": torch.ones(2, 3, dtype=torch.bfloat16),
            "jagged": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
            "reward": torch.tensor([0.5, 1.0]),
            "text": NonTensorStack("a", "é"),
            "record": NonTensorStack({"a": 1}, {"b": (1, torch.zeros(2))}),
        },
        batch_size=2,
    )
    meta = batch(data, [8, 9])
    asyncio.run(manager.put_data(data, meta))
    asyncio.run(manager.save_checkpoint(str(tmp_path / "saved")))
    for _ in range(2):
        found = asyncio.run(manager.get_data(meta))
        assert [row.tolist() for row in found["dense"].unbind()] == [[0, 1, 2], [3, 4, 5]]
        assert found["half"].dtype is torch.bfloat16
        assert [row.tolist() for row in found["jagged"].unbind()] == [[1, 2], [3]]
        assert found["reward"].tolist() == [0.5, 1.0]
        assert list(found["text"]) == ["a", "é"]
        assert found["record"][1]["b"][1].tolist() == [0, 0]
        asyncio.run(manager.clear_data(meta))
        with pytest.raises(StorageKeyNotFoundError):
            asyncio.run(manager.get_data(meta))
        asyncio.run(manager.load_checkpoint(str(tmp_path / "saved")))
