"""Quantised averaging on real ranks equals the NumPy oracle to the bit, on every rank, and sends what it says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.common import run_nodes
from tests.oracles.quantized_averaging import QuantizedAveraging
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import SCHEMES, rule_of
from thinwire.compressors.quantized import QuantizedScheme
from thinwire.metrics import Metrics

SHAPES = ((50, 37), (150,), (1,), (29, 150), (64,))
STEPS = 4
CASES: list[tuple[int, Mapping[str, Any]]] = [
    (4, {}),
    (4, {"block": 16}),
    (4, {"error_feedback": False}),
    (8, {"block": 32}),
    (3, {}),
    (2, {"block": 32}),
    (1, {"block": 64}),
    (2, {"residual_decay": 0.8}),
]


def gradients_of(rank: int, step: int) -> list[Tensor | None]:
    """Sizes differ by ten orders of magnitude; the fourth is absent on rank 1 at step 2, the second has zeros."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    gradients: list[Tensor | None] = [
        torch.randn(shape, generator=draw).mul_(10.0 ** (-3 * index)) for index, shape in enumerate(SHAPES)
    ]
    second = gradients[1]
    assert second is not None
    second[:70] = 0.0
    if rank == 1 and step == 2:
        gradients[3] = None
    return gradients


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The options of the compressor, and the decay of residuals, which all compressors have."""
    of_compressor = dict(options)
    return of_compressor, of_compressor.pop("residual_decay", 1.0)


def average(rank: int, world_size: int) -> list[tuple[list[list[np.ndarray]], Metrics]]:
    """For every case, the averaged gradients of each step."""
    found = []
    for bits, options in CASES:
        params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        averager = GradientAverager(params, rule_of(f"int{bits}", *split(options)), bucket_mb=0.01)
        steps = []
        for step in range(STEPS):
            gradients = gradients_of(rank, step)
            vectors = [
                torch.zeros(p.numel()) if grad is None else grad.view(-1).clone()
                for p, grad in zip(params, gradients, strict=True)
            ]
            averager.begin()
            for p, vector, grad in zip(params, vectors, gradients, strict=True):
                averager.add(p, vector, present=grad is not None)
            averager.finish()
            steps.append([vector.numpy() for vector in vectors])
        found.append((steps, averager.metrics()))
        averager.close()
    return found


def node_means(nodes: int, ranks: int, step: int) -> list[list[np.ndarray | None]]:
    """What each worker sends: the mean over the ranks of its node."""
    workers = []
    for node in range(nodes):
        of_ranks = [gradients_of(rank, step) for rank in range(node * ranks, (node + 1) * ranks)]
        means: list[np.ndarray | None] = []
        for index, shape in enumerate(SHAPES):
            given = [grads[index] for grads in of_ranks]
            if all(grad is None for grad in given):
                means.append(None)
                continue
            flat = [np.zeros(shape, np.float32) if grad is None else grad.numpy() for grad in given]
            total = flat[0]
            for other in flat[1:]:
                total = total + other
            means.append((total * np.float32(1 / ranks)).reshape(-1))
        workers.append(means)
    return workers


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2)], ids=["2", "3", "2x2"])
def test_equals_the_oracle(nodes: int, ranks: int) -> None:
    of_ranks = run_nodes(average, nodes, ranks)
    numels = [int(np.prod(shape)) for shape in SHAPES]
    for case, (bits, options) in enumerate(CASES):
        of_compressor, decay = split(options)
        scheme = SCHEMES[f"int{bits}"](**of_compressor)
        assert isinstance(scheme, QuantizedScheme)
        settings = {"error_feedback": scheme.error_feedback, "decay": decay}
        oracle = QuantizedAveraging(nodes, numels, bits, scheme.block, scheme.spread, **settings)
        for step in range(STEPS):
            expected = oracle.exchange(node_means(nodes, ranks, step))
            for rank, index in itertools.product(range(nodes * ranks), range(len(SHAPES))):
                got = of_ranks[rank][case][0][step][index]
                where = f"int{bits} {options}, rank {rank}, step {step}, parameter {index}"
                np.testing.assert_array_equal(got, expected[index], err_msg=where)


def test_a_single_worker_keeps_its_gradients() -> None:
    ((cases),) = run_nodes(average, 1, 1)
    for steps, metrics in cases:
        for step in range(STEPS):
            for grad, got in zip(gradients_of(0, step), steps[step], strict=True):
                assert grad is not None
                np.testing.assert_array_equal(got, grad.view(-1).numpy())
        assert metrics.bytes_sent == 0


ELEMENTS = 400_000


def send(rank: int, world_size: int) -> dict[int, float]:
    """Bytes per parameter and step that a rank sends, by bits."""
    sent = {}
    for bits in (1, 2, 3, 4, 8):
        p = nn.Parameter(torch.zeros(ELEMENTS))
        averager = GradientAverager([p], rule_of(f"int{bits}", {}))
        for _ in range(2):
            averager.begin()
            averager.add(p, torch.randn(ELEMENTS))
            averager.finish()
        sent[bits] = averager.metrics().bytes_sent / ELEMENTS / 2
        assert 0 < averager.metrics().contraction < 1
        averager.close()
    return sent


def test_bytes_are_those_of_the_formula() -> None:
    workers = 4
    for sent in run_nodes(send, workers, 1):
        for bits, got in sent.items():
            up, down = SCHEMES[f"int{bits}"]().bits_per_value(workers)
            # To each of the other workers, the packets of its shard up, and the answer for the own shard down.
            expected = (up + down) / 8 * (workers - 1) / workers
            assert got == pytest.approx(expected, rel=0.02), f"int{bits}"
