"""Claim: a buffer over a connection samples and writes many times as fast as TorchRL's replay service, and goes on when a server dies.

Measured: batches of 256 rows, *small* ones of 45 bytes and *frames* of 28 kB, drawn from another process over TCP of this machine. The
path is Arrow Flight throughout, also where the rows could be had through shared memory.

- TorchRL: ``RayReplayBuffer`` with the transports "ray" and "distributed" (gloo), on a second Ray node of this machine. Without Ray there
  are only the other sides.
- A raw socket: a process that draws the same batches from the same store, and sends their columns as they are. "Iterated" has four
  requests under way on both sides; for small ones the socket has one, a batch each.
- A learner on the server's node: a sample from the store that is served, against one that is not.
- A fleet: batches of which two stores draw a part each, against those of one store; and with limits, which no call has to wait for.
- Reverb, only if ``REVERB_PYTHON`` names the Python of an environment that has it: see ``reverb_peer``. Both are asked over TCP of this
  machine by a process that draws ahead, or writes and streams 64 rows at a time; Reverb has an item for each row.
- A server's death: the next batch after ``kill -9`` of one server of two; opening the store after that of both.
"""

import os
import secrets
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import data, rivals
from benchmarks.bench_sharing import NO_REVERB
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.served_peer import CHUNK
from benchmarks.timing import Effort, Side, Spread, Timing, alternate, once, together
from benchmarks.workers import Program, Shift, Worker, in_turns

BATCH, PREFETCH = 256, 4
EFFORTS = {"small": Effort(calls=48, blocks=11, lead=5), "frames": Effort(calls=8, blocks=11, lead=5)}
#: Before a block of small batches that are drawn ahead, so that as many are under way at its beginning as at its end.
LEAD_AHEAD = 40
ROWS = {"small": 50_000, "frames": 4_096}
LOCAL = Effort(calls=200, blocks=31)
REVERB = Shift(length_s=0.4, windows=11)
DEATHS = 5
#: Of the plasma store of each Ray node.
_OBJECTS = 512 << 20


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Samples, writes, a learner beside the server, and deaths."""
    engram = libraries["engram"].module
    if engram is None:
        return
    with _ray_nodes() as (ray_notes, services), tempfile.TemporaryDirectory() as name:
        for kind, effort in EFFORTS.items():
            yield from _sampled(engram, libraries["TorchRL"].module, services, kind, effort.scaled(share), ray_notes)
        yield _local(engram, LOCAL.scaled(share))
        yield from _fleet(engram, EFFORTS["small"].scaled(share))
        yield from _reverb(engram, share)
        yield from _deaths(engram, Path(name), max(3, round(DEATHS * share)))


def _rows(kind: str, count: int) -> TensorDict:
    number = torch.arange(count)
    if kind == "small":
        fields = {"obs": torch.rand(count, 4), "action": number, "reward": torch.rand(count)}
        fields |= {"done": torch.zeros(count, dtype=torch.bool), "next_obs": torch.rand(count, 4)}
    else:
        fields = {"obs": torch.randint(0, 256, (count, 4, 84, 84), dtype=torch.uint8), "action": number}
    return TensorDict(fields, batch_size=[count])


def _checked(batch: Any, kind: str) -> None:
    """Refuse a batch that is not whole. Raises ``ValueError``."""
    number = batch["action"].reshape(-1)
    if (
        len(number) != BATCH
        or batch["obs"].shape[0] != BATCH
        or not 0 <= int(number.min()) <= int(number.max()) < ROWS[kind]
    ):
        raise ValueError(f"cluster: expected {BATCH} rows that were written, got {batch}.")


# ---- engram ----------------------------------------------------------------------------------------------------------


@contextmanager
def served(engram: Any, rb: Any, *, address: str = "127.0.0.1:0") -> Iterator[tuple[str, str]]:
    """A server of a buffer: its address, and the path of its token."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex())
        with engram.serve(rb, address, token=token) as where:
            yield where, str(token)


def _buffer(engram: Any, kind: str) -> Any:
    storage = engram.LazyTensorStorage(ROWS[kind])
    rb = engram.TensorDictReplayBuffer(storage=storage, batch_size=BATCH, shared=True)
    rb.extend(_rows(kind, ROWS[kind]))
    return rb


def _sampled(
    engram: Any, torchrl: Any, services: Any, kind: str, effort: Effort, notes: dict[str, str]
) -> Iterator[Row]:
    with ExitStack() as stack:
        rb = _buffer(engram, kind)
        stack.callback(rb.close)
        address, token = stack.enter_context(served(engram, rb))
        connect = engram.ReplayBuffer.connect
        one = connect(address, token=token)
        ahead = connect(address, token=token, prefetch=PREFETCH)
        for remote in (one, ahead):
            stack.callback(remote.close)
            _checked(remote.sample(), kind)
        ask = stack.enter_context(_socket(rb, kind))
        others = {} if torchrl is None or services is None else stack.enter_context(services(torchrl, kind))
        for other in others.values():
            _checked(other.sample(), kind)
        theirs = [Side(name, other.sample) for name, other in others.items()]
        names, size = tuple(others), f"{BATCH} {'rows of 45 bytes' if kind == 'small' else 'frames of 28 kB'}"

        requests, raw = (1, "a socket, one by one") if kind == "small" else (PREFETCH, "a socket")
        sides = [Side("engram", one.sample), *theirs]
        timing = alternate(sides, effort)
        yield timed(f"cluster/sample/{kind}", f"sample {size} over a connection", timing, times=names, notes=notes)
        # The loop of `ahead` has its own blocks: what it has under way must not compete with requests one by one.
        sides = [Side("engram", ahead.sample), Side(raw, ask(requests)), *theirs]
        timing = alternate(sides, effort if kind == "frames" else replace(effort, lead=LEAD_AHEAD))
        what = f"… with prefetch={PREFETCH}"
        yield timed(f"cluster/iterated/{kind}", what, timing, times=names, share=(raw,), notes=notes)
        rows = _rows(kind, BATCH)
        sides = [
            Side("engram", partial(one.extend, rows)),
            *(Side(name, partial(it.extend, rows)) for name, it in others.items()),
        ]
        timing = alternate(sides, effort)
        yield timed(f"cluster/extend/{kind}", f"extend by {size}, acknowledged", timing, times=names, notes=notes)
        streaming = connect(address, token=token, full="block")
        stack.callback(streaming.close)
        sides[0] = Side("engram", partial(streaming.extend, rows))
        yield timed(f"cluster/streamed/{kind}", "… streamed", alternate(sides, effort), times=names, notes=notes)


def _local(engram: Any, effort: Effort) -> Row:
    """What a server costs a learner that has the same store open."""
    served, alone = (_buffer(engram, "small") for _ in range(2))
    with served(engram, served) as (address, token):
        remote = engram.ReplayBuffer.connect(address, token=token)
        remote.sample()
        timing = alternate([Side("engram", served.sample), Side("not served", alone.sample)], effort)
        remote.close()
    served.close()
    alone.close()
    return timed("cluster/local", f"sample {BATCH} rows on the server's node", timing, share=("not served",))


def _fleet(engram: Any, effort: Effort) -> Iterator[Row]:
    """What it costs that rows are in two stores, and that these have limits together."""
    with ExitStack() as stack:
        token = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex())
        addresses = []
        for _ in range(2):
            rb = _buffer(engram, "small")
            stack.callback(rb.close)
            addresses.append(stack.enter_context(engram.serve(rb, "127.0.0.1:0", token=token)))

        def connected(address: Any, **how: Any) -> Any:
            rb = engram.ReplayBuffer.connect(address, token=token, **how)
            stack.callback(rb.close)
            _checked(rb.sample(), "small")
            return rb

        for key, what, how in (
            ("cluster/fleet", f"sample {BATCH} rows of 45 bytes from two stores", {}),
            ("cluster/fleet/iterated", f"… with prefetch={PREFETCH}", {"prefetch": PREFETCH}),
        ):
            one, fleet = connected(addresses[0], **how), connected(addresses, **how)
            timing = alternate(
                [Side("engram", fleet.sample), Side("one store", one.sample)],
                replace(effort, lead=LEAD_AHEAD) if how else effort,
            )
            yield timed(key, what, timing, share=("one store",))
        limited, free = connected(addresses), connected(addresses[0])
        fleet = connected(addresses)
        fleet.limit(engram.SamplesPerInsert(1e6, min_size=ROWS["small"], tolerance=1.0))
        timing = alternate([Side("engram", limited.sample), Side("one store", free.sample)], effort)
        yield timed("cluster/fleet/limited", "… with limits of both together", timing, share=("one store",))


def _reverb(engram: Any, share: float) -> Iterator[Row]:
    """Beside Reverb, with its rows."""
    python = os.environ.get("REVERB_PYTHON")
    if not python:
        yield Row("cluster/reverb", "one client · Reverb", {}, [], notes={"engram": NO_REVERB})
        return
    rb = engram.ReplayBuffer(storage=engram.LazyTensorStorage(data.ROWS), batch_size=BATCH, shared=True)
    rb.extend(data.fields())
    server = Program(python, "benchmarks.reverb_peer", "server", str(data.ROWS))
    with served(engram, rb) as (address, token):
        sides: dict[str, list[Worker]] = {}
        for role in ("sample", "one-by-one", "write"):
            sides[f"engram {role}"] = [Program(sys.executable, "benchmarks.served_peer", role, address, token)]
        for role in ("sample", "write"):
            sides[role] = [Program(python, "benchmarks.reverb_peer", role, f"localhost:{server.said['port']}")]
        turns = in_turns(sides, REVERB.scaled(share))
        for (worker,) in sides.values():
            worker.stop()
    server.stop()
    rb.close()
    note = f"Beside Reverb {server.said['reverb']} with TensorFlow {server.said['tensorflow']}, over loopback."
    for key, ours, theirs, what in (
        ("sample", "sample", "sample", "a learner, batches of 256 rows of 97 bytes · both draw ahead"),
        ("one-by-one", "one-by-one", "sample", "… · ours one by one"),
        ("write", "write", "write", "a writer, 64 rows, streamed · Reverb: an item per row, rows/s"),
    ):
        found = {"engram": turns[f"engram {ours}"], "Reverb": turns[theirs]}
        timing = Timing(1, {side: [together(turn) for turn in each] for side, each in found.items()})
        row = timed(f"cluster/reverb/{key}", what, timing, times=("Reverb",), notes={"engram": note})
        yield row.as_rate(CHUNK) if key == "write" else row


def _deaths(engram: Any, folder: Path, deaths: int) -> Iterator[Row]:
    """Milliseconds to the next batch after the death of a server, and to the open store after that of all."""
    storage = engram.LazyMemmapStorage(ROWS["small"], scratch_dir=str(folder / "store"))
    rb = engram.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    rb.extend(_rows("small", ROWS["small"]))
    rb.close()
    sockets = [f"unix:{folder}/{number}" for number in range(2)]
    servers = [_start(engram, folder, address) for address in sockets]
    remote = engram.ReplayBuffer.connect(",".join(sockets))
    next_batch, opened = [], []
    for death in range(deaths):
        remote.sample()
        which = death % 2  # the client goes on at the next one, and so round
        _kill(servers[which])
        next_batch.append(once(remote.sample)[0])
        servers[which] = _start(engram, folder, sockets[which])
    for _ in range(deaths):
        for server in servers:
            _kill(server)
        elapsed, rb = once(partial(engram.ReplayBuffer.open, folder / "store"))
        opened.append(elapsed)
        _checked(rb.sample(), "small")
        rb.close()
        servers = [_start(engram, folder, address) for address in sockets]
    for server in servers:
        server.__exit__(None, None, None)
    remote.close()
    yield _value("cluster/server-death", "next batch after kill -9 of a server", "500 ms", next_batch)
    yield _value("cluster/all-dead", "store open after kill -9 of all servers", "100 ms", opened)


def _start(engram: Any, folder: Path, address: str) -> Any:
    server = engram.serve(folder / "store", address)
    server.__enter__()
    return server


def _kill(server: Any) -> None:
    os.kill(server.pid, signal.SIGKILL)
    server.__exit__(None, None, None)  # reaps it


def _value(key: str, what: str, bound: str, found: list[float]) -> Row:
    spread = Spread.of(found)
    return Row(key, what, {"engram": spread}, [Comparison(bound, "value", spread, FLOORS[key, bound])], unit="ms")


# ---- a raw socket ----------------------------------------------------------------------------------------------------


@contextmanager
def _socket(rb: Any, kind: str) -> Iterator[Callable[[int], Callable[[], object]]]:
    """A process that sends batches as they are asked for: what asks, with so many requests under way."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_send_batches, args=(there, rb, os.getpid()), daemon=True)
    process.start()
    with socket.create_connection(("127.0.0.1", here.recv())) as asked:
        asked.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield lambda requests: _asking(asked, rb.sample(), requests, kind)
    process.terminate()
    process.join()


def _asking(asked: socket.socket, example: Any, requests: int, kind: str) -> Callable[[], object]:
    fields = [(key, example[key].dtype, example[key].shape, example[key].nbytes) for key in sorted(example.keys())]
    total, under_way = sum(nbytes for *_, nbytes in fields), 0

    def sample() -> object:
        nonlocal under_way
        asked.sendall(struct.pack("<q", requests - under_way))
        under_way = requests - 1
        block = torch.empty(total, dtype=torch.uint8)
        at, rest = 0, memoryview(block.numpy())
        while rest:
            rest = rest[asked.recv_into(rest) :]
        batch = {}
        for key, dtype, shape, nbytes in fields:
            batch[key] = block[at : at + nbytes].view(dtype).view(shape)
            at += nbytes
        return TensorDict(batch, batch_size=[BATCH])

    _checked(sample(), kind)
    return sample


def _send_batches(pipe: Connection, rb: Any, parent: int) -> None:
    """Send as many batches as each number that comes says."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        client, _ = server.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while os.getppid() == parent and (said := client.recv(8)):
        for _ in range(struct.unpack("<q", said)[0]):
            batch = rb.sample()
            for key in sorted(batch.keys()):
                client.sendall(memoryview(batch[key].reshape(-1).view(torch.uint8).numpy()))


# ---- TorchRL over Ray ------------------------------------------------------------------------------------------------


@contextmanager
def _ray_nodes() -> Iterator[tuple[dict[str, str], Any]]:
    """Two Ray nodes, and what makes TorchRL's services on the second; or why there are none."""
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError as error:
        yield {"TorchRL, ray": f"Not measured: {error}.", "TorchRL, gloo": f"Not measured: {error}."}, None
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": _OBJECTS})
    try:
        cluster.add_node(num_cpus=1, resources={"replay": 4}, object_store_memory=_OBJECTS)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        notes: dict[str, str] = {}
        yield notes, partial(_torchrl_services, notes)
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def _torchrl_services(notes: dict[str, str], torchrl: Any, kind: str) -> Iterator[dict[str, Any]]:
    """TorchRL's buffers, by transport; those that do not start are noted."""
    found: dict[str, Any] = {}
    for name, transport in (("TorchRL, ray", "ray"), ("TorchRL, gloo", "distributed")):
        try:
            rb = torchrl.RayReplayBuffer(
                storage=partial(torchrl.LazyTensorStorage, ROWS[kind]),
                batch_size=BATCH,
                replay_buffer_cls=torchrl.TensorDictReplayBuffer,
                ray_init_config={"address": "auto", "ignore_reinit_error": True},
                remote_config={"num_cpus": 0, "resources": {"replay": 1}},
                transport=transport,
                **({"transport_options": {"backend": "gloo"}} if transport == "distributed" else {}),
            )
            for part in _rows(kind, ROWS[kind]).split(BATCH):
                if len(part) == BATCH:
                    rb.extend(part)
        except Exception as error:  # noqa: BLE001 - a rival that does not run is said, and no failure
            notes[name] = f"Not measured: {type(error).__name__}: {str(error).splitlines()[0]:.120}"
            continue
        found[name] = rb
    try:
        yield found
    finally:
        for rb in found.values():
            rb.shutdown()
