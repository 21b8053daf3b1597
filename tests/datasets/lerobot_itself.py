"""LeRobot's own data set code, in a process of its own: ``write FOLDER`` records a data set, ``read FOLDER FILE`` saves what it reads.

``install FOLDER`` makes what pip has put there run beside our torch, on Python 3.11: LeRobot's five modules in the syntax of Python 3.12
for generic classes and aliases are rewritten, not their code, and torchvision's operators, of another build, are declared.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

FPS, KEY, LENGTHS = 10, "observation.images.front", [7, 12, 5]


def install(folder):
    for path in (Path(folder) / "lerobot").rglob("*.py"):
        text, found = path.read_text(), []

        def generic(match):
            kind, name, parameters, bases = match.groups()
            names = [one.split(":")[0].strip() for one in parameters.split(",")]
            found.extend(names)
            if kind == "def":
                return f"def {name}("
            inherited = [*filter(None, [(bases or "()")[1:-1], f'__import__("typing").Generic[{", ".join(names)}]'])]
            return f"class {name}({', '.join(inherited)}):"

        new = re.sub(r"^type (\w+) = ", r"\1 = ", text, flags=re.MULTILINE)
        new = re.sub(r"^(class) (\w+)\[([^\]]+)\](\([^)]*\))?:", generic, new, flags=re.MULTILINE)
        new = re.sub(r"^(def) (\w+)\[([^\]]+)\]()\(", generic, new, flags=re.MULTILINE)
        names = "".join(f'{name} = __import__("typing").TypeVar("{name}")\n' for name in found)
        new = re.sub(r"^(?=import |from (?!__future__))", names, new, count=1, flags=re.MULTILINE)
        if new != text:
            path.write_text(new)


def lerobot_dataset():
    library = torch.library.Library("torchvision", "DEF")
    declared = Path(find_spec("torchvision").origin).with_name("_meta_registrations.py").read_text()
    for name in {"nms", "qnms", *re.findall(r"torchvision::(\w+)", declared)}:
        library.define(f"{name}(Tensor boxes) -> Tensor")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    LeRobotDataset.engram_keeps = library
    return LeRobotDataset


def write(folder):
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (1,), "names": None},
        "grid": {"dtype": "int64", "shape": (2, 3), "names": None},
        "success": {"dtype": "bool", "shape": (1,), "names": None},
        KEY: {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    }
    dataset = lerobot_dataset().create("tests/small", FPS, features, root=folder)
    generator = np.random.default_rng(0)
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            frame = {"observation.state": generator.random(3, np.float32), "action": generator.random(1, np.float32)}
            frame |= {"grid": generator.integers(0, 9, (2, 3)), "success": np.array([step % 2 == 0])}
            frame[KEY] = np.full((64, 96, 3), 20 * episode + 5 * step, np.uint8)
            dataset.add_frame({**frame, "task": f"task {episode % 2}"})
        dataset.save_episode()
    dataset.finalize()


def read(folder, file):
    dataset = lerobot_dataset()("tests/small", root=folder, video_backend="pyav", return_uint8=True)
    items = [dataset[n] for n in range(len(dataset))]
    stats = {
        f"{name}/{key}": np.asarray(value) for name, one in dataset.meta.stats.items() for key, value in one.items()
    }
    np.savez(
        file,
        **{f"row/{key}": np.stack([np.asarray(one[key]) for one in items]) for key in items[0]},
        **{f"stats/{key}": value for key, value in stats.items()},
    )


if __name__ == "__main__":
    {"install": install, "write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
