import itertools
import random

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.saved.description import BLOCK, Summing, block_of, blocks_of, first_wrong


def oracle(raw, block=BLOCK):
    return [xxhash.xxh3_64_intdigest(raw[i : i + block]) for i in range(0, len(raw), block)]


@settings(max_examples=40)
@given(st.integers(1, 9 * BLOCK), st.integers(1, 5), st.lists(st.integers(0, 9 * BLOCK), max_size=6))
def test_blocks_of_any_size(size, blocks, cuts):
    raw, summing = random.Random(size).randbytes(size), Summing(blocks * BLOCK)
    for begin, end in itertools.pairwise([0, *sorted(min(cut, size) for cut in cuts), size]):
        summing.update(raw[begin:end])
    sums = summing.done()
    assert list(sums) == oracle(raw, blocks * BLOCK)
    assert len(sums) == blocks_of(size, blocks * BLOCK)
    assert first_wrong(raw, sums, 0, blocks * BLOCK) is None
    assert first_wrong(raw[:-1] + bytes([raw[-1] ^ 1]), sums, 0, blocks * BLOCK) == len(sums) - 1


@given(st.integers(1, 1 << 40))
def test_a_file_of_items_has_at_most_four_blocks_and_others_blocks_of_256_kib(size):
    block = block_of(".engram/items/0-1-2.bin", size)
    assert block % BLOCK == 0
    assert blocks_of(size, block) <= 4
    assert block == BLOCK or 4 * (block - BLOCK) < size  # not larger than it takes
    assert block_of("seg/0-1.bin", size) == block_of(".engram/items.bin", size) == BLOCK


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, BLOCK // 3) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
        ),
        max_size=6,
    )
)
def test_pieces_and_zeros_in_any_order(pieces):
    summing, raw = Summing(), b""
    for i, (zeros, size) in enumerate(pieces):
        piece = bytes(size) if zeros else bytes([i + 1]) * size
        summing.zeros(size) if zeros else summing.update(piece)
        raw += piece
    sums = summing.done()
    assert list(sums) == oracle(raw)
    assert len(sums) == blocks_of(len(raw))
    assert first_wrong(raw, sums, 0) is None
    for at in {0, len(raw) // 2, len(raw) - 1} if raw else ():
        wrong = bytearray(raw)
        wrong[at] ^= 1
        assert first_wrong(wrong, sums, 0) == at // BLOCK


def test_sums_are_xxh3_in_little_endian():
    summing = Summing()
    summing.update(b"abc")
    assert summing.done().tobytes() == xxhash.xxh3_64_digest(b"abc")[::-1]


def test_a_piece_from_the_middle_is_compared_with_its_own_sums():
    raw = bytes(range(256)) * (BLOCK // 128)
    summing = Summing()
    summing.update(raw + b"tail")
    sums = summing.done()
    assert first_wrong(raw[BLOCK:] + b"tail", sums, 1) is None
    assert first_wrong(b"tail", sums, 2) is None
    assert first_wrong(b"tale", sums, 2) == 2
    assert first_wrong(b"", sums, 3) is None
