"""Measure the links between hosts: latency, and bytes per second by the size of a message, for all pairs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from thinwire.planning.cluster import FRAMING, Cluster, Link

SIZES = (64 << 10, 1 << 20, 4 << 20)
"""Bytes of the messages that measure bandwidth."""
_PINGS = 20
_SAME = 0.8
"""A host whose link is slower than this part of the median is named in a plan."""
_TAG = 7_001


class LinkTimedOut(RuntimeError):
    """Two hosts could not exchange messages in time."""


@dataclass(frozen=True)
class Pair:
    """What one host sends to another."""

    sender: int
    receiver: int
    latency: float
    """Half of the median round trip of an empty message, in seconds."""
    jitter: float
    """Half of the difference between the second slowest round trip and the median, in seconds."""
    bits_per_second: dict[int, float]
    """By the size of a message in bytes."""

    @property
    def best(self) -> float:
        """The rate of the largest messages, headers on the link included."""
        return FRAMING * self.bits_per_second[max(self.bits_per_second)]


@dataclass(frozen=True)
class Links:
    """All pairs of hosts, by number, and how ranks are placed on them."""

    hosts: int
    ranks_per_host: int
    cores: int
    """Of the host with the fewest."""
    pairs: tuple[Pair, ...]

    def cluster(self) -> Cluster:
        """The cluster that these links form. Hosts that are much slower than the others keep their own rate."""
        rate_of = {
            host: max(
                min(
                    max(pair.best for pair in self.pairs if pair.sender == host),
                    max(pair.best for pair in self.pairs if pair.receiver == host),
                ),
                1.0,
            )
            for host in range(self.hosts)
        }
        usual = median(rate_of.values())
        latency = median(pair.latency for pair in self.pairs)
        slower = {host: Link(rate, latency) for host, rate in rate_of.items() if rate < _SAME * usual}
        return Cluster(self.hosts, self.ranks_per_host, Link(usual, latency), cores=self.cores, other_links=slower)


def measure_links() -> Links:
    """Measure all pairs of hosts, one after another. All ranks of the default process group call it.

    Returns:
        The same on every rank.

    Raises:
        ValueError: there is a single host, or hosts have different numbers of ranks.
        LinkTimedOut: two hosts did not answer each other within the timeout of the process group.
    """
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % per_host or world == per_host:
        raise ValueError(
            f"{world} ranks, {per_host} per host: expected two hosts or more with as many ranks each. Launch with "
            "torchrun on all hosts, or give --link and --hosts"
        )
    hosts = world // per_host
    own: list[Pair] = []
    for one in range(hosts):
        for other in range(one + 1, hosts):
            if rank in (one * per_host, other * per_host):
                own += _measure_pair(rank, one * per_host, other * per_host, per_host)
    found: list[tuple[list[Pair], int]] = [([], 0)] * world
    dist.all_gather_object(found, (own, os.cpu_count() or 1))
    pairs = sorted((pair for each, _ in found for pair in each), key=lambda pair: (pair.sender, pair.receiver))
    return Links(hosts, per_host, min(cores for _, cores in found), tuple(pairs))


def _measure_pair(rank: int, one: int, other: int, per_host: int) -> list[Pair]:
    """Both ranks call it. The first one returns both directions: a sender does not know when its message arrives."""
    peer = other if rank == one else one
    try:
        trips = [_round_trip(rank == one, peer, 1, 1) for _ in range(_PINGS)]
        rates = {size: _rate(rank == one, peer, size, trips) for size in SIZES}
    except RuntimeError as error:
        raise LinkTimedOut(
            f"hosts {one // per_host} and {other // per_host} did not answer each other: {error}"
        ) from error
    usual = median(trips)
    jitter = max(0.0, sorted(trips)[-2] - usual) / 2
    forth, back = ({size: both[way] for size, both in rates.items()} for way in (0, 1))
    near, far = one // per_host, other // per_host
    if rank != one:
        return []
    return [Pair(near, far, usual / 2, jitter, forth), Pair(far, near, usual / 2, jitter, back)]


def _round_trip(first: bool, peer: int, there: int, back: int) -> float:
    """Seconds that a message of `there` bytes and its answer of `back` bytes take."""
    forth, answer = torch.zeros(there, dtype=torch.uint8), torch.zeros(back, dtype=torch.uint8)
    began = time.perf_counter()
    if first:
        dist.send(forth, peer, tag=_TAG)
        dist.recv(answer, peer, tag=_TAG)
    else:
        dist.recv(forth, peer, tag=_TAG)
        dist.send(answer, peer, tag=_TAG)
    return time.perf_counter() - began


def _rate(first: bool, peer: int, size: int, trips: Sequence[float]) -> tuple[float, float]:
    """Bits per second of messages from the first rank, and of those from the other."""
    empty = median(trips)
    taken = [median(_round_trip(first, peer, *sizes) for _ in range(3)) for sizes in ((size, 1), (1, size))]
    forth, back = (8 * size / max(seconds - empty / 2, 1e-9) for seconds in taken)
    return forth, back
