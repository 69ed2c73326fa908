"""The kernels for GPUs, in Triton. The host never waits for them. Imported only where there is a GPU."""

from __future__ import annotations

from thinwire.kernels.triton.adam import adam_apply, precondition
from thinwire.kernels.triton.amsgrad import amsgrad_apply, momentum_sum
from thinwire.kernels.triton.birder import (
    activity_refresh,
    activity_update,
    birder_apply,
    birder_direction,
    birder_encode,
    dense_apply,
)
from thinwire.kernels.triton.dense import dense_encode, mean
from thinwire.kernels.triton.lamb import lamb_apply, lamb_measure, onebit_lamb_measure, square_sum
from thinwire.kernels.triton.markov import markov_difference, markov_encode, markov_merge
from thinwire.kernels.triton.packets import packet_check, packet_seal
from thinwire.kernels.triton.quantize import quantize_decode, quantize_encode, quantize_merge
from thinwire.kernels.triton.shards import clear_words, shard_scale
from thinwire.kernels.triton.sign import momentum_encode, sign_apply, sign_encode, sign_merge, step_apply
from thinwire.kernels.triton.votes import vote_bit, vote_count, vote_majority

__all__ = [
    "activity_refresh",
    "activity_update",
    "adam_apply",
    "amsgrad_apply",
    "birder_apply",
    "birder_direction",
    "birder_encode",
    "clear_words",
    "dense_apply",
    "dense_encode",
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
    "quantize_decode",
    "quantize_encode",
    "quantize_merge",
    "shard_scale",
    "sign_apply",
    "sign_encode",
    "sign_merge",
    "square_sum",
    "step_apply",
    "vote_bit",
    "vote_count",
    "vote_majority",
]
