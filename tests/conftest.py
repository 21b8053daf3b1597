import pytest
import torch
from hypothesis import settings

# Examples are not timed: machines that run tests are busy. pytest-timeout bounds each test as a whole.
settings.register_profile("engram", deadline=None)
settings.load_profile("engram")


# There is a worker per core: torch's threads would only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """The same draws in every run. Samplers without a generator take their numbers from torch's default one."""
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
