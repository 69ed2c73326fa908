"""Calls of every operation that has a Triton kernel, of all the dtypes that matter and with all that they can be given;
they are compiled, not run, by benchmarks/triton_resources.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.unit import test_kernels as flat
from tests.unit import test_kernels_node as node
from tests.unit.kernel_cases import encode_case, guarded, random_bytes, roll_call_case
from tests.unit.kernel_cases import random as generator
from tests.unit.markov_cases import (
    amsgrad_case,
    markov_difference_case,
    markov_encode_case,
    markov_merge_case,
    momentum_sum_case,
)
from tests.unit.sign_cases import (
    adam_case,
    dense_encode_case,
    lamb_apply_case,
    lamb_measure_case,
    momentum_encode_case,
    onebit_lamb_case,
    precondition_case,
    sign_apply_case,
    sign_encode_case,
    sign_merge_case,
    square_sum_case,
    step_apply_case,
)
from thinwire.kernels.header import STATUS_WORDS
from thinwire.kernels.modes import Gate, Output, Say, Source

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OF_GRADIENTS = ((FP32, FP32), (BF16, FP32), (FP16, FP32), (None, FP32), (FP32, BF16), (BF16, BF16))
"""Of gradients and states."""
OF_PARAMETERS = (None, BF16, FP16)
"""Of parameters that have a master; None is fp32."""
AT: dict[str, Any] = {"count": 5000, "seed": 3}
"""Where: a few tiles, and the beginning of one."""

Call = tuple[str, dict[str, Any]]


def calls() -> Iterator[Call]:
    """An operation and its arguments, again and again."""
    found = {"bad": torch.zeros(1, dtype=torch.int32)}
    gate = {"gate": Gate(torch.ones(3, dtype=torch.int32), 1)}
    for operation, case in _finding():
        yield operation, case | found
    for operation, case in _stepping():
        yield operation, case | gate
    yield from _merging()
    yield from _of_packets()


def _finding() -> Iterator[Call]:
    """Those that take gradients in."""
    for grad, state in OF_GRADIENTS:
        of: dict[str, Any] = {"grad_dtype": grad, "state_dtype": state}
        yield "birder_encode", encode_case(**AT, **of)
        yield "sign_encode", sign_encode_case(**AT, **of)
        yield "momentum_encode", momentum_encode_case(**AT, **of, output=Output.SIGNS)
    for grad in (FP32, BF16, FP16, None):
        yield "dense_encode", dense_encode_case(**AT, grad_dtype=grad)
        yield "markov_encode", markov_encode_case(**AT, grad_dtype=grad)
    for grad, state in ((FP32, FP32), (BF16, BF16)):
        of = {"grad_dtype": grad, "state_dtype": state}
        yield "birder_direction", node.direction_case(**AT, **of)
        yield "momentum_encode", momentum_encode_case(**AT, **of, output=Output.NOTHING)
        yield "momentum_encode", momentum_encode_case(**AT, **of, output=Output.MOMENTUM)
        yield "momentum_sum", momentum_sum_case(**AT, grad_dtype=grad)
        yield "markov_encode", markov_encode_case(**AT, grad_dtype=grad, momentum=True)
        yield "markov_difference", markov_difference_case(**AT, grad_dtype=grad, momentum=grad is BF16)
    for say in (Say.GREETING, Say.RECALL):
        yield "markov_encode", markov_encode_case(**AT, mode=say)
    # With a scale that only the device knows, a gradient that begins at an odd element, and averages that never fall.
    of = {"grad_dtype": BF16, "state_dtype": FP32, "grad_off": 1, "scale": torch.ones(1)}
    yield "birder_encode", encode_case(**AT, **of, amsgrad=True)
    yield "sign_encode", sign_encode_case(**AT, **of)


def _stepping() -> Iterator[Call]:
    """Those that move parameters."""
    for low in OF_PARAMETERS:
        of: dict[str, Any] = {**AT, "low_dtype": low}
        yield "birder_apply", flat.apply_case(**of)
        yield "dense_apply", node.dense_case(**of)
        yield "adam_apply", adam_case(**of)
        yield "sign_apply", sign_apply_case(**of)
        yield "amsgrad_apply", amsgrad_case(**of, source=Source.SIGNS)
    for low in (None, BF16):
        of = {**AT, "low_dtype": low}
        yield "birder_apply", flat.apply_case(**of, workers=4)
        yield "adam_apply", adam_case(**of, by_sign=True, update_variance=False)
        yield "sign_apply", sign_apply_case(**of, anchored=True, with_momentum=True)
        for anchored in (False, True):
            yield "step_apply", step_apply_case(**of, anchored=anchored)
        yield "lamb_apply", lamb_apply_case(**of)
        yield "amsgrad_apply", amsgrad_case(**of, source=Source.HELD if low else Source.FLOATS)
    yield "amsgrad_apply", amsgrad_case(**AT, source=Source.SIGNS, steps=False)
    for planes in (1, 3):
        yield "adopt", flat.adopt_case(300, 4, 0, 256, 7, 3, planes)


def _merging() -> Iterator[Call]:
    """Those of owners, and those that measure."""
    for state in (FP32, BF16):
        merge = sign_merge_case(**AT, workers=4, state_dtype=state)
        yield "sign_merge", merge | {"last_scale": torch.ones(1)}
        yield "roll_call", roll_call_case(300, 4, 0, 256, 7, 3, state)
        yield "mean", node.mean_case(4, 5000, seed=3, dtype=state)
    yield "markov_merge", markov_merge_case(**AT, workers=4)
    for workers, alive in ((4, "some"), (4, None), (33, "some")):
        yield "vote_bit", flat.vote_case(workers, 300, alive, 3, signal=alive is not None)
    yield "vote_count", flat.count_case(4, 300, "some", 3)
    for low in (None, BF16):
        yield "lamb_measure", lamb_measure_case(**AT, low_dtype=low)
        yield "onebit_lamb_measure", onebit_lamb_case(**AT, low_dtype=low)
    yield "square_sum", square_sum_case(5000, seed=3)
    yield "precondition", precondition_case(5000, seed=3)


def _of_packets() -> Iterator[Call]:
    """Those of shards and their packets as a whole."""
    for sums in (1, 3):
        to, also = torch.zeros(4), torch.zeros(4)
        scale = {"sums": torch.ones(6, sums, dtype=torch.float64), "which": torch.tensor([0, 2, 3]), "length": 5000}
        yield "shard_scale", scale | {"to": to[1:2], "also": also[:1]}
        yield "shard_scale", scale | {"to": to[1:2], "also": None}
    yield "forget", {"state": torch.ones(100 * 64), "words": torch.ones(50, dtype=torch.bool), "first": 3}
    packets = guarded(random_bytes(4, 32 + 8 * 300, generator=generator(3)))
    of = {"status": torch.zeros(STATUS_WORDS, dtype=torch.int64), "step": 5, "bucket": 2, "flags": 0, "layout": 77}
    yield "packet_seal", {"packets": packets, **of, "sender": 1}
    yield "packet_check", {"packets": packets, **of, "senders": torch.arange(4)}
