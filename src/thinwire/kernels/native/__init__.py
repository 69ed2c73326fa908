"""The kernels in C++, called through ctypes, which lets go of the GIL while they run.

csrc/thinwire.h is the interface. The library picks AVX-512, AVX2, NEON or plain code when it is loaded.
"""

from __future__ import annotations

from thinwire.kernels.native.adam import adam_apply, precondition
from thinwire.kernels.native.amsgrad import amsgrad_apply, momentum_sum, sparse_amsgrad
from thinwire.kernels.native.birder import (
    activity_refresh,
    adopt,
    birder_apply,
    birder_direction,
    birder_encode,
    vote_bit,
    vote_count,
    vote_majority,
)
from thinwire.kernels.native.crc import crc32c
from thinwire.kernels.native.dense import dense_apply, dense_encode, mean, square_sum, step_apply
from thinwire.kernels.native.lamb import lamb_apply, lamb_measure, onebit_lamb_measure
from thinwire.kernels.native.library import PATH, available, isa, use_isa
from thinwire.kernels.native.markov import markov_difference, markov_encode, markov_merge
from thinwire.kernels.native.packets import packet_check, packet_seal
from thinwire.kernels.native.sign import momentum_encode, sign_apply, sign_encode, sign_merge
from thinwire.kernels.native.sketch import sketch_add, sketch_estimate, sketch_top_k
from thinwire.kernels.native.top_k import sparse_add, top_k
from thinwire.kernels.reference.shards import forget, shard_scale  # no more to them than a few numbers a shard

__all__ = [
    "PATH",
    "activity_refresh",
    "adam_apply",
    "adopt",
    "amsgrad_apply",
    "available",
    "birder_apply",
    "birder_direction",
    "birder_encode",
    "crc32c",
    "dense_apply",
    "dense_encode",
    "forget",
    "isa",
    "lamb_apply",
    "lamb_measure",
    "markov_difference",
    "markov_encode",
    "markov_merge",
    "mean",
    "momentum_encode",
    "momentum_sum",
    "onebit_lamb_measure",
    "packet_check",
    "packet_seal",
    "precondition",
    "shard_scale",
    "sign_apply",
    "sign_encode",
    "sign_merge",
    "sketch_add",
    "sketch_estimate",
    "sketch_top_k",
    "sparse_add",
    "sparse_amsgrad",
    "square_sum",
    "step_apply",
    "top_k",
    "use_isa",
    "vote_bit",
    "vote_count",
    "vote_majority",
]
