"""What runs on the hosts of `thinwire chaos --elastic`: workers with `ElasticLocalSteps`, and torchft's Lighthouse.

Steps are *paced*: the k-th inner step of an interval ends k times `step_seconds` after the interval began, and a worker
sleeps until then. Workers share the cores of one machine here. Without a pace the living would be faster while one of
them is dead, and slower while another one starts, and neither happens between real hosts. With it an interval takes
what its steps take, and what quorums, exchanges and waiting for others add. For the same reason workers take precedence
over interpreters that only start.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn
from torchft.coordination import LighthouseServer

from thinwire._torch_compat import IMPORTED_BY_OPTIMIZERS
from thinwire.cli.chaos.elastic_results import OuterStep, Started
from thinwire.cli.chaos.worker import digest
from thinwire.elastic import ElasticLocalSteps

# Here it counts as what it is, a part of the imports.
importlib.import_module(IMPORTED_BY_OPTIMIZERS)

PORT = 29510
HEARTBEAT_TIMEOUT = 1.0
"""The seconds after which the Lighthouse takes a silent worker for dead."""
_JOIN_TIMEOUT = 60.0
_QUORUM_TICK = 0.02
_LEAST_WORKERS = 2
_NICENESS = -10
_INPUTS, _WIDTH, _BATCH, _LR = 512, 1024, 8, 1e-3


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker runs, and where."""

    host: int
    life: int
    """How often a worker of this host was killed before."""
    address: str
    interface: str
    lighthouse: str
    every: int
    step_seconds: float
    timeout: float
    seed: int


def serve_lighthouse(channel: Connection) -> None:
    """Be the Lighthouse, for as long as the parent wants."""
    _take_precedence()
    server = LighthouseServer(
        bind=f"[::]:{PORT}",
        min_replicas=_LEAST_WORKERS,
        join_timeout_ms=round(1000 * _JOIN_TIMEOUT),
        quorum_tick_ms=round(1000 * _QUORUM_TICK),
        heartbeat_timeout_ms=round(1000 * HEARTBEAT_TIMEOUT),
    )
    try:
        channel.send(Started(time.monotonic(), _starved()))
        channel.recv()
    finally:
        server.shutdown()


def train(channel: Connection, config: WorkerConfig) -> None:
    """Join the run, and train until this process is killed. Report every outer step."""
    channel.send(Started(time.monotonic(), _starved()))
    _take_precedence()
    os.environ["GLOO_SOCKET_IFNAME"] = config.interface
    torch.set_num_threads(1)
    task = _Task(config)
    opt = ElasticLocalSteps(
        torch.optim.AdamW(task.model.parameters(), lr=_LR),
        every=config.every,
        compressor="int4",
        lighthouse=config.lighthouse,
        timeout=config.timeout,
        name=f"worker-{config.host}",
        hostname=config.address,
    )
    opt.join()
    channel.send(outer_step_of(opt, task.model, steps=0, began=time.monotonic(), loss=None))
    while True:
        interval = time.monotonic()
        began, loss = interval, None
        for step in range(config.every):
            of_step = task.loss()
            of_step.backward()
            loss = of_step.item()
            time.sleep(max(0.0, interval + (step + 1) * config.step_seconds - time.monotonic()))
            began = time.monotonic()
            opt.step()
            opt.zero_grad()
        channel.send(outer_step_of(opt, task.model, steps=config.every, began=began, loss=loss))


class _Task:
    """A regression with 2.1 million parameters, of which a worker computes a step in some milliseconds."""

    def __init__(self, config: WorkerConfig) -> None:
        draw = torch.Generator().manual_seed(config.seed)
        self._teacher = torch.randn(_INPUTS, _INPUTS, generator=draw) / _INPUTS**0.5
        torch.manual_seed(config.seed + 1 + 1000 * config.host + config.life)  # other data for each worker and life
        self.model = nn.Sequential(
            nn.Linear(_INPUTS, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _INPUTS)
        )

    def loss(self) -> Tensor:
        """Of the next examples."""
        inputs = torch.randn(_BATCH, _INPUTS)
        return nn.functional.mse_loss(self.model(inputs), torch.tanh(inputs @ self._teacher))


def outer_step_of(
    opt: ElasticLocalSteps, model: nn.Module, *, steps: int, began: float, loss: float | None
) -> OuterStep:
    """What to report after an outer step.

    Args:
        opt: has just taken it.
        model: its parameters.
        steps: inner steps since the last report.
        began: when the last inner step was done, by `time.monotonic()`.
        loss: of that step.
    """
    ended = time.monotonic()
    shared = opt.state_dict()["thinwire"]["elastic"]
    # A momentum of zeros is None there.
    outer = [tensor for fragment in shared["fragments"] for tensor in fragment if tensor is not None]
    return OuterStep(
        number=opt.outer_steps,
        exchange=(sum(shared["exchanges"]), shared["epoch"]),
        steps=steps,
        at=ended,
        exchanging=ended - began,
        starved=_starved(),
        workers=opt.workers,
        loss=loss,
        digest=digest([*model.parameters(), *outer]),
    )


def _take_precedence() -> None:
    """Get a core before processes that only start, and before all others of this machine: hosts have their own cores.

    Linux shares the cores between sessions first, if it groups processes by them, and then between the processes.
    """
    os.setsid()
    group = Path("/proc/self/autogroup")
    if group.exists():
        group.write_text(str(_NICENESS))
    os.nice(_NICENESS)


def _starved() -> float:
    """Seconds for which the main thread of this process could have gone on, but waited for one of the cores."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
