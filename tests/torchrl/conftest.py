"""Fixtures of several files here."""

import pytest

from tests.golden.archive import unpack
from tests.torchrl.make_golden import ARCHIVE
from tests.torchrl.torchrl_dumps import full, plain, torchrl

__all__ = ["full", "plain", "torchrl"]


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """Dumps that TorchRL 0.14.1 wrote, as they are committed: tests of these need no TorchRL. Nobody writes to them."""
    return unpack(ARCHIVE.read_bytes(), tmp_path_factory.mktemp("torchrl") / "dumps")
