"""DistributedDataParallel without `attach`, and ranks that train on the same data."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest, named, token_loss, token_net
from tests.harness import run_ranks
from thinwire._ddp import find_averaging_model

MAKES = {"Birder": thinwire.Birder, "Lamb": thinwire.Lamb, "SketchedAMSGrad": thinwire.SketchedAMSGrad}


def forget_attach(rank: int, world_size: int) -> dict[str, str]:
    told = {}
    for name, make in MAKES.items():
        with named(name):
            net = token_net()
            model = DistributedDataParallel(net)
            optimizer = make(model.parameters(), lr=1e-2)
            # Nothing to tell yet: a step without any gradient, and one in which all of them are zero.
            optimizer.step()
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()
            before = digest(net.parameters())
            token_loss(model, rank, 0).backward()
            with pytest.raises(RuntimeError, match="same gradients in step 3") as raised:
                optimizer.step()
            assert digest(net.parameters()) == before
            told[name] = str(raised.value)
            # The line that the message asks for is all that is needed.
            thinwire.attach(model, optimizer)
            optimizer.zero_grad()
            for step in range(2):
                token_loss(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert digest(net.parameters()) != before
    return told


def test_ddp_without_attach_is_an_error_in_the_first_step_with_the_line_to_add() -> None:
    for told in run_ranks(forget_attach, 2):
        for text in told.values():
            assert "DistributedDataParallel has averaged them" in text
            assert "\n    thinwire.attach(model, optimizer)\n" in text


def same_data(rank: int, world_size: int) -> list[list[tuple[str, str]]]:
    """The warnings of each of three steps, for several optimizers."""
    told = []
    for make in MAKES.values():
        net = token_net()
        optimizer = make(net.parameters(), lr=1e-2)
        for step in range(3):
            token_loss(net, 0, step).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            optimizer.zero_grad()
            told.append([(str(each.message), each.filename) for each in caught])
    return told


def test_equal_data_is_a_warning_once_at_the_line_of_the_user() -> None:
    for told in run_ranks(same_data, 2):
        for step, caught in enumerate(told):
            assert len(caught) == (step % 3 == 0)
            for text, file in caught:
                assert "all ranks train on the same data" in text
                assert "thinwire.attach(model, optimizer)" in text
                assert file == __file__


def fine(rank: int, world_size: int) -> int:
    warnings.simplefilter("error")
    net = token_net()
    optimizer = thinwire.Birder(net.parameters(), lr=1e-2)
    # Rank 0 has no gradients at all in the first step.
    if rank:
        token_loss(net, rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):  # the same on all ranks, but later
        token_loss(net, 0, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    # An attached model with equal data: the user may want that, and DDP does not average.
    net = token_net()
    model = DistributedDataParallel(net)
    for overlap in (True, False):
        model = DistributedDataParallel(net)
        optimizer = thinwire.Birder(net.parameters(), lr=1e-2)
        thinwire.attach(model, optimizer, overlap=overlap)
        for step in range(2):
            token_loss(model, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return rank


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_right_is_not_told(world_size: int) -> None:
    run_ranks(fine, world_size)


def test_only_models_with_these_parameters_are_found() -> None:
    def ask(self: object) -> Any:
        raise RuntimeError("asked for its class")

    kept = type("Pretends", (), {"__class__": property(ask)})()
    assert gc.is_tracked(kept)
    assert find_averaging_model(nn.Linear(2, 2).parameters()) is None
