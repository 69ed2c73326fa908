"""Modes of some kernels; the numbers are those of csrc/kernels.def."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

Scale = float | Tensor
"""What gradients are multiplied by: a number or, where only the device knows it, a tensor of one."""


LARGEST = torch.finfo(torch.float32).max
"""The limit of a gradient that is not squared."""


@dataclass
class Gate:
    """Which parameters take a step, where only the device knows. A kernel whose gate is closed writes nothing."""

    open: Tensor
    """int32, one per parameter."""
    parameter: int = 0
    """Index of the parameter that the next kernel moves; the host changes it between launches."""


class MarkovMode(enum.IntEnum):
    """What `markov_encode` sends."""

    ORDINARY = 0
    """The difference between a gradient, or a momentum, and what the other ranks know of it."""
    ACTIVATION = 1
    """Activation bits only; the gradient is kept for a REPLAY."""
    REPLAY = 2
    """The gradient that an ACTIVATION kept."""


class Source(enum.IntEnum):
    """Where `amsgrad_apply` takes its gradient from."""

    STATE = 0
    """A state."""
    SIGNS = 1
    """A state, to which the signs of an answer are added first."""
    FLOATS = 2
    """The floats of an answer."""


class Output(enum.IntEnum):
    """What `momentum_encode` writes into packets."""

    NOTHING = 0
    SIGNS = 1
    MOMENTUM = 2
