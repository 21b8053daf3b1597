"""Processes of TransferQueue over engram's backend, which die and are followed by others. ``python dying.py ROLE FOLDER``."""

import os
import signal
import sys
import time
from pathlib import Path

import ray
import torch
import transfer_queue
import wheel_plugin
from transfer_queue import StorageKeyNotFoundError, interface

PARTITION, SAVED, WRITTEN, CLEARED = "p", 30, 40, 3


def value(number):
    return torch.arange(number, number + 3 + number % 5)


def start(folder):
    wheel_plugin.start_ray()
    conf = wheel_plugin.configuration(**wheel_plugin.CONTROLLER)
    conf.backend.Engram.path = str(folder / "store")
    transfer_queue.init(conf)


def put(number):
    transfer_queue.kv_put(key=str(number), partition_id=PARTITION, fields={"x": value(number)}, tag={"number": number})


def read(number):
    return transfer_queue.kv_batch_get(keys=[str(number)], partition_id=PARTITION)["x"][0]


def die(folder):
    """Put, save what the controller knows, put more, clear one, and wait for the end."""
    start(folder)
    for number in range(WRITTEN):
        if number == SAVED:
            transfer_queue.save_checkpoint(folder / "saved", include_storage=False)
        put(number)
    transfer_queue.kv_clear(keys=[str(CLEARED)], partition_id=PARTITION)
    print("ready", flush=True)
    signal.pause()


def succeed(folder):
    """The values that the saved controller knows are those that were put; but what was cleared since is told to be missing."""
    start(folder)
    assert transfer_queue.kv_list() == {}
    transfer_queue.load_checkpoint(folder / "saved")
    known = transfer_queue.kv_list()[PARTITION]
    assert sorted(map(int, known)) == list(range(SAVED))
    for number in set(range(SAVED)) - {CLEARED}:
        assert torch.equal(read(number), value(number)), number
    try:
        read(CLEARED)
    except StorageKeyNotFoundError:
        put(WRITTEN)
        assert torch.equal(read(WRITTEN), value(WRITTEN))
        check_what_is_stored()
        transfer_queue.close()
        return
    raise AssertionError("a value that was cleared is there")


def check_what_is_stored():
    """The store has the values of all keys that were put and not cleared, also of those that no controller knows any more."""
    client = interface._TQ_CLIENT.storage_manager.storage_client
    stored = {int(found[0]): found for found in client.get(client.call("keys"))}
    # The controller of the checkpoint gave the new key the first index that it did not know, SAVED.
    assert set(stored) == {*range(WRITTEN + 1)} - {CLEARED, SAVED}
    assert all(torch.equal(found, value(number)) for number, found in stored.items())


def lose_a_writer(folder):
    """A process that writes is killed: all that it was told to be written can be read by others."""
    start(folder)

    @ray.remote
    class Writer:
        def pid(self):
            return os.getpid()

        def write(self, log):
            transfer_queue.init()
            with open(log, "a") as file:
                for number in range(10**6):
                    put(number)
                    print(number, file=file, flush=True)

    log, writer = folder / "log", Writer.remote()
    pid = ray.get(writer.pid.remote())
    writing = writer.write.remote(str(log))
    while not log.exists() or len(log.read_text().splitlines()) < 40:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    ray.wait([writing])
    told = [int(line) for line in log.read_text().splitlines()]
    assert len(told) >= 40
    for number in told:
        assert torch.equal(read(number), value(number)), number
    put(-1)  # the others go on
    assert torch.equal(read(-1), value(-1))
    transfer_queue.close()


if __name__ == "__main__":
    {"die": die, "succeed": succeed, "lose a writer": lose_a_writer}[sys.argv[1]](Path(sys.argv[2]))
