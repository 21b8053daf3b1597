"""Metrics: what is shown is what ``stats()`` says, by HTTP, for any buffer, and nothing else can be done."""

import http.client
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import engram.metrics
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tensordict import TensorDict

from engram import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MaxInFlight,
    MinSize,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplesPerInsert,
    StalenessAwareSampler,
    TensorDictPrioritizedReplayBuffer,
)
from engram._support import http as _http
from engram.inspect import metrics as http_server
from engram.inspect.metrics import METRICS
from tests.fresh import start
from tests.ranks.processes import wait_for

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "engram.json"
PAGE = DASHBOARD.parents[1] / "metrics.md"
#: Numbers that others say already, or that do not change.
NOT_SHOWN = {
    "initialized",
    "utilization",
    "samples_per_insert",
    "larger_than_memory",
    "reads_from_files",
    "writes_to_files",
}
#: Numbers that are others a moment later.
PASSING = {"add_per_s", "sample_per_s"}


def filled(sampler=None, storage=None, limit=None):
    storage = LazyTensorStorage(100) if storage is None else storage
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.extend({"x": torch.arange(20), "policy_version": torch.zeros(20)})
    if limit is not None:
        rb.limit(limit)
    rb.sample()
    return rb


BUFFERS = {
    "plain": lambda _: filled(),
    "priority": lambda _: filled(PrioritizedSampler(100, 0.5, 0.4)),
    "ratio": lambda _: filled(limit=SamplesPerInsert(2, min_size=10)),
    "queue": lambda _: filled(ConsumingSampler(2), limit=MaxInFlight(50)),
    "staleness": lambda _: filled(StalenessAwareSampler()),
    "directory": lambda path: filled(storage=LazyMemmapStorage(100, scratch_dir=path / "store")),
    "list": lambda _: ReplayBuffer(storage=ListStorage()),
    "not made": lambda _: ReplayBuffer(storage=ListStorage, delayed_init=True),
}


@pytest.fixture(params=BUFFERS)
def rb(request, tmp_path):
    rb = BUFFERS[request.param](tmp_path)
    yield rb
    rb.close()


def asked(url, accept="application/openmetrics-text; version=1.0.0"):
    """What is answered: its kind and text."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def samples(text):
    """By name and labels, as a strict reader of OpenMetrics finds them."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_number_is_shown_as_it_is(rb):
    with engram.metrics.serve({"a": rb}, "127.0.0.1:0") as server:
        stats = rb.stats()
        kind, text = asked(server.address)
    assert kind.startswith("application/openmetrics-text")
    found = samples(text)
    assert found.pop(("engram_up", ("buffer", "a"))) == 1
    shown = set()
    for it in METRICS:
        for value, key in ({"": it.stats} if isinstance(it.stats, str) else it.stats).items():
            if key in stats:
                name = f"engram_{it.name}" + "_total" * (it.kind == "counter")
                labels = sorted([("buffer", "a"), *[(it.label, value)] * bool(it.label)])
                assert key in PASSING or found[name, *labels] == stats[key]
                del found[name, *labels]
                shown.add(key)
    assert not found
    assert shown == set(stats) - NOT_SHOWN


def test_counters_never_fall_and_count_what_happened():
    rb = filled(limit=SamplesPerInsert(1, min_size=20, tolerance=1))
    registry = CollectorRegistry()
    registry.register(engram.metrics.Collector({"a": rb}))

    def now(name, **labels):
        return registry.get_sample_value(f"engram_{name}", {"buffer": "a", **labels})

    assert (now("inserted_rows_total"), now("sampled_rows_total")) == (20, 4)
    rb.extend({"x": torch.arange(4), "policy_version": torch.zeros(4)})
    assert (now("inserted_rows_total"), now("limit_inserted_rows_total"), now("rows")) == (24, 4, 24)
    assert now("limit_error") == pytest.approx(0)
    for _ in range(5):
        rb.sample()
    assert now("limit_error") == pytest.approx(-1)
    with pytest.raises(TimeoutError):
        rb.sample(timeout=0)
    assert (now("waits_total", call="sample"), now("waiting", call="sample")) == (1, 0)
    assert now("limit_bound", end="highest") == 40


def test_mass_drawable_rows_and_version():
    rb = filled(PrioritizedSampler(100, 1.0, 0.4))
    rb.update_priority(torch.arange(20), torch.full((20,), 0.5))
    assert rb.stats()["priority_mass"] == pytest.approx(10)
    rb = filled(ConsumingSampler())
    assert rb.stats()["drawable_rows"] == len(rb) == 16
    rb = filled(StalenessAwareSampler())
    rb.sampler.consumer_version = 3
    assert rb.stats()["consumer_version"] == 3
    assert rb.stats()["bytes"] == 100 * (8 + 4)


class OfAnotherStore:
    """As a buffer at whose address another store is served now."""

    def stats(self):
        raise ValueError("connect: another store")


def test_several_buffers_and_one_that_is_closed():
    here, gone = filled(), filled()
    with engram.metrics.serve({"other": OfAnotherStore(), "here": here, "gone": gone}, "127.0.0.1:0") as server:
        gone.close()
        found = samples(asked(server.address)[1])
    assert [found["engram_up", ("buffer", name)] for name in ("other", "here", "gone")] == [0, 1, 0]
    assert [dict(labels)["buffer"] for name, *labels in found if name == "engram_rows"] == ["here"]


def test_a_buffer_that_does_not_answer_is_not_waited_for_nor_asked_again(monkeypatch):
    ends, asked_for = threading.Event(), []

    class Searching:
        def stats(self):
            asked_for.append(1)
            ends.wait(60)
            return {"size": 3}

    monkeypatch.setattr(http_server, "ANSWER_S", 0.01)
    registry = CollectorRegistry()
    registry.register(engram.metrics.Collector({"searching": Searching()}))
    for _ in range(3):
        assert registry.get_sample_value("engram_up", {"buffer": "searching"}) == 0
    assert len(asked_for) == 1
    ends.set()
    monkeypatch.setattr(http_server, "ANSWER_S", 60.0)
    assert registry.get_sample_value("engram_rows", {"buffer": "searching"}) == 3


def test_a_scraper_that_does_not_know_openmetrics_gets_text():
    with engram.metrics.serve(filled(), "127.0.0.1:0") as server:
        kind, text = asked(server.address, "*/*")
    assert kind.startswith("text/plain")
    assert 'engram_rows{buffer="replay"} 20.0' in text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("POST", "/metrics", 405), ("PUT", "/", 404)]
)
def test_nothing_else_is_answered(method, path, status):
    with engram.metrics.serve(filled(), "127.0.0.1:0") as server:
        client = http.client.HTTPConnection(server.address.split("/")[2], timeout=60)
        client.request(method, path)
        assert client.getresponse().status == status
        client.close()


def answers(url):
    try:
        return bool(asked(url))
    except (urllib.error.URLError, ConnectionError):
        return False


def test_clients_that_say_nothing_are_few(monkeypatch):
    monkeypatch.setattr(_http, "READ_S", 3600.0)  # none of them is cut off
    with engram.metrics.serve(filled(), "127.0.0.1:0") as server:
        host, port = server.address.split("/")[2].split(":")
        idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(8)]
        wait_for(lambda: len(server._server._idle) == 8)
        wait_for(lambda: answers(server.address))  # the oldest gave its place
        assert idle[0].recv(1 << 10).startswith(b"HTTP/1.1 503 ")
        for one in idle:
            one.close()


def test_a_client_that_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(_http, "READ_S", 0.05)
    with engram.metrics.serve(filled(), "127.0.0.1:0") as server:
        host, port = server.address.split("/")[2].split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert client.recv(1 << 10).startswith(b"HTTP/1.1 408 ")
            assert not client.recv(1)


def test_it_ends_and_one_address_has_one_server():
    server = engram.metrics.serve(filled(), "127.0.0.1:0")
    with pytest.raises(OSError, match="[Aa]ddress"):
        engram.metrics.serve(filled(), server.address.split("/")[2])
    server.close()
    server.close()
    assert "engram-metrics" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("buffers", "address", "error", "why"),
    [
        ({}, "127.0.0.1:0", ValueError, "at least one buffer"),
        ({1: None}, "127.0.0.1:0", TypeError, "expected buffers by name"),
        ({"a": 3}, "127.0.0.1:0", TypeError, "got a int"),
        (3, "127.0.0.1:0", TypeError, "expected buffers by name"),
        ("plain", "0.0.0.0:0", ValueError, "insecure=True"),
        ("plain", "unix:/x", ValueError, "expected HOST:PORT"),
        ("plain", "http://127.0.0.1:0", ValueError, "expected"),
        ("plain", "127.0.0.1", ValueError, "expected"),
        ("plain", 9469, TypeError, "expected a str"),
    ],
)
def test_what_cannot_be_is_refused(buffers, address, error, why):
    with pytest.raises(error, match=why):
        engram.metrics.serve(filled() if buffers == "plain" else buffers, address)


def test_other_machines_are_let_in_where_that_is_said():
    with engram.metrics.serve(filled(), "0.0.0.0:0", insecure=True) as server:
        assert asked(server.address.replace("0.0.0.0", "127.0.0.1"))


# ---- the dashboard and the page ----------------------------------------------------------------------------------------


def names():
    return {f"engram_{it.name}" + "_total" * (it.kind == "counter"): it for it in METRICS} | {"engram_up": None}


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_exist():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = re.findall(r"engram_\w+", target["expr"])
            assert used
            assert set(used) <= names().keys()
            known = {"buffer"} | {names()[name].label for name in used if names()[name]}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known
            assert set(re.findall(r"(\w+)=~?\"", target["expr"])) <= known
            for name in used:  # counters are shown as rates, and nothing else is
                assert (f"rate({name}{{" in target["expr"]) == name.endswith("_total")
    assert re.findall(r"engram_\w+", json.dumps(dashboard["templating"])) == ["engram_up"]


def test_the_page_names_every_metric_and_no_other():
    table = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `engram_")]
    assert sorted(re.findall(r"engram_\w+", " ".join(table))) == sorted(names())


# ---- commands --------------------------------------------------------------------------------------------------------

COMMAND = """
import sys
from engram.cli import main
main(arguments, standalone_mode=False)
"""


@pytest.fixture
def directory(tmp_path):
    filled(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "store"), limit=MinSize(1)).close()
    return str(tmp_path / "store")


def test_a_server_of_a_store_shows_it(directory):
    listen = f"unix:{directory}.sock"
    program = start(COMMAND, arguments=["serve", directory, "--listen", listen, "--metrics", "127.0.0.1:0"])
    program.until("\n")
    url = next(line for line in program.err.splitlines() if line.startswith("http"))
    assert 'engram_rows{buffer="store"} 20.0' in asked(url, "")[1]
    top = start(COMMAND, arguments=["top", listen, "--every", "0.1", "--count", "1"])
    assert top.wait() == 0
    assert "20 of 100 (20 %)" in top.out
    program.kill()


def test_top_of_a_directory_that_is_written_to(directory):
    with ReplayBuffer.open(directory) as rb:
        rb.set_sampler(RandomSampler())
        top = start(COMMAND, arguments=["top", directory, "--every", "0.1", "--count", "2"])
        assert top.wait() == 0, top.err
    assert top.out.count("20 of 100 (20 %)") == 2
    assert "0 rows/s, 0.2 per insert since it was empty" in top.out
    assert "insert waits 0 calls now" in top.out


def test_top_of_a_store_of_a_prioritized_class(tmp_path):
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "store")
    with TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage) as rb:
        rb.extend(TensorDict({"obs": torch.zeros(20, 3)}, [20]))
    command = ["top", str(tmp_path / "store"), "--every", "0.1", "--count", "1"]
    top = start(COMMAND, arguments=command)
    assert top.wait() == 0, top.err
    assert "20 of 100 (20 %)" in top.out
    assert "age        10 writes, 99 % below 19" in top.out
    assert "as diverse as of 20 equally likely rows" in top.out
    with ReplayBuffer.open(tmp_path / "store") as rb:  # top sees what another process has changed, and changes nothing
        rb.update_priority(torch.arange(20), torch.cat([torch.full((5,), 3.0), torch.zeros(15)]))
        expected = rb.stats()["priority_ess"]
        top = start(COMMAND, arguments=[*command, "--json"])
        assert top.wait() == 0, top.err
        seen = json.loads(top.out)
        assert seen["priority_ess"] == pytest.approx(expected)
        assert expected == pytest.approx(5, rel=0.01)
        assert "priority_mass" not in seen  # drawn by nothing


def test_stats_of_a_directory_in_three_forms(directory):
    def printed(*options):
        program = start(COMMAND, arguments=["stats", directory, *options])
        assert program.wait() == 0, program.err
        return program.out

    found = json.loads(printed("--json"))
    assert (found["size"], found["write_count"], found["usage_counted"]) == (20, 20, 0)
    lines = dict(line.split(maxsplit=1) for line in printed().splitlines())
    assert lines.keys() - found.keys() == {"never_sampled_frac"}
    assert float(lines["sample_count"].replace(",", "")) == found["sample_count"]
    assert (found["add_per_s"], found["sample_per_s"]) == (None, None)  # no process has it open
    assert lines["add_per_s"] == lines["sample_per_s"] == "none: no process has the store open"
    with ReplayBuffer.open(directory):
        assert json.loads(printed("--json"))["add_per_s"] >= 0
    exposed = printed("--prometheus")
    assert 'engram_rows{buffer="store"} 20.0' in exposed
    assert f'engram_sampled_rows_total{{buffer="store"}} {float(found["sample_count"])}' in exposed


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["top", "/nowhere"], 2, "expected"),
        (["stats", "/nowhere"], 2, "expected"),
        (["top", "unix:/nowhere.sock"], 1, "no server answered"),
        (["serve", ".", "--metrics", "0.0.0.0:0"], 1, "--insecure"),
    ],
)
def test_commands_say_what_is_wrong(arguments, code, why, directory, monkeypatch):
    from click.testing import CliRunner

    from engram.cli import main

    monkeypatch.chdir(directory)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code
    assert why in result.output
