"""What DDP can do with a model, it can do with an attached optimizer: each feature equals the plain loop to the bit.

The plain loop has neither DDP nor `attach`; `opt.step()` exchanges there by itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.distributed.common import Training, assert_same_runs, brain_net, token_net

PLAIN = Training()
OPTIONS = [
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False},
    {"find_unused_parameters": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_options_change_nothing(world_size: int) -> None:
    assert_same_runs(world_size, PLAIN, *(replace(PLAIN, attach=True, ddp=ddp) for ddp in OPTIONS))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_sync_accumulates(world_size: int, bucket_view: bool) -> None:
    plain = replace(PLAIN, microbatches=(3, 1, 2, 4))
    overlapped = replace(plain, attach=True, ddp={"gradient_as_bucket_view": bucket_view})
    assert_same_runs(world_size, plain, overlapped)


class Branches(nn.Module):
    """The branch that is taken depends on the input, and one layer is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 100)
        self.left = nn.Linear(100, 3)
        self.right = nn.Linear(100, 3)
        self.never = nn.Linear(100, 3)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return self.get_submodule(branch)(torch.tanh(self.stem(x)))


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def rank_takes_its_branch(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    """Ranks disagree at most steps; at every third they all go left, so that the right branch is absent everywhere."""
    generator = torch.Generator().manual_seed(1000 * rank + batch)
    x = torch.randn(5, 8, generator=generator)
    step = batch // 10
    branch = "left" if step % 3 == 2 or (rank + step) % 2 == 0 else "right"
    return model(x, branch).square().mean()


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unused_parameters_that_differ_by_rank(world_size: int, bucket_view: bool) -> None:
    plain = Training(model=branches, loss=rank_takes_its_branch, steps=9)
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": bucket_view}
    assert_same_runs(world_size, plain, replace(plain, attach=True, ddp=ddp))


def compiled_net() -> nn.Module:
    """aot_eager runs dynamo and autograd tracing, which is what may meet DDP's hooks, without a C++ compiler."""
    torch._dynamo.reset()  # nothing is left of a run before in the same process
    net = token_net()
    net.compile(backend="aot_eager")
    return net


def test_a_compiled_model() -> None:
    plain = Training(model=compiled_net)
    assert_same_runs(2, plain, replace(plain, attach=True))


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 37)
        self.hidden = nn.Linear(37, 37)
        self.head = nn.Linear(37, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def tied_net() -> nn.Module:
    torch.manual_seed(0)
    return TiedNet()


def partly_frozen_net() -> nn.Module:
    net = token_net()
    net.get_parameter("hidden.weight").requires_grad_(False)
    return net


class ImageNet(nn.Module):
    """channels_last convolutions, and a weight that is a transposed view of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
        for weight in (p for p in self.convolutions.parameters() if p.dim() == 4):
            weight.data = weight.data.to(memory_format=torch.channels_last)
        self.mixing = nn.Parameter(torch.randn(9, 4).t() * 0.1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.convolutions(images).mean((2, 3)) @ self.mixing


def image_net() -> nn.Module:
    torch.manual_seed(0)
    net = ImageNet()
    assert not net.mixing.is_contiguous()
    assert not net.get_parameter("convolutions.0.weight").is_contiguous()
    return net


def image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(2, 3, 8, 8, generator=generator)).square().mean()


KINDS = {
    "tied": Training(model=tied_net),
    "partly frozen": Training(model=partly_frozen_net),
    "channels_last and transposed": Training(model=image_net, loss=image_loss),
    "bfloat16": Training(model=brain_net, options={"lr": 0.05}),
}


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_parameters(kind: str, bucket_view: bool) -> None:
    plain = KINDS[kind]
    overlapped = replace(plain, attach=True, ddp={"gradient_as_bucket_view": bucket_view})
    assert_same_runs(2, plain, overlapped)


def test_backward_twice_before_a_step() -> None:
    plain = replace(PLAIN, microbatches=(2,))
    assert_same_runs(2, plain, replace(plain, attach=True, sync_every_microbatch=True))
