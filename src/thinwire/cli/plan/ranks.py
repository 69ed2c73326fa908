"""`torchrun ... -m thinwire plan`: all ranks measure the links between their hosts, and compare what they train."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from thinwire.planning.links import Links, LinkTimedOut, measure_links
from thinwire.planning.workload import Gradient, Workload

TIMEOUT = timedelta(seconds=60)


class RanksDisagree(RuntimeError):
    """Ranks measured different models, or one of them is missing."""


class Ranks:
    """The ranks that torchrun has started.

    They compare what they have measured through torchrun's store, not through a process group: a script may have one of
    its own, with any backend.
    """

    def __init__(self) -> None:
        store, self.rank, self.world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        self._store = dist.PrefixStore("thinwire plan", store)

    def measure_links(self) -> Links:
        """Measure the links, over gloo.

        Raises:
            ValueError: all ranks are on one host.
            LinkTimedOut: two hosts did not answer each other.
        """
        store = dist.PrefixStore("links", self._store)
        try:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=TIMEOUT)
        except RuntimeError as error:
            raise LinkTimedOut(f"the {self.world} ranks could not connect to each other: {error}") from error
        try:
            return measure_links()
        finally:
            dist.destroy_process_group()

    def agree(self, workload: Workload) -> Workload:
        """Compare what all ranks train.

        Returns:
            The workload of the slowest rank, the same on all.

        Raises:
            RanksDisagree: on every rank, if two ranks have different models or one did not answer.
        """
        own = [(gradient.elements, gradient.ready) for gradient in workload.gradients]
        self._store.set(f"model {self.rank}", json.dumps([workload.forward, workload.backward, own]))
        found: list[Workload] = []
        for rank in range(self.world):
            try:
                forward, backward, gradients = json.loads(self._store.get(f"model {rank}"))
            except RuntimeError as error:
                raise RanksDisagree(f"rank {rank} has not measured a training step: {error}") from None
            found.append(Workload(forward, backward, tuple(Gradient(*gradient) for gradient in gradients)))
        first = sorted(gradient.elements for gradient in found[0].gradients)
        for rank, other in enumerate(found):
            if sorted(gradient.elements for gradient in other.gradients) != first:
                raise RanksDisagree(
                    f"rank {rank} trains {other.elements:,} parameters in {len(other.gradients)} tensors, rank 0 "
                    f"{found[0].elements:,} in {len(first)}: all ranks must train the same model"
                )
        return max(found, key=lambda each: each.compute)

    def finish(self) -> None:
        """Wait for all ranks: the first one holds the store."""
        self._store.set(f"done {self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"done {rank}" for rank in range(self.world)], TIMEOUT)


@contextmanager
def launched() -> Iterator[Ranks | None]:
    """The ranks, if there are several; None for a process on its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    ranks = Ranks()
    try:
        yield ranks
    finally:
        ranks.finish()
