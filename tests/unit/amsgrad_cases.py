"""Gradients and small runs for the tests of the oracles of CD-Adam and SketchedAMSGrad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.cd_adam import CDAdamOracle
from tests.oracles.flat_space import Group
from tests.oracles.sketched_amsgrad import SketchedAMSGradOracle

SHAPES = ((13, 7), (70,), (), (3, 50))
ELEMENTS = sum(math.prod(shape) for shape in SHAPES)
Gradients = list[list[np.ndarray | None]]


def starting_values() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [np.asarray(generator.standard_normal(shape)) for shape in SHAPES]


def gradients_at(step: int, workers: int) -> Gradients:
    generator = np.random.default_rng((2, step))
    return [[np.asarray(generator.standard_normal(shape)) for shape in SHAPES] for _ in range(workers)]


def partly_absent_at(step: int, workers: int) -> Gradients:
    """Parameter 1 has none on worker 0 in every second step, parameter 3 on none in every third."""
    gradients = gradients_at(step, workers)
    if step % 2 == 0:
        gradients[0][1] = None
    if step % 3 == 0:
        for of_worker in gradients:
            of_worker[3] = None
    return gradients


def joined(of_worker: list[np.ndarray | None]) -> np.ndarray:
    return np.concatenate(
        [np.zeros(shape) if g is None else g for g, shape in zip(of_worker, SHAPES, strict=True)], None
    )


def mean_of(gradients: Gradients) -> np.ndarray:
    return np.mean([joined(of_worker) for of_worker in gradients], axis=0)


def spoilt(gradients: Gradients, number: float) -> Gradients:
    """The last worker's first gradient has one bad number."""
    first = gradients[-1][0]
    assert first is not None
    first.reshape(-1)[5] = number
    return gradients


def cd_adam(workers: int, **options: Any) -> CDAdamOracle:
    return CDAdamOracle([Group(starting_values(), 0.1, 0.2)], workers, **{"bucket_elements": 128, **options})


def sketched(workers: int, **options: Any) -> SketchedAMSGradOracle:
    defaults = {"bucket_elements": 128, "rows": 3, "columns": 64, "k": 20}
    return SketchedAMSGradOracle([Group(starting_values(), 0.1, 0.2)], workers, **{**defaults, **options})


Factory = Callable[..., Any]
MARKOV: dict[str, Factory] = {
    "sign": cd_adam,
    "sign of momentum": lambda n, **options: cd_adam(n, compress="momentum", **options),
    "topk": lambda n, **options: cd_adam(n, codec="topk", ratio=0.1, **options),
    "topk of momentum": lambda n, **options: cd_adam(n, codec="topk", ratio=0.1, compress="momentum", **options),
}
EVERY: dict[str, Factory] = {**MARKOV, "sketch": sketched}
