"""The buffer of LeRobot's learners over a store. Lists of the steps that were added say what is right."""

import pickle

import numpy as np
import pytest
import torch

from engram.adapters.lerobot import ReplayBuffer, random_shift
from engram.datasets import from_numpy, to_lerobot
from engram.errors import IncompatibleStore, NoSampleable, StoreInUse
from tests import fresh
from tests.adapters.lerobot_steps import KEYS, step
from tests.datasets import lerobot_data


def fill(buffer, numbers):
    for number in numbers:
        buffer.add(**step(number))


def rows_of(batch):
    """The steps of a batch, by the number that each one holds."""
    for i, number in enumerate(batch["reward"].int().tolist()):
        yield (
            number,
            {
                "state": {key: value[i] for key, value in batch["state"].items()},
                "next_state": {key: value[i] for key, value in batch["next_state"].items()},
                **{key: batch[key][i] for key in ("action", "done", "truncated")},
                "complementary_info": {key: value[i] for key, value in batch["complementary_info"].items()},
            },
        )


def check(batch):
    numbers = set()
    for number, row in rows_of(batch):
        wanted = step(number)
        numbers.add(number)
        for name in ("state", "next_state", "complementary_info"):
            assert row[name].keys() == wanted[name].keys() & row[name].keys()
            for key, value in row[name].items():
                assert torch.equal(value, torch.as_tensor(wanted[name][key]).float().squeeze(0)), (number, name, key)
        assert torch.equal(row["action"], wanted["action"][0])
        assert (bool(row["done"]), bool(row["truncated"])) == (wanted["done"], wanted["truncated"])
    return numbers


@pytest.mark.parametrize("where", ["RAM", "directory"])
def test_batches_hold_what_was_added(where, tmp_path):
    torch.manual_seed(0)
    place = {"scratch_dir": tmp_path / "replay"} if where == "directory" else {}
    buffer = ReplayBuffer(20, "cpu", KEYS, use_drq=False, **place)
    with pytest.raises(NoSampleable):
        buffer.sample(4)
    fill(buffer, range(3))
    assert len(buffer.sample(256)["action"]) == 3  # as LeRobot's: at most what is there
    fill(buffer, range(3, 33))
    assert len(buffer) == 20
    seen = set()
    for _ in range(30):
        batch = buffer.sample(20)
        assert {batch[name].dtype for name in ("reward", "done", "truncated")} == {torch.float32}
        assert batch["state"][KEYS[1]].dtype == torch.float32
        seen |= check(batch)
    assert seen == {*range(13, 33)}
    buffer.close()


def test_only_the_keys_that_were_named_are_stored():
    buffer = ReplayBuffer(20, "cpu", KEYS[:1])
    fill(buffer, range(2))
    assert list(buffer.sample(2)["state"]) == KEYS[:1]
    everything = ReplayBuffer(20, "cpu", use_drq=False)
    fill(everything, range(2))
    assert list(everything.sample(2)["state"]) == KEYS


def test_info_is_what_the_first_step_had():
    buffer = ReplayBuffer(20, "cpu", KEYS[:1])
    fill(buffer, [0])
    buffer.add(**step(1) | {"complementary_info": None})
    buffer.add(**step(2) | {"complementary_info": {**step(2)["complementary_info"], "late": 1.0}})
    held = {}
    for _ in range(20):
        for number, row in rows_of(buffer.sample(3)):
            held[number] = {key: value.tolist() for key, value in row["complementary_info"].items()}
    assert held == {n: {"discrete_penalty": float(n % 3), "values": [float(n % 3)] * 2} for n in (0, 2)} | {
        1: {"discrete_penalty": 0.0, "values": [0.0, 0.0]}
    }
    without = ReplayBuffer(20, "cpu", KEYS[:1])
    without.add(**step(1) | {"complementary_info": None})
    assert without.sample(1)["complementary_info"] is None


def test_images_of_both_states_are_changed_together():
    calls = []

    def invert(images):
        calls.append(images.shape)
        return 255 - images

    buffer = ReplayBuffer(20, "cpu", KEYS, image_augmentation_function=invert)
    fill(buffer, range(5))
    batch = buffer.sample(4)
    assert calls == [torch.Size([8, 3, 8, 8])]
    for name in ("state", "next_state"):
        batch[name][KEYS[1]] = 255 - batch[name][KEYS[1]]
    check(batch)


def test_a_shift_moves_each_image_as_a_whole():
    torch.manual_seed(0)
    images = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(50, 3, 1, 1)
    moved = random_shift(images, pad=2)
    padded = np.pad(np.arange(64.0).reshape(8, 8), 2, mode="edge")
    windows = {padded[i : i + 8, j : j + 8].tobytes() for i in range(5) for j in range(5)}
    found = set()
    for image in moved:
        assert torch.equal(image[0], image[1])
        assert torch.equal(image[0], image[2])
        found.add(image[0].double().numpy().tobytes())
    assert found <= windows
    assert len(found) > 15


@pytest.mark.parametrize("ahead", [True, False])
def test_an_iterator_goes_on_and_on(ahead):
    buffer = ReplayBuffer(20, "cpu", KEYS, use_drq=False)
    fill(buffer, range(4))
    batches = buffer.get_iterator(8, async_prefetch=ahead, queue_size=3)
    for number in range(4, 40):
        check(next(batches))
        buffer.add(**step(number))
    batches.close()
    empty = ReplayBuffer(20, "cpu", KEYS).get_iterator(8, async_prefetch=ahead)
    with pytest.raises(NoSampleable):
        next(empty)


DYING = """
from engram.adapters.lerobot import ReplayBuffer
from tests.adapters.lerobot_steps import KEYS, step

buffer = ReplayBuffer(400, "cpu", KEYS, use_drq=False, scratch_dir=folder)
for number in range(10_000_000):
    buffer.add(**step(number))
    print(number)
"""


@pytest.mark.parametrize("least", [20, 900])
def test_a_process_is_killed_while_it_adds(tmp_path, least):
    program = fresh.start(DYING, folder=str(tmp_path / "replay"))
    program.until(f"\n{least}\n")
    with pytest.raises(StoreInUse, match="ReplayBuffer: scratch_dir: .*replay' is in use, by another process"):
        ReplayBuffer(400, "cpu", KEYS, scratch_dir=tmp_path / "replay")
    program.kill()
    last = int(program.out.rsplit("\n", 1)[0].rsplit("\n", 1)[-1])
    buffer = ReplayBuffer(400, "cpu", KEYS, use_drq=False, scratch_dir=tmp_path / "replay")
    held = buffer.rb["reward"].int().tolist()
    newest = max(held)
    assert newest in (last, last + 1)  # the step that was under way may be there
    assert {*held} >= {*range(max(0, newest - 398), newest + 1)}
    wanted = np.concatenate([step(number)["state"][KEYS[1]].numpy() for number in held])
    assert buffer.rb["state", KEYS[1]].numpy().tobytes() == wanted.tobytes()
    ends = dict(zip(held, (buffer.rb["done"] | buffer.rb["truncated"]).tolist(), strict=True))
    assert ends.pop(newest)  # what was open has ended
    assert ends == {number: step(number)["done"] or step(number)["truncated"] for number in ends}
    fill(buffer, range(newest + 1, newest + 4))
    assert buffer.rb["reward"].max() == newest + 3
    buffer.close()


def test_what_cannot_be_stored(tmp_path):
    buffer = ReplayBuffer(20, "cpu", KEYS, use_drq=False, scratch_dir=tmp_path / "replay")
    fill(buffer, range(3))
    bad = step(3)
    for changed, error, said in (
        ({"action": torch.zeros(1, 5)}, RuntimeError, r"action: expected shape \[2\] float32.*got \[5\]"),
        ({"complementary_info": {"name": "a"}}, TypeError, "add: expected tensors and numbers, got str"),
        ({"state": {KEYS[0]: torch.zeros(1, 3)}}, KeyError, rf"add: state: expected \['{KEYS[1]}'\]"),
    ):
        with pytest.raises(error, match=said):
            buffer.add(**bad | changed)
        assert len(buffer) == 3
    buffer.close()
    with pytest.raises(IncompatibleStore, match="ReplayBuffer: scratch_dir: expected 30 steps in one lane"):
        ReplayBuffer(30, "cpu", KEYS, scratch_dir=tmp_path / "replay")
    with pytest.raises(ValueError, match="storage_device: expected 'cpu'"):
        ReplayBuffer(30, "cpu", KEYS, storage_device="cuda:0")


# ---- data sets -----------------------------------------------------------------------------------------------------------


def reached(name, number):
    """A feature of a step: a state that says its number, or an image of its brightness."""
    return np.full(3, number, np.float32) if name == STATE else np.full((3, 32, 48), number * 7 % 250, np.uint8)


STATE, IMAGE = KEYS


def transitions(buffer):
    """What a buffer holds, by the number of the step."""
    found = {}
    for _ in range(12):
        batch = buffer.sample(len(buffer))
        for i, number in enumerate(batch["action"][:, 0].int().tolist()):
            info = batch["complementary_info"] or {}
            found[number] = {
                **{("state", key): one[i] for key, one in batch["state"].items()},
                **{("next_state", key): one[i] for key, one in batch["next_state"].items()},
                **{(key,): batch[key][i] for key in ("reward", "done", "truncated")},
                **{("info", key): one[i] for key, one in info.items()},
            }
    return found


def filled(buffer, count=14, ends=(4, 9)):
    for number in range(count):
        buffer.add(
            {name: torch.from_numpy(reached(name, number))[None] for name in KEYS},
            torch.full((1, 2), float(number)),
            number / 2,
            {name: torch.from_numpy(reached(name, number + 1))[None] for name in KEYS},
            done=number in ends,
            truncated=False,
            complementary_info={"penalty": float(number % 3)},
        )
    return buffer


def test_a_data_set_out_and_in_again(tmp_path):
    buffer = filled(ReplayBuffer(10, "cpu", KEYS, use_drq=False))  # of which 4 to 13 are left
    assert buffer.to_lerobot_dataset("tests/small", fps=5, root=tmp_path / "out", task_name="push") == tmp_path / "out"
    info, episodes, columns = lerobot_data.read(tmp_path / "out")
    assert (info["fps"], info["total_episodes"], info["total_frames"]) == (5, 3, 10)
    assert [one["length"] for one in episodes] == [1, 5, 4]
    assert columns["action"][:, 0].tolist() == [*range(4, 14)]
    assert columns["next.done"].tolist() == [number in (4, 9) for number in range(4, 14)]
    assert info["features"][IMAGE]["dtype"] == "video"
    again = ReplayBuffer.from_lerobot_dataset(tmp_path / "out", "cpu", KEYS, use_drq=False)
    assert (again.capacity, len(again)) == (10, 10)
    found = transitions(again)
    assert found.keys() == {*range(4, 14)}
    for number, one in found.items():
        last = number in (4, 9, 13)  # LeRobot's data sets have no next states of last steps
        assert one["state", STATE].tolist() == [number] * 3
        assert one["next_state", STATE].tolist() == [number + (not last)] * 3
        for name, at in (("state", number), ("next_state", number + (not last))):
            wanted = torch.from_numpy(reached(IMAGE, at)) / 255
            assert one[name, IMAGE].shape == (3, 32, 48)
            assert (one[name, IMAGE] - wanted).abs().mean() < 0.02  # of a video
        assert one["info", "penalty"].item() == number % 3
        assert (one["reward",].item(), one["done",].item(), one["truncated",].item()) == (
            number / 2,
            number in (4, 9),
            0,
        )


def test_ends_of_a_data_set_without_flags(tmp_path):
    steps = {
        "observation": {"state": np.arange(5.0)},
        "action": np.arange(5.0)[:, None].repeat(2, 1),
        "next": {"reward": np.ones(5)},
    }
    from_numpy({**steps, "episode": [0, 0, 1, 1, 1]}, tmp_path / "rows").close()
    to_lerobot(tmp_path / "rows", tmp_path / "out", fps=1)
    with pytest.raises(ValueError, match=r"from_lerobot_dataset: len\(state_keys\): expected"):
        ReplayBuffer.from_lerobot_dataset(tmp_path / "out", "cpu")
    with pytest.raises(ValueError, match="from_lerobot_dataset: capacity: expected .*5"):
        ReplayBuffer.from_lerobot_dataset(tmp_path / "out", "cpu", KEYS[:1], capacity=4)
    buffer = ReplayBuffer.from_lerobot_dataset(
        tmp_path / "out", "cpu", KEYS[:1], capacity=7, scratch_dir=tmp_path / "replay"
    )
    assert {number: bool(one["done",]) for number, one in transitions(buffer).items()} == {
        0: False,
        1: True,
        2: False,
        3: False,
        4: True,
    }
    buffer.close()
    assert len(ReplayBuffer(7, "cpu", KEYS[:1], scratch_dir=tmp_path / "replay")) == 5
    with pytest.raises(NoSampleable, match="to_lerobot_dataset: expected steps, got none"):
        ReplayBuffer(7, "cpu", KEYS).to_lerobot_dataset("tests/none", root=tmp_path / "none")


def test_pickles_hold_the_steps_or_the_directory(tmp_path):
    for place in ({}, {"scratch_dir": tmp_path / "replay"}):
        buffer = filled(ReplayBuffer(20, "cpu", KEYS, use_drq=False, **place))
        wanted, held = transitions(buffer), pickle.dumps(buffer)
        assert not wanted[13].pop(("done",)) + wanted[13].pop(("truncated",))
        buffer.close()
        again = pickle.loads(held)
        found = transitions(again)
        assert found[13]["done",] + found[13]["truncated",] == 2 * bool(place)  # what was open has ended
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[number][key], one[key]) for number, one in wanted.items() for key in one)
        again.close()
