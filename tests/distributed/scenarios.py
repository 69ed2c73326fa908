"""Given gradients, a run on them, and its comparison with the oracle: what flat and hierarchical runs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import thinwire
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


def run_birder(rank: int, world_size: int, scenario: Scenario, **options: Any) -> dict[str, Any]:
    """What a rank has after every step, and its state at the end."""
    groups = [
        {"params": [torch.nn.Parameter(torch.as_tensor(v)) for v in values], "lr": lr, "weight_decay": decay}
        for values, lr, decay in zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
    ]
    optimizer = thinwire.Birder(groups, seed=SEED, **scenario.options, **options)
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
        alive.append([optimizer.state[p]["alive"].clone() for p in parameters if "alive" in optimizer.state[p]])
    return {
        "values": values,
        "alive": alive,
        "elements": [own_elements(optimizer, p) for p in parameters],
        "m": [optimizer.state[p]["m"] for p in parameters],
        "b": [optimizer.state[p]["b"] for p in parameters],
        "skipped": optimizer.metrics().skipped_steps,
    }


def own_elements(optimizer: thinwire.Birder, p: torch.nn.Parameter) -> list[int]:
    """Which elements of a parameter this rank has a state for."""
    layout = optimizer._session.layout
    slot = layout.slots[next(i for i, held in enumerate(optimizer._flat_params) if held is p)]
    return [
        element - slot.start
        for piece in layout.pieces(slot)
        if piece.shard in layout.buckets[piece.bucket].own_shards
        for element in range(piece.start, piece.stop)
    ]


def alive_bits(words: np.ndarray, size: int) -> np.ndarray:
    return np.unpackbits(words.astype("<i8").reshape(-1).view(np.uint8), bitorder="little")[:size].astype(bool)


def mean_of_node(gradients: Sequence[Gradients]) -> Gradients:
    """What a node's ranks make of theirs: the sum in the order of ranks, times 1/n; an absent one counts as zeros."""
    means: Gradients = []
    for of_ranks in zip(*gradients, strict=True):
        present = [g for g in of_ranks if g is not None]
        if not present:
            means.append(None)
            continue
        total = np.zeros_like(present[0])
        for gradient in of_ranks:
            total = total + (0 if gradient is None else gradient)
        means.append(total * np.float32(1 / len(of_ranks)))
    return means


def assert_it_is_the_oracle(scenario: Scenario, ranks: Sequence[dict[str, Any]], ranks_a_node: int = 1) -> None:
    """Compare what `run_birder` returned on every rank with the oracle, whose workers are the nodes."""
    world_size = len(ranks)
    nodes = world_size // ranks_a_node
    oracle = BirderOracle(
        [
            Group(values, lr, decay)
            for values, lr, decay in zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
        ],
        nodes,
        seed=SEED,
        compressed=nodes > 1 or ranks_a_node == 1,
        **{k: v for k, v in scenario.options.items() if k != "bucket_mb"},
    )
    skipped = 0
    for step in range(1, scenario.steps + 1):
        if scenario.schedule:
            for group in oracle.groups:
                group.lr = scenario.schedule(step)
        of_ranks = [scenario.gradients_at(step, rank, world_size) for rank in range(world_size)]
        outcome = oracle.step(
            [mean_of_node(of_ranks[first : first + ranks_a_node]) for first in range(0, world_size, ranks_a_node)]
        )
        skipped += outcome.skipped
        for index, p in enumerate(oracle.parameters):
            where = f"step {step}, parameter {index}"
            np.testing.assert_allclose(
                ranks[0]["values"][step - 1][index], p.value, rtol=1e-5, atol=1e-5, err_msg=where
            )
            if oracle.compressed:
                alive = alive_bits(ranks[0]["alive"][step - 1][index], p.value.size)
                np.testing.assert_array_equal(alive, p.alive, err_msg=f"alive at {where}")
    for rank, of_rank in enumerate(ranks):
        assert of_rank["skipped"] == skipped
        for index, p in enumerate(oracle.parameters):
            own = of_rank["elements"][index]
            for name, ours, theirs in (("m", of_rank["m"][index], p.m), ("b", of_rank["b"][index], p.b)):
                np.testing.assert_allclose(
                    ours.reshape(-1),
                    theirs[rank // ranks_a_node][own],
                    rtol=1e-4,
                    atol=1e-6,
                    err_msg=f"{name} of rank {rank}, parameter {index}",
                )
