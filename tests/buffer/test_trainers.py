"""TorchRL's trainers with our buffers: they train, save and go on."""

import shutil
import warnings

import pytest
import torch

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    collectors = pytest.importorskip("torchrl.collectors")
    from torchrl import objectives, trainers
    from torchrl.trainers import algorithms

    from tests.buffer.counting import Counting
    from tests.buffer.families import FAMILIES, dqn

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own
FRAMES, PER_BATCH = 60, 10


def uniform(storage):
    return TensorDictReplayBuffer(storage=storage, batch_size=8)


def prioritized(storage):
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=8)


def parts(actions, actor, loss):
    """What trainers take of a family."""
    torch.manual_seed(1)
    return {
        "collector": collectors.Collector(Counting(actions), actor, frames_per_batch=PER_BATCH, total_frames=FRAMES),
        "total_frames": FRAMES,
        "frame_skip": 1,
        "optim_steps_per_batch": 2,
        "loss_module": loss,
        "optimizer": torch.optim.Adam(loss.parameters(), 1e-3),
        "progress_bar": False,
    }


def check_rows(rb):
    rows = rb[:]
    assert (rows["next", "observation"] == rows["observation"] + 1).all()
    assert (rows["next", "terminated"].squeeze(-1) == (rows["next", "observation"][:, 0] == 5)).all()


@pytest.mark.parametrize("buffer", [uniform, prioritized])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trainer_of_each_family(name, buffer):
    actions, actor, loss = FAMILIES[name]()
    rb = buffer(LazyTensorStorage(40))
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    trainer = getattr(algorithms, name)(
        **parts(actions, actor, loss),
        replay_buffer=rb,
        enable_logging=False,
        target_net_updater=objectives.SoftUpdate(loss, eps=0.9),
    )
    trainer.train()
    assert trainer.collected_frames == rb.write_count == FRAMES
    assert trainer._optim_count == 2 * FRAMES // PER_BATCH
    assert len(rb) == 40
    assert any(not torch.equal(one, other) for one, other in zip(before, loss.parameters(), strict=True))
    check_rows(rb)
    if buffer is prioritized and name not in (
        "TD3Trainer",
        "CQLTrainer",
    ):  # which update no priorities without a stepper
        assert len(rb.sampler.priorities().leaves(40).unique()) > 1


def trainer_of(rb, file):
    """A trainer to which the buffer's hook was given, as TorchRL's pages do."""
    actions, actor, loss = dqn()
    loss.make_value_estimator()  # made at its first call otherwise, and then it is missing where a state is loaded
    trainer = trainers.Trainer(**parts(actions, actor, loss), save_trainer_interval=35, save_trainer_file=file)
    trainers.ReplayBufferTrainer(rb, flatten_tensordicts=True).register(trainer)
    return trainer


@pytest.mark.parametrize("kind", ["uniform", "epochs", "prioritized", "directory"])
def test_a_trainer_is_saved_and_goes_on(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("CKPT_BACKEND", "torch")

    def make(name):
        if kind == "directory":
            return uniform(LazyMemmapStorage(40, scratch_dir=tmp_path / name))
        if kind == "epochs":
            return TensorDictReplayBuffer(
                storage=LazyTensorStorage(40), sampler=SamplerWithoutReplacement(), batch_size=8
            )
        return (prioritized if kind == "prioritized" else uniform)(LazyTensorStorage(40))

    file, rb = tmp_path / "trainer", make("first")
    saved = []
    trainer = trainer_of(rb, file)
    save = trainer.save_trainer

    def note(force_save=False):
        before = trainer._last_save
        save(force_save)
        if trainer._last_save != before and not saved:  # the last one comes when the training has ended
            shutil.copy(file, tmp_path / "kept")
            saved.append((trainer.collected_frames, trainer._optim_count, rb[:].clone(), rb.state_dict()))

    trainer.save_trainer = note
    trainer.train()
    [(frames, optimized, rows, state)] = saved
    assert frames == 40
    again = make("second")
    other = trainer_of(again, tmp_path / "unused")
    other.load_from_file(tmp_path / "kept")
    assert (other.collected_frames, other._optim_count) == (frames, optimized)
    assert (again[:] == rows).all()
    twin = make("third")
    twin.load_state_dict(state)
    torch.manual_seed(2)
    one = again.sample()
    torch.manual_seed(2)
    assert (one == twin.sample()).all()
    other.train()
    assert other.collected_frames == FRAMES
    assert other._optim_count == optimized + 2 * (FRAMES - frames) // PER_BATCH
    assert again.write_count == FRAMES
    check_rows(again)
