"""Messages between hosts: each host has a way out and a way in, which serve messages one after another.

A message leaves at the rate of its sender's link and arrives at the rate of its receiver's. Both happen at the same
time, a latency apart, if nothing is in the way. Messages that a host sends at the same time share its link, as TCP's
connections do, and arrive together. The switch between the hosts has room for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.planning.cluster import Cluster, Link
from thinwire.planning.engine import Arrivals, Signal, Simulation


@dataclass
class Port:
    """One direction of a link, or both if it is half duplex."""

    link: Link
    free_at: float = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Take the next free time. Returns when it begins."""
        begin = max(now, self.free_at)
        self.free_at = begin + seconds
        return begin


class Target(NamedTuple):
    """Who receives messages."""

    place: int
    """The host, or inside a host the rank."""
    arrived: Arrivals
    """Learns when they arrive."""
    messages: int = 1
    """How many, where one host stands for all."""


class Network:
    """The ports of all hosts, and of all ranks to the others of their host.

    Args:
        simulation: the clock.
        cluster: the hosts.
        simulated_hosts: how many of them have ports here.
    """

    def __init__(self, simulation: Simulation, cluster: Cluster, simulated_hosts: int) -> None:
        self._simulation = simulation
        self._out = [Port(cluster.link_of(host)) for host in range(simulated_hosts)]
        self._in = [port if port.link.duplex == "half" else Port(port.link) for port in self._out]
        local = range(simulated_hosts * cluster.ranks_per_host)
        self._local_out = [Port(cluster.node_link) for _ in local]
        self._local_in = [port if port.link.duplex == "half" else Port(port.link) for port in self._local_out]

    def send(self, sender: int, targets: Sequence[Target], nbytes: float) -> None:
        """Send messages from one host to others, all of them side by side.

        Args:
            sender: the host that sends.
            targets: who receives them.
            nbytes: of each message.
        """
        self._send(self._out[sender], self._in, targets, nbytes)

    def send_inside(self, sender: int, targets: Sequence[Target], nbytes: float) -> None:
        """Send messages from one rank to others of its host. Here a target's place is a rank."""
        self._send(self._local_out[sender], self._local_in, targets, nbytes)

    def _send(self, out: Port, ways_in: Sequence[Port], targets: Sequence[Target], nbytes: float) -> None:
        simulation = self._simulation
        taken = out.link.seconds(nbytes * sum(target.messages for target in targets))
        begin = out.take(simulation.now, taken)

        def arrive() -> None:
            for target in targets:
                port = ways_in[target.place]
                port.take(simulation.now, port.link.seconds(nbytes * target.messages))
                end = begin + taken + max(out.link.latency, port.link.latency)
                target.arrived.expect(simulation, max(port.free_at, end), target.messages)

        simulation.at(begin + out.link.latency, arrive)

    def all_reduce(self, seconds: float) -> Signal:
        """Take both directions of all hosts for so long, as a collective of all ranks does.

        Returns:
            The signal of its end.
        """
        begin = max(self._simulation.now, *(port.free_at for port in (*self._out, *self._in)))
        for port in (*self._out, *self._in):
            port.free_at = begin + seconds
        done = Signal()
        self._simulation.at(begin + seconds, done.report)
        return done
