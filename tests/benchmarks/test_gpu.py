"""bench_gpu without a GPU."""

import pytest
import torch

from benchmarks import bench_gpu


def test_it_says_that_there_is_no_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_leaf_counts():
    rb = bench_gpu._rows(transform=bench_gpu._TRANSFORMS["a dict within"])
    assert len(bench_gpu._leaves(rb.sample(4, return_info=True))) == 4


@pytest.mark.filterwarnings("ignore:.*there is no accelerator")
def test_the_table(capsys):
    bench_gpu._show(bench_gpu._pinned(), "none")
    assert "a new TensorDict" in capsys.readouterr().out


def test_a_part_of_the_peak():
    figure = bench_gpu._part("copies", "", {"copies": [9.0, 18.0, 9.5], "peak": [10.0, 20.0, 10.0]}, 0.9)
    assert figure["met"]
    assert "(90 %)" in figure["measured"]
    assert not bench_gpu._part("copies", "", {"copies": [8.0], "peak": [10.0]}, 0.9)["met"]
