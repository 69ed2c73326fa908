"""Open the transport of a rank."""

from __future__ import annotations

import torch

from thinwire.kernels.ops import Kernels
from thinwire.metrics import Meter
from thinwire.transport.connections import Connections
from thinwire.transport.lane_transport import LaneTransport
from thinwire.transport.peers import Peers
from thinwire.transport.stream_transport import SideStream, StreamTransport
from thinwire.transport.topology import Topology
from thinwire.transport.transport import Transport


def open_transport(
    peers: Peers,
    topology: Topology,
    name: str,
    device: torch.device,
    kernels: Kernels,
    meter: Meter,
    side: SideStream | None,
) -> Transport:
    """Connect this rank to the ranks that it exchanges with. All ranks call this at the same time.

    Args:
        peers: all ranks.
        topology: which of them form a worker.
        name: equal on all ranks, and never used before.
        device: the device of the packets.
        kernels: the backend; with a side stream, as `SideStream.bind` returns it.
        meter: counts bytes and seconds.
        side: the side stream of the device; None for a CPU.

    Raises:
        PeerLost: a rank cannot be connected.
    """
    of_slice = peers.connect(topology.slice_ranks(), f"{name}/slice {topology.own_slice}", device)
    of_node = peers.connect(topology.node_ranks(), f"{name}/node {topology.node}", device)
    connections = Connections(of_slice, of_node)
    if side is not None:
        return StreamTransport(connections, kernels, meter, side)
    return LaneTransport(connections, kernels, meter, threaded=peers.threaded)
