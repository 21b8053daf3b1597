"""What a redistribution did, in figures and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engram._words import count
from engram.persist.trajectory_table import count_kinds
from engram.reshard.plan import by_reason, counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from engram.reshard.driver import Reshard


class Lost(NamedTuple):
    """Shards that there are none of."""

    ranks: tuple[int, ...] = ()
    as_of: str | None = None
    """The checkpoint that last had them. None: none did, so what is lost is unknown."""
    episodes: int | None = None
    steps: int | None = None


def reshard_report(made: Reshard, ranks: Sequence[int], lost: Lost = Lost()) -> dict[str, Any]:  # noqa: B008 - a value
    """Episodes and steps: saved, of which kinds, kept, dropped by reason, and truncated; in total and by shard; and what each
    target got.

    Args:
        made: what was done.
        ranks: what those were called that saved the shards.
        lost: shards that were missing.
    """
    plan, shards_there = made.plan, len(made.shards)
    kept = counted(plan.source, plan.steps, shards_there)
    cut = counted(plan.source[plan.truncated], plan.steps[plan.truncated], shards_there)
    shards: list[dict[str, Any]] = [
        {
            "rank": rank,
            "saved": _count(one.source.saved),
            "kinds": count_kinds(one.source.runs, one.source.columns),
            "kept": _count(kept[which]),
            "dropped": by_reason(plan.drops[which]),
            "truncated": _count(cut[which]),
        }
        for which, (rank, one) in enumerate(zip(ranks, made.shards, strict=True))
    ]
    targets = [_load(made, rank) for rank in range(len(made.targets))]
    return {
        "plan": plan.digest,
        **{what: _sum([shard[what] for shard in shards]) for what in shards[0] if what != "rank"},
        "lost": {**lost._asdict(), "ranks": list(lost.ranks)},
        "smallest_rank": min(target["steps"] for target in targets),
        "largest_rank": max(target["steps"] for target in targets),
        "smallest_lane": min(target["smallest_lane"] for target in targets),
        "largest_lane": max(target["largest_lane"] for target in targets),
        "unused": sum(target["unused"] for target in targets),
        "shards": shards,
        "targets": targets,
    }


def _load(made: Reshard, rank: int) -> dict[str, int]:
    target, mine = made.targets[rank], made.plan.rank == rank
    steps = counted(made.plan.lane[mine], made.plan.steps[mine], target.lanes)[:, 1]
    return {
        "rank": rank,
        "lanes": target.lanes,
        "lane_length": target.lane_length,
        "episodes": int(mine.sum()),
        "steps": int(steps.sum()),
        "smallest_lane": int(steps.min()),
        "largest_lane": int(steps.max()),
        "unused": target.capacity - int(steps.sum()),
    }


def said_reshard(dealt: Mapping[str, Any]) -> str:
    """A report in a line."""
    text = f"{_said_counts(dealt)}; from {count(len(dealt['shards']), 'rank')} to {len(dealt['targets'])}"
    lost = dealt["lost"]
    if not lost["ranks"]:
        return text
    ranks = ", ".join(map(str, lost["ranks"]))
    whose = f"the shard of rank {ranks}" if len(lost["ranks"]) == 1 else f"the shards of ranks {ranks}"
    if lost["as_of"] is None:
        return f"{text}; lost with {whose}: unknown how much"
    return f"{text}; lost with {whose}: at {lost['as_of']} that was {said_counts(lost)}"


def reshard_lines(dealt: Mapping[str, Any]) -> Iterator[str]:
    """What became of each shard, and what each target got, in a line each."""
    for shard in dealt["shards"]:
        yield f"shard of rank {shard['rank']}: {_said_counts(shard)}"
    for it in dealt["targets"]:
        yield (
            f"rank {it['rank']}: {said_counts(it)} in {count(it['lanes'], 'lane')} of {count(it['lane_length'], 'row')}, "
            f"{it['smallest_lane']} to {it['largest_lane']} in each; {count(it['unused'], 'row')} unused"
        )
    yield (
        f"{dealt['smallest_rank']} to {count(dealt['largest_rank'], 'step')} in a rank, {dealt['smallest_lane']} to "
        f"{dealt['largest_lane']} in a lane; {count(dealt['unused'], 'row')} unused; plan {dealt['plan']}"
    )


def _said_counts(counts: Mapping[str, Any]) -> str:
    every = {"saved": counts["saved"], "kept": counts["kept"]}
    every |= {f"dropped as {reason}": it for reason, it in counts["dropped"].items() if it["episodes"]}
    if counts["truncated"]["episodes"]:
        every["kept as truncated"] = counts["truncated"]
    return ", ".join(f"{what} {said_counts(it)}" for what, it in every.items())


def said_counts(counts: Mapping[str, int]) -> str:
    """Episodes and steps."""
    return f"{count(counts['episodes'], 'episode')} with {count(counts['steps'], 'step')}"


def _count(pair: NDArray[np.int64]) -> dict[str, int]:
    return {"episodes": int(pair[0]), "steps": int(pair[1])}


def _sum(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of all, added up; also those one level below."""
    return {
        key: sum(one[key] for one in counts) if isinstance(value, int) else _sum([one[key] for one in counts])
        for key, value in counts[0].items()
    }
