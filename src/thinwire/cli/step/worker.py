"""One rank of `thinwire bench step`, in torchrun's environment. It carries out the commands of the parent.

Every turn has its own process group, model and optimizer: none inherits connections, threads or memory of another.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.cli.memory import peak_bytes, return_free_memory
from thinwire.cli.step.methods import method_named
from thinwire.cli.step.models import MODELS
from thinwire.metrics import Metrics

# DDP rebuilds its buckets after the first, attach overlaps from the second; PowerSGD and ours whose warm-up is not
# what is measured (`thinwire.cli.stages`) compress from the third.
WARM_UP_STEPS = 4
COMPUTE_PROBES = 4
FEWEST_STEPS, MOST_STEPS = 2, 400
SECONDS_BETWEEN_SIGNS_OF_LIFE = 1.0
ALIVE = "alive"
# The parent notices a rank that is silent for too long: it knows how slow the links are.
GLOO_TIMEOUT = timedelta(hours=1)


@dataclass
class Record:
    """What one rank measured, in seconds: lists have one value per step."""

    step: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    """Inside `optimizer.step()`, without what thinwire waited there."""
    exposed_wait: list[float] = field(default_factory=list)
    """As thinwire reports it; empty for methods of others."""
    compute: list[float] = field(default_factory=list)
    """Forward and backward while no rank sends, one value per probe."""
    thinwire: dict[str, float] = field(default_factory=dict)
    """Means per step of thinwire's other counters."""
    memory: int | None = None
    """The most bytes that the turn has added to what the process held before; None where the system does not say."""


class MethodRun:
    """One method on one model, in the phases through which the parent leads all ranks."""

    def __init__(self, model: str, method: str, show_life: Callable[[], None]) -> None:
        return_free_memory()
        self._memory_before = peak_bytes(reset=True)
        torch.manual_seed(0)
        workload = MODELS[model]
        # All ranks have the same seed, so there is nothing to synchronise, neither now nor, for the running averages of
        # BatchNorm, before every forward. That is the same for all methods, and not what is compared.
        self._model = DistributedDataParallel(workload.build(), broadcast_buffers=False, init_sync=False)
        self._method = method_named(method)
        prepared = self._method.prepare(self._model)
        self._optimizer, self._metrics = prepared.optimizer, prepared.metrics
        self._batch = workload.batch(torch.Generator().manual_seed(dist.get_rank()))
        self._show_life = show_life
        self._record = Record()
        self._steps = 0

    def warm_up(self) -> None:
        """Take steps that do not count."""
        for _ in range(WARM_UP_STEPS):
            self._step(Record())

    def settle(self, seconds: float) -> None:
        """Time the computation, take a step at the final rate, and agree on how many fit `seconds`, in whole cycles."""
        dist.barrier()
        for _ in range(COMPUTE_PROBES):
            self._record.compute.append(self._compute_alone())
        dist.barrier()
        began = time.perf_counter()
        self._step(Record())
        dist.barrier()
        fitting = min(max(FEWEST_STEPS, round(seconds / (time.perf_counter() - began))), MOST_STEPS)
        cycle = self._method.cycle
        agreed = torch.tensor(max(1, round(fitting / cycle)) * cycle)
        dist.broadcast(agreed, src=0)
        self._steps = int(agreed)

    def measure(self) -> Record:
        """Take the steps that count, in one go: barriers between them would hide what one leaves to the next."""
        record = self._record
        before = None if self._metrics is None else self._metrics()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(self._steps):
            self._step(record)
            ended = time.perf_counter()
            record.step.append(ended - began)
            began = ended
        dist.barrier()
        if before is not None and self._metrics is not None:
            record.thinwire = _means(before, self._metrics(), self._steps)
        if self._memory_before is not None:
            record.memory = (peak_bytes(reset=False) or 0) - self._memory_before
        return record

    def _step(self, record: Record) -> None:
        at_start = self._exposed_wait()
        self._model(*self._batch).backward()
        at_step = self._exposed_wait()
        began = time.perf_counter()
        self._optimizer.step()
        taken = time.perf_counter() - began
        waited = self._exposed_wait()
        # thinwire's optimizers wait in step(), thinwire.compress in backward.
        record.optimizer.append(taken - (waited - at_step))
        if self._metrics is not None:
            record.exposed_wait.append(waited - at_start)
        self._optimizer.zero_grad()
        self._show_life()

    def _exposed_wait(self) -> float:
        return 0.0 if self._metrics is None else self._metrics().exposed_wait_seconds

    def _compute_alone(self) -> float:
        began = time.perf_counter()
        with self._model.no_sync():
            self._model(*self._batch).backward()
        self._optimizer.zero_grad()
        self._show_life()
        return time.perf_counter() - began


def _means(before: Metrics, after: Metrics, steps: int) -> dict[str, float]:
    counted = [f.name for f in fields(Metrics) if f.name not in ("steps", "mean_abs_vote", "exposed_wait_seconds")]
    return {name: (getattr(after, name) - getattr(before, name)) / steps for name in counted}


class _Rank:
    """Carries out the commands of the parent."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self._world,
            is_master=self._rank == 0,
            timeout=GLOO_TIMEOUT,
        )
        self._turn: MethodRun | None = None
        self._turns = 0
        self._last_sign = 0.0

    def run(self, verb: str, arguments: dict[str, Any]) -> Record | None:
        """Carry out one command."""
        match verb:
            case "prepare":
                self._turns += 1
                store = dist.PrefixStore(f"turn {self._turns}", self._store)
                dist.init_process_group(
                    "gloo", store=store, rank=self._rank, world_size=self._world, timeout=GLOO_TIMEOUT
                )
                self._turn = MethodRun(**arguments, show_life=self._show_life)
            case "warm up":
                self._current().warm_up()
            case "settle":
                self._current().settle(**arguments)
            case "measure":
                return self._current().measure()
            case "end":
                # In this order: a DDP model that is the last to hold a gloo group takes it down while it holds the GIL,
                # for which one of the group's threads may wait (torch 2.13).
                self._turn = None
                gc.collect()
                dist.destroy_process_group()
            case unknown:
                raise ValueError(f"unknown command {unknown!r}")
        return None

    def _current(self) -> MethodRun:
        if self._turn is None:
            raise RuntimeError("nothing is prepared: the first command is 'prepare'")
        return self._turn

    def _show_life(self) -> None:
        # Once per second, and from one rank: the parent wakes up for it, and needs a core that the ranks use.
        now = time.monotonic()
        if self._rank == 0 and now - self._last_sign > SECONDS_BETWEEN_SIGNS_OF_LIFE:
            self._last_sign = now
            self._channel.send(ALIVE)


def run_rank(channel: Connection) -> None:
    """Carry out commands until the parent closes the channel."""
    torch.set_num_threads(1)
    rank = _Rank(channel)
    channel.send(None)
    while True:
        try:
            verb, arguments = channel.recv()
        except EOFError:
            return
        try:
            channel.send(rank.run(verb, arguments))
        except Exception:
            # For the report, which has the output of all ranks.
            traceback.print_exc()
            raise
