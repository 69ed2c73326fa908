"""A channel: the compressor, packet buffers and tags of one stage of a run.

A run may have several, such as dense packets for a warm-up and signs afterwards. An exchange uses one of them, the same
on all ranks.
"""

from __future__ import annotations

import torch

from thinwire.transport.buffers import PacketBuffers
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout
from thinwire.transport.topology import Topology


class Channel:
    """A compressor and the buffers of its packets.

    Args:
        compressor: fills and merges the packets.
        layout: the flat space.
        topology: the ranks that take part.
        number: the number of this channel among those that share connections.
        local: whether packets stay inside the node.
        node_dtype: the dtype in which gradients travel inside the node, float32 or bfloat16.
    """

    def __init__(
        self,
        compressor: Compressor,
        layout: Layout,
        topology: Topology,
        number: int,
        *,
        local: bool = False,
        node_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.compressor = compressor
        self.layout = layout
        self.topology = topology.within_node() if local else topology
        self.local = local
        self.node_dtype = node_dtype
        self._number = number
        self.allocate()

    def allocate(self) -> None:
        """Allocate the packet buffers."""
        alone = self.local or self.topology.workers == 1
        self.buffers = PacketBuffers(self.layout, self.compressor.payload, alone, self._number)
        self.compressor.bind(self.buffers)
        self.released = False

    def release(self) -> None:
        """Free the packet buffers until `allocate` is called. No exchange may be under way."""
        if self.released:
            return
        empty = Layout([], self.layout.workers, 1, slices=self.layout.slices)
        self.buffers = PacketBuffers(empty, self.compressor.payload, alone=True)
        self.compressor.bind(self.buffers)
        self.released = True
