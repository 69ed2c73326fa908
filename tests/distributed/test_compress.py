"""`thinwire.compress` in DDP: every feature of DDP gives the bits of a loop without DDP, on all ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.averaging_runs import Averaging, train_each
from tests.distributed.common import MANY_CASES_SECONDS, brain_net, half_net, run_nodes, token_loss, token_net
from tests.distributed.test_ddp import branches, rank_takes_its_branch
from tests.harness import run_ranks_expecting_errors
from thinwire.averaging.catalogue import NAMES
from thinwire.averaging.ddp import DdpHook

PLAIN = Averaging()
IN_DDP = replace(PLAIN, ddp={})
OPTIONS = [
    {},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.01},
    {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
]


def assert_same(nodes: int, ranks: int, runs: Sequence[Averaging]) -> None:
    """All runs have the same gradients and parameters after every step, on all ranks; and they move."""
    of_ranks = run_nodes(train_each, nodes, ranks, runs, timeout=MANY_CASES_SECONDS)
    expected = of_ranks[0][0]
    assert len(set(expected)) == len(expected), "some step moved nothing"
    for rank, of_rank in enumerate(of_ranks):
        for run, records in zip(runs, of_rank, strict=True):
            assert records == expected, f"rank {rank}, {run}"


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 1), (3, 1), (2, 2)], ids=["1", "2", "3", "2x2"])
def test_ddp_options_change_nothing(nodes: int, ranks: int) -> None:
    assert_same(nodes, ranks, [PLAIN, *(replace(PLAIN, ddp=options) for options in OPTIONS)])


@pytest.mark.parametrize("compressor", [name for name in NAMES if name != "int4"])
def test_other_compressors(compressor: str) -> None:
    plain = replace(PLAIN, compressor=compressor)
    assert_same(3, 1, [plain, replace(plain, ddp={})])


def test_no_sync_accumulates() -> None:
    plain = replace(PLAIN, microbatches=(3, 1, 2))
    assert_same(2, 1, [plain, *(replace(plain, ddp={"gradient_as_bucket_view": view}) for view in (False, True))])


def test_unused_parameters_that_differ_by_rank() -> None:
    plain = replace(PLAIN, model=branches, loss=rank_takes_its_branch, steps=9, optimizer=torch.optim.SGD)
    assert_same(2, 1, [plain, replace(plain, ddp={"find_unused_parameters": True})])


@pytest.mark.parametrize("model", [brain_net, half_net])
def test_low_precision_parameters(model: Callable[[], nn.Module]) -> None:
    plain = replace(PLAIN, model=model, optimizer=torch.optim.SGD, lr=0.5)
    assert_same(2, 1, [plain, replace(plain, ddp={})])


class Strided(nn.Module):
    """A transposed parameter, a frozen one, a tied one and a channels-last one."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(70, 12).t())
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.first, self.second = nn.Linear(70, 70), nn.Linear(70, 70)
        self.second.weight = self.first.weight
        self.picture = nn.Conv2d(3, 4, 3)
        self.picture.weight = nn.Parameter(self.picture.weight.contiguous(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.picture(x.view(1, 3, 4, 4)).mean()
        return self.second(torch.tanh(self.first(x[:12] @ self.transposed))).square().mean() + seen


def strided() -> nn.Module:
    torch.manual_seed(0)
    return Strided()


def strided_loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    return model(torch.randn(48, generator=torch.Generator().manual_seed(100 * rank + batch)))


def test_strides_ties_and_frozen_parameters() -> None:
    views = [replace(IN_DDP, ddp={"gradient_as_bucket_view": view}) for view in (False, True)]
    assert_same(2, 1, [replace(run, model=strided, loss=strided_loss) for run in views])


def compiled_net() -> nn.Module:
    torch._dynamo.reset()
    net = token_net()
    net.compile(backend="aot_eager")
    return net


def test_compiled_model() -> None:
    assert_same(2, 1, [IN_DDP, replace(IN_DDP, model=compiled_net)])


def encoded_during_backward(rank: int, world_size: int, static_graph: bool) -> list[int]:
    """In each step, how many parameters are encoded when DDP calls the hook of its only bucket or, where DDP calls
    none, at the end of backward."""
    found = []

    def counting(method: Callable[..., None]) -> Callable[..., None]:
        def count(self: DdpHook, *arguments: GradBucket) -> None:
            found.append(sum(self._averager._session.encoded))
            method(self, *arguments)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_exchange", "_finish"):
            patch.setattr(DdpHook, name, counting(getattr(DdpHook, name)))
        model = DistributedDataParallel(token_net(), static_graph=static_graph)
        _ = thinwire.compress(model)
        model.module.get_parameter("scale").register_post_accumulate_grad_hook(lambda p: None)
        for step in range(2):
            if not static_graph:  # torch fails if its first backward is not synchronized
                with model.no_sync():
                    token_loss(model, rank, step).backward()
            token_loss(model, rank, step).backward()
    return found


def test_gradients_are_encoded_as_backward_produces_them() -> None:
    # Not the one that has a hook of the user, which may change it.
    assert run_nodes(encoded_during_backward, 2, 1, False) == [[5, 5]] * 2
    assert run_nodes(encoded_during_backward, 2, 1, True) == [[0, 0]] * 2


def unusual_backwards(rank: int, world_size: int) -> list[str]:
    """Gradients of several kinds that DDP would copy to its buckets and back, as text."""
    found = []
    for view in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(strided(), gradient_as_bucket_view=view)
        handle = thinwire.compress(model)
        for step in range(4):
            if not view and step == 1:  # a gradient in another order than its parameter
                p = model.module.get_parameter("first.weight")
                p.grad = torch.zeros(70, 70).t()
            loss = strided_loss(model, rank, step)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
                loss.backward(retain_graph=step == 2)
            found.append(str({name: p.grad for name, p in model.named_parameters()}))
            assert model.require_backward_grad_sync
            assert model.require_forward_param_sync
            if step == 2:  # DDP averages the first backward after a forward only
                loss.backward()
            if step == 3:  # of an evaluation that nothing follows
                strided_loss(model, rank, step)
            model.zero_grad()
        assert handle.metrics().steps == 4
    return found


def test_means_are_the_same_with_and_without_the_buckets_of_ddp() -> None:
    of_ranks = run_nodes(unusual_backwards, 2, 1)
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[0][:4] == of_ranks[0][4:]


def without_a_gradient(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(branches())
    _ = thinwire.compress(model)
    for step in range(2):
        rank_takes_its_branch(model, rank, step).backward()


def test_a_parameter_without_a_gradient_is_named() -> None:
    for error in run_ranks_expecting_errors(without_a_gradient, 2):
        assert re.search(r"gave no gradient to '.*find_unused_parameters=True", error.message)
