"""What each kernel needs of its tensors: one function per kernel, which native and Triton launchers call first.

`device` is where all tensors must be; None is the CPU. Functions of kernels that walk runs return the bounds of these.
See `thinwire.kernels.bounds` for what is raised, and the reference for what the arguments mean.
"""

from __future__ import annotations

from thinwire.kernels.arguments.amsgrad import amsgrad_apply, momentum_sum, sparse_amsgrad
from thinwire.kernels.arguments.birder import (
    activity_refresh,
    adopt,
    birder_apply,
    birder_direction,
    birder_encode,
    vote_bit,
    vote_count,
    vote_majority,
)
from thinwire.kernels.arguments.floats import (
    adam_apply,
    dense_apply,
    dense_encode,
    lamb_apply,
    lamb_measure,
    mean,
    onebit_lamb_measure,
    precondition,
    square_sum,
    step_apply,
)
from thinwire.kernels.arguments.packets import crc32c, forget, sealed, sent, shard_scale
from thinwire.kernels.arguments.selections import sketch, sketch_top_k, sparse_add, top_k
from thinwire.kernels.arguments.signs import (
    given,
    markov_difference,
    markov_encode,
    markov_merge,
    momentum_encode,
    sign_apply,
    sign_encode,
    sign_merge,
)

__all__ = [
    "activity_refresh",
    "adam_apply",
    "adopt",
    "amsgrad_apply",
    "birder_apply",
    "birder_direction",
    "birder_encode",
    "crc32c",
    "dense_apply",
    "dense_encode",
    "forget",
    "given",
    "lamb_apply",
    "lamb_measure",
    "markov_difference",
    "markov_encode",
    "markov_merge",
    "mean",
    "momentum_encode",
    "momentum_sum",
    "onebit_lamb_measure",
    "precondition",
    "sealed",
    "sent",
    "shard_scale",
    "sign_apply",
    "sign_encode",
    "sign_merge",
    "sketch",
    "sketch_top_k",
    "sparse_add",
    "sparse_amsgrad",
    "square_sum",
    "step_apply",
    "top_k",
    "vote_bit",
    "vote_count",
    "vote_majority",
]
