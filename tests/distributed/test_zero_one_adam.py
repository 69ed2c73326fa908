"""Local steps of 0/1 Adam, as users meet them: when replicas part, how they meet again, and what may come between."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest, run_nodes, token_loss, token_net
from tests.distributed.stages import FREEZE, LOCAL_STEPS, make
from tests.harness import run_ranks, run_ranks_expecting_errors

LAST = 30
each_grid = pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2)])


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    attach: bool = False
    scaler: bool = False
    """Whether a GradScaler is in use."""
    steps: int = LAST
    same_batch: bool = False
    synchronize_after: Sequence[int] = ()
    overflow_in: Sequence[int] = ()
    """Steps in which the gradients of rank 1 are not finite."""
    lr_of: dict[int, float] = field(default_factory=dict)
    """From a step on."""


@dataclass
class Seen:
    """After a step, on a rank."""

    parameters: str
    synchronized: bool
    moved: bool
    finite: bool
    skipped: int
    rounds: int
    sent: int
    sent_in_node: int
    loss: float


class Run:
    def __init__(self, rank: int, case: Case) -> None:
        self.rank, self.case = rank, case
        self.net = token_net(case.dtype)
        self.optimizer = make("ZeroOneAdam", self.net.parameters(), **case.options)
        # A power of two, so that scaling changes no bit of a gradient.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=case.scaler)
        self.model: nn.Module = self.net
        if case.attach:
            self.model = DistributedDataParallel(self.net)
            thinwire.attach(self.model, self.optimizer, grad_scaler=self.scaler if case.scaler else None)

    def backward(self, step: int) -> float:
        loss = token_loss(self.model, self.rank, 0 if self.case.same_batch else step)
        bad = self.rank == 1 and step in self.case.overflow_in
        self.scaler.scale(loss * float("inf") if bad else loss).backward()
        return loss.item()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def now(self) -> str:
        return digest(self.net.parameters())

    def train(self) -> list[Seen]:
        seen = []
        for step in range(1, self.case.steps + 1):
            for group in self.optimizer.param_groups:
                group["lr"] = self.case.lr_of.get(step, group["lr"])
            before = self.now()
            loss = self.backward(step)
            self.step()
            if step in self.case.synchronize_after:
                self.optimizer.synchronize()
            seen.append(self.look(before, loss))
        return seen

    def look(self, before: str, loss: float) -> Seen:
        metrics = self.optimizer.metrics()
        state = [value for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        return Seen(
            parameters=self.now(),
            synchronized=self.optimizer.is_synchronized,
            moved=self.now() != before,
            finite=all(bool(value.isfinite().all()) for value in [*state, *self.net.parameters()]),
            skipped=metrics.skipped_steps,
            rounds=metrics.rounds,
            sent=metrics.bytes_sent,
            sent_in_node=metrics.node_bytes_sent,
            loss=loss,
        )


def train(rank: int, world_size: int, case: Case) -> list[Seen]:
    return Run(rank, case).train()


def assert_equal_when_synchronized(of_ranks: Sequence[list[Seen]], apart: Sequence[int]) -> None:
    """Apart after the steps `apart` and no others; and apart means apart."""
    for step, seen in enumerate(zip(*of_ranks, strict=True), 1):
        assert [of_rank.synchronized for of_rank in seen] == [step not in apart] * len(of_ranks), f"step {step}"
        replicas = {of_rank.parameters for of_rank in seen}
        assert (len(replicas) == 1) == (step not in apart), f"step {step}: {len(replicas)} different replicas"


# The schedule --------------------------------------------------------------------------------------------------------


@each_grid
def test_replicas_part_in_local_steps_and_meet_in_the_others(nodes: int, ranks: int) -> None:
    of_ranks = run_nodes(train, nodes, ranks, Case())
    assert_equal_when_synchronized(of_ranks, [step for step in LOCAL_STEPS if step <= LAST])
    for first in range(0, nodes * ranks, ranks):  # the ranks of a node are one worker, and always equal
        for of_rank in of_ranks[first : first + ranks]:
            assert [s.parameters for s in of_rank] == [s.parameters for s in of_ranks[first]]
    for of_rank in of_ranks:
        assert all(seen.moved and seen.finite for seen in of_rank)


@each_grid
def test_nothing_is_sent_in_local_steps(nodes: int, ranks: int) -> None:
    for of_rank in run_nodes(train, nodes, ranks, Case()):
        sent, rounds, in_node = (
            np.diff([0, *(getattr(s, k) for s in of_rank)]) for k in ("sent", "rounds", "sent_in_node")
        )
        for counts in (sent, rounds):
            assert [step for step, count in enumerate(counts, 1) if count == 0] == [s for s in LOCAL_STEPS if s <= LAST]
        assert (in_node > 0).all() if ranks > 1 else not in_node.any()  # a node averages its gradients all the same


def test_an_interval_of_1_never_parts() -> None:
    of_ranks = run_ranks(train, 2, Case({"local_step_clipper": 1}, synchronize_after=(15, 20)))
    assert_equal_when_synchronized(of_ranks, [])
    rounds = np.diff([0, *(seen.rounds for seen in of_ranks[0])])
    assert len(set(rounds.tolist())) == 1, "a synchronize() sent something, or a step did not"


# synchronize() -------------------------------------------------------------------------------------------------------


@each_grid
def test_synchronize_makes_replicas_equal_to_the_bit(nodes: int, ranks: int) -> None:
    """After local steps, where it costs an exchange; elsewhere it costs nothing, and training is as without it."""
    by_hand = (2, 5, 14, 15, 16, 20)
    of_ranks = run_nodes(train, nodes, ranks, Case(synchronize_after=by_hand))
    assert_equal_when_synchronized(of_ranks, [step for step in LOCAL_STEPS if step <= LAST and step not in by_hand])
    plain = run_nodes(train, nodes, ranks, Case())
    for of_rank, without in zip(of_ranks, plain, strict=True):
        assert [s.parameters for s in of_rank[:14]] == [s.parameters for s in without[:14]]
        assert of_rank[13].sent == without[13].sent
        assert of_rank[14].sent > without[14].sent
        assert all(seen.moved and seen.finite for seen in of_rank)


def test_synchronize_does_the_same_for_an_attached_model() -> None:
    plain, attached = (
        run_ranks(train, 2, Case(synchronize_after=(2, 15, 20), attach=attach)) for attach in (False, True)
    )
    for of_rank, of_attached in zip(plain, attached, strict=True):
        assert [s.parameters for s in of_rank] == [s.parameters for s in of_attached]


def synchronize_after_loading(rank: int, world_size: int, steps: int) -> list[str]:
    first, second = Run(rank, Case(steps=steps)), Run(rank, Case())
    first.train()
    second.net.load_state_dict(first.net.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer._state_of_this_rank()))
    assert not second.optimizer.is_synchronized
    for run in (first, second):
        run.optimizer.synchronize()
    return [first.now(), second.now()]


@pytest.mark.parametrize("steps", LOCAL_STEPS[1:4])
def test_synchronize_can_be_the_first_that_a_loaded_optimizer_does(steps: int) -> None:
    assert len({now for of_rank in run_ranks(synchronize_after_loading, 2, steps) for now in of_rank}) == 1


def synchronize_twice(rank: int, world_size: int) -> list[tuple[str, int]]:
    run = Run(rank, Case(steps=21))
    run.train()
    seen = [(run.now(), run.optimizer.metrics().rounds)]
    for _ in range(2):
        run.optimizer.synchronize()
        seen.append((run.now(), run.optimizer.metrics().rounds))
    return seen


def test_synchronize_is_nothing_for_equal_replicas() -> None:
    for parted, together, again in run_ranks(synchronize_twice, 2):
        assert parted != together
        assert together == again


def synchronize_early(rank: int, world_size: int, steps: int) -> tuple[str, list[Seen]]:
    """Between backward and step(), then go on as if nothing had been tried."""
    run = Run(rank, Case(attach=True, steps=steps))
    seen = run.train()
    run.backward(steps + 1)
    with pytest.raises(RuntimeError) as refused:
        run.optimizer.synchronize()
    run.step()
    for step in range(steps + 2, LAST + 1):
        before, loss = run.now(), run.backward(step)
        run.step()
        seen.append(run.look(before, loss))
    return str(refused.value), seen


@pytest.mark.parametrize("steps", [FREEZE, 20], ids=["equal replicas", "parted replicas"])
def test_synchronize_between_backward_and_step_is_refused_and_changes_nothing(steps: int) -> None:
    plain = run_ranks(train, 2, Case(attach=True))
    for (message, seen), undisturbed in zip(run_ranks(synchronize_early, 2, steps), plain, strict=True):
        assert message == "synchronize() between backward and step(): call it after step(), on all ranks"
        assert [s.parameters for s in seen[steps:]] == [s.parameters for s in undisturbed[steps + 1 :]]


def synchronize_alone(rank: int, world_size: int, steps: int) -> None:
    """Rank 1 has not heard of it, and goes on."""
    run = Run(rank, Case(steps=steps))
    run.train()
    if rank == 0:
        run.optimizer.synchronize()
    for step in range(steps + 1, LAST + 1):
        run.backward(step)
        run.step()


@pytest.mark.parametrize("steps", [15, 19], ids=["before a synchronising step", "before a local step"])
def test_synchronize_on_some_ranks_only_stops_all(steps: int) -> None:
    for error in run_ranks_expecting_errors(synchronize_alone, 2, steps):
        assert error.type_name == "CorruptPacket"
        assert "synchronize" in error.message or "step is" in error.message


# Kinds of numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case({"lr": 0.003}, same_batch=True),
        Case({"lr": 0.003}, torch.bfloat16, same_batch=True),
        Case({"lr": 0.003, "error_dtype": torch.bfloat16}, same_batch=True),
        Case({"lr": 0.003, "error_dtype": torch.bfloat16}, torch.bfloat16, same_batch=True, attach=True),
    ],
    ids=["float32", "bfloat16", "bfloat16 errors", "bfloat16 both, attached"],
)
def test_it_trains_with(case: Case) -> None:
    of_ranks = run_ranks(train, 2, case)
    assert_equal_when_synchronized(of_ranks, [step for step in LOCAL_STEPS if step <= LAST])
    for of_rank in of_ranks:
        at_the_freeze = of_rank[FREEZE].loss
        assert at_the_freeze < 0.95 * of_rank[0].loss
        assert np.mean([seen.loss for seen in of_rank[-4:]]) < 0.8 * at_the_freeze
        assert all(seen.finite for seen in of_rank)


DENSE, SIGNS, SYNC, LOCAL, SYNC_AFTER_LOCAL = 3, 5, 12, 15, 16


@pytest.mark.parametrize(("attach", "scaler"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("overflow_in", [(DENSE,), (SIGNS,), (SYNC,), (LOCAL,), (SYNC_AFTER_LOCAL,), (19, 20, 21, 22)])
def test_an_overflow_on_one_rank_poisons_nobody(overflow_in: tuple[int, ...], attach: bool, scaler: bool) -> None:
    of_ranks = run_ranks(train, 2, Case(overflow_in=overflow_in, attach=attach, scaler=scaler))
    for of_rank in of_ranks:
        assert all(seen.finite for seen in of_rank)
        assert all(seen.moved for step, seen in enumerate(of_rank, 1) if step not in overflow_in)
    for step, seen in enumerate(zip(*of_ranks, strict=True), 1):
        assert [of_rank.synchronized for of_rank in seen] == [step not in LOCAL_STEPS] * 2
        if step not in LOCAL_STEPS:
            assert seen[0].parameters == seen[1].parameters, f"step {step}"
    (good, bad), first = of_ranks, overflow_in[0] - 1
    if first + 1 in (DENSE, SIGNS, SYNC):  # all or none
        assert not good[first].moved
        assert not bad[first].moved
        assert (good[-1].skipped, bad[-1].skipped) == (1, 1)
    elif first + 1 == SYNC_AFTER_LOCAL:  # the local step before it is not lost
        assert good[first].moved
        assert bad[first].moved
        assert (good[-1].skipped, bad[-1].skipped) == (0, 0)
    else:  # a worker alone
        assert good[first].moved
        assert not bad[first].moved
        assert (good[-1].skipped, bad[-1].skipped) == (0, len([s for s in overflow_in if s in LOCAL_STEPS]))


def test_a_learning_rate_of_zero_stops_it_and_it_goes_on_afterwards() -> None:
    """Over several synchronisations; there is nothing to divide by in them."""
    of_ranks = run_ranks(train, 2, Case(lr_of={15: 0.0, 24: 0.01}))
    for of_rank in of_ranks:
        assert [step for step, seen in enumerate(of_rank, 1) if not seen.moved] == list(range(15, 24))
        assert all(seen.finite for seen in of_rank)
        assert of_rank[25].parameters == of_ranks[0][25].parameters
