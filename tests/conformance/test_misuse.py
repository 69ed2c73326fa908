"""What users do to an optimizer that no paper thinks of: every optimizer copes, or says what is wrong."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire
from tests.conformance.test_conformance import OPTIMIZERS, Entry, every_optimizer
from tests.distributed.common import MANY_CASES_SECONDS, digest, named, run_nodes
from tests.harness import run_ranks
from tests.testbeds import eventually
from thinwire import checkpoint

Optimizer = Any

# Gradients that are not what their memory says ------------------------------------------------------------------------


def negated(values: torch.Tensor) -> torch.Tensor:
    """The same values, in memory that holds their negatives."""
    lazily = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert lazily.is_neg()
    assert torch.equal(lazily, values)
    return lazily


def test_autograd_makes_negated_gradients() -> None:
    b = nn.Parameter(torch.ones(1))
    ((torch.complex(torch.ones(1), b).conj() * (2 + 1j)).real - 5).pow(2).sum().backward()
    assert b.grad is not None
    assert b.grad.is_neg()


def train_with(entry: Entry, rank: int, view: Callable[[torch.Tensor], torch.Tensor]) -> str:
    p = nn.Parameter(torch.linspace(-1, 1, 300))
    optimizer = entry.make([p], lr=entry.lr)
    for step in range(13):
        p.grad = view(torch.randn(300, generator=torch.Generator().manual_seed(10 * step + rank)))
        optimizer.step()
    return digest([p])


def train_both_ways(rank: int, world_size: int) -> dict[str, list[str]]:
    return {str(entry): [train_with(entry, rank, view) for view in (negated, torch.clone)] for entry in OPTIMIZERS}


@pytest.mark.parametrize(
    "nodes", [(2, 1), *(pytest.param(nodes, marks=pytest.mark.long) for nodes in ((1, 1), (2, 2)))], ids=str
)
def test_negated_gradients_have_their_own_sign(nodes: tuple[int, int]) -> None:
    for outcomes in run_nodes(train_both_ways, *nodes):
        for name, (lazily, plainly) in outcomes.items():
            assert lazily == plainly, name


@every_optimizer
def test_negated_parameters_are_refused(entry: Entry) -> None:
    with pytest.raises(ValueError, match=r"is_neg\(\).*resolve_neg\(\)"):
        entry.make([nn.Parameter(negated(torch.ones(3)))])
    p = nn.Parameter(torch.ones(3))
    optimizer = entry.make([p])
    p.grad = torch.ones(3)
    p.data = negated(torch.ones(3))
    with pytest.raises(ValueError, match=r"is_neg\(\).*resolve_neg\(\)"):
        optimizer.step()
    p.data = torch.ones(3)
    optimizer.step()
    p.data = negated(torch.ones(3))
    with pytest.raises(RuntimeError, match="lazily negated"):
        optimizer.step()


@every_optimizer
def test_a_gradient_of_another_shape_is_refused(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(8))
    optimizer = entry.make([p])
    p.data = torch.ones(2)
    p.grad = torch.ones(2)
    p.data = torch.ones(8)
    with pytest.raises(TypeError, match=r"shape \(2,\).*expected .*shape \(8,\)"):
        optimizer.step()


# Gradients that are finite, and too large ----------------------------------------------------------------------------


def train_through_spikes(rank: int, world_size: int, topology: str) -> dict[str, tuple[int, bool, float]]:
    """By optimizer: skipped steps, whether parameters and states are finite, and how far parameters have come."""
    outcomes = {}
    for entry in OPTIMIZERS:
        p, q = (nn.Parameter(torch.linspace(-1, 1, size)) for size in (300, 100))
        optimizer = entry.make([p, q], lr=entry.lr, topology=topology)
        for step in range(40):
            for x in (p, q):
                generator = torch.Generator().manual_seed(10 * step + rank)
                x.grad = x.detach() + 0.1 * torch.randn(x.shape, generator=generator)
            assert p.grad is not None
            if step == 4 or (step == 17 and rank == 0):
                p.grad[5] = 2e38  # on all ranks, whose sum is not finite, and on one of them
            optimizer.step()
        kept = [value for x in (p, q) for value in optimizer.state[x].values() if value.is_floating_point()]
        finite = all(bool(value.isfinite().all()) for value in (p, q, *kept))
        moved = float((q.detach().abs() - torch.linspace(-1, 1, 100).abs()).mean())
        outcomes[str(entry)] = (optimizer.metrics().skipped_steps, finite, moved)
    return outcomes


@pytest.mark.parametrize(
    "nodes", [(2, 2), *(pytest.param(nodes, marks=pytest.mark.long) for nodes in ((3, 1), (1, 3)))], ids=str
)
def test_a_spike_that_is_finite_does_not_end_a_run(nodes: tuple[int, int]) -> None:
    topology = "flat" if nodes[1] == 1 else "hierarchical"
    for outcomes in run_nodes(train_through_spikes, *nodes, topology):
        for name, (skipped, finite, moved) in outcomes.items():
            assert finite, name
            # Birder squares nothing, and in a local step of 0/1 Adam a worker skips alone.
            expected = {"Birder": (0,), "ZeroOneAdam": (1, 2)}.get(name.split("-")[0], (2,))
            assert skipped in expected, (name, skipped)
            assert moved < 0 or name == "SketchedAMSGrad", (name, moved)  # which is slow on dense gradients


@pytest.mark.parametrize("spike", [1e17, 5e18, 3e20], ids=str)
def test_a_coordinate_that_is_never_picked_does_not_end_a_run(spike: float) -> None:
    p = nn.Parameter(torch.zeros(2000))
    optimizer = thinwire.SketchedAMSGrad([p], lr=1e-2, betas=(0.999, 0.99), k=32, max_consecutive_skips=5)
    for step in range(60):
        p.grad = torch.randn(2000, generator=torch.Generator().manual_seed(step))
        if step == 5:
            p.grad[7] = spike
        optimizer.step()
    assert optimizer.metrics().skipped_steps <= 1
    assert all(bool(value.isfinite().all()) for value in optimizer.state[p].values())


# A state that somebody has changed ------------------------------------------------------------------------------------


def clear(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state.clear()


def replace(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state = defaultdict(dict)


def replace_all(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state = defaultdict(dict, {p: copy.deepcopy(state) for p, state in optimizer.state.items()})


def put_another(optimizer: Optimizer, p: torch.Tensor) -> None:
    name = list(optimizer.state[p])[-1]
    optimizer.state[p][name] = optimizer.state[p][name].to(torch.bfloat16)


def remove_one(optimizer: Optimizer, p: torch.Tensor) -> None:
    del optimizer.state[p][list(optimizer.state[p])[-1]]


def add_one(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p]["mine"] = torch.zeros(3)


def add_for_another(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[torch.nn.Parameter(torch.ones(3), requires_grad=False)]["mine"] = torch.zeros(3)


def put_none(optimizer: Optimizer, p: torch.Tensor) -> None:
    optimizer.state[p] = None


CHANGES = [clear, replace, replace_all, put_another, remove_one, add_one, add_for_another, put_none]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@every_optimizer
def test_a_changed_state_is_refused_and_can_be_loaded_again(
    entry: Entry, change: Callable[[Optimizer, torch.Tensor], None]
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with named(str(dtype)):
            assert_a_changed_state_is_refused(entry, dtype, change)


def assert_a_changed_state_is_refused(
    entry: Entry, dtype: torch.dtype, change: Callable[[Optimizer, torch.Tensor], None]
) -> None:
    p, q = (nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in (100, 7))

    def step() -> None:
        for x in (p, q):
            x.grad = torch.linspace(-1, 1, x.numel(), dtype=dtype)
        optimizer.step()

    optimizer = entry.make([p, q], lr=entry.lr)
    step()
    saved = copy.deepcopy(optimizer.state_dict())
    change(optimizer, p)
    before = digest([p, q])
    for use in (step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"optimizer\.state was changed: .* make a new optimizer"):
            use()
    assert digest([p, q]) == before
    optimizer.load_state_dict(saved)
    step()


@every_optimizer
def test_memory_that_was_exchanged_is_refused(entry: Entry) -> None:
    """As a popular recipe does that moves an optimizer to another device."""
    p = nn.Parameter(torch.ones(100))
    optimizer = entry.make([p], lr=entry.lr)
    for value in optimizer.state[p].values():
        value.data = value.data.clone()
    p.grad = torch.ones(100)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"optimizer\.state was changed: .* make a new optimizer"):
            use()


@every_optimizer
def test_numbers_that_are_not_finite_are_not_loaded(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(100))
    optimizer = entry.make([p], lr=entry.lr)
    p.grad = torch.linspace(-1, 1, 100)
    optimizer.step()
    before = digest([*optimizer.state[p].values()])
    for name, value in optimizer.state_dict()["state"][0].items():
        if value.is_floating_point() and value.numel():
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][0][name].view(-1)[0] = torch.nan
            with pytest.raises(ValueError, match="not finite"):
                optimizer.load_state_dict(saved)
    assert digest([*optimizer.state[p].values()]) == before


@every_optimizer
def test_a_state_may_be_written_in_place(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(100))
    optimizer = entry.make([p], lr=entry.lr)
    for _ in range(2):
        p.grad = torch.linspace(-1, 1, 100)
        optimizer.step()
    optimizer.state[p]["m"].zero_()
    p.grad = torch.linspace(-1, 1, 100)
    optimizer.step()


# Nothing to train -----------------------------------------------------------------------------------------------------


def train_nothing(rank: int, world_size: int) -> list[int]:
    taken = []
    for entry in OPTIMIZERS:
        for p in (nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.empty(0))):
            optimizer = entry.make([p])
            for _ in range(4):
                p.grad = torch.zeros_like(p) if p.requires_grad else None
                optimizer.step()
            taken.append(optimizer.metrics().steps)
    return taken


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (2, 2)], ids=["1x1", "2x1", "2x2"])
def test_a_model_without_trainable_elements_takes_steps(nodes: tuple[int, int]) -> None:
    assert run_nodes(train_nothing, *nodes) == [[4, 4] * len(OPTIMIZERS)] * (nodes[0] * nodes[1])


# Numbers of NumPy -----------------------------------------------------------------------------------------------------


@every_optimizer
def test_numpy_numbers_become_pythons(entry: Entry, tmp_path: Any) -> None:
    net = nn.Linear(3, 3)
    optimizer = entry.make(net.parameters(), lr=np.float32(0.5), weight_decay=np.float64(0.25))
    assert type(optimizer.param_groups[0]["lr"]) is float
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0].update(lr=np.float64(0.125), initial_lr=np.float64(1))
    if "betas" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["betas"] = np.array([0.5, 0.5])
    optimizer.step()
    checkpoint.save(tmp_path, net, optimizer, 1)
    optimizer.param_groups[0]["lr"] = np.float64(0.0625)  # after the last step, as schedules do
    checkpoint.save(tmp_path, net, optimizer, 2)
    assert checkpoint.load(tmp_path, net, optimizer) is not None
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.0625, 0.25)
    assert group.get("betas", (0.5, 0.5)) == (0.5, 0.5)


@pytest.mark.parametrize("lr", [float("nan"), -1.0, float("inf"), "fast", [0.1], None, True], ids=str)
@every_optimizer
def test_a_senseless_learning_rate_is_refused_at_the_step(entry: Entry, lr: float) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = entry.make([p])
    p.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"^lr="):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))


# What an optimizer holds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What this process has."""

    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))

    def fits_in(self, other: Held) -> bool:
        return self.descriptors <= other.descriptors and self.threads <= other.threads


def held_at_rest() -> Held:
    """Once no lane is left. What the system has of threads and sockets goes a little later than they do."""

    def is_at_rest() -> bool:
        before = Held.now()
        time.sleep(0.1)
        lanes = [thread for thread in threading.enumerate() if thread.name == "thinwire-lane"]
        return not lanes and Held.now() == before

    assert eventually(is_at_rest)
    return Held.now()


def make_many(rank: int, world_size: int, rounds: int, close: bool) -> tuple[Held, Held]:
    """What is held after the first round, and after the last one."""
    first, kept, optimizer = None, [], None
    for _ in range(rounds):
        for entry in OPTIMIZERS:
            p = nn.Parameter(torch.ones(200))
            optimizer = entry.make([p])
            p.grad = torch.ones(200)
            optimizer.step()
            if close:
                optimizer.close()
                kept.append(optimizer)  # closing is enough
        optimizer = None
        gc.collect()
        first = first or held_at_rest()
    assert first is not None
    eventually(lambda: Held.now().fits_in(first))
    return first, held_at_rest()


@pytest.mark.parametrize("close", [False, True], ids=["collected", "closed"])
def test_many_optimizers_hold_no_more_than_one(close: bool) -> None:
    for first, last in run_ranks(make_many, 2, 4, close, timeout=MANY_CASES_SECONDS):
        assert last.fits_in(first), (first, last)


@every_optimizer
def test_a_closed_optimizer_says_so(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = entry.make([p])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.close()
    optimizer.close()
    state = optimizer.state_dict()
    with pytest.raises(RuntimeError, match="is closed: make a new one"):
        optimizer.step()
    assert optimizer.metrics().steps == 1
    again = entry.make([p])
    again.load_state_dict(state)
    again.step()
