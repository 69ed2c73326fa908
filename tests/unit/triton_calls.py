"""Calls of every operation that has a Triton kernel: compiled, not run, by benchmarks/triton_resources.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tests.unit import test_kernels as flat
from tests.unit import test_kernels_node as node
from tests.unit.kernel_cases import activity_refresh_case, encode_case, guarded, random_bytes
from tests.unit.kernel_cases import random as generator
from tests.unit.markov_cases import (
    amsgrad_case,
    markov_difference_case,
    markov_encode_case,
    markov_merge_case,
    momentum_sum_case,
)
from tests.unit.quantize_cases import FORMATS, quantize_decode_case, quantize_encode_case, quantize_merge_case
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
from thinwire.kernels.modes import Gate, MarkovMode, Output, Source

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
AT: dict[str, Any] = {"count": 5000, "seed": 3}
"""Where: a few tiles, and the beginning of one."""

Call = tuple[str, dict[str, Any]]


def calls(*, thorough: bool) -> Iterator[Call]:
    """Operations and their arguments: in fp32 and in bf16 where they can be, or `thorough`, in all that they can be."""
    found = {"bad": torch.zeros(1, dtype=torch.int32)}
    gate = {"gate": Gate(torch.ones(3, dtype=torch.int32), 1)}
    for operation, case in itertools.chain(_finding(), _finding_more() if thorough else ()):
        yield operation, case | found
    for operation, case in itertools.chain(_stepping(), _stepping_more() if thorough else ()):
        yield operation, case | gate
    yield from _merging()
    if thorough:
        yield from _merging_more()
    yield from _of_packets()


def _finding() -> Iterator[Call]:
    """Those that take gradients in."""
    for dtype in (FP32, BF16):
        of: dict[str, Any] = {"grad_dtype": dtype, "state_dtype": dtype}
        yield "birder_encode", encode_case(**AT, **of)
        yield "sign_encode", sign_encode_case(**AT, **of)
        yield "quantize_encode", quantize_encode_case(**AT, **of, stochastic=dtype is BF16)
        yield "momentum_encode", momentum_encode_case(**AT, **of, output=Output.SIGNS)
        yield "markov_encode", markov_encode_case(**AT, grad_dtype=dtype, momentum=dtype is BF16)
    of = {"grad_dtype": BF16, "state_dtype": FP32}
    yield "birder_encode", encode_case(**AT, **of)
    yield "birder_direction", node.direction_case(**AT, **of)
    yield "momentum_encode", momentum_encode_case(**AT, **of, output=Output.NOTHING)
    yield "dense_encode", dense_encode_case(**AT, grad_dtype=BF16)
    yield "momentum_sum", momentum_sum_case(**AT, grad_dtype=BF16)
    yield "markov_difference", markov_difference_case(**AT, grad_dtype=BF16)


def _finding_more() -> Iterator[Call]:
    for grad, state in ((BF16, FP32), (FP16, FP32), (None, FP32), (FP32, BF16), (FP16, BF16)):
        of: dict[str, Any] = {"grad_dtype": grad, "state_dtype": state}
        yield "birder_encode", encode_case(**AT, **of)
        yield "birder_direction", node.direction_case(**AT, **of)
        yield "sign_encode", sign_encode_case(**AT, **of)
        for output in Output:
            yield "momentum_encode", momentum_encode_case(**AT, **of, output=output)
    for grad, momentum in itertools.product((FP32, BF16, FP16, None), (False, True)):
        yield "dense_encode", dense_encode_case(**AT, grad_dtype=grad)
        yield "momentum_sum", momentum_sum_case(**AT, grad_dtype=grad)
        yield "markov_encode", markov_encode_case(**AT, grad_dtype=grad, momentum=momentum)
        yield "markov_difference", markov_difference_case(**AT, grad_dtype=grad, momentum=momentum)
    for say in (MarkovMode.ACTIVATION, MarkovMode.REPLAY):
        yield "markov_encode", markov_encode_case(**AT, mode=say)
    # With a scale that only the device knows, a gradient that begins at an odd element, and averages that never fall.
    of = {"grad_dtype": BF16, "state_dtype": FP32, "grad_off": 1, "scale": torch.ones(1)}
    yield "birder_encode", encode_case(**AT, **of, amsgrad=True)
    yield "sign_encode", sign_encode_case(**AT, **of)


def _stepping() -> Iterator[Call]:
    """Those that move parameters."""
    for low in (None, BF16):
        of: dict[str, Any] = {**AT, "low_dtype": low}
        yield "birder_apply", flat.apply_case(**of, workers=4 if low else 0)
        yield "sign_apply", sign_apply_case(**of, anchored=low is None, with_momentum=low is None)
        yield "amsgrad_apply", amsgrad_case(**of, source=Source.SIGNS)
    of = {**AT, "low_dtype": BF16}
    yield "dense_apply", node.dense_case(**of)
    yield "adam_apply", adam_case(**of)
    yield "step_apply", step_apply_case(**of)
    yield "lamb_apply", lamb_apply_case(**of)
    yield "activity_update", flat.activity_update_case(300, 4, 0, 256, 7, 3, 1)


def _stepping_more() -> Iterator[Call]:
    for low in (None, BF16, FP16):
        of: dict[str, Any] = {**AT, "low_dtype": low}
        for workers in (0, 4):
            yield "birder_apply", flat.apply_case(**of, workers=workers)
        yield "dense_apply", node.dense_case(**of)
        yield "adam_apply", adam_case(**of)
        yield "adam_apply", adam_case(**of, by_sign=True, update_variance=False)
        for anchored in (False, True):
            yield "sign_apply", sign_apply_case(**of, anchored=anchored, with_momentum=anchored)
            yield "step_apply", step_apply_case(**of, anchored=anchored)
        yield "lamb_apply", lamb_apply_case(**of)
        for source in Source:
            yield "amsgrad_apply", amsgrad_case(**of, source=source)
    yield "amsgrad_apply", amsgrad_case(**AT, source=Source.SIGNS, steps=False)
    yield "activity_update", flat.activity_update_case(300, 4, 0, 256, 7, 3, 3)


def _merging() -> Iterator[Call]:
    """Those of owners, and those that measure."""
    for state in (FP32, BF16):
        merge = sign_merge_case(**AT, workers=4, state_dtype=state)
        yield "sign_merge", merge
    yield "activity_refresh", activity_refresh_case(300, 4, 0, 256, 7, 3, FP32)
    yield "mean", node.mean_case(4, 5000, seed=3, dtype=BF16)
    yield "markov_merge", markov_merge_case(**AT, workers=4)
    yield "quantize_merge", quantize_merge_case(**AT, workers=4)
    yield "quantize_decode", quantize_decode_case(**AT)
    for workers, active in ((4, None), (33, "some")):
        yield "vote_bit", flat.vote_case(workers, 300, active, 3, signal=active is not None)
    yield "vote_majority", flat.majority_case(4, 300, "some", 3)
    yield "vote_count", flat.count_case(4, 300, "some", 3)
    yield "lamb_measure", lamb_measure_case(**AT, low_dtype=BF16)
    yield "onebit_lamb_measure", onebit_lamb_case(**AT, low_dtype=BF16)
    yield "square_sum", square_sum_case(5000, seed=3)
    yield "precondition", precondition_case(5000, seed=3)


def _merging_more() -> Iterator[Call]:
    for form in FORMATS:
        yield "quantize_merge", quantize_merge_case(**AT, **form)
        yield "quantize_decode", quantize_decode_case(**AT, **form, out_dtype=BF16)
    yield "activity_refresh", activity_refresh_case(300, 4, 0, 256, 7, 3, BF16)
    yield "mean", node.mean_case(4, 5000, seed=3, dtype=FP32)
    for workers in (1, 2, 4, 8, 16, 64, 128):
        yield "vote_bit", flat.vote_case(workers, 300, "some", 3)
        yield "vote_majority", flat.majority_case(workers, 300, "some", 3)
        yield "vote_count", flat.count_case(workers, 300, "some", 3)
    for low in (None, FP16):
        yield "lamb_measure", lamb_measure_case(**AT, low_dtype=low)
        yield "onebit_lamb_measure", onebit_lamb_case(**AT, low_dtype=low)


def _of_packets() -> Iterator[Call]:
    """Those of shards and their packets as a whole."""
    for sums in (1, 3):
        which, also = torch.tensor([0, 2, 3]), torch.zeros(1) if sums == 1 else None
        table = torch.ones(6, sums, dtype=torch.float64)
        yield "shard_scale", {"sums": table, "which": which, "to": torch.zeros(1), "also": also, "length": 5000}
    yield "clear_words", {"state": torch.ones(100 * 64), "words": torch.ones(50, dtype=torch.bool), "first": 3}
    packets = guarded(random_bytes(4, 32 + 8 * 300, generator=generator(3)))
    of = {"status": torch.zeros(STATUS_WORDS, dtype=torch.int64), "step": 5, "bucket": 2, "flags": 0, "layout": 77}
    yield "packet_seal", {"packets": packets, **of, "sender": 1}
    yield "packet_check", {"packets": packets, **of, "senders": torch.arange(4)}
