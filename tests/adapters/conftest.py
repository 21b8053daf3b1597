"""What Stable Baselines3 logs goes with the test: it makes a folder in /tmp for each agent."""

import pytest


@pytest.fixture(autouse=True)
def sb3_logs(monkeypatch, tmp_path):
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path / "sb3"))
