"""One rank of `thinwire chaos`. It trains as any program does: an error ends it, through its `finally`.

It has a channel to the parent: it reports how far it is, and receives when to corrupt a packet and when to leave.
"""

from __future__ import annotations

import faulthandler
import hashlib
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import checkpoint
from thinwire.cli.chaos.episodes import Episode
from thinwire.kernels.header import HEADER_BYTES

_LONGEST_MESSAGE = 4000
_SPOILT_OF = 40
"""One of so many packets is corrupted: about as many as a rank sends in a step."""


@dataclass(frozen=True)
class RankConfig:
    """What one rank runs, and where."""

    episode: Episode
    rank: int
    namespace: str
    interface: str
    timeout: float
    folder: str
    """Of this attempt: rendezvous, logs, stacks."""
    checkpoints: str

    @property
    def log(self) -> str:
        """The file for its output."""
        return os.path.join(self.folder, f"rank-{self.rank}.log")

    @property
    def stacks(self) -> str:
        """The file to which it writes the stacks of its threads when it gets SIGUSR1."""
        return os.path.join(self.folder, f"rank-{self.rank}.stacks")


def report(channel: Connection, event: str, **details: Any) -> None:
    """Report to the parent."""
    channel.send((event, details))


def digest(tensors: Iterable[Tensor]) -> str:
    """Equal exactly when every tensor is equal to the bit."""
    accumulated = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        accumulated.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return accumulated.hexdigest()


def main(channel: Connection, config: RankConfig) -> None:
    """Train to the end, or raise."""
    faulthandler.register(signal.SIGUSR1, file=open(config.stacks, "wb"), all_threads=True)  # noqa: SIM115
    faulthandler.enable()
    # The parent may run in the background, where shells ignore Ctrl-C for it and its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As many programs do, so that they are taken down in order.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    episode, rank = config.episode, config.rank
    os.environ.update(
        GLOO_SOCKET_IFNAME=config.interface,
        LOCAL_WORLD_SIZE=str(episode.ranks_a_node),
        LOCAL_RANK=str(rank % episode.ranks_a_node),
    )
    torch.set_num_threads(1)
    stage = "starting"
    run = None
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(config.folder, "rendezvous"), episode.ranks),
            rank=rank,
            world_size=episode.ranks,
            timeout=timedelta(seconds=config.timeout),
        )
        report(channel, "joined")
        run = _Run(config, channel)
        stage = "training"
        run.train()
        # No rank leaves before all have their result.
        with suppress(EOFError):
            channel.recv()
    except BaseException as error:
        report(
            channel,
            "raised",
            stage=stage,
            types=[kind.__name__ for kind in type(error).__mro__],
            message=str(error)[:_LONGEST_MESSAGE],
            digest="" if run is None else run.digest_if_untouched(),
        )
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Run:
    """A model and what trains it, from the last checkpoint to the last step."""

    def __init__(self, config: RankConfig, channel: Connection) -> None:
        self._config, self._episode, self._channel = config, config.episode, channel
        self._net = self._episode.model()
        self._trained = trained = self._episode.subject.prepare(self._net, self._episode.bucket_mb)
        self._poison: tuple[str, float] | None = None
        self._digest = ""
        self._agreed: str | None = None
        """The digest of what all ranks agree on; None while it may change in parts."""
        for name, parameter in self._net.named_parameters():
            parameter.register_hook(self._poisoner(name))
        restored = checkpoint.load(
            config.checkpoints, trained.model, trained.optimizer, compression=trained.compression
        )
        self._step = 0 if restored is None else restored.step
        self._skipped = 0 if restored is None else restored.extra["skipped"]
        self._take_down()
        report(channel, "ready", step=self._step, digest=self._digest)

    def _take_down(self) -> None:
        """What the parameters are after a step."""
        self._digest, self._agreed = self._now(), self._agreed_now()

    def digest_if_untouched(self) -> str:
        """Of all parameters after the last step, if what only exchanges change is as it was then; otherwise of all
        parameters now. In local steps a rank has moved its own parameters when the exchange of the step fails."""
        return self._digest if self._agreed in (None, self._agreed_now()) else self._now()

    def _now(self) -> str:
        return digest(self._net.parameters())

    def _agreed_now(self) -> str:
        with self._trained.agreed():
            return self._now()

    def train(self) -> None:
        """Take all steps that are left."""
        episode, rank, trained = self._episode, self._config.rank, self._trained
        while self._step < episode.steps:
            step = self._step + 1
            if self._channel.poll():
                _corrupt_a_packet(random.Random(self._channel.recv()), self._channel)
            self._poison = episode.poison(rank, step)
            if trained.exchanges_twice(step):
                self._agreed = None
            trained.model(episode.batch(rank, step)).backward()
            self._skipped += trained.step()
            trained.optimizer.zero_grad()
            self._step = step
            self._take_down()
            report(self._channel, "step", step=step, digest=self._digest)
            if step % episode.save_every == 0:
                extra = {"skipped": self._skipped}
                checkpoint.save(
                    self._config.checkpoints,
                    trained.model,
                    trained.optimizer,
                    step,
                    extra=extra,
                    compression=trained.compression,
                )
                report(self._channel, "saved", step=step, digest=self._now())
        self._agreed = None  # the last exchange may be of several parts, of which some succeed
        trained.finish()
        report(self._channel, "done", digest=self._now(), skipped=self._skipped)

    def _poisoner(self, name: str) -> Callable[[Tensor], Tensor]:
        def poison(gradient: Tensor) -> Tensor:
            if self._poison is None or self._poison[0] != name:
                return gradient
            poisoned = gradient.clone()
            poisoned.view(-1)[-1] = self._poison[1]
            return poisoned

        return poison


def _corrupt_a_packet(draw: random.Random, channel: Connection) -> None:
    """Let one of the next packets go out with one bit flipped, after its checksum was made, and report it."""
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
        # Of the commit round: one copy is enough. Two packets without values in one message may be equal, too.
        commits = octets.numel() == 2 * HEADER_BYTES and octets[:HEADER_BYTES].equal(octets[HEADER_BYTES:])
        report(channel, "corrupted", twice=commits)
        octets[draw.randrange(octets.numel())] ^= 1 << draw.randrange(8)
        return send(group, [packet], *where)

    dist.ProcessGroup.send = spoiling_send  # type: ignore[method-assign]
