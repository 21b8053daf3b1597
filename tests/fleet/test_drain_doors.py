"""What a drain may be told: by clients, by a list of names, by a file of an earlier one, and by rows of any length."""

import contextlib
from functools import partial

import pytest
import torch

from engram import CorruptStore, LazyMemmapStorage, Ragged, RandomSampler, ReplayBuffer
from engram.format import layout
from engram.remote.protocol import Drain
from engram.serving import draining
from engram.serving.service import Service
from tests.fleet.test_drain import by_priority, drain, stored
from tests.fleet.test_drain_deaths import asked
from tests.fleet.test_fleets import made, rows_of
from tests.serving.servers import serving, token_file
from tests.serving.test_doors import certificate


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(draining, "FORWARD_S", 0.0)
    monkeypatch.setattr(draining, "INTERVAL_S", 0.01)


@pytest.mark.parametrize("listed", ["file:{}", "dns:localhost:7777", "unix:/a.sock,file:{}"])
def test_a_client_names_no_file_to_read(listed, tmp_path):
    """The server reads lists of a client's neither, whose errors would say what is in them."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    made(tmp_path / "0", rows_of(5), RandomSampler()).close()
    with serving(tmp_path / "0") as server:
        with pytest.raises((ValueError, OSError)) as refused:
            asked(server, [listed.format(secret)])
        assert "hunter2" not in str(refused.value)
        with ReplayBuffer.connect(server.address) as rb:
            assert len(rb) == 5


def test_certificates_name_hosts_of_dns(tmp_path):
    pem, key = certificate(tmp_path, "both", "DNS:localhost")
    token = token_file(tmp_path)
    with contextlib.ExitStack() as stack:
        ports = []
        for k in range(2):
            made(tmp_path / str(k), rows_of(20, 100 * k), RandomSampler()).close()
            server = stack.enter_context(serving(tmp_path / str(k), "127.0.0.1:0", token, pem, key))
            ports.append(str(server.address).rpartition(":")[2])
        there, here = (f"grpc+tls://localhost:{port}" for port in ports)
        result = drain(here, f"dns:{there}", "--token", str(token), "--tls-root", str(pem))
        assert result.exit_code == 0, result.output
    assert stored(tmp_path / "0").keys() == {*range(20), *range(100, 120)}


@pytest.mark.parametrize("raw", [b"", b"\x93", b"garbage"])
def test_a_note_that_is_damaged(raw, tmp_path):
    with made(tmp_path / "0", rows_of(5), RandomSampler()) as rb:
        (tmp_path / "0" / layout.FOLDER / "draining").write_bytes(raw)
        with pytest.raises(
            CorruptStore, match=r"draining: expected which rows .* Compare the stores, and remove the file"
        ):
            draining.finish(rb.storage)


def ragged(folder, first, length, rows=10):
    storage = LazyMemmapStorage(
        200, scratch_dir=folder, ragged={"b": Ragged(torch.int64, max_length=64)}, ragged_bytes=8 * 8 * 400
    )
    with ReplayBuffer(storage=storage, batch_size=4) as rb:
        for number in range(first, first + rows):
            items = torch.nested.as_nested_tensor([torch.full((length,), number)], layout=torch.jagged)
            rb.extend({"a": torch.tensor([number]), "b": items})


def numbers(folder):
    with ReplayBuffer.open(folder, unclean="accept") as rb:
        return sorted(rb[:]["a"].tolist())


def test_rows_of_any_length_replace_none_unless_each_command_says_so(tmp_path, monkeypatch):
    """A command that may replace rows is killed after a turn; the next one may not."""
    monkeypatch.setattr(draining, "TURN_S", 0.0)
    for k in range(2):
        ragged(tmp_path / str(k), 100 * k, 8)
    with serving(tmp_path / "0") as target, serving(tmp_path / "1") as server:
        asked(server, [str(target.address)], evict=True)
        result = drain(server.address, target.address)
        if result.exit_code:  # else the first turn has moved all
            assert "Evict rows" in result.output
            assert drain(server.address, target.address, "--evict").exit_code == 0
    assert numbers(tmp_path / "0") == [*range(10), *range(100, 110)]


def test_a_block_of_long_rows_is_cut(tmp_path, monkeypatch):
    """Longer rows than the rings are made for: a block of as many as usual would be larger than a message."""
    for k, length in enumerate((1, 64)):
        ragged(tmp_path / str(k), 100 * k, length, 5)
    with serving(tmp_path / "0") as target, ReplayBuffer.open(tmp_path / "1") as rb:
        sent, at = [], draining.Listening(target.address, b"", None, reaching={})
        monkeypatch.setattr(draining, "BLOCK_BYTES", 64 * 8)
        monkeypatch.setattr(draining.Draining, "_keep", _counting(sent))
        service = Service(rb)
        while draining.drain(service, Drain([str(target.address)], True), partial(draining.connected, at)):
            pass
        service.draining._fleets[-1].close()
        assert max(sent) == 1
    assert numbers(tmp_path / "0") == [*range(5), *range(100, 105)]


def test_priorities_that_come_while_a_drain_begins(tmp_path):
    """Who asks where a row is finds a place for each of them, from the first moment on."""
    for k in range(2):
        made(tmp_path / str(k), rows_of(5, 100 * k), by_priority()).close()
    places = []

    class Watched(Service):
        def __setattr__(self, name, value):
            if name == "draining" and value is not None:
                places.append(value._moved.shape[1])
            super().__setattr__(name, value)

    with serving(tmp_path / "0") as target, ReplayBuffer.open(tmp_path / "1") as rb:
        service, at = Watched(rb), draining.Listening(target.address, b"", None, reaching={})
        while draining.drain(service, Drain([str(target.address)]), partial(draining.connected, at)):
            pass
        service.draining._fleets[-1].close()
        assert places == [rb.storage.max_size]


def _counting(sent):
    keep = draining.Draining._keep

    def kept(self, note):
        if note is not None:
            sent.append(len(note.rows) // 8)
        keep(self, note)

    return kept
