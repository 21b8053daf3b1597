"""How much a run writes and samples over time."""

import numpy as np
import pytest
from PIL import Image

from engram.demo.remote import BIN_S, Mark, Throughput


@pytest.fixture
def run():
    seen = Throughput(batch=10)
    seen.rows = [5.1, 5.2, 5.3, 7.9, 6.0]  # by actors: not in order
    seen.batches = [5.2, 8.4]
    seen.marks = [Mark(6.0, "server killed", fatal=True), Mark(9.0, "node 2 starts", fatal=False)]
    return seen


def test_rates_are_counted_by_hand(run):
    for times, each in ((run.rows, 1), (run.batches, run.batch)):
        seconds, rates = run.rates(times, each)
        expected = [
            each * sum(middle - BIN_S / 2 <= at < middle + BIN_S / 2 for at in times) / BIN_S for middle in seconds
        ]
        assert rates.tolist() == expected
        assert rates.sum() * BIN_S == each * len(times)
        assert (seconds[0], seconds[-1] >= 9.0) == (BIN_S / 2, True)


def test_a_run_without_rows_has_no_rates():
    assert Throughput(10).rates([])[1].tolist() == [0.0]


def colors(path):
    """The numbers of pixels that are red, blue and green."""
    red, green, blue = np.moveaxis(np.asarray(Image.open(path).convert("RGB")).astype(int), 2, 0)
    found = [(red > green + 80) & (red > blue + 80), (blue > red + 40), (green > red + 40) & (green > blue + 40)]
    return [int(one.sum()) for one in found]


def test_the_picture_shows_both_rates_and_the_kills(run, tmp_path):
    run.plot(tmp_path / "all.png")
    assert min(colors(tmp_path / "all.png")) > 100
    run.marks = []
    run.batches = []
    run.plot(tmp_path / "rows.png")
    red, blue, green = colors(tmp_path / "rows.png")
    assert (red, green) == (0, 0)
    assert blue > 100


def test_an_empty_picture_is_one(tmp_path):
    Throughput(10).plot(tmp_path / "empty.png")
    assert colors(tmp_path / "empty.png") == [0, 0, 0]
