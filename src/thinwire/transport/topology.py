"""Which ranks form a worker: every rank (flat) or every node (hierarchical).

In a hierarchical topology the ranks of a node share a fast link, over which they average their gradients. Each rank
then exchanges one slice of the model with the ranks of other nodes that work on the same slice, compressed, over the
slow link. A flat topology is the same with nodes of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch.distributed.device_mesh import DeviceMesh

from thinwire.transport.peers import Peers

Choice = Literal["flat", "hierarchical", "auto"]


@dataclass(frozen=True)
class Topology:
    """The nodes, each a tuple of ranks of the process group, and the place of this rank."""

    nodes: tuple[tuple[int, ...], ...]
    node: int
    """The index of this rank's node, which is its number as a worker."""
    own_slice: int
    """This rank's position in its node."""
    source: str
    """Where the number of ranks per node comes from, for messages."""
    problem: str | None = None
    """What is wrong with the environment, if anything. The caller raises it after all ranks have compared their
    topologies, so that all of them raise: a rank that raised alone would leave the others waiting."""

    @property
    def workers(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def slices(self) -> int:
        """The number of ranks per node."""
        return len(self.nodes[0])

    @property
    def compresses(self) -> bool:
        """Whether there is a slow link. A single node of several ranks has none."""
        return self.workers > 1 or self.slices == 1

    def owner(self, shard: int) -> int:
        """The rank that merges a shard of a bucket."""
        own_slice, node = divmod(shard, self.workers)
        return self.nodes[node][own_slice]

    def slice_ranks(self) -> list[int]:
        """The ranks that work on the same slice as this one, one per node."""
        return [node[self.own_slice] for node in self.nodes]

    def node_ranks(self) -> list[int]:
        """The ranks of this rank's node."""
        return list(self.nodes[self.node])

    def within_node(self) -> Topology:
        """The topology of an exchange that stays inside the node: the node owns all shards."""
        return Topology((self.nodes[self.node],) * self.workers, self.node, self.own_slice, self.source, self.problem)

    def __str__(self) -> str:
        if self.slices == 1:
            return "flat"
        # With a mesh in another order, ranks have other slices.
        order = [rank for node in self.nodes for rank in node]
        listed = "" if order == sorted(order) else f": {', '.join(map(str, self.nodes))}"
        return f"{self.workers} nodes of {self.slices} ranks{listed}"


def choose(topology: Choice, mesh: DeviceMesh | None, peers: Peers) -> Topology:
    """Choose the topology from the user's arguments and the environment.

    Args:
        topology: "flat", "hierarchical", or "auto": hierarchical if there are several nodes of several ranks.
        mesh: two-dimensional, one row per node; without it LOCAL_WORLD_SIZE, as torchrun sets it, gives the nodes.
        peers: all ranks.

    Raises:
        ValueError: the arguments contradict each other.
    """
    if topology not in get_args(Choice):
        raise ValueError(f"topology={topology!r}: expected 'flat', 'hierarchical' or 'auto'")
    if mesh is not None:
        return _of_mesh(topology, mesh, peers)
    flat = _place(peers, [(rank,) for rank in range(peers.size)], "topology='flat'")
    if topology == "flat" or peers.size == 1:
        return flat
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        if topology == "auto":
            return _place(peers, flat.nodes, "LOCAL_WORLD_SIZE, which is not set")
        return _with_problem(
            flat,
            "topology='hierarchical' needs to know which ranks share a node, but LOCAL_WORLD_SIZE is not set: launch "
            "with torchrun, or give mesh=init_device_mesh('cpu', (nodes, ranks per node))",
            "topology='hierarchical', without LOCAL_WORLD_SIZE",
        )
    source = f"LOCAL_WORLD_SIZE={text}"
    if not text.isdecimal() or int(text) < 1:
        return _with_problem(flat, f"LOCAL_WORLD_SIZE={text!r}: expected the number of ranks on this node", source)
    local_rank = os.environ.get("LOCAL_RANK", "")
    own_rank = peers.ranks()[peers.rank]
    if local_rank.isdecimal() and int(local_rank) != own_rank % int(text):
        return _with_problem(
            flat,
            f"LOCAL_WORLD_SIZE={text} and LOCAL_RANK={local_rank} on rank {own_rank}: ranks are not numbered node by "
            "node, as torchrun does. Give mesh= with one row per node, or use topology='flat'",
            f"LOCAL_WORLD_SIZE={text}, LOCAL_RANK={local_rank} on rank {own_rank}",
        )
    members: dict[int, list[int]] = {}
    for rank, global_rank in enumerate(peers.ranks()):
        members.setdefault(global_rank // int(text), []).append(rank)
    if len({len(ranks) for ranks in members.values()}) > 1:
        listed = ", ".join(str(len(ranks)) for ranks in members.values())
        problem = (
            f"topology={topology!r} with {source}: the nodes have {listed} ranks, and a hierarchical exchange needs "
            "the same number on every node. Start as many everywhere, or use topology='flat'"
        )
        return _with_problem(flat, problem, source)
    if topology == "auto" and len(members) == 1:
        # On one machine there is no slow link. Flat, a trial run there takes the same path as one on several machines.
        return _place(peers, flat.nodes, source)
    return _place(peers, list(members.values()), source)


def _of_mesh(topology: Choice, mesh: DeviceMesh, peers: Peers) -> Topology:
    if topology == "flat":
        raise ValueError("mesh= is given, but topology='flat' has no nodes: leave one of them out")
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions: expected 2, nodes and ranks per node, as made by "
            "init_device_mesh('cpu', (nodes, ranks per node))"
        )
    position = {global_rank: rank for rank, global_rank in enumerate(peers.ranks())}
    rows = mesh.mesh.tolist()
    if sorted(global_rank for row in rows for global_rank in row) != sorted(position):
        raise ValueError(f"mesh has ranks {rows}, the process group {sorted(position)}: they must have the same ranks")
    nodes = [tuple(position[global_rank] for global_rank in row) for row in rows]
    if any(list(line) != sorted(line) for line in (*nodes, *zip(*nodes, strict=True))):
        # torch orders the members of a group by rank, in whatever order they are given.
        raise ValueError(f"mesh has ranks {rows}: they must ascend along both dimensions, as in init_device_mesh")
    source = f"mesh of {len(rows)} x {len(rows[0])}"
    if topology == "auto" and len(nodes) == 1:
        return _place(peers, [(rank,) for rank in range(peers.size)], source)
    return _place(peers, nodes, source)


def _place(peers: Peers, nodes: Sequence[Sequence[int]], source: str) -> Topology:
    node = next(index for index, ranks in enumerate(nodes) if peers.rank in ranks)
    return Topology(tuple(map(tuple, nodes)), node, nodes[node].index(peers.rank), source)


def _with_problem(flat: Topology, problem: str, source: str) -> Topology:
    # Ranks compare sources, so a rank with a problem does not agree with one that is flat on purpose.
    return Topology(flat.nodes, flat.node, flat.own_slice, source, problem)
