"""Averages the buffers of a model, such as the statistics of BatchNorm, which local steps leave to each rank."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.optimizers.agreement import require_same
from thinwire.transport.peers import Peers


def average_buffers(model: nn.Module, peers: Peers) -> None:
    """Make the buffers of a model equal on all ranks. All ranks call it. For small buffers: they are pickled.

    Args:
        model: the model. Buffers of floating-point numbers get the mean of all ranks, computed in float64 in the order
            of ranks; others get the values of rank 0.
        peers: all ranks.

    Raises:
        RuntimeError: on every rank, if they have other buffers.
    """
    own = {name: buffer.detach().cpu() for name, buffer in model.named_buffers()}
    of_ranks = peers.gather(own, "the buffers of the model")
    forms = [
        repr([(name, tuple(each.shape), str(each.dtype)) for name, each in buffers.items()]) for buffers in of_ranks
    ]
    require_same("the buffers of the model", forms)
    for name, buffer in model.named_buffers():
        values = [buffers[name] for buffers in of_ranks]
        if buffer.is_floating_point():
            mean = torch.stack([value.double() for value in values]).sum(dim=0) / len(values)
            buffer.copy_(mean)
        else:
            buffer.copy_(values[0])
