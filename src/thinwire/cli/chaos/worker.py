"""A rank under fire. It trains as any program would: errors are not handled, but end it, through its `finally`.

It has a *line* to the supervisor, on which it tells what it has reached, and hears what it is to do.
"""

from __future__ import annotations

import faulthandler
import hashlib
import itertools
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import checkpoint
from thinwire.cli.chaos.episodes import Episode
from thinwire.testbed import enter_namespace

LONGEST_REPORT = 1 << 16
_LONGEST_MESSAGE = 4000
_SPOILT_OF = 40
"""One of so many packets is corrupted: about as many as a rank sends in a step."""


@dataclass(frozen=True)
class Orders:
    """What the supervisor wants a rank to do."""

    episode: Episode
    rank: int
    namespace: str
    interface: str
    timeout: float
    folder: str
    """Of this incarnation: rendezvous, logs, stacks."""
    checkpoints: str

    def to_json(self) -> str:
        """For the way to the rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Orders:
        """At the end of it."""
        fields = json.loads(text)
        return cls(**{**fields, "episode": Episode(**fields["episode"])})

    @property
    def log(self) -> str:
        """Where its output goes."""
        return os.path.join(self.folder, f"rank-{self.rank}.log")

    @property
    def stacks(self) -> str:
        """Where it writes the stacks of its threads when it gets SIGUSR1."""
        return os.path.join(self.folder, f"rank-{self.rank}.stacks")


class Line:
    """The rank's end of its line. Whatever is told arrives whole, or not at all."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def tell(self, event: str, **details: Any) -> None:
        """Report to the supervisor."""
        self._line.send(json.dumps({"event": event, **details}).encode())

    def heard(self) -> str:
        """What the supervisor has said since; empty for nothing."""
        try:
            return self._line.recv(LONGEST_REPORT, socket.MSG_DONTWAIT).decode()
        except BlockingIOError:
            return ""

    def await_word(self) -> None:
        """Wait until the supervisor says anything, or is gone."""
        self._line.recv(LONGEST_REPORT)


def digest(tensors: Iterable[Tensor]) -> str:
    """Equal exactly when every tensor is equal to the bit."""
    accumulated = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        accumulated.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return accumulated.hexdigest()


def main(orders: Orders, line: Line) -> None:
    """Train to the end, or raise."""
    with open(orders.log, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=open(orders.stacks, "wb"), all_threads=True)  # noqa: SIM115
    faulthandler.enable()
    # As many programs do, so that they are taken down in order.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Only this thread enters the namespace, and those that it makes.
    enter_namespace(orders.namespace)
    episode, rank = orders.episode, orders.rank
    os.environ.update(
        GLOO_SOCKET_IFNAME=orders.interface,
        LOCAL_WORLD_SIZE=str(episode.ranks_a_node),
        LOCAL_RANK=str(rank % episode.ranks_a_node),
    )
    torch.set_num_threads(1)
    stage = "starting"
    run = None
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(orders.folder, "rendezvous"), episode.ranks),
            rank=rank,
            world_size=episode.ranks,
            timeout=timedelta(seconds=orders.timeout),
        )
        line.tell("joined")
        run = _Run(orders, line)
        stage = "training"
        run.train()
        # Nobody leaves before all have what they need.
        line.await_word()
    except BaseException as error:
        line.tell(
            "raised",
            stage=stage,
            types=[kind.__name__ for kind in type(error).__mro__],
            message=str(error)[:_LONGEST_MESSAGE],
            digest="" if run is None else run.digest(),
        )
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Run:
    """A model and its optimizer, from the last checkpoint to the last step."""

    def __init__(self, orders: Orders, line: Line) -> None:
        self._orders, self._episode, self._line = orders, orders.episode, line
        self._net = self._episode.model()
        self._model = DistributedDataParallel(self._net)
        self._optimizer = self._episode.optimizer(self._net)
        thinwire.attach(self._model, self._optimizer)
        self._poison: tuple[str, float] | None = None
        for name, parameter in self._net.named_parameters():
            parameter.register_hook(self._poisoner(name))
        restored = checkpoint.load(orders.checkpoints, self._model, self._optimizer)
        self._step = 0 if restored is None else restored.step
        self._skipped = 0 if restored is None else restored.extra["skipped"]
        line.tell("ready", step=self._step, digest=self.digest())

    def digest(self) -> str:
        """Of all parameters."""
        return digest(self._net.parameters())

    def train(self) -> None:
        """Take all steps that are left."""
        episode, rank = self._episode, self._orders.rank
        while self._step < episode.steps:
            step = self._step + 1
            word = self._line.heard()
            if word:
                _corrupt_a_packet(random.Random(word), self._line)
            self._poison = episode.poison(rank, step)
            skipped = self._optimizer.metrics().skipped_steps
            self._model(episode.batch(rank, step)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._skipped += self._optimizer.metrics().skipped_steps - skipped
            self._step = step
            self._line.tell("step", step=step, digest=self.digest())
            if step % episode.save_every == 0:
                extra = {"skipped": self._skipped}
                checkpoint.save(self._orders.checkpoints, self._model, self._optimizer, step, extra=extra)
                self._line.tell("saved", step=step)
        self._optimizer.synchronize()
        self._line.tell("done", digest=self.digest(), skipped=self._skipped)

    def _poisoner(self, name: str) -> Callable[[Tensor], Tensor]:
        def poison(gradient: Tensor) -> Tensor:
            if self._poison is None or self._poison[0] != name:
                return gradient
            poisoned = gradient.clone()
            poisoned.view(-1)[-1] = self._poison[1]
            return poisoned

        return poison


def _corrupt_a_packet(draw: random.Random, line: Line) -> None:
    """Let one of the next packets go out with one bit flipped, after its checksum was made, and tell of it."""
    # The method of all groups in this process, and as it is in the class: got from it, it would no longer bind.
    bound = vars(dist.ProcessGroup)["send"]
    send = dist.ProcessGroup.send
    # Lanes send at the same time, and only one of them is to be hit.
    packets, spoilt = itertools.count(), draw.randrange(_SPOILT_OF)

    def spoiling_send(group: dist.ProcessGroup, tensors: list[Tensor], *where: int) -> Any:
        if next(packets) != spoilt:
            return send(group, tensors, *where)
        dist.ProcessGroup.send = bound  # type: ignore[method-assign]
        # A copy: the sender's memory is right, as if its network card were at fault.
        packet = tensors[0].clone()
        octets = packet.view(-1).view(torch.uint8)
        half = octets.numel() // 2
        line.tell("corrupted", twice=octets[:half].equal(octets[half:]))
        octets[draw.randrange(octets.numel())] ^= 1 << draw.randrange(8)
        return send(group, [packet], *where)

    dist.ProcessGroup.send = spoiling_send  # type: ignore[method-assign]
