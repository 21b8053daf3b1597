"""What the demo found out: a summary and a picture."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from engram import ReplayBuffer
from engram.demo.task import BATCH, SOLVED, WINDOW

if TYPE_CHECKING:
    from pathlib import Path

    from engram.demo.actors import Actor
    from engram.demo.progress import Progress

__all__ = ["plot", "summary", "work"]


def summary(progress: Progress, folder: Path) -> str:
    """Where the store is, what is in it, and what sampling cost."""
    replay = ReplayBuffer.open(folder / "replay")
    store = replay.storage.store  # type: ignore[attr-defined]
    fields = ", ".join(f"{field.name} {list(field.shape)} {field.dtype}" for field in store.schema.fields)
    rows = f"{len(replay)} of {store.capacity} rows, {store.nbytes / 1e6:.2f} MB"
    dropped = replay.stats()["priority_updates_dropped"]
    replay.close()
    ending = (
        f"solved: the mean return of the last {WINDOW} episodes passed {SOLVED:.0f}"
        if progress.solved
        else "not solved"
    )
    lines = [
        f"{ending.capitalize()} after {progress.steps} steps and {len(progress.returns)} episodes.",
        f"Store: {folder / 'replay'}: {rows}: {fields}.",
        f"Go on with it: engram.ReplayBuffer.open({str(folder / 'replay')!r})",
    ]
    if progress.updates:
        sample = statistics.median(progress.sample_us)
        priorities = ""
        spent = sum(progress.sample_us)
        if progress.sampler == "prioritized":
            update = statistics.median(progress.priority_us)
            priorities = f" and updating their priorities {update:.1f} µs"
            spent += sum(progress.priority_us)
        ratio = progress.updates * BATCH / progress.steps
        lines.append(
            f"{progress.sampler.capitalize()} sampling of {BATCH} rows took {sample:.1f} µs{priorities} per update (median), "
            f"{100 * spent / sum(progress.update_us):.1f} % of the update; "
            f"replay ratio {ratio:.0f} (rows sampled per row written)."
        )
        if progress.sampler == "prioritized":
            lines.append(f"Updates dropped because their row was rewritten meanwhile: {dropped:.0f}.")
    return "\n".join(lines)


def work(actors: list[Actor], progress: Progress, stats: dict[str, float], seconds: float) -> str:
    """What each actor wrote, what the learner drew meanwhile, and what that cost."""
    lines = []
    for actor in actors:
        written = [1e6 * row.seconds for row in actor.acknowledged]
        took = f", {statistics.median(written):.0f} µs each (median)" if written else ""
        lines.append(
            f"Actor {actor.number} (lane {actor.lane}, process {actor.pid}): {len(written)} rows, "
            f"{actor.rows_per_s:.0f} rows/s{took}."
        )
    lines.append(
        f"Learner: {progress.updates} updates of {BATCH} rows in {seconds:.0f} s, "
        f"{progress.updates * BATCH / seconds:,.0f} samples/s."
    )
    lines.append(
        f"Rows drawn again because somebody was writing them: {stats['redraws']:.0f}. "
        f"Rows left void by the kill: {stats['void_rows']:.0f}."
    )
    return "\n".join(lines)


def plot(progress: Progress, path: Path) -> Path:
    """Write a PNG: the return of every episode with its mean, and the ages of sampled rows."""
    figure, (curve, ages) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    returns = progress.returns
    curve.plot(range(1, len(returns) + 1), returns, color="0.75", linewidth=1, label="return")
    means = [statistics.fmean(returns[i - WINDOW : i]) for i in range(WINDOW, len(returns) + 1)]
    curve.plot(range(WINDOW, len(returns) + 1), means, label=f"mean of {WINDOW}")
    curve.axhline(SOLVED, color="0.4", linestyle=":", label=f"{SOLVED:.0f}")
    if progress.replaced_at is not None:
        curve.axvline(progress.replaced_at, color="tab:red", linestyle="--", label="process replaced")
    curve.set(xlabel="episode", ylabel="return", title=f"DQN on CartPole-v1, {progress.sampler} sampling")
    curve.legend()
    ages.hist(progress.ages, bins=50)
    ages.set(xlabel="rows written since", ylabel="sampled rows", title="Age of the sampled rows")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
