"""Short trainings that are the same, to the bit, on every device: gradients are given, not computed.

The loss is the sum of products of parameters and constants, so that backward yields those constants without rounding.
Whatever differs between two runs is then the optimizer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.cli.registry import Entry, offered
from thinwire.cli.selftest.site import CPU, Findings, Site
from thinwire.optimizers.optimizer import WireOptimizer

SHAPES: Sequence[tuple[int, ...]] = ((50, 37), (37, 65), (), (129,), (12, 5, 3))
RESTING_ROWS = 25
"""Rows at the end of the first parameter that never have a gradient."""
STEPS = 9
"""As many as it takes to see every stage of every subject."""
LR = 0.01
_BUCKET_MB = 0.006
"""Makes four buckets of them."""

_QUICK = {"birder", "onebit-adam", "cd-adam"}
"""Those that are tested if only a few are."""


@dataclass(frozen=True)
class Subject:
    """An optimizer with settings by which a few steps are of every kind."""

    label: str
    optimizer: Callable[..., WireOptimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    buckets_matter: bool = False
    """Whether results depend on the size of buckets, because scales do."""
    dtype: torch.dtype = torch.float32
    always_together: Mapping[str, Any] = field(default_factory=dict)
    """What to set besides, so that all ranks exchange at every step."""
    quick: bool = False
    """Whether it is one of those that are tested if only a few are."""


def _subject(entry: Entry) -> Subject:
    return Subject(
        entry.label,
        entry.optimizer,
        {**entry.options, **entry.stages.nine_steps, **entry.selftest},
        buckets_matter=entry.scales_per_bucket,
        always_together=entry.stages.synchronous,
        quick=entry.name in _QUICK,
    )


SUBJECTS = (
    *map(_subject, offered("selftest").values()),
    Subject("Birder of bfloat16", thinwire.Birder, dtype=torch.bfloat16),
)


def subjects(site: Site, findings: Findings) -> list[Subject]:
    """Those that this device takes; the others are noted, with what they say.

    Raises:
        RuntimeError: when it takes none of them.
    """
    asked = [subject for subject in SUBJECTS if subject.quick or not site.quick]
    if len(asked) < len(SUBJECTS):
        findings.notes.append(f"only {', '.join(subject.label for subject in asked)} were tested, to be quick")
    taken: list[Subject] = []
    for subject in asked:
        try:
            subject.optimizer([nn.Parameter(torch.ones(2, dtype=subject.dtype, device=site.device))], **subject.options)
        except (NotImplementedError, ValueError) as error:
            findings.notes.append(f"{subject.label} was not tested, as it refuses this device: {error}")
        else:
            taken.append(subject)
    if not taken:
        raise RuntimeError("; ".join(findings.notes))
    return taken


class Forms(nn.Module):
    """Parameters of awkward sizes, whose gradients are whatever is given. They begin the same everywhere."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.values = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        """A loss with these gradients."""
        products = [(p * g).sum().float() for p, g in zip(self.values, gradients, strict=True)]
        return torch.stack(products).sum()


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Those of a rank at a step, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    found[0][-RESTING_ROWS:] = 0.0
    return found


@dataclass(frozen=True)
class Variant:
    """A way to run that must not matter."""

    label: str
    attach: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: {"bucket_mb": _BUCKET_MB})
    cpu_kernels: str | None = None
    """Run on the CPU, over gloo, with these."""


Poison = tuple[int, int, float]
"""A step, a rank and what stands in one of its gradients then."""


@dataclass(frozen=True)
class Course:
    """What a rank has seen of a run; all of it is on the CPU."""

    values: Tensor
    """All parameters one after another; a row before the run, and one after each step."""
    equal: list[bool]
    """Whether replicas must be equal, after each step."""
    skipped: list[int]
    """Steps skipped so far, after each step."""
    finite: list[bool]
    """Whether all of the state is, after each step."""


def run(
    site: Site, subject: Subject, variant: Variant, *, steps: int = STEPS, poisons: Sequence[Poison] = (), **more: Any
) -> Course:
    """Train in all ranks; `more` are options of the optimizer."""
    on_cpu = variant.cpu_kernels is not None
    device, group = (CPU, dist.group.WORLD) if on_cpu else (site.device, site.group)
    assert group is not None, "ranks have a default group"
    net = Forms(subject.dtype).to(device)
    options = {"lr": LR, "topology": "flat", **subject.options, **variant.options, **more, "process_group": group}
    with _kernels(variant.cpu_kernels):
        optimizer = subject.optimizer(net.parameters(), **options)
    model: nn.Module = net
    if variant.attach:
        model = DistributedDataParallel(net, **site.ddp_options(device, group))
        thinwire.attach(model, optimizer)
    course = Course(torch.empty(0), [], [], [])
    rows = [_flat(net)]
    for step in range(steps):
        gradients = [g.to(device) for g in gradients_of(site.rank, step, subject.dtype)]
        for when, rank, poison in poisons:
            if (step, site.rank) == (when, rank):
                gradients[1].view(-1)[7] = poison
        model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(_flat(net))
        course.equal.append(optimizer.is_synchronized)
        course.skipped.append(optimizer.metrics().skipped_steps)
        states = (s for p in net.parameters() for s in optimizer.state[p].values() if isinstance(s, Tensor))
        course.finite.append(all(bool(state.isfinite().all()) for state in states))
    return Course(torch.stack(rows), course.equal, course.skipped, course.finite)


def _flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).to(CPU, copy=True)


@contextmanager
def _kernels(name: str | None) -> Iterator[None]:
    """Let optimizers that are made inside have these kernels; without a name, those that they would have."""
    variable = "THINWIRE_KERNELS"
    before = os.environ.get(variable)
    if name is not None:
        os.environ[variable] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


def difference(ours: Tensor, theirs: Tensor) -> str | None:
    """How two runs differ, if they do in a single bit."""
    if ours.shape != theirs.shape:
        return f"there are {list(ours.shape)} numbers in one and {list(theirs.shape)} in the other"
    other = _bits(ours) != _bits(theirs)
    steps = other.any(1).nonzero().flatten().tolist()
    if not steps:
        return None
    first = steps[0]
    apart = (ours[first].double() - theirs[first].double()).abs().max()
    return (
        f"from step {first} on other bits, in {int(other[first].sum())} of {ours.shape[1]} elements by up to "
        f"{float(apart):.3g}"
    )


def _bits(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
