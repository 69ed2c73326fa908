"""Trains a configuration in one of its ways."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.differential.configurations import ATTACHED, GRIDS, REFERENCE, VIRTUAL, Configuration, Model
from tests.distributed.common import digest, environment
from tests.instruction_sets import instruction_set_restored, instruction_sets
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.cli.registry import OPTIMIZERS
from thinwire.transport import virtual

_BATCH = 5
_WORK = (3, 0, 4, 2)
"""Of each rank in a step, for local steps that are weighed. Not all of it is 0, in any grid."""


@dataclass(frozen=True)
class Step:
    """What a rank has after a step."""

    parameters: str
    gradients: str
    """Averaged ones; empty if they stay local."""
    equal: bool
    """Whether replicas are equal then."""


@dataclass(frozen=True)
class Course:
    """What a rank has had in a run."""

    steps: tuple[Step, ...]
    state: str
    """Of the optimizer, or of the compression, in the end."""


class Net(nn.Module):
    """See `Model`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        widths = model.widths
        self.embedding = nn.Embedding(model.vocabulary, widths[0])
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=m % 2 == 1) for n, m in itertools.pairwise(widths))
        if model.transposed and self.layers:
            weight = self.layers[0].get_parameter("weight")
            weight.data = weight.data.t().contiguous().t()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(widths[-1], model.vocabulary if model.tied else model.classes)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.detour = nn.Linear(widths[-1], widths[-1]) if model.detour else None
        if model.idle:
            self.idle = nn.Parameter(torch.randn(3))
        for number, layer in enumerate((self.embedding, *self.layers)):
            if number in model.frozen:
                layer.requires_grad_(False)

    def forward(self, tokens: Tensor, detour: bool) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        if self.detour is not None and detour:
            hidden = hidden + torch.tanh(self.detour(hidden))
        return self.head(hidden * self.scale).float()


def build(model: Model) -> Net:
    """The same on all ranks."""
    torch.manual_seed(model.seed)
    return Net(model).to(model.dtype)


def loss(module: nn.Module, net: Net, model: Model, rank: int, batch: int) -> Tensor:
    """Of what a rank sees at some time: only the lower half of the vocabulary occurs."""
    draw = torch.Generator().manual_seed(1000 * rank + batch)
    tokens = torch.randint(0, max(1, model.vocabulary // 2), (_BATCH,), generator=draw)
    targets = torch.randint(0, net.head.out_features, (_BATCH,), generator=draw)
    return nn.functional.cross_entropy(module(tokens, (rank + batch) % 3 == 0), targets)


def course(rank: int, world_size: int, configuration: Configuration, way: str) -> Course:
    """Train. Virtual workers share an environment, which is then set already."""
    settings = {} if way == VIRTUAL else _environment(configuration, way)
    with environment(settings), instruction_set_restored():
        return {"optimizer": _Wire, "compress": _Compressed, "local": _Local}[configuration.kind](
            rank, configuration, way
        ).train()


def virtually(configuration: Configuration) -> list[Course]:
    """The same with virtual workers."""
    with environment(_environment(configuration, VIRTUAL)), instruction_set_restored():
        return virtual.run_workers(configuration.ranks, course, configuration, VIRTUAL)


def _environment(configuration: Configuration, way: str) -> dict[str, str]:
    settings = {"LOCAL_WORLD_SIZE": str(GRIDS[configuration.grid][1])}
    if way == REFERENCE:
        settings["THINWIRE_KERNELS"] = "reference"
    elif way == ATTACHED and configuration.isa in _instruction_sets():
        settings["THINWIRE_ISA"] = configuration.isa
    return settings


@functools.cache
def _instruction_sets() -> list[str]:
    return instruction_sets()


class _Run:
    """A model, and what trains it."""

    optimizer: torch.optim.Optimizer
    ddp: DistributedDataParallel | None = None

    def __init__(self, rank: int, configuration: Configuration, way: str) -> None:
        self.rank, self.configuration, self.way = rank, configuration, way
        self.net = build(configuration.model)
        self.prepare()

    def prepare(self) -> None:
        """Make the optimizer."""
        raise NotImplementedError

    def train(self) -> Course:
        """Take all steps."""
        c, steps = self.configuration, []
        for step in range(c.steps):
            passes = c.microbatches[step % len(c.microbatches)]
            for micro in range(passes):
                last = micro == passes - 1
                guard: AbstractContextManager[Any] = nullcontext() if self.ddp is None or last else self.ddp.no_sync()
                with guard:
                    value = loss(self.ddp or self.net, self.net, c.model, self.rank, 10 * step + micro)
                    (value * math.inf if c.infinite == (self.rank, step) and last else value).backward()
            gradients = self.step()
            self.optimizer.zero_grad(set_to_none=c.set_to_none)
            if step == 0 and c.perturbed == self.way:
                self.perturb()
            steps.append(Step(digest(self.net.parameters()), gradients, self.equal()))
            for group in self.optimizer.param_groups:
                group["lr"] *= c.rate
        self.finish()
        steps.append(Step(digest(self.net.parameters()), "", equal=True))
        state = digest(_tensors(self.state()))
        self.close()
        self.ddp = None
        gc.collect()
        return Course(tuple(steps), state)

    def perturb(self) -> None:
        """Flip the lowest bit of a number, on all ranks."""
        p = self.net.scale
        kind = torch.int32 if p.dtype is torch.float32 else torch.int16
        with torch.no_grad():
            p.view(kind).bitwise_xor_(1)

    def groups(self) -> list[dict[str, Any]]:
        """The parameters, for an optimizer."""
        params, lr = list(self.net.parameters()), float(self.configuration.options.get("lr", 1e-2))
        if not self.configuration.two_groups or len(params) < 2:
            return [{"params": params, "lr": lr}]
        return [{"params": params[:1], "lr": lr}, {"params": params[1:], "lr": lr / 3}]

    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of a compression, or of local steps."""
        kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "SignSGD": thinwire.SignSGD}
        return kinds[self.configuration.inner](self.groups(), lr=1e-2)

    def step(self) -> str:
        """Take a step; the digest of averaged gradients, if there are any."""
        self.optimizer.step()
        return ""

    def equal(self) -> bool:
        """Whether replicas are equal."""
        return True

    def finish(self) -> None:
        """Make replicas equal, and apply what is under way."""

    def state(self) -> Any:
        """What is kept."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads and connections."""
        raise NotImplementedError


class _Wire(_Run):
    """An optimizer of thinwire."""

    def prepare(self) -> None:
        c, options = self.configuration, dict(self.configuration.options)
        if self.way == ATTACHED and c.other_bucket != 0.0:
            options["bucket_mb"] = c.other_bucket
        self.optimizer = self.wire = OPTIMIZERS[c.subject].optimizer(self.groups(), **options)
        if self.way == ATTACHED:
            self.ddp = DistributedDataParallel(self.net, **c.ddp)
            thinwire.attach(self.ddp, self.wire)

    def equal(self) -> bool:
        return self.wire.is_synchronized

    def finish(self) -> None:
        self.wire.synchronize()

    def state(self) -> Any:
        # Other buckets are other shards.
        return {} if self.configuration.other_bucket != 0.0 else self.wire.state_dict()["state"]

    def close(self) -> None:
        self.wire.close()


class _Compressed(_Run):
    """Any optimizer, with averages of `thinwire.compress`."""

    def prepare(self) -> None:
        c, options = self.configuration, dict(self.configuration.options)
        if self.way == ATTACHED:
            self.ddp = DistributedDataParallel(self.net, **c.ddp)
            self.compression = thinwire.compress(self.ddp, c.subject, **options)
        else:
            wire = {name: options.pop(name) for name in _OF_AVERAGER if name in options}
            self.params = [p for p in self.net.parameters() if p.requires_grad]
            self.compression = GradientAverager(
                self.params, rule_of(c.subject, options, options.pop("residual_decay")), **wire
            )
        self.optimizer = self.inner()

    def step(self) -> str:
        if isinstance(self.compression, GradientAverager):
            self.average(self.compression)
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        present = "".join("-+"[p.grad is not None] for p in self.net.parameters())
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            self.optimizer.step()
        return f"{present} {digest(gradients)}"

    def average(self, averager: GradientAverager) -> None:
        """What DDP does: gradients that some rank has become averages."""
        averager.begin()
        vectors = {}
        for p in self.params:
            vectors[p] = _in_memory_order(torch.zeros_like(p) if p.grad is None else p.grad, p).clone()
            averager.add(p, vectors[p], present=p.grad is not None)
        averaged = averager.finish()
        for p in self.params:
            # With a delay, averages are those of the exchange before, and zeros where it had none.
            if p.grad is not None or any(p is each for each in averaged):
                p.grad = torch.empty_like(p)
                _in_memory_order(p.grad, p).copy_(vectors[p])

    def finish(self) -> None:
        self.compression.synchronize()

    def state(self) -> Any:
        return self.compression.state_dict()["state"]

    def close(self) -> None:
        self.compression.close()


_OF_AVERAGER = ("bucket_mb", "check_replicas_every", "clip_norm", "clip_value", "node_dtype", "delay")


class _Local(_Run):
    """Local steps."""

    def prepare(self) -> None:
        c = self.configuration
        self.optimizer = self.local = thinwire.LocalSteps(self.inner(), compressor=c.subject, **c.options)

    def step(self) -> str:
        if self.configuration.options.get("weighted"):
            self.local.count(_WORK[self.rank])
        self.local.step()
        with self.local.at_reference():
            return digest(self.net.parameters())

    def equal(self) -> bool:
        return self.local.is_synchronized

    def finish(self) -> None:
        self.local.synchronize()

    def state(self) -> Any:
        return self.local.state_dict()

    def close(self) -> None:
        self.local.close()


def _in_memory_order(gradient: Tensor, p: Tensor) -> Tensor:
    """As a vector, without a copy if it lies in memory as its parameter does."""
    return (gradient if p.is_contiguous() else gradient.t()).reshape(-1)


def _tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of a state dict, in an order that does not depend on that of its making."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for _, value in sorted(state.items(), key=lambda item: str(item[0])):
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)


def differences(configuration: Configuration, courses: Mapping[str, Sequence[Course]]) -> str:
    """The first difference between the ways, or between ranks that must be equal; empty if there is none."""
    first, *others = configuration.ways
    for way in others:
        for rank, (ours, theirs) in enumerate(zip(courses[first], courses[way], strict=True)):
            for number, (one, other) in enumerate(zip(ours.steps, theirs.steps, strict=True), 1):
                if one != other:
                    unlike = [name for name in vars(one) if vars(one)[name] != vars(other)[name]]
                    return f"{first} and {way} have other {', '.join(unlike)} on rank {rank} after step {number}"
            if ours.state != theirs.state:
                return f"{first} and {way} keep other states on rank {rank}"
    for rank, theirs in enumerate(courses[first]):
        for number, (one, other) in enumerate(zip(courses[first][0].steps, theirs.steps, strict=True), 1):
            # Local steps report the values on which all ranks agree, compressions their averages.
            if one.gradients != other.gradients or (one.equal and one != other):
                return f"ranks 0 and {rank} differ after step {number}"
    return ""
