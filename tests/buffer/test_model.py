"""The buffer beside a model of plain lists and dicts: whatever is done to both, they agree."""

import copy
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

from engram import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NoSampleable,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests import stress
from tests.samplers.machine import stressed


class Model:
    """Rings of rows. A row is a pair of numbers, the payloads of its two fields; zeros where nothing was written."""

    def __init__(self, capacity, lanes):
        self.length = capacity // lanes
        self.lanes = lanes
        self.clear()

    def clear(self, count=0):
        self.rows = {}
        self.cursor = [0] * self.lanes
        self.filled = [0] * self.lanes
        self.count = count

    @property
    def capacity(self):
        return self.length * self.lanes

    def order(self):
        return [lane * self.length + i for lane in range(self.lanes) for i in range(self.filled[lane])]

    def append(self, lane, payload):
        row = lane * self.length + self.cursor[lane] % self.length
        self.cursor[lane] += 1
        self._put(row, payload)
        self.count += 1
        return row

    def _put(self, row, payload):
        lane, place = divmod(row, self.length)
        for i in range(self.filled[lane], place):
            self.rows[lane * self.length + i] = (0, 0)
        self.filled[lane] = max(self.filled[lane], place + 1)
        self.rows[row] = (payload, payload)

    def write_at(self, rows, payloads):
        for row, payload in zip(rows, payloads, strict=True):
            self._put(row, payload)
        self.count += len(rows)

    def row(self, index):
        """The row an int means, None if there is none."""
        order = self.order()
        if index < 0:
            return order[index] if -len(order) <= index else None
        return index if index in order else None


class Tensors:
    """Rows that are tensors."""

    def one(self, p):
        return torch.tensor([p, -p])

    def batch(self, payloads):
        return torch.stack([self.one(p) for p in payloads])

    def read_one(self, row):
        p, minus = row.tolist()
        assert p == -minus
        return p, p

    def read(self, batch):
        return [self.read_one(row) for row in batch]

    first = second = None


class Dicts:
    """Rows that are nested dictionaries."""

    def one(self, p):
        return {"a": torch.tensor([p, -p]), "b": {"c": torch.tensor(float(p))}}

    def batch(self, payloads):
        rows = [self.one(p) for p in payloads]
        return {"a": torch.stack([r["a"] for r in rows]), "b": {"c": torch.stack([r["b"]["c"] for r in rows])}}

    def read_one(self, row):
        assert type(row) is dict
        assert set(row) == {"a", "b"}
        p, minus = row["a"].tolist()
        assert p == -minus
        return p, int(row["b"]["c"])

    def read(self, batch):
        return [self.read_one({"a": a, "b": {"c": c}}) for a, c in zip(batch["a"], batch["b"]["c"], strict=True)]

    first, second = "a", ("b", "c")


class TensorDicts(Dicts):
    """Rows that are nested TensorDicts."""

    def one(self, p):
        return TensorDict(super().one(p), batch_size=[])

    def batch(self, payloads):
        return TensorDict(super().batch(payloads), batch_size=[len(payloads)])

    def read_one(self, row):
        return super().read_one({"a": row["a"], "b": {"c": row["b", "c"]}})

    def read(self, batch):
        return [self.read_one(batch[i]) for i in range(batch.batch_size[0])]


class ListsOf:
    """Rows of another kind in a list storage, where a batch is a list of them."""

    def __init__(self, kind):
        self._kind = kind
        self.one, self.read_one = kind.one, kind.read_one

    def batch(self, payloads):
        return [self.one(p) for p in payloads]

    def read(self, batch):
        return self._kind.read(batch) if not isinstance(batch, list) else [self.read_one(row) for row in batch]

    first = second = None


KINDS = {"tensor": Tensors, "dict": Dicts, "tensordict": TensorDicts}


class BufferMachine(RuleBasedStateMachine):
    """Subclasses choose the storage."""

    def make_storage(self, capacity, lanes):
        raise NotImplementedError

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        capacity=st.integers(1, 7),
        lanes=st.integers(1, 3),
        replacement=st.booleans(),
    )
    def begin(self, kind, capacity, lanes, replacement):
        lanes = 1 if self.listed else min(lanes, capacity)
        self.kind = KINDS[kind]()
        arguments = {}
        if self.listed and kind == "dict":
            arguments["collate_fn"] = list
        if self.listed and kind != "tensordict":
            self.kind = ListsOf(self.kind)
        self.model = Model(capacity // lanes * lanes, lanes)
        self.buffer_class = TensorDictReplayBuffer if kind == "tensordict" else ReplayBuffer
        if not replacement:
            arguments["sampler"] = SamplerWithoutReplacement()
        self.arguments = arguments
        self.rb = self.buffer_class(storage=self.make_storage(capacity, lanes), **arguments)
        self.written = 0
        self.ever = False

    listed = False

    def payloads(self, n):
        self.written += n
        return list(range(self.written - n + 1, self.written + 1))

    # ---- writing -----------------------------------------------------------------------------------------------------

    @rule(lane=st.integers(0, 2))
    def add(self, lane):
        lane %= self.model.lanes
        (p,) = self.payloads(1)
        row = self.rb.add(self.kind.one(p), lane=lane)
        assert type(row) is int
        assert row == self.model.append(lane, p)
        self.ever = True

    @rule(tenths=st.integers(0, 25), lane=st.integers(0, 2))
    def extend(self, tenths, lane):
        lane %= self.model.lanes
        payloads = self.payloads(max(1, tenths * self.model.length // 10))
        rows = self.rb.extend(self.kind.batch(payloads), lane=lane)
        assert rows.dtype is torch.int64
        assert rows.tolist() == [self.model.append(lane, p) for p in payloads]
        self.ever = True

    @rule(lanes=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def extend_each_row_in_its_lane(self, lanes):
        lanes = [lane % self.model.lanes for lane in lanes]
        payloads = self.payloads(len(lanes))
        rows = self.rb.extend(self.kind.batch(payloads), lane=torch.tensor(lanes))
        assert rows.tolist() == [self.model.append(lane, p) for lane, p in zip(lanes, payloads, strict=True)]
        self.ever = True

    @rule(data=st.data())
    def write_at(self, data):
        rows = data.draw(st.lists(st.integers(0, self.model.capacity - 1), min_size=1, max_size=4))
        payloads = self.payloads(len(rows))
        if self.listed:  # a list has no gaps
            length = len(self.rb)
            for row in rows:
                if row > length:
                    with pytest.raises(RuntimeError, match="gap"):
                        self.rb.writer.write_at(rows, self.kind.batch(payloads))
                    return
                length = max(length, row + 1)
        self.rb.writer.write_at(rows, self.kind.batch(payloads))
        self.model.write_at(rows, payloads)
        self.ever = True

    def none_of(self, batch):
        return {key: self.none_of(value) for key, value in batch.items()} if isinstance(batch, dict) else batch[:0]

    @precondition(lambda self: self.ever)
    @rule(wrong=st.sampled_from(["fields", "shape", "dtype", "lane", "empty"]))
    def refused_writes_change_nothing(self, wrong):
        good = self.kind.batch([7, 8])
        lane = None
        if wrong == "lane":
            lane = self.model.lanes
        elif wrong == "empty":
            assert len(self.rb.extend(self.none_of(good))) == 0
            return
        elif self.listed or not any(self.model.filled):  # an emptied store takes other rows until a batch was drawn
            return
        elif isinstance(good, torch.Tensor):
            good = good[:, :1] if wrong == "shape" else good.float() if wrong == "dtype" else {"a": good}
        elif wrong == "shape":
            good["a"] = good["a"][:, :1]
        elif wrong == "dtype":
            good["b"]["c"] = good["b"]["c"].double()
        else:
            good["d"] = good["a"]
        with pytest.raises((RuntimeError, KeyError, IndexError, TypeError)):
            self.rb.extend(good, lane=lane)

    @precondition(lambda self: self.model.filled != [0] * self.model.lanes)
    @rule(data=st.data())
    def assign_one(self, data):
        n = len(self.model.order())
        index = data.draw(st.one_of(st.sampled_from(self.model.order()), st.integers(-n, -1)))
        (p,) = self.payloads(1)
        self.rb[index] = self.kind.one(p)
        self.model.rows[self.model.row(index)] = (p, p)

    @precondition(lambda self: self.model.filled != [0] * self.model.lanes)
    @rule(data=st.data())
    def assign_many(self, data):
        order = self.model.order()
        index, rows = self.many(data, order)
        if not rows:
            return
        payloads = self.payloads(len(rows))
        self.rb[index] = self.kind.batch(payloads)
        for row, p in zip(rows, payloads, strict=True):  # of a row named twice the last one stays
            self.model.rows[row] = (p, p)

    @precondition(lambda self: not self.listed and self.kind.first and self.model.filled != [0] * self.model.lanes)
    @rule(data=st.data(), second=st.booleans())
    def set_at(self, data, second):
        index, rows = self.many(data, self.model.order())
        if not rows:
            return
        payloads = self.payloads(len(rows))
        values = torch.tensor(payloads)
        if second:
            self.rb.set_at_(self.kind.second, values.float(), index)
        else:
            self.rb.set_at_(self.kind.first, torch.stack([values, -values], 1), index)
        for row, p in zip(rows, payloads, strict=True):
            old = self.model.rows[row]
            self.model.rows[row] = (old[0], p) if second else (p, old[1])

    @rule(keep=st.booleans())
    def empty(self, keep):
        self.rb.empty(empty_write_count=not keep)
        self.model.clear(self.model.count if keep else 0)

    # ---- reading -----------------------------------------------------------------------------------------------------

    @staticmethod
    def many(data, order):
        """An index of several rows in one of its forms, and the rows it means."""
        n = len(order)
        form = data.draw(st.sampled_from(["slice", "list", "tensor", "mask", "range", "array"]))
        if form == "slice":
            bound = st.one_of(st.none(), st.integers(-n - 1, n + 1))
            index = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, 3, -1])))
            return index, order[index]
        if form == "mask":
            mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
            return torch.tensor(mask, dtype=torch.bool), [row for row, take in zip(order, mask, strict=True) if take]
        if form == "range":
            longest = next((i for i, row in enumerate(order) if row != i), n)
            stop = data.draw(st.integers(0, longest))
            return range(stop), list(range(stop))
        entries = st.one_of(st.sampled_from(order), st.integers(-n, -1)) if n else st.nothing()
        index = data.draw(st.lists(entries, min_size=min(1, n), max_size=5)) if n else []
        rows = [order[i] if i < 0 else i for i in index]
        if form == "list":
            return index, rows
        tensor = torch.tensor(index, dtype=torch.int64)
        return (tensor.numpy() if form == "array" else tensor), rows

    @precondition(lambda self: self.ever)
    @rule(index=st.integers(-9, 9))
    def read_one(self, index):
        row = self.model.row(index)
        if row is None:
            with pytest.raises(IndexError):
                self.rb[index]
        else:
            assert self.kind.read_one(self.rb[index]) == self.model.rows[row]

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def read_many(self, data):
        index, rows = self.many(data, self.model.order())
        if self.listed and not rows and self.arguments.get("collate_fn") is None:
            return  # nothing to stack
        assert self.kind.read(self.rb[index]) == [self.model.rows[row] for row in rows]

    @rule(batch_size=st.integers(1, 20))
    def sample(self, batch_size):
        order = self.model.order()
        if not order:
            with pytest.raises(NoSampleable, match="empty storage. Add data"):
                self.rb.sample(batch_size)
            assert not self.rb.can_sample(batch_size)
            return
        assert self.rb.can_sample(batch_size)
        batch, info = self.rb.sample(batch_size, return_info=True)
        rows = info["index"].tolist()
        assert set(rows) <= set(order)
        assert self.kind.read(batch) == [self.model.rows[row] for row in rows]
        if "sampler" in self.arguments:
            assert len(set(rows)) == len(rows) <= min(batch_size, len(order))
        else:
            assert len(rows) == batch_size
        if self.buffer_class is TensorDictReplayBuffer:
            assert batch["index"].tolist() == rows

    # ---- going on elsewhere --------------------------------------------------------------------------------------------

    @rule(how=st.sampled_from([copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))]))
    def go_on_with_a_copy(self, how):
        self.rb = how(self.rb)

    @invariant()
    def agree(self):
        if not hasattr(self, "rb"):
            return
        order = self.model.order()
        assert len(self.rb) == len(order)
        assert self.rb.write_count == self.model.count
        stats = self.rb.stats()
        assert stats["size"] == len(order)
        assert stats["capacity"] == self.model.capacity
        assert stats["lanes"] == self.model.lanes
        assert stats["void_rows"] == 0
        if order:
            assert self.kind.read(self.rb[:]) == [self.model.rows[row] for row in order]


class ListMachine(BufferMachine):
    listed = True

    def make_storage(self, capacity, lanes):
        return ListStorage(capacity)


class TensorMachine(BufferMachine):
    def make_storage(self, capacity, lanes):
        return LazyTensorStorage(capacity, lanes=lanes)


#: Directory stores wait for the disk when they are made; here there are thousands of them.
_RAM = Path("/dev/shm")


class MemmapMachine(BufferMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="engram-test-", dir=_RAM if _RAM.is_dir() else None))

    def make_storage(self, capacity, lanes):
        together = 64 if capacity % 2 else 0
        return LazyMemmapStorage(capacity, scratch_dir=self.folder / "store", lanes=lanes, group_small_fields=together)

    @precondition(lambda self: self.ever)
    @rule(attached=st.booleans())
    def reopen(self, attached):
        """What a new process would find; ``attached``: while the old handle still has it."""
        sampler = type(self.rb.sampler)
        if not attached:
            self.rb.close()
        rb = ReplayBuffer.open(self.folder / "store")
        assert type(rb) is self.buffer_class
        assert type(rb.sampler) is sampler
        assert rb.lanes == self.model.lanes
        self.rb = rb

    def teardown(self):
        if hasattr(self, "rb"):
            self.rb.close()
        shutil.rmtree(self.folder)


_settings = settings(
    max_examples=stress.size(40, 2_000),
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],  # no explanations: they take minutes
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestListStorage = ListMachine.TestCase
TestListStorage.settings = _settings
TestTensorStorage = TensorMachine.TestCase
TestTensorStorage.settings = _settings


TestMemmapStorage = MemmapMachine.TestCase
TestMemmapStorage.settings = settings(_settings, max_examples=stress.size(20, 1_000))
stressed(TestListStorage)
stressed(TestTensorStorage)
stressed(TestMemmapStorage)
