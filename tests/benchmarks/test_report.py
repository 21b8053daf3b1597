from benchmarks import report
from benchmarks.claims import timed
from benchmarks.timing import Timing


def test_the_chart_of_scaling(tmp_path):
    times = {"1e+04 rows": [20.0, 21.0], "1e+07 rows": [30.0, 40.0]}
    rows = [
        timed(key, "", Timing(1, times), ours="1e+07 rows")
        for key in ("scaling/tree", "scaling/slices", "indexes/uniform")
    ]
    path = report.draw_scaling(tmp_path, rows, "0.1.0", "a machine")
    assert path == tmp_path / "scaling.png"
    assert path.read_bytes().startswith(b"\x89PNG")
