"""States that are loaded in the middle of a run: by all ranks, which then agree again, or by one of them by mistake."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import digest, token_loss, token_net
from tests.forked import Run, run_to_the_end
from tests.harness import run_ranks, run_ranks_expecting_errors

Optimizer = Any

WARMUP = {"betas": (0.9, 0.5), "warmup_steps": 3}
STAGES: dict[str, tuple[type, dict[str, Any], int, int]] = {
    # A class with its options, a step in one stage and one in another, whose packets are of other sizes.
    "1-bit Adam": (thinwire.OneBitAdam, WARMUP, 2, 5),
    "1-bit LAMB": (thinwire.OneBitLamb, WARMUP, 2, 5),
    "0/1 Adam": (thinwire.ZeroOneAdam, {"var_freeze_step": 4, "var_update_scaler": 2}, 1, 3),
    "0/1 Adam, local steps": (
        thinwire.ZeroOneAdam,
        {"var_freeze_step": 2, "var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 2},
        1,
        5,
    ),
}


def _train(optimizer: Optimizer, p: torch.Tensor, rank: int, steps: int) -> None:
    for _ in range(steps):
        step = int(optimizer.state[p]["step"])
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.step()


def _load_alone(rank: int, world_size: int, name: str, backwards: bool) -> tuple[str, str]:
    """What a rank raises when rank 1 alone loads an earlier or later state, of another stage."""
    kind, options, early, late = STAGES[name]
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5000))
    optimizer = kind([p], **options)
    _train(optimizer, p, rank, early)
    saved = copy.deepcopy(optimizer._state_of_this_rank())
    if backwards:
        _train(optimizer, p, rank, late - early)
        if rank == 1:
            optimizer.load_state_dict(saved)
    else:
        ahead = kind([copy.deepcopy(p)], **options)
        ahead.load_state_dict(saved)
        _train(ahead, ahead.param_groups[0]["params"][0], rank, late - early)
        if rank == 1:
            optimizer.load_state_dict(ahead._state_of_this_rank())
    try:
        _train(optimizer, p, rank, 4)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_one_rank_that_loads_alone_is_an_error_on_all() -> None:
    """gloo ends the process when a message is longer than the room for it, as those of another stage are."""
    cases = [(name, backwards) for name in STAGES for backwards in (True, False)]
    # Twelve processes at once, of which none is to hang: a busy machine may take its time.
    runs = [Run(_load_alone, 3, case, deadline=120.0, in_haste=True) for case in cases]
    for case, ended in zip(cases, run_to_the_end(runs, at_once=12), strict=True):
        assert [rank.status for rank in ended] == [0, 0, 0], (case, ended)
        reports = [rank.report for rank in ended]
        assert {kind for kind, _ in reports} == {"PeerLost"}, (case, reports)
        assert "the agreement of all ranks" in reports[1][1]
        for _, message in (reports[0], reports[2]):
            assert "load_state_dict()" in message or "caused pair closure" in message, (case, message)


def _load_different(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(5000))
    optimizer = thinwire.OneBitAdam([p], betas=(0.9, 0.5), warmup_steps=3)
    _train(optimizer, p, rank, 2)
    early, x = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    _train(optimizer, p, rank, 3)
    late = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        p.copy_(x)
    optimizer.load_state_dict(early if rank == 1 else late)
    _train(optimizer, p, rank, 1)


def test_ranks_that_load_different_states_are_told_which() -> None:
    for error in run_ranks_expecting_errors(_load_different, 3):
        assert error.type_name == "RuntimeError"
        assert "ranks disagree on the number of steps taken: 5 on ranks 0, 2; 2 on rank 1" in error.message


def _go_back(rank: int, world_size: int, attach: bool, times: int) -> tuple[str, str]:
    """A run that goes back to an earlier state several times, and one that never does."""

    def steps(model: torch.nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
        for batch in range(first, last):
            token_loss(model, rank, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    digests = []
    for goes_back in (False, True):
        net = token_net()
        model = DDP(net) if attach else net
        optimizer = thinwire.OneBitAdam(model.parameters(), lr=1e-2, **WARMUP)
        if attach:
            thinwire.attach(model, optimizer)
        steps(model, optimizer, 0, 2)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        for _ in range(times if goes_back else 0):
            steps(model, optimizer, 2, 6)
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        steps(model, optimizer, 2, 8)
        digests.append(digest(net.parameters()))
    return digests[0], digests[1]


@pytest.mark.parametrize("attach", [False, True], ids=["step", "attach"])
def test_a_run_may_go_back_to_an_earlier_stage(attach: bool) -> None:
    outcomes = run_ranks(_go_back, 3, attach, 3)
    assert len({each for pair in outcomes for each in pair}) == 1


def _skip_a_backward(rank: int, world_size: int) -> str:
    """After a load one rank has no gradients in backward, and all use their process group before step()."""
    net = token_net()
    model = DDP(net)
    optimizer = thinwire.Birder(model.parameters(), lr=1e-2)
    thinwire.attach(model, optimizer)
    for batch in range(6):
        if batch == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if batch != 3 or rank != 1:
            token_loss(model, rank, batch).backward()
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        optimizer.zero_grad()
    return digest(net.parameters())


def test_ranks_do_not_agree_in_the_middle_of_backward() -> None:
    assert len(set(run_ranks(_skip_a_backward, 2))) == 1


def _add_after_a_load(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    optimizer = thinwire.Birder(model.parameters())
    thinwire.attach(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_a_load_does_not_open_the_layout_again() -> None:
    for error in run_ranks_expecting_errors(_add_after_a_load, 2):
        assert "add_param_group after the first step or attach" in error.message


def _load_another_variance(rank: int, world_size: int) -> None:
    p = torch.nn.Parameter(torch.ones(500))
    optimizer = thinwire.OneBitAdam([p], betas=(0.9, 0.5), warmup_steps=3)
    _train(optimizer, p, rank, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    if rank == 1:
        saved["state"][0]["v"] *= 2
    optimizer.load_state_dict(saved)
    _train(optimizer, p, rank, 1)


def test_ranks_compare_the_state_that_they_share() -> None:
    for error in run_ranks_expecting_errors(_load_another_variance, 2):
        assert "ranks disagree on the checksum of 'v' of the optimizer's state" in error.message
