"""Code that saves `opt.state_dict()` in its own way: every rank's by torch.distributed.checkpoint, or only rank 0's."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import thinwire
from tests.distributed.common import digest, token_loss, token_net
from tests.distributed.stages import STAGES
from tests.harness import run_ranks

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    name: lambda params, of=of: of[0](params, **{"lr": 0.01, **of[1]}) for name, of in STAGES.items()
}
for other in (thinwire.Birder, thinwire.CDAdam, thinwire.SketchedAMSGrad):
    OPTIMIZERS[other.__name__] = lambda params, of=other: of(params, lr=0.01)
SAVED_AT, STEPS = 14, 3
ANY_RANKS = ("Birder", "Lamb", "SketchedAMSGrad")
"""Those whose state has nothing in it of the part that a rank answers for."""


class Run:
    def __init__(self, name: str, rank: int) -> None:
        self.rank, self.net = rank, token_net()
        self.optimizer = OPTIMIZERS[name](self.net.parameters())

    def train(self, steps: range) -> list[str]:
        replicas = []
        for step in steps:
            token_loss(self.net, self.rank, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            replicas.append(digest(self.net.parameters()))
        return replicas

    def go_on(self) -> list[str]:
        return self.train(range(SAVED_AT, SAVED_AT + STEPS))

    def states(self, key: str) -> dict[str, Any]:
        return {key: get_optimizer_state_dict(self.net, self.optimizer), "net": self.net.state_dict()}


def through_dcp(rank: int, world_size: int, name: str, path: Path, key: str) -> tuple[list[str], list[str], list[str]]:
    first, second = Run(name, rank), Run(name, rank)
    first.train(range(SAVED_AT))
    dcp.save(first.states(key), checkpoint_id=path)
    never_stopped = first.go_on()
    states = second.states(key)
    dcp.load(states, checkpoint_id=path)
    second.net.load_state_dict(states["net"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(second.net, second.optimizer, states[key])
    return never_stopped, second.go_on(), [f"{w.category.__name__}: {w.message}" for w in caught]


def through_dcp_by_rank(rank: int, world_size: int, name: str, path: Path) -> Any:
    return through_dcp(rank, world_size, name, path, f"optimizer of rank {rank}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_distributed_checkpoint_with_the_rank_in_the_key_is_exact(name: str, tmp_path: Path) -> None:
    for never_stopped, resumed, warned in run_ranks(through_dcp_by_rank, 2, name, tmp_path):
        assert resumed == never_stopped
        assert warned == []


def assert_one_state_serves_all(outcomes: list[tuple[list[str], list[str], list[str]]]) -> None:
    """Replicas stay equal, and go another way than they would have."""
    for rank, (never_stopped, resumed, warned) in enumerate(outcomes):
        assert len(set(resumed)) == STEPS
        assert resumed == outcomes[0][1]
        assert resumed != never_stopped
        told = [f"RuntimeWarning: the state of rank 0 is loaded on rank {rank}"] if rank else []
        assert [warning.partition(": save")[0] for warning in warned] == told


def test_distributed_checkpoint_with_the_same_key_keeps_one_state_for_all(tmp_path: Path) -> None:
    assert_one_state_serves_all(run_ranks(through_dcp, 2, "Birder", tmp_path, "optimizer"))


def state_of_rank_zero(rank: int, name: str) -> tuple[list[str], Run, dict[str, Any]]:
    """What a run goes on to do, and a new one that has the model and is about to load what rank 0 has saved."""
    first, second = Run(name, rank), Run(name, rank)
    first.train(range(SAVED_AT))
    buffer = io.BytesIO()
    torch.save({"net": first.net.state_dict(), "optimizer": first.optimizer.state_dict()}, buffer)
    files = [buffer.getvalue()]
    dist.broadcast_object_list(files, src=0)
    loaded = torch.load(io.BytesIO(files[0]), weights_only=True)
    second.net.load_state_dict(loaded["net"])
    return first.go_on(), second, loaded["optimizer"]


def rank_zero_for_all(rank: int, world_size: int, name: str) -> tuple[list[str], list[str], list[str]]:
    never_stopped, run, state = state_of_rank_zero(rank, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.optimizer.load_state_dict(state)
    return never_stopped, run.go_on(), [f"{w.category.__name__}: {w.message}" for w in caught]


@pytest.mark.parametrize("name", ANY_RANKS)
def test_the_state_of_rank_zero_serves_all(name: str) -> None:
    outcomes = run_ranks(rank_zero_for_all, 3, name)
    if name == "Lamb":  # nothing in it is a rank's own
        assert [resumed for _, resumed, _ in outcomes] == [outcomes[0][0]] * 3
    else:
        assert_one_state_serves_all(outcomes)


def refuse_rank_zeros(rank: int, world_size: int, name: str) -> None:
    _, run, state = state_of_rank_zero(rank, name)
    before = digest(value for p in run.net.parameters() for value in run.optimizer.state[p].values())
    if rank:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="state dict"):
                run.optimizer.load_state_dict(state)
        assert digest(value for p in run.net.parameters() for value in run.optimizer.state[p].values()) == before


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - set(ANY_RANKS)))
def test_what_a_rank_keeps_of_the_part_that_it_answers_for_is_no_other_ranks(name: str) -> None:
    run_ranks(refuse_rank_zeros, 3, name)
