"""Given gradients for all optimizers but Birder, a run on them, and its comparison with the oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, by_case, each_case, named, run_nodes
from tests.distributed.scenarios import Scenario, mean_of_node
from tests.harness import run_ranks
from tests.oracles.cd_adam import CDAdamOracle
from tests.oracles.flat_space import Group
from tests.oracles.lamb import LambOracle
from tests.oracles.onebit_adam import OneBitAdamOracle
from tests.oracles.onebit_lamb import OneBitLambOracle
from tests.oracles.sketched_amsgrad import SketchedAMSGradOracle
from tests.oracles.zero_one_adam import ZeroOneAdamOracle

_ORACLES: dict[type, Callable[..., Any]] = {
    thinwire.OneBitAdam: OneBitAdamOracle,
    thinwire.ZeroOneAdam: ZeroOneAdamOracle,
    thinwire.Lamb: LambOracle,
    thinwire.OneBitLamb: OneBitLambOracle,
    thinwire.CDAdam: CDAdamOracle,
    thinwire.SketchedAMSGrad: SketchedAMSGradOracle,
}
_BYTES = 4


@dataclass(frozen=True)
class OracleCase:
    """An optimizer, its options, and the gradients that it gets."""

    optimizer: type
    scenario: Scenario = field(default_factory=Scenario)
    options: Mapping[str, Any] = field(default_factory=dict)
    bucket_elements: int = 1 << 20
    synchronize_after: Sequence[int] = ()

    def with_options(self, **options: Any) -> OracleCase:
        return replace(self, options={**self.options, **options})


def run_case(rank: int, world_size: int, case: OracleCase, **options: Any) -> dict[str, Any]:
    """What a rank has after every step."""
    scenario = case.scenario
    groups = [
        {"params": [torch.nn.Parameter(torch.as_tensor(v)) for v in values], "lr": lr, "weight_decay": decay}
        for values, lr, decay in zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
    ]
    bucket_mb = case.bucket_elements * _BYTES / 2**20
    optimizer = case.optimizer(groups, bucket_mb=bucket_mb, **case.options, **options)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values, synchronized = [], []
    for step in range(1, scenario.steps + 1):
        if scenario.schedule:
            for group in optimizer.param_groups:
                group["lr"] = scenario.schedule(step)
        for p, gradient in zip(parameters, scenario.gradients_at(step, rank, world_size), strict=True):
            p.grad = None if gradient is None else torch.as_tensor(gradient)
        optimizer.step()
        if step in case.synchronize_after:
            optimizer.synchronize()
        values.append([p.detach().clone() for p in parameters])
        synchronized.append(optimizer.is_synchronized)
    return {"values": values, "synchronized": synchronized, "skipped": optimizer.metrics().skipped_steps}


def run_hierarchical(rank: int, world_size: int, case: OracleCase) -> dict[str, Any]:
    return run_case(rank, world_size, case, topology="hierarchical")


def assert_runs_are_the_oracle(cases: Mapping[str, OracleCase], world_size: int) -> None:
    """Run all of the cases on so many ranks, and compare each with its oracle."""
    results = run_ranks(each_case, world_size, run_case, cases, timeout=MANY_CASES_SECONDS)
    for name, ranks in by_case(results).items():
        with named(name):
            assert_it_is_the_oracle(cases[name], ranks)


def assert_hierarchical_runs_are_the_oracle(cases: Mapping[str, OracleCase], nodes: int, ranks_a_node: int) -> None:
    """As above, where the workers are nodes."""
    results = run_nodes(each_case, nodes, ranks_a_node, run_hierarchical, cases, timeout=MANY_CASES_SECONDS)
    for name, ranks in by_case(results).items():
        with named(name):
            assert_it_is_the_oracle(cases[name], ranks, ranks_a_node)


def assert_it_is_the_oracle(case: OracleCase, ranks: Sequence[dict[str, Any]], ranks_a_node: int = 1) -> None:
    """Compare what `run_case` returned on every rank with the oracle, whose workers are the nodes."""
    scenario, world_size = case.scenario, len(ranks)
    nodes = world_size // ranks_a_node
    oracle = _ORACLES[case.optimizer](
        [
            Group(values, lr, decay)
            for values, lr, decay in zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
        ],
        nodes,
        slices=ranks_a_node,
        bucket_elements=case.bucket_elements,
        compressed=nodes > 1 or ranks_a_node == 1,
        **case.options,
    )
    skipped = np.zeros(nodes, dtype=int)
    for step in range(1, scenario.steps + 1):
        if scenario.schedule:
            for group in oracle.groups:
                group.lr = scenario.schedule(step)
        of_ranks = [scenario.gradients_at(step, rank, world_size) for rank in range(world_size)]
        outcome = oracle.step(
            [mean_of_node(of_ranks[first : first + ranks_a_node]) for first in range(0, world_size, ranks_a_node)]
        )
        skipped += outcome.stayed
        if step in case.synchronize_after:
            oracle.synchronize()
        for rank, of_rank in enumerate(ranks):
            replica = oracle.replicas[rank // ranks_a_node] if hasattr(oracle, "replicas") else oracle.values
            for index, value in enumerate(replica):
                np.testing.assert_allclose(
                    of_rank["values"][step - 1][index],
                    value,
                    rtol=2e-5,
                    atol=2e-5,
                    err_msg=f"rank {rank}, step {step}, parameter {index}",
                )
            assert of_rank["synchronized"][step - 1] == getattr(oracle, "is_synchronized", True)
            if of_rank["synchronized"][step - 1]:
                for ours, first in zip(of_rank["values"][step - 1], ranks[0]["values"][step - 1], strict=True):
                    np.testing.assert_array_equal(ours, first, err_msg=f"rank {rank}, step {step}")
    assert [of_rank["skipped"] for of_rank in ranks] == [skipped[rank // ranks_a_node] for rank in range(world_size)]
