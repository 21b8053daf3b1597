"""Every storage keeps the contract of storages."""

import copy
import pickle
import tempfile

import torch
from tensordict import TensorDict

from engram import LazyMemmapStorage, LazyTensorStorage, ListStorage
from engram.testing import StorageContract
from engram.testing.contract import steps


class Contract(StorageContract):
    copies = (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)))


class TestLazyTensorStorage(Contract):
    def make(self, capacity):
        return LazyTensorStorage(capacity)


class TestLazyTensorStorageOfTensorDicts(TestLazyTensorStorage):
    def rows(self, first, n):
        return steps(first, n)


class TestLazyTensorStorageOfTuples(TestLazyTensorStorage):
    def rows(self, first, n):
        return torch.arange(first, first + n), (torch.arange(first, first + n) / 2).unsqueeze(1)


class TestListStorage(Contract):
    def make(self, capacity):
        return ListStorage(capacity)


class TestListStorageOfTensorDicts(TestListStorage):
    def rows(self, first, n):
        return steps(first, n)


class TestLazyMemmapStorage(Contract):
    #: Copies of a directory store are other handles of the same rows: tests/store/test_sharing.py.
    copies = ()

    def make(self, capacity):
        return LazyMemmapStorage(capacity)


class TestLazyMemmapStorageInAFolder(TestLazyMemmapStorage):
    def make(self, capacity):
        return LazyMemmapStorage(capacity, scratch_dir=tempfile.mkdtemp(dir=self.folder) + "/store")

    def rows(self, first, n):
        number = torch.arange(first, first + n)
        return TensorDict({"a": number, "b": {"c": number.float().unsqueeze(1).expand(n, 3)}}, [n])

    def setup_method(self):
        self._kept = tempfile.TemporaryDirectory()
        self.folder = self._kept.name

    def teardown_method(self):
        self._kept.cleanup()
