"""CSER on real ranks: equal to the NumPy oracle with the paper's variables, and what a user relies on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.common import digest, run_nodes
from tests.distributed.test_local_steps import (
    LARGE,
    SHAPES,
    Given,
    adam_steps,
    equal_everywhere,
    moves_of,
    net,
    new_params,
    take_step,
    train,
)
from tests.harness import run_ranks
from tests.oracles import averaging
from tests.oracles.averaging import AveragingOracle, Compress
from tests.oracles.cser import Cser
from thinwire.averaging.catalogue import SCHEMES
from thinwire.outer.fragment import divide

STEPS = 9
PLAIN: dict[str, Any] = {"error_reset": True, "outer_lr": 1.0, "outer_momentum": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "errors only": {"every": 4, "compressor": "topk", "ratio": 0.1},
    "the paper": {
        "every": 3,
        "compressor": "randomk",
        "ratio": 0.2,
        "seed": 3,
        "step_compressor": "randomk",
        "step_options": {"ratio": 0.05},
    },
    "compressed means, in fragments": {
        "every": 4,
        "fragments": 2,
        "compressor": "gtopk",
        "ratio": 0.2,
        "step_compressor": "gtopk",
        "step_options": {"ratio": 0.1},
    },
}
ORACLES: dict[tuple[str, float | None], tuple[Compress, Compress, bool]] = {
    ("topk", 0.1): (averaging.top_k(0.1), averaging.exact, False),
    ("randomk", 0.2): (averaging.random_k(0.2), averaging.exact, False),
    ("randomk", 0.05): (averaging.random_k(0.05), averaging.exact, False),
    ("gtopk", 0.2): (averaging.top_k(0.2), averaging.top_k(0.2), True),
    ("gtopk", 0.1): (averaging.top_k(0.1), averaging.top_k(0.1), True),
}
"""By compressor and ratio: up, down, and whether owners keep a residual."""


def references(opt: thinwire.LocalSteps) -> list[torch.Tensor]:
    return [reference for fragment in opt._fragments for reference in fragment.references]


def trajectories(rank: int, world_size: int) -> dict[str, list[list[Any]]]:
    found = {}
    for name, case in CASES.items():
        params = new_params()
        opt = thinwire.LocalSteps(Given(params), **PLAIN, **case)
        steps = []
        for step in range(STEPS):
            take_step(opt, params, rank, step)
            steps.append([p.detach().clone() for p in params])
            assert equal_everywhere(references(opt)), (name, step)
            assert not equal_everywhere(params), "replicas have errors of their own"
            assert not opt.is_synchronized
        opt.close()
        found[name] = steps
    return found


def oracle_of(case: Mapping[str, Any], workers: int) -> Cser:
    params = [p.detach().numpy() for p in new_params()]

    def average(name: str, options: Mapping[str, Any], indices: Any) -> AveragingOracle:
        up, down, owner = ORACLES[name, options.get("ratio")]
        numels = [params[i].size for i in indices]
        return AveragingOracle(numels, workers, up, down, owner_residual=owner, seed=options.get("seed", 0))

    parts = divide([torch.empty(shape) for shape in SHAPES], case.get("fragments", 1))
    of_steps = None
    if "step_compressor" in case:
        inside = [i for part in parts for i in part]
        assert inside == sorted(inside) or len(parts) > 1
        of_steps = Ordered(average(case["step_compressor"], case.get("step_options", {}), inside), inside)
    fragments = [(part, average(case["compressor"], case, part)) for part in parts]
    return Cser(params, workers, fragments, of_steps, case["every"])  # type: ignore[arg-type]


class Ordered:
    """An oracle whose flat space has the parameters in another order: fragment after fragment."""

    def __init__(self, oracle: AveragingOracle, order: list[int]) -> None:
        self._oracle, self._order = oracle, order
        self.residuals = oracle.residuals

    @property
    def places(self) -> list[slice]:
        return [self._oracle.places[self._order.index(i)] for i in range(len(self._order))]

    def step(self, gradients: Any) -> list[np.ndarray]:
        self._oracle.residuals = np.zeros_like(self._oracle.residuals)
        means = self._oracle.step([[of_worker[i] for i in self._order] for of_worker in gradients])
        self.residuals = self._oracle.residuals
        return [means[self._order.index(i)] for i in range(len(self._order))]


@pytest.mark.parametrize("workers", [2, 3])
def test_equals_the_oracle(workers: int) -> None:
    of_ranks = run_ranks(trajectories, workers)
    for name, case in CASES.items():
        oracle = oracle_of(case, workers)
        for step in range(STEPS):
            oracle.step([[move.double().numpy() for move in moves_of(rank, step)] for rank in range(workers)])
            agreed = [x - e for x, e in zip(oracle.x[0], oracle.e[0], strict=True)]
            for rank in range(workers):
                for index, expected in enumerate(oracle.x[rank]):
                    where = f"{name}, step {step}, rank {rank}, parameter {index}"
                    found = of_ranks[rank][name][step][index]
                    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6, err_msg=where)
                    # The lemma of the paper, of which θ_ref is made.
                    np.testing.assert_allclose(expected - oracle.e[rank][index], agreed[index], atol=1e-12)


# Laws, each checked in the same two ranks -----------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "every": 4,
    "compressor": "int4",
    "step_compressor": "topk",
    "step_options": {"ratio": 0.05},
}


def check_nothing_is_lost(rank: int, world_size: int) -> None:
    """With exact answers the mean of the replicas moves as if every step were averaged as floats."""
    params = new_params()
    case = {"every": 3, "compressor": "topk", "ratio": 0.1, "step_compressor": "randomk"}
    opt = thinwire.LocalSteps(Given(params), **PLAIN, **case)
    expected = [p.detach().double() for p in new_params()]
    for step in range(6):
        take_step(opt, params, rank, step)
        moves = [moves_of(worker, step) for worker in range(world_size)]
        expected = [p - sum(m[i].double() for m in moves) / world_size for i, p in enumerate(expected)]
        for p, mean in zip(params, expected, strict=True):
            total = p.detach().double()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total / world_size, mean, rtol=1e-5, atol=1e-5)
    opt.close()


def check_bytes(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.zeros(LARGE))]
    opt = thinwire.LocalSteps(Given(params), **PLAIN, **SETTINGS)
    for step in range(8):
        params[0].grad = torch.randn(LARGE, generator=torch.Generator().manual_seed(step + 10 * rank))
        opt.step()
    metrics = opt.metrics()
    bits = 2 * sum(SCHEMES["int4"]().bits_per_value(world_size))
    bits += 8 * sum(SCHEMES["topk"](ratio=0.05).bits_per_value(world_size))
    expected = LARGE * bits / 8 * (world_size - 1) / world_size
    assert abs(metrics.bytes_sent / expected - 1) < 0.02, (metrics.bytes_sent, expected)
    assert (metrics.steps, metrics.exchanges, metrics.dropped_exchanges) == (8, 2, 0)
    opt.close()


def check_synchronize(rank: int, world_size: int) -> None:
    model = net()
    opt = adam_steps(model, **PLAIN, **SETTINGS)
    train(opt, model, rank, range(5))
    opt.synchronize(model)
    assert equal_everywhere(list(model.state_dict().values()))
    assert opt.is_synchronized
    unsent = opt._fragments[0].averager._flat_state.own["residual"]
    assert bool(unsent.any()), "what it left out is sent later"
    train(opt, model, rank, range(5, 9))
    assert not bool(unsent.any()), "it has moved into the parameters"
    with opt.at_reference():
        assert equal_everywhere(list(model.parameters()))
    assert not equal_everywhere(list(model.parameters()))
    opt.close()


def check_resume(rank: int, world_size: int, folder: str) -> None:
    for name, settings in {"both": SETTINGS, "one": {"every": 3, "compressor": "sign", "fragments": 2}}.items():
        path = f"{folder}/{name}"
        model = net()
        opt = adam_steps(model, **PLAIN, **settings)
        train(opt, model, rank, range(6))
        thinwire.checkpoint.save(path, model, opt, 6)
        train(opt, model, rank, range(6, 11))
        expected = digest([*model.parameters(), *references(opt)])
        opt.close()
        other = net()
        again = adam_steps(other, **PLAIN, **settings)
        assert thinwire.checkpoint.load(path, other, again) is not None
        train(again, other, rank, range(6, 11))
        assert digest([*other.parameters(), *references(again)]) == expected
        saved = again.state_dict()
        again.close()
        if "step_compressor" in settings:
            without = {**settings, "step_compressor": None, "step_options": None}
            with pytest.raises(ValueError, match="is of a LocalSteps with a step_compressor, and this one is not"):
                adam_steps(net(), **PLAIN, **without).load_state_dict(saved)


def check_nonfinite(rank: int, world_size: int) -> None:
    params = new_params()
    settings = {**SETTINGS, "every": 2, "max_consecutive_skips": 2}
    opt = thinwire.LocalSteps(Given(params), **PLAIN, **settings)
    take_step(opt, params, rank, 0)
    before = [p.detach().clone() for p in params]
    logging.getLogger("thinwire").disabled = True
    for p, move in zip(params, moves_of(rank, 1), strict=True):
        p.grad = move
    # A gradient that is finite, and moves a parameter to infinity.
    opt.inner.step = lambda closure=None: params[0].data.fill_(math.inf) if rank == 1 else params[0].data.add_(1.0)  # type: ignore[assignment, method-assign]
    opt.step()
    del opt.inner.step  # type: ignore[method-assign]
    assert opt.metrics().dropped_exchanges == 1
    assert all(bool(p.isfinite().all()) for p in params)
    assert equal_everywhere(references(opt))
    for step in range(2, 6):
        take_step(opt, params, rank, step)
    assert all(bool(p.isfinite().all()) for p in params)
    assert opt.metrics().dropped_exchanges == 1
    assert any(not torch.equal(p, was) for p, was in zip(params, before, strict=True))
    assert equal_everywhere(references(opt))
    # A parameter that is not finite: all ranks return to what they agreed on.
    without = thinwire.LocalSteps(Given(params), **PLAIN, every=1, compressor="int4")
    for p, agreed in zip(params, references(opt), strict=True):
        p.data.copy_(agreed)
    take_step(without, params, rank, 0)
    agreed = digest(references(without))
    params[0].data[0, 0] = math.nan
    take_step(without, params, rank, 1)
    assert digest(params) == digest(references(without)) == agreed
    assert without.is_synchronized
    logging.getLogger("thinwire").disabled = False
    opt.close()
    without.close()


def check_learning(rank: int, world_size: int) -> None:
    """Errors in the parameters, with a hundredth of the bytes of dense averaging, train a model."""
    model = net()
    opt = adam_steps(model, **PLAIN, every=4, compressor="topk", ratio=0.1, step_compressor="topk")
    losses = []
    for step in range(60):
        loss = model(torch.ones(4, 6) + torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) / 10)
        loss = (loss - torch.arange(4.0)).square().mean()
        losses.append(loss.item())
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert losses[-1] < losses[0] / 2
    opt.close()


def all_laws(rank: int, world_size: int, folder: str) -> None:
    check_nothing_is_lost(rank, world_size)
    check_bytes(rank, world_size)
    check_synchronize(rank, world_size)
    check_resume(rank, world_size, folder)
    check_nonfinite(rank, world_size)
    check_learning(rank, world_size)


def test_laws(tmp_path: Any) -> None:
    run_ranks(all_laws, 2, str(tmp_path), timeout=150.0)


# Misuse ---------------------------------------------------------------------------------------------------------------


def refused(rank: int, make: Callable[[nn.Module], thinwire.LocalSteps], model: nn.Module) -> str:
    opt = make(model)
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 6, dtype=dtype)).square().mean().backward()
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        opt.step()
    assert opt.metrics().bytes_sent == 0
    opt.close()
    return str(caught.value)


def misuse(rank: int, world_size: int) -> dict[str, str]:
    first = rank == 0
    of_steps = {**PLAIN, "compressor": "int4"}
    return {
        "several ranks per worker": refused(rank, lambda m: adam_steps(m, **PLAIN), net()),
        "low precision": refused(rank, lambda m: adam_steps(m, topology="flat", **PLAIN), net(torch.bfloat16)),
        "one of two": refused(rank, lambda m: adam_steps(m, topology="flat", error_reset=first), net()),
        "steps": refused(
            rank,
            lambda m: adam_steps(m, topology="flat", step_compressor="topk" if first else None, **of_steps),
            net(),
        ),
        "options": refused(
            rank,
            lambda m: adam_steps(
                m, topology="flat", step_compressor="topk", step_options={"ratio": 0.1 if first else 0.2}, **of_steps
            ),
            net(),
        ),
    }


def test_misuse_is_refused_on_every_rank() -> None:
    of_ranks = run_nodes(misuse, 2, 2)
    assert all(found == of_ranks[0] for found in of_ranks)
    expected = {
        "several ranks per worker": "error_reset=True with workers of 2 ranks",
        "low precision": "a parameter of torch.bfloat16 with error_reset=True",
        "one of two": "ranks disagree on error_reset: True on rank 0; False on",
        "steps": "ranks disagree on step_compressor: 'topk' on rank 0; None on",
        "options": "ranks disagree on ratio: 0.1 on rank 0; 0.2 on",
    }
    for name, text in expected.items():
        assert text in of_ranks[0][name], (name, of_ranks[0][name])
