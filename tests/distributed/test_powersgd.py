"""PowerSGD on real ranks follows its oracle, and gives all ranks the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed.common import run_nodes
from tests.oracles.powersgd import PowerSGD, gram_schmidt
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.averaging.powersgd import orthonormalize, product

SHAPES = ((40, 30), (7,), (9, 3, 5), (2, 3))
"""The last one is not smaller as two factors of rank 2."""
RANK, STEPS = 2, 4


def gradients_of(rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def average(rank: int, world_size: int, error_feedback: bool) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """The first `q` of each parameter, and the averaged gradients of each step."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    rule = rule_of("powersgd", {"rank": RANK, "error_feedback": error_feedback})
    averager = GradientAverager(params, rule, bucket_mb=0.001)
    # `q` has the matrices in flat order, the last parameter first.
    (q,) = {id(state["q"]): state["q"] for state in averager._state_of}.values()
    sizes = [RANK * 15, RANK * 30]
    first = [part.clone().view(-1, RANK).double().numpy() for part in q.split(sizes)]
    steps = []
    for step in range(STEPS):
        vectors = [grad.view(-1) for grad in gradients_of(rank, step)]
        averager.begin()
        for p, vector in zip(params, vectors, strict=True):
            averager.add(p, vector)
        averager.finish()
        steps.append([vector.numpy() for vector in vectors])
    averager.close()
    return first, steps


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (3, 1), (2, 2)], ids=["1", "3", "2x2"])
def test_follows_the_oracle(nodes: int, ranks: int, error_feedback: bool) -> None:
    of_ranks = run_nodes(average, nodes, ranks, error_feedback)
    (q_third, q_first), _ = of_ranks[0]
    oracles = [PowerSGD(nodes, q, error_feedback=error_feedback) for q in (q_first, None, q_third, None)]
    for step in range(STEPS):
        for index, (shape, oracle) in enumerate(zip(SHAPES, oracles, strict=True)):
            by_rank = [gradients_of(rank, step)[index].double().numpy() for rank in range(nodes * ranks)]
            workers = [np.mean(by_rank[node * ranks : (node + 1) * ranks], axis=0) for node in range(nodes)]
            expected = oracle.exchange([grad.reshape(shape[0], -1) for grad in workers]).reshape(-1)
            for rank, (_, steps) in enumerate(of_ranks):
                where = f"rank {rank}, step {step}, parameter {index}"
                np.testing.assert_allclose(steps[step][index], expected, rtol=2e-3, atol=2e-4, err_msg=where)
                np.testing.assert_array_equal(steps[step][index], of_ranks[0][1][step][index], err_msg=where)


def test_a_gradient_of_low_rank_is_exact_after_some_steps() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(60, 2) @ torch.randn(2, 50)
    p = nn.Parameter(torch.zeros(60, 50))
    averager = GradientAverager([p], rule_of("powersgd", {"rank": 2, "error_feedback": False}))
    vector = gradient.clone().view(-1)
    for _ in range(3):
        vector.copy_(gradient.view(-1))
        averager.begin()
        averager.add(p, vector)
        averager.finish()
    torch.testing.assert_close(vector.view(60, 50), gradient, rtol=1e-4, atol=1e-4)
    assert averager.metrics().contraction < 1e-8


def test_orthonormal_columns_and_products() -> None:
    draw = torch.Generator().manual_seed(0)
    p, q = torch.randn(33, 4, generator=draw), torch.randn(20, 4, generator=draw)
    expected = gram_schmidt(p.double().numpy())
    orthonormalize(p)
    np.testing.assert_allclose(p.numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(product(p, q).view(33, 20), p @ q.t())


def test_columns_that_depend_on_each_other() -> None:
    p = torch.ones(8, 4)
    p[:, 1] = torch.arange(8.0)
    p[:, 2] = 0.1 * torch.arange(8.0) + 0.3
    p[:, 3] = 0.0
    orthonormalize(p)
    torch.testing.assert_close(p.t() @ p, torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])), rtol=0, atol=1e-5)


def test_a_gradient_of_zeros_does_not_end_the_averaging() -> None:
    p = nn.Parameter(torch.zeros(30, 20))
    averager = GradientAverager([p], rule_of("powersgd", {"rank": 2}))
    draw = torch.Generator().manual_seed(0)
    gradient = torch.outer(torch.randn(30, generator=draw), torch.randn(20, generator=draw)).view(-1)
    for step in range(3):
        vector = gradient.clone() if step else torch.zeros(600)
        averager.begin()
        averager.add(p, vector)
        averager.finish()
        torch.testing.assert_close(vector, gradient if step else torch.zeros(600), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("options", "message"), [({"rank": 0}, "rank=0"), ({"seed": -1}, "seed=-1")])
def test_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule_of("powersgd", options)
