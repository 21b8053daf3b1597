from engram.format import series
from engram.format.checkpoints import Checkpoint, Cut, Totals, finish_dump, rank_folder, replacing
from tests.format import checkpoint_folders as made


def test_dump(tmp_path):
    for i in range(3):
        with replacing(tmp_path / "d") as folder:
            parts = [
                made.write_flat(folder / "storage", seed=i),
                made.write_index(folder / "sampler"),
                made.write_index(folder / "indexes/000", name="x", part="index"),
            ]
            finish_dump(folder, parts, cut=Cut(5), totals=Totals(steps=27, episodes=3), schema_sum=made.SCHEMA_SUM)
        assert [p.name for p in tmp_path.iterdir()] == ["d"]
        with Checkpoint(tmp_path / "d") as c:
            assert not list(c.problems("full"))
            assert c.part(0, "storage").read_all("next/reward.memmap")[:80] == made.noise(80, i)


def test_series(tmp_path):
    e = series.claim_epoch(tmp_path)
    done = []
    for step in (10, 20, 30):
        f = series.begin(tmp_path, step=step, epoch=e, world=2, trigger="t", user={"a": 1})
        for r in range(2):
            own = f / rank_folder(r, 2)
            parts = [made.write_segments(own / "storage"), made.write_index(own / "sampler")]
            assert series.decide(f, e) is None
            series.accept(
                f,
                r,
                parts,
                layout="segments",
                cut=Cut(5),
                totals=Totals(steps=27, episodes=3),
                schema_sum=made.SCHEMA_SUM,
            )
        m = series.decide(f, e)
        assert m.status == "complete", m
        series.set_latest(tmp_path, f.name, e)
        assert series.latest(tmp_path) == (f, [])
        with Checkpoint(f) as c:
            assert not list(c.problems("full"))
    assert len(series.prune(tmp_path, 1, e)) == 2
    assert series.latest(tmp_path) == (f, [])
