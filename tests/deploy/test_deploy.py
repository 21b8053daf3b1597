"""What deploy/ has: read, checked, and run where a machine stands for the cluster."""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fastjsonschema
import pytest
import torch
import yaml

from engram import ReplayBuffer
from engram.cli import main
from tests.serving.test_doors import certificate

ROOT = Path(__file__).parents[2] / "deploy"
SCHEMA = json.loads((Path(__file__).parent / "kubernetes.schema.json").read_text())
#: With the command of this installation first.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def documents():
    return [*yaml.safe_load_all((ROOT / "kubernetes.yaml").read_text())]


@pytest.fixture(scope="module")
def is_valid():
    validate = fastjsonschema.compile(SCHEMA)

    def check(document):
        try:
            validate(document)
        except fastjsonschema.JsonSchemaException:
            return False
        return True

    return check


def test_kubernetes_takes_the_documents(documents, is_valid):
    assert [it["kind"] for it in documents] == ["Service", "StatefulSet"]
    assert all(is_valid(it) for it in documents)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda it: it["spec"].pop("serviceName"),
        lambda it: it["spec"].update(replica=3),
        lambda it: it["spec"]["template"]["spec"]["containers"][0].update(ports=[{"containerPort": 77777}]),
        lambda it: it["spec"]["template"]["spec"]["volumes"].append({"name": "nothing"}),
        lambda it: it["metadata"].update(name="Engram_1"),
    ],
)
def test_the_schema_refuses_what_kubernetes_does(documents, is_valid, spoil):
    spoilt = copy.deepcopy(documents[1])
    spoil(spoilt)
    assert not is_valid(spoilt)


def test_the_parts_of_the_documents_name_each_other(documents):
    service, stateful = documents
    spec = stateful["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["serviceName"] == service["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert spec["selector"]["matchLabels"].items() <= labels
    (port,) = container["ports"]
    assert container["readinessProbe"]["tcpSocket"]["port"] == port["name"]
    assert [it["port"] for it in service["spec"]["ports"]] == [port["containerPort"]]
    assert f"--listen 0.0.0.0:{port['containerPort']} " in container["args"][0]
    there = {it["name"] for it in pod["volumes"]} | {it["metadata"]["name"] for it in spec["volumeClaimTemplates"]}
    assert {it["name"] for it in container["volumeMounts"]} == there
    for path in re.findall(r"/[a-z]+/[a-z./]*", container["args"][0]):
        assert any(path.startswith(it["mountPath"] + "/") for it in container["volumeMounts"]), path
    said = (ROOT / "kubernetes.yaml").read_text()
    name, number = spec["serviceName"], spec["replicas"]
    assert f"grpc+tls://{stateful['metadata']['name']}-{{k}}.{name}.default.svc:{port['containerPort']}" in said
    assert f"range({number})" in said


def test_a_pod_that_goes_is_drained_by_its_hook(documents, is_valid, tmp_path):
    """As far as text goes: the hook fits into the container, its script is one, and the command knows what it says."""
    said = (ROOT / "kubernetes.yaml").read_text()
    hook = re.search(r"^#   lifecycle:\n(?:#     .*\n)+", said, re.MULTILINE)[0]
    lifecycle = yaml.safe_load(re.sub(r"^#   ", "", hook, flags=re.MULTILINE))
    stateful = copy.deepcopy(documents[1])
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    container |= lifecycle
    assert is_valid(stateful)
    shell, option, script = lifecycle["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    for name, line in (("engram", 'printf "%s\\n" "$@"'), ("hostname", "echo engram-3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    where = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run([shell, option, script], env=where, capture_output=True, text=True, check=True)
    name, *arguments = found.stdout.splitlines()
    parsed = main.commands[name].make_context(name, arguments).params
    service, (port,) = documents[0]["metadata"]["name"], container["ports"]
    own = f"{stateful['metadata']['name']}-3.{service}.default.svc:{port['containerPort']}"
    assert parsed["address"] == f"grpc+tls://{own}"
    assert parsed["to"] == f"dns:grpc+tls://{service}.default.svc:{port['containerPort']}"
    assert not parsed["evict"]
    for path in (parsed["token"], *parsed["tls_root"]):  # the server has them
        assert path in container["args"][0]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def rows(begin, n):
    return {"number": torch.arange(begin, begin + n)}


def test_a_pod_serves_and_goes_on_with_its_volume(documents, tmp_path):
    for name in ("data", "secret", "run"):
        (tmp_path / name).mkdir()
    cert, key = certificate(tmp_path, "pod")
    cert.rename(tmp_path / "secret/tls.crt"), key.rename(tmp_path / "secret/tls.key")
    (tmp_path / "secret/token").write_text("word")
    (tmp_path / "secret/token").chmod(0o640)  # as a mounted secret is
    port = free_port()
    container = documents[1]["spec"]["template"]["spec"]["containers"][0]
    command = container["args"][0].replace("/run/engram", "/run").replace("0.0.0.0:7777", f"127.0.0.1:{port}")
    command = re.sub(r"(?<= )/(data|secret|run)/", rf"{tmp_path}/\1/", command)

    def start():
        program = [*container["command"], command]
        pod = subprocess.Popen(program, env=os.environ | {"PATH": PATH}, stdout=subprocess.PIPE, text=True)
        assert str(port) in pod.stdout.readline()
        return pod

    pod = start()
    token = tmp_path / "run/token"
    try:
        with ReplayBuffer.connect(
            f"grpc+tls://localhost:{port}", token=str(token), tls_root=str(tmp_path / "secret/tls.crt")
        ) as rb:
            rb.extend(rows(0, 10))
            pod.kill(), pod.wait(), pod.stdout.close()
            pod = start()
            rb.extend(rows(10, 5))
            assert (len(rb), rb.batch_size, rb.storage.max_size) == (15, 256, 1_000_000)
            assert {*rb.sample()["number"].tolist()} <= {*range(15)}
    finally:
        pod.kill(), pod.wait(), pod.stdout.close()


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
PROGRAM = """
import os, sys, torch
from engram import ReplayBuffer
from engram.cli import main
with ReplayBuffer.connect(
    os.environ["ENGRAM_ADDRESSES"], token=os.environ["ENGRAM_TOKEN"], tls_root=os.environ["ENGRAM_TLS_ROOT"]
) as rb:
    rb.extend({"number": torch.arange(7)})
    print("rows", len(rb))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def node(tmp_path):
    """The environment of a job of one node, this machine."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    certificate(tmp_path, "probe")  # skips where there is no openssl
    more = {"PATH": f"{tmp_path}:{PATH}", "HOME": str(home), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost"}
    sizes = {"ENGRAM_DIR": str(tmp_path / "store"), "ENGRAM_CAPACITY": "100", "ENGRAM_PORT": str(free_port())}
    return {**os.environ, **more, **sizes}


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_serves_its_nodes_and_runs_the_program(node, tmp_path, status):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [ROOT / "slurm.sh", sys.executable, tmp_path / "program.py", str(status)]
    done = subprocess.run(command, env=node, capture_output=True, text=True, check=False)
    assert (done.returncode, "rows 7" in done.stdout) == (status, True), done.stderr
    assert not [*(tmp_path / "home").iterdir()]  # no secret stays
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", int(node["ENGRAM_PORT"]))) != 0  # and no server
    with ReplayBuffer.open(tmp_path / "store") as rb:
        assert rb["number"].tolist() == [*range(7)]


def test_a_job_that_is_ended_ends_its_servers(node, tmp_path):
    job = subprocess.Popen([ROOT / "slurm.sh", "sleep", "600"], env=node, stdout=subprocess.PIPE, text=True)
    assert node["ENGRAM_PORT"] in job.stdout.readline()  # what the server says
    job.send_signal(signal.SIGTERM)
    job.wait()
    job.stdout.close()
    assert not [*(tmp_path / "home").iterdir()]
    while True:  # srun here hands its process over: the server ends by itself
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", int(node["ENGRAM_PORT"]))):
                break
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("program", "less", "said"), [([], None, "expected a program"), (["true"], "ENGRAM_DIR", "a folder of the local")]
)
def test_a_job_says_what_it_needs(node, tmp_path, program, less, said):
    env = {name: value for name, value in node.items() if name != less}
    done = subprocess.run([ROOT / "slurm.sh", *program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert not [*(tmp_path / "home").iterdir()]


def test_a_server_that_cannot_start_ends_the_job(node, tmp_path):
    (tmp_path / "store").write_text("no folder")
    done = subprocess.run([ROOT / "slurm.sh", "true"], env=node, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the servers ended" in done.stderr


def test_a_server_that_never_answers_ends_the_job(node, tmp_path):
    (tmp_path / "srun").write_text("#!/bin/sh\nexec sleep 600\n")
    env = {**node, "ENGRAM_PATIENCE": "1"}
    done = subprocess.run([ROOT / "slurm.sh", "true"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "did not answer within 1 s" in done.stderr
    assert not [*(tmp_path / "home").iterdir()]


def test_the_shell_reads_the_scripts(documents):
    subprocess.run(["bash", "-n", ROOT / "slurm.sh"], check=True)
    args = documents[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    subprocess.run(["sh", "-n", "-c", args[0]], check=True)
