"""The kernels in C++, called through ctypes, which lets go of the GIL while they run.

csrc/thinwire.h is the interface. The library picks AVX-512, AVX2, NEON or plain code when it is loaded.
"""

from __future__ import annotations

from thinwire.kernels.native.adam import adam_apply, precondition
from thinwire.kernels.native.birder import (
    adopt,
    birder_apply,
    birder_direction,
    birder_encode,
    roll_call,
    vote_bit,
    vote_count,
)
from thinwire.kernels.native.dense import dense_apply, dense_encode, mean, square_sum, step_apply
from thinwire.kernels.native.lamb import lamb_apply, lamb_measure, onebit_lamb_measure
from thinwire.kernels.native.library import PATH, available, isa, use_isa
from thinwire.kernels.native.sign import momentum_encode, sign_apply, sign_encode, sign_merge

__all__ = [
    "PATH",
    "adam_apply",
    "adopt",
    "available",
    "birder_apply",
    "birder_direction",
    "birder_encode",
    "dense_apply",
    "dense_encode",
    "isa",
    "lamb_apply",
    "lamb_measure",
    "mean",
    "momentum_encode",
    "onebit_lamb_measure",
    "precondition",
    "roll_call",
    "sign_apply",
    "sign_encode",
    "sign_merge",
    "square_sum",
    "step_apply",
    "use_isa",
    "vote_bit",
    "vote_count",
]
