"""``engram inspect`` and ``engram verify``."""

import itertools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from engram import LazyMemmapStorage, PrioritizedSampler, Ragged, ReplayBuffer
from engram.cli import main
from engram.saved import attempts, description
from engram.saved.description import KINDS
from engram.saved.inspection import _trajectories
from engram.saved.rows import count_kinds
from tests.saved import checkpoint_folders as made


def call(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def found(path):
    result = call("inspect", path, "--json")
    assert call("inspect", path).exit_code == result.exit_code
    return json.loads(result.output)


def test_a_dump(tmp_path):
    made.write_dump(tmp_path / "d", seed=4)
    dump = found(tmp_path / "d")
    assert (dump["kind"], dump["step"], dump["world"], dump["user"]) == ("dump", 4, 1, {"seed": 4})
    (shard,) = dump["shards"]
    assert shard["totals"]["steps"] == 27
    assert sorted(shard["parts"]) == ["indexes/000", "sampler", "storage"]
    storage = shard["parts"]["storage"]
    assert storage["rows"] == 27
    assert storage["lanes"] == {"open": 1, "fewest_rows": 7, "most_rows": 20}
    assert [field["key"] for field in storage["fields"]] == [["next", "reward"], ["observation"], ["done"]]
    assert storage["trajectories"] == {
        "count": 3,
        "shortest": 5,
        "longest": 15,
        "complete": 1,
        "open": 1,
        "headless": 1,
        "both": 0,
        "mid": 0,
        "orphan": 0,
    }
    priorities = shard["parts"]["sampler"]["priorities"]
    histogram = priorities.pop("histogram")
    assert (histogram["edges"][0], histogram["edges"][-1]) == pytest.approx([0.5 ** (1 / 0.6), 2.0 ** (1 / 0.6)])
    assert histogram["counts"] == [1, 0, 0, 0, 0, 0, 0, 1]
    assert priorities == {
        "alpha": 0.6, "beta": 0.4, "eps": 1e-8, "max_priority": 2.0, "drawable": 2, "sum": 2.5, "min": 0.5, "max": 2.0,
    }  # fmt: skip
    assert shard["parts"]["indexes/000"]["name"] == "critic"
    text = call("inspect", tmp_path / "d", "--all").output
    for word in ("next.reward", "float32", "PrioritizedSampler", "headless"):
        assert word in text


def test_a_series(tmp_path):
    epoch = attempts.claim_epoch(tmp_path)
    parent = made.save(tmp_path, 10, epoch)
    folder = made.save(tmp_path, 20, epoch, parent=parent)
    attempts.begin(tmp_path, step=30, epoch=epoch, world=2, trigger="t")
    described = found(tmp_path)
    assert (described["kind"], described["epoch"], described["latest"]) == ("series", 1, folder.name)
    assert [row["status"] for row in described["checkpoints"]] == [
        "undecided: 0 of 2 ranks voted for it",
        "complete",
        "complete",
    ]
    assert described["checkpoints"][1]["bytes_linked"] > 0
    assert found(folder)["kind"] == "checkpoint"
    assert found(folder / "rank-00000-of-00001/storage")["kind"] == "part"
    report = json.loads(call("verify", tmp_path, "--json").output)
    assert report["good"]
    assert "undecided" in report["notes"][0]["what"]
    assert call("verify", tmp_path).output.startswith("note: ")
    alone = call("verify", tmp_path / str(attempts.names(tmp_path)[0]))
    assert (alone.exit_code, alone.output.splitlines()[0].startswith("note: ")) == (0, True)


def test_a_checkpoint_of_several_ranks(tmp_path):
    folder = made.save(tmp_path, 10, attempts.claim_epoch(tmp_path), world=3)
    checkpoint = found(folder)
    assert (checkpoint["kind"], checkpoint["world"], len(checkpoint["shards"])) == ("checkpoint", 3, 3)
    for name in ("steps", "episodes", "bytes_logical", "complete", "open"):
        each = [shard["totals"][name] for shard in checkpoint["shards"]]
        total = checkpoint["totals"][name]
        assert total == ({k: sum(one[k] for one in each) for k in total} if isinstance(total, dict) else sum(each))
    assert checkpoint["totals"]["steps"] == 81


@pytest.mark.parametrize("crash", [False, True])
def test_an_attempt_that_nobody_decided_on(tmp_path, crash):
    name = "crash1" if crash else None
    folder = attempts.begin(
        tmp_path, step=20, epoch=attempts.claim_epoch(tmp_path), world=3, trigger="crash", attempt=name
    )
    for rank in (0, 2):
        made.vote(folder, rank, 3)
    attempt = found(folder)
    assert (attempt["kind"], attempt["status"], attempt["reasons"]) == ("attempt", "undecided", [])
    assert [vote["vote"] for vote in attempt["votes"]] == ["yes", "none", "yes"]
    assert [vote.get("steps") for vote in attempt["votes"]] == [27, None, 27]
    assert attempt["totals"]["steps"] == 54
    assert attempt["totals"]["open"] == {"episodes": 2, "steps": 10}
    assert attempt["problems"] == []
    (said,) = attempt["notes"]
    assert "undecided: 2 of 3" in said["what"]
    for word in ("undecided", "none", "yes"):
        assert word in call("inspect", folder).output
    assert "undecided: 2 of 3" in call("verify", tmp_path).output
    assert call("verify", tmp_path).exit_code == 0, "no checkpoint is damaged"

    # What some ranks saved can be restored, so it is checked, too.
    file = folder / "rank-00002-of-00003/sampler/000.bin"
    made.rewrite(file, bytes(byte ^ 1 for byte in file.read_bytes()))
    damaged = call("verify", folder)
    assert f"DAMAGED {file}" in damaged.output
    assert damaged.exit_code == 1
    assert str(file) in call("verify", tmp_path).output
    assert str(file) not in call("verify", folder, "--level", "meta").output


def test_an_attempt_of_which_something_is_damaged_or_lost(tmp_path):
    """A vote that cannot be read is damage, and so is that nobody decided though all voted: a manifest was lost."""
    folder = attempts.begin(tmp_path, step=20, epoch=attempts.claim_epoch(tmp_path), world=2, trigger="crash")
    made.vote(folder, 0, 2)
    assert call("verify", folder).exit_code == 0
    made.vote(folder, 1, 2)
    said = call("verify", folder)
    assert (said.exit_code, said.output.splitlines()[0][:7]) == (1, "DAMAGED")
    assert "undecided: 2 of 2 ranks voted for it" in said.output
    shard = folder / "rank-00001-of-00002/shard.json"
    made.rewrite(shard, shard.read_bytes()[:-1])
    said = call("verify", folder)
    assert said.exit_code == 1
    assert f"DAMAGED {shard}: " in said.output
    attempt = folder / "attempt.json"
    attempt.chmod(0o600)
    attempt.write_text("{}")
    said = call("verify", folder)
    assert said.exit_code == 1
    assert f"DAMAGED {attempt}" in said.output


@settings(max_examples=100)
@given(data=st.data(), columns=st.integers(1, 3))
def test_kinds_of_trajectories_are_those_of_a_save(data, columns):
    """What ``inspect`` says, read one by one, and what a save counts, from arrays."""
    runs = []
    for lane in range(data.draw(st.integers(1, 3))):
        at = [column + columns * data.draw(st.integers(-3, 3)) for column in range(columns)]
        for _ in range(data.draw(st.integers(0, 8))):
            column = data.draw(st.integers(0, columns - 1))
            first, steps = at[column], data.draw(st.integers(1, 9))
            at[column] = first + columns * (steps + data.draw(st.integers(0, 1)))
            runs.append((lane, first, first + columns * steps, 5, data.draw(st.integers(0, 15))))
    runs.sort()
    said = _trajectories(itertools.starmap(description.Trajectory, runs), columns)
    table = np.array(runs, np.int64).reshape(-1, 5)
    counts = count_kinds(table, columns)
    assert {kind: said[kind] for kind in KINDS} == {kind: counts[kind]["episodes"] for kind in KINDS}
    steps = (table[:, 2] - table[:, 1]) // columns
    assert (said["count"], said["shortest"], said["longest"]) == (
        len(runs),
        steps.min(initial=10) % 10,
        steps.max(initial=0),
    )


def test_an_attempt_that_was_aborted(tmp_path):
    epoch = attempts.claim_epoch(tmp_path)
    folder = attempts.begin(tmp_path, step=30, epoch=epoch, world=3, trigger="poll")
    made.vote(folder, 0, 3)
    attempts.refuse(folder, 1, "OSError: No space left on device")
    attempts.decide(folder, epoch)
    attempt = found(folder)
    assert (attempt["status"], attempt["step"], attempt["world"]) == ("aborted", 30, 3)
    assert attempt["reasons"] == ["rank 1: OSError: No space left on device"]
    assert [vote["vote"] for vote in attempt["votes"]] == ["yes", "no", "none"]
    assert attempt["votes"][1]["error"] == "OSError: No space left on device"
    assert attempt["totals"]["steps"] == 27
    assert attempt["problems"] == []
    assert "aborted: rank 1" in attempt["notes"][0]["what"]
    assert call("verify", folder).exit_code == 0
    made.rewrite(folder / "manifest.json", b"{}")
    assert "votes" not in found(folder)


def test_a_root_with_many_attempts(tmp_path):
    epoch = attempts.claim_epoch(tmp_path)
    for step in range(30):
        folder = attempts.begin(tmp_path, step=step, epoch=epoch, world=2, trigger="poll")
        for rank in range(step % 3):
            made.vote(folder, rank, 2)
        if step % 2:
            attempts.decide(folder, epoch, give_up="too late")
    report = json.loads(call("verify", tmp_path, "--json").output)
    assert report["good"]
    notes = "\n".join(map(str, report["notes"]))
    assert (notes.count("undecided"), notes.count("aborted")) == (15, 10)
    rows = found(tmp_path)["checkpoints"]
    assert [row["status"].partition(":")[0] for row in rows[:6]] == [
        "complete", "undecided", "aborted", "undecided", "aborted", "undecided",
    ]  # fmt: skip


def many_attempts(root):
    """A series of what there can be; its newest complete one."""
    epoch = attempts.claim_epoch(root)
    parent = made.save(root, 10, epoch)
    folder = made.save(root, 20, epoch, parent=parent)
    attempts.begin(root, step=30, epoch=epoch, world=2, trigger="poll")
    left = attempts.begin(root, step=40, epoch=epoch, world=3, trigger="crash", attempt="crash1")
    for rank in (0, 2):
        made.vote(left, rank, 3)
    refused = attempts.begin(root, step=50, epoch=epoch, world=3, trigger="poll")
    made.vote(refused, 0, 3)
    attempts.refuse(refused, 1, "OSError: No space left on device")
    attempts.decide(refused, epoch)
    return folder, left, refused


@pytest.mark.parametrize("columns", ["90", "300"])
def test_a_series_has_a_line_for_each_where_there_is_place(tmp_path, columns):
    whole, left, refused = many_attempts(tmp_path)
    output = CliRunner().invoke(main, ["inspect", str(tmp_path)], env={"COLUMNS": columns}).output
    lines = output.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("checkpoint "))
    names = [str(name) for name in attempts.names(tmp_path)]
    assert [line.split()[0] for line in lines[begin + 1 :]] == names
    assert lines[begin].split() == ["checkpoint", "ranks", "steps", "episodes", "bytes", "linked", "age"]
    said = {line.split()[0]: line[len(names[-1]) :].strip() for line in lines[begin + 1 :]}
    assert said[whole.name].split()[:7] == ["1", "27", "3", "34.9", "kB", "24.6", "kB"]
    assert said[left.name] == "undecided: 2 of 3 ranks voted for it"
    assert said[refused.name] == "aborted: rank 1: OSError: No space left on device"
    assert max(map(len, lines[begin:])) <= 90
    assert max(len(line) for line in lines[begin:] if "kB" in line) <= 90
    assert not any(line != line.rstrip() for line in lines)


def test_a_damaged_one_of_a_series_is_told_in_its_line_and_as_damage(tmp_path):
    whole, *_ = many_attempts(tmp_path)
    file = whole / "rank-00000-of-00001/sampler/part.json"
    made.rewrite(file, b"{}")
    output = call("inspect", tmp_path).output
    (line,) = [line for line in output.splitlines() if line.startswith(whole.name)]
    assert line.removeprefix(whole.name).startswith("  damaged: expected the sha256 ")
    assert f"DAMAGED {file}" in output
    assert not [line for line in output.splitlines() if line.startswith("note: ") and "undecided" in line]


@pytest.mark.parametrize("columns", ["80", "300"])
def test_no_name_and_no_number_of_a_checkpoint_breaks(tmp_path, columns):
    long = "observation_of_the_left_camera_before_any_crop"
    rb = ReplayBuffer(storage=LazyMemmapStorage(5000, scratch_dir=tmp_path / "s"))
    rb.extend({"next": {long: torch.zeros(5, 400), "scalar": torch.zeros(5)}})
    rb.dumps(tmp_path / "d")
    rb.close()
    for kind in "sd":
        output = CliRunner().invoke(main, ["inspect", str(tmp_path / kind)], env={"COLUMNS": columns}).output
        (line,) = [line for line in output.splitlines() if long in line]
        assert line.split()[:5] == [f"next.{long}", "float32", "[400]", "1.6", "kB"]
        (scalar,) = [line for line in output.splitlines() if "next.scalar" in line]
        assert scalar.split()[:5] == ["next.scalar", "float32", "[]", "4", "B"]
        assert line.index("1.6 kB") + len("1.6 kB") == scalar.index("4 B") + len("4 B"), "numbers to the right"


def test_what_is_left_of_an_attempt(tmp_path):
    _, left, refused = many_attempts(tmp_path)
    output = call("inspect", left).output
    assert "Missing: rank 1; dead, or still writing." in output
    there = f"There: ranks 0, 2, with 54 steps of 6 episodes. restore(name={left.name!r}, allow_partial=True)"
    assert there in output
    assert "DAMAGED" not in output
    output = call("inspect", refused).output
    assert "This is no checkpoint: the ranks gave it up." in output
    assert "allow_partial" not in output
    assert "DAMAGED" not in output
    made.vote(left, 1, 3)
    assert "All ranks have saved." in call("inspect", left).output
    file = left / "rank-00002-of-00003/sampler/000.bin"
    made.rewrite(file, b"")
    assert f"DAMAGED {file}" in call("inspect", left).output


def test_an_attempt_with_a_vote_against_or_with_none(tmp_path):
    epoch = attempts.claim_epoch(tmp_path)
    folder = attempts.begin(tmp_path, step=1, epoch=epoch, world=40, trigger="poll")
    output = call("inspect", folder).output
    ranks = ", ".join(map(str, range(16)))
    assert f"Missing: ranks {ranks} and 24 more; dead, or still writing." in output
    assert "allow_partial" not in output
    attempts.refuse(folder, 3, "OSError: \x1b[2Jno\nspace")
    output = call("inspect", folder).output
    assert "This is no checkpoint: rank 3 voted against it." in output
    assert r"\x1b[2Jno\nspace" in output, "it does not move the cursor"


def test_a_live_store(tmp_path):
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(12, scratch_dir=tmp_path / "s", lanes=3),
        sampler=PrioritizedSampler(12, 1.0, 1.0, 0.0),
    )
    rb.extend(torch.arange(10.0), lane=[0] * 6 + [1] * 4)
    rb.update_priority(torch.arange(4), torch.tensor([0.5, 0.0, 2.0, 1.0]))
    store = found(tmp_path / "s")
    assert (store["kind"], store["capacity"], store["rows"], store["clean"]) == ("store", 12, len(rb), False)
    assert store["lanes"] == {"count": 3, "fewest_rows": 0, "most_rows": 4}
    (index,) = store["indexes"]
    assert (index["name"], index["alpha"], index["max_priority"]) == ("main", 1.0, 2.0)
    assert (index["drawable"], index["min"], index["max"], index["sum"]) == (7, 0.5, 2.0, 3.5 + 4)
    assert call("verify", tmp_path / "s").output.startswith("ok  store")
    rb.close()
    assert found(tmp_path / "s")["clean"]


def test_a_live_store_with_ragged_rows_and_rows_that_grow(tmp_path):
    """Items of 163 bytes a row, in a ring for seven such rows and a part of the eighth."""
    fields = {
        "tokens": Ragged(torch.int32, max_length=40),
        "log_prob": Ragged(torch.float32, like="tokens"),
        "text": Ragged("utf-8", max_length=20),
    }
    how = {"ragged": fields, "ragged_bytes": 1200, "open_rows": 3}
    folder = tmp_path / "store"
    with ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder, **how), batch_size=2) as rb:
        for number in range(7):
            rb.add({"tokens": [number] * 20, "log_prob": [0.0] * 20, "text": "abc", "x": number})
        lanes = [{"lane": 0, "bytes_used": 7 * 163, "bytes_free": 141 * 8 + 70 - 7 * 163}]
        store = found(folder)
        assert store["items"] == {"evicted_rows": 0, "lanes": lanes}
        assert store["open_rows"] == {"slots": 3, "growing": []}
        rb.add({"tokens": [7] * 20, "log_prob": [0.0] * 20, "text": "abc", "x": 7})
        rb.open_row(x=1).append(tokens=[1, 2], log_prob=[0.0, 0.0])
        if (child := os.fork()) == 0:
            try:
                rb.open_row(x=2).append(text="hello")
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        rb.open_row(x=3).discard()
        store = found(folder)
        assert store["items"]["evicted_rows"] == rb.stats()["evicted_rows"] == 1
        assert store["items"]["lanes"][0]["bytes_used"] <= 7 * 163 + 20 * 8  # what is skipped at the seam counts
        assert store["open_rows"] == {
            "slots": 3,
            "growing": [
                {"slot": 0, "process": os.getpid(), "abandoned": False, "items": {"tokens": 2, "text": 0}},
                {"slot": 1, "process": child, "abandoned": True, "items": {"tokens": 0, "text": 5}},
            ],
        }
        shown = call("inspect", folder).output
        assert "1 row evicted for newer ones" in shown
        assert "2 of 3, 1 of them of processes that have ended: rb.unsealed()" in shown
    slots = folder / ".engram" / "indexes" / "main" / "open"
    for damage in (b"", slots.read_bytes()[:-1], bytes(4096) + slots.read_bytes()[4096:]):
        slots.write_bytes(damage)
        assert "open_rows" not in found(folder)


def test_a_live_store_with_rows_that_are_empty(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=tmp_path / "s"))
    rb.extend({"a": torch.zeros(3, 0), "b": torch.arange(3)})
    assert found(tmp_path / "s")["problems"] == []
    rb.close()


DAMAGES = {
    ".engram/store.json": b"{}",
    ".engram/control": 20,
    ".engram/tickets": -8,
    ".engram/alive": 1,
    "meta.json": b"{}",
    "_-single-tensor-_.memmap": -1,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_store(tmp_path, name):
    rb = ReplayBuffer(storage=LazyMemmapStorage(12, scratch_dir=tmp_path / "s"))
    rb.extend(torch.arange(10.0))
    rb.close()
    path, damage = tmp_path / "s" / name, DAMAGES[name]
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    elif name.endswith("control"):
        raw = bytearray(path.read_bytes())
        raw[damage + 12] ^= 1
        path.write_bytes(raw)
    else:
        os.truncate(path, path.stat().st_size + damage)
    report = json.loads((result := call("verify", tmp_path / "s", "--json")).output)
    assert result.exit_code == 1
    assert name.rpartition("/")[2] in report["problems"][0]["file"] + report["problems"][0]["what"]
    assert call("inspect", tmp_path / "s").exit_code == 1
    path.unlink()
    assert call("verify", tmp_path / "s").exit_code == 1


def test_exit_codes(tmp_path):
    made.write_dump(tmp_path / "d")
    assert call("verify", tmp_path / "d").exit_code == 0
    path = tmp_path / "d/storage/observation.memmap"
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    made.rewrite(path, raw)
    assert call("verify", tmp_path / "d", "--level", "meta").exit_code == 0
    assert call("verify", tmp_path / "d", "--level", "read").exit_code == 1
    result = call("verify", tmp_path / "d", "--json")
    assert result.exit_code == 1
    (problem,) = json.loads(result.output)["problems"]
    assert (problem["file"], problem["offset"]) == (str(path), 0)
    assert "DAMAGED" in call("verify", tmp_path / "d").output
    assert call("inspect", tmp_path / "d").exit_code == 0  # rows are not read
    os.truncate(path, 3) if path.chmod(0o600) is None else None
    assert call("inspect", tmp_path / "d").exit_code == 1
    for command in ("inspect", "verify"):
        for nothing in (tmp_path, tmp_path / "missing", path):
            assert call(command, nothing).exit_code == 2
        assert call(command).exit_code == 2
    assert call("verify", tmp_path / "d", "--level", "most").exit_code == 2


def test_both_start_without_torch(tmp_path):
    made.write_dump(tmp_path / "d")
    program = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from engram.cli import main\n"
        "for arguments in (['inspect'], ['verify'], ['inspect', '--json']):\n"
        "    result = CliRunner().invoke(main, [*arguments, sys.argv[1]])\n"
        "    assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'tensordict', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "d")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
