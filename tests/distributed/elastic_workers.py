"""Workers of elastic runs: processes that join and leave as a test says, with a real Lighthouse."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.coordination import LighthouseServer

from tests.harness import fork_server, plain
from thinwire.elastic import ElasticLocalSteps
from thinwire.errors import PeerLost
from thinwire.testbed.supervisor import Child, Raised, Returned, Supervisor

SHAPES = ((50, 37), (150,), (29, 150))
EVERY = 3
SECONDS = 90.0
"""Within which anything that is waited for must happen."""
HEARTBEAT_TIMEOUT = 5.0
"""The seconds after which the Lighthouse takes a silent worker for dead: one that waits for a core must not be."""


class Given(torch.optim.Optimizer):
    """Moves each parameter down by its gradient: a product would be rounded in another way than NumPy does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad)


def new_params(seed: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


def moves_of(worker: int, step: int) -> list[Tensor]:
    """What the inner optimizer of a worker does in an inner step of the run."""
    draw = torch.Generator().manual_seed(1000 * step + worker)
    return [torch.randn(shape, generator=draw).mul_(10.0 ** (-index)) for index, shape in enumerate(SHAPES)]


def be_worker(channel: Connection, number: int, lighthouse: str, settings: Mapping[str, Any]) -> Any:
    """Train one interval for each order. "die in the exchange" ends this process when it has sent a packet; "fail after
    the exchange" lets it fail here when it is complete on all workers."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchft")  # it calls Logger.warn
    logging.disable(logging.CRITICAL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    params = new_params(seed=number)  # other values on each: those of one of them become the values of all
    made = {"every": EVERY, "timeout": 20.0, "patience": SECONDS, "hostname": "127.0.0.1", **settings}
    opt = ElasticLocalSteps(Given(params), lighthouse=lighthouse, name=f"worker-{number}", **made)
    try:
        opt.join()
        report = lambda: (opt.outer_steps, opt.workers, plain([p.detach() for p in params]))  # noqa: E731
        channel.send(report())
        while (order := channel.recv()) != "leave":
            if order == "die in the exchange":
                die_after_packets(1)
            if order == "fail after the exchange":
                fail_once(opt)
            for _ in range(EVERY):
                for p, move in zip(params, moves_of(number, opt.inner_steps), strict=True):
                    p.grad = move
                opt.step()
            channel.send(report())
        return plain(opt.metrics().as_dict())
    finally:
        opt.close()


def die_after_packets(packets: int) -> None:
    """Let this process get SIGKILL in the middle of its next exchange."""
    send, sent = dist.ProcessGroup.send, itertools.count()

    def deadly_send(group: dist.ProcessGroup, tensors: list[Tensor], *where: int) -> Any:
        if next(sent) == packets:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(group, tensors, *where)

    dist.ProcessGroup.send = deadly_send  # type: ignore[method-assign]


def fail_once(opt: ElasticLocalSteps) -> None:
    """Let the last message of the next exchange get lost: this worker does not know that all others have succeeded."""
    fragment = opt._fragments[0]
    collect = fragment.collect

    def failing() -> None:
        collect()
        fragment.collect = collect  # type: ignore[method-assign]
        raise PeerLost("the last message", "lost in a test")

    fragment.collect = failing  # type: ignore[method-assign]


class ElasticRun:
    """The workers of a run by number, and what they have reported."""

    def __init__(self, supervisor: Supervisor, lighthouse: str) -> None:
        self._supervisor, self.lighthouse = supervisor, lighthouse
        self.workers: dict[int, Child] = {}
        self._reports: dict[Child, list[Any]] = {}

    def start(self, number: int, **settings: Any) -> None:
        child = self._supervisor.start(be_worker, number, self.lighthouse, settings, name=f"worker-{number}")
        self.workers[number], self._reports[child] = child, []

    def go(self, *numbers: int, order: str = "go") -> None:
        for number in numbers:
            self.workers[number].send(order)

    def kill(self, number: int) -> None:
        self.workers[number].signal(signal.SIGKILL)

    def reports(self, *numbers: int) -> list[Any]:
        """The next report of each."""
        self._wait(lambda: all(self._reports[self.workers[number]] for number in numbers), numbers)
        return [self._reports[self.workers[number]].pop(0) for number in numbers]

    def outcome(self, number: int) -> Returned | Raised:
        child = self.workers[number]
        self._wait(lambda: child.outcome is not None, [])
        assert child.outcome is not None
        return child.outcome

    def exit_code(self, number: int) -> int | None:
        self._wait(lambda: self.workers[number].exit_code is not None, [])
        return self.workers[number].exit_code

    def wait_until_waiting(self, number: int) -> None:
        """Until the Lighthouse knows that a worker waits for a quorum, while the others train."""

        def status() -> str:
            with urllib.request.urlopen(f"{self.lighthouse}/status", timeout=SECONDS) as page:
                return page.read().decode()

        self._wait(lambda: f"worker-{number}" in (text := status()) and "1 participants" in text, [])

    def _wait(self, condition: Callable[[], bool], numbers: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            for child, message in self._supervisor.receive(0.05):
                self._reports[child].append(message)
            for number in numbers:
                outcome = self.workers[number].outcome
                if isinstance(outcome, Raised):
                    raise AssertionError(outcome.traceback)
            if time.monotonic() > deadline:
                raise AssertionError("the workers do not do what is waited for")


@contextmanager
def lighthouse(least: int = 2) -> Iterator[str]:
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=least,
        join_timeout_ms=30000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(1000 * HEARTBEAT_TIMEOUT),
    )
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


@contextmanager
def elastic_run(least: int = 2) -> Iterator[ElasticRun]:
    with lighthouse(least) as address, Supervisor(fork_server("thinwire.elastic"), grace=0.0) as supervisor:
        yield ElasticRun(supervisor, address)
