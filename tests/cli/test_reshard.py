"""``engram reshard``: what it writes is what a job of so many ranks would have loaded."""

import json

import pytest
from click.testing import CliRunner

from engram.cli import main
from engram.saved.inspection import verify
from engram.saved.series import Series
from tests.ranks.jobs import buffer, checkpointer, done, job, layout, play, steps_of
from tests.saved.checkpoint_folders import tree
from tests.saved.test_damage import flip
from tests.twins import contents


def call(*arguments):
    result = CliRunner().invoke(main, ["reshard", *map(str, arguments)], env={"COLUMNS": "200"})
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


def save(root, empty=None):
    def act(ranks, rank):
        rb = buffer(2, 64, seed=rank)
        ck = checkpointer(root / "source", rb, ranks)
        if rank == empty:
            ck.save(7)
            return set()
        play(rb, rank, 0, [5, 7, 3])
        play(rb, rank, 1, [9, 4], open_end=True)
        ck.save(7, user={"model": "m"})
        return steps_of(rb)

    return root, set().union(*done(job(3, act)))


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path)


def load(root, n, lanes, length):
    def act(ranks, rank):
        rb = buffer(lanes, length, seed=9)
        report = checkpointer(root, rb, ranks).restore()
        return report, rb

    return done(job(n, act))


def test_what_is_written_is_what_a_job_would_have_loaded(saved, caplog):
    root, every = saved
    caplog.set_level("INFO", "engram")
    said = call(root / "source", root / "target", "--ranks", 2, "--lanes", 3)
    assert said.exit_code == 0, said.output
    assert caplog.messages == []  # of stores that nobody asked for
    assert "3 ranks → 2" in said.output
    assert "dropped: open: 3 episodes, 12 steps" in said.output
    assert verify(root / "target", "full").good
    offline = load(root / "target", 2, 3, 64)
    online = load(root / "source", 2, 3, 64)
    assert [report.dealt for report, _ in offline] == [None, None]
    assert [report.dealt["plan"] in said.output for report, _ in online] == [True, True]
    for (report, one), (_, other) in zip(offline, online, strict=True):
        assert contents(one) == contents(other)
        assert layout(one) == layout(other)
        assert (report.step, report.user) == (7, {"model": "m"})
    kept = set().union(*(steps_of(rb) for _, rb in offline))
    assert len(kept) == len(every) - 12
    assert kept < every


def test_a_rank_that_had_nothing(tmp_path):
    root, every = save(tmp_path, empty=0)
    said = call(root / "source", root / "target", "--ranks", 2, "--lanes", 3, "--capacity", 192)
    assert said.exit_code == 0, said.output
    assert verify(root / "target", "full").good
    pairs = list(zip(load(root / "target", 2, 3, 64), load(root / "source", 2, 3, 64), strict=True))
    assert all(contents(one) == contents(other) for (_, one), (_, other) in pairs)
    assert len(set().union(*(steps_of(rb) for (_, rb), _ in pairs))) == len(every) - 8


def test_options(saved):
    root, every = saved
    said = call(root / "source", root / "t", "--ranks", 1, "--lanes", 1, "--capacity", 300, "--open", "truncate")
    assert said.exit_code == 0, said.output
    assert "truncated: 3 episodes, 12 steps" in said.output
    assert {step[0] for step in steps_of(load(root / "t", 1, 1, 300)[0][1])} == {step[0] for step in every}
    said = call(root / "source", root / "u", "--ranks", 1, "--lanes", 1, "--capacity", 20, "--overflow", "fill")
    assert "dropped: overflow" in said.output


def test_a_dry_run_writes_nothing(saved):
    root, _ = saved
    before = sorted(path.name for path in root.rglob("*"))
    said = call(root / "source", root / "target", "--ranks", 4, "--lanes", 1, "--dry-run")
    assert said.exit_code == 0
    assert "plan " in said.output
    assert "wrote" not in said.output
    assert sorted(path.name for path in root.rglob("*")) == before


def test_mistakes(saved):
    root, _ = saved
    assert call(root, root / "target", "--ranks", 1, "--lanes", 1).exit_code == 2
    assert call(root / "nothing", root / "target", "--ranks", 1, "--lanes", 1).exit_code == 2
    said = call(root / "source", root / "target", "--ranks", 1, "--lanes", 1, "--max-drop-fraction", "0.01")
    assert said.exit_code == 1
    assert "--open keep (or truncate) keeps those without a last step" in said.output
    path = Series(root / "source").latest()[0]
    shard = path / "rank-00001-of-00003" / "shard.json"
    shard.chmod(0o600)
    shard.write_text(json.dumps({}))
    said = call(path, root / "target", "--ranks", 1, "--lanes", 1)
    assert said.exit_code == 1
    assert "shard.json" in said.output
    assert not (root / "target").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_dump_with_priorities_is_refused_with_the_way_to_it(tmp_path, dry):
    rb = buffer()
    play(rb, 0, 0, [5])
    rb.dumps(tmp_path / "dump")
    said = call(tmp_path / "dump", tmp_path / "target", "--ranks", 1, "--lanes", 1, *dry)
    assert said.exit_code == 1
    assert "convert=True" in said.output
    assert "plan " not in said.output
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_would_fail_later_is_said_before_the_plan(saved, dry):
    """A ticket, a priority, a sampler's state and a row of any shard."""
    root, _ = saved
    path = Series(root / "source").latest()[0]
    for name in (
        "rank-00001-of-00003/storage/.engram/000.bin",
        "rank-00002-of-00003/storage/.engram/tickets.bin",
        "rank-00000-of-00003/rng/000.bin",
        "rank-00002-of-00003/storage/seg/1-0.bin",
    ):
        flip(path / name)
        said = call(path, root / "target", "--ranks", 2, "--lanes", 1, *dry)
        assert said.exit_code == 1
        assert "expected the checksum" in said.output
        assert name in said.output
        assert "plan " not in said.output
        assert not (root / "target").exists()
        flip(path / name)
    said = call(path, root / "target", "--ranks", 2, "--lanes", 1, *dry)
    assert said.exit_code == 0


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_the_folder_of_the_source_is_no_target(saved, dry):
    root, _ = saved
    path = Series(root / "source").latest()[0]
    (root / "link").symlink_to("source")
    before = tree(root)
    for source, target in (
        (root / "source", root / "source"),
        (path, root / "source"),
        (path, path),
        (root / "source", path / "below"),
        (root / "source", root / "link"),
    ):
        said = call(source, target, "--ranks", 2, "--lanes", 1, *dry)
        assert said.exit_code == 2
        assert "expected another folder than that of SOURCE" in said.output
        assert "plan " not in said.output
    assert tree(root) == before
    (root / "file").write_text("")
    said = call(path, root / "file", "--ranks", 2, "--lanes", 1, *dry)
    assert said.exit_code == 2
    assert "expected a new folder, or one of checkpoints" in said.output
