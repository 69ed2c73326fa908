"""Exchanges packets between ranks: layout, packet buffers, topology, and a transport for CPUs and one for GPUs.

`thinwire.transport.transport` has the interface and a sketch of its use. Nothing here depends on an optimizer.
"""
