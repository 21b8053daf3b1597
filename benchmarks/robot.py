"""The recorder of robots beside its encoder: how long ``add`` takes, and what is dropped.

    python benchmarks/robot.py --seconds 120

Cameras of 480 × 640 at 30 Hz, beside 14 numbers at 30 Hz, in episodes of ten seconds. A frame is dropped if ``add`` raises since no
place was left; one is late if it could not be recorded within the period of its camera.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time

import numpy as np

from engram import RateLimited, record_robot


def pictures(number: int = 60) -> np.ndarray:
    """Frames of a scene that moves, with the noise of a camera."""
    y, x = np.mgrid[:480, :640]
    noise = np.random.default_rng(0).normal(0, 3, (480, 640, 3))
    frames = []
    for at in range(number):
        scene = np.stack(
            [128 + 80 * np.sin((x + 4 * at) / 37), 128 + 80 * np.cos((y - 3 * at) / 23), (x + y + 5 * at) % 256], -1
        )
        scene[200:280, (8 * at) % 560 : (8 * at) % 560 + 80] = (200, 60, 40)
        frames.append((scene + np.roll(noise, 17 * at, 0)).clip(0, 255).astype(np.uint8))
    return np.stack(frames)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--fps", type=float, default=30)
    parser.add_argument("--room", type=float, default=60, help="seconds of frames that may wait for their video")
    parser.add_argument("--directory", help="where to record; default a temporary folder")
    parser.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True, help="for the last videos")
    parser.add_argument("--encode", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    names = [f"camera_{i}" for i in range(arguments.cameras)]
    features = {name: {"dtype": "video", "shape": (480, 640, 3)} for name in names}
    features["state"] = {"dtype": "float32", "shape": (14,)}
    scene, folder = pictures(), tempfile.mkdtemp(dir=arguments.directory)
    took, late, dropped, waiting, episodes = [], 0, 0, 0, 0
    recorder = record_robot(
        folder + "/robot", features, fps=arguments.fps, room_s=arguments.room, hours=1, encode=arguments.encode
    )
    try:
        period, per_episode = 1 / arguments.fps, round(10 * arguments.fps)
        begin = time.perf_counter()
        for step in range(round(arguments.seconds * arguments.fps)):
            rest = begin + step * period - time.perf_counter()
            if rest > 0:
                time.sleep(rest)
            seconds = (step % per_episode) * period
            rows = [{name: scene[(step + 20 * i) % len(scene)]} for i, name in enumerate(names)] + [
                {"state": np.full(14, step, np.float32)}
            ]
            for row in rows:
                start = time.perf_counter()
                try:
                    recorder.add(row, seconds)
                except RateLimited:
                    dropped += 1
                took.append(time.perf_counter() - start)
            late += time.perf_counter() > begin + (step + 1) * period
            if step % per_episode == per_episode - 1:
                recorder.end_episode()
                episodes, waiting = episodes + 1, max(waiting, recorder.waiting)
        left = recorder.waiting
        done = episodes - left
        ms = np.sort(np.array(took)) * 1e3
        result = {
            "cameras": arguments.cameras,
            "fps": arguments.fps,
            "seconds": arguments.seconds,
            "adds": len(ms),
            **{f"add_p{p:g}_ms": round(float(np.percentile(ms, p)), 3) for p in (50, 99, 99.9, 100)},
            "dropped": dropped,
            "late_steps": late,
            "episodes": episodes,
            "most_episodes_waiting": waiting,
            "waiting_at_the_end": left,
            "videos_made": done * len(names),
            "kept_raw": recorder.kept,
            "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "kernel": platform.release()},
        }
        print(json.dumps(result, indent=1), flush=True)
        if arguments.wait:
            recorder.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
