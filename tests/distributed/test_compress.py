"""`thinwire.compress` in DDP: every feature of DDP gives the bits of a loop without DDP, on all ranks."""

from __future__ import annotations

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


def encoded_before_the_hook(rank: int, world_size: int, static_graph: bool) -> list[int]:
    """How many parameters are encoded when DDP calls the hook of its only bucket, in each step."""
    found = []
    exchange = DdpHook._exchange

    def counting(self: DdpHook, bucket: GradBucket) -> None:
        found.append(sum(self._averager._session.encoded))
        exchange(self, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DdpHook, "_exchange", counting)
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
    assert run_nodes(encoded_before_the_hook, 2, 1, False) == [[5, 5]] * 2
    assert run_nodes(encoded_before_the_hook, 2, 1, True) == [[0, 0]] * 2
