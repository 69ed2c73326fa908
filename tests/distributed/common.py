"""What the distributed suites share: a small network, and one training loop in which everything may vary."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.harness import run_ranks
from tests.instruction_sets import instruction_set_restored

WORLD_SIZES = (1, 2, 3, 4)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal exactly when every tensor is equal to the bit."""
    accumulated = hashlib.sha256()
    for tensor in tensors:
        accumulated.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return accumulated.hexdigest()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_nodes(rank: int, world_size: int, ranks_a_node: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` as torchrun would on a machine that runs `ranks_a_node` of the ranks."""
    with environment({"LOCAL_WORLD_SIZE": str(ranks_a_node)}):
        return function(rank, world_size, *args)


def run_nodes(
    function: Callable[..., Any], nodes: int, ranks_a_node: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """As `run_ranks`, with so many ranks on each of so many nodes."""
    return run_ranks(in_nodes, nodes * ranks_a_node, ranks_a_node, function, *args, timeout=timeout)


# Processes cost as much as a short run: where there are many cases, they run one after another in the same ranks.

MANY_CASES_SECONDS = 100.0
"""How long many cases may take, where the time of one is the default of `run_ranks`."""


FRAMEWORKS = tuple(
    module
    for module in ("accelerate", "transformers.trainer", "lightning.pytorch")
    if importlib.util.find_spec(module.partition(".")[0]) is not None
)
"""What tests of frameworks let `run_ranks` preload, if it is installed: each rank would import it for seconds."""


@contextmanager
def named(case: str) -> Iterator[None]:
    """Whatever goes wrong inside is told to be about this case."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


def each_case(
    rank: int, world_size: int, function: Callable[..., Any], cases: Mapping[str, Any], *args: Any
) -> dict[str, Any]:
    """What `function(rank, world_size, case, ...)` returns, by the names of the cases."""
    results = {}
    for name, case in cases.items():
        with named(name):
            results[name] = function(rank, world_size, case, *args)
    return results


def by_case(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What ranks returned for each case, from what each rank returned."""
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


class TokenNet(nn.Module):
    """Embedding, two layers and a scale: rows without a gradient, odd sizes, a 0-dim parameter; 12,000 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 37)
        self.hidden = nn.Linear(37, 150)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(150, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))) * self.scale)


def token_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every rank, as DDP's broadcast or a checkpoint would give."""
    torch.manual_seed(0)
    return TokenNet().to(dtype)


def half_net() -> nn.Module:
    return token_net(torch.float16)


def brain_net() -> nn.Module:
    return token_net(torch.bfloat16)


def token_loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    """Only the lower half of the vocabulary occurs."""
    generator = torch.Generator().manual_seed(1000 * rank + batch)
    tokens = torch.randint(0, 25, (16,), generator=generator)
    targets = torch.randint(0, 29, (16,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), targets)


@dataclass(frozen=True)
class Training:
    """A run. Two that differ only in `attach`, `ddp`, `environment` or bucket size must agree to the bit."""

    optimizer: Callable[..., Any] = thinwire.Birder
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = token_net
    loss: Callable[[nn.Module, int, int], torch.Tensor] = token_loss
    steps: int = 6
    microbatches: Sequence[int] = (1,)
    """How many backward passes a step has, in turn."""
    sync_every_microbatch: bool = False
    attach: bool = False
    ddp: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


Digest = tuple[str, bool]
"""Of all parameters after a step, and whether replicas are equal then."""


def train(rank: int, world_size: int, training: Training) -> list[Digest]:
    """What a rank has after each step."""
    net = training.model()
    with environment(training.environment), instruction_set_restored():
        optimizer = training.optimizer(net.parameters(), **{"lr": 1e-2, **training.options})
        ddp = DistributedDataParallel(net, **training.ddp) if training.attach else None
        if ddp is not None:
            thinwire.attach(ddp, optimizer)
        digests = []
        for step in range(training.steps):
            passes = training.microbatches[step % len(training.microbatches)]
            for micro in range(passes):
                synchronise = micro == passes - 1 or training.sync_every_microbatch
                with nullcontext() if ddp is None or synchronise else ddp.no_sync():
                    training.loss(ddp or net, rank, 10 * step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            digests.append((digest(net.parameters()), optimizer.is_synchronized))
    return digests


def train_each(rank: int, world_size: int, trainings: Sequence[Training]) -> list[list[Digest]]:
    """One run after another in the same processes."""
    return [train(rank, world_size, training) for training in trainings]


def trained_each(world_size: int, trainings: Sequence[Training]) -> list[list[list[Digest]]]:
    """What `train` returns on all ranks, for each of the trainings.

    Law 1 is checked on the way: ranks report the same digests, unless they have steps of their own. A run that stands
    still proves nothing.
    """
    by_rank = run_ranks(train_each, world_size, trainings, timeout=MANY_CASES_SECONDS)
    runs = [list(ranks) for ranks in zip(*by_rank, strict=True)]
    for training, ranks in zip(trainings, runs, strict=True):
        for rank, of_rank in enumerate(ranks):
            for ours, first in zip(of_rank, ranks[0], strict=True):
                assert ours[1] == first[1]
                assert not ours[1] or ours == first, f"rank {rank} has other parameters than rank 0: {training}"
        assert len(set(ranks[0])) == training.steps, f"some step moved nothing: {training}"
    return runs


def assert_same_runs(world_size: int, plain: Training, *others: Training) -> None:
    """All leave the same digests after every step as `plain` does, rank by rank."""
    expected, *runs = trained_each(world_size, [plain, *others])
    for training, run in zip(others, runs, strict=True):
        assert run == expected, f"other bits: {training}"
