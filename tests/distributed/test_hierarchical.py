"""The worker is the node: every law once more, for nodes of several ranks.

Processes are what costs time here, so a test that compares many runs makes them one after another in the same ranks.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import (
    MANY_CASES_SECONDS,
    Digest,
    Training,
    brain_net,
    digest,
    environment,
    half_net,
    run_nodes,
    token_loss,
    token_net,
    train,
    train_each,
)
from tests.distributed.scenarios import (
    SHAPES,
    Gradients,
    Scenario,
    assert_it_is_the_oracle,
    mean_of_node,
    noisy,
    rows_untouched,
    run_birder,
    sometimes_nonfinite,
    stop_and_return,
)
from tests.distributed.test_bytes import STEPS as MEASURED_STEPS
from tests.distributed.test_bytes import measure
from tests.distributed.test_state_dict import Case, Run, stop_and_resume
from tests.harness import private_network, run_ranks, run_ranks_expecting_errors
from thinwire.testbed import TestbedUnavailable

HIERARCHICAL: dict[str, Any] = {"topology": "hierarchical"}

# Law 3: the oracle ---------------------------------------------------------------------------------------------------


def absent_at_random(step: int, rank: int, ranks: int, shapes: Sequence[tuple[int, ...]]) -> Gradients:
    """Every rank lacks every parameter in two steps of three: some nodes lack it, some have it on one rank only."""
    absent = np.random.default_rng((7, step, rank)).random(len(shapes)) < 2 / 3
    return [None if gone else g for gone, g in zip(absent, noisy(step, rank, ranks, shapes), strict=True)]


SMALL = (((7, 9), (70,), (), (12, 5)),)
SCENARIOS = {
    "defaults": Scenario(),
    "majority": Scenario(options={"downlink": "majority"}),
    "votes": Scenario(options={"downlink": "votes"}),
    "amsgrad, maximize": Scenario(options={"amsgrad": True, "maximize": True}),
    "absent at random": Scenario(absent_at_random),
    "absent at random, votes, small buckets": Scenario(
        absent_at_random, options={"downlink": "votes", "bucket_mb": 0.0005}
    ),
    "rows untouched": Scenario(rows_untouched),
    "sometimes nonfinite": Scenario(sometimes_nonfinite),
    "sometimes nonfinite, amsgrad": Scenario(sometimes_nonfinite, options={"amsgrad": True}),
    "many buckets": Scenario(rows_untouched, options={"bucket_mb": 0.0005}),
    "two groups": Scenario(shapes=(SHAPES[:2], SHAPES[2:]), lrs=(0.01, 0.03), decays=(0.0, 0.5)),
    "stop and return": Scenario(stop_and_return, steps=300, shapes=SMALL),
}
FEW = ("majority", "votes", "absent at random, votes, small buckets", "sometimes nonfinite")


def run_scenarios(rank: int, world_size: int, names: Sequence[str]) -> list[dict[str, Any]]:
    return [run_birder(rank, world_size, SCENARIOS[name], **HIERARCHICAL) for name in names]


@pytest.mark.parametrize(
    ("nodes", "ranks", "names"),
    [
        (2, 2, tuple(SCENARIOS)),
        (1, 3, FEW),
        (3, 2, FEW),
        pytest.param(1, 2, tuple(SCENARIOS), marks=pytest.mark.long),
        pytest.param(2, 1, FEW, marks=pytest.mark.long),
        pytest.param(2, 3, FEW, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_the_run_is_the_oracle_with_nodes_as_workers(nodes: int, ranks: int, names: Sequence[str]) -> None:
    results = run_nodes(run_scenarios, nodes, ranks, names, timeout=MANY_CASES_SECONDS)
    for name, of_ranks in zip(names, zip(*results, strict=True), strict=True):
        scenario = SCENARIOS[name]
        assert_it_is_the_oracle(scenario, of_ranks, ranks)
        sizes = [math.prod(shape) for group in scenario.shapes for shape in group]
        for first in range(0, nodes * ranks, ranks):
            for index, size in enumerate(sizes):
                held = [e for of_rank in of_ranks[first : first + ranks] for e in of_rank["elements"][index]]
                assert sorted(held) == list(range(size)), "a node's ranks keep one state between them"
        for of_rank in of_ranks[1:]:
            for mine, first_ranks in zip(of_rank["values"][-1], of_ranks[0]["values"][-1], strict=True):
                np.testing.assert_array_equal(mine, first_ranks)


def test_a_nodes_mean_is_taken_in_the_order_of_ranks() -> None:
    """With beta = 0 it is m, to the bit: a sum of three depends on its order."""
    scenario = Scenario(steps=1, options={"beta": 0.0, "bucket_mb": 0.0005})
    ranks = run_nodes(run_birder, 2, 3, scenario)
    for rank, of_rank in enumerate(ranks):
        first = rank // 3 * 3
        means = mean_of_node([scenario.gradients_at(1, member, 6) for member in range(first, first + 3)])
        for mean, m, own in zip(means, of_rank["m"], of_rank["elements"], strict=True):
            assert mean is not None
            np.testing.assert_array_equal(m, mean.reshape(-1)[own])


# Laws 1 and 2: replicas are equal, and what must not matter does not -------------------------------------------------


def meshed_birder(params: Any, nodes: int, ranks: int, **options: Any) -> thinwire.Birder:
    return thinwire.Birder(params, mesh=init_device_mesh("cpu", (nodes, ranks)), **options)


def all_equal(nodes: int, ranks: int, trainings: dict[str, Training]) -> None:
    """Every training leaves the same digests, on every rank and whichever training it is."""
    results = run_nodes(train_each, nodes, ranks, list(trainings.values()), timeout=MANY_CASES_SECONDS)
    expected = results[0][0]
    assert len(set(expected)) == len(expected), "some step moved nothing"
    for rank, of_rank in enumerate(results):
        for name, digests in zip(trainings, of_rank, strict=True):
            assert digests == expected, f"{name} on rank {rank}"


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), pytest.param(1, 2, marks=pytest.mark.long)])
def test_what_must_not_matter_does_not(nodes: int, ranks: int) -> None:
    plain = Training(options=HIERARCHICAL)
    small = {**HIERARCHICAL, "bucket_mb": 0.01}
    reference = {"THINWIRE_KERNELS": "reference"}
    by_mesh = functools.partial(meshed_birder, nodes=nodes, ranks=ranks)
    all_equal(
        nodes,
        ranks,
        {
            "no overlap": plain,
            "overlap": replace(plain, attach=True),
            "small buckets": replace(plain, options=small),
            "overlap, small buckets": replace(plain, attach=True, options=small),
            "overlap, small buckets of DDP": replace(plain, attach=True, ddp={"bucket_cap_mb": 0.01}),
            "reference kernels": replace(plain, environment=reference),
            "overlap, reference kernels": replace(plain, attach=True, environment=reference),
            "plain kernels": replace(plain, environment={"THINWIRE_KERNELS": "native", "THINWIRE_ISA": "plain"}),
            "a mesh": replace(plain, optimizer=by_mesh, environment={"LOCAL_WORLD_SIZE": "garbage"}),
        },
    )


KINDS = {
    "float16": Training(model=half_net, options=HIERARCHICAL),
    "bfloat16": Training(model=brain_net, options={**HIERARCHICAL, "lr": 0.05}),
    "bfloat16 state, votes": Training(
        options={**HIERARCHICAL, "state_dtype": torch.bfloat16, "downlink": "votes"},
    ),
    "bfloat16 in the node": Training(options={**HIERARCHICAL, "node_dtype": torch.bfloat16}),
    "accumulation under no_sync": Training(options=HIERARCHICAL, microbatches=(3, 1, 2)),
}


def train_kinds(rank: int, world_size: int) -> list[list[list[Digest]]]:
    return [
        train_each(
            rank,
            world_size,
            [
                kind,
                replace(kind, attach=True, options={**kind.options, "bucket_mb": 0.01}),
                replace(kind, environment={"THINWIRE_KERNELS": "reference"}),
            ],
        )
        for kind in KINDS.values()
    ]


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), pytest.param(1, 2, marks=pytest.mark.long)])
def test_reference_and_overlap_agree_for_every_dtype(nodes: int, ranks: int) -> None:
    results = run_nodes(train_kinds, nodes, ranks, timeout=MANY_CASES_SECONDS)
    for rank, of_rank in enumerate(results):
        for kind, variants, first in zip(KINDS, of_rank, results[0], strict=True):
            assert variants == [first[0]] * 3, f"{kind} on rank {rank}"
            assert len(set(first[0])) == KINDS[kind].steps


def train_flat_and_nodes_of_one(rank: int, world_size: int) -> list[list[Digest]]:
    flat, hierarchical = Training(options={"topology": "flat"}), Training(options=HIERARCHICAL)
    return train_each(rank, world_size, [flat, hierarchical, Training(options={"topology": "auto"})])


def test_nodes_of_one_rank_are_the_flat_exchange() -> None:
    for flat, hierarchical, auto in run_nodes(train_flat_and_nodes_of_one, 3, 1):
        assert flat == hierarchical == auto


def train_auto(rank: int, world_size: int) -> tuple[list[Digest], str]:
    optimizer = thinwire.Birder([nn.Parameter(torch.ones(3))])
    return train(rank, world_size, Training(options={"topology": "auto"})), str(optimizer._topology)


def test_auto_is_flat_on_one_machine_and_hierarchical_on_several() -> None:
    flat = run_ranks(train, 2, Training(options={"topology": "flat"}))
    assert run_nodes(train_auto, 1, 2) == [(digests, "flat") for digests in flat]
    hierarchical = run_nodes(train, 2, 2, Training(options=HIERARCHICAL))
    assert run_nodes(train_auto, 2, 2) == [(digests, "2 nodes of 2 ranks") for digests in hierarchical]


def one_step(rank: int, world_size: int, node_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    net = token_net()
    optimizer = thinwire.Birder(net.parameters(), lr=0.01, node_dtype=node_dtype, **HIERARCHICAL)
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    token_loss(net, rank, 0).backward()
    optimizer.step()
    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    m, b = (torch.cat([optimizer.state[p][name] for p in net.parameters()]) for name in ("m", "b"))
    return {"moves": after - before, "m": m, "b": b}


def one_step_each(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    return [one_step(rank, world_size, dtype) for dtype in (torch.float32, torch.bfloat16)]


def test_bfloat16_in_the_node_is_close_to_float32() -> None:
    for full, half in run_nodes(one_step_each, 2, 2):
        # Two gradients of opposite signs may cancel: what is rounded is they, not their mean.
        for state in ("m", "b"):
            np.testing.assert_allclose(half[state], full[state], rtol=2**-7, atol=2**-7 * full["b"].max())
            assert not np.array_equal(half[state], full[state])
        assert np.mean(half["moves"] == full["moves"]) > 0.98


# Parameters of every form --------------------------------------------------------------------------------------------


def train_forms(rank: int, world_size: int) -> list[list[torch.Tensor]]:
    """Without compression nothing is random, and how a parameter lies in memory cannot matter."""
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        transposed = torch.randn(31, 17)
        image = nn.Parameter(torch.randn(5, 3, 4, 6).to(memory_format=form))
        matrix = nn.Parameter(transposed if form == torch.contiguous_format else transposed.t().contiguous().t())
        optimizer = thinwire.Birder([image, matrix], lr=0.01, bucket_mb=0.0005, **HIERARCHICAL)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            image.grad = torch.randn(image.shape, generator=generator)  # contiguous, whatever the parameter is
            matrix.grad = torch.randn(17, 31, generator=generator).t()
            optimizer.step()
        results.append([image, matrix])
    return results


def test_memory_order_does_not_matter() -> None:
    for contiguous, other in run_nodes(train_forms, 1, 2):
        for one, two in zip(contiguous, other, strict=True):
            np.testing.assert_array_equal(one, two)


def stage_a_graph(rank: int, world_size: int) -> bool:
    net = token_net()
    model = DistributedDataParallel(net)
    optimizer = thinwire.Birder(net.parameters(), **HIERARCHICAL)
    thinwire.attach(model, optimizer)
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a reference cycle, which zero_grad() breaks
            token_loss(model, rank, step).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    node = optimizer._session.transport.node
    assert node is not None
    return any(rows.staged_values.requires_grad for rows in node._rows)


def test_a_gradient_is_staged_without_its_graph() -> None:
    """Which would be held for ever otherwise, one more at every step."""
    assert run_nodes(stage_a_graph, 1, 2) == [False, False]


def train_in_a_subgroup(rank: int, world_size: int) -> list[Digest] | None:
    """Rank 0 stays outside, but takes part in making groups, as torch demands."""
    mesh = DeviceMesh("cpu", torch.tensor([[1, 2], [3, 4]]))
    group = dist.new_group([1, 2, 3, 4])
    if rank == 0:
        return None
    return train(rank - 1, 4, Training(options={"mesh": mesh, "process_group": group}))


def test_the_process_group_may_be_a_part_of_the_world() -> None:
    outside, *inside = run_ranks(train_in_a_subgroup, 5)
    assert outside is None
    assert inside == run_nodes(train, 2, 2, Training(options=HIERARCHICAL))


# Law 5: bytes and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 2), (2, 3)])
def test_every_rank_sends_its_share_of_the_bits(nodes: int, ranks: int) -> None:
    for rank in run_nodes(measure, nodes, ranks, True, HIERARCHICAL):
        theory = 2 * (nodes - 1) / nodes * rank["elements"] / 8 / ranks
        assert rank["received"] == rank["sent"]
        if nodes == 1:
            assert rank["sent"] == 0
        else:
            assert 1.0 <= rank["sent"] / MEASURED_STEPS / theory <= 1.01
        # The slices of the others' gradients, and the answers for the own one to each of them.
        answers = rank["elements"] / (8 if nodes > 1 else 1 / 4)
        in_node = (ranks - 1) / ranks * (4 * rank["elements"] + answers)
        assert 1.0 <= rank["node_sent"] / MEASURED_STEPS / in_node <= 1.01


def test_the_interface_counts_what_metrics_says() -> None:
    try:
        with private_network() as network:
            options = {**HIERARCHICAL, "node_dtype": torch.bfloat16}
            ranks = run_ranks(measure_in_pairs, 4, options, network=network)
    except TestbedUnavailable as error:
        pytest.skip(str(error))
    claimed = sum(rank["sent"] + rank["node_sent"] for rank in ranks)
    assert 1.00 <= ranks[0]["wire"] / claimed <= 1.10


def measure_in_pairs(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, float]:
    with environment({"LOCAL_WORLD_SIZE": "2"}):
        return measure(rank, world_size, True, options)


def state_sizes(rank: int, world_size: int) -> tuple[int, int, int]:
    net = token_net()
    optimizer = thinwire.Birder(net.parameters(), **HIERARCHICAL)
    m = sum(optimizer.state[p]["m"].numel() for p in net.parameters())
    return m, optimizer._flat_state.own["m"].numel(), sum(p.numel() for p in net.parameters())


def test_a_rank_keeps_the_state_of_its_slice_only() -> None:
    sizes = run_nodes(state_sizes, 1, 3)
    assert sum(own for own, _, _ in sizes) == sizes[0][2]
    for _, allocated, elements in sizes:
        assert allocated < elements / 3 + 8 * 64


# Law 6: all or none --------------------------------------------------------------------------------------------------


def skip_while_attached(rank: int, world_size: int, poisoned_rank: int) -> list[tuple[bool, int, bool]]:
    """(moved, skipped so far, state finite) after each of four steps, the third of which has an infinite loss."""
    net = token_net()
    model = DistributedDataParallel(net)
    optimizer = thinwire.Birder(net.parameters(), lr=0.01, bucket_mb=0.01, **HIERARCHICAL)
    thinwire.attach(model, optimizer)
    seen = []
    for step in range(4):
        before = digest(net.parameters())
        loss = token_loss(model, rank, step)
        (loss * math.inf if step == 2 and rank == poisoned_rank else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        finite = all(bool(s.isfinite().all()) for p in net.parameters() for s in optimizer.state[p].values())
        seen.append((digest(net.parameters()) != before, optimizer.metrics().skipped_steps, finite))
    return seen


@pytest.mark.parametrize(("nodes", "ranks", "poisoned_rank"), [(2, 2, 3), (1, 2, 0)])
def test_a_gradient_that_is_not_finite_stops_the_step_everywhere(nodes: int, ranks: int, poisoned_rank: int) -> None:
    for seen in run_nodes(skip_while_attached, nodes, ranks, poisoned_rank):
        assert seen == [(True, 0, True), (True, 0, True), (False, 1, True), (True, 1, True)]


# Law 7: resuming -----------------------------------------------------------------------------------------------------

CASES = {
    "plain": Case(options=HIERARCHICAL),
    "loaded after attach": Case(attach=True, load_before_attach=False, options=HIERARCHICAL),
    "bfloat16, small buckets": Case(dtype=torch.bfloat16, options={**HIERARCHICAL, "lr": 0.05, "bucket_mb": 0.01}),
    "bfloat16 state, votes": Case(options={**HIERARCHICAL, "state_dtype": torch.bfloat16, "downlink": "votes"}),
}


def resume_each(rank: int, world_size: int) -> list[tuple[list[str], list[str]]]:
    return [stop_and_resume(rank, world_size, case) for case in CASES.values()]


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 2)])
def test_resuming_is_never_having_stopped(nodes: int, ranks: int) -> None:
    for of_rank in run_nodes(resume_each, nodes, ranks, timeout=MANY_CASES_SECONDS):
        for name, (never_stopped, resumed) in zip(CASES, of_rank, strict=True):
            assert resumed == never_stopped, name
            assert len(set(never_stopped)) == 5


def save(rank: int, world_size: int, options: dict[str, Any]) -> bytes:
    return Run(Case(options=options), rank).save()


def load_into_others(rank: int, world_size: int, saved: list[bytes]) -> list[str]:
    """The messages when a state of two nodes of two is loaded into anything else."""
    across = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
    messages = []
    for options in ({"topology": "flat"}, {"mesh": across}, {"mesh": init_device_mesh("cpu", (1, 4)), **HIERARCHICAL}):
        with pytest.raises(ValueError, match="topology") as refused:
            Run(Case(options=options), rank, saved[rank])
        messages.append(str(refused.value))
    return messages


def test_another_topology_is_refused_by_every_rank() -> None:
    saved = run_nodes(save, 2, 2, HIERARCHICAL)
    for flat, across, one_node in run_ranks(load_into_others, 4, saved):
        assert "the state dict is of topology 2 nodes of 2 ranks, this optimizer has flat" in flat
        assert "the state dict is of topology 2 nodes of 2 ranks, this optimizer has 2 nodes of 2 ranks" in across
        assert "(0, 2), (1, 3)" in across
        assert "this optimizer has 1 nodes of 4 ranks" in one_node


# Refusals ------------------------------------------------------------------------------------------------------------

ENVIRONMENTS = {
    "2 ranks, 2 and 1": (("2", "2", "1"), ("auto", "auto", "auto")),
    "2 on all": (("2", "2", "2"), ("auto", "auto", "auto")),
    "garbage": (("two", "two", "two"), ("auto", "auto", "auto")),
    "garbage on one": (("3", "3", "two"), ("auto", "auto", "flat")),
    "not set": ((None, None, None), ("hierarchical", "hierarchical", "hierarchical")),
    "not set, not asked for on one": ((None, None, None), ("hierarchical", "hierarchical", "auto")),
    "flat on one": (("3", "3", "3"), ("hierarchical", "hierarchical", "flat")),
    "auto on one": (("3", "3", "3"), ("hierarchical", "hierarchical", "auto")),
}


def be_refused(rank: int, world_size: int) -> list[tuple[str, str]]:
    """For every environment the messages of the first step and of attach."""
    messages = []
    for values, topologies in ENVIRONMENTS.values():
        value, topology = values[rank], topologies[rank]
        with environment({} if value is None else {"LOCAL_WORLD_SIZE": value}):
            stepping, attaching = nn.Linear(3, 3), DistributedDataParallel(nn.Linear(3, 3))
            for p in stepping.parameters():
                p.grad = torch.ones_like(p)
            with pytest.raises((ValueError, RuntimeError)) as at_step:
                thinwire.Birder(stepping.parameters(), topology=topology).step()
            with pytest.raises((ValueError, RuntimeError)) as at_attach:
                thinwire.attach(attaching, thinwire.Birder(attaching.parameters(), topology=topology))
        messages.append((str(at_step.value), str(at_attach.value)))
    return messages


def test_what_ranks_cannot_agree_on_is_an_error_on_every_rank() -> None:
    """Nobody hangs: whoever went on alone would wait in vain."""
    results = run_ranks(be_refused, 3)
    for of_rank in results:
        assert of_rank == results[0]
        assert all(at_step == at_attach for at_step, at_attach in of_rank)
    found = {name: at_step for name, (at_step, _) in zip(ENVIRONMENTS, results[0], strict=True)}
    disagree = (
        "ranks disagree on the number of ranks per node (start as many on each, or use topology='flat'): "
        "'LOCAL_WORLD_SIZE="
    )
    assert f"{disagree}2' on ranks 0, 1; 'LOCAL_WORLD_SIZE=1' on rank 2" in found["2 ranks, 2 and 1"]
    assert "LOCAL_WORLD_SIZE=2: the nodes have 2, 1 ranks" in found["2 on all"]
    assert found["garbage"] == "LOCAL_WORLD_SIZE='two': expected the number of ranks on this node"
    assert f"{disagree}3' on ranks 0, 1; \"topology='flat'\" on rank 2" in found["garbage on one"]
    assert "LOCAL_WORLD_SIZE is not set" in found["not set"]
    assert "ranks disagree on the number of ranks per node" in found["not set, not asked for on one"]
    assert f"{disagree}3' on ranks 0, 1; \"topology='flat'\" on rank 2" in found["flat on one"]
    assert (
        "ranks disagree on the topology: '1 nodes of 3 ranks' on ranks 0, 1; 'flat' on rank 2" in found["auto on one"]
    )


def fall_behind(rank: int, world_size: int, late_rank: int) -> None:
    """The ranks agree, and then one of them falls behind by a step."""
    with environment({"LOCAL_WORLD_SIZE": "2"}):
        p = nn.Parameter(torch.ones(1000))
        optimizer = thinwire.Birder([p], **HIERARCHICAL)
    p.grad = torch.ones(1000)
    optimizer.step()
    optimizer.step()
    if rank == late_rank:
        optimizer.state[p]["step"] -= 1
        optimizer._begin_step()
    optimizer.step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_of_a_node_that_is_a_step_behind_stops_all(world_size: int) -> None:
    errors = run_ranks_expecting_errors(fall_behind, world_size, 1)
    assert all(error.type_name == "CorruptPacket" for error in errors)
    assert "packet from rank 1 for step 3, bucket 0: step is 2, expected 3" in errors[0].message
    assert "packet from rank 0 for step 2, bucket 0: step is 3, expected 2" in errors[1].message
