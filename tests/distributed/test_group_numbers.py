"""Learning rates and other numbers of parameter groups that differ between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire
from tests.distributed.common import digest, environment, named, run_nodes, token_loss, token_net
from tests.harness import run_ranks
from thinwire.optimizers.group_numbers import GroupNumbers

LOCAL_STEPS = {
    "betas": (0.9, 0.5),
    "var_freeze_step": 4,
    "var_update_scaler": 4,
    "local_step_scaler": 1,
    "local_step_clipper": 4,
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Birder": (thinwire.Birder, {}),
    "OneBitAdam": (thinwire.OneBitAdam, {"betas": (0.9, 0.5), "warmup_steps": 2}),
    "SketchedAMSGrad": (thinwire.SketchedAMSGrad, {}),
}


def groups_of(net: torch.nn.Module) -> list[dict[str, Any]]:
    first, *rest = net.parameters()
    return [{"params": [first]}, {"params": rest, "weight_decay": 0.0}]


def change_one(rank: int, world_size: int, key: str, values: tuple[Any, Any], odd_rank: int) -> dict[str, Any]:
    """What each optimizer raises when one rank changes a number of its second group before the third step."""
    told = {}
    for name, (make, options) in OPTIMIZERS.items():
        with named(name):
            net = token_net()
            optimizer = make(groups_of(net), lr=1e-2, **options)
            for step in range(2):
                token_loss(net, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.param_groups[1][key] = values[rank == odd_rank]
            before = digest(net.parameters())
            token_loss(net, rank, 2).backward()
            with pytest.raises(RuntimeError, match="ranks disagree") as raised:
                optimizer.step()
            assert digest(net.parameters()) == before
            with pytest.raises(RuntimeError):  # for good
                optimizer.step()
            told[name] = str(raised.value)
    return told


def test_a_learning_rate_that_differs_is_named_on_all_ranks_before_anything_is_applied() -> None:
    told = run_ranks(change_one, 3, "lr", (0.25, 0.5), 1)
    for name in OPTIMIZERS:
        (text,) = {of_rank[name] for of_rank in told}
        assert text == (
            "ranks disagree on lr of parameter group 1 in step 3: 0.25 on ranks 0, 2; 0.5 on rank 1. It must be the "
            "same on all ranks."
        )


def test_the_ranks_of_nodes_that_agree_among_themselves_are_told_too() -> None:
    """Rank 3 is the second of node 1. Ranks 0 and 2 are first ones, and know of it only through their nodes."""
    told = run_nodes(change_one, 2, 2, "weight_decay", (0.0, 0.125), 3)
    assert {text for of_rank in told for text in of_rank.values()} == {
        "ranks disagree on weight_decay of parameter group 1 in step 3: 0.0 on ranks 0, 1, 2; 0.125 on rank 3. It must "
        "be the same on all ranks."
    }


def differ_in_a_local_step(rank: int, world_size: int) -> tuple[int, str]:
    net = token_net()
    optimizer = thinwire.ZeroOneAdam(net.parameters(), lr=1e-2, **LOCAL_STEPS)
    for step in range(1, 20):
        if step == 10:
            assert not optimizer.is_synchronized
        # In one local step only: at the next exchange the rates are equal again.
        optimizer.param_groups[0]["lr"] = 0.02 if step == 10 and rank else 0.01
        token_loss(net, rank, step).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
        optimizer.zero_grad()
    raise AssertionError("nobody noticed")


def test_a_rate_that_differs_in_a_local_step_is_found_at_the_next_exchange() -> None:
    (step, text), other = run_ranks(differ_in_a_local_step, 2)
    assert (step, text) == other
    assert step == 12
    assert text.startswith("ranks disagree on lr of parameter group 0 in step 10: 0.01 on rank 0; 0.02 on rank 1.")


def differ_on_a_stream(rank: int, world_size: int) -> str:
    with environment({"THINWIRE_LANE": "stream"}):
        net = token_net()
        optimizer = thinwire.Birder(net.parameters(), lr=1e-2)
        seen = []
        for step in range(3):
            seen.append(digest(net.parameters()))
            optimizer.param_groups[0]["lr"] = 0.02 if step == 2 and rank else 0.01
            token_loss(net, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(thinwire.CorruptPacket) as raised:  # the host hears of it one step later
            optimizer.metrics()
        assert digest(net.parameters()) == seen[-1]
        return str(raised.value)


def test_a_device_applies_nothing_either() -> None:
    for rank, text in enumerate(run_ranks(differ_on_a_stream, 2)):
        assert text.startswith(f"rank {1 - rank} took step 3 with a learning rate")


def schedule(rank: int, world_size: int) -> str:
    """Numbers that change, in all the forms in which schedulers write them, while backward and step see others."""
    net = token_net()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = thinwire.Birder(groups_of(net), lr=torch.tensor(1e-2))
    thinwire.attach(model, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8, cycle_momentum=False)
    for step in range(6):
        token_loss(model, rank, step).backward()
        optimizer.param_groups[1]["weight_decay"] = 0.01 * step  # after the gradients were sent
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return digest(net.parameters())


def test_schedules_that_are_equal_on_all_ranks_are_fine() -> None:
    first, second = run_ranks(schedule, 2)
    assert first == second


def test_the_hash_follows_values_and_not_objects() -> None:
    def numbers(*steps: dict[str, Any]) -> list[int]:
        noted = GroupNumbers()
        return [noted.note(number, [{"params": [], **step}]) for number, step in enumerate(steps)]

    assert numbers({"lr": 0.1}) == numbers({"lr": torch.tensor(0.1, dtype=torch.float64)})
    assert numbers({"lr": 0.1, "wire_rank": 0}) == numbers({"lr": 0.1, "wire_rank": 1})  # a label, and not a number
    assert numbers({"lr": 0.1, "betas": (0.9, 0.99)}) == numbers({"betas": (0.9, 0.99), "lr": 0.1})
    assert numbers({"lr": 0.1})[-1] != numbers({"lr": 0.2})[-1]
    # What was different in one step stays so, also when later steps are equal.
    assert numbers({"lr": 0.1}, {"lr": 0.3})[-1] != numbers({"lr": 0.2}, {"lr": 0.3})[-1]
    assert len(set(numbers({"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1}))) == 3
    # But to note a step again changes nothing.
    noted = GroupNumbers()
    groups = [{"params": [], "lr": 0.1}]
    assert noted.note(1, groups) == noted.note(1, groups) != noted.note(2, groups)
