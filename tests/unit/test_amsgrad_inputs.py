"""What users may get wrong about CDAdam and SketchedAMSGrad: the message names the argument, its value, and what would
be right. Ranks that differ are in tests/distributed/test_amsgrad.py."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.unit.test_scaled_inputs import GROUP_OPTIONS
from thinwire.compressors.codecs.count_sketch import CountSketch
from thinwire.kernels.ops import BACKENDS

OPTIMIZERS = (thinwire.CDAdam, thinwire.SketchedAMSGrad)
ELEMENTS = 3 + 20
INF, NAN = math.inf, math.nan

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 5))]


def message(option: dict[str, Any], expected: str) -> str:
    ((name, value),) = option.items()
    return f"^{name}={re.escape(repr(value))}: {expected}"


@each_optimizer
@pytest.mark.parametrize(("option", "expected"), GROUP_OPTIONS, ids=str)
def test_options_of_groups(optimizer: Any, option: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=message(option, expected)):
        optimizer(parameters(), **option)
    made = optimizer(parameters())
    with pytest.raises(ValueError, match=message(option, expected)):
        made.add_param_group({"params": parameters(), **option})
    assert len(made.param_groups) == 1


@each_optimizer
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        *(({"bucket_mb": bad}, "expected a positive number") for bad in (0.0, -1.0, NAN, INF)),
        ({"node_dtype": torch.float16}, r"expected torch\.float32 or torch\.bfloat16"),
        ({"topology": "ring"}, "expected 'flat', 'hierarchical' or 'auto'"),
    ],
    ids=str,
)
def test_options_of_all_optimizers(optimizer: Any, option: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=message(option, expected)):
        optimizer(parameters(), **option)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        *(({"codec": bad}, "expected 'sign' or 'topk'") for bad in ("signs", "", None, "sketch")),
        *(({"compress": bad}, "expected 'gradient' or 'momentum'") for bad in ("gradients", "", None, "weights")),
        *(({"ratio": bad}, r"expected a number in \(0, 1\]") for bad in (0, 0.0, -1, -0.5, 1.5, 64, NAN, INF)),
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", ["sign", "topk"])
def test_options_of_cd_adam(codec: str, option: dict[str, Any], expected: str) -> None:
    """Whether the codec would make use of it or not."""
    options: dict[str, Any] = {"codec": codec, **option}
    with pytest.raises(ValueError, match=message(option, expected)):
        thinwire.CDAdam(parameters(), **options)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        *(({"rows": bad}, "expected an integer from 1 to 15") for bad in (0, -1, 16, 5.0, 1.5, NAN, "5", None)),
        *(
            ({"columns": bad}, r"expected an integer from 1 to 2\*\*30")
            for bad in (0, -1, 2**30 + 1, 100.0, 1.5, NAN, "64")
        ),
        *(
            ({"k": bad}, f"expected an integer from 1 to the number of parameters, {ELEMENTS}")
            for bad in (0, -1, ELEMENTS + 1, 10**9, 5.0, 1.5, NAN, "5")
        ),
        *(({"seed": bad}, r"expected an integer in \[0, 2\*\*63\)") for bad in (-1, 2**63, 1.5, True, "0", None)),
    ],
    ids=str,
)
def test_options_of_sketched_amsgrad(option: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=message(option, expected)):
        thinwire.SketchedAMSGrad(parameters(), **option)


@pytest.mark.parametrize("option", [{"rows": True}, {"columns": True}, {"k": True}], ids=str)
def test_true_is_no_number_of_anything(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message(option, "expected an integer")):
        thinwire.SketchedAMSGrad(parameters(), **option)


@pytest.mark.parametrize(
    ("options", "betas"),
    [
        ({}, (0.0, 0.99)),
        ({"compress": "momentum"}, (0.9, 0.99)),
        ({"codec": "topk"}, (0.9, 0.99)),
        ({"betas": (0.5, 0.9)}, (0.5, 0.9)),
    ],
    ids=str,
)
def test_signs_of_gradients_have_no_momentum_unless_asked(options: dict[str, Any], betas: tuple[float, float]) -> None:
    assert thinwire.CDAdam(parameters(), **options).param_groups[0]["betas"] == betas


def test_an_eps_that_is_zero_as_float32() -> None:
    with pytest.raises(ValueError, match=r"^eps=1e-50: expected"):
        thinwire.SketchedAMSGrad(parameters(), eps=1e-50)


def test_the_limits_themselves_are_fine() -> None:
    for ratio in (1e-9, 1, 1.0):
        thinwire.CDAdam(parameters(), codec="topk", ratio=ratio)
    for k in (1, ELEMENTS, None):
        thinwire.SketchedAMSGrad(parameters(), rows=1, columns=1, k=k, seed=2**63 - 1)
    thinwire.SketchedAMSGrad(parameters(), rows=15)
    CountSketch(BACKENDS["reference"], 1, 2**30)  # whose table would be 4 GB


def test_k_is_one_of_all_groups_together() -> None:
    first, second = parameters()
    with pytest.raises(ValueError, match=r"^k=4: .*the number of parameters, 3$"):
        thinwire.SketchedAMSGrad([first], k=4)
    optimizer = thinwire.SketchedAMSGrad([first], k=3)
    optimizer.add_param_group({"params": [second]})
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert int((first != 1).sum() + (second != 1).sum()) == 3


def test_a_frozen_parameter_does_not_count() -> None:
    first, second = parameters()
    second.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^k=5: .*the number of parameters, 3$"):
        thinwire.SketchedAMSGrad([first, second], k=5)
