"""``python -m benchmarks.learning``: the examples learn, as CleanRL's files do. Saves curves and draws them.

Each example of ``CURVES`` runs with three seeds. So does CleanRL's file of the same algorithm with the same hyper-parameters, where its
package is installed: with the buffer that it imports, and with engram in its place (``bench_cleanrl``). A curve is the mean return
of the episodes that ended in each twentieth of the run. `r2d2`'s is how often it is right, of 512 games after each twentieth, in %.
"""

import concurrent.futures
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks import bench_cleanrl

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULTS = Path(__file__).parent / "results"
#: What is trained: its environment, and for how many steps.
CURVES = {
    "dqn": ("CartPole-v1", 50_000),
    "c51": ("CartPole-v1", 50_000),
    "rainbow": ("CartPole-v1", 50_000),
    "td3": ("Pendulum-v1", 8_000),
    "sac": ("Pendulum-v1", 8_000),
    "dqn_atari": ("catch, 84 × 84 pixels", 10_000),
    "r2d2": ("a game of memory, right in %", 400),
}
SEEDS, PARTS = (1, 2, 3), 20
#: Who trains: the example, or CleanRL's file with a buffer, and the colour of the curve.
COLOURS = {"the example": "#0072b2", "CleanRL": "#e69f00", "CleanRL with engram": "#009e73"}
BUFFERS = {"CleanRL": "SB3", "CleanRL with engram": "engram"}


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(CURVES)), help="Run only this one; repeatable.")
@click.option("--draw", is_flag=True, help="Run nothing: draw what is saved.")
@click.option("--jobs", type=int, default=1, help="Runs at a time.")
def main(only: tuple[str, ...], draw: bool, jobs: int) -> None:
    path = RESULTS / "learning.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for name in () if draw else only or CURVES:
            env, steps = CURVES[name]
            sides = ["the example"]
            if name in bench_cleanrl.SCRIPTS and bench_cleanrl.folder() is not None:
                sides += BUFFERS if name in bench_cleanrl.STEPS else ["CleanRL"]
            runs = {side: [pool.submit(_returns, name, side, steps, seed) for seed in SEEDS] for side in sides}
            curves = {side: [curve(run.result(), steps) for run in each] for side, each in runs.items()}
            found[name] = {"env": env, "steps": steps, "seeds": SEEDS, "curves": curves}
            path.write_text(json.dumps({key: found[key] for key in CURVES if key in found}, indent=1) + "\n")
            click.echo(f"{name}: {'; '.join(f'{side} {summary(each)}' for side, each in curves.items())}")
    click.echo(f"Saved: {path}, {_draw(found)}")


def curve(returns: list[tuple[int, float]], steps: int) -> list[float | None]:
    """The mean return of the episodes that ended in each part of the run; None where none did."""
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for step, value in returns:
        parts[min(PARTS, -(-step * PARTS // steps)) - 1].append(value)
    return [round(sum(part) / len(part), 2) if part else None for part in parts]


def summary(curves: list[list[float | None]]) -> str:
    """The best part of each seed's curve, and the last one."""
    best = [max(value for value in one if value is not None) for one in curves]
    last = [next(value for value in reversed(one) if value is not None) for one in curves]
    return f"best {', '.join(f'{value:.0f}' for value in best)}, last {', '.join(f'{value:.0f}' for value in last)}"


def _returns(name: str, side: str, steps: int, seed: int) -> list[tuple[int, float]]:
    if side in BUFFERS:
        return [tuple(one) for one in bench_cleanrl.apart(name, (BUFFERS[side],), steps, seed)["returns"]]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", str(steps), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [
        (int(step), float(value))
        for step, value in re.findall(
            r"^step (\d+)(?:: return|, \d+ s: right in) ([^\s%]+)%?$", done.stdout, re.MULTILINE
        )
    ]


def _draw(found: dict[str, Any]) -> Path:
    """``results/learning.png``: the mean of the seeds, and from the lowest to the highest of them."""
    import matplotlib as mpl

    mpl.use("agg")
    import numpy as np
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(16, 6.6))
    axes.flat[-1].axis("off")
    for axis, name in zip(axes.flat, CURVES, strict=False):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(f"{name}: {CURVES[name][0]}", fontsize=11)
        if name not in found:
            continue
        ends = np.arange(1, PARTS + 1) * found[name]["steps"] / PARTS
        for side, curves in found[name]["curves"].items():
            values = np.array(curves, float)
            known = ~np.isnan(values).any(0)
            axis.plot(ends[known], values.mean(0)[known], color=COLOURS[side], label=side)
            low, high = values.min(0)[known], values.max(0)[known]
            axis.fill_between(ends[known], low, high, color=COLOURS[side], alpha=0.18, lw=0)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(frameon=False, loc="best", fontsize=8)
    figure.supylabel("return of an episode", fontsize=10)
    figure.supxlabel("steps; lines: mean of the seeds; areas: lowest to highest of them", fontsize=10)
    figure.tight_layout()
    path = RESULTS / "learning.png"
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
