"""Values by text keys in a folder. The oracle is a dict of the values that were put, compared by class, dtype, shape and content."""

import os
import random
import threading

import pytest
import torch

from engram import Checkpointer
from engram.adapters.keyed_values import KeyedValues
from engram.errors import CorruptCheckpoint, IncompatibleStore, RateLimited
from tests import fresh, stress, waiting


def same(a, b):
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def made(chance):
    """A value of at most 300 bytes."""
    n, kind = chance.randrange(60), chance.randrange(6)
    return [
        lambda: torch.tensor(chance.choices(range(99), k=n), dtype=torch.int32),
        lambda: torch.tensor([chance.random() for _ in range(n)]),
        lambda: torch.tensor(chance.random()).to(torch.bfloat16),
        lambda: torch.full((n, 2), chance.randrange(9), dtype=torch.int16),
        lambda: "é" * n,
        lambda: {"a": [1, n], "t": torch.arange(chance.randrange(9))},
    ][kind]()


@pytest.fixture
def values(tmp_path):
    with_some = KeyedValues(tmp_path / "kv", max_keys=64, max_bytes=16_000)
    yield with_some
    with_some.close()


def evicted(values):
    return values.buffer.stats()["evicted_rows"]


# ---- one process -------------------------------------------------------------------------------------------------------


def test_before_the_first_put_there_is_nothing(values, tmp_path):
    values.clear(["0@a"])
    values.put([], [])
    assert (values.get([]), values.keys(), values.buffer) == ([], [], None)
    with pytest.raises(KeyError) as raised:
        values.get(["0@a", "1@a"])
    assert raised.value.args == (["0@a", "1@a"],)
    assert not (tmp_path / "kv/values").exists()


def test_values_come_back_in_the_order_of_keys(values):
    values.put(["0@a", "1@a", "2@b"], [torch.arange(3), "text", {"k": [1]}])
    found = values.get(["2@b", "0@a", "2@b"])
    assert found[0] == found[2] == {"k": [1]}
    assert found[1].tolist() == [0, 1, 2]
    assert values.keys() == ["0@a", "1@a", "2@b"]


def test_the_last_value_of_a_key_counts(values):
    values.put(["0@a", "1@a", "0@a"], [1, 2, 3])
    assert values.get(["0@a"]) == [3]
    values.put(["0@a"], ["longer than before"])
    assert values.get(["0@a", "1@a"]) == ["longer than before", 2]
    assert len(values.buffer) == 2
    values.clear(["0@a", "1@a", "7@c"])
    assert len(values.buffer) == 0
    values.put(["1@a"], [4])
    assert values.get(["1@a"]) == [4]


def test_what_was_read_or_written_is_not_what_is_stored(values):
    given = torch.zeros(3)
    values.put(["0@a"], [given])
    given[0] = 1
    values.get(["0@a"])[0][1] = 2
    assert values.get(["0@a"])[0].tolist() == [0, 0, 0]


def test_missing_keys_are_told(values):
    values.put(["0@a", "1@a"], [1, 2])
    values.clear(["0@a"])
    with pytest.raises(KeyError) as raised:
        values.get(["0@a", "1@a", "2@a"])
    assert raised.value.args == (["0@a", "2@a"],)


def test_random_calls_are_those_of_a_dict(tmp_path):
    """Two handles of a ring that is so small that it comes to uncleared values all the time."""
    for seed in range(stress.size(2, 50)):
        chance, known, refused = stress.chance("keyed values", seed), {}, 0
        both = [KeyedValues(tmp_path / str(seed), max_keys=64, max_bytes=16_000) for _ in range(2)]
        for _ in range(1_200):
            values = chance.choice(both)
            keys = [f"{chance.randrange(40)}@{chance.choice('ab')}" for _ in range(chance.randrange(1, 6))]
            call = chance.random()
            if call < 0.5:
                fresh_ones = [made(chance) for _ in keys]
                try:
                    values.put(keys, fresh_ones)
                except RateLimited:
                    refused += 1
                    assert len(known) > 40
                else:
                    known.update(zip(keys, fresh_ones, strict=True))
            elif call < 0.75:
                values.clear(keys)
                for key in keys:
                    known.pop(key, None)
            elif call < 0.8:
                assert sorted(values.keys()) == sorted(known)
            else:
                there = [key for key in keys if key in known]
                assert all(map(same, (known[key] for key in there), values.get(there)))
        assert all(map(same, known.values(), both[0].get(list(known))))
        assert evicted(both[0]) == 0
        assert refused > 0
        assert both[0].buffer.storage.store.core.next_position(0) > 20 * 64  # times round the ring


def test_a_value_that_is_never_cleared_moves_along(values):
    values.put(["for ever"], [torch.arange(100)])
    for step in range(300):
        values.put([f"{step}@a", f"{step}@b"], [torch.zeros(40), "x" * 50])
        values.clear([f"{step}@a", f"{step}@b"])
    assert values.get(["for ever"])[0].tolist() == list(range(100))
    assert len(values.buffer) == 1
    assert evicted(values) == 0


def test_space_that_killed_processes_wasted_costs_no_value(tmp_path):
    """Rows that are appended and removed again stand for those that a process had reserved when it was killed, while it moved values."""
    refused = 0
    for seed in range(stress.size(12, 500)):
        chance = stress.chance("wasted space", seed)
        values = KeyedValues(tmp_path / str(seed), max_keys=64, max_bytes=16_000)
        known = {f"{n}@a": torch.full((chance.randrange(200, 230),), n) for n in range(chance.randrange(6, 9))}
        for key, value in known.items():
            values.put([key], [value[:125]])
        known = {key: value[:125] for key, value in known.items()}
        buffer = values.buffer
        store = buffer.storage.store
        for step in range(60):
            free = values._free(store)
            wasted = chance.randrange(1, 1_000)
            if chance.random() < 0.5 and free[0] > 2 and wasted * 2 < free[1]:  # what would be overwritten is not
                _waste(buffer, wasted)
            try:
                values.put([f"{step}@b"], [b"x" * chance.randrange(900)])
                values.clear([f"{step}@b"])
            except RateLimited as error:
                refused += "processes were killed" in str(error)
            assert all(map(same, known.values(), values.get(list(known)))), (seed, step)
        assert evicted(values) == 0
        values.clear(list(known))
        values.put(["again"], [torch.zeros(100)])
        values.close()
    assert refused > 0


def _waste(buffer, nbytes):
    key = torch.full((1, 128), 7, dtype=torch.uint8)
    row = {"form": torch.zeros(1, 8, dtype=torch.int32), "key": key, "value": [torch.zeros(nbytes, dtype=torch.uint8)]}
    buffer.remove(buffer.extend(row))


def test_threads_put_get_and_clear_at_once(values):
    failures = []

    def work(number):
        try:
            for step in range(60):
                key = f"{number}@a"
                values.put([key, "99@a"], [torch.full((number + 1,), step), number])
                assert values.get([key])[0].tolist() == [step] * (number + 1)
                assert values.get(["99@a"])[0] in range(4)  # never nothing
                values.clear([key])
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_a_full_ring_refuses_and_nothing_changes(values):
    known = {f"{n}@a": torch.full((100,), n) for n in range(12)}  # 9,600 of 13,000 bytes
    values.put(list(known), list(known.values()))
    with pytest.raises(
        RateLimited,
        match=r"room for 5 values, got 51 of max_keys=64; and for 4,800 bytes, got 3,400 of max_bytes=16,000\. Clear",
    ):
        values.put([f"{n}@a" for n in range(5)], [torch.zeros(100, dtype=torch.int64)] * 5)
    with pytest.raises(RateLimited, match=r"room for 52 values, got 51 of max_keys=64"):
        values.put([f"{n}@b" for n in range(52)], [True] * 52)
    assert sorted(values.keys()) == sorted(known)
    assert all(map(same, known.values(), values.get(list(known))))
    values.clear(["0@a", "1@a", "2@a"])
    values.put([f"{n}@a" for n in range(5)], [torch.zeros(100, dtype=torch.int64)] * 5)
    assert evicted(values) == 0


def test_a_first_put_that_does_not_fit_makes_no_store(tmp_path):
    values = KeyedValues(tmp_path, max_keys=16, max_bytes=16_000)
    with pytest.raises(RateLimited, match="room for 16 values, got 15 of max_keys=16"):
        values.put([f"{n}" for n in range(16)], [1] * 16)
    assert values.buffer is None


def test_bad_input_changes_nothing(values):
    values.put(["0@a"], [1])
    with pytest.raises(TypeError, match=r"^put: 1@a\['x'\]: expected .* got a builtins.object"):
        values.put(["0@a", "1@a"], [2, {"x": object()}])
    with pytest.raises(ValueError, match="a value for each of 2 keys, got 1"):
        values.put(["0@a", "1@a"], [2])
    with pytest.raises(ValueError, match=r"put: 1@a: expected at most 1,000 bytes, .* got 1,008"):
        values.put(["0@a", "1@a"], [2, torch.zeros(126, dtype=torch.int64)])
    for call in (lambda keys: values.put(keys, [2, 3]), values.get, values.clear):
        for keys in (["0@a", 1], "0@a", None, ["0@a", b"1@a"]):
            with pytest.raises(TypeError, match="keys: expected a list of strings"):
                call(keys)
        for key in ("", "x\0", "é" * 65, "\ud800"):
            with pytest.raises(ValueError, match=r"keys: expected texts of 1 to 128 bytes .* got '(x|é|\\|')"):
                call(["0@a", key])
    values.put(["é" * 64], [3])
    assert values.get(["0@a", "é" * 64]) == [1, 3]
    assert values.keys() == ["0@a", "é" * 64]


def test_arguments_are_checked(tmp_path):
    for wrong, error in [
        ({"path": 1}, TypeError),
        ({"max_keys": 15}, ValueError),
        ({"max_keys": "1"}, TypeError),
        ({"max_bytes": 1_023}, ValueError),
        ({"max_bytes": None}, TypeError),
    ]:
        with pytest.raises(error, match=rf"KeyedValues: {next(iter(wrong))}: expected"):
            KeyedValues(**{"path": tmp_path, **wrong})


def test_another_store_is_refused(values, tmp_path):
    values.put(["0@a"], [1])
    with pytest.raises(IncompatibleStore, match=r"max_keys and max_bytes .*, 32, 16000\), got .*, 64, 16000\)"):
        KeyedValues(tmp_path / "kv", max_keys=32, max_bytes=16_000).get(["0@a"])
    assert KeyedValues(tmp_path / "kv", max_keys=64, max_bytes=16_000).get(["0@a"]) == [1]


# ---- what outlives what ------------------------------------------------------------------------------------------------


def test_values_outlive_their_handles(values):
    values.put(["0@a", "1@a"], [torch.arange(3), "x"])
    values.close()
    assert values.get(["1@a"]) == ["x"]
    values.close()
    values.put(["1@a"], ["y"])
    assert values.get(["0@a"])[0].tolist() == [0, 1, 2]


def test_saved_values_come_back(values, tmp_path):
    values.save(tmp_path / "empty")
    known = {f"{n}@a": torch.arange(n + 1) for n in range(20)}
    values.put(list(known), list(known.values()))
    values.save(tmp_path / "saved")
    values.put(["0@a", "new"], ["later", 1])
    values.clear(["1@a"])
    values.load(tmp_path / "saved")
    assert sorted(values.keys()) == sorted(known)
    assert all(map(same, known.values(), values.get(list(known))))
    KeyedValues(tmp_path / "kv", max_keys=64, max_bytes=16_000).load(tmp_path / "saved")  # by another handle
    other = KeyedValues(tmp_path / "elsewhere", max_keys=64, max_bytes=16_000)
    other.load(tmp_path / "saved")
    for one in (values, other):
        for step in range(200):  # the ring goes on
            one.put(["0@b"], [torch.full((90,), step)])
        assert all(map(same, known.values(), one.get(list(known))))
        assert evicted(one) == 0
    other.load(tmp_path / "empty")
    assert other.keys() == []
    with pytest.raises((CorruptCheckpoint, FileNotFoundError)):
        other.load(tmp_path / "none")


def test_a_tick_of_a_checkpointer_is_what_another_machine_goes_on_with(values, tmp_path):
    values.put(["0@a"], [torch.arange(3)])
    Checkpointer(tmp_path / "shared", values.buffer).save(1)
    values.put(["0@a"], ["later"])
    other = KeyedValues(tmp_path / "elsewhere", max_keys=64, max_bytes=16_000)
    other.put(["x"], [1])
    Checkpointer(tmp_path / "shared", other.buffer).restore()
    assert other.keys() == ["0@a"]
    assert other.get(["0@a"])[0].tolist() == [0, 1, 2]


REPLACE = """
    import torch
    from engram.adapters.keyed_values import KeyedValues

    values = KeyedValues(folder, max_keys=64, max_bytes=16_000)
    for step in range(10**6):
        n = step * 7 % 80 + 1
        values.put(["tensor", f"{step % 3}", "text"], [torch.full((n,), n), step, "x" * n])
        if step == 50:
            print("begun")
"""


def test_readers_of_other_processes_always_find_one_whole_value(tmp_path):
    values = KeyedValues(tmp_path, max_keys=64, max_bytes=16_000)
    values.put(["for ever", "tensor", "text"], [torch.arange(50), torch.ones(1, dtype=torch.int64), "x"])
    writers = [fresh.start(REPLACE, folder=str(tmp_path)).until("begun") for _ in range(2)]
    seen = set()
    for _ in range(stress.size(600, 50_000)):
        tensor, for_ever, text = values.get(["tensor", "for ever", "text"])
        assert tensor.tolist() == [len(tensor)] * len(tensor) != []
        assert for_ever.tolist() == list(range(50))
        assert set(text) == {"x"}
        seen.add(len(tensor))
    assert len(seen) > 5
    for writer in writers:
        assert writer.poll() is None
        writer.kill()
    assert evicted(values) == 0
    assert len(values.keys()) == 6


WORK = """
    import random, sys
    import torch
    from engram.adapters.keyed_values import KeyedValues
    from engram.errors import RateLimited
    from tests.adapters.test_keyed_values import made

    # Says what it is about to do, does it, and says that it is done.
    values, chance = KeyedValues(folder, max_keys=64, max_bytes=16_000), random.Random(seed)
    log = open(log, "a", buffering=1)
    for step in range(10**6):
        keys = list(dict.fromkeys(f"{chance.randrange(15)}@{owner}" for _ in range(chance.randrange(1, 5))))
        if chance.random() < 0.7:
            log.write(f"put {step} {' '.join(keys)}\\n")
            values.put(keys, [made(chance) for _ in keys])
        else:
            log.write(f"clear {step} {' '.join(keys)}\\n")
            values.clear(keys)
        log.write(f"done {step}\\n")
"""


def replay(log, seed, owner, known):
    """Note of each key of a killed writer the values that may be there; None: nothing."""
    chance = random.Random(seed)
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    for at in range(0, len(lines), 2):
        call, _, *keys = lines[at].split()
        assert keys == list(dict.fromkeys(f"{chance.randrange(15)}@{owner}" for _ in range(chance.randrange(1, 5))))
        is_put, is_done = chance.random() < 0.7, at + 1 < len(lines)
        assert is_put == (call == "put")
        for key in keys:
            now = made(chance) if is_put else None
            known[key] = [now] if is_done else [*known.get(key, [None]), now]


def test_killed_writers_leave_the_old_or_the_new_value_of_each_key(tmp_path):
    """Two processes at a time, with keys of their own in one ring; each is killed at any moment, and another one goes on."""
    folder, chance = tmp_path / "kv", stress.chance("killed writers of keyed values")
    reader, known = KeyedValues(folder, max_keys=64, max_bytes=16_000), {}
    for life in range(stress.size(6, 400)):
        writers = {}
        for owner in "ab":
            seed, log = f"{life} {owner}", tmp_path / f"log {life} {owner}"
            log.touch()
            code = {"folder": str(folder), "seed": seed, "owner": owner, "log": str(log)}
            writers[owner] = seed, log, fresh.start(WORK, **code)
        wanted = chance.randrange(2, 400)
        for owner, (seed, log, program) in writers.items():
            waiting.until(lambda log=log: len(log.read_text().splitlines()) >= wanted, 60, "calls of a writer")
            os.kill(program.pid, 9)
            program.wait()
            replay(log, seed, owner, known)
        for key, possible in known.items():
            try:
                found = reader.get([key])[0]
            except KeyError:
                found = None
            assert any(same(one, found) for one in possible), (life, key)
            known[key] = [found]
        assert {key for key, (value,) in known.items() if value is not None} == set(reader.keys())
    assert evicted(reader) == 0
