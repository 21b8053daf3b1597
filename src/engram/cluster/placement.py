"""On which nodes of a Ray cluster shards are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import ray

Placement = Literal["learners", "spread", "actors"]
#: Of the resource that Ray gives each node by its IP: an actor stays with the machine, also where the node is started again.
_SHARE = 0.001


def checked_placement(placement: object) -> Placement:
    """Raises ``ValueError``: no such placement."""
    if placement not in get_args(Placement):
        raise ValueError(
            f"RayReplayBuffer: placement: expected one of {', '.join(get_args(Placement))}, got {placement!r}."
        )
    return placement  # type: ignore[return-value]


def resources_of(shards: int, placement: Placement) -> list[dict[str, float]]:
    """What each shard asks of its node, so that it is where the placement says.

    ``"learners"``: the node of this program. ``"actors"``: the others, where there are some. ``"spread"``: all in turn.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(
        key=lambda node: (str(node["NodeManagerAddress"]), str(node["NodeID"]))
    )  # as when the cluster starts again
    if placement != "spread":
        chosen = [node for node in nodes if (node["NodeID"] == here) == (placement == "learners")]
        nodes = chosen or nodes
    return [{f"node:{nodes[k % len(nodes)]['NodeManagerAddress']}": _SHARE} for k in range(shards)]


def options_of(given: object, shards: int, placement: Placement) -> list[dict[str, object]]:
    """Of the actor of each shard, as Ray takes them. ``given``: one dict for all, or one for each; None: the default.

    Raises ``TypeError``: no dicts. ``ValueError``: another number of them than of shards.
    """
    each = [given or {}] * shards if given is None or isinstance(given, Mapping) else given
    if not isinstance(each, Sequence) or not all(isinstance(one, Mapping) for one in each):
        raise TypeError(f"RayReplayBuffer: remote_config: expected a dict, or one for each shard, got {given!r:.100}.")
    if len(each) != shards:
        raise ValueError(
            f"RayReplayBuffer: remote_config: expected {shards} dicts, one for each shard, got {len(each)}."
        )
    common = {
        "num_cpus": 1,
        "max_restarts": -1,
        "max_task_retries": -1,
        "concurrency_groups": {"saving": 1, "board": 1},
    }
    options: list[dict[str, object]] = [{**common, **one} for one in each]
    for one, resources in zip(options, resources_of(shards, placement), strict=True):
        if not one.keys() & {"resources", "scheduling_strategy"}:
            one["resources"] = resources
    return options
