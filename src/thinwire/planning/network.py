"""Messages between hosts: each host has a way out and a way in, which serve messages one after another.

A message leaves at the rate of its sender's link and arrives at the rate of its receiver's. Both happen at the same
time, a latency apart, if nothing is in the way. The switch between the hosts has room for everything. Messages that TCP
would carry side by side are served one after another here; the last one of them arrives at the same time in both.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def send(self, sender: int, receiver: int, nbytes: float, arrived: Arrivals, count: int = 1) -> None:
        """Send messages from one host to another.

        Args:
            sender: the host that sends.
            receiver: the host that receives. The same, where one host stands for all.
            nbytes: of all messages together.
            arrived: learns when each message arrives.
            count: the number of messages.
        """
        self._send(self._out[sender], self._in[receiver], nbytes, arrived, count)

    def send_inside(self, sender: int, receiver: int, nbytes: float, arrived: Arrivals, count: int = 1) -> None:
        """Send messages between two ranks of a host."""
        self._send(self._local_out[sender], self._local_in[receiver], nbytes, arrived, count)

    def _send(self, out: Port, into: Port, nbytes: float, arrived: Arrivals, count: int) -> None:
        simulation = self._simulation
        taken = out.link.seconds(nbytes)
        begin = out.take(simulation.now, taken)
        latency = max(out.link.latency, into.link.latency)

        def arrive() -> None:
            into.take(simulation.now, into.link.seconds(nbytes))
            end = max(into.free_at, begin + taken + latency)
            arrived.expect(simulation, end, count)

        simulation.at(begin + latency, arrive)

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
