"""The two collectives of an exchange, and the quirks of torch versions and backends, which live here only."""

from __future__ import annotations

import collections
import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.metrics import Meter
from thinwire.wire import packet
from thinwire.wire.mail import Frame, Mail


@dataclass(frozen=True)
class Peers:
    """The workers that exchange with each other: their group, how many, and which of them this one is."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> Peers:
        """The members of `process_group`, of the default group, or this process alone.

        Raises:
            RuntimeError: when a launcher says there are several processes, but nobody made a process group.
        """
        if not dist.is_available() or not dist.is_initialized():
            if process_group is not None:
                raise RuntimeError(f"process_group={process_group!r}, but torch.distributed is not initialised")
            _refuse_forgotten_group()
            return cls(None, 0, 1)
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None, "torch.distributed is initialised, so there is a default group"
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} is not a member of it; make the optimizer on its members only"
            )
        return cls(group, rank, dist.get_world_size(group))

    def ranks(self) -> list[int]:
        """Their ranks in the default group, in order."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    def refuse_late_group(self) -> None:
        """Refuse a worker that took itself to be alone, because the process group was made after the optimizer."""
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"torch.distributed has {dist.get_world_size()} ranks, but was initialised after the optimizer was "
                "made, which would train alone: call init_process_group() first"
            )

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks (a slow path, for checks before the first step)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def private_group(self) -> dist.ProcessGroup | None:
        """A group of the same ranks that nobody else uses, so that a thread's collectives cannot mix with others."""
        if self.group is None or self.size == 1:
            return None
        group = dist.new_group(
            dist.get_process_group_ranks(self.group),
            timeout=_timeout_of(self.group),
            backend=dist.get_backend_config(self.group),
            use_local_synchronization=True,
            group_desc="thinwire",
        )
        assert isinstance(group, dist.ProcessGroup), "this rank is a member of it"
        return group


def _refuse_forgotten_group() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"WORLD_SIZE={world_size}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before making the optimizer, or unset WORLD_SIZE to train alone"
        )


def _cpu_backend(group: dist.ProcessGroup) -> str:
    # dist.get_backend() answers "cpu:gloo,cuda:gloo" for one group and "gloo" for another.
    return group._get_backend(torch.device("cpu")).name()


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    # new_group() forgets the timeout that the user gave to init_process_group(); only the backend remembers it.
    try:
        options = group._get_backend(torch.device("cpu")).options
    except (RuntimeError, AttributeError):
        return None
    return options._timeout


# torch 2.13 renamed all_gather_into_tensor and deprecated the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """The two rounds for one bucket at a time. Everything here runs on the lane.

    Args:
        mail: the packets.
        peers: who takes part.
        group: a process group of the same ranks that nothing else uses; None for a worker without peers.
        meter: where bytes and seconds are counted.
    """

    def __init__(self, mail: Mail, peers: Peers, group: dist.ProcessGroup | None, meter: Meter) -> None:
        self._mail = mail
        self._peers = peers
        self._group = group
        self._meter = meter
        # gloo's thread lets go of a collective some time after it is complete. Whoever does so last gives its tensors
        # back to Python, which on that thread, while the interpreter exits, ends in std::terminate. So we are last.
        self._recent: collections.deque[dist.Work] = collections.deque(maxlen=16)
        # gloo gathers around a ring, step by step, and takes more than twice the time of an all-to-all of the same
        # bytes (measured with 4 ranks on loopback, 32 kB to 1 MB a packet).
        self._copies_are_faster = group is not None and _cpu_backend(group) == "gloo"

    def run(self, frame: Frame, step: int, flags: int, merge: Callable[[Frame, int], None]) -> int:
        """Send a bucket's packets to the owners, answer for the own shard with `merge`, and gather all answers.

        Returns:
            The flags that any rank raised.

        Raises:
            RuntimeError: on all ranks, when any owner got a packet that it cannot accept.
        """
        self._write_headers(frame, step, flags)
        if self._group is not None:
            with self._meter.wire:
                self._complete(dist.all_to_all_single(frame.received, frame.sent, group=self._group, async_op=True))
        refusal: RuntimeError | None = None
        try:
            flags |= self._check_received(frame, step, flags)
        except RuntimeError as error:
            # The others wait for an answer: they get one, and stop like this rank.
            refusal = error
            flags |= packet.REFUSED
        with self._meter.vote:
            merge(frame, self._peers.rank)
        self._header(frame.answers, frame, step, self._peers.rank, flags).write(
            self._mail.answers_memory, frame.answers_at + self._peers.rank * frame.answers.shape[1]
        )
        if self._group is not None:
            with self._meter.wire:
                self._gather(frame)
            self._count(frame)
        if refusal is not None:
            raise refusal
        return self._check_answers(frame, step, flags)

    def _gather(self, frame: Frame) -> None:
        answer = frame.answers[self._peers.rank]
        if self._copies_are_faster:
            frame.copies.copy_(answer)
            work = dist.all_to_all_single(frame.answers, frame.copies, group=self._group, async_op=True)
        else:
            work = _all_gather(frame.answers.view(-1), answer, group=self._group, async_op=True)
        self._complete(work)

    def _complete(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is a member of the group"
        work.wait()
        self._recent.append(work)

    def _header(self, packets: Tensor, frame: Frame, step: int, sender: int, flags: int) -> packet.Header:
        length = packets.shape[1] - packet.HEADER_BYTES
        return packet.Header(step, frame.bucket.index, sender, length, self._mail.layout.fingerprint, flags)

    def _write_headers(self, frame: Frame, step: int, flags: int) -> None:
        header = self._header(frame.sent, frame, step, self._peers.rank, flags)
        for row in range(self._peers.size):
            header.write(self._mail.sent_memory, frame.sent_at + row * frame.sent.shape[1])

    def _check_received(self, frame: Frame, step: int, flags: int) -> int:
        seen = 0
        size = frame.received.shape[1]
        base = frame.sent_at if self._group is None else 0
        for sender in range(self._peers.size):
            expected = self._header(frame.received, frame, step, sender, flags)
            seen |= expected.check(self._mail.received_memory, base + sender * size)
        return seen

    def _check_answers(self, frame: Frame, step: int, flags: int) -> int:
        seen = 0
        for owner in range(self._peers.size):
            at = frame.answers_at + owner * frame.answers.shape[1]
            answered = self._header(frame.answers, frame, step, owner, flags).check(self._mail.answers_memory, at)
            if answered & packet.REFUSED:
                raise RuntimeError(
                    f"rank {owner} refused a packet of step {step}, bucket {frame.bucket.index}: its own error says why"
                )
            seen |= answered
        return seen

    def _count(self, frame: Frame) -> None:
        size = (self._peers.size - 1) * (frame.sent.shape[1] + frame.answers.shape[1])
        self._meter.rounds += 2
        self._meter.bytes_sent += size
        self._meter.bytes_received += size
