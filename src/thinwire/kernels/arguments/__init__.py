"""What each kernel requires of its tensors: one function per kernel, called before native and Triton kernels.

Its parameters are some of the kernel's, and `device`, where all tensors must be; None is the CPU. Functions of kernels
with runs return their bounds. `thinwire.kernels.bounds` defines the errors, the reference what the arguments mean.
"""

from __future__ import annotations

from thinwire.kernels.arguments.amsgrad import amsgrad_apply, momentum_sum, sparse_amsgrad
from thinwire.kernels.arguments.birder import (
    activity_refresh,
    activity_update,
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
from thinwire.kernels.arguments.packets import clear_words, crc32c, sealed, sent, shard_scale
from thinwire.kernels.arguments.quantize import quantize_decode, quantize_encode, quantize_merge
from thinwire.kernels.arguments.selections import sketch_add, sketch_estimate, sketch_top_k, sparse_add, top_k
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
    "activity_update",
    "adam_apply",
    "amsgrad_apply",
    "birder_apply",
    "birder_direction",
    "birder_encode",
    "clear_words",
    "crc32c",
    "dense_apply",
    "dense_encode",
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
    "quantize_decode",
    "quantize_encode",
    "quantize_merge",
    "sealed",
    "sent",
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
    "vote_bit",
    "vote_count",
    "vote_majority",
]
