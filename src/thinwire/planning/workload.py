"""What is trained: the sizes of the gradients, when backward has computed each, and how they are cut into buckets."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.transport.layout import WORD, Layout, bucket_elements

_PIECES = 128
"""A model of which only the size is known is taken for so many equal parameters."""
_BACKWARD = 2 / 3
"""The part of forward and backward that backward takes: it computes two products where forward computes one."""
_DDP_FIRST_BYTES, _DDP_BYTES = 2**20, 25 * 2**20
"""DDP's buckets: the first one is closed when it holds 1 MiB, the others at 25 MiB."""


@dataclass(frozen=True)
class Gradient:
    """One parameter."""

    elements: int
    ready: float
    """When its gradient is complete, in seconds after the beginning of backward."""


@dataclass(frozen=True)
class Bucket:
    """What is exchanged at once."""

    elements: int
    ready: float
    """When its last gradient is complete, in seconds after the beginning of backward."""
    parts: int
    """The number of parameters that have elements in it."""


@dataclass(frozen=True)
class Workload:
    """The computation of one rank in one step, on a core or a GPU of its own.

    Args:
        forward: seconds before backward.
        backward: seconds of backward.
        gradients: all parameters that get one, in the order of the model.
    """

    forward: float
    backward: float
    gradients: tuple[Gradient, ...]

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("the model has no parameter that gets a gradient")
        for name in ("forward", "backward"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected seconds, zero or more")

    @classmethod
    def of_size(cls, elements: int, seconds: float) -> Workload:
        """A model of which only the number of parameters and the time of forward and backward are known.

        Args:
            elements: the number of parameters.
            seconds: of forward and backward.

        Raises:
            ValueError: for a model without parameters, or a negative time.
        """
        if elements < 1:
            raise ValueError(f"elements={elements}: expected the number of parameters, 1 or more")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds={seconds}: expected the time of forward and backward, zero or more")
        backward = _BACKWARD * seconds
        count = min(_PIECES, elements)
        sizes = [elements * (i + 1) // count - elements * i // count for i in range(count)]
        # The last parameter of the model is the first to have its gradient.
        gradients = tuple(Gradient(size, backward * (count - i) / count) for i, size in enumerate(sizes))
        return cls(seconds - backward, backward, gradients)

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(gradient.elements for gradient in self.gradients)

    @property
    def compute(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward

    def scaled(self, factor: float) -> Workload:
        """The same model on a machine on which everything takes `factor` times as long."""
        gradients = tuple(Gradient(g.elements, factor * g.ready) for g in self.gradients)
        return Workload(factor * self.forward, factor * self.backward, gradients)

    def thinwire_buckets(self, workers: int, slices: int, buckets: int, bucket_mb: float | None = None) -> list[Bucket]:
        """The buckets of thinwire's layout, which are those of `thinwire.transport.layout`.

        Args:
            workers: the number of shards per slice.
            slices: the number of slices per bucket.
            buckets: about how many there are.
            bucket_mb: their size instead.
        """
        numels = [gradient.elements for gradient in self.gradients]
        layout = Layout(numels, workers, bucket_elements(bucket_mb, sum(numels), buckets), slices=slices)
        ready = [self.gradients[slot.index].ready for slot in layout.slots]
        found: list[Bucket] = []
        latest = 0.0
        for bucket in layout.buckets:
            # Buckets are sent in the order of the layout, whatever the order of the gradients.
            latest = max(latest, *(ready[position] for position in bucket.slots))
            found.append(Bucket(bucket.shards * bucket.shard_words * WORD, latest, len(bucket.slots)))
        return found

    def buckets_of(self, shares: Sequence[float]) -> list[Bucket]:
        """Buckets that have these shares of all elements, in the order in which backward computes gradients."""
        gradients = sorted(self.gradients, key=lambda gradient: gradient.ready)
        ends = list(itertools.accumulate(gradient.elements for gradient in gradients))
        found: list[Bucket] = []
        first = 0
        for part in itertools.accumulate(shares):
            stop = round(part / sum(shares) * self.elements)
            inside = slice(bisect.bisect_right(ends, first), bisect.bisect_left(ends, stop) + 1)
            found.append(Bucket(stop - first, gradients[inside][-1].ready, len(gradients[inside])))
            first = stop
        return found

    def ddp_buckets(self) -> list[Bucket]:
        """The buckets of DistributedDataParallel, which it builds after the first step in the order of gradients."""
        found: list[Bucket] = []
        limit, held = _DDP_FIRST_BYTES, []
        for gradient in sorted(self.gradients, key=lambda gradient: gradient.ready):
            held.append(gradient)
            if 4 * _elements(held) >= limit:
                found.append(_as_bucket(held))
                limit, held = _DDP_BYTES, []
        return [*found, _as_bucket(held)] if held else found


def _elements(gradients: Sequence[Gradient]) -> int:
    return sum(gradient.elements for gradient in gradients)


def _as_bucket(gradients: Sequence[Gradient]) -> Bucket:
    return Bucket(_elements(gradients), max(gradient.ready for gradient in gradients), len(gradients))
