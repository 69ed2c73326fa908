"""Whether a saved state fits the ranks of this run, and what to do if it does not."""

from __future__ import annotations

from typing import Literal, get_args

from thinwire.optimizers.optimizer import WireOptimizer

OnMismatch = Literal["error", "average", "reset"]
Nodes = tuple[tuple[int, ...], ...]


def check_policy(on_mismatch: object) -> None:
    """Reject an argument that is not a policy.

    Raises:
        ValueError: naming the argument.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch={on_mismatch!r}: expected 'error', 'average' or 'reset'")


def differences_from(wire: WireOptimizer, nodes: Nodes, bucket_mb: float | None) -> list[str]:
    """The differences between a saved run and this one that prevent an exact resume, for messages.

    Args:
        wire: the optimizer of this run.
        nodes: the ranks of the saved run, by node.
        bucket_mb: as in the saved run.
    """
    differences, size = [], sum(map(len, nodes))
    if size != wire._peers.size:
        differences.append(f"{size} ranks (now {wire._peers.size})")
    elif nodes != wire._topology.nodes:
        differences.append(f"nodes {_in_brackets(nodes)} (now {_in_brackets(wire._topology.nodes)})")
    # For the same class and nodes, either both states depend on the buckets or neither does.
    cut = wire.param_groups[0]["wire_buckets"] != "any"
    if cut and bucket_mb != wire._bucket_mb:
        differences.append(f"bucket_mb={bucket_mb} (now {wire._bucket_mb})")
    return differences


def _in_brackets(nodes: Nodes) -> str:
    """Nodes in a short form: [0 1] [2 3]."""
    return " ".join(f"[{' '.join(map(str, node))}]" for node in nodes)
