"""Which trajectories the windows of a sequence are of: those of a slice sampler with the same arguments."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, Sequence, SliceSampler, TensorDictReplayBuffer

STEPS = torch.arange(24)
LOST, WON = STEPS % 12 == 3, STEPS % 12 == 9
GAMES = {"board": STEPS, "lost": LOST, "won": WON}


class Move(NamedTuple):
    board: torch.Tensor
    lost: torch.Tensor
    won: torch.Tensor


FORMS = {
    "dict": lambda: dict(GAMES),
    "arrays": lambda: {name: value.numpy() for name, value in GAMES.items()},
    "tensordict": lambda: TensorDict(GAMES, [24]),
    "named tuple": lambda: Move(**GAMES),
}


def filled(unit, rows, storage=None, kind=ReplayBuffer, **kwargs):
    rb = kind(storage=LazyTensorStorage(24) if storage is None else storage, sample_unit=unit, batch_size=64, **kwargs)
    rb.extend(rows)
    return rb


def windows(rb, unit, field="board"):
    """Of every anchor the valid steps of its window, by their numbers."""
    index, info = unit.expand(STEPS, {}, rb.storage)
    return [
        [int(row) for row, valid in zip(rows, valids, strict=True) if valid]
        for rows, valids in zip(
            index.reshape(24, -1).tolist(), info["validity_mask"].reshape(24, -1).tolist(), strict=True
        )
    ]


def expected(ends, length):
    """The same, by the steps that end a trajectory."""
    last = [next((end for end in ends if end >= step), 23) for step in range(24)]
    return [list(range(step, min(step + length, last[step] + 1))) for step in range(24)]


class TestNamedEnds:
    @pytest.mark.parametrize("form", FORMS)
    def test_of_the_guides_games(self, form):
        unit = Sequence(4, end_keys=["lost", "won"])
        rb = filled(unit, FORMS[form]())
        assert windows(rb, unit) == expected([3, 9, 15, 21], 4)
        batch = rb.sample()
        board = batch.board if isinstance(batch, Move) else batch["board"]
        assert {tuple(window.tolist()) for window in board.reshape(64, 4)} <= {
            tuple((steps + [steps[-1]] * 4)[:4]) for steps in expected([3, 9, 15, 21], 4)
        }

    def test_in_a_folder_that_is_opened_again(self, tmp_path):
        unit = Sequence(4, end_keys=["lost", "won"])
        filled(unit, GAMES, LazyMemmapStorage(24, scratch_dir=tmp_path / "s")).close()
        again = ReplayBuffer.open(tmp_path / "s")
        assert repr(again._wiring.unit) == repr(unit)
        assert windows(again, again._wiring.unit) == expected([3, 9, 15, 21], 4)
        again.close()

    def test_that_are_not_stored_are_skipped(self):
        unit = Sequence(4, end_keys=["won", "drawn"])
        assert windows(filled(unit, GAMES), unit) == expected([9, 21], 4)

    def test_none_leave_ids_alone(self):
        rows = {"board": STEPS, "done": STEPS % 4 == 3, "game": STEPS // 8}
        unit = Sequence(6, end_keys=[], traj_key="game")
        assert windows(filled(unit, rows), unit) == expected([7, 15, 23], 6)

    def test_are_those_of_a_slice_sampler(self):
        rows = {"board": STEPS, "next": {"terminated": LOST.unsqueeze(1), "truncated": WON.unsqueeze(1)}}
        ends = [("next", "terminated"), ("next", "truncated")]
        unit = Sequence(2, end_keys=ends)
        sliced = ReplayBuffer(storage=LazyTensorStorage(24), sampler=SliceSampler(slice_len=2, end_keys=ends))
        sliced.extend(rows)
        drawn = {tuple(pair) for pair in sliced.sample(512)["board"].reshape(-1, 2).tolist()}
        assert drawn == {tuple(steps) for steps in windows(filled(unit, rows), unit) if len(steps) == 2}

    def test_of_which_a_step_has_several(self):
        flags = torch.stack([LOST | WON, WON], 1)
        rows = {"board": STEPS, "done": flags}
        storage = LazyTensorStorage(24)
        every, some = Sequence(4, end_keys=["done"], end_when="all"), Sequence(4, end_keys=["done"])
        rb = filled(every, rows, storage)
        assert windows(rb, every) == expected([9, 21], 4)
        assert windows(rb, some) == expected([3, 9, 15, 21], 4)  # from the same storage

    def test_transforms_see_them(self):
        seen = []

        def look(batch):
            seen.append((batch["won"].clone(), batch["board"].clone()))
            return batch

        rb = filled(Sequence(4, end_keys=["lost", "won"]), TensorDict(GAMES, [24]), kind=TensorDictReplayBuffer)
        rb.append_transform(look)
        batch = rb.sample()
        marked, board = seen[0]
        last = batch["step_in_sequence"] == 3
        assert bool(marked[last].all())
        assert torch.equal(batch["won"], torch.isin(board, STEPS[WON]))

    def test_are_refused_beside_another_flag(self):
        for done_key in ("done", None):
            with pytest.raises(RuntimeError, match="expected one of done_key and end_keys, got both"):
                Sequence(4, done_key=done_key, end_keys=["won"])
        with pytest.raises(TypeError, match="Sequence: end_keys"):
            Sequence(4, end_keys=3)
        with pytest.raises(ValueError, match="Sequence: end_when"):
            Sequence(4, end_when="most")

    def test_of_which_none_is_stored(self):
        with pytest.raises(RuntimeError, match=r"sample: Sequence: expected rows with .* \['over'\].* end_keys"):
            filled(Sequence(4, end_keys=["over"]), GAMES).sample()


class TestUsualEnds:
    @pytest.mark.parametrize("below", [True, False])
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_terminated_and_truncated_without_done(self, below, shape):
        ends = {"terminated": LOST.reshape(24, *shape), "truncated": WON.reshape(24, *shape)}
        rows = {"board": STEPS, "next": ends} if below else {"board": STEPS, **ends}
        unit = Sequence(4)
        assert windows(filled(unit, rows), unit) == expected([3, 9, 15, 21], 4)

    def test_of_a_loop_over_a_vector_environment(self):
        rb = ReplayBuffer(storage=LazyTensorStorage(80, lanes=8), batch_size=32, sample_unit=Sequence(4))
        write = rb.appender(lane="each").extend
        for step in range(10):
            ends = {"terminated": np.full(8, step == 4), "truncated": np.zeros(8, bool)}
            write(obs=np.full((8, 1), step), next={"obs": np.full((8, 1), step + 1), **ends})
        windows = rb.sample()["obs"].reshape(32, 4).tolist()
        assert all((window[0] <= 4) == (window[-1] <= 4) for window in windows)


def test_ids_that_are_named_end_windows_at_a_flag_too():
    rows = {"board": STEPS, "over": STEPS % 12 == 3, "game": STEPS // 12}
    unit = Sequence(4, done_key="over", traj_key="game")
    assert windows(filled(unit, rows), unit) == expected([3, 11, 15, 23], 4)
