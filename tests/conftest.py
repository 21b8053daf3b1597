import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import stress

# Examples are not timed: machines that run tests are busy. pytest-timeout bounds each test as a whole.
settings.register_profile("engram", deadline=None)
settings.load_profile("engram")


# There is a worker per core: torch's threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """The same draws in every run. Samplers without a generator take their numbers from torch's default one."""
    torch.manual_seed(0)


@pytest.fixture
def ram(tmp_path):
    """A folder in RAM, where there is some: what is saved there waits for no disk."""
    if stress.RAM is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=stress.RAM, prefix="engram-tests-") as folder:
        yield Path(folder)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
