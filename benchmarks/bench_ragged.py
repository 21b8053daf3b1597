"""Claim: rows of any length cost what their bytes cost, in RAM and in a directory.

Measured: 2,048 rows of 200 to 2,000 tokens, int32 and float32, 18 MB, in rings that were written once. ``extend`` of values and offsets
beside a copy of the same bytes and TorchRL's ``LazyStackStorage``; ``sample(32)`` packed, jagged and padded, and as many rows as fit into
as many tokens, beside ``torch.cat`` of the same rows and TorchRL's samples; one row of 16 kB with a key by ``add``, and as one that grows.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import rivals
from benchmarks.claims import Row, timed
from benchmarks.timing import Effort, Side, alternate

ROWS, BATCH, RING_BYTES, CAPACITY = 2_048, 32, 60e6, 10_000
WRITES, READS, ONE = Effort(calls=2, blocks=15), Effort(calls=30, blocks=30), Effort(calls=200, blocks=20)


def run(libraries: rivals.Libraries, share: float) -> Iterator[Row]:
    """Batches in and out, and single rows."""
    engram, torchrl = libraries["engram"].module, libraries["TorchRL"].module
    if engram is None:
        return
    torch.set_num_threads(1)
    answers = _Answers()
    with ExitStack() as stack:

        def made(layout: str, *, folder: bool) -> Any:
            fields = {
                "tokens": engram.Ragged(torch.int32, max_length=4_096),
                "log_prob": engram.Ragged(torch.float32, like="tokens"),
            }
            where = {"ragged": fields, "ragged_bytes": RING_BYTES, "layout": layout, "open_rows": 8}
            storage = engram.LazyTensorStorage(CAPACITY, **where)
            if folder:
                directory = stack.enter_context(tempfile.TemporaryDirectory())
                storage = engram.LazyMemmapStorage(CAPACITY, scratch_dir=directory + "/store", **where)
            buffer = stack.enter_context(engram.ReplayBuffer(storage=storage, batch_size=BATCH))
            for _ in range(5):
                buffer.extend(answers.rows)
            return buffer

        ram, directory = made("packed", folder=False), made("packed", folder=True)
        sides = [
            Side("copy", answers.copy),
            Side("directory", lambda: directory.extend(answers.rows)),
            Side("engram", lambda: ram.extend(answers.rows)),
        ]
        others = [Side(kind, lambda kind=kind: ram.sample(layout=kind)) for kind in ("jagged", "padded")]
        tokens = Side("max_tokens", lambda: ram.sample(max_tokens=BATCH * 1_100))
        reads = [Side("torch.cat", answers.gather), *others, tokens, Side("engram", ram.sample)]
        if torchrl is not None:
            theirs = torchrl.ReplayBuffer(storage=torchrl.LazyStackStorage(CAPACITY), batch_size=BATCH)
            single = [TensorDict({"tokens": t, "log_prob": p}) for t, p in answers.single]
            theirs.extend(single)
            sides.insert(1, Side("TorchRL", lambda: theirs.extend(single)))
            reads.insert(1, Side("TorchRL", lambda: _packed(theirs.sample())))
        for key, what, found, effort in (
            ("ragged/extend", "extend of values + offsets, 18 MB", sides, WRITES),
            ("ragged/sample", "sample(32), packed", reads, READS),
            ("ragged/one", "one row of 16 kB in a directory, by add and as one that grows", _one(made, answers), ONE),
        ):
            timing = alternate(found, effort.scaled(share))
            yield timed(key, what, timing, ours="engram", share=[side.name for side in found if side.name != "engram"])


class _Answers:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(200, 2_001, (ROWS,), generator=generator)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        total = int(self.offsets[-1])
        self.tokens = torch.randint(50_000, (total,), dtype=torch.int32, generator=generator)
        self.log_prob = torch.rand(total, generator=generator)
        self.rows = {"tokens": (self.tokens, self.offsets), "log_prob": (self.log_prob, self.offsets)}
        self.single = list(zip(self.tokens.split(lengths.tolist()), self.log_prob.split(lengths.tolist()), strict=True))
        self._copies = torch.empty_like(self.tokens), torch.empty_like(self.log_prob)
        self._generator = generator

    def copy(self) -> None:
        for copy, values in zip(self._copies, (self.tokens, self.log_prob), strict=True):
            copy.copy_(values)

    def gather(self) -> list[torch.Tensor]:
        rows = [self.single[i] for i in torch.randint(ROWS, (BATCH,), generator=self._generator).tolist()]
        return [torch.cat(values) for values in zip(*rows, strict=True)]


def _packed(batch: Any) -> list[torch.Tensor]:
    """A lazy stack as attention kernels take it."""
    return [torch.cat([row[key] for row in batch.tensordicts]) for key in ("tokens", "log_prob")]


def _one(made: Callable[..., Any], answers: _Answers) -> list[Side]:
    buffer, row = made("packed", folder=True), {"tokens": answers.tokens[:2_048], "log_prob": answers.log_prob[:2_048]}

    def grown() -> None:
        growing = buffer.open_row()
        growing.append(row)
        growing.seal()

    return [Side("grown", grown), Side("engram", lambda: buffer.add(row))]
