"""How long stress tests run: ``ENGRAM_STRESS=small`` (an ordinary run of the tests), ``night`` or ``release``.

A test marked ``stress`` takes its counts from :func:`size`; ``pytest -m stress`` runs those alone. Of the cases of each test an
ordinary run takes :data:`CASES`, spread evenly, or ``n`` where it is marked ``stress(sample=n)``: 0 leaves the test to ``make
test-all``, which takes all cases. Draws follow from ``ENGRAM_STRESS_SEED``, 0 if it is not set, so that nights can differ and a failure
can be run again.
"""

import os
import random
from pathlib import Path

SIZES = ("small", "night", "release")
SIZE = os.environ.get("ENGRAM_STRESS") or "small"
if SIZE not in SIZES:
    raise ValueError(f"ENGRAM_STRESS: expected one of {SIZES}, got {SIZE!r}.")
#: Of each test in an ordinary run.
CASES = 3
SEED = int(os.environ.get("ENGRAM_STRESS_SEED") or 0)
#: Above pytest's own limit of five minutes.
LIMIT_S = {"small": 300, "night": 6 * 3600, "release": 24 * 3600}[SIZE]
#: Directory stores wait for a disk when they are made; tests that make thousands of them do that in RAM.
RAM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


def size(small, night, release=None):
    """What a test uses in this run; ``release`` is ``night`` where it is not given."""
    return {"small": small, "night": night, "release": night if release is None else release}[SIZE]


def others(cases, n):
    """The cases that are not among ``n`` spread evenly over all."""
    sample = {i * (len(cases) - 1) // max(n - 1, 1) for i in range(n)}
    return [case for i, case in enumerate(cases) if i not in sample]


def chance(*what):
    """Random numbers of a test, the same in every run of one seed."""
    return random.Random(repr((SEED, *what)))


def check_priorities(index, live):
    """Of an index of priorities that is at rest: all that is above zero belongs to live rows, and every sum is what its
    leaves say, bit for bit: computing them anew changes no byte.
    """
    import torch  # not where tests are only handed out

    leaves = index.leaves(index.core.rows)
    assert set((leaves > 0).nonzero().flatten().tolist()) <= set(live)
    before = index.block.tensor[4096:].clone()
    index.put_in_order()
    assert torch.equal(before, index.block.tensor[4096:]), "sums of priorities that are not those of the leaves"
    return leaves
