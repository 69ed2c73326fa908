"""What users may get wrong about the optimizers of scaled signs: the message names the argument, its value, and what
would be right; where ranks must agree, every rank says so."""

from __future__ import annotations

import copy
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.stages import FREEZE, STAGES, make, noise, parameters
from tests.harness import run_ranks

INF, NAN = math.inf, math.nan
FROZEN = ("OneBitAdam", "OneBitLamb")


def parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


def refused(name: str, message: str, **options: Any) -> None:
    """By the constructor, and for what a group may have by `add_param_group`, which leaves the group out."""
    with pytest.raises(ValueError, match=message):
        make(name, parameter(), **options)


# One argument --------------------------------------------------------------------------------------------------------

GROUP_OPTIONS = [
    ({"lr": -0.1}, "expected a number >= 0"),
    ({"lr": NAN}, "expected a number >= 0"),
    ({"lr": INF}, "expected a number >= 0"),
    ({"betas": (1.0, 0.9)}, r"expected two numbers in \[0, 1\)"),
    ({"betas": (0.9, 1.0)}, r"expected two numbers in \[0, 1\)"),
    ({"betas": (-0.1, 0.9)}, r"expected two numbers in \[0, 1\)"),
    ({"betas": (0.9, -0.1)}, r"expected two numbers in \[0, 1\)"),
    ({"betas": (0.9, NAN)}, r"expected two numbers in \[0, 1\)"),
    ({"betas": (0.9,)}, r"expected two numbers in \[0, 1\)"),
    ({"eps": 0.0}, "expected a number > 0"),
    ({"eps": -1e-8}, "expected a number > 0"),
    ({"eps": NAN}, "expected a number > 0"),
    ({"weight_decay": -1.0}, "expected a number >= 0"),
    ({"weight_decay": NAN}, "expected a number >= 0"),
]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("option", "expected"), GROUP_OPTIONS, ids=str)
def test_options_of_groups(name: str, option: dict[str, Any], expected: str) -> None:
    ((key, value),) = option.items()
    message = f"^{key}={re.escape(repr(value))}: {expected}"
    refused(name, message, **option)
    optimizer = make(name, parameter())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameter(), **option})
    assert len(optimizer.param_groups) == 1


STEPS = "expected a positive number of steps"
OWN_OPTIONS = [
    *((name, {"warmup_steps": bad}, "expected 'auto' or a positive") for name in FROZEN for bad in (0, -1, True, 1.5)),
    *((name, {"warmup_steps": "soon"}, "expected 'auto' or a positive number of steps") for name in FROZEN),
    *((name, {"total_steps": bad}, f"{STEPS}, or None") for name in FROZEN for bad in (0, -1, True, 1.5)),
    *(("ZeroOneAdam", {"var_freeze_step": bad}, STEPS) for bad in (0, -1, True, 20.0)),
    *(("ZeroOneAdam", {"var_update_scaler": bad}, STEPS) for bad in (0, -1, True, 4.0)),
    *(("ZeroOneAdam", {"local_step_scaler": bad}, STEPS) for bad in (0, -1, True, 3.0)),
    *(("ZeroOneAdam", {"local_step_clipper": bad}, STEPS) for bad in (0, -1, True, 4.0)),
    *(
        (name, {"error_dtype": dtype}, "expected torch.float32 or torch.bfloat16")
        for name in (*FROZEN, "ZeroOneAdam")
        for dtype in (torch.float16, torch.float64, torch.int8)
    ),
    *(
        (name, {"variance_floor": bad}, "expected a number in [0, 1]")
        for name in (*FROZEN, "ZeroOneAdam")
        for bad in (-0.1, 1.1, NAN)
    ),
    *(("OneBitLamb", {"factor_threshold": bad}, "expected a number in [0, 1)") for bad in (-0.1, 1.0, 1.5, NAN)),
]


@pytest.mark.parametrize(("name", "option", "expected"), OWN_OPTIONS, ids=str)
def test_options_of_their_own(name: str, option: dict[str, Any], expected: str) -> None:
    ((key, value),) = option.items()
    refused(name, f"^{key}={re.escape(repr(value))}: {re.escape(expected)}", **option)


LIMITS = [("Lamb", "min_coeff", "max_coeff"), ("OneBitLamb", "min_coeff", "max_coeff")]
LIMITS += [("OneBitLamb", "factor_min", "factor_max")]


@pytest.mark.parametrize(("name", "low", "high"), LIMITS)
@pytest.mark.parametrize("values", [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (0.5, INF), (NAN, 1.0), (0.5, NAN)], ids=str)
def test_limits(name: str, low: str, high: str, values: tuple[float, float]) -> None:
    given = f"{low}={values[0]!r} and {high}={values[1]!r}"
    refused(name, f"^{re.escape(given)}: expected 0 < {low} <= {high}", **{low: values[0], high: values[1]})


@pytest.mark.parametrize(("name", "low", "high"), LIMITS)
def test_limits_may_be_equal(name: str, low: str, high: str) -> None:
    make(name, parameter(), **{low: 1.0, high: 1.0})


# Arguments that do not go together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize(("beta2", "window"), [(0.999, 1000), (0.99, 100), (0.9, 10), (0.75, 4)])
def test_a_warm_up_shorter_than_a_window_of_the_variance(name: str, beta2: float, window: int) -> None:
    options = {"betas": (0.9, beta2), "warmup_steps": window - 1}
    message = (
        rf"^warmup_steps={window - 1}: .*= {window} steps.*Expected at least {window}.*than {re.escape(str(beta2))}"
    )
    refused(name, message, **options)
    make(name, parameter(), **{**options, "warmup_steps": window})
    # Of every group: the one with the longest window decides.
    optimizer = make(name, parameter(), betas=(0.9, 0.0), warmup_steps=window - 1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameter(), "betas": (0.9, beta2)})


EARLIEST = 17
"""The first step with which "auto" may end the warm-up for a beta2 of 0.9; for a test below to confirm."""


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize(
    ("warmup_steps", "total_steps", "least"),
    [(100, 100, 100), (150, 100, 150), ("auto", EARLIEST, EARLIEST), ("auto", 9, EARLIEST)],
)
def test_a_warm_up_as_long_as_the_run_is_a_warning(
    name: str, warmup_steps: int | str, total_steps: int, least: int
) -> None:
    with pytest.warns(RuntimeWarning) as caught:
        make(name, parameter(), warmup_steps=warmup_steps, total_steps=total_steps)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"warmup_steps={warmup_steps!r} with total_steps={total_steps}: ")
    assert f"takes at least {least} steps" in message
    assert "the whole run is dense and sends as much as DDP" in message
    assert "smaller beta2" in message
    assert "thinwire.Birder" in message


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize(
    ("warmup_steps", "total_steps"), [(99, 100), (10, 11), ("auto", EARLIEST + 1), ("auto", 100), (99, None)]
)
def test_a_warm_up_shorter_than_the_run_is_none(name: str, warmup_steps: int | str, total_steps: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(name, parameter(), warmup_steps=warmup_steps, total_steps=total_steps)


@pytest.mark.parametrize("name", FROZEN)
def test_auto_may_end_the_warm_up_with_its_earliest_step(name: str) -> None:
    (p,) = parameter()
    optimizer = make(name, [p], warmup_steps="auto")
    for _ in range(EARLIEST + 1):
        p.grad = torch.ones(3)
        optimizer.step()
    assert int(optimizer.state[p]["warmup"][0]) == EARLIEST


def test_a_freeze_before_the_first_variance_steps_are_over() -> None:
    message = "^var_freeze_step=15: .*var_update_scaler=16.*Expected at least 16"
    refused("ZeroOneAdam", message, var_freeze_step=15, var_update_scaler=16)
    make("ZeroOneAdam", parameter(), var_freeze_step=16, var_update_scaler=16)


# Ranks that differ ---------------------------------------------------------------------------------------------------

GROUP_DIFFERENCES = {
    "lr": (0.1, 0.2),
    "betas": ((0.9, 0.8), (0.9, 0.9)),
    "eps": (1e-8, 1e-6),
    "weight_decay": (0.0, 0.1),
    "maximize": (False, True),
}
FROZEN_DIFFERENCES = {
    "warmup_steps": (10, 20),
    "variance_floor": (0.1, 0.2),
    "error_dtype": (torch.float32, torch.bfloat16),
    "bucket_mb": (1.0, 2.0),
}
COEFF_DIFFERENCES = {"min_coeff": (0.01, 0.02), "max_coeff": (10.0, 5.0)}
OWN_DIFFERENCES: dict[str, dict[str, tuple[Any, Any]]] = {
    "OneBitAdam": {**FROZEN_DIFFERENCES, "warmup_steps": (10, "auto")},
    "ZeroOneAdam": {
        "var_freeze_step": (10, 11),
        "var_update_scaler": (4, 5),
        "local_step_scaler": (3, 4),
        "local_step_clipper": (4, 5),
        "variance_floor": (0.1, 0.0),
        "error_dtype": (torch.float32, torch.bfloat16),
    },
    "Lamb": COEFF_DIFFERENCES,
    "OneBitLamb": {
        **FROZEN_DIFFERENCES,
        **COEFF_DIFFERENCES,
        "factor_min": (0.5, 0.6),
        "factor_max": (4.0, 5.0),
        "factor_threshold": (0.1, 0.2),
    },
}


def differ(rank: int, world_size: int, name: str) -> dict[str, str]:
    """What the first step says of each difference; nobody hangs, so that the next can be tried."""
    said = {}
    for option, values in {**GROUP_DIFFERENCES, **OWN_DIFFERENCES[name]}.items():
        (p,) = parameter()
        optimizer = make(name, [p], **{option: values[rank]})
        p.grad = torch.ones(3)
        try:
            optimizer.step()
        except RuntimeError as error:
            said[option] = str(error)
        assert torch.equal(p, torch.ones(3)), "it moved"
    return said


@pytest.mark.parametrize("name", STAGES)
def test_ranks_that_differ_in_a_setting_are_told_so_everywhere(name: str) -> None:
    first, second = run_ranks(differ, 2, name)
    assert first == second
    for option in (*GROUP_DIFFERENCES, *OWN_DIFFERENCES[name]):
        assert first[option].startswith(f"ranks disagree on {option}")
        values = {**GROUP_DIFFERENCES, **OWN_DIFFERENCES[name]}[option]
        for rank, value in enumerate(values):
            text = str(value) if isinstance(value, torch.dtype) else repr(value)
            assert re.search(rf"{re.escape(text)}'? on rank {rank}", first[option])


# States that do not fit ----------------------------------------------------------------------------------------------


def trained(name: str, steps: int, **options: Any) -> Any:
    """An optimizer after so many steps of a process without peers."""
    optimizer = make(name, parameters((70,), (9, 8)), **options)
    train(optimizer, range(steps))
    return optimizer


def train(optimizer: Any, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = noise(tuple(p.shape), step, i)
        optimizer.step()


@pytest.mark.parametrize("saved", STAGES)
@pytest.mark.parametrize("loaded", STAGES)
def test_a_state_of_another_class(saved: str, loaded: str) -> None:
    state = trained(saved, 2).state_dict()
    optimizer = trained(loaded, 0)
    if saved == loaded:
        optimizer.load_state_dict(state)
        return
    with pytest.raises(ValueError, match=f"the state dict is of {saved}, this is {loaded}"):
        optimizer.load_state_dict(state)


def state_of_a_rank(rank: int, world_size: int, name: str) -> dict[str, Any]:
    return trained(name, 2).state_dict()


@pytest.mark.parametrize("name", STAGES)
def test_a_state_of_another_world_size(name: str) -> None:
    for state in run_ranks(state_of_a_rank, 2, name):
        with pytest.raises(ValueError, match=r"the state dict is of 2 ranks, this run has 1: .*resume with as many"):
            trained(name, 0).load_state_dict(state)


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
@pytest.mark.parametrize(
    "option",
    [
        {"error_dtype": torch.bfloat16},
        {"bucket_mb": 0.0002},  # two shards for each of the parameters
        {"bucket_mb": 0.0003},  # one for each, where the other has one for both
    ],
    ids=str,
)
def test_a_state_of_another_layout(name: str, option: dict[str, Any]) -> None:
    """Scales belong to shards: with those of others, memories and momenta would mean something else."""
    state = trained(name, 12, **option).state_dict()
    optimizer = trained(name, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that settings differ
        with pytest.raises(ValueError, match=r"bucket_mb|'\w+' is .* this optimizer needs"):
            optimizer.load_state_dict(state)
    assert int(optimizer._step_count) == 0


def loaded(name: str, state: dict[str, Any], **options: Any) -> Any:
    """An optimizer that goes on from a state that was saved with other settings."""
    optimizer = trained(name, 0, **options)
    with pytest.warns(RuntimeWarning, match=f"was saved with .*{next(iter(options))}="):
        optimizer.load_state_dict(state)
    return optimizer


@pytest.mark.parametrize("steps", [5, 12])
@pytest.mark.parametrize(
    ("name", "option"),
    [("OneBitAdam", "warmup_steps"), ("OneBitLamb", "warmup_steps"), ("ZeroOneAdam", "var_freeze_step")],
)
def test_a_state_goes_on_in_its_own_stage(name: str, option: str, steps: int) -> None:
    """After the freeze v is something else. It is the state that knows, not the settings of who loads it."""
    first = trained(name, steps)
    second = loaded(name, copy.deepcopy(first.state_dict()), **{option: 30})
    pairs = list(zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True))
    for of_first, of_second in pairs:
        of_second.data.copy_(of_first.data)
    for optimizer in (first, second):
        train(optimizer, range(steps, steps + 2))
    assert all(torch.equal(of_first, of_second) for of_first, of_second in pairs)
    assert second._session.channels["dense"].released == (steps > FREEZE)


def test_a_state_that_is_older_than_the_freeze_is_frozen_by_the_next_step() -> None:
    state = trained("ZeroOneAdam", 15, var_freeze_step=30).state_dict()
    optimizer = loaded("ZeroOneAdam", state, var_freeze_step=12)
    assert not optimizer._session.channels["dense"].released
    train(optimizer, range(15, 16))
    assert optimizer._session.channels["dense"].released
