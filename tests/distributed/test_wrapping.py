"""`attach` takes a model as frameworks have it: wrapped, compiled, or not wrapped yet. Each way gives the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, by_case, digest, each_case, token_loss, token_net
from tests.harness import run_ranks, run_ranks_expecting_errors
from thinwire import _first_use
from thinwire._unwrap import distributed_model

Ways = Callable[[nn.Module, thinwire.Birder, int], nn.Module]
"""Wraps and attaches a net on a rank. Returns what the loop calls."""


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="aot_eager")  # dynamo and autograd tracing, without a C++ compiler
    assert isinstance(wrapped, nn.Module)
    return wrapped


def wrapped_before(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    model = DDP(net)
    thinwire.attach(model, opt)
    return model


def compiled_before(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    model = compiled(DDP(net))
    thinwire.attach(model, opt)
    return model


def wrapped_after(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    return DDP(net)


def bare_inside_a_model(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    """As in Lightning, where optimizers are made when the module is wrapped already."""
    model = DDP(net)
    thinwire.attach(net, opt)
    return model


def attached_before_and_after(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    model = DDP(net)
    thinwire.attach(model, opt)
    return model


class Trainee(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


def part_of_what_is_wrapped(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    return DDP(Trainee(net))


def wrapped_twice(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    """The model that is used counts, not the one that was made first."""
    thinwire.attach(net, opt)
    unused = DDP(net)
    return DDP(unused.module)


def wrapped_after_in_a_static_graph(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    return DDP(net, static_graph=True)


def compiled_after(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    return compiled(DDP(net))


def compiled_and_wrapped_after(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    return DDP(compiled(net))


def compiled_in_place(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    net.compile(backend="aot_eager")
    return DDP(net)


def evaluated_on_one_rank_first(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    model = DDP(net)
    if rank == 0:
        with torch.no_grad():
            token_loss(model, rank, 99)
    return model


def never_wrapped(net: nn.Module, opt: thinwire.Birder, rank: int) -> nn.Module:
    thinwire.attach(net, opt)
    return net


WAYS: dict[str, Ways] = {
    way.__name__: way
    for way in (
        *(wrapped_before, compiled_before, wrapped_after, bare_inside_a_model, part_of_what_is_wrapped, wrapped_twice),
        *(wrapped_after_in_a_static_graph, compiled_after, compiled_and_wrapped_after, compiled_in_place),
        *(evaluated_on_one_rank_first, attached_before_and_after, never_wrapped),
    )
}


def trained(rank: int, world_size: int, way: Ways) -> tuple[list[str], list[bool]]:
    """The parameters after each step, and whether backward had sent all gradients."""
    torch._dynamo.reset()
    net = token_net()
    opt = thinwire.Birder(net.parameters(), lr=1e-2)
    model = way(net, opt, rank)
    digests, sent = [], []
    for step in range(4):
        if step == 2:
            inner = distributed_model(model)
            with inner.no_sync() if isinstance(inner, DDP) else nullcontext():
                token_loss(model, rank, 100).backward()
        token_loss(model, rank, step).backward()
        sent.append(all(opt._session.encoded))
        opt.step()
        opt.zero_grad()
        digests.append(digest(net.parameters()))
    return digests, sent


def test_every_way_to_wrap_a_module_gives_the_same_bits() -> None:
    outcomes = by_case(run_ranks(each_case, 2, trained, WAYS, timeout=MANY_CASES_SECONDS))
    plain = outcomes.pop("never_wrapped")
    expected = plain[0][0]
    assert len(set(expected)) == 4
    assert plain == [(expected, [False] * 4)] * 2
    for name, ranks in outcomes.items():
        for digests, sent in ranks:
            assert digests == expected, name
            assert sent == [False, True, True, True], f"{name} was not attached"


def compressed(rank: int, world_size: int) -> list[str]:
    """The parameters after training with compress on a DDP model, compiled before, after, or not at all."""
    digests = []
    for order in ("not compiled", "before", "after"):
        torch._dynamo.reset()
        model: nn.Module = DDP(token_net())
        inner = model
        if order == "before":
            model = compiled(model)
        thinwire.compress(model)
        if order == "after":
            model = compiled(model)
        opt = torch.optim.SGD(inner.parameters(), lr=0.1)
        for batch in range(3):
            token_loss(model, rank, batch).backward()
            opt.step()
            opt.zero_grad()
        digests.append(digest(inner.parameters()))
    return digests


def test_compress_takes_compiled_models() -> None:
    first, second = run_ranks(compressed, 2, timeout=MANY_CASES_SECONDS)
    assert first == second
    assert len(set(first)) == 1


def too_few_parameters(rank: int, world_size: int) -> None:
    net = token_net()
    head: Any = net.get_submodule("head")
    opt = thinwire.Birder(head.parameters())
    thinwire.attach(net, opt)
    token_loss(DDP(net), rank, 0)


def test_what_does_not_fit_is_refused_at_the_first_use() -> None:
    for error in run_ranks_expecting_errors(too_few_parameters, 2):
        assert error.type_name == "ValueError"
        assert "the optimizer does not hold parameter 'scale'" in error.message


def test_a_use_is_awaited_as_long_as_module_and_optimizer_live(monkeypatch: pytest.MonkeyPatch) -> None:
    # Modules of earlier tests may still wait to be collected, and are not counted here.
    monkeypatch.setattr(_first_use, "_awaited", weakref.WeakKeyDictionary())
    monkeypatch.setattr(_first_use, "_registrations", [])
    net = token_net()
    opt = thinwire.Birder(net.parameters())
    thinwire.attach(net, opt)
    assert len(_first_use._awaited) == len(_first_use._registrations) == 1
    thinwire.detach(net)
    assert len(_first_use._awaited) == len(_first_use._registrations) == 0
    thinwire.attach(net, opt)
    thinwire.attach(net, opt)
    assert len(_first_use._awaited) == 1
    del net, opt
    assert len(_first_use._awaited) == 0
    _first_use._watch_registrations()
    assert len(_first_use._registrations) == 0
