"""Triton kernels with which an accelerator reads a store in host memory. Importing this module imports Triton.

Rules that the tests check in what is compiled:

- Every load is volatile or an acquire: a cache may hold a line of an earlier batch.
- A ticket is read by :func:`_acquire`, which becomes one ``ld.acquire.sys``. It does so for a scalar only: a device runs one program a
  row (``BLOCK = 1``), and blocks of rows are for the interpreter.
- A real atomic touches the device's own memory only: over PCIe it would not be atomic with the CPU.

All that a chain keeps on the device is one tensor of int64, ``state``: a header in the order of the ``H_`` constants, at ``H_TREE`` the
addresses of the tree's levels and their sizes, the leaves first; counters in the order of the ``C_`` constants; at ``PLACES``, ``n``
words each, row, ticket word, attempt, number of the write, bits of the weight of each place, and whether its row is resident; then the
table of chunks and the ends of the lanes.

``RESIDENT``: rows stay on the device once they were read whole, and ``resident`` has the ticket word of each. draw() compares that with
the ticket in the store; gather() reads from there where they are equal; repair() reads the store, and keeps rows that are whole. A row is
replaced by a later one only, and by one program at a time.
"""

import triton
import triton.language as tl

#: Whether they run in Triton's interpreter.
INTERPRETED = triton.knobs.runtime.interpret
H_TICKETS, H_WRITES, H_LANES_AT, H_CAPACITY, H_LANES, H_LENGTH, H_LEVELS, H_LEAST, H_BETA = map(tl.constexpr, range(9))
H_N, H_CHUNKS, H_TABLE, H_ENDS, H_COMMANDS = map(tl.constexpr, range(9, 14))
H_ROWS_AT, H_TICKETS_AT, H_VALID_AT, H_WEIGHTS_AT = map(tl.constexpr, range(14, 18))
H_TREE = tl.constexpr(18)
C_BATCHES, C_FINISHED, C_REDRAWS, C_REPEATED, C_MISSING = map(tl.constexpr, range(64, 69))
C_SENT, C_ACCEPTED, C_DROPPED = map(tl.constexpr, range(69, 72))
#: Of a chain, which sends nothing: places whose row was resident.
C_RESIDENT = C_SENT
PLACES = tl.constexpr(72)
UNIFORM, PRIORITIZED, PERMUTED = map(tl.constexpr, range(3))
#: How often a place is drawn, and how often again where its row moved.
ATTEMPTS = tl.constexpr(32)
#: The ticket word of a resident row that is being replaced; and the bits of a word that later writes and edits raise.
REPLACED, NUMBER = map(tl.constexpr, (1, (1 << 63) - 4))
#: Words of a ring's header, and before the entries of each of its slots.
RING_HEADER, SLOT_HEADER = map(tl.constexpr, (8, 4))
_GAMMA, _ATTEMPT = map(tl.constexpr, (0x9E3779B97F4A7C15, 0xD1342543DE82EF95))
_MIX_1, _MIX_2 = map(tl.constexpr, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _bits(key, i, attempt):
    """64 random bits as ``native/core/random.h`` makes them, of a key of uint64."""
    return _mix(_mix(_mix(key + _GAMMA) + attempt.to(tl.uint64) * _ATTEMPT) + (i.to(tl.uint64) + 1) * _GAMMA)


@triton.jit
def _at(state, word):
    return tl.load(state + word, volatile=True)


@triton.jit
def _load(address, dtype: tl.constexpr = tl.int64):
    return tl.load(address.to(tl.pointer_type(dtype)), volatile=True)


@triton.jit
def _store(address, value, dtype: tl.constexpr = tl.int64):
    tl.store(address.to(tl.pointer_type(dtype)), value)


@triton.jit
def _acquire(state, row, BLOCK: tl.constexpr):
    """The ticket words of rows, int64 [BLOCK]: no later load comes before."""
    address = _at(state, H_TICKETS) + row * 8
    if BLOCK == 1:
        pointer = tl.sum(address, 0).to(tl.pointer_type(tl.int64))
        return tl.zeros([1], tl.int64) + tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    else:
        pointers = address.to(tl.pointer_type(tl.int64))
        return tl.atomic_add(pointers, tl.zeros([BLOCK], tl.int64), sem="acquire", scope="sys")


@triton.jit
def _filled(line, length):
    """Rows inside the extents of lanes, whose lines of the control block are at these addresses."""
    base = _load(line + 8)
    return tl.minimum(tl.maximum(tl.maximum(_load(line), _load(line + 16)) - base, 0), length)


@triton.jit
def extents(state, BLOCK: tl.constexpr):
    """One program: of each lane how many rows are inside the extents of it and all lanes before."""
    lanes, ends = _at(state, H_LANES), state + _at(state, H_ENDS)
    before = lanes * 0
    for start in range(0, lanes, BLOCK):
        lane = start + tl.arange(0, BLOCK).to(tl.int64)
        filled = _filled(_at(state, H_LANES_AT) + tl.minimum(lane, lanes - 1) * 64, _at(state, H_LENGTH))
        filled = tl.where(lane < lanes, filled, 0)
        tl.store(ends + lane, before + tl.cumsum(filled, 0), mask=lane < lanes)
        before += tl.sum(filled, 0)


@triton.jit
def _row_of(rank, state, LANES: tl.constexpr):
    """The row with a rank among those inside the extents. LANES: steps of the search; 0 and less: rank is row."""
    if LANES <= 0:
        return rank
    else:
        lanes, ends = _at(state, H_LANES), state + _at(state, H_ENDS)
        low, high = rank * 0, rank * 0 + lanes
        for _ in range(LANES):
            middle, searching = (low + high) // 2, low < high
            beyond = _at(ends, tl.minimum(middle, lanes - 1)) <= rank
            low = tl.where(searching & beyond, middle + 1, low)
            high = tl.where(searching & (beyond == 0), middle, high)
        lane = tl.minimum(low, lanes - 1)
        before = _at(ends, tl.maximum(lane - 1, 0))
        return lane * _at(state, H_LENGTH) + rank - tl.where(lane > 0, before, 0)


@triton.jit
def _child(x, of_child, k: tl.constexpr):
    """x[:, k]. Adding zeros is exact."""
    return tl.sum(tl.where(of_child == k, x, 0.0), 1)


@triton.jit
def _descend(u, state, BLOCK: tl.constexpr):
    """The leaves on which ``u * sum`` falls: ``SumTree::find``, with its order of sums."""
    levels, of_child = _at(state, H_LEVELS), tl.arange(0, 8)[None, :]
    left = u * _load(_at(state, H_TREE + (levels - 1) * 2), tl.float64)
    node = tl.zeros([BLOCK], tl.int64)
    for down in range(1, levels):
        level = state + H_TREE + (levels - 1 - down) * 2
        x = _load(_at(level, 0) + (node[:, None] * 8 + of_child) * 8, tl.float64)
        x0, x2, x4, x6 = _child(x, of_child, 0), _child(x, of_child, 2), _child(x, of_child, 4), _child(x, of_child, 6)
        two, six = x0 + _child(x, of_child, 1), x4 + _child(x, of_child, 5)
        four = two + (x2 + _child(x, of_child, 3))
        p3, p5, p6, p7 = two + x2, four + x4, four + six, four + (six + x6)
        over = four + (six + (x6 + _child(x, of_child, 7))) <= left
        begin = tl.where(x0 <= left, x0, 0.0)
        c = (
            (x0 <= left).to(tl.int64)
            + (two <= left).to(tl.int64)
            + (p3 <= left).to(tl.int64)
            + (four <= left).to(tl.int64)
        )
        c += (p5 <= left).to(tl.int64) + (p6 <= left).to(tl.int64) + (p7 <= left).to(tl.int64)
        begin = tl.where(c == 2, two, tl.where(c == 3, p3, tl.where(c == 4, four, begin)))
        begin = tl.where(c == 5, p5, tl.where(c == 6, p6, tl.where(c == 7, p7, begin)))
        # Rounding put it on the very end: it falls on the last child that is not zero.
        c = tl.where(over, tl.max(tl.where(x > 0, of_child, 0), 1).to(tl.int64), c)
        left = tl.where(over, 0.0, tl.maximum(left - begin, 0.0))
        node = tl.minimum(node * 8 + c, _at(level, 1) - 1)  # others write to this memory: no step leaves the tree
    return node


@triton.jit
def _weighed(row, state):
    """The leaves of rows, and ``(leaf / smallest positive leaf) ** -beta``. That one may be of a moment ago: no weight is above 1."""
    leaf = _load(_at(state, H_TREE) + row * 8, tl.float64)
    beta, least = _load(_at(state, H_BETA), tl.float64), _load(_at(state, H_LEAST), tl.float64) + leaf * 0.0
    ratio = leaf / tl.where(least > 0, least, tl.where(leaf > 0, leaf, 1.0))
    return leaf, tl.exp(-beta * tl.log(tl.maximum(ratio, 1.0)))


@triton.jit
def _draw(i, attempt, key, ranks, state, BLOCK: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """One attempt for places ``i``, int64 [BLOCK]: row, ticket word or 0 where there is none to be read, and weight."""
    capacity, weight = _at(state, H_CAPACITY), tl.zeros([BLOCK], tl.float64)
    if KIND == PRIORITIZED:
        row = _descend((_bits(key, i, attempt) >> 11).to(tl.float64) * 1.1102230246251565e-16, state, BLOCK)
        inside = row >= 0
    else:
        total = capacity
        if LANES > 0:
            total = _at(state + _at(state, H_ENDS), _at(state, H_LANES) - 1)
        elif LANES == -1:
            total = _filled(_at(state, H_LANES_AT), _at(state, H_LENGTH))
        if KIND == PERMUTED:
            rank = _load(ranks + i * 8)
            inside = (rank >= 0) & (rank < total)
            rank = (rank + attempt) % tl.maximum(total, 1)  # a row that holds nothing is replaced by the next one
        else:
            bits = _bits(key, i, attempt)
            rank = tl.umulhi(bits, bits * 0 + total.to(tl.uint64)).to(tl.int64)
            inside = rank < total
        row = _row_of(tl.where(inside, rank, 0), state, LANES)
    row = tl.minimum(tl.maximum(row, 0), capacity - 1)
    word = _acquire(state, row, BLOCK)
    good = inside & ((word & 3) == 2)
    if KIND == PRIORITIZED:
        leaf, weight = _weighed(row, state)
        good = good & (leaf > 0)
    return row, tl.where(good, word, 0), weight


@triton.jit
def _write_of(row, word, state):
    """The number of the write that rows with these words hold."""
    address = (_at(state, H_WRITES) + row * 8).to(tl.pointer_type(tl.int64))
    return tl.where(word < 0, tl.load(address, mask=word < 0, other=0, volatile=True), word >> 2)


@triton.jit
def _command(state, key, ranks, out, SLOTS: tl.constexpr, COUNTED: tl.constexpr):
    """Key, address of the ranks and output address of this batch: as they were given, or as slot ``batches % SLOTS`` says."""
    batch = _at(state, C_BATCHES)
    if SLOTS > 0:
        slot = _at(state, H_COMMANDS) + batch % SLOTS * 64
        key, ranks, out = _load(slot), _load(slot + 16), _load(slot + 8)
    mixed = key.to(tl.uint64)
    if COUNTED:
        mixed = _bits(mixed, batch, batch * 0)
    return mixed, ranks, out


@triton.jit(do_not_specialize=["key", "ranks", "out"])
def draw(
    state, key: tl.int64, ranks: tl.int64, out: tl.int64, resident,
    BLOCK: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, COUNTED: tl.constexpr,
    RESIDENT: tl.constexpr,
):  # fmt: skip
    """Chooses a row for each place, and reads its ticket. Places for which none is found get ticket word 0."""
    key, ranks, _ = _command(state, key, ranks, out, SLOTS, COUNTED)
    n, place = _at(state, H_N), tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.minimum(place, n - 1)
    attempt, tries = i * 0, 1
    row, word, weight = _draw(i, attempt, key, ranks, state, BLOCK, KIND, LANES)
    while (tl.min(tl.where(word == 0, 0, 1), 0) == 0) & (tries < ATTEMPTS):
        again = word == 0
        next_row, next_word, next_weight = _draw(i, attempt + 1, key, ranks, state, BLOCK, KIND, LANES)
        row, word = tl.where(again, next_row, row), tl.where(again, next_word, word)
        weight, attempt = tl.where(again, next_weight, weight), tl.where(again, attempt + 1, attempt)
        tries += 1
    places, mine = state + PLACES + i, place < n
    tl.store(places, row, mask=mine)
    tl.store(places + n, word, mask=mine)
    tl.store(places + 2 * n, attempt, mask=mine)
    tl.store(places + 3 * n, _write_of(row, word, state), mask=mine)
    tl.store(places + 4 * n, weight.to(tl.int64, bitcast=True), mask=mine)
    if RESIDENT:
        there = (tl.load(resident + row, volatile=True) == word).to(tl.int64)
        tl.store(places + 5 * n, there, mask=mine)
        found = tl.sum(tl.where(mine, there, 0), 0)
        if found > 0:
            tl.atomic_add(state + C_RESIDENT, found, sem="relaxed")
    redraws = tl.sum(tl.where(mine, attempt, 0), 0)
    if redraws > 0:
        tl.atomic_add(state + C_REDRAWS, redraws, sem="relaxed")


@triton.jit
def _move(
    source, to, nbytes, mine, ZEROS: tl.constexpr, VOLATILE: tl.constexpr, dtype: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, CHUNK // WIDTH)[None, :]
    mask = mine[:, None] & (at < nbytes // WIDTH)
    value = tl.zeros([1, CHUNK // WIDTH], dtype)
    if not ZEROS:
        value = tl.load(source[:, None].to(tl.pointer_type(dtype)) + at, mask=mask, other=0, volatile=VOLATILE)
    tl.store(to[:, None].to(tl.pointer_type(dtype)) + at, value, mask=mask)


@triton.jit
def _copy_wide(source, to, nbytes, width, mine, ZEROS: tl.constexpr, VOLATILE: tl.constexpr, CHUNK: tl.constexpr):
    """Copies a chunk from each address, int64 [n], to another one, where ``mine`` is true; ZEROS: one of zeros. VOLATILE: past caches."""
    if width == 8:
        _move(source, to, nbytes, mine, ZEROS, VOLATILE, tl.int64, 8, CHUNK)
    elif width == 4:
        _move(source, to, nbytes, mine, ZEROS, VOLATILE, tl.int32, 4, CHUNK)
    elif width == 2:
        _move(source, to, nbytes, mine, ZEROS, VOLATILE, tl.int16, 2, CHUNK)
    else:
        _move(source, to, nbytes, mine, ZEROS, VOLATILE, tl.int8, 1, CHUNK)


@triton.jit
def _copy(state, chunk, row, place, out, zeros: tl.constexpr, CHUNK: tl.constexpr):
    """One chunk of a row of the store into its place."""
    entry = state + _at(state, H_TABLE) + chunk * 8
    source, to = _at(entry, 0) + row * _at(entry, 1), out + _at(entry, 2) + place * _at(entry, 3)
    _copy_chunk(entry, source, to, zeros, CHUNK)


@triton.jit
def _copy_chunk(entry, source, to, zeros: tl.constexpr, CHUNK: tl.constexpr):
    """An entry is seven words: source, stride, where it goes and how far apart, bytes, width, and where the rows are resident."""
    one = tl.zeros([1], tl.int64)
    _copy_wide(source + one, to + one, _at(entry, 4), _at(entry, 5), one == 0, zeros, True, CHUNK)


@triton.jit(do_not_specialize=["key", "ranks", "out"])
def gather(
    state, key: tl.int64, ranks: tl.int64, out: tl.int64, CHUNK: tl.constexpr, SLOTS: tl.constexpr, RESIDENT: tl.constexpr
):  # fmt: skip
    """Copies all chunks of all places. Programs share them: there may be fewer than chunks."""
    _, _, out = _command(state, key, ranks, out, SLOTS, False)
    chunks, n = _at(state, H_CHUNKS), _at(state, H_N)
    for at in range(tl.program_id(0).to(tl.int64), n * chunks, tl.num_programs(0)):
        place, chunk = at // chunks, at % chunks
        row, entry = _at(state, PLACES + place), state + _at(state, H_TABLE) + chunk * 8
        source, apart = _at(entry, 0) + row * _at(entry, 1), _at(entry, 3)
        if RESIDENT:
            source = tl.where(_at(state, PLACES + 5 * n + place) == 1, _at(entry, 6) + row * apart, source)
        _copy_chunk(entry, source, out + _at(entry, 2) + place * apart, False, CHUNK)


@triton.jit
def _keep(state, resident, row, word, place, out, CHUNK: tl.constexpr):
    """Make the row in a place resident, unless it is, or a later one is, or another program is at it."""
    before = tl.load(resident + row, volatile=True)
    if (before != REPLACED) & ((before & NUMBER) < (word & NUMBER)):  # noqa: SIM102 - Triton evaluates both sides
        if tl.atomic_cas(resident + row, before, before * 0 + REPLACED, sem="acquire") == before:
            for chunk in range(_at(state, H_CHUNKS)):
                entry = state + _at(state, H_TABLE) + chunk * 8
                apart = _at(entry, 3)
                _copy_chunk(entry, out + _at(entry, 2) + place * apart, _at(entry, 6) + row * apart, False, CHUNK)
            tl.debug_barrier()
            tl.atomic_xchg(resident + row, word, sem="release")


@triton.jit(do_not_specialize=["key", "ranks", "out"])
def repair(
    state, key: tl.int64, ranks: tl.int64, out: tl.int64, resident,
    CHUNK: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, COUNTED: tl.constexpr,
    RESIDENT: tl.constexpr,
):  # fmt: skip
    """One program a place: reads the ticket again, and reads other rows until one was whole throughout. Then says which it is."""
    key, ranks, out = _command(state, key, ranks, out, SLOTS, COUNTED)
    n, place = _at(state, H_N), tl.program_id(0).to(tl.int64)
    i = place + tl.zeros([1], tl.int64)
    places = state + PLACES + i
    row, word, attempt, write = _at(places, 0), _at(places, n), _at(places, 2 * n), _at(places, 3 * n)
    weight = _at(places, 4 * n).to(tl.float64, bitcast=True)
    good = tl.sum(((word != 0) & (_acquire(state, row, 1) == word)).to(tl.int32), 0)
    tries = 0
    while (good == 0) & (tries < ATTEMPTS + n):
        if tries < ATTEMPTS:
            attempt += 1
            row, word, weight = _draw(i, attempt, key, ranks, state, 1, KIND, LANES)
        else:  # nothing is found for this place: it repeats another one's row
            row = _at(state + PLACES, (i + tries - ATTEMPTS) % n)
            word = _acquire(state, row, 1)
            word = tl.where((word & 3) == 2, word, 0)
            if KIND == PRIORITIZED:
                _, weight = _weighed(row, state)
        if tl.sum(word, 0) != 0:
            write = _write_of(row, word, state)
            for chunk in range(_at(state, H_CHUNKS)):
                _copy(state, chunk, tl.sum(row, 0), place, out, False, CHUNK)
            tl.debug_barrier()
            tl.atomic_add(state + C_REDRAWS, 1, sem="acq_rel", scope="sys")  # the fence between the copy and the ticket
            good = tl.sum((_acquire(state, row, 1) == word).to(tl.int32), 0)
            if (good == 1) & (tries >= ATTEMPTS):
                tl.atomic_add(state + C_REPEATED, 1, sem="relaxed")
        tries += 1
    if good == 0:
        for chunk in range(_at(state, H_CHUNKS)):
            _copy(state, chunk, place, place, out, True, CHUNK)
        tl.atomic_add(state + C_MISSING, 1, sem="relaxed")
    elif RESIDENT:
        _keep(state, resident, tl.sum(row, 0), tl.sum(word, 0), place, out, CHUNK)
    _store(out + _at(state, H_ROWS_AT) + i * 8, tl.where(good == 1, row, -1))
    _store(out + _at(state, H_TICKETS_AT) + i * 8, tl.where(good == 1, write, -1))
    _store(out + _at(state, H_VALID_AT) + i, good.to(tl.int8) + tl.zeros([1], tl.int8), tl.int8)
    if KIND == PRIORITIZED:
        _store(out + _at(state, H_WEIGHTS_AT) + i * 4, tl.where(good == 1, weight, 0.0).to(tl.float32), tl.float32)
    # The last program: all have read which batch this is.
    if tl.atomic_add(state + C_FINISHED, 1, sem="acq_rel") == n - 1:
        tl.store(state + C_FINISHED, 0)
        tl.store(state + C_BATCHES, _at(state, C_BATCHES) + 1)


@triton.jit
def _slot(ring, sent, entries, SLOTS: tl.constexpr):
    return ring + (RING_HEADER + sent % SLOTS * (SLOT_HEADER + 3 * entries)) * 8


@triton.jit(
    do_not_specialize=["ring", "entries", "n"], do_not_specialize_on_alignment=["rows", "tickets", "priorities"]
)
def update(
    state, ring: tl.int64, entries: tl.int64, n: tl.int64, rows, tickets, priorities, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: writes n entries into the next slot of the ring, unless that is full. publish() must follow."""
    sent = _at(state, C_SENT)
    accepted = (sent - _load(ring + 8) < SLOTS).to(tl.int64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = at < n * accepted
        entry = (_slot(ring, sent, entries, SLOTS) + (SLOT_HEADER + at) * 8).to(tl.pointer_type(tl.int64))
        tl.store(entry, tl.load(rows + at, mask=mask, volatile=True), mask=mask)
        tl.store(entry + entries, tl.load(tickets + at, mask=mask, volatile=True), mask=mask)
        priority = tl.load(priorities + at, mask=mask, volatile=True).to(tl.float64)
        tl.store(entry + 2 * entries, priority.to(tl.int64, bitcast=True), mask=mask)
    tl.store(state + C_ACCEPTED, accepted)


@triton.jit(do_not_specialize=["ring", "entries", "n"])
def publish(state, ring: tl.int64, entries: tl.int64, n: tl.int64, SLOTS: tl.constexpr):
    """Tells the host of the slot that update() has filled, or counts the entries that were dropped."""
    sent = _at(state, C_SENT)
    if _at(state, C_ACCEPTED) == 1:
        slot = _slot(ring, sent, entries, SLOTS)
        _store(slot + 8, n)
        _store(slot, sent + 1)
        tl.store(state + C_SENT, sent + 1)
    else:
        tl.store(state + C_DROPPED, _at(state, C_DROPPED) + n)
