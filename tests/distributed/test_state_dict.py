"""Law 7 for the same world size: save, stop, resume is never having stopped, to the bit. Anything else is refused."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import by_case, digest, each_case, in_nodes, token_loss, token_net
from tests.harness import run_ranks, run_ranks_expecting_errors

OPTIONS: dict[str, Any] = {"lr": 0.01, "seed": 2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float32
    attach: bool = False
    load_before_attach: bool = True
    options: dict[str, Any] = field(default_factory=dict)


class Run:
    """A model, its optimizer and, if attached, DDP around it."""

    def __init__(self, case: Case, rank: int, saved: bytes | None = None) -> None:
        self.rank = rank
        self.net = token_net(case.dtype)
        if saved is not None:
            nn.init.zeros_(self.net.get_parameter("hidden.weight"))  # what the checkpoint does not bring back shows
        self.optimizer = thinwire.Birder(self.net.parameters(), **{**OPTIONS, **case.options})
        self.model: nn.Module = self.net
        if saved is not None and case.load_before_attach:
            self.load(saved)
        if case.attach:
            self.model = DistributedDataParallel(self.net)
            thinwire.attach(self.model, self.optimizer)
        if saved is not None and not case.load_before_attach:
            self.load(saved)

    def train(self, steps: range) -> list[str]:
        digests = []
        for step in steps:
            token_loss(self.model, self.rank, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            tensors = list(self.net.parameters())
            for p in self.net.parameters():
                tensors += [value for _, value in sorted(self.optimizer.state[p].items())]
            digests.append(digest(tensors))
        return digests

    def save(self) -> bytes:
        buffer = io.BytesIO()
        torch.save({"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        loaded = torch.load(io.BytesIO(saved), weights_only=True)
        self.net.load_state_dict(loaded["net"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def stop_and_resume(rank: int, world_size: int, case: Case) -> tuple[list[str], list[str]]:
    first = Run(case, rank)
    first.train(range(4))
    saved = first.save()
    return first.train(range(4, 9)), Run(case, rank, saved).train(range(4, 9))


CASES = {
    "plain": Case(),
    "overlap": Case(attach=True),
    "loaded after attach": Case(attach=True, load_before_attach=False),
    "bfloat16": Case(dtype=torch.bfloat16, options={"lr": 0.05}),
    "float16 with overlap": Case(dtype=torch.float16, attach=True),
    "amsgrad, votes": Case(options={"amsgrad": True, "downlink": "votes"}),
    "bfloat16 state": Case(options={"state_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resuming_is_never_having_stopped(world_size: int) -> None:
    for name, ranks in by_case(run_ranks(each_case, world_size, stop_and_resume, CASES)).items():
        for never_stopped, resumed in ranks:
            assert resumed == never_stopped, name
            assert len(set(never_stopped)) == 5


def state_dtypes(p: nn.Parameter, optimizer: thinwire.Birder) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in optimizer.state[p].items()}


def test_state_exists_from_construction_and_keeps_its_dtypes() -> None:
    expected = {
        "step": torch.int64,
        "m": torch.float32,
        "b": torch.float32,
        "alive": torch.int64,
        "master": torch.float32,
    }
    p = nn.Parameter(torch.randn(100, dtype=torch.bfloat16))
    optimizer = thinwire.Birder([p])
    assert state_dtypes(p, optimizer) == expected
    saved = optimizer.state_dict()
    assert {name: value.dtype for name, value in saved["state"][0].items()} == expected
    optimizer.load_state_dict(state_dict=saved)  # by keyword, as torch.distributed.checkpoint does
    assert state_dtypes(p, optimizer) == expected


def test_loading_leaves_the_given_state_dict_alone() -> None:
    p = nn.Parameter(torch.randn(100))
    optimizer = thinwire.Birder([p])
    p.grad = torch.randn(100)
    optimizer.step()
    saved = optimizer.state_dict()
    before = digest([saved["state"][0]["m"].clone()])
    other = thinwire.Birder([nn.Parameter(torch.randn(100))])
    other.load_state_dict(saved)
    other_p = other.param_groups[0]["params"][0]
    other_p.grad = torch.randn(100)
    other.step()
    assert digest([saved["state"][0]["m"]]) == before


def save_small(rank: int, world_size: int) -> bytes:
    return Run(Case(), rank).save()


def load_small(rank: int, world_size: int, saved: list[bytes]) -> None:
    Run(Case(), rank, saved[rank % len(saved)])


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2), (2, 3)])
def test_another_world_size_is_refused_by_every_rank(saved_by: int, loaded_by: int) -> None:
    saved = run_ranks(save_small, saved_by)
    for error in run_ranks_expecting_errors(load_small, loaded_by, saved):
        assert error.type_name == "ValueError"
        assert f"the state dict is of {saved_by} ranks, this run has {loaded_by}" in error.message


def test_another_ranks_state_is_a_warning() -> None:
    saved = run_ranks(save_small, 2)
    for rank, error in enumerate(run_ranks_expecting_errors(load_small, 2, saved[::-1])):
        assert error.type_name == "RuntimeWarning"
        assert f"the state of rank {1 - rank} is loaded on rank {rank}" in error.message


def test_another_class_is_refused() -> None:
    p = nn.Parameter(torch.randn(10))
    adam = torch.optim.AdamW([p])
    p.grad = torch.ones(10)
    adam.step()
    with pytest.raises(ValueError, match="the state dict is of another optimizer, this is Birder"):
        thinwire.Birder([p]).load_state_dict(adam.state_dict())


def test_another_shape_is_refused_and_changes_nothing() -> None:
    small, large = nn.Parameter(torch.randn(10)), nn.Parameter(torch.randn(11))
    optimizer = thinwire.Birder([small])
    small.grad = torch.ones(10)
    optimizer.step()
    before = digest(optimizer.state[small].values())
    with pytest.raises(ValueError, match=r"parameter 0: 'm' is \(11,\) .* this optimizer needs \(10,\)"):
        optimizer.load_state_dict(thinwire.Birder([large]).state_dict())
    assert digest(optimizer.state[small].values()) == before


def through_dcp(rank: int, world_size: int, flatten: bool) -> tuple[list[str], list[str]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first = Run(Case(attach=True), rank)
    first.train(range(3))
    optimizer_state = get_optimizer_state_dict(first.model, first.optimizer, options=options)
    buffer = io.BytesIO()
    torch.save(optimizer_state, buffer)
    net_state = {name: value.clone() for name, value in first.net.state_dict().items()}
    never_stopped = first.train(range(3, 6))
    second = Run(Case(attach=True), rank)
    second.net.load_state_dict(net_state)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    set_optimizer_state_dict(second.model, second.optimizer, loaded, options=options)
    return never_stopped, second.train(range(3, 6))


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_round_trip(flatten: bool) -> None:
    for never_stopped, resumed in run_ranks(through_dcp, 2, flatten):
        assert resumed == never_stopped


def save_between_backward_and_step(rank: int, world_size: int, optimizer_class: type) -> tuple[str, int]:
    """One parameter is unused, so that its bucket is not complete when backward is over."""
    net = nn.Linear(4, 4)
    unused = nn.Parameter(torch.ones(70))
    model = DistributedDataParallel(net)
    optimizer = optimizer_class([*net.parameters(), unused], lr=0.01)
    thinwire.attach(model, optimizer)
    said = ""
    for step in range(3):
        model(torch.ones(2, 4) + rank).sum().backward()
        if step == 1:
            with pytest.raises(RuntimeError, match=r"state_dict\(\) between backward and step\(\)") as refusal:
                optimizer.state_dict()
            said = str(refusal.value)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()
    return said, optimizer.metrics().steps


@pytest.mark.parametrize("optimizer_class", [thinwire.Birder, thinwire.CDAdam, thinwire.SketchedAMSGrad])
def test_half_a_step_is_not_saved_and_the_step_goes_on(optimizer_class: type) -> None:
    for said, steps in run_ranks(save_between_backward_and_step, 2, optimizer_class):
        assert "Save after step()" in said
        assert steps == 3


def load_other_buckets(rank: int, world_size: int, optimizer_class: type) -> None:
    made = [optimizer_class([nn.Parameter(torch.ones(4096))], lr=0.01, bucket_mb=mb) for mb in (1 / 64, 1 / 256)]
    made[1].load_state_dict(made[0].state_dict())


@pytest.mark.parametrize("optimizer_class", [thinwire.Birder, thinwire.SketchedAMSGrad])
def test_slices_of_other_buckets_are_refused(optimizer_class: type) -> None:
    """Shapes agree, elements do not."""
    for error in run_ranks_expecting_errors(in_nodes, 4, 2, load_other_buckets, optimizer_class):
        assert "so resume with the bucket_mb that was saved" in error.message
