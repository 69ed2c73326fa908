"""Law 3: a distributed run is the NumPy oracle, bit by bit of the answers, and to rounding in its numbers.

Gradients are given, not computed, so that both sides see the same ones. A learning rate of 0.01 against a tolerance of
1e-5 makes any differing answer, at any step and element, impossible to miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import thinwire
from tests.distributed.common import WORLD_SIZES
from tests.harness import run_ranks
from tests.oracles.birder import BirderOracle, Group

SEED = 11
SHAPES = ((13, 21), (130,), (), (40, 9))
Gradients = list[np.ndarray | None]


def noisy(step: int, worker: int, workers: int, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Elements range from a certain sign to pure noise; workers share the mean and not the noise."""
    mean, noise = np.random.default_rng(0), np.random.default_rng((step, worker))
    return [
        (mean.uniform(-2, 2, shape) + noise.standard_normal(shape)).astype(np.float32).reshape(shape)
        for shape in shapes
    ]


def partly_absent(step: int, worker: int, workers: int, shapes: Sequence[tuple[int, ...]]) -> Gradients:
    """Parameter 1 is absent on changing workers, parameter 3 on all at every fourth step, parameter 2 before step 5."""
    gradients: Gradients = list(noisy(step, worker, workers, shapes))
    if (step + worker) % 2 == 0:
        gradients[1] = None
    if step % 4 == 0:
        gradients[3] = None
    if step < 5:
        gradients[2] = None
    return gradients


def rows_untouched(step: int, worker: int, workers: int, shapes: Sequence[tuple[int, ...]]) -> Gradients:
    """Rows 5 to 9 never have a gradient, nor column 4 of (13, 21); row 10 from step 10 on, on the last worker only."""
    gradients = noisy(step, worker, workers, shapes)
    gradients[3][5:10] = 0
    if step < 10 or worker < workers - 1:
        gradients[3][10] = 0
    gradients[0][:, 4] = 0
    return list(gradients)


def stop_and_return(step: int, worker: int, workers: int, shapes: Sequence[tuple[int, ...]]) -> Gradients:
    """The first half of each parameter has no gradient from step 20 to 279: it comes to rest, and hello wakes it."""
    gradients = noisy(step, worker, workers, shapes)
    if 20 <= step < 280:
        for gradient in gradients:
            gradient.reshape(-1)[: gradient.size // 2] = 0
    return list(gradients)


def sometimes_nonfinite(step: int, worker: int, workers: int, shapes: Sequence[tuple[int, ...]]) -> Gradients:
    """Bad values on one worker at a time: in the first step already, in two parameters, and at two steps running.

    Row 20 has its first gradient in a step that is skipped: its hello is not heard, and it says hello again.
    """
    gradients = noisy(step, worker, workers, shapes)
    if step < 7:
        gradients[3][20] = 0
    if step in (1, 7, 8, 15) and worker == step % workers:
        gradients[0][2, 3:9] = np.nan
        gradients[3][0, 0] = np.inf if step % 2 else -np.inf
    return list(gradients)


def ramp(step: int) -> float:
    return 0.01 * (1 + step % 3)


@dataclass(frozen=True)
class Scenario:
    gradients: Callable[[int, int, int, Sequence[tuple[int, ...]]], Any] = noisy
    steps: int = 24
    shapes: Sequence[Sequence[tuple[int, ...]]] = (SHAPES,)
    lrs: Sequence[float] = (0.01,)
    decays: Sequence[float] = (0.1,)
    schedule: Callable[[int], float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def starting_values(self) -> list[list[np.ndarray]]:
        generator = np.random.default_rng(5)
        return [
            [generator.standard_normal(shape).astype(np.float32).reshape(shape) for shape in group]
            for group in self.shapes
        ]

    def gradients_at(self, step: int, worker: int, workers: int) -> Gradients:
        return self.gradients(step, worker, workers, [shape for group in self.shapes for shape in group])


SMALL = (((7, 9), (70,), (), (12, 5)),)
SCENARIOS = {
    "defaults": Scenario(),
    "votes": Scenario(options={"downlink": "votes"}),
    "amsgrad": Scenario(options={"amsgrad": True}),
    "amsgrad, rows untouched, votes": Scenario(rows_untouched, options={"amsgrad": True, "downlink": "votes"}),
    "maximize": Scenario(options={"maximize": True}),
    "beta 0, large eps": Scenario(options={"beta": 0.0, "eps": 0.3}),
    "two groups": Scenario(shapes=(SHAPES[:2], SHAPES[2:]), lrs=(0.01, 0.03), decays=(0.0, 0.5)),
    "schedule": Scenario(schedule=ramp),
    "partly absent": Scenario(partly_absent),
    "partly absent, votes": Scenario(partly_absent, options={"downlink": "votes"}),
    "rows untouched": Scenario(rows_untouched),
    "sometimes nonfinite": Scenario(sometimes_nonfinite),
    "sometimes nonfinite, amsgrad, votes": Scenario(
        sometimes_nonfinite, options={"amsgrad": True, "downlink": "votes"}
    ),
    "many buckets": Scenario(rows_untouched, options={"bucket_mb": 0.0005}),
    "stop and return": Scenario(stop_and_return, steps=300, shapes=SMALL),
    "stop and return, amsgrad": Scenario(stop_and_return, steps=300, shapes=SMALL, options={"amsgrad": True}),
    "stop and return, small buckets": Scenario(
        stop_and_return, steps=300, shapes=SMALL, options={"bucket_mb": 0.0005, "downlink": "votes"}
    ),
}


def run_birder(rank: int, world_size: int, scenario: Scenario) -> dict[str, Any]:
    groups = [
        {"params": [torch.nn.Parameter(torch.as_tensor(v)) for v in values], "lr": lr, "weight_decay": decay}
        for values, lr, decay in zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
    ]
    optimizer = thinwire.Birder(groups, seed=SEED, **scenario.options)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values, alive = [], []
    for step in range(1, scenario.steps + 1):
        if scenario.schedule:
            for group in optimizer.param_groups:
                group["lr"] = scenario.schedule(step)
        for p, gradient in zip(parameters, scenario.gradients_at(step, rank, world_size), strict=True):
            p.grad = None if gradient is None else torch.as_tensor(gradient)
        optimizer.step()
        values.append([p.detach().clone() for p in parameters])
        alive.append([optimizer.state[p]["alive"].clone() for p in parameters])
    return {
        "values": values,
        "alive": alive,
        "m": [optimizer.state[p]["m"] for p in parameters],
        "b": [optimizer.state[p]["b"] for p in parameters],
        "skipped": optimizer.metrics().skipped_steps,
    }


def alive_bits(words: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(words.astype("<i8").reshape(-1).view(np.uint8), bitorder="little")[:size].astype(bool)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_distributed_run_is_the_oracle(world_size: int, name: str) -> None:
    scenario = SCENARIOS[name]
    ranks = run_ranks(run_birder, world_size, scenario)
    oracle = BirderOracle(
        [
            Group(values, lr, decay)
            for values, lr, decay in zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
        ],
        world_size,
        seed=SEED,
        **{k: v for k, v in scenario.options.items() if k != "bucket_mb"},
    )
    skipped = 0
    for step in range(1, scenario.steps + 1):
        if scenario.schedule:
            for group in oracle.groups:
                group.lr = scenario.schedule(step)
        outcome = oracle.step([scenario.gradients_at(step, worker, world_size) for worker in range(world_size)])
        skipped += outcome.skipped
        for index, p in enumerate(oracle.parameters):
            where = f"step {step}, parameter {index}"
            np.testing.assert_allclose(
                ranks[0]["values"][step - 1][index], p.value, rtol=1e-5, atol=1e-5, err_msg=where
            )
            alive = alive_bits(ranks[0]["alive"][step - 1][index], p.value.size)
            np.testing.assert_array_equal(alive, p.alive, err_msg=f"alive at {where}")
    for worker, of_worker in enumerate(ranks):
        assert of_worker["skipped"] == skipped
        for index, p in enumerate(oracle.parameters):
            for name_, ours, theirs in (("m", of_worker["m"][index], p.m), ("b", of_worker["b"][index], p.b)):
                np.testing.assert_allclose(
                    ours.reshape(-1), theirs[worker], rtol=1e-4, atol=1e-6, err_msg=f"{name_} of worker {worker}"
                )


def test_the_scenarios_do_what_their_names_say() -> None:
    """Guards against a scenario that no longer reaches its corner: the comparison above would pass all the same."""
    rested = BirderOracle([Group(SCENARIOS["stop and return"].starting_values()[0], 0.01)], 2, seed=SEED)
    alive_then = {}
    for step in range(1, 301):
        rested.step([SCENARIOS["stop and return"].gradients_at(step, worker, 2) for worker in range(2)])
        alive_then[step] = np.concatenate([p.alive for p in rested.parameters]).mean()
    assert alive_then[19] == alive_then[300] == 1.0
    assert alive_then[270] < 0.6

    outcomes = BirderOracle([Group(SCENARIOS["sometimes nonfinite"].starting_values()[0], 0.01)], 2, seed=SEED)
    skipped = [
        step
        for step in range(1, 25)
        if outcomes.step([SCENARIOS["sometimes nonfinite"].gradients_at(step, w, 2) for w in range(2)]).skipped
    ]
    assert skipped == [1, 7, 8, 15]
