"""Triton kernels for rows that lie on an accelerator: reads with draws, appends, and updates of priorities.

All that they need of the rows is one tensor of int64, ``state``: words in the order of the ``R_`` constants, then at ``TABLE`` one
entry per chunk of a row: address and stride of the column, where the chunk is in a row, what the fields before it take per row, the
row's bytes, the chunk's bytes, bytes per load, and the number of the field among those that have bytes. All that they need of a tree is
another one: words in the order of the ``T_`` constants, then at ``LEVELS`` per level the address of its sums, of its smallest leaves,
and its size; the leaves come first.

``followed`` says where next observations are: words in the order of the ``F_`` constants, then at ``CHECKS`` three words per field that
ends an episode: address, bytes of a row, and whether they are compared with those of the following row, or else with zeros; then at the
word ``F_TABLE`` entries as above, of the observations, with the address of the final ones last.

A phase that needs what the phase before has written comes after a barrier of a single program.
"""

import triton
import triton.language as tl

from engram.store.device.kernels import _at, _bits, _copy_wide, _load

R_CAPACITY, R_LENGTH, R_NUMBERS, R_CURSOR, R_TALLY, R_LAST, R_CHUNKS = map(tl.constexpr, range(7))
#: Batches that graphs have drawn; programs that have ended; entries of updates and edits so far; address of the counts of edits.
R_DRAWN, R_FINISHED, R_UPDATED, R_EDITED = map(tl.constexpr, range(7, 11))
TABLE, ENTRY = map(tl.constexpr, (16, 8))
#: Address of alpha, beta and the largest priority; bits of eps, and of the largest leaf that can be summed.
T_LEVELS, T_POWERS, T_EPS, T_MOST = map(tl.constexpr, range(4))
LEVELS = tl.constexpr(4)
#: How often a captured draw looks for a row that holds something, before it takes one of another place of the batch.
TRIES = tl.constexpr(16)
#: Addresses of the marks and of the tags; rows of final observations, and of a step; fields that end an episode; chunks, and where.
F_MARKS, F_TAGS, F_FINALS, F_WIDTH, F_CHECKS, F_CHUNKS, F_TABLE = map(tl.constexpr, range(7))
CHECKS = tl.constexpr(8)
_FANOUT, _SHIFT = map(tl.constexpr, (128, 7))


@triton.jit
def _double(state, word):
    return _at(state, word).to(tl.float64, bitcast=True)


@triton.jit
def _power(x, exponent):
    """``x ** exponent``, exact where the exponent is 0 or 1; of x below zero something."""
    raised = tl.where(x > 0, tl.exp(exponent * tl.log(tl.where(x > 0, x, 1.0))), 0.0)
    return tl.where(exponent == 1.0, x, tl.where(exponent == 0.0, 1.0, raised))


# ---- reads -----------------------------------------------------------------------------------------------------------


@triton.jit
def _fall(u, tree, BLOCK: tl.constexpr):
    """The leaves on which ``u * sum`` falls, and what they are: ``SumTree.draw``."""
    levels, child = _at(tree, T_LEVELS), tl.arange(0, 128)[None, :]
    x = u * _load(_at(tree, LEVELS + (levels - 1) * 3), tl.float64)
    node, mass = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.float64)
    for down in range(1, levels):
        block = _load(_at(tree, LEVELS + (levels - 1 - down) * 3) + (node[:, None] * _FANOUT + child) * 8, tl.float64)
        ends = tl.cumsum(block, 1)
        # The first one whose end lies above x, else the last one with mass.
        place = tl.min(tl.where(block > 0, tl.where(ends > x[:, None], child, 255 - child), 256), 1)
        place = tl.maximum(tl.minimum(place, 255 - place), 0)
        chosen = child == place[:, None]
        mass = tl.sum(tl.where(chosen, block, 0.0), 1)
        x = x - (tl.sum(tl.where(chosen, ends, 0.0), 1) - mass)
        node = node * _FANOUT + place.to(tl.int64)
    return node, mass


@triton.jit
def _candidate(key, j, size, state, tree, BLOCK: tl.constexpr, TREE: tl.constexpr):
    """Rows by numbers of a key, the numbers of their writes, and their leaves; of rows of leaf zero, row 0."""
    bits, leaf = _bits(key, j, j * 0), tl.zeros([BLOCK], tl.float64)
    if TREE:
        row, leaf = _fall((bits >> 11).to(tl.float64) * 1.1102230246251565e-16, tree, BLOCK)
        row = tl.where(leaf > 0, row, 0)
    else:
        row = tl.umulhi(bits, bits * 0 + size.to(tl.uint64)).to(tl.int64)
    return row, _load(_at(state, R_NUMBERS) + row * 8), leaf


@triton.jit
def _ahead(row, number, state, followed):
    """``Followed.find``."""
    length, marks = _at(state, R_LENGTH), _at(followed, F_MARKS) + row * 16
    first, place = row // length * length, _load(marks)
    after = first + (row - first + _at(followed, F_WIDTH)) % length
    inside = (place >= 0) & (place < _at(followed, F_FINALS))
    kept = inside & (_load(_at(followed, F_TAGS) + tl.where(inside, place, 0) * 8) == _load(marks + 8))
    goes_on = _load(_at(state, R_NUMBERS) + after * 8) > number
    for check in range(_at(followed, F_CHECKS)):
        entry = followed + CHECKS + check * 3
        nbytes, compared = _at(entry, 1), _at(entry, 2)
        for byte in range(nbytes):
            column = _at(entry, 0) + byte
            there = tl.where(compared != 0, _load(column + after * nbytes, tl.int8), 0)
            goes_on = goes_on & (_load(column + row * nbytes, tl.int8) == there)
    return (kept & (place >= 0)) | (goes_on & (place < 0)), tl.where(kept, place, -1), after


@triton.jit
def _usable(row, number, leaf, state, followed, TREE: tl.constexpr, FOLLOWED: tl.constexpr):
    """Whether rows may be drawn; and where their next observations are, as ``Followed.find`` has it."""
    good, final, after = number > 0, row, row
    if TREE:
        good = good & (leaf > 0)
    if FOLLOWED:
        has_next, final, after = _ahead(row, number, state, followed)
        good = good & has_next
    return good, final, after


@triton.jit
def _copy_to(block, entry, source, i, mine, padded, CHUNK: tl.constexpr):
    """A chunk of each row to its place in a block."""
    to = block + padded * (24 + _at(entry, 3)) + i * _at(entry, 4) + _at(entry, 2)
    _copy_wide(source + _at(entry, 2), to, _at(entry, 5), _at(entry, 6), mine, False, False, CHUNK)


@triton.jit
def _copy_next(followed, final, after, out, i, mine, padded, CHUNK: tl.constexpr):
    """The next observations of rows to their places in a block."""
    for chunk in range(tl.program_id(1).to(tl.int64), _at(followed, F_CHUNKS), tl.num_programs(1)):
        entry = followed + _at(followed, F_TABLE) + chunk * ENTRY
        source = tl.where(final >= 0, _at(entry, 7) + final * _at(entry, 1), _at(entry, 0) + after * _at(entry, 1))
        _copy_to(out, entry, source, i, mine, padded, CHUNK)


@triton.jit(do_not_specialize=["key", "size", "out", "n"])
def read(
    state, tree, followed, key: tl.int64, size: tl.int64, out: tl.int64, n: tl.int64,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr, WEIGHED: tl.constexpr, CAPTURED: tl.constexpr,
    FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Chooses ``n`` rows, and copies them into a block: rows, numbers, weights or leaves, the fields, then next observations.

    Programs of the second dimension share the chunks of a place. ``size``: live rows, all below it. CAPTURED: of the ring as it is then,
    by random numbers of the key and of how many batches were drawn so. FOLLOWED: rows that have a next observation.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine, i = place < n, tl.maximum(tl.minimum(place, n - 1), 0)
    mixed, padded = key.to(tl.uint64), (n + 15) // 16 * 16
    if CAPTURED:
        mixed = _bits(mixed, _at(state, R_DRAWN), _at(state, R_DRAWN) * 0)
        size = tl.minimum(_at(_at(state, R_CURSOR).to(tl.pointer_type(tl.int64)), 2), _at(state, R_CAPACITY))
    row, number, leaf = _candidate(mixed, i, size, state, tree, BLOCK, TREE)
    good, final, after = _usable(row, number, leaf, state, followed, TREE, FOLLOWED)
    if FOLLOWED or (CAPTURED and not TREE):
        tries, most = n * 0 + 1, n * TRIES
        if not TREE:
            most = tl.where(size > 0, most, 0)
        while (tries < most) & (tl.min(good.to(tl.int32), 0) == 0):
            j = (i + tries // TRIES) % n + tries % TRIES * n
            other, number_there, leaf_there = _candidate(mixed, j, size, state, tree, BLOCK, TREE)
            row, number = tl.where(good, row, other), tl.where(good, number, number_there)
            leaf = tl.where(good, leaf, leaf_there)
            good, final, after = _usable(row, number, leaf, state, followed, TREE, FOLLOWED)
            tries += 1
        row, number = tl.where(good, row, 0), tl.where(good, number, 0)
    if tl.program_id(1) == 0:
        _store_where(out + i * 8, row, mine)
        _store_where(out + (padded + i) * 8, number, mine)
        if TREE:
            _say(tree, leaf, out + padded * 16, i, mine, WEIGHED)
        if (tl.program_id(0) == 0) & (n > 0) & (tl.max(good.to(tl.int32), 0) == 0):
            tl.atomic_add(_at(state, R_TALLY).to(tl.pointer_type(tl.int64)) + 3, 1, sem="relaxed")
    for chunk in range(tl.program_id(1).to(tl.int64), _at(state, R_CHUNKS), tl.num_programs(1)):
        entry = state + TABLE + chunk * ENTRY
        _copy_to(out, entry, _at(entry, 0) + row * _at(entry, 1), i, mine, padded, CHUNK)
    if FOLLOWED:
        _copy_next(followed, final, after, out, i, mine, padded, CHUNK)
    if CAPTURED:  # noqa: SIM102 - Triton evaluates both sides
        if _is_last(state):  # all have read which batch this is
            tl.store(state + R_DRAWN, _at(state, R_DRAWN) + 1)


@triton.jit
def _say(tree, leaf, out, i, mine, WEIGHED: tl.constexpr):
    """Writes the weights of rows that were drawn, or their leaves."""
    if WEIGHED:
        least = _load(_at(tree, LEVELS + (_at(tree, T_LEVELS) - 1) * 3 + 1), tl.float64)
        beta = _load(_at(tree, T_POWERS) + 8, tl.float64)
        weight = tl.where(leaf > 0, _power(least / tl.where(leaf > 0, leaf, 1.0), beta), 0.0)
        tl.store((out + i * 4).to(tl.pointer_type(tl.float32)), weight.to(tl.float32), mask=mine)
    else:
        tl.store((out + i * 8).to(tl.pointer_type(tl.float64)), leaf, mask=mine)


@triton.jit
def _is_last(state):
    """Whether all other programs have come here, too."""
    tl.debug_barrier()  # and all threads of this one
    last = tl.atomic_add(state + R_FINISHED, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1
    if last:
        tl.store(state + R_FINISHED, 0)
    return last


@triton.jit
def _store_where(address, value, mask):
    tl.store(address.to(tl.pointer_type(tl.int64)), value, mask=mask)


# ---- appends ---------------------------------------------------------------------------------------------------------


@triton.jit
def _begin(state, position, number, CAPTURED: tl.constexpr):
    """Position and number of the first row of an append: as they were given, or as the cursor says."""
    if CAPTURED:
        cursor = _at(state, R_CURSOR).to(tl.pointer_type(tl.int64))
        position, number = _at(cursor, 0), _at(cursor, 1)
    return position, number


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows", "out"])
def claim(state, rows, out, n: tl.int64, BLOCK: tl.constexpr):
    """One program: which live rows are edited, and that it begins. ``out``: the same, the spare row in place of those that are not live,
    which are counted. Of a row that is named twice the last entry is noted.
    """
    capacity, before = _at(state, R_CAPACITY), _at(state, R_UPDATED)
    size = tl.minimum(_at(_at(state, R_CURSOR).to(tl.pointer_type(tl.int64)), 2), capacity)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        row = tl.load(rows + i, mask=i < n, other=-1)
        row = tl.where(row < 0, row + size, row)
        inside = (row >= 0) & (row < capacity)
        row = tl.where(inside, row, 0)
        live = (i < n) & inside & (_load(_at(state, R_NUMBERS) + row * 8) > 0)
        _count(_at(state, R_TALLY).to(tl.pointer_type(tl.int64)) + 2, (i < n) & (live == 0))
        tl.atomic_max(
            (_at(state, R_LAST) + row * 8).to(tl.pointer_type(tl.int64)), before + i + 1, mask=live, sem="relaxed"
        )
        tl.atomic_add((_at(state, R_EDITED) + row * 4).to(tl.pointer_type(tl.int32)), 1, mask=live, sem="relaxed")
        tl.store(out + i, tl.where(live, row, capacity), mask=i < n)


@triton.jit
def _end_edits(state, rows, n, BLOCK: tl.constexpr):
    """The edits that claim() has begun are over."""
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        row = tl.load(rows + i, mask=i < n, other=0)
        edited = (_at(state, R_EDITED) + row * 4).to(tl.pointer_type(tl.int32))
        tl.atomic_add(edited, 1, mask=(i < n) & (row < _at(state, R_CAPACITY)), sem="relaxed")
    tl.store(state + R_UPDATED, _at(state, R_UPDATED) + n)


@triton.jit(
    do_not_specialize=["base", "position", "n", "begin", "end", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"],
    do_not_specialize_on_alignment=["rows"],
)
def place(
    state, rows, base: tl.int64, position: tl.int64, n: tl.int64, begin: tl.int64, end: tl.int64,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64, s7: tl.int64,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, CAPTURED: tl.constexpr, EDITS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Copies chunks ``begin`` to ``end``, of up to eight fields whose values begin at ``s0`` to ``s7``, to the end of the ring at row
    ``base``. Of more steps than the ring has rows, the last ones. EDITS: to ``rows`` that claim() has named, each from its last entry;
    LAST: they are over then.
    """
    length = _at(state, R_LENGTH)
    step = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if EDITS:
        row = tl.load(rows + step, mask=step < n, other=0)
        inside = row < _at(state, R_CAPACITY)
        row = tl.where(inside, row, 0)
        kept = (step < n) & inside & (_load(_at(state, R_LAST) + row * 8) == _at(state, R_UPDATED) + step + 1)
    else:
        position, _ = _begin(state, position, position, CAPTURED)
        step += tl.maximum(n - length, 0)
        row, kept = base + (position + step) % length, step < n
    first = _at(state + TABLE + begin * ENTRY, 7)
    for chunk in range(begin + tl.program_id(1), end, tl.num_programs(1)):
        entry = state + TABLE + chunk * ENTRY
        which = _at(entry, 7) - first
        source = tl.where(which == 0, s0, tl.where(which == 1, s1, tl.where(which == 2, s2, s3)))
        other = tl.where(which == 4, s4, tl.where(which == 5, s5, tl.where(which == 6, s6, s7)))
        source = tl.where(which < 4, source, other)
        to = _at(entry, 0) + row * _at(entry, 1) + _at(entry, 2)
        source += step * _at(entry, 4) + _at(entry, 2)
        _copy_wide(source, to, _at(entry, 5), _at(entry, 6), kept, False, False, CHUNK)
    if EDITS and LAST:  # noqa: SIM102 - as above
        if _is_last(state):
            _end_edits(state, rows, n, 1024)


@triton.jit
def _sum_up(tree, level, node, mine):
    """Sums and smallest leaves of nodes, from the level below. Several programs may write the same."""
    child, below, above = tl.arange(0, 128)[None, :], LEVELS + (level - 1) * 3, LEVELS + level * 3
    at = (node[:, None] * _FANOUT + child) * 8
    sums = _load(_at(tree, below) + at, tl.float64)
    if level == 1:
        lows = tl.where(sums > 0, sums, float("inf"))
    else:
        lows = _load(_at(tree, below + 1) + at, tl.float64)
    to = _at(tree, above) + node * 8
    tl.store(to.to(tl.pointer_type(tl.float64)), tl.sum(sums, 1), mask=mine)
    to = _at(tree, above + 1) + node * 8
    tl.store(to.to(tl.pointer_type(tl.float64)), tl.min(lows, 1), mask=mine)


@triton.jit(do_not_specialize=["base", "position", "number", "n", "leaf", "index"])
def record(
    state, tree, base: tl.int64, position: tl.int64, number: tl.int64, n: tl.int64, leaf: tl.int64, index: tl.int64,
    BLOCK: tl.constexpr, NODES: tl.constexpr, TREE: tl.constexpr, CAPTURED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One program, after place(): the appended rows have numbers and the priority of new rows, and LAST moves the cursor on.

    ``leaf``: address of that priority's leaf; 0: it follows from the largest priority so far. ``index``: address of int64 ``[2, n]``, for
    the rows and their numbers, or 0.
    """
    position, number = _begin(state, position, number, CAPTURED)
    length = _at(state, R_LENGTH)
    skipped = tl.maximum(n - length, 0)
    value = tl.zeros([1], tl.float64)
    if TREE:
        if leaf != 0:
            value += _load(leaf, tl.float64)
        else:
            highest = value + _load(_at(tree, T_POWERS) + 16, tl.float64)
            value = _power(
                tl.where(highest > 0, highest, 1.0) + _double(tree, T_EPS), _load(_at(tree, T_POWERS), tl.float64)
            )
    for start in range(0, n, BLOCK):
        step = start + tl.arange(0, BLOCK).to(tl.int64)
        row, kept = base + (position + step) % length, (step >= skipped) & (step < n)
        _store_where(_at(state, R_NUMBERS) + row * 8, number + step, kept)
        if TREE:
            leaves = (_at(tree, LEVELS) + row * 8).to(tl.pointer_type(tl.float64))
            tl.store(leaves, tl.zeros([BLOCK], tl.float64) + value, mask=kept)
        if index != 0:
            _store_where(index + step * 8, row, step < n)
            _store_where(index + (n + step) * 8, number + step, step < n)
    if TREE:
        begin = (position + skipped) % length
        count = n - skipped
        for level in range(1, _at(tree, T_LEVELS)):
            tl.debug_barrier()
            # Every block of the rows has one of these steps: those at which a block begins, the first, the last, and the one at row base.
            apart = tl.full([], 1, tl.int64) << (_SHIFT * level)
            steps = count // apart + 3
            for start in range(0, steps, NODES):
                j = start + tl.arange(0, NODES).to(tl.int64)
                step = tl.where(j == steps - 1, length - begin, j * apart - ((base + begin) & (apart - 1)))
                step = tl.maximum(tl.minimum(step, count - 1), 0)
                _sum_up(tree, level, (base + (begin + step) % length) >> (_SHIFT * level), j < steps)
    if LAST:
        tl.debug_barrier()
        word = tl.arange(0, 4).to(tl.int64)
        cursor = _at(state, R_CURSOR) + word * 8
        known = tl.load(cursor.to(tl.pointer_type(tl.int64)), mask=word < 3, other=0)
        _store_where(cursor, known + n, word < 3)


# ---- updates of priorities -------------------------------------------------------------------------------------------


@triton.jit
def _claim(state, tree, rows, priorities, expected, n, BLOCK: tl.constexpr, EXPECTED: tl.constexpr):
    """Counts entries that are left out, and notes for each row the last entry that names it."""
    capacity, before, powers = _at(state, R_CAPACITY), _at(state, R_UPDATED), _at(tree, T_POWERS)
    tally = _at(state, R_TALLY).to(tl.pointer_type(tl.int64))
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        mine = i < n
        row = tl.load(rows + i, mask=mine, other=-1)
        priority = tl.load(priorities + i, mask=mine, other=0).to(tl.float64)
        good = (priority >= 0) & (_leaf(tree, priority) < _double(tree, T_MOST))
        inside = (row >= 0) & (row < capacity)
        number = _load(_at(state, R_NUMBERS) + tl.where(inside, row, 0) * 8)
        used = mine & good & inside & (number > 0)
        if EXPECTED:
            used = used & (number == tl.load(expected + i, mask=mine, other=0))
        _count(tally, mine & good & inside & (used == 0))
        _count(tally + 1, mine & (good == 0))
        _count(tally + 2, mine & (inside == 0) & (row != -1))
        highest = tl.max(tl.where(used, priority, 0.0), 0)  # of numbers above zero the bits have the same order
        tl.atomic_max((powers + 16).to(tl.pointer_type(tl.int64)), highest.to(tl.int64, bitcast=True), sem="relaxed")
        last = (_at(state, R_LAST) + tl.where(inside, row, 0) * 8).to(tl.pointer_type(tl.int64))
        tl.atomic_max(last, before + i + 1, mask=used, sem="relaxed")


@triton.jit
def _leaf(tree, priority):
    return _power(priority + _double(tree, T_EPS), _load(_at(tree, T_POWERS), tl.float64))


@triton.jit
def _count(tally, mask):
    found = tl.sum(mask.to(tl.int64), 0)
    if found > 0:
        tl.atomic_add(tally, found, sem="relaxed")


@triton.jit
def _set_leaves(state, tree, rows, priorities, n, BLOCK: tl.constexpr):
    """The leaves of rows, by the entries that _claim() has noted."""
    capacity, before = _at(state, R_CAPACITY), _at(state, R_UPDATED)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        row = tl.load(rows + i, mask=i < n, other=-1)
        inside = (row >= 0) & (row < capacity)
        row = tl.where(inside, row, 0)
        leaf = _leaf(tree, tl.load(priorities + i, mask=i < n, other=0).to(tl.float64))
        chosen = inside & (_load(_at(state, R_LAST) + row * 8) == before + i + 1)
        to = (_at(tree, LEVELS) + row * 8).to(tl.pointer_type(tl.float64))
        tl.store(to, tl.where(leaf > 0, leaf, -0.0), mask=chosen)


@triton.jit
def _sum_up_entries(tree, level, rows, n, capacity, NODES: tl.constexpr):
    """The nodes of a level above entries; all of the level, if these are fewer."""
    size = _at(tree, LEVELS + level * 3 + 2)
    for start in range(0, tl.minimum(n, size), NODES):
        i = start + tl.arange(0, NODES).to(tl.int64)
        if size <= n:
            node, mine = i, i < size
        else:
            row = tl.load(rows + i, mask=i < n, other=-1)
            mine = (row >= 0) & (row < capacity)
            node = row >> (_SHIFT * level)
        _sum_up(tree, level, tl.where(mine, node, 0), mine)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows", "priorities", "expected"])
def update(
    state, tree, rows, priorities, expected, n: tl.int64, BLOCK: tl.constexpr, NODES: tl.constexpr, EXPECTED: tl.constexpr
):  # fmt: skip
    """One program: ``RowOperations.update``."""
    _claim(state, tree, rows, priorities, expected, n, BLOCK, EXPECTED)
    tl.debug_barrier()
    _set_leaves(state, tree, rows, priorities, n, BLOCK)
    for level in range(1, _at(tree, T_LEVELS)):
        tl.debug_barrier()
        _sum_up_entries(tree, level, rows, n, _at(state, R_CAPACITY), NODES)
    tl.debug_barrier()
    tl.store(state + R_UPDATED, _at(state, R_UPDATED) + n)
