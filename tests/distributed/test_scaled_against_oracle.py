"""Law 3 for the optimizers of scaled signs: a distributed run is the NumPy oracle, to rounding, at every step.

A sign that differed at any step and element would be a difference of about the learning rate, 0.01, a thousand times
the tolerance.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import thinwire
from tests.distributed.oracle_cases import (
    OracleCase,
    assert_hierarchical_runs_are_the_oracle,
    assert_runs_are_the_oracle,
)
from tests.distributed.scenarios import SHAPES, Scenario, partly_absent, ramp, rows_untouched, sometimes_nonfinite
from tests.distributed.stages import PAPER


def fall_and_rise(step: int) -> float:
    """A step decay, a stop, and a restart."""
    return 0.01 if step < 18 else 0.001 if step < 24 else 0.0 if step < 28 else 0.01


ONE_BIT_ADAM = OracleCase(thinwire.OneBitAdam, options={"betas": (0.9, 0.8), "warmup_steps": 6, **PAPER})
ZERO_ONE_ADAM = OracleCase(
    thinwire.ZeroOneAdam,
    Scenario(steps=40),
    {
        "betas": (0.9, 0.8),
        "var_freeze_step": 12,
        "var_update_scaler": 3,
        "local_step_scaler": 6,
        "local_step_clipper": 4,
    },
)
LAMB = OracleCase(thinwire.Lamb, options={"betas": (0.9, 0.8)})
ONE_BIT_LAMB = OracleCase(thinwire.OneBitLamb, options={"betas": (0.9, 0.8), "warmup_steps": 6})
BASES = {"1-bit Adam": ONE_BIT_ADAM, "0/1 Adam": ZERO_ONE_ADAM, "LAMB": LAMB, "1-bit LAMB": ONE_BIT_LAMB}

TWO_GROUPS = {"shapes": (SHAPES[:2], SHAPES[2:]), "lrs": (0.01, 0.03), "decays": (0.0, 0.5)}
VARIANTS = {
    "defaults": {},
    "two groups": TWO_GROUPS,
    "schedule": {"schedule": ramp},
    "falling and rising": {"schedule": fall_and_rise},
    "partly absent": {"gradients": partly_absent},
    "rows untouched": {"gradients": rows_untouched},
    "sometimes nonfinite": {"gradients": sometimes_nonfinite},
}


def cases() -> dict[str, OracleCase]:
    made: dict[str, OracleCase] = {}
    for base, case in BASES.items():
        for variant, changes in VARIANTS.items():
            scenario = Scenario(**{"steps": case.scenario.steps, **changes})
            made[f"{base}, {variant}"] = OracleCase(case.optimizer, scenario, case.options)
        made[f"{base}, many buckets"] = OracleCase(
            case.optimizer, Scenario(rows_untouched, case.scenario.steps), case.options, bucket_elements=300
        )
        made[f"{base}, maximize"] = case.with_options(maximize=True)
        if base == "LAMB":  # it has no warm-up
            continue
        quantized = case.with_options(warmup_bits=4, maximize=True)
        scenario = Scenario(partly_absent, case.scenario.steps)
        made[f"{base}, int4 warm-up"] = replace(quantized, scenario=scenario, bucket_elements=300)
        made[f"{base}, int8 warm-up"] = OracleCase(
            case.optimizer, Scenario(sometimes_nonfinite, case.scenario.steps), {**case.options, "warmup_bits": 8}
        )
        scenario = replace(scenario, schedule=fall_and_rise)
        made[f"{base}, blocks"] = replace(case.with_options(scale_block=128), scenario=scenario, bucket_elements=1500)
    made["1-bit Adam, auto"] = ONE_BIT_ADAM.with_options(warmup_steps="auto")
    made["1-bit LAMB, auto"] = ONE_BIT_LAMB.with_options(warmup_steps="auto")
    made["1-bit LAMB, max_coeff=1"] = ONE_BIT_LAMB.with_options(max_coeff=1.0)
    made["0/1 Adam, synchronised by hand"] = OracleCase(
        thinwire.ZeroOneAdam, ZERO_ONE_ADAM.scenario, ZERO_ONE_ADAM.options, synchronize_after=(5, 23, 33, 34, 40)
    )
    made["0/1 Adam, absent and synchronised by hand"] = OracleCase(
        thinwire.ZeroOneAdam, Scenario(partly_absent, 40), ZERO_ONE_ADAM.options, synchronize_after=(26, 33)
    )
    return made


CASES = cases()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_the_distributed_run_is_the_oracle(world_size: int, base: str) -> None:
    cases = {name: case for name, case in CASES.items() if name.startswith(f"{base}, ")}
    assert_runs_are_the_oracle(cases, world_size)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), pytest.param(1, 2, marks=pytest.mark.long)])
def test_a_hierarchical_run_is_the_oracle_of_its_nodes(nodes: int, ranks: int, base: str) -> None:
    variants = (
        "defaults",
        "partly absent",
        "many buckets",
        "sometimes nonfinite",
        "int4 warm-up",
        "int8 warm-up",
        "blocks",
    )
    cases = {name: CASES[name] for name in (f"{base}, {variant}" for variant in variants) if name in CASES}
    assert_hierarchical_runs_are_the_oracle(cases, nodes, ranks)
