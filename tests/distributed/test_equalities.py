"""Laws 1 and 2: replicas are identical, and nothing that must not matter does, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.common import (
    WORLD_SIZES,
    Training,
    assert_same_runs,
    brain_net,
    half_net,
    trained_each,
)
from tests.instruction_sets import instruction_sets

VARIANTS = [
    Training(attach=True),
    Training(attach=True, options={"bucket_mb": 0.01}),
    Training(attach=True, ddp={"bucket_cap_mb": 0.01}),
    Training(attach=True, environment={"THINWIRE_KERNELS": "reference"}),
    Training(options={"bucket_mb": 0.01}),
    Training(options={"bucket_mb": 0.1}),
    Training(environment={"THINWIRE_KERNELS": "reference"}),
    *(Training(environment={"THINWIRE_KERNELS": "native", "THINWIRE_ISA": isa}) for isa in instruction_sets()),
]


@pytest.mark.parametrize(
    ("world_size", "downlink"),
    [
        (3, "bit"),
        (2, "majority"),
        (2, "votes"),
        *(pytest.param(n, "bit", marks=pytest.mark.long) for n in WORLD_SIZES if n != 3),
        *(pytest.param(4, downlink, marks=pytest.mark.long) for downlink in ("majority", "votes")),
    ],
)
def test_what_must_not_matter_does_not(world_size: int, downlink: str) -> None:
    plain, *variants = (
        replace(training, options={**training.options, "downlink": downlink}) for training in (Training(), *VARIANTS)
    )
    assert_same_runs(world_size, plain, *variants)


LAW_1_AND_2_MODELS = {
    "float16": Training(model=half_net),
    "bfloat16": Training(model=brain_net, options={"lr": 0.05}),
    "bfloat16 state": Training(options={"state_dtype": torch.bfloat16}),
    "amsgrad, maximize": Training(options={"amsgrad": True, "maximize": True}),
}


@pytest.mark.parametrize("kind", LAW_1_AND_2_MODELS)
def test_reference_and_overlap_agree_for_every_dtype_and_rule(kind: str) -> None:
    plain = LAW_1_AND_2_MODELS[kind]
    overlapped = replace(plain, attach=True, options={**plain.options, "bucket_mb": 0.01})
    by_reference = replace(plain, environment={"THINWIRE_KERNELS": "reference"})
    assert_same_runs(3, plain, overlapped, by_reference)


def test_other_seeds_give_other_runs() -> None:
    """The equalities above would hold in a world where nothing is random, too."""
    first, second = trained_each(2, [Training(options={"seed": seed}) for seed in (1, 2)])
    assert first != second
