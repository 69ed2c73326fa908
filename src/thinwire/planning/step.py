"""One training step, simulated: what each rank's threads and links do, from the first layer to the last update.

    forward → backward, and for each bucket when its gradients are complete:
        all-reduce      copy → wait for all ranks → around the ring → when all buckets are done: copy → update
        owners          encode → [mean over the node →] send → merge → answer → check → when all are: commit → apply

An exchange through owners is that of `thinwire.transport.lane_transport`: three lanes, so that one bucket is sent while
another is merged and a third is checked; a window of buckets that an owner can receive; a commit round in which every
worker writes to every other. A packet beyond the window leaves when the owner has asked for it, and on a busy link that
notice waits behind packets. On GPUs one stream does all of it, bucket after bucket.

If all hosts are alike, one of them stands for all: what it sends is what it receives. Then the number of hosts costs no
time. Otherwise all hosts and messages are simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

from thinwire.planning.cluster import Cluster
from thinwire.planning.costs import Costs
from thinwire.planning.engine import Arrivals, Process, Processor, Signal, Simulation
from thinwire.planning.methods import Method
from thinwire.planning.network import Network, Target
from thinwire.planning.workload import Bucket, Workload
from thinwire.transport.packet import HEADER_BYTES

_COMMIT_BYTES = 2 * HEADER_BYTES
_NOTICE_BYTES = 64
"""With which a gloo receiver asks for a message, about."""
_SEGMENT_BYTES = 2**20
"""gloo cuts what a rank sends at once into segments of at most this size, at least two of them."""
_DRAWS = 256
"""Of the delays of ranks, in all simulated steps together: more ranks, fewer steps."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds, as a mean over ranks."""

    total: float
    compute: float
    """Forward and backward while nobody exchanges anything."""
    exposed_wait: float
    """What ranks wait for the exchange when backward is over."""

    @property
    def rest(self) -> float:
        """Encoding and applying, and what the exchange takes from the cores of the computation."""
        return max(0.0, self.total - self.compute - self.exposed_wait)


def simulate_step(
    workload: Workload,
    cluster: Cluster,
    method: Method,
    costs: Costs,
    *,
    flat: bool = False,
    seed: int = 0,
    commits: bool = True,
    shares: Sequence[float] | None = None,
) -> StepTime:
    """Simulate a step in which a method exchanges.

    Args:
        workload: the computation of a rank.
        cluster: the hosts.
        method: what is exchanged, and how.
        costs: what the work around it costs.
        flat: whether every rank is a worker. Otherwise every host is one, as thinwire does by default.
        seed: of the ranks' delays, if `cluster.spread` is above zero.
        commits: whether the exchange ends with a commit round, as it does; False to see what that costs.
        shares: the share of each bucket, in the order of backward; None for the buckets that thinwire makes.
    """
    generator = random.Random(seed)
    draws = max(1, min(16, _DRAWS // cluster.world)) if cluster.spread else 1
    buckets = None if shares is None else workload.buckets_of(shares)
    steps = [
        _Step(workload, cluster, method, costs, flat, commits, _factors(cluster, generator), buckets).run()
        for _ in range(draws)
    ]
    return StepTime(*(fmean(getattr(step, part) for step in steps) for part in ("total", "compute", "exposed_wait")))


def all_reduce_seconds(nbytes: float, cluster: Cluster) -> float:
    """What the links need for an all-reduce.

    `cluster.all_reduce` names the algorithm. "gloo" is a ring in which each rank has two segments on their way, and
    sends the next one when its neighbour has asked for it. "ring" and "tree" are those of NCCL, which are pipelined,
    and "nccl" is the faster one.
    """
    ranks = cluster.world
    if ranks == 1:
        return 0.0
    links = [cluster.link_of(host) for host in range(cluster.hosts)] if cluster.other_links else [cluster.link]
    slowest = min(links, key=lambda link: link.bits_per_second) if cluster.hosts > 1 else cluster.node_link
    latency = max(link.latency for link in links) if cluster.hosts > 1 else cluster.node_link.latency
    shared = 2.0 if slowest.duplex == "half" else 1.0
    rounds = 2 * (ranks - 1)
    if cluster.all_reduce == "gloo":
        segments = max(2, math.ceil(nbytes / ranks / _SEGMENT_BYTES))
        segment = shared * slowest.seconds(nbytes / ranks / segments)
        return rounds * segments * max(segment, (segment + 2 * latency) / 2)
    stream = rounds * shared * slowest.seconds(nbytes / ranks)
    tree = 2 * math.ceil(math.log2(cluster.hosts)) * latency + 2 * cluster.node_link.latency
    between_hosts = cluster.hosts / ranks if cluster.hosts > 1 else 0.0
    ring = rounds * (between_hosts * latency + (1 - between_hosts) * cluster.node_link.latency)
    return stream + {"tree": tree, "ring": ring, "nccl": min(tree, ring)}[cluster.all_reduce]


def _factors(cluster: Cluster, generator: random.Random) -> list[float]:
    """How much longer each rank computes in this step: log-normal with mean 1."""
    if not cluster.spread:
        return [1.0] * cluster.world
    variance = math.log1p(cluster.spread**2)
    return [generator.lognormvariate(-variance / 2, math.sqrt(variance)) for _ in range(cluster.world)]


class _Peer(NamedTuple):
    """A rank that another one sends to."""

    rank: int
    place: int
    """Its host, or inside a host the rank."""
    messages: int = 1
    """How many ranks it stands for."""


class _Step:
    """The state of one simulated step."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        method: Method,
        costs: Costs,
        flat: bool,
        commits: bool,
        factors: list[float],
        buckets: list[Bucket] | None,
    ) -> None:
        self._workload, self._cluster, self._method, self._costs = workload, cluster, method, costs
        self._factors, self._commits_at_end = factors, commits
        self._simulation = Simulation()
        hosts, per_host = cluster.hosts, cluster.ranks_per_host
        self._hosts = range(1 if cluster.symmetric else hosts)
        self._ranks = range(len(self._hosts) * per_host)
        self._network = Network(self._simulation, cluster, len(self._hosts))
        self._processors = self._make_processors()
        # Workers, and the ranks that this one exchanges packets with.
        flat = flat or per_host == 1 or hosts == 1
        self._slices = 1 if flat else per_host
        self._workers = cluster.world if flat else hosts
        self._remote = (hosts - 1) * (per_host if flat else 1)
        self._near = per_host - 1 if flat else 0
        self._buckets = self._make_buckets() if buckets is None else buckets
        count = range(len(self._buckets))
        # On GPUs a bucket is complete before the next one is sent.
        self._window = len(self._buckets) if costs.serial else method.window(len(self._buckets))
        peers = self._remote + self._near

        def signals() -> list[list[Signal]]:
            return [[Signal() for _ in count] for _ in self._ranks]

        def arrivals(messages: int) -> list[list[Arrivals]]:
            return [[Arrivals(messages) for _ in count] for _ in self._ranks]

        self._ready, self._collected = signals(), signals()
        self._notices: dict[tuple[int, int, int], Arrivals] = {}
        """By sender, owner and bucket: when the sender knows that the owner can receive a bucket beyond the window."""
        self._packets, self._answers = arrivals(peers), arrivals(peers)
        self._scattered, self._shared = arrivals(self._slices - 1), arrivals(self._slices - 1)
        self._joined = [Signal(len(self._ranks)) for _ in count]
        self._reduced = [Signal() for _ in count]
        self._commits = [[Arrivals(peers)] for _ in self._ranks]
        self._node_commits = [Arrivals(self._slices - 1) for _ in self._ranks]
        self._ends = [0.0 for _ in self._ranks]
        self._waits = [0.0 for _ in self._ranks]

    def run(self) -> StepTime:
        """Simulate."""
        for rank in self._ranks:
            if self._method.exchange == "owners":
                lanes = [self._stream] if self._costs.serial else [self._sending, self._answering, self._collecting]
                for lane in lanes:
                    self._simulation.start(lane(rank))
            self._simulation.start(self._train(rank))
        if self._method.exchange == "all-reduce":
            self._simulation.start(self._all_reduces())
        self._simulation.run()
        compute = self._workload.compute * fmean(self._factors) * self._crowding
        return StepTime(fmean(self._ends), compute, fmean(self._waits))

    # The machine -----------------------------------------------------------------------------------------------------

    def _make_processors(self) -> list[Processor]:
        cluster = self._cluster
        cores = math.inf if cluster.cores is None else cluster.cores
        if cluster.one_machine and not cluster.symmetric:
            shared = Processor(self._simulation, cores)
            return [shared for _ in self._hosts]
        if cluster.one_machine:
            cores /= cluster.hosts  # all hosts have the same to do at the same time
        return [Processor(self._simulation, cores) for _ in self._hosts]

    @property
    def _crowding(self) -> float:
        """How much longer a rank computes because it shares cores."""
        cluster = self._cluster
        ranks = cluster.world if cluster.one_machine else cluster.ranks_per_host
        return 1.0 if cluster.cores is None else max(1.0, ranks / cluster.cores)

    def _make_buckets(self) -> list[Bucket]:
        if self._method.exchange == "owners":
            method = self._method
            return self._workload.thinwire_buckets(self._workers, self._slices, method.buckets, method.bucket_mb)
        return self._workload.ddp_buckets()

    def _work(self, rank: int, seconds: float) -> Signal:
        return self._processors[rank // self._cluster.ranks_per_host].work(seconds)

    def _kernels(self, names: tuple[str, ...], elements: float) -> float:
        return sum(self._costs.kernels[name] for name in names) * elements

    # The training thread ---------------------------------------------------------------------------------------------

    def _train(self, rank: int) -> Process:
        workload, method, costs, factor = self._workload, self._method, self._costs, self._factors[rank]
        yield self._work(rank, factor * workload.forward)
        done = 0.0
        for index, bucket in enumerate(self._buckets):
            computing = factor * (bucket.ready - done) if method.overlaps else 0.0
            done = bucket.ready if method.overlaps else done
            if not method.overlaps and index == 0:
                computing = factor * workload.backward
            # In a hierarchical topology a rank encodes its slice of the mean, on a lane. Here it copies the gradient.
            names = ("copy",) if self._slices > 1 else method.encode
            calls = costs.part * bucket.parts if method.exchange == "owners" else 0.0
            yield self._work(rank, computing + self._kernels(names, bucket.elements) + calls)
            self._ready[rank][index].report()
            self._joined[index].report()
        if method.overlaps:
            yield self._work(rank, factor * (workload.backward - done))
        waits = self._simulation.now
        if method.exchange == "all-reduce":
            yield from self._reduced
        if method.exchange == "owners":
            yield from self._collected[rank]
            if self._commits_at_end:
                yield from self._commit(rank)
        self._waits[rank] = self._simulation.now - waits
        parts = sum(bucket.parts for bucket in self._buckets) if method.exchange == "owners" else 0
        yield self._work(rank, self._kernels(method.apply, workload.elements) + costs.part * parts)
        self._ends[rank] = self._simulation.now

    # Dense gradients -------------------------------------------------------------------------------------------------

    def _all_reduces(self) -> Process:
        for index, bucket in enumerate(self._buckets):
            yield self._joined[index]
            self._simulation.start(self._reduce(bucket, self._reduced[index]))

    def _reduce(self, bucket: Bucket, reduced: Signal) -> Process:
        world, costs = self._cluster.world, self._costs
        size = bucket.elements * self._method.up_bits / 8
        sent = 2 * (world - 1) / world * size
        carried = self._network.all_reduce(all_reduce_seconds(size, self._cluster))
        # The cores work while the links carry, segment by segment.
        work = costs.all_reduce + costs.all_reduce_byte * sent if world > 1 else 0.0
        yield from [self._work(rank, work) for rank in self._ranks]
        yield carried
        reduced.report()

    # The exchange through owners -------------------------------------------------------------------------------------

    def _sending(self, rank: int) -> Process:
        for index in range(len(self._buckets)):
            yield from self._send(rank, index)

    def _answering(self, rank: int) -> Process:
        for index in range(len(self._buckets)):
            yield from self._answer(rank, index)

    def _collecting(self, rank: int) -> Process:
        for index in range(len(self._buckets)):
            yield from self._collect(rank, index)

    def _stream(self, rank: int) -> Process:
        for index in range(len(self._buckets)):
            yield from self._send(rank, index)
            yield from self._answer(rank, index)
            yield from self._collect(rank, index)

    def _send(self, rank: int, index: int) -> Process:
        yield self._ready[rank][index]
        if self._slices > 1:
            yield from self._average_in_node(rank, index)
        size = self._packet_bytes(index, self._method.up_bits)
        yield self._work(rank, self._costs.bucket + self._checksums(size, self._workers) + self._message_work(size))
        self._send_to_peers(rank, size, self._packets, index)

    def _answer(self, rank: int, index: int) -> Process:
        yield self._packets[rank][index]
        up, down = (self._packet_bytes(index, bits) for bits in (self._method.up_bits, self._method.down_bits))
        shard = self._buckets[index].elements / self._workers / self._slices
        merging = self._kernels((self._method.merge,), shard * self._workers) if self._method.merge else 0.0
        merging += self._kernels((self._method.update,), shard) if self._method.update else 0.0
        checks = self._checksums(up, self._workers) + self._checksums(down, 1)
        yield self._work(rank, self._message_work(up) + checks + merging + self._message_work(down))
        if index + self._window < len(self._buckets):
            self._ask_for(rank, index + self._window)
        self._send_to_peers(rank, down, self._answers, index)

    def _collect(self, rank: int, index: int) -> Process:
        yield self._answers[rank][index]
        down = self._packet_bytes(index, self._method.down_bits)
        yield self._work(rank, self._message_work(down))
        if self._slices > 1:
            yield from self._share_in_node(rank, index, down)
        yield self._work(rank, self._checksums(down, self._workers * self._slices))
        self._collected[rank][index].report()

    def _commit(self, rank: int) -> Process:
        if self._remote + self._near:
            yield self._work(rank, self._costs.exchange + self._message_work(_COMMIT_BYTES))
            self._send_to_peers(rank, _COMMIT_BYTES, self._commits, 0)
            yield self._commits[rank][0]
            yield self._work(rank, self._message_work(_COMMIT_BYTES))
        if self._slices > 1:
            yield from self._in_node(rank, _COMMIT_BYTES, self._node_commits)

    def _packet_bytes(self, index: int, bits: float) -> float:
        bucket = self._buckets[index]
        return HEADER_BYTES + bits * bucket.elements / self._workers / self._slices / 8

    def _message_work(self, size: float) -> float:
        """Of either side, for a message to or from every peer."""
        return (self._remote + self._near) * (self._costs.message + self._costs.byte * size)

    def _checksums(self, size: float, packets: int) -> float:
        return self._costs.kernels["checksum"] * size * packets

    def _send_to_peers(self, rank: int, size: float, arrived: list[list[Arrivals]], index: int) -> None:
        beyond = index >= self._window and arrived is self._packets
        for send, peers in self._routes(rank):
            ready: list[Target] = []
            for peer, place, messages in peers:
                target = Target(place, arrived[peer][index], messages)
                if not beyond or (notice := self._notice(rank, peer, index, messages)).fired:
                    ready.append(target)
                else:
                    notice.then(partial(send, [target], size))
            if ready:
                send(ready, size)

    def _ask_for(self, rank: int, index: int) -> None:
        """Tell all others that this owner can receive a bucket beyond the window."""
        for send, peers in self._routes(rank):
            targets = [Target(place, self._notice(peer, rank, index, count), count) for peer, place, count in peers]
            if targets:
                send(targets, _NOTICE_BYTES)

    def _notice(self, sender: int, owner: int, index: int, messages: int) -> Arrivals:
        return self._notices.setdefault((sender, owner, index), Arrivals(messages))

    def _routes(self, rank: int) -> Iterator[tuple[Callable[[Sequence[Target], float], None], list[_Peer]]]:
        """How a rank sends to others inside its host and to other hosts, and to whom."""
        cluster = self._cluster
        host, own = divmod(rank, cluster.ranks_per_host)
        first = host * cluster.ranks_per_host
        near = [first + (own + distance) % cluster.ranks_per_host for distance in range(1, self._near + 1)]
        yield partial(self._network.send_inside, rank), [_Peer(peer, peer) for peer in near]
        if cluster.symmetric:
            remote = [_Peer(rank, 0, self._remote)] if self._remote else []
        else:
            remote = [_Peer(peer, to_host) for to_host, peer in self._remote_peers(host, own)]
        yield partial(self._network.send, host), remote

    def _remote_peers(self, host: int, own: int) -> Iterator[tuple[int, int]]:
        """The ranks on other hosts that a rank exchanges packets with, each with its host."""
        per_host = self._cluster.ranks_per_host
        for distance in range(1, self._cluster.hosts):
            to_host = (host + distance) % self._cluster.hosts
            for position in range(per_host) if self._slices == 1 else (own,):
                yield to_host, to_host * per_host + position

    # Inside a node ---------------------------------------------------------------------------------------------------

    def _average_in_node(self, rank: int, index: int) -> Process:
        bucket, ranks = self._buckets[index], self._slices
        scattered = [signals[index] for signals in self._scattered]
        yield from self._in_node(rank, 4 * bucket.elements / ranks, scattered)
        # The mean reads a slice of every rank and writes one.
        mean = self._costs.kernels["copy"] / 2 * bucket.elements * (ranks + 1) / ranks
        calls = self._costs.part * bucket.parts
        yield self._work(rank, mean + self._kernels(self._method.encode, bucket.elements / ranks) + calls)

    def _share_in_node(self, rank: int, index: int, size: float) -> Process:
        yield from self._in_node(rank, size * self._workers, [signals[index] for signals in self._shared])

    def _in_node(self, rank: int, size: float, arrived: list[Arrivals]) -> Process:
        """Send to every other rank of the host, and wait for theirs."""
        cluster, others = self._cluster, self._slices - 1
        host, own = divmod(rank, cluster.ranks_per_host)
        work = others * (self._costs.message + self._costs.byte * size)
        yield self._work(rank, work)
        peers = [host * cluster.ranks_per_host + (own + step) % cluster.ranks_per_host for step in range(1, others + 1)]
        self._network.send_inside(rank, [Target(peer, arrived[peer]) for peer in peers], size)
        yield arrived[rank]
        yield self._work(rank, work)
