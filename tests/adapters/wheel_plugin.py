"""Loaded by pytest, or imported: what ships in TransferQueue's wheel runs over engram's backend, in a folder of its own."""

import tempfile

import ray
import transfer_queue
from omegaconf import OmegaConf

import engram.adapters.transfer_queue  # noqa: F401 - registers the backend

CONTROLLER = {"polling_mode": True}
_init = transfer_queue.init
#: Removed with the process.
_folders = []


def configuration(**controller):
    """That of a new folder."""
    _folders.append(tempfile.TemporaryDirectory(prefix="engram-tq-"))
    settings = {
        "storage_backend": "Engram",
        "Engram": {"path": _folders[-1].name, "max_keys": 10_000, "max_bytes": 1e8},
    }
    return OmegaConf.create({"controller": controller, "backend": settings}, flags={"allow_objects": True})


def start_ray():
    """More processors than there are: actors ask for one each, and use little."""
    ray.init(num_cpus=8, include_dashboard=False, namespace="engram", logging_level="error", log_to_driver=False)


def init(conf=None):
    """``transfer_queue.init`` as tutorials call it, with the backend."""
    own = configuration()
    return _init(own if conf is None else OmegaConf.merge(own, conf))


def pytest_sessionstart(session):
    start_ray()


def pytest_collection_finish(session):
    for module in {item.module for item in session.items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS["Engram"] = configuration(**CONTROLLER)
