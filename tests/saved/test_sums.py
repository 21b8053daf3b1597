import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.saved.description import BLOCK, Summing, blocks_of, first_wrong


def oracle(raw):
    return [xxhash.xxh3_64_intdigest(raw[i : i + BLOCK]) for i in range(0, len(raw), BLOCK)]


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
