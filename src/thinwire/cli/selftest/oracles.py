"""Two papers in float64, for all workers in one process, as plainly as they can be written (law 3).

They take from thinwire the definition of its random numbers (`thinwire.kernels.rng`) and of the flat space, and no
kernel. All gradients must be finite, and a coordinate must have one always or never.

A float32 that is all but equal to what it is compared with may fall on the other side of it. Such an element is
`undecided` from then on, which is rare; what becomes of all others is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels import rng
from thinwire.transport.layout import Layout

DRAW_BITS = 24
_ROUNDING = 2.0**-18
"""Of a number that several float32 operations have made, with room to spare."""


class Birder:
    """Peng et al., 2023.

    Args:
        start: all parameters one after another.
        elements: where each of their elements lies in the flat space.
        workers: how many.
        downlink: "bit", "majority" or "votes".
    """

    def __init__(
        self, start: Tensor, elements: Tensor, workers: int, *, lr: float, decay: float, beta: float, downlink: str
    ) -> None:
        self.x = start.double()
        self.undecided = torch.zeros(start.shape, dtype=torch.bool)
        self._elements = elements
        self._lr, self._decay, self._beta, self._downlink = lr, decay, beta, downlink
        self._m = torch.zeros(workers, start.numel(), dtype=torch.float64)
        self._b = torch.zeros_like(self._m)
        self._step = 0

    def step(self, gradients: Tensor) -> None:
        """Take a step with the gradients of all workers, one row per worker."""
        self._step += 1
        workers = gradients.shape[0]
        self._m = self._beta * self._m + (1 - self._beta) * gradients.double()
        self._b = self._beta * self._b + (1 - self._beta) * gradients.double().abs()
        keys = [rng.worker_key(0, self._step, worker) for worker in range(workers)]
        r = torch.stack([rng.uniform(key, self._elements) for key in keys]).double()
        margin = self._m - r * self._b
        self.undecided |= ((margin.abs() <= _ROUNDING * self._b) & (self._b > 0)).any(0)
        bits = margin > 0
        mean = (2 * bits.sum(0) - workers) / workers
        if self._downlink == "votes":
            direction = mean
        elif self._downlink == "majority":
            direction = torch.where(mean == 0, 2.0 * bits[self._step % workers] - 1, mean.sign())
        else:
            chosen = drawn_worker(rng.owner_key(0, self._step), workers, self._elements)
            direction = 2.0 * bits.gather(0, chosen.unsqueeze(0))[0] - 1
        moved = (1 - self._lr * self._decay) * self.x - self._lr * direction
        self.x = torch.where((self._b > 0).any(0), moved, self.x)


def drawn_worker(key: int, workers: int, elements: Tensor) -> Tensor:
    """For each element the worker whose bit its owner passes on: a random walk down a tree of halves."""
    low, high = torch.zeros_like(elements), torch.full_like(elements, workers)
    for level in range(max(0, workers - 1).bit_length()):
        middle = low + (high - low + 1) // 2
        threshold = ((middle - low) << DRAW_BITS) // (high - low)
        left = _owner_number(key, level, elements) < threshold
        open_still = high - low > 1
        low, high = torch.where(open_still & ~left, middle, low), torch.where(open_still & left, middle, high)
    return low


def _owner_number(key: int, level: int, elements: Tensor) -> Tensor:
    """`DRAW_BITS` random bits an element, the highest first; 32 elements share a draw of each."""
    number = torch.zeros_like(elements)
    for i in range(DRAW_BITS):
        words = rng.draw(rng.splitmix((key + DRAW_BITS * level + i) % (1 << 64)), elements >> 5)
        number = 2 * number + ((words >> (elements & 31)) & 1)
    return number


class OneBitAdam:
    """Tang et al., 2021: AdamW for `warm_up` steps, then scaled signs with error feedback and a frozen variance.

    Args:
        start: all parameters one after another.
        shards: of which shard each of their elements is.
        owners: of which parameter each element is.
        workers: how many.
    """

    def __init__(
        self,
        start: Tensor,
        shards: Tensor,
        owners: Tensor,
        workers: int,
        *,
        lr: float,
        decay: float,
        betas: tuple[float, float],
        eps: float,
        warm_up: int,
        variance_floor: float,
    ) -> None:
        self.x = start.double()
        self.undecided = torch.zeros(start.shape, dtype=torch.bool)
        self._shards, self._owners = shards, owners
        self._lr, self._decay, self._betas, self._eps = lr, decay, betas, eps
        self._warm_up, self._floor = warm_up, variance_floor
        self._m, self._v, self._factor = (torch.zeros_like(self.x) for _ in range(3))
        self._worker_error = torch.zeros(workers, start.numel(), dtype=torch.float64)
        self._owner_error = torch.zeros_like(self.x)
        self._step = 0

    def step(self, gradients: Tensor) -> None:
        """Take a step with the gradients of all workers, one row per worker."""
        self._step += 1
        beta1, beta2 = self._betas
        g = gradients.double()
        if self._step <= self._warm_up:
            self._m = beta1 * self._m + (1 - beta1) * g.mean(0)
            self._v = beta2 * self._v + (1 - beta2) * g.mean(0).square()
            roots = (self._v / (1 - beta2**self._step)).sqrt()
            if self._step == self._warm_up:
                self._factor = self._over(torch.maximum(roots, self._floor * self._root_mean_square(roots)))
            self._move(self._over(roots))
            return
        said, self._worker_error = self._say(self._worker_error + beta1 * self._m + (1 - beta1) * g)
        (self._m,), (self._owner_error,) = self._say((said.mean(0) + self._owner_error).unsqueeze(0))
        self._move(self._factor)

    def _over(self, roots: Tensor) -> Tensor:
        return torch.where(self._v > 0, 1 / (roots + self._eps), 0.0)

    def _root_mean_square(self, roots: Tensor) -> Tensor:
        """Of each element's parameter, over those that have a variance."""
        parameters = int(self._owners.max()) + 1
        squares = torch.zeros(parameters, dtype=torch.float64).index_add_(0, self._owners, roots.square())
        living = torch.zeros(parameters, dtype=torch.float64).index_add_(0, self._owners, (self._v > 0).double())
        return (squares / living.clamp(min=1)).sqrt()[self._owners]

    def _say(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of scaled signs, and what they leave unsaid."""
        shards = int(self._shards.max()) + 1
        zeros = torch.zeros(c.shape[0], shards, dtype=torch.float64)
        squares = zeros.index_add(1, self._shards, c.square())
        lengths = torch.bincount(self._shards, minlength=shards).clamp(min=1)
        scales = (squares / lengths).sqrt().float().double()[:, self._shards]  # they travel as float32
        self.undecided |= (c.abs() <= _ROUNDING * scales).any(0) & (self._v > 0)
        said = torch.where(c >= 0, scales, -scales)
        return said, c - said

    def _move(self, factor: Tensor) -> None:
        rate = self._lr / (1 - self._betas[0] ** self._step)
        moved = (1 - self._lr * self._decay) * self.x - rate * self._m * factor
        self.x = torch.where(factor > 0, moved, self.x)


def flat_places(numels: Sequence[int], workers: int, bucket_elements: int) -> tuple[Tensor, Tensor, Tensor]:
    """For all elements of the parameters, one after another: the place in the flat space, the shard, the parameter."""
    layout = Layout(numels, workers, bucket_elements)
    starts = torch.tensor([0, *numels[:-1]]).cumsum(0).tolist()
    places, shards, owners = (torch.zeros(sum(numels), dtype=torch.int64) for _ in range(3))
    for slot in layout.slots:
        first = starts[slot.index]
        here = slice(first, first + slot.numel)
        places[here] = torch.arange(slot.start, slot.start + slot.numel)
        owners[here] = slot.index
        for piece in layout.pieces(slot):
            inside = slice(first + piece.start - slot.start, first + piece.stop - slot.start)
            shards[inside] = layout.buckets[piece.bucket].shard_number(piece.shard)
    return places, shards, owners
