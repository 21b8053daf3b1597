import io

from rich.console import Console

from benchmarks import report
from benchmarks.claims import FLOORS, Comparison, Row, timed
from benchmarks.rivals import Library
from benchmarks.timing import Spread, Timing

LIBRARIES = {name: Library(name, object(), "1", ()) for name in report.LIBRARIES}


def printed(row):
    out = Console(width=report.WIDTH, file=io.StringIO())
    report.print_table(out, [row], LIBRARIES, 1.0)
    return out.file.getvalue()


def test_the_chart_of_scaling(tmp_path):
    times = {"1e+04 rows": [20.0, 21.0], "1e+07 rows": [30.0, 40.0]}
    rows = [
        timed(key, "", Timing(1, times), ours="1e+07 rows")
        for key in ("scaling/tree", "scaling/slices", "indexes/uniform")
    ]
    path = report.draw_scaling(tmp_path, rows, "0.1.0", "a machine")
    assert path == tmp_path / "scaling.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_milliseconds_against_a_bound():
    floor = FLOORS["sharing/recovery", "100 ms"]
    spread = Spread(60.25, 50.0, 70.0)
    row = Row("sharing/recovery", "open", {"engram": spread}, [Comparison("100 ms", "value", spread, floor)], unit="ms")
    text = printed(row)
    assert "60.2 ms" in text
    assert "60.2 [50.0–70.0] ms" in text
    assert "≤ 100" in text
    assert "yes" in text


def test_rates_beside_another_side_and_one_floor_taken_away():
    timing = Timing(1, {"engram": [64.0], "alone": [32.0], "another program": [64.0]})
    row = timed("sharing/2-writers-beside-sampler", "", timing, share=("another program", "alone")).as_rate(64)
    assert [one.verdict for one in row.comparisons] == ["yes", "no"]
    assert [one.verdict for one in row.unjudged("alone").comparisons] == ["yes", ""]
    assert [one.verdict for one in row.unjudged().comparisons] == ["", ""]
    assert "2.00 [2.00–2.00] of alone (2.00" in printed(row)


def test_small_shares_have_digits_enough_to_be_judged_by():
    timing = Timing(1, {"engram": [0.021, 0.021], "full": [1.0, 1.0]})
    text = printed(timed("checkpoints/one-per-cent/time", "", timing, share=("full",)))
    assert "0.021 [0.021–0.021] of full" in text
    assert "no" in text.split("≤ 0.02", 1)[1].split("\n", 1)[0]


def test_mebibytes_against_a_bound():
    floor = FLOORS["checkpoints/memory", "64 MiB"]
    spread = Spread.of([12.34])
    row = Row("checkpoints/memory", "", {"engram": spread}, [Comparison("64 MiB", "value", spread, floor)], unit="MiB")
    assert "12.3 [12.3–12.3] MiB" in printed(row)
