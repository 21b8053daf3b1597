"""Rows that refer to the videos of a data set. The level of a frame says of which episode and step it is."""

import io
import json
import pickle
import threading

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from engram import DatasetError, IncompatibleStore, RandomSampler, ReplayBuffer, Window
from engram.datasets import VideoFrames, from_lerobot, from_numpy, to_lerobot
from engram.env.video import Reader
from tests import fresh
from tests.datasets import lerobot_data as data
from tests.datasets.episodes import files, flat, same

NUMBERS, LENGTHS, FILES = [0, 1, 2, 5], [7, 12, 1, 9], [0, 0, 1, 1]
LEVELS = [data.level(number, step) for number, length in zip(NUMBERS, LENGTHS, strict=True) for step in range(length)]
CAMERA = ("observation", "images", "front")


@pytest.fixture
def dataset(tmp_path):
    data.write(tmp_path / "set", NUMBERS, LENGTHS, FILES)
    return tmp_path / "set"


def frames_of(batch):
    return batch["observation"]["images"]["front"]


def levels(frames):
    return frames.to(torch.float64).mean((-3, -2, -1))


def near(frames, rows):
    expected = torch.tensor([LEVELS[row] for row in rows.flatten().tolist()]).reshape(rows.shape)
    return bool(((levels(frames) - expected).abs() < 1.4).all())


def test_rows_hold_a_file_and_a_time(dataset, tmp_path):
    with from_lerobot(dataset, tmp_path / "data", video="reference") as rb:
        rows = flat(rb.storage[:])
    starts = [0, 7, 0, 1]
    expected = [
        [file, (start + step) / data.FPS]
        for file, start, length in zip(FILES, starts, LENGTHS, strict=True)
        for step in range(length)
    ]
    assert np.allclose(rows[CAMERA], expected, atol=1e-6)
    assert rows["observation", "state"].tolist() == data.rows(NUMBERS, LENGTHS)["observation.state"].tolist()


def test_batches_hold_the_frames_of_their_rows(dataset, tmp_path):
    rb = from_lerobot(dataset, tmp_path / "data", video="reference", batch_size=40)
    for _ in range(3):
        batch, info = rb.sample(return_info=True)
        frames, rows = frames_of(batch), torch.as_tensor(info["index"])
        assert (frames.dtype, frames.shape) == (torch.uint8, (40, *data.SHAPE))
        assert near(frames, rows)
        assert near(frames_of(batch["next"]), rows + 1)  # rows without a following one are not drawn
    rb.close()


def test_frames_are_those_of_a_decoded_import(dataset, tmp_path):
    with from_lerobot(dataset, tmp_path / "decoded") as rb:
        expected = flat(rb[:])[CAMERA]
    with from_lerobot(dataset, tmp_path / "data", video="reference", batch_size=64) as rb:
        batch, info = rb.sample(return_info=True)
    assert (frames_of(batch).numpy() == expected[np.asarray(info["index"])]).all()


def test_windows_by_time(dataset, tmp_path):
    from_lerobot(dataset, tmp_path / "data", video="reference").close()
    unit = Window(deltas={CAMERA: [-0.2, 0.0, 0.1]}, tolerance=0.01)
    rb = ReplayBuffer.open(
        tmp_path / "data",
        readonly=True,
        sampler=RandomSampler(),
        sample_unit=unit,
        transform=VideoFrames(tmp_path / "data"),
        batch_size=30,
    )
    batch, info = rb.sample(return_info=True)
    first = np.cumsum([0, *LENGTHS])
    rows = torch.empty(30, 3, dtype=torch.int64)
    for place, row in enumerate(torch.as_tensor(info["index"]).tolist()):
        episode = int(np.searchsorted(first, row, side="right")) - 1
        for at, off in enumerate((-2, 0, 1)):
            rows[place, at] = min(max(row + off, first[episode]), first[episode + 1] - 1)
    assert frames_of(batch).shape == (30, 3, *data.SHAPE)
    assert near(frames_of(batch), rows)
    rb.close()


@pytest.mark.parametrize("keys", [2, 5, 250])
def test_any_order_of_times_gives_the_same_frames(tmp_path, keys):
    """Against one read from the first frame to the last, by PyAV alone. The video has frames that depend on later ones."""
    with av.open(str(tmp_path / "x.mp4"), "w") as file:
        stream = file.add_stream("libx264", rate=10, options={"g": str(keys), "bf": "3", "crf": "4"})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for step in range(60):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(data.frame(0, step), format="rgb24")))
        file.mux(stream.encode())
    with av.open(str(tmp_path / "x.mp4")) as file:
        expected = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len({int(frame.mean()) for frame in expected}) == 60
    reader, generator = Reader(tmp_path / "x.mp4"), np.random.default_rng(keys)
    for step in [*generator.integers(0, 60, 150).tolist(), 59, 0, 0, 59, 30]:
        assert (reader.at(step / 10, 0.05) == expected[step]).all()
        assert reader.at(6.2, 0.05) is None or step != 59
    assert reader.count == 60


@pytest.mark.parametrize(("keys", "most"), [(2, 1.5), (250, 1.5)])
def test_windows_in_order_of_time_decode_few_frames_twice(tmp_path, keys, most):
    """Also where one key frame is far from the next: the video goes on where the last batch ended."""
    video = tmp_path / "x.mp4"
    with av.open(str(video), "w") as file:
        stream = file.add_stream("libx264", rate=10, options={"g": str(keys)})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for step in range(200):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(data.frame(0, step), format="rgb24")))
        file.mux(stream.encode())
    data.write(tmp_path / "set", [0], [200])
    video.replace(data.chunk(tmp_path / "set", f"videos/{data.KEY}", 0, "mp4"))
    from_lerobot(tmp_path / "set", tmp_path / "data", video="reference").close()
    transform = VideoFrames(tmp_path / "data")
    for first in range(1, 190, 8):  # windows of two frames, eight in a batch
        times = torch.arange(first, first + 8).view(-1, 1) / data.FPS + torch.tensor([-0.1, 0.0])
        refs = torch.stack([torch.zeros(8, 2), times], -1).double()
        frames = frames_of(transform.forward({"observation": {"images": {"front": refs}}}))
        expected = [[data.level(0, step - 1), data.level(0, step)] for step in range(first, first + 8)]
        assert ((levels(frames) - torch.tensor(expected)).abs() < 1.6).all()
    assert transform.decoded <= most * transform.delivered
    assert transform.delivered == 24 * 16


def test_without_order_no_more_than_from_a_key_frame_on(dataset, tmp_path):
    rb = from_lerobot(dataset, tmp_path / "data", video="reference", batch_size=16)
    rb.append_transform(second := VideoFrames(tmp_path / "data"))
    rb.close()
    generator = np.random.default_rng(3)
    for _ in range(20):
        second.frames(0, [float(generator.integers(0, 19)) / data.FPS])
    assert second.delivered == 20
    assert second.decoded <= 20 * (5 + 3)  # a key frame every five, and those that the decoder holds back


def test_threads_and_copies(dataset, tmp_path):
    from_lerobot(dataset, tmp_path / "data", video="reference").close()
    transform, wrong = VideoFrames(tmp_path / "data"), []

    def read(seed):
        for step in np.random.default_rng(seed).integers(0, 19, 40).tolist():
            level = transform.frames(0, [step / data.FPS])[0].mean()
            if abs(level - LEVELS[step]) > 1.4:
                wrong.append((step, level))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert transform.delivered == 160
    again = pickle.loads(pickle.dumps(transform))
    assert abs(again.frames(1, [0.0])[0].mean() - LEVELS[19]) < 1.4


def test_a_forked_process_reads_by_itself(dataset, tmp_path):
    code = """
import gc, os
from engram.datasets import VideoFrames
transform = VideoFrames(directory)
mine = transform.frames(0, [0.3])[0].mean()
child = os.fork()
if not child:
    for step in range(18, -1, -1):
        transform.frames(0, [step / 10])
    gc.collect()  # of the readers that the parent has open
    os._exit(transform.delivered - 20)
theirs = os.waitpid(child, 0)[1]
print(theirs, [round(float(transform.frames(0, [step / 10])[0].mean())) for step in range(19)])
"""
    from_lerobot(dataset, tmp_path / "data", video="reference").close()
    status, found = fresh.run(code, directory=str(tmp_path / "data")).split(" ", 1)
    assert status == "0"
    assert np.abs(np.array(eval(found)) - LEVELS[:19]).max() <= 2


#: Encodings that show frames in another order than they are decoded in, some before the key frame that begins their group.
ENCODED = {
    "closed groups": ("libx264", {"g": "12"}),
    "short groups": ("libx264", {"g": "2"}),
    "open groups": ("libx264", {"g": "12", "x264-params": "open-gop=1"}),
    "HEVC": ("libx265", {"g": "12", "x265-params": "log-level=none"}),
    "HEVC, short groups": ("libx265", {"g": "2", "x265-params": "log-level=none"}),
    "one group": ("libx265", {"x265-params": "log-level=none"}),
    "MPEG-4": ("mpeg4", {"bf": "2", "g": "12", "qscale": "2"}),
}


@pytest.mark.parametrize("how", ENCODED)
def test_each_frame_is_found_however_a_video_is_encoded(how, tmp_path):
    codec, options = ENCODED[how]
    path, rate, count = tmp_path / "video.mp4", 30, 60
    with av.open(str(path), "w", format="mp4") as file:
        stream = file.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(count):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((64, 64, 3), 4 * number, np.uint8))))
        file.mux(stream.encode())
    with av.open(str(path)) as file:  # the oracle: one after the other
        truth = [(it.pts * float(it.time_base), it.to_ndarray(format="rgb24")) for it in file.decode(video=0)]
    assert len(truth) == count
    in_order, random = range(count), np.random.default_rng(5).permutation(count)
    for order in (in_order, range(0, count, 3), range(37, count), random, [0, 59, 58, 0]):
        reader = Reader(path)
        for number in order:
            time, expected = truth[number]
            assert np.array_equal(reader.at(time, 0.5 / rate), expected), (number, order)
        if order is in_order:
            assert reader.decoded == count
    for number, (time, expected) in enumerate(truth):
        assert np.array_equal(Reader(path).at(time, 0.5 / rate), expected), number
    assert reader.at(truth[-1][0] + 1 / rate, 0.5 / rate) is None


def test_many_videos_are_not_open_at_once(tmp_path):
    numbers = [*range(20)]
    data.write(tmp_path / "set", numbers, [2] * 20, numbers)
    from_lerobot(tmp_path / "set", tmp_path / "data", video="reference").close()
    transform = VideoFrames(tmp_path / "data")
    for _ in range(2):
        for number in numbers:
            assert abs(transform.frames(number, [0.1])[0].mean() - data.level(number, 1)) < 1.4
    assert len(transform._open) == 16


def test_another_way_with_videos_is_another_import(dataset, tmp_path):
    from_lerobot(dataset, tmp_path / "one", video="reference").close()
    from_lerobot(dataset, tmp_path / "two").close()
    with pytest.raises(IncompatibleStore, match="of another data set"):
        from_lerobot(dataset, tmp_path / "one")
    with pytest.raises(IncompatibleStore, match="of another data set"):
        from_lerobot(dataset, tmp_path / "two", video="reference")
    with pytest.raises(ValueError, match="from_lerobot: video: expected"):
        from_lerobot(dataset, tmp_path / "three", video="yes")
    with pytest.raises(DatasetError, match="VideoFrames: .*expected an import with video='reference'"):
        VideoFrames(tmp_path / "two")


@pytest.mark.parametrize("damage", ["lost", "cut", "short"])
def test_videos_that_are_damaged_before(dataset, tmp_path, damage):
    file = data.chunk(dataset, f"videos/{data.KEY}", 1, "mp4")
    if damage == "lost":
        file.unlink()
        with pytest.raises(FileNotFoundError, match="file-001.mp4"):
            from_lerobot(dataset, tmp_path / "data", video="reference")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(DatasetError, match=r"file-001.mp4: expected (whole frames|a frame at)"):
            from_lerobot(dataset, tmp_path / "data", video="reference")
    else:
        data.video(file, [data.frame(2, 0)] * 9)
        with pytest.raises(DatasetError, match="file-001.mp4: expected 10 frames, got 9: it has fewer than rows"):
            from_lerobot(dataset, tmp_path / "data", video="reference")
        assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("damage", ["lost", "cut", "short"])
def test_videos_that_are_damaged_afterwards(dataset, tmp_path, damage):
    from_lerobot(dataset, tmp_path / "data", video="reference").close()
    file, transform = data.chunk(dataset, f"videos/{data.KEY}", 1, "mp4"), VideoFrames(tmp_path / "data")
    before, said = file.read_bytes(), {"lost": "a video, which is not there. root= says", "cut": "a whole video"}
    if damage == "lost":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(before[: len(before) // 2])
    else:
        data.video(file, [data.frame(2, 0)] * 3)
    with pytest.raises(DatasetError, match=rf"VideoFrames: .*file-001.mp4: expected {said.get(damage, 'a whole')}"):
        transform.frames(1, [0.0, 0.9])
    file.write_bytes(before)
    assert abs(transform.frames(1, [0.9])[0].mean() - LEVELS[-1]) < 1.4
    with pytest.raises(DatasetError, match="VideoFrames: expected the number of a file below 2"):
        transform.frames(7, [0.0])


def test_a_data_set_that_was_moved(dataset, tmp_path):
    from_lerobot(dataset, tmp_path / "data", video="reference").close()
    dataset.rename(tmp_path / "elsewhere")
    transform = VideoFrames(tmp_path / "data", root=tmp_path / "elsewhere")
    assert abs(transform.frames(0, [0.0])[0].mean() - LEVELS[0]) < 1.4


def test_the_export_holds_frames(dataset, tmp_path):
    from_lerobot(dataset, tmp_path / "data", video="reference").close()
    to_lerobot(tmp_path / "data", tmp_path / "out")
    found = data.decoded(data.chunk(tmp_path / "out", f"videos/{data.KEY}", 0, "mp4"))
    assert [*found] == [*range(len(LEVELS))]
    assert np.abs(np.array([*found.values()]) - LEVELS).max() < 3


DIE = """
import os, signal
from engram.datasets import from_lerobot, importing, tables
tables.BLOCK_BYTES = 600
write, done = importing.Note.write, 0
def dying(self, folder):
    global done
    done += 1
    if before and done == at:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, folder)
    if not before and done == at:
        os.kill(os.getpid(), signal.SIGKILL)
importing.Note.write = dying
from_lerobot(source, directory, video="reference").close()
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_killed_import_goes_on(dataset, tmp_path, before):
    from_lerobot(dataset, tmp_path / "whole", video="reference").close()
    deaths = 0
    for at in (1, 2, 3, 2, 0):
        program = fresh.start(DIE, source=str(dataset), directory=str(tmp_path / "data"), before=before, at=at)
        status = program.wait()
        assert status in (0, -9), program.err
        deaths += status == -9
    assert deaths >= 3
    assert status == 0
    assert files(tmp_path / "data") == files(tmp_path / "whole")


def test_frames_of_arrays_are_no_references(tmp_path):
    from_numpy({"obs": np.zeros((2, 2)), "episode": np.zeros(2, int)}, tmp_path / "data").close()
    with pytest.raises(DatasetError, match="expected an import with video='reference', got one without"):
        VideoFrames(tmp_path / "data")


def images(folder, change=bytes):
    """A data set whose camera is a column of images, encoded by Pillow; and their pixels."""
    columns = data.write(folder, [0, 1], [4, 3], frames=False)
    pixels = np.random.default_rng(0).integers(0, 255, (7, 8, 10, 3), np.uint8)
    encoded = []
    for one in pixels:
        Image.fromarray(one).save(file := io.BytesIO(), "PNG")
        encoded.append({"bytes": change(file.getvalue()), "path": None})
    table = data.table(columns).append_column(data.KEY, pa.array(encoded))
    pq.write_table(table, data.chunk(folder, "data", 0, "parquet"))
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][data.KEY] = {"dtype": "image", "shape": [8, 10, 3], "names": None}
    (folder / "meta/info.json").write_text(json.dumps(info))
    return pixels


@pytest.mark.parametrize("video", ["decode", "reference"])
def test_images_in_tables(tmp_path, video):
    pixels = images(tmp_path / "set")
    with from_lerobot(tmp_path / "set", tmp_path / "data", video=video) as rb:
        assert same(flat(rb.storage[:])[CAMERA], pixels)
        assert rb["collector", "traj_ids"].tolist() == [0] * 4 + [1] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw[:40], "an image of 'observation.images.front': expected whole frames"),
        (lambda raw: None, "column 'observation.images.front': expected images in the table"),
    ],
)
def test_images_that_cannot_be_decoded(tmp_path, change, said):
    images(tmp_path / "set", change)
    with pytest.raises(DatasetError, match=said):
        from_lerobot(tmp_path / "set", tmp_path / "data")
