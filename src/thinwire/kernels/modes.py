"""What some kernels are told to do, as csrc/thinwire.h counts it."""

from __future__ import annotations

import enum


class Say(enum.IntEnum):
    """What `markov_encode` says."""

    ORDINARY = 0
    """The difference between a gradient, or a momentum, and what is known of it."""
    GREETING = 1
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
