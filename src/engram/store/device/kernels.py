"""Triton kernels with which an accelerator reads a store in host memory. Importing this module imports Triton.

Rules that the tests check in what is compiled:

- Every load is volatile or an acquire: a cache may hold a line of an earlier batch.
- A ticket is read by :func:`_acquire`, which becomes one ``ld.acquire.sys``. It does so for a scalar only: a device runs one program a
  row (``BLOCK = 1``), and blocks of rows are for the interpreter.
- A real atomic touches the device's own memory only: over PCIe it would not be atomic with the CPU.

``header`` is int64 on the device, in the order of the ``H_`` constants; behind them stand the addresses of the tree's levels and their
sizes, two words a level, the leaves first. ``places`` is int64 ``[4, B]``: row, ticket word, attempt, number of the write.
``counters`` is int64, in the order of the ``C_`` constants.
"""

import triton
import triton.language as tl

#: Whether they run in Triton's interpreter.
INTERPRETED = triton.knobs.runtime.interpret
H_TICKETS, H_WRITES, H_LANES_AT, H_CAPACITY, H_LANES, H_LENGTH, H_LEVELS, H_LEAST, H_BETA, H_TREE = map(
    tl.constexpr, range(10)
)
C_BATCHES, C_FINISHED, C_REDRAWS, C_REPEATED, C_MISSING, C_SENT, C_ACCEPTED, C_DROPPED = map(tl.constexpr, range(8))
UNIFORM, PRIORITIZED, PERMUTED = map(tl.constexpr, range(3))
#: How often a place is drawn, and how often again where its row moved.
ATTEMPTS = tl.constexpr(32)
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
    """64 random bits as ``native/core/random.h`` makes them. Arguments and result are uint64."""
    return _mix(_mix(_mix(key + _GAMMA) + attempt * _ATTEMPT) + (i + 1) * _GAMMA)


@triton.jit
def _word(address):
    """The word of 64 bits at an address."""
    return tl.load(address.to(tl.pointer_type(tl.int64)), volatile=True)


@triton.jit
def _double(address):
    return tl.load(address.to(tl.pointer_type(tl.float64)), volatile=True)


@triton.jit
def _acquire(address, BLOCK: tl.constexpr):
    """The words at addresses int64 [BLOCK]: no later load comes before."""
    if BLOCK == 1:
        word = tl.atomic_add(tl.sum(address, 0).to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")
        return tl.zeros([1], tl.int64) + word
    else:
        pointers = address.to(tl.pointer_type(tl.int64))
        return tl.atomic_add(pointers, tl.zeros([BLOCK], tl.int64), sem="acquire", scope="sys")


@triton.jit
def _filled(line, length):
    """Rows inside the extents of lanes, whose lines of the control block are at these addresses."""
    base = _word(line + 8)
    end = tl.maximum(_word(line), _word(line + 16))
    return tl.minimum(tl.maximum(end - base, 0), length)


@triton.jit
def extents(header, ends, BLOCK: tl.constexpr):
    """One program: of each lane how many rows are inside the extents of it and all lanes before."""
    lanes_at, lanes = tl.load(header + H_LANES_AT, volatile=True), tl.load(header + H_LANES, volatile=True)
    length = tl.load(header + H_LENGTH, volatile=True)
    before = lanes * 0
    for start in range(0, lanes, BLOCK):
        lane = start + tl.arange(0, BLOCK).to(tl.int64)
        filled = _filled(lanes_at + tl.minimum(lane, lanes - 1) * 64, length)
        filled = tl.where(lane < lanes, filled, 0)
        tl.store(ends + lane, before + tl.cumsum(filled, 0), mask=lane < lanes)
        before += tl.sum(filled, 0)


@triton.jit
def _row_of(rank, header, ends, length, LANES: tl.constexpr):
    """The row with a rank among those inside the extents. LANES: steps of the search; 0 and less: rank is row."""
    if LANES <= 0:
        return rank
    else:
        lanes = tl.load(header + H_LANES, volatile=True)
        low, high = rank * 0, rank * 0 + lanes
        for _ in range(LANES):
            middle = (low + high) // 2
            searching = low < high
            beyond = tl.load(ends + tl.minimum(middle, lanes - 1), volatile=True) <= rank
            low = tl.where(searching & beyond, middle + 1, low)
            high = tl.where(searching & (beyond == 0), middle, high)
        lane = tl.minimum(low, lanes - 1)
        before = tl.load(ends + tl.maximum(lane - 1, 0), volatile=True)
        return lane * length + rank - tl.where(lane > 0, before, 0)


@triton.jit
def _child(x, of_child, k: tl.constexpr):
    """x[:, k]. Adding zeros is exact."""
    return tl.sum(tl.where(of_child == k, x, 0.0), 1)


@triton.jit
def _descend(u, header, BLOCK: tl.constexpr):
    """The leaves on which ``u * sum`` falls: ``SumTree::find``, with its order of sums."""
    levels = tl.load(header + H_LEVELS, volatile=True)
    of_child = tl.arange(0, 8)[None, :]
    top = header + H_TREE + (levels - 1) * 2
    left = u * _double(tl.load(top, volatile=True))
    node = tl.zeros([BLOCK], tl.int64)
    for down in range(1, levels):
        level = header + H_TREE + (levels - 1 - down) * 2
        x = _double(tl.load(level, volatile=True) + (node[:, None] * 8 + of_child) * 8)
        x0, x2, x4, x6 = _child(x, of_child, 0), _child(x, of_child, 2), _child(x, of_child, 4), _child(x, of_child, 6)
        two = x0 + _child(x, of_child, 1)
        four = two + (x2 + _child(x, of_child, 3))
        six = x4 + _child(x, of_child, 5)
        p3, p5, p6, p7 = two + x2, four + x4, four + six, four + (six + x6)
        all_of_them = four + (six + (x6 + _child(x, of_child, 7)))
        c = (
            (x0 <= left).to(tl.int64)
            + (two <= left).to(tl.int64)
            + (p3 <= left).to(tl.int64)
            + (four <= left).to(tl.int64)
        )
        c += (p5 <= left).to(tl.int64) + (p6 <= left).to(tl.int64) + (p7 <= left).to(tl.int64)
        over = all_of_them <= left  # rounding put it on the very end: it falls on the last child that is not zero
        c = tl.where(over, tl.max(tl.where(x > 0, of_child, 0), 1).to(tl.int64), c)
        begin = tl.where(c == 1, x0, tl.where(c == 2, two, tl.where(c == 3, p3, tl.where(c == 4, four, 0.0))))
        begin = tl.where(c == 5, p5, tl.where(c == 6, p6, tl.where(c == 7, p7, begin)))
        left = tl.where(over, 0.0, tl.maximum(left - begin, 0.0))
        node = tl.minimum(
            node * 8 + c, tl.load(level + 1, volatile=True) - 1
        )  # memory that others write to: no step leaves the tree
    return node


@triton.jit
def _leaf(row, header):
    return _double(tl.load(header + H_TREE, volatile=True) + row * 8)


@triton.jit
def _weight(leaf, header):
    """``(leaf / smallest positive leaf) ** -beta``. The smallest one may be of a moment ago: no weight is above 1."""
    beta = _double(tl.load(header + H_BETA, volatile=True))
    least = _double(tl.load(header + H_LEAST, volatile=True)) + leaf * 0.0
    ratio = leaf / tl.where(least > 0, least, tl.where(leaf > 0, leaf, 1.0))
    return tl.exp(-beta * tl.log(tl.maximum(ratio, 1.0)))


@triton.jit
def _draw(i, attempt, key, ranks, header, ends, BLOCK: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr):
    """One attempt for places ``i``, int64 [BLOCK]: row, ticket word or 0 where there is none to be read, and weight."""
    capacity = tl.load(header + H_CAPACITY, volatile=True)
    length = tl.load(header + H_LENGTH, volatile=True)
    weight = tl.zeros([BLOCK], tl.float64)
    if KIND == PRIORITIZED:
        bits = _bits(key, i.to(tl.uint64), attempt.to(tl.uint64))
        row = _descend((bits >> 11).to(tl.float64) * 1.1102230246251565e-16, header, BLOCK)
        inside = row >= 0
    else:
        total = capacity
        if LANES > 0:
            total = tl.load(ends + tl.load(header + H_LANES, volatile=True) - 1, volatile=True)
        elif LANES == -1:
            total = _filled(tl.load(header + H_LANES_AT, volatile=True), length)
        if KIND == PERMUTED:
            rank = _word(ranks + i * 8)
            inside = (rank >= 0) & (rank < total)
            rank = (rank + attempt) % tl.maximum(total, 1)  # a row that holds nothing is replaced by the next one
        else:
            bits = _bits(key, i.to(tl.uint64), attempt.to(tl.uint64))
            rank = tl.umulhi(bits, (bits * 0) + total.to(tl.uint64)).to(tl.int64)
            inside = rank < total
        row = _row_of(tl.where(inside, rank, 0), header, ends, length, LANES)
    row = tl.minimum(tl.maximum(row, 0), capacity - 1)
    word = _acquire(tl.load(header + H_TICKETS, volatile=True) + row * 8, BLOCK)
    good = inside & ((word & 3) == 2)
    if KIND == PRIORITIZED:
        leaf = _leaf(row, header)
        good = good & (leaf > 0)
        weight = _weight(leaf, header)
    return row, tl.where(good, word, 0), weight


@triton.jit
def _write_of(row, word, header):
    """The number of the write that rows with these words hold."""
    edited = tl.load(
        (tl.load(header + H_WRITES, volatile=True) + row * 8).to(tl.pointer_type(tl.int64)),
        mask=word < 0,
        other=0,
        volatile=True,
    )
    return tl.where(word < 0, edited, word >> 2)


@triton.jit
def _command(key, out, ranks, commands, counters, SLOTS: tl.constexpr, COUNTED: tl.constexpr):
    """Key, output address and address of the ranks of this batch: as they were given, or as slot ``batches % SLOTS`` says."""
    if SLOTS > 0:
        slot = commands + tl.load(counters + C_BATCHES, volatile=True) % SLOTS * 64
        key, out, ranks = _word(slot), _word(slot + 8), _word(slot + 16)
    mixed = key.to(tl.uint64)
    if COUNTED:
        mixed = _bits(mixed, tl.load(counters + C_BATCHES, volatile=True).to(tl.uint64), mixed * 0)
    return mixed, out, ranks


@triton.jit(do_not_specialize=["n", "key", "ranks", "commands"])
def draw(
    n: tl.int64, key: tl.int64, ranks: tl.int64, commands: tl.int64, header, ends, places, weights, counters,
    BLOCK: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Chooses a row for each of n places, and reads its ticket. Places for which none is found get ticket word 0."""
    key, _, ranks = _command(key, key, ranks, commands, counters, SLOTS, COUNTED)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.minimum(place, n - 1)
    attempt = i * 0
    row, word, weight = _draw(i, attempt, key, ranks, header, ends, BLOCK, KIND, LANES)
    tries = 1
    while (tl.min(tl.where(word == 0, 0, 1), 0) == 0) & (tries < ATTEMPTS):
        again = word == 0
        next_row, next_word, next_weight = _draw(i, attempt + 1, key, ranks, header, ends, BLOCK, KIND, LANES)
        row, word = tl.where(again, next_row, row), tl.where(again, next_word, word)
        weight, attempt = tl.where(again, next_weight, weight), tl.where(again, attempt + 1, attempt)
        tries += 1
    mine = place < n
    tl.store(places + i, row, mask=mine)
    tl.store(places + n + i, word, mask=mine)
    tl.store(places + 2 * n + i, attempt, mask=mine)
    tl.store(places + 3 * n + i, _write_of(row, word, header), mask=mine)
    tl.store(weights + i, weight, mask=mine)
    redraws = tl.sum(tl.where(mine, attempt, 0), 0)
    if redraws > 0:
        tl.atomic_add(counters + C_REDRAWS, redraws, sem="relaxed")


@triton.jit
def _move(source, to, nbytes, zeros: tl.constexpr, dtype: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    at = tl.arange(0, CHUNK // WIDTH)
    mask = at < nbytes // WIDTH
    value = tl.zeros([CHUNK // WIDTH], dtype)
    if not zeros:
        value = tl.load(source.to(tl.pointer_type(dtype)) + at, mask=mask, other=0, volatile=True)
    tl.store(to.to(tl.pointer_type(dtype)) + at, value, mask=mask)


@triton.jit
def _copy(entry, row, place, out, zeros: tl.constexpr, CHUNK: tl.constexpr):
    """One chunk of a row into its place. An entry is six words: source, stride, where it goes and how far apart, bytes, width."""
    source = tl.load(entry, volatile=True) + row * tl.load(entry + 1, volatile=True)
    to = out + tl.load(entry + 2, volatile=True) + place * tl.load(entry + 3, volatile=True)
    nbytes, width = tl.load(entry + 4, volatile=True), tl.load(entry + 5, volatile=True)
    if width == 8:
        _move(source, to, nbytes, zeros, tl.int64, 8, CHUNK)
    elif width == 4:
        _move(source, to, nbytes, zeros, tl.int32, 4, CHUNK)
    elif width == 2:
        _move(source, to, nbytes, zeros, tl.int16, 2, CHUNK)
    else:
        _move(source, to, nbytes, zeros, tl.int8, 1, CHUNK)


@triton.jit(do_not_specialize=["n", "key", "out", "commands", "chunks"])
def gather(
    n: tl.int64, key: tl.int64, out: tl.int64, commands: tl.int64, chunks: tl.int64, table, places, counters,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Copies all chunks of all places. Programs share them: there may be fewer than chunks."""
    _, out, _ = _command(key, out, out, commands, counters, SLOTS, False)
    for at in range(tl.program_id(0).to(tl.int64), n * chunks, tl.num_programs(0)):
        place, chunk = at // chunks, at % chunks
        _copy(table + chunk * 8, tl.load(places + place, volatile=True), place, out, False, CHUNK)


@triton.jit(
    do_not_specialize=[
        "n",
        "key",
        "ranks",
        "out",
        "commands",
        "chunks",
        "rows_at",
        "tickets_at",
        "valid_at",
        "weights_at",
    ]
)
def repair(
    n: tl.int64, key: tl.int64, ranks: tl.int64, out: tl.int64, commands: tl.int64, chunks: tl.int64,
    rows_at: tl.int64, tickets_at: tl.int64, valid_at: tl.int64, weights_at: tl.int64,
    header, ends, table, places, weights, counters,
    CHUNK: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program a place: reads the ticket again, and reads other rows until one was whole throughout. Then says which it is."""
    key, out, ranks = _command(key, out, ranks, commands, counters, SLOTS, COUNTED)
    place = tl.program_id(0).to(tl.int64)
    i = place + tl.zeros([1], tl.int64)
    tickets = tl.load(header + H_TICKETS, volatile=True)
    row, word = tl.load(places + i, volatile=True), tl.load(places + n + i, volatile=True)
    attempt, write = tl.load(places + 2 * n + i, volatile=True), tl.load(places + 3 * n + i, volatile=True)
    weight = tl.load(weights + i, volatile=True)
    good = tl.sum(((word != 0) & (_acquire(tickets + row * 8, 1) == word)).to(tl.int32), 0)
    tries = 0
    while (good == 0) & (tries < ATTEMPTS + n):
        if tries < ATTEMPTS:
            attempt += 1
            row, word, weight = _draw(i, attempt, key, ranks, header, ends, 1, KIND, LANES)
        else:  # nothing is found for this place: it repeats another one's row
            row = tl.load(places + (i + tries - ATTEMPTS) % n, volatile=True)
            word = _acquire(tickets + row * 8, 1)
            word = tl.where((word & 3) == 2, word, 0)
            if KIND == PRIORITIZED:
                weight = _weight(_leaf(row, header), header)
        if tl.sum(word, 0) != 0:
            write = _write_of(row, word, header)
            for chunk in range(chunks):
                _copy(table + chunk * 8, tl.sum(row, 0), place, out, False, CHUNK)
            tl.debug_barrier()
            tl.atomic_add(
                counters + C_REDRAWS, 1, sem="acq_rel", scope="sys"
            )  # also the fence between the copy and the ticket
            good = tl.sum((_acquire(tickets + row * 8, 1) == word).to(tl.int32), 0)
            if (good == 1) & (tries >= ATTEMPTS):
                tl.atomic_add(counters + C_REPEATED, 1, sem="relaxed")
        tries += 1
    if good == 0:
        for chunk in range(chunks):
            _copy(table + chunk * 8, place, place, out, True, CHUNK)
        tl.atomic_add(counters + C_MISSING, 1, sem="relaxed")
    tl.store((out + rows_at + i * 8).to(tl.pointer_type(tl.int64)), tl.where(good == 1, row, -1))
    tl.store((out + tickets_at + i * 8).to(tl.pointer_type(tl.int64)), tl.where(good == 1, write, -1))
    tl.store((out + valid_at + i).to(tl.pointer_type(tl.int8)), good.to(tl.int8) + tl.zeros([1], tl.int8))
    if KIND == PRIORITIZED:
        tl.store(
            (out + weights_at + i * 4).to(tl.pointer_type(tl.float32)), tl.where(good == 1, weight, 0.0).to(tl.float32)
        )
    if (
        tl.atomic_add(counters + C_FINISHED, 1, sem="acq_rel") == n - 1
    ):  # the last program: all have read which batch this is
        tl.store(counters + C_FINISHED, 0)
        tl.store(counters + C_BATCHES, tl.load(counters + C_BATCHES, volatile=True) + 1)


@triton.jit(do_not_specialize=["n", "ring", "room"])
def update(
    n: tl.int64,
    ring: tl.int64,
    room: tl.int64,
    rows,
    tickets,
    priorities,
    counters,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: writes n entries into the next slot of the ring, unless that is full. publish() must follow."""
    sent = tl.load(counters + C_SENT, volatile=True)
    accepted = (sent - _word(ring + 8) < SLOTS).to(tl.int64)
    slot = ring + (RING_HEADER + sent % SLOTS * (SLOT_HEADER + 3 * room)) * 8
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = at < n * accepted
        entry = slot + (SLOT_HEADER + at) * 8
        tl.store(entry.to(tl.pointer_type(tl.int64)), tl.load(rows + at, mask=mask, volatile=True), mask=mask)
        tl.store(
            (entry + room * 8).to(tl.pointer_type(tl.int64)), tl.load(tickets + at, mask=mask, volatile=True), mask=mask
        )
        priority = tl.load(priorities + at, mask=mask, volatile=True).to(tl.float64)
        tl.store((entry + room * 16).to(tl.pointer_type(tl.float64)), priority, mask=mask)
    tl.store(counters + C_ACCEPTED, accepted)


@triton.jit(do_not_specialize=["n", "ring", "room"])
def publish(n: tl.int64, ring: tl.int64, room: tl.int64, counters, SLOTS: tl.constexpr):
    """Tells the host of the slot that update() has filled, or counts the entries that were dropped."""
    sent = tl.load(counters + C_SENT, volatile=True)
    if tl.load(counters + C_ACCEPTED, volatile=True) == 1:
        slot = ring + (RING_HEADER + sent % SLOTS * (SLOT_HEADER + 3 * room)) * 8
        tl.store((slot + 8).to(tl.pointer_type(tl.int64)), n)
        tl.store(slot.to(tl.pointer_type(tl.int64)), sent + 1)
        tl.store(counters + C_SENT, sent + 1)
    else:
        tl.store(counters + C_DROPPED, tl.load(counters + C_DROPPED, volatile=True) + n)
