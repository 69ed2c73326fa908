"""Who is a worker: for every choice of the user and every environment, and what is wrong with some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from thinwire.transport.peers import Peers
from thinwire.transport.topology import Choice, Topology, choose

PAIRS = ((0, 1), (2, 3))


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """torch's own process group without peers: enough to make groups and meshes, and to ask who is who."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def chosen(topology: Choice, size: int, rank: int = 0) -> Topology:
    with world(size, rank):
        return choose(topology, None, Peers.of(None))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


# LOCAL_WORLD_SIZE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "local", "size", "nodes"),
    [
        ("flat", None, 4, ((0,), (1,), (2,), (3,))),
        ("flat", "2", 4, ((0,), (1,), (2,), (3,))),
        ("flat", "3", 4, ((0,), (1,), (2,), (3,))),
        ("flat", "many", 4, ((0,), (1,), (2,), (3,))),
        ("auto", None, 4, ((0,), (1,), (2,), (3,))),
        ("auto", "1", 4, ((0,), (1,), (2,), (3,))),
        ("auto", "2", 4, PAIRS),
        ("auto", "3", 6, ((0, 1, 2), (3, 4, 5))),
        ("auto", "4", 4, ((0,), (1,), (2,), (3,))),  # one machine
        ("auto", "8", 2, ((0,), (1,))),
        ("auto", "many", 1, ((0,),)),  # alone: there is nobody to disagree with
        ("hierarchical", "1", 2, ((0,), (1,))),
        ("hierarchical", "2", 4, PAIRS),
        ("hierarchical", "4", 4, ((0, 1, 2, 3),)),
        ("hierarchical", None, 1, ((0,),)),
    ],
)
def test_nodes_are_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, topology: Choice, local: str | None, size: int, nodes: tuple[tuple[int, ...], ...]
) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    for rank in range(size):
        found = chosen(topology, size, rank)
        assert found.nodes == nodes
        assert found.nodes[found.node][found.own_slice] == rank
        assert found.problem is None
        assert (found.workers, found.slices) == (len(nodes), len(nodes[0]))


@pytest.mark.parametrize("topology", ["auto", "hierarchical"])
@pytest.mark.parametrize("text", ["many", "", "0", "-2", "2.0", " 2"])
def test_a_local_world_size_that_is_no_number_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, topology: Choice, text: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    problem = chosen(topology, 2).problem
    assert problem == f"LOCAL_WORLD_SIZE={text!r}: expected the number of ranks on this node"


@pytest.mark.parametrize("topology", ["auto", "hierarchical"])
@pytest.mark.parametrize(("local", "size", "listed"), [("2", 3, "2, 1"), ("3", 4, "3, 1"), ("4", 10, "4, 4, 2")])
def test_uneven_nodes_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, topology: Choice, local: str, size: int, listed: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    for rank in range(size):
        problem = chosen(topology, size, rank).problem
        assert problem is not None
        assert problem.startswith(f"topology={topology!r} with LOCAL_WORLD_SIZE={local}: the nodes have {listed} ranks")
        assert problem.endswith("or use topology='flat'")


def test_hierarchical_without_a_launcher_is_a_problem() -> None:
    problem = chosen("hierarchical", 2).problem
    assert problem is not None
    assert "LOCAL_WORLD_SIZE is not set: launch with torchrun, or give mesh=" in problem


def test_an_unknown_topology_is_refused() -> None:
    ring: str = "ring"
    with pytest.raises(ValueError, match="topology='ring': expected 'flat', 'hierarchical' or 'auto'"):
        chosen(ring, 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("members", "nodes"),
    [
        ([0, 1, 2, 3], PAIRS),
        ([2, 3, 4, 5], PAIRS),
        ([1, 3, 5], ((0,), (1,), (2,))),
        ([0, 1], ((0,), (1,))),  # they share a node
    ],
)
def test_a_process_group_has_the_nodes_of_its_members(
    monkeypatch: pytest.MonkeyPatch, members: list[int], nodes: tuple[tuple[int, ...], ...]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with world(6, rank=members[-1]):
        group = dist.new_group(members)
        assert isinstance(group, dist.ProcessGroup)
        found = choose("auto", None, Peers.of(group))
    assert found.nodes == nodes
    assert found.nodes[found.node][found.own_slice] == len(members) - 1


def test_members_that_are_unevenly_spread_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with world(4, rank=1):
        group = dist.new_group([1, 2, 3])
        assert isinstance(group, dist.ProcessGroup)
        found = choose("auto", None, Peers.of(group))
    assert found.problem is not None
    assert "the nodes have 1, 2 ranks" in found.problem


# A mesh --------------------------------------------------------------------------------------------------------------


def by_mesh(topology: Choice, ranks: list[int] | list[list[int]], rank: int = 0, size: int = 4) -> Topology:
    with world(size, rank):
        return choose(topology, DeviceMesh("cpu", torch.tensor(ranks)), Peers.of(None))


@pytest.mark.parametrize("topology", ["auto", "hierarchical"])
@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]], ids=str)
def test_a_mesh_has_a_row_a_node(monkeypatch: pytest.MonkeyPatch, topology: Choice, ranks: list[list[int]]) -> None:
    """Whatever the launcher says."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in range(4):
        found = by_mesh(topology, ranks, rank)
        assert found.nodes == tuple(map(tuple, ranks))
        assert found.nodes[found.node][found.own_slice] == rank
        assert found.problem is None


def test_a_mesh_of_one_node_is_flat_unless_asked_for() -> None:
    assert by_mesh("auto", [[0, 1, 2, 3]]).nodes == ((0,), (1,), (2,), (3,))
    assert by_mesh("hierarchical", [[0, 1, 2, 3]]).nodes == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("topology", "ranks", "message"),
    [
        ("flat", [[0, 1], [2, 3]], "mesh= is given, but topology='flat' has no nodes"),
        ("auto", [0, 1, 2, 3], "mesh has 1 dimensions: expected 2, nodes and ranks per node"),
        ("auto", [[[0, 1], [2, 3]]], "mesh has 3 dimensions: expected 2"),
        ("hierarchical", [[0, 1]], r"mesh has ranks \[\[0, 1\]\], the process group \[0, 1, 2, 3\]"),
        ("auto", [[1, 0], [3, 2]], r"mesh has ranks \[\[1, 0\], \[3, 2\]\]: they must ascend along both dimensions"),
        ("auto", [[2, 3], [0, 1]], "they must ascend along both dimensions"),
        ("auto", [[0, 3], [1, 2]], "they must ascend along both dimensions"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_is_refused(topology: Choice, ranks: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_mesh(topology, ranks)


# Places --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_shards_slices_and_nodes_are_consistent(nodes: int, ranks: int, strided: bool) -> None:
    """Rows of consecutive ranks, or of ranks that are `nodes` apart."""
    consecutive = torch.arange(nodes * ranks).view(nodes, ranks)
    rows = consecutive.view(ranks, nodes).t() if strided else consecutive
    grid = tuple(tuple(row) for row in rows.tolist())
    everybody = [Topology(grid, node, own, "here") for node in range(nodes) for own in range(ranks)]
    owners = [everybody[0].owner(shard) for shard in range(nodes * ranks)]
    assert sorted(owners) == list(range(nodes * ranks))
    for topology in everybody:
        assert [topology.owner(shard) for shard in range(nodes * ranks)] == owners
        own_rank = topology.nodes[topology.node][topology.own_slice]
        # A slice's shards are its ranks', in the order of nodes, which is that of torch's groups.
        own_shards = owners[topology.own_slice * nodes : (topology.own_slice + 1) * nodes]
        assert topology.slice_ranks() == own_shards == sorted(own_shards)
        assert topology.slice_ranks()[topology.node] == own_rank
        assert topology.node_ranks()[topology.own_slice] == own_rank
        assert topology.node_ranks() == sorted(topology.node_ranks())
        assert set(topology.slice_ranks()) & set(topology.node_ranks()) == {own_rank}
        assert topology.compresses is (nodes > 1 or ranks == 1)


def test_a_topology_tells_what_it_is() -> None:
    """Checkpoints carry it: who holds which slice must show in it."""
    assert str(Topology(((0,), (1,)), 0, 0, "here")) == "flat"
    assert str(Topology(PAIRS, 0, 0, "here")) == "2 nodes of 2 ranks"
    assert str(Topology(((0, 2), (1, 3)), 0, 0, "here")) != str(Topology(PAIRS, 0, 0, "here"))
