"""Law 3 for CD-Adam and SketchedAMSGrad: a distributed run is the NumPy oracle, to rounding, at every step.

A coordinate that were picked by one and not by the other, or a sign that differed, would show: by about the learning
rate, 0.01, a thousand times the tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest

import thinwire
from tests.distributed.oracle_cases import (
    OracleCase,
    assert_hierarchical_runs_are_the_oracle,
    assert_runs_are_the_oracle,
)
from tests.distributed.scenarios import (
    SHAPES,
    Scenario,
    partly_absent,
    ramp,
    rows_untouched,
    sometimes_nonfinite,
)


def stop_and_go(step: int) -> float:
    return 0.0 if step < 3 or 8 < step < 12 else 0.01


SKETCH = {"columns": 300, "k": 150, "betas": (0.9, 0.8), "eps": 1e-4}
BASES = {
    "signs": OracleCase(thinwire.CDAdam, options={"betas": (0.9, 0.8)}),
    "signs of momenta": OracleCase(thinwire.CDAdam, options={"betas": (0.9, 0.8), "compress": "momentum"}),
    "top-k": OracleCase(thinwire.CDAdam, options={"codec": "topk", "ratio": 0.1}),
    "top-k of momenta": OracleCase(thinwire.CDAdam, options={"codec": "topk", "ratio": 0.3, "compress": "momentum"}),
    "sketch": OracleCase(thinwire.SketchedAMSGrad, options=SKETCH),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two groups": {"shapes": (SHAPES[:2], SHAPES[2:]), "lrs": (0.01, 0.03), "decays": (0.0, 0.5)},
    "schedule": {"schedule": ramp},
    "stops and goes on": {"schedule": stop_and_go},
    "partly absent": {"gradients": partly_absent},
    "rows untouched": {"gradients": rows_untouched},
    "sometimes nonfinite": {"gradients": sometimes_nonfinite},
}


def cases() -> dict[str, OracleCase]:
    made: dict[str, OracleCase] = {}
    for base, case in BASES.items():
        for variant, changes in VARIANTS.items():
            made[f"{base}, {variant}"] = OracleCase(case.optimizer, Scenario(**changes), case.options)
        many = Scenario(rows_untouched)
        made[f"{base}, many buckets"] = OracleCase(case.optimizer, many, case.options, bucket_elements=300)
        made[f"{base}, maximize"] = case.with_options(maximize=True)
    made["sketch, even rows"] = BASES["sketch"].with_options(rows=4)
    made["sketch, all of it"] = BASES["sketch"].with_options(k=13 * 21 + 130 + 1 + 40 * 9)
    return made


CASES = cases()


def essential(base: str) -> dict[str, OracleCase]:
    variants = ("defaults", "partly absent", "many buckets", "sometimes nonfinite")
    return {name: CASES[name] for name in (f"{base}, {variant}" for variant in variants)}


def of_every_base(variant: str) -> dict[str, OracleCase]:
    return {name: CASES[name] for name in (f"{base}, {variant}" for base in BASES)}


@pytest.mark.parametrize("base", BASES)
def test_the_distributed_run_is_the_oracle(base: str) -> None:
    assert_runs_are_the_oracle({name: case for name, case in CASES.items() if name.startswith(f"{base}, ")}, 3)


@pytest.mark.long
@pytest.mark.parametrize("base", BASES)
def test_with_fewer_workers_too(base: str) -> None:
    assert_runs_are_the_oracle(essential(base), 2)


def test_alone_too() -> None:
    assert_runs_are_the_oracle(of_every_base("defaults"), 1)


@pytest.mark.parametrize("base", BASES)
def test_a_hierarchical_run_is_the_oracle_of_its_nodes(base: str) -> None:
    assert_hierarchical_runs_are_the_oracle(essential(base), 2, 2)


def test_a_single_node_is_the_oracle_without_compression() -> None:
    assert_hierarchical_runs_are_the_oracle(of_every_base("sometimes nonfinite"), 1, 2)
