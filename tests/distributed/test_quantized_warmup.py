"""A warm-up whose gradients are averaged at a few bits: its means and residuals are the oracle's, to the bit, and
nothing of it is left after the switch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.common import run_nodes
from tests.distributed.scenarios import SHAPES, mean_of_node, own_elements, partly_absent
from tests.distributed.stages import FREEZE, VARIANCE_STEPS, make, noise, parameters
from tests.harness import run_ranks
from tests.oracles.quantized_averaging import QuantizedAveraging
from thinwire.compressors.quantized import QuantizedScheme

NAMES = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
WARM_UP_STEPS = {"OneBitAdam": range(1, FREEZE + 1), "OneBitLamb": range(1, FREEZE + 1), "ZeroOneAdam": VARIANCE_STEPS}
UNSCALED = {"betas": (0.0, 0.9), "bucket_mb": 0.002}
"""With beta1 = 0 the momentum is the mean gradient, exactly."""
SIZE = (400, 500)
CASES = {"4 bits": 4, "8 bits": 8}


def average(rank: int, world_size: int, bits: int) -> dict[str, Any]:
    """For each optimizer, the momentum and the worker's residual after every step that averages gradients."""
    found = {}
    for name in NAMES:
        params = parameters(*SHAPES)
        optimizer = make(name, params, warmup_bits=bits, **UNSCALED)
        elements = [own_elements(optimizer, p) for p in params]
        steps = {}
        for step in range(1, FREEZE + 1):
            for p, gradient in zip(params, partly_absent(step, rank, world_size, SHAPES), strict=True):
                p.grad = None if gradient is None else torch.as_tensor(gradient)
            optimizer.step()
            if step in WARM_UP_STEPS[name] and step < FREEZE:  # the switch drops the residuals
                states = [optimizer.state[p] for p in params]
                steps[step] = [(s["m"].flatten().clone(), s["residual"].flatten().clone()) for s in states]
        found[name] = elements, steps
        optimizer.close()
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2)], ids=["2", "3", "2x2"])
def test_means_and_residuals_are_the_oracles_to_the_bit(nodes: int, ranks: int, case: str) -> None:
    world_size = nodes * ranks
    results = run_nodes(average, nodes, ranks, CASES[case])
    for name in NAMES:
        oracle = QuantizedAveraging(nodes, [int(np.prod(shape)) for shape in SHAPES], CASES[case], 64, 1.0)
        means = [np.zeros(int(np.prod(shape)), np.float32) for shape in SHAPES]
        for step in (step for step in WARM_UP_STEPS[name] if step < FREEZE):
            of_ranks = [partly_absent(step, rank, world_size, SHAPES) for rank in range(world_size)]
            workers = [mean_of_node(of_ranks[first : first + ranks]) for first in range(0, world_size, ranks)]
            answers = oracle.exchange([[None if g is None else g.reshape(-1) for g in of] for of in workers])
            for index, answer in enumerate(answers):
                if any(of[index] is not None for of in workers):  # else the parameter takes no step
                    means[index] = answer
            for rank, result in enumerate(results):
                elements, steps = result[name]
                for index, (m, residual) in enumerate(steps[step]):
                    where = f"{name}, rank {rank}, step {step}, parameter {index}"
                    if name != "ZeroOneAdam" or step < 5:  # its other steps change the momentum as well
                        np.testing.assert_array_equal(m, means[index], err_msg=where)
                    expected = oracle.residuals[rank // ranks][index][elements[index]]
                    np.testing.assert_array_equal(residual, expected, err_msg=where)


def change(rank: int, world_size: int, name: str, bits: int | None) -> list[dict[str, Any]]:
    """What a rank sends in every step, the sums of its residuals, and whether a NaN on rank 1 changed its averages."""
    (p,) = params = parameters(SIZE)
    optimizer = make(name, params, warmup_bits=bits)
    seen: list[dict[str, Any]] = []
    sent = 0
    for step in range(1, FREEZE + 5):
        p.grad = noise(SIZE, rank, step)
        if rank == 1 and step == 3:
            p.grad[5] = torch.nan
        before = {entry: optimizer.state[p][entry].clone() for entry in ("m", "v")}
        optimizer.step()
        state, now = optimizer.state[p], optimizer.metrics().bytes_sent
        residuals = [state[entry].abs().sum().item() for entry in ("residual", "answer_residual") if entry in state]
        changed = {entry: not torch.equal(value, state[entry]) for entry, value in before.items()}
        seen.append({"bits": 8 * (now - sent) / p.numel(), "residuals": residuals, "changed": changed})
        sent = now
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_it_sends_what_its_bits_say_and_leaves_nothing_behind(name: str) -> None:
    bits = 4
    up, down = QuantizedScheme(bits).bits_per_value(2)
    assert up == down == 4.25
    for seen in run_ranks(change, 2, name, bits):
        for step, of_step in enumerate(seen, 1):
            averages = step in WARM_UP_STEPS[name]
            # With two workers, each sends half of the shards up, and the answer of the other half down.
            expected = (up + down) / 2 if averages else 1.0
            local = name == "ZeroOneAdam" and step > FREEZE
            assert local or of_step["bits"] == pytest.approx(expected, rel=0.02), f"step {step}"
            worker, owner = of_step["residuals"]
            assert (worker > 0) == (owner > 0) == (step < FREEZE), f"step {step}"
        assert seen[2]["changed"] == {"m": False, "v": False}
        assert seen[3]["changed"] == {"m": True, "v": True}


@pytest.mark.parametrize("name", NAMES)
def test_a_dense_warmup_and_a_single_worker_keep_no_residuals(name: str) -> None:
    for seen in run_ranks(change, 2, name, None):
        assert seen[0]["bits"] == pytest.approx(32, rel=0.02)
        assert not any(of_step["residuals"] for of_step in seen)
    (alone,) = run_ranks(change, 1, name, 4)
    assert not any(of_step["residuals"] for of_step in alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bits", [0, 3, 5, 16, 32, 4.0, True, "4"])
def test_other_numbers_of_bits_are_refused(name: str, bits: Any) -> None:
    with pytest.raises(ValueError, match=r"warmup_bits=.*: expected 4 or 8 bits per parameter, or None for 32"):
        make(name, parameters((5,)), warmup_bits=bits)


def disagree(rank: int, world_size: int) -> str:
    (p,) = parameters((70,))
    optimizer = make("OneBitAdam", [p], warmup_bits=(None, 4)[rank])
    p.grad = torch.ones(70)
    with pytest.raises(RuntimeError) as refusal:
        optimizer.step()
    return str(refusal.value)


def test_ranks_must_agree_on_the_bits() -> None:
    for refusal in run_ranks(disagree, 2):
        assert "ranks disagree on warmup_bits: None on rank 0; 4 on rank 1" in refusal


def test_the_warning_of_a_long_warmup_says_what_is_sent() -> None:
    (p,) = parameters((70,))
    with pytest.warns(RuntimeWarning, match="the whole run sends 4 bits per parameter"):
        make("OneBitAdam", [p], warmup_bits=4, total_steps=FREEZE)
