"""Data sets of LeRobot's format v3.0, written and read by PyArrow, PyAV and plain loops."""

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS, KEY = 10, "observation.images.front"
SHAPE = (48, 64, 3)


def level(episode, step):
    """The brightness of a frame: no two frames of a data set have the same one, and neighbours are 3 levels apart."""
    return (episode * 41 + step * 3) % 250


def frame(episode, step):
    return np.full(SHAPE, level(episode, step), np.uint8)


def rows(numbers, lengths, seed=0):
    """Columns of LeRobot's."""
    generator, n = np.random.default_rng(seed), sum(lengths)
    frames = np.concatenate([np.arange(length) for length in lengths])
    return {
        "observation.state": generator.random((n, 3), np.float32),
        "action": generator.random((n, 2), np.float32),
        "grid": generator.integers(0, 9, (n, 2, 2)),
        "success": generator.random(n) < 0.5,
        "timestamp": (frames / FPS).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.repeat(numbers, lengths),
        "index": np.arange(n),
        "task_index": np.repeat(np.arange(len(numbers)) % 2, lengths),
    }


def table(columns):
    found = {}
    for name, column in columns.items():
        values = pa.array(column.reshape(-1))
        for size in reversed(column.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        found[name] = values
    return pa.table(found)


def video(path, frames):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("libx264", rate=Fraction(FPS), options={"crf": "4", "g": "5"})
        stream.height, stream.width, stream.pix_fmt = *SHAPE[:2], "yuv420p"
        for one in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        file.mux(stream.encode())


def decoded(path):
    """The mean level of each frame of a video, by its time in frames."""
    with av.open(str(path)) as file:
        return {
            round(float(one.pts * one.time_base) * FPS): one.to_ndarray(format="rgb24").mean()
            for one in file.decode(video=0)
        }


def chunk(folder, kind, file, suffix):
    path = folder / kind / f"chunk-000/file-{file:03d}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(folder, numbers, lengths, files=None, frames=True, **changes):
    """A data set. ``files``: in which file each episode lies. ``changes``: columns, or entries of info.json, in place of its own."""
    files, columns = files or [0] * len(numbers), rows(numbers, lengths)
    columns |= {name.replace("__", "."): changes.pop(name) for name in [*changes] if name.replace("__", ".") in columns}
    ends = np.cumsum(lengths)
    episodes, seen = [], dict.fromkeys(files, 0)
    for number, length, end, file in zip(numbers, lengths, ends, files, strict=True):
        row = {"episode_index": number, "tasks": ["a"], "length": length}
        row |= {
            "data/chunk_index": 0,
            "data/file_index": file,
            "dataset_from_index": end - length,
            "dataset_to_index": end,
        }
        if frames:
            begin = seen[file] / FPS
            row |= {f"videos/{KEY}/chunk_index": 0, f"videos/{KEY}/file_index": file}
            row |= {f"videos/{KEY}/from_timestamp": begin, f"videos/{KEY}/to_timestamp": begin + length / FPS}
            seen[file] += length
        episodes.append(row)
    for file in dict.fromkeys(files):
        there = np.repeat(np.array(files) == file, lengths)
        part = {name: column[there] for name, column in columns.items()}
        pq.write_table(table(part), chunk(folder, "data", file, "parquet"), row_group_size=4)
        if frames:
            mine = [(n, length) for n, length, one in zip(numbers, lengths, files, strict=True) if one == file]
            video(chunk(folder, f"videos/{KEY}", file, "mp4"), (frame(n, step) for n, k in mine for step in range(k)))
    pq.write_table(pa.Table.from_pylist(episodes), chunk(folder, "meta/episodes", 0, "parquet"))
    pq.write_table(pa.table({"task_index": [1, 0], "task": ["lift", "push"]}), folder / "meta/tasks.parquet")
    features = {
        name: {"dtype": str(column.dtype), "shape": [*(column.shape[1:] or (1,))], "names": None}
        for name, column in columns.items()
    }
    if frames:
        features[KEY] = {"dtype": "video", "shape": [*SHAPE], "names": ["height", "width", "channels"]}
    info = {"codebase_version": "v3.0", "fps": FPS, "features": features}
    info |= {"total_episodes": len(numbers), "total_frames": int(ends[-1]), "total_tasks": 2}
    (folder / "meta/info.json").write_text(json.dumps(info | changes))
    return columns


def read(folder):
    """Info, episodes and columns of a data set, by PyArrow alone."""
    folder = Path(folder)
    info = json.loads((folder / "meta/info.json").read_text())
    episodes = pq.read_table(folder / "meta/episodes").to_pylist()
    tables = [pq.read_table(path) for path in sorted((folder / "data").rglob("*.parquet"))]
    columns = {
        name: np.array([one for each in tables for one in each[name].to_pylist()]) for name in tables[0].column_names
    }
    return info, episodes, columns
