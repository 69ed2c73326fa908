"""What `thinwire chaos` trains with: all optimizers, compressed averaging, and local steps, behind one interface.

To add one, add a line to `_COMPRESSED` or `_LOCAL`. An optimizer of the registry that the command offers is there
already.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire
from thinwire.averaging.handle import Compression
from thinwire.cli.registry import Entry, offered
from thinwire.metrics import Metrics
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.outer.metrics import LocalMetrics

_LR = 1e-3
_REPLICA_CHECK = 7
"""Steps between checks of the replicas: often, and seldom together with a checkpoint."""


@dataclass(frozen=True)
class Trained(ABC):
    """A model that is ready to train, on one rank."""

    model: nn.Module
    """To call: the network, in DDP if the subject needs it."""
    optimizer: Optimizer
    compression: Compression | None = None
    """To save with the optimizer."""

    @abstractmethod
    def step(self) -> bool:
        """Take a step with the gradients that are there; whether this rank skipped it."""

    def agreed(self) -> AbstractContextManager[None]:
        """Inside, the parameters have the values that only an exchange changes, and no exchange that fails."""
        return nullcontext()

    def exchanges_twice(self, step: int) -> bool:
        """Whether a step has two exchanges, of which the first one may succeed although the second one fails."""
        return False

    def finish(self) -> None:  # noqa: B027 - most are equal after every step
        """Make all replicas equal."""


class Subject(ABC):
    """What takes the place of DDP + AdamW."""

    name: str
    runs_in_nodes = True
    """Whether a node of several ranks can be a worker."""
    has_local_steps = False
    """Whether nodes take steps of which others know nothing, and in which they lose nobody but each other."""
    pace = 1
    """How many times as many steps an episode has, because a step takes less time."""
    uses_all = False
    """Whether every parameter must have a gradient in every backward."""
    settling_steps = 1
    """Faults begin after so many. DDP itself exchanges before them, and its errors are torch's."""

    @abstractmethod
    def prepare(self, net: nn.Module, bucket_mb: float) -> Trained:
        """Give a network what trains it. All ranks call it."""


class _WireTrained(Trained):
    def step(self) -> bool:
        return _skips(self._wire.step, self._wire.metrics)

    def finish(self) -> None:
        self._wire.synchronize()

    @property
    def _wire(self) -> WireOptimizer:
        assert isinstance(self.optimizer, WireOptimizer)
        return self.optimizer


def _skips(step: Callable[[], object], metrics: Callable[[], Metrics | LocalMetrics]) -> bool:
    before = metrics().skipped_steps
    step()
    return metrics().skipped_steps > before


class WireSubject(Subject):
    """An optimizer of the registry, attached to DDP.

    Args:
        entry: of the registry.
    """

    def __init__(self, entry: Entry) -> None:
        self.name = entry.name
        self.has_local_steps = entry.stages.has_local_steps
        self._entry = entry

    def prepare(self, net: nn.Module, bucket_mb: float) -> Trained:
        """See `Subject`."""
        entry, model = self._entry, DistributedDataParallel(net)
        # All stages come long before the last step, however often the run restarts.
        settings = {"lr": _LR, **entry.options, **entry.stages.fifty_steps}
        every = {"bucket_mb": bucket_mb, "check_replicas_every": _REPLICA_CHECK}
        optimizer = entry.build(net.parameters(), {**settings, **every})
        thinwire.attach(model, optimizer)
        return _WireTrained(model, optimizer)


class _CompressedTrained(Trained):
    def step(self) -> bool:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # They are averages: all ranks skip, or none.
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return True
        self.optimizer.step()
        return False


@dataclass(frozen=True)
class CompressedSubject(Subject):
    """AdamW with averages of `thinwire.compress`."""

    name: str
    compressor: str
    options: Mapping[str, Any] = field(default_factory=dict)

    uses_all = True
    settling_steps = 2  # in its second forward DDP exchanges the order of its buckets

    def prepare(self, net: nn.Module, bucket_mb: float) -> Trained:
        """See `Subject`."""
        model = DistributedDataParallel(net)
        wire = {"bucket_mb": bucket_mb, "check_replicas_every": _REPLICA_CHECK}
        compression = thinwire.compress(model, self.compressor, **{**wire, **self.options})
        return _CompressedTrained(model, torch.optim.AdamW(model.parameters(), lr=_LR), compression)


@dataclass(frozen=True)
class _LocalTrained(Trained):
    twice_every: int = 0
    """The steps between two that have two exchanges; 0 if none has."""

    def step(self) -> bool:
        return _skips(self._local.step, self._local.metrics)

    def agreed(self) -> AbstractContextManager[None]:
        return self._local.at_reference()

    def exchanges_twice(self, step: int) -> bool:
        return bool(self.twice_every) and step % self.twice_every == 0

    def finish(self) -> None:
        self._local.synchronize()

    @property
    def _local(self) -> thinwire.LocalSteps:
        assert isinstance(self.optimizer, thinwire.LocalSteps)
        return self.optimizer


@dataclass(frozen=True)
class LocalSubject(Subject):
    """AdamW in local steps."""

    name: str
    profile: str
    every: int
    pace: int = 8
    runs_in_nodes: bool = True
    exchanges_every_step: bool = False
    """Whether inner steps exchange too."""

    def prepare(self, net: nn.Module, bucket_mb: float) -> Trained:
        """See `Subject`."""
        inner = torch.optim.AdamW(net.parameters(), lr=_LR)
        wire: dict[str, Any] = {"bucket_mb": bucket_mb, "check_replicas_every": _REPLICA_CHECK}
        local = thinwire.LocalSteps.from_profile(self.profile, inner, every=self.every, **wire)
        return _LocalTrained(net, local, twice_every=self.every if self.exchanges_every_step else 0)


_COMPRESSED = (
    CompressedSubject("compress-int4", "int4"),
    CompressedSubject("compress-topk", "topk", {"ratio": 0.05}),
    CompressedSubject("compress-int4-delay", "int4", {"delay": 1}),
    CompressedSubject("compress-onebit-sgd", "onebit_sgd"),
    CompressedSubject("compress-powersgd", "powersgd", {"rank": 2}),
    CompressedSubject("compress-laq", "laq"),
    CompressedSubject("compress-randomk", "randomk", {"ratio": 0.1}),
)
_LOCAL = (
    LocalSubject("local-int4", "diloco-int4", every=7),
    LocalSubject("local-streaming", "streaming-int4", every=25),
    LocalSubject("local-sparse", "sparse-loco", every=6),
    # Its workers are single ranks.
    LocalSubject("local-cser", "cser", every=4, pace=1, runs_in_nodes=False, exchanges_every_step=True),
)


@functools.cache
def subjects() -> dict[str, Subject]:
    """All by name: an optimizer, a compressor, a profile of local steps, and so on, while there are any."""
    optimizers = [WireSubject(entry) for entry in offered("chaos").values()]
    kinds: Iterator[tuple[Subject | None, ...]] = itertools.zip_longest(optimizers, _COMPRESSED, _LOCAL)
    return {subject.name: subject for each in kinds for subject in each if subject is not None}
