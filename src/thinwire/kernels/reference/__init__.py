"""The kernels in plain torch: slow and simple. Every other backend must match them to the bit.

docs/protocol.md defines what they compute. A *run* is a row `(element, in_param, count, byte, plane_bytes, shard)` of
an int64 table: `count` elements that start at `element` in the flat space and at `in_param` in their parameter, and
whose words (or floats) begin at `byte` of a packet buffer, further planes of bits following `plane_bytes` apart;
`shard` is their shard's number in the whole model, at which tables of scales are read. `element` is a multiple of 64;
if a run ends within a word, the rest of the word is padding. Parameters and gradients are dense, and are read in the
order of their memory.

Arithmetic is float32 in the order written, every operation rounded. A Python number that meets a float32 tensor is
rounded to float32 first.
"""

from __future__ import annotations

from thinwire.kernels.reference.adam import adam_apply, dense_encode, precondition
from thinwire.kernels.reference.amsgrad import amsgrad_apply, momentum_sum, sparse_amsgrad
from thinwire.kernels.reference.birder import (
    activity_refresh,
    activity_update,
    birder_apply,
    birder_direction,
    birder_encode,
    dense_apply,
    mean,
    vote_bit,
    vote_count,
    vote_majority,
)
from thinwire.kernels.reference.crc import crc32c
from thinwire.kernels.reference.lamb import lamb_apply, lamb_measure, onebit_lamb_measure, square_sum
from thinwire.kernels.reference.markov import (
    markov_difference,
    markov_encode,
    markov_merge,
)
from thinwire.kernels.reference.packets import packet_check, packet_seal
from thinwire.kernels.reference.quantize import quantize_decode, quantize_encode, quantize_merge
from thinwire.kernels.reference.shards import clear_words, shard_scale
from thinwire.kernels.reference.sign import momentum_encode, sign_apply, sign_encode, sign_merge, step_apply
from thinwire.kernels.reference.sketch import hashes, sketch_add, sketch_estimate, sketch_top_k
from thinwire.kernels.reference.top_k import sparse_add, top_k
from thinwire.kernels.reference.words import pack, unpack, words_at

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
    "hashes",
    "lamb_apply",
    "lamb_measure",
    "markov_difference",
    "markov_encode",
    "markov_merge",
    "mean",
    "momentum_encode",
    "momentum_sum",
    "onebit_lamb_measure",
    "pack",
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
    "sketch_add",
    "sketch_estimate",
    "sketch_top_k",
    "sparse_add",
    "sparse_amsgrad",
    "square_sum",
    "step_apply",
    "top_k",
    "unpack",
    "vote_bit",
    "vote_count",
    "vote_majority",
    "words_at",
]
