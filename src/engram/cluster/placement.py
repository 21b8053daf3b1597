"""On which nodes of a Ray cluster shards are kept."""

from __future__ import annotations

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
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
    if placement != "spread":
        chosen = [node for node in nodes if (node["NodeID"] == here) == (placement == "learners")]
        nodes = chosen or nodes
    return [{f"node:{nodes[k % len(nodes)]['NodeManagerAddress']}": _SHARE} for k in range(shards)]
