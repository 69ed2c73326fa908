"""What some kernels are told to do; numbers are as csrc/thinwire.h counts them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

Scale = float | Tensor
"""What gradients are multiplied by: a number or, where only the device knows it, a tensor of one."""


LARGEST = torch.finfo(torch.float32).max
"""What a gradient may be at most where nobody squares it."""


@dataclass
class Gate:
    """Which parameters take a step, where only the device knows; kernels that find theirs closed write nothing."""

    open: Tensor
    """int32, one a parameter."""
    parameter: int = 0
    """Whose turn it is: changed between one kernel and the next, by the host that starts them."""


class Say(enum.IntEnum):
    """What `markov_encode` says."""

    ORDINARY = 0
    """The difference between a gradient, or a momentum, and what is known of it."""
    ACTIVATION = 1
    """Hellos only; a gradient is kept, to be said in a RECALL."""
    RECALL = 2


class Source(enum.IntEnum):
    """Where `amsgrad_apply` has its gradient from."""

    HELD = 0
    """A memory."""
    SIGNS = 1
    """A memory, to which an answer's signs are added first."""
    FLOATS = 2
    """An answer's floats."""


class Output(enum.IntEnum):
    """What `momentum_encode` writes into packets."""

    NOTHING = 0
    SIGNS = 1
    MOMENTUM = 2
