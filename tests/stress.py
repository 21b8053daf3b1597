"""How long stress tests run: ``ENGRAM_STRESS=small`` (an ordinary run of the tests), ``night`` or ``release``.

A test marked ``stress`` takes its counts from :func:`size`; ``pytest -m stress`` runs those alone. Of the cases of each test an
ordinary run takes as many as its time allows, spread evenly: see :func:`cases`; or ``n`` where it is marked ``stress(sample=n)``. All
cases run at night, by ``make test-all``. Draws follow from ``ENGRAM_STRESS_SEED``, 0 if it is not set, so that nights can differ and a
failure can be run again.
"""

import functools
import json
import os
import random
import re
import sys
from pathlib import Path

SIZES = ("small", "night", "release")
SIZE = os.environ.get("ENGRAM_STRESS") or "small"
if SIZE not in SIZES:
    raise ValueError(f"ENGRAM_STRESS: expected one of {SIZES}, got {SIZE!r}.")
#: Of each test in an ordinary run, at most so many cases that take so long; of one whose cases take longer, one; or none.
CASES, SECONDS, LONGEST_S = 2, 0.3, 0.7
#: Of tests of death, of damage and of random programs an ordinary run takes one case, unless that takes longer.
_TELLING, LONGEST_TELLING_S = re.compile("kill|crash|death|dies|damage|power_is|torn|interleaving|runTest"), 3.0
#: Tests whose cases are pages, names and files: none stands for another, so that an ordinary run takes all.
_WHOLE = ("tests/structure/", "tests/test_api.py", "tests/test_docs.py", "tests/test_golden.py", "tests/test_site.py")
#: What a case of a test took, by ``make test-all ARGS=--record-seconds`` on an idle machine. Shorter ones are left out.
_TOOK = Path(__file__).with_name("seconds.json")
SEED = int(os.environ.get("ENGRAM_STRESS_SEED") or 0)
#: Above pytest's own limit of five minutes.
LIMIT_S = {"small": 300, "night": 6 * 3600, "release": 24 * 3600}[SIZE]
#: Directory stores wait for a disk when they are made; tests that make thousands of them do that in RAM.
RAM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


def size(small, night, release=None):
    """What a test uses in this run; ``release`` is ``night`` where it is not given."""
    return {"small": small, "night": night, "release": night if release is None else release}[SIZE]


def cases(test):
    """How many cases of a test, named as pytest does, an ordinary run takes."""
    if test.startswith(_WHOLE):
        return sys.maxsize
    if test not in _took():
        return CASES
    took, longest = _took()[test], LONGEST_TELLING_S if _TELLING.search(test) else LONGEST_S
    return 0 if took > longest else min(CASES, max(int(SECONDS / took), 1))


@functools.cache
def _took():
    return json.loads(_TOOK.read_text())


def record(took):
    """Write down what a case of each test took; of tests that did not run it stays."""
    took = {**_took(), **{test: round(seconds, 1) for test, seconds in took.items()}}
    kept = {test: seconds for test, seconds in sorted(took.items()) if seconds * CASES > SECONDS}
    _TOOK.write_text(json.dumps(kept, indent=0) + "\n")


def others(cases, n):
    """The cases that are not among ``n`` spread evenly over all."""
    n = min(n, len(cases))
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
