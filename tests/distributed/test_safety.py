"""What a run of weeks is watched for: steps skipped together, in a row, scales of GradScaler, replicas that part."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.conformance.test_conformance import OPTIMIZERS, Entry, every_optimizer
from tests.distributed.common import digest, run_nodes, token_loss, token_net
from tests.harness import run_ranks, run_ranks_expecting_errors

NAN, INF = math.nan, math.inf
ALL = (0, 1, 2)
MOST = 3
"""The value of max_consecutive_skips here."""

# Skipped steps -------------------------------------------------------------------------------------------------------

Poison = tuple[Collection[int], str, float]
"""The ranks, the parameter and the value."""
WELL: Poison = ((), "scale", 0.0)
PLAN: list[Poison] = [
    WELL,
    ((0,), "embedding.weight", NAN),
    WELL,
    ((1, 2), "head.bias", INF),
    ((2,), "scale", -INF),
    WELL,
    (ALL, "hidden.weight", NAN),
]
"""Parameters from the first bucket to the last; never more than two bad steps in a row."""


def take(net: nn.Module, optimizer: Any, rank: int, step: int, poison: Poison) -> None:
    ranks, name, value = poison
    token_loss(net, rank, step).backward()
    if rank in ranks:
        gradient = net.get_parameter(name).grad
        assert gradient is not None
        gradient.view(-1)[-1] = value
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()


def skip(rank: int, world_size: int, entry: Entry) -> dict[str, Any]:
    net = token_net()
    optimizer = entry.make(net.parameters(), lr=entry.lr, bucket_mb=0.01, max_consecutive_skips=MOST)
    seen: dict[str, Any] = {"plan": [], "in a row": []}
    for step, poison in enumerate(PLAN):
        before = digest(net.parameters())
        take(net, optimizer, rank, step, poison)
        finite = all(bool(s.isfinite().all()) for p in net.parameters() for s in optimizer.state[p].values())
        after = digest(net.parameters())
        seen["plan"].append((after != before, optimizer.metrics().skipped_steps, finite, after))
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step in range(len(PLAN), len(PLAN) + MOST):  # the last step of the plan was bad already
        try:
            take(net, optimizer, rank, step, ((step % world_size,), "head.weight", NAN))
            seen["in a row"].append("")
        except thinwire.TooManySkips as error:
            seen["in a row"].append(str(error))
            break
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    for step in range(MOST - 1):
        take(net, optimizer, rank, step, ((1,), "scale", INF))  # would be too many, if the others still counted
    take(net, optimizer, rank, 50, WELL)
    seen["afterwards"] = digest(net.parameters())
    seen["moved"] = seen["afterwards"] != seen["plan"][-1][-1]
    return seen


@every_optimizer
def test_bad_steps_are_skipped_together_and_too_many_are_an_error(entry: Entry) -> None:
    everybody = run_ranks(skip, len(ALL), entry)
    for seen in everybody:
        assert seen == everybody[0], "ranks have parted"
        skipped = 0
        for (ranks, _, _), (moved, counted, finite, _) in zip(PLAN, seen["plan"], strict=True):
            skipped += bool(ranks)
            assert (moved, counted, finite) == (not ranks, skipped, True)
        first, second = seen["in a row"]
        assert first == ""
        assert second.startswith(f"{MOST} steps in a row, up to step {len(PLAN) + 2}, were skipped")
        assert f"max_consecutive_skips={MOST}" in second
        assert seen["moved"]


def _bad_steps(optimizer: thinwire.Birder, p: nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        p.grad = torch.full((5,), NAN)
        optimizer.step()


def test_a_hundred_in_a_row_are_too_many_unless_told_otherwise() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = thinwire.Birder([p])
    _bad_steps(optimizer, p, 99)
    with pytest.raises(thinwire.TooManySkips, match="100 steps in a row, up to step 100"):
        _bad_steps(optimizer, p, 1)
    _bad_steps(thinwire.Birder([p], max_consecutive_skips=None), p, 250)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
@every_optimizer
def test_bad_limits_of_skips_are_refused_by_name(entry: Entry, value: object) -> None:
    with pytest.raises(
        ValueError, match=f"max_consecutive_skips={value!r}: expected a positive number of steps, or None"
    ):
        entry.make([nn.Parameter(torch.ones(5))], max_consecutive_skips=value)


@pytest.mark.parametrize("value", [-1, 1.5, None, True, "3"])
@every_optimizer
def test_bad_intervals_of_checks_are_refused_by_name(entry: Entry, value: object) -> None:
    with pytest.raises(ValueError, match=f"check_replicas_every={value!r}: expected a number of steps, or 0 for never"):
        entry.make([nn.Parameter(torch.ones(5))], check_replicas_every=value)


# GradScaler ----------------------------------------------------------------------------------------------------------

OVERFLOWS = {3: (1,), 4: (0, 2), 11: (2,), 12: (2,), 13: (1,)}
SCALED_STEPS, GROWTH_INTERVAL, START = 20, 3, 1024.0


def scale(rank: int, world_size: int, entry: Entry) -> tuple[list[float], str]:
    net = token_net()
    model = DistributedDataParallel(net)
    optimizer = entry.make(net.parameters(), lr=entry.lr, bucket_mb=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=GROWTH_INTERVAL)
    thinwire.attach(model, optimizer, grad_scaler=scaler)
    scales = []
    for step in range(SCALED_STEPS):
        loss = token_loss(model, rank, step)
        scaler.scale(loss * INF if rank in OVERFLOWS.get(step, ()) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, digest(net.parameters())


def expected_scales() -> list[float]:
    scales, now, good = [], START, 0
    for step in range(SCALED_STEPS):
        good = 0 if step in OVERFLOWS else good + 1
        if step in OVERFLOWS:
            now /= 2
        elif good == GROWTH_INTERVAL:
            now, good = 2 * now, 0
        scales.append(now)
    return scales


SHARING = [entry for entry in OPTIMIZERS if entry.optimizer is not thinwire.ZeroOneAdam]
"""ZeroOneAdam has steps that a rank skips alone."""


@pytest.mark.parametrize("entry", SHARING, ids=str)
def test_scales_fall_and_grow_together(entry: Entry) -> None:
    everybody = run_nodes(scale, 3, 1, entry)
    for scales, parameters in everybody:
        assert scales == expected_scales()
        assert parameters == everybody[0][1]


def test_scales_fall_and_grow_together_in_nodes() -> None:
    everybody = run_nodes(scale, 2, 2, SHARING[0])
    assert [scales for scales, _ in everybody] == 4 * [expected_scales()]


# Replicas ------------------------------------------------------------------------------------------------------------


def flip(values: torch.Tensor) -> None:
    """One bit of one element, large enough to outlive the rounding of a step."""
    values.detach().view(-1)[7:8].view(torch.int32).bitwise_xor_(1 << 20)


Drift = tuple[list[str], bool]
"""What each step raised, and whether all went well after a state was loaded."""


def drift(rank: int, world_size: int, attach: bool, dtype: torch.dtype, every: int, where: str) -> Drift:
    """Between the second and the third step a bit of the hidden weights changes on rank 1."""
    net = token_net(dtype)
    model: nn.Module = net
    optimizer = thinwire.Birder(net.parameters(), lr=1e-2, bucket_mb=0.01, check_replicas_every=every)
    if attach:
        model = DistributedDataParallel(net)
        thinwire.attach(model, optimizer)
    p = net.get_parameter("hidden.weight")
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    raised = []
    for step in range(4):
        if step == 2 and rank == 1:
            flip(p if where == "parameter" else optimizer.state[p]["master"])
        raised.append(_try_step(model, optimizer, rank, step))
        if raised[-1]:
            break
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    again = [_try_step(model, optimizer, rank, step) for step in range(4)]
    return raised, not any(again)


def _try_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> str:
    token_loss(model, rank, step).backward()
    try:
        optimizer.step()
    except thinwire.ReplicasDiffer as error:
        return str(error)
    finally:
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize(
    ("attach", "dtype", "where", "name"),
    [
        (False, torch.float32, "parameter", "parameter 2"),
        (True, torch.float32, "parameter", "parameter 'hidden.weight'"),
        (True, torch.bfloat16, "master", "parameter 'hidden.weight'"),
        (False, torch.float16, "master", "parameter 2"),
    ],
)
@pytest.mark.parametrize("ranks_a_node", [1, 2])
def test_a_flipped_bit_is_caught_and_named(
    ranks_a_node: int, attach: bool, dtype: torch.dtype, where: str, name: str
) -> None:
    for raised, well in run_nodes(drift, 4 // ranks_a_node, ranks_a_node, attach, dtype, 2, where):
        assert raised[:3] == ["", "", ""]
        assert f"after step 4 {name} differs between ranks: one value on rank 1, another on ranks 0, 2, 3" in raised[3]
        assert well


def test_nobody_looks_when_told_not_to() -> None:
    for raised, _ in run_ranks(drift, 2, False, torch.float32, 0, "parameter"):
        assert raised == ["", "", "", ""]


def drift_between_synchronizations(rank: int, world_size: int, dtype: torch.dtype) -> tuple[list[str], list[str], str]:
    """ZeroOneAdam, checked at every step, through all its stages; then a bit of an anchor is flipped on rank 1."""
    (entry,) = (entry for entry in OPTIMIZERS if str(entry) == "ZeroOneAdam")
    net = token_net(dtype)
    optimizer = entry.make(net.parameters(), lr=entry.lr, bucket_mb=0.01, check_replicas_every=1)
    raised, digests = [], []
    for step in range(30):
        raised.append(_try_step(net, optimizer, rank, step))
        digests.append(digest(net.parameters()))
    while optimizer.is_synchronized:
        raised.append(_try_step(net, optimizer, rank, len(raised)))
    if rank == 1:
        flip(optimizer.state[net.get_parameter("hidden.weight")]["anchor"])
    caught = _try_step(net, optimizer, rank, len(raised))
    return raised, digests, caught


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_steps_are_no_drift_but_what_they_return_to_is_watched(dtype: torch.dtype) -> None:
    first, second = run_ranks(drift_between_synchronizations, 2, dtype)
    assert not any(first[0] + second[0])
    apart = sum(ours != theirs for ours, theirs in zip(first[1], second[1], strict=True))
    assert 5 < apart < 20, "the schedule has local steps, and others"
    for _, _, caught in (first, second):
        assert "parameter 2 differs between ranks: one value on rank 0, another on rank 1" in caught


def check_alone(rank: int, world_size: int) -> int:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank that is alone has nobody to compare with")

    dist.all_gather = dist.all_gather_object = refuse
    net = token_net()
    optimizer = thinwire.Birder(net.parameters(), check_replicas_every=1)
    for step in range(3):
        take(net, optimizer, rank, step, WELL)
    return optimizer.metrics().bytes_sent


def test_a_single_rank_compares_nothing() -> None:
    assert run_ranks(check_alone, 1) == [0]


def differ(rank: int, world_size: int, argument: str) -> None:
    net = token_net()
    options: dict[str, Any] = {argument: 5 + rank}
    optimizer = thinwire.Birder(net.parameters(), **options)
    take(net, optimizer, rank, 0, WELL)


@pytest.mark.parametrize("argument", ["check_replicas_every", "max_consecutive_skips"])
def test_ranks_must_agree_on_what_is_watched(argument: str) -> None:
    for error in run_ranks_expecting_errors(differ, 2, argument):
        assert error.type_name == "RuntimeError"
        assert f"ranks disagree on {argument}: 5 on rank 0; 6 on rank 1" in error.message
