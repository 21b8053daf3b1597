"""What type checkers read, run."""

import pytest

from tests.typing import user


def test_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    user.gymnasium_loop()
    user.folders_and_servers()
    user.tensordicts(lambda obs: obs.abs().sum(-1))
    assert next(iter(user.windows())) is not None
    user.other_buffers()
    user.later_in_the_run(7)
    assert user.expanders().batch_size == 8


def test_misspelt_arguments_are_answered(tmp_path):
    with pytest.raises(TypeError, match="Did you mean batch_size"):
        user.ReplayBuffer(storage=user.LazyTensorStorage(10), batchsize=3)
    with pytest.raises(TypeError, match="Did you mean lanes"):
        user.LazyTensorStorage(10, lane=3)
