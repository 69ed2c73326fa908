"""The machines of a plan: hosts, the ranks on them, the links between them, and the cores that ranks share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

FRAMING = 1.05
"""Bytes on the link for each byte of a message: Ethernet, IP and TCP headers and acknowledgements. Counted at the links
of the testbed: 45.2 MB for 43.0 MB of gradients, and 1.42 MB for 1.35 MB of packets (docs/benchmarks)."""


@dataclass(frozen=True)
class Link:
    """How a host is connected to all others, or a rank to the others of its host.

    Args:
        bits_per_second: of each direction; infinite for a link that never makes anyone wait.
        latency: seconds that a message takes in addition to its bytes, one way.
        duplex: "half" if both directions share the rate.
    """

    bits_per_second: float = math.inf
    latency: float = 0.0
    duplex: Literal["full", "half"] = "full"

    def __post_init__(self) -> None:
        if not self.bits_per_second > 0:
            raise ValueError(f"bits_per_second={self.bits_per_second}: a link needs a rate above zero")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}: expected seconds, zero or more")
        if self.duplex not in ("full", "half"):
            raise ValueError(f"duplex={self.duplex!r}: expected 'full' or 'half'")

    def seconds(self, nbytes: float) -> float:
        """What a message takes on the link, without the latency."""
        return 8 * FRAMING * nbytes / self.bits_per_second


NVLINK = Link(bits_per_second=8 * 130e9, latency=5e-6)
"""Between the GPUs of a host, per GPU and direction: about half of what NVIDIA states for an A100 (300 GB/s)."""
LOOPBACK = Link()
"""Between ranks on the CPUs of a host. What it costs is work of the cores, not waiting."""


@dataclass(frozen=True)
class Cluster:
    """So many equal hosts with so many ranks each.

    Args:
        hosts: the number of hosts.
        ranks_per_host: the number of ranks on each.
        link: that of each host, to a switch that is never the bottleneck.
        node_link: that of each rank to the others of its host.
        cores: cores of a host that its ranks share. None: each rank has as many as it wants, as on a GPU.
        one_machine: whether the hosts share the cores too, as on the testbed.
        other_links: links of single hosts, by the number of the host, where they differ.
        all_reduce: how dense gradients are averaged: "gloo" (a ring, as gloo does it), "ring" or "tree" (pipelined, as
            NCCL does them), or "nccl", the faster one of these two.
        spread: the standard deviation of the time that ranks take to compute a step, as a part of it. Each rank draws a
            log-normal factor of its own for each step.
    """

    hosts: int
    ranks_per_host: int = 1
    link: Link = field(default_factory=Link)
    node_link: Link = LOOPBACK
    cores: float | None = None
    one_machine: bool = False
    other_links: dict[int, Link] = field(default_factory=dict)
    all_reduce: Literal["gloo", "ring", "tree", "nccl"] = "gloo"
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hosts", "ranks_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of 1 or more")
        if self.cores is not None and not self.cores > 0:
            raise ValueError(f"cores={self.cores}: expected more than zero, or None")
        if self.all_reduce not in ("gloo", "ring", "tree", "nccl"):
            raise ValueError(f"all_reduce={self.all_reduce!r}: expected 'gloo', 'ring', 'tree' or 'nccl'")
        if not 0 <= self.spread < 10:
            raise ValueError(f"spread={self.spread}: expected a part of the time of a step, from 0 to 10")
        unknown = [host for host in self.other_links if not 0 <= host < self.hosts]
        if unknown:
            raise ValueError(f"other_links names host {unknown[0]}: there are hosts 0 to {self.hosts - 1}")

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host

    @property
    def symmetric(self) -> bool:
        """Whether every host sees the same, so that one of them stands for all."""
        return not self.other_links and not self.spread

    def link_of(self, host: int) -> Link:
        """The link of a host."""
        return self.other_links.get(host, self.link)
