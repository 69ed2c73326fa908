"""How fast the kernels are, each as a ratio to a memcpy in the same run on the same thread, and on several threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from thinwire.compressors.codecs.count_sketch import CountSketch
from thinwire.kernels import native, reference
from thinwire.kernels.bounds import quantized_word_bytes
from thinwire.kernels.modes import MarkovMode, Output, Source
from thinwire.kernels.ops import BACKENDS
from thinwire.transport.packet import HEADER_BYTES

_VOTERS = 8
_TELLERS = 4
"""Workers whose changes an owner of CD-Adam merges."""
_RULE = {"beta": 0.8, "eps": 1e-12, "scale": 1.0, "amsgrad": False, "key": 1}


@dataclass(frozen=True)
class KernelResult:
    """One kernel: its median time, the bytes it must move, and its ratio to a baseline."""

    name: str
    seconds: float
    bytes_per_element: float
    baseline: str
    baseline_seconds: float
    ratio: float
    """Bytes per second relative to memcpy. If the name states otherwise: the speed-up, or the time relative to
    the baseline, where less is better."""
    higher_is_better: bool = True
    speedup: float | None = None
    """How many times faster it is on several threads than on one, if that was measured."""


@dataclass(frozen=True)
class _Case:
    name: str
    run: Callable[[], object]
    bytes_per_element: float
    judged: Literal["bytes", "speed", "time"] = "bytes"
    """By what against a memcpy of as many fp32 elements: bytes per second, how many times faster, or times the time."""


def measure(elements: int, repeats: int, threads: int = 1) -> list[KernelResult]:
    """Run every kernel over `elements` elements, in rounds that take turns, so that noise hits all alike.

    With `threads` > 1, also on so many threads, in turns with one; all else is measured on one.
    """
    elements = -(-elements // 64) * 64
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(elements, repeats, threads)
    finally:
        torch.set_num_threads(before)


def _measure(elements: int, repeats: int, threads: int) -> list[KernelResult]:
    torch.manual_seed(0)
    grad = torch.randn(elements)
    to = torch.empty_like(grad)
    copy = _Case("memcpy of fp32", lambda: to.copy_(grad), 8.0)
    cases = [copy, *_birder_cases(grad), *_sign_cases(grad), *_float_cases(grad)]
    cases += [*_quantize_cases(grad), *_markov_cases(grad), *_sparse_cases(grad), _checksum_case(grad)]
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    shared: dict[str, list[float]] = {case.name: [] for case in cases if threads > 1}
    for turn in range(repeats + 1):
        for case in cases:
            taken = _time(case.run)
            if turn:  # the first turn only brings the pages in
                seconds[case.name].append(taken)
        # The memcpy comes last: torch's threads go on for a moment after their work, on the cores of the next case.
        for case in [*cases[1:], copy] if threads > 1 else []:
            torch.set_num_threads(threads)
            taken = _time(case.run)
            torch.set_num_threads(1)
            if turn:
                shared[case.name].append(taken)
    speedups = {name: median(seconds[name]) / median(taken) for name, taken in shared.items()}
    middle = {name: median(taken) for name, taken in seconds.items()}
    memcpy = middle[copy.name]
    rows: list[KernelResult] = []
    for case in cases:
        taken = middle[case.name]
        ratio = memcpy / taken
        if case.judged == "bytes":
            ratio *= case.bytes_per_element / copy.bytes_per_element
        elif case.judged == "time":
            ratio = taken / memcpy
        rows.append(
            KernelResult(
                name=case.name,
                seconds=taken,
                bytes_per_element=case.bytes_per_element,
                baseline=copy.name,
                baseline_seconds=memcpy,
                ratio=ratio,
                higher_is_better=case.judged != "time",
                speedup=speedups.get(case.name),
            )
        )
    encode = middle["encode"]
    for name, run, share in _slow_encodes(grad):
        taken = median([_time(run) for _ in range(repeats)]) / share
        rows.append(KernelResult(f"encode, times faster than {name}", encode, 20.125, name, taken, taken / encode))
    return rows


def _birder_cases(grad: Tensor) -> list[_Case]:
    kernels = BACKENDS["native"]
    elements = grad.numel()
    words = elements // 64
    up = torch.zeros(HEADER_BYTES + elements // 8, dtype=torch.uint8)
    votes = torch.randint(0, 256, (_VOTERS, up.numel()), dtype=torch.uint8)
    planes = _VOTERS.bit_length()
    counts = torch.zeros(HEADER_BYTES + planes * (elements // 8), dtype=torch.uint8)
    active = torch.full((words,), -1, dtype=torch.int64)
    x = torch.randn(elements)
    master = torch.randn(elements)
    low = master.to(torch.bfloat16)
    signal = torch.zeros(2, dtype=torch.int64)

    def encode(gradient: Tensor, state_dtype: torch.dtype) -> Callable[[], object]:
        runs = _one_run(elements)
        m, b = (torch.zeros(elements, dtype=state_dtype) for _ in range(2))
        return lambda: kernels.birder_encode(runs, gradient, m, b, active, up, **_RULE)

    def apply(parameter: Tensor, narrow: Tensor | None, *, counted: bool) -> Callable[[], object]:
        runs = _one_run(elements)
        answer = {"planes": planes, "workers": _VOTERS} if counted else {"planes": 1, "workers": 0}
        packets = counts if counted else up
        return lambda: kernels.birder_apply(runs, parameter, narrow, active, packets, **answer, lr=1e-3, decay=0.9999)

    at = {"first_word": 0, "words": words, "answer_byte": HEADER_BYTES, "signal": signal}

    def vote_bit() -> None:
        kernels.vote_bit(votes, HEADER_BYTES, active, **at, answer=up, key=2)

    def vote_majority() -> None:
        kernels.vote_majority(votes, HEADER_BYTES, active, **at, answer=up, casting=2)

    def vote_count() -> None:
        kernels.vote_count(votes, HEADER_BYTES, active, **at, answer=counts, planes=planes)

    fp32, bf16 = torch.float32, torch.bfloat16
    return [
        _Case("encode", encode(grad, fp32), 20.125),
        _Case("encode, bf16 gradient", encode(grad.to(bf16), fp32), 18.125),
        _Case("encode, fp16 gradient", encode(grad.to(torch.float16), fp32), 18.125),
        _Case("encode, bf16 state", encode(grad, bf16), 12.125),
        _Case("apply", apply(x, None, counted=False), 8.125),
        _Case("apply, bf16 parameter and fp32 master", apply(master, low, counted=False), 12.125),
        _Case(f"apply of {_VOTERS} votes", apply(x, None, counted=True), 8.0 + planes / 8),
        _Case(f"vote of {_VOTERS} rows to a bit, by time", vote_bit, (_VOTERS + 1) / 8, judged="speed"),
        _Case(f"vote of {_VOTERS} rows to a majority, by time", vote_majority, (_VOTERS + 1) / 8, judged="speed"),
        _Case(f"vote of {_VOTERS} rows to counts, by time", vote_count, (_VOTERS + planes) / 8, judged="speed"),
    ]


def _sign_cases(grad: Tensor) -> list[_Case]:
    """Scaled signs with error feedback, and the steps by them."""
    kernels = BACKENDS["native"]
    elements = grad.numel()
    runs = _one_run(elements)
    packets = torch.zeros(HEADER_BYTES + elements // 8, dtype=torch.uint8)
    rows = torch.randint(0, 256, (_VOTERS, packets.numel()), dtype=torch.uint8)
    heard, before = (torch.randint(-(2**62), 2**62, (elements // 64,)) for _ in range(2))
    scales, row_scales, sums = torch.ones(1), torch.ones(_VOTERS, 1), torch.zeros(1, dtype=torch.float64)
    x, m, w = torch.randn(elements), torch.zeros(elements), torch.ones(elements)
    p = torch.ones(elements)

    def encode(memory_dtype: torch.dtype) -> Callable[[], object]:
        c = torch.zeros(elements, dtype=memory_dtype)
        known = {"sent_scales": scales, "answer_scales": scales, "sums": sums}
        rule = {"beta": 0.9, "weight": 0.1, "scale": 1.0, "shift": 0}
        return lambda: kernels.sign_encode(runs, grad, c, heard, packets, **known, **rule)

    def merge(y: Tensor) -> Callable[[], object]:
        known = {"scales": row_scales, "last_scales": scales, "sums": sums, "shift": 0}
        return lambda: kernels.sign_merge(runs, rows, y, packets, **known)

    def encode_momentum(c: Tensor) -> Callable[[], object]:
        rule = {"beta": 0.9, "weight": 0.1, "scale": 1.0, "rate": 1e-3, "shift": 0, "output": Output.SIGNS}
        return lambda: kernels.momentum_encode(runs, grad, m, c, packets, sent_scales=scales, sums=sums, **rule)

    def apply() -> None:
        kernels.sign_apply(runs, x, None, p, heard, scales, rate=1e-3, decay=0.9999, anchor=None, m=None, momentum=0.0)

    layer_sums = torch.zeros(1, 3, dtype=torch.float64)
    factors = {"shrink": 1.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "unbias": 1.0, "weight_decay": 0.01}

    def measure_layer() -> None:
        kernels.onebit_lamb_measure(runs, x, None, p, w, heard, scales, before, scales, **factors, sums=layer_sums)

    return [
        _Case("sign encode, time in memcpys", encode(torch.float32), 12.25, judged="time"),
        _Case("sign encode, bf16 memory, time in memcpys", encode(torch.bfloat16), 8.25, judged="time"),
        _Case(f"sign merge of {_VOTERS} rows", merge(torch.zeros(elements)), 8.0 + (_VOTERS + 1) / 8),
        _Case("sign apply", apply, 12.125),
        _Case("momentum encode", encode_momentum(torch.zeros(elements)), 20.125),
        _Case("1-bit LAMB, measure", measure_layer, 16.25),
    ]


def _quantize_cases(grad: Tensor) -> list[_Case]:
    """Blocks of 64 elements with 4 bits each, and error feedback on both sides."""
    kernels = BACKENDS["native"]
    elements = grad.numel()
    runs = _one_run(elements)
    form = {"bits": 4, "block": 64}
    word_bytes = quantized_word_bytes(**form)
    packets = torch.zeros(HEADER_BYTES + elements // 64 * word_bytes, dtype=torch.uint8)
    residual, owned, out = (torch.zeros(elements) for _ in range(3))
    sums = torch.zeros(1, 2, dtype=torch.float64)
    rule = {"spread": 1.0, "shift": 0}

    def encode() -> None:
        kernels.quantize_encode(runs, grad, residual, packets, sums=sums, scale=1.0, **form, **rule)

    encode()
    rows, answer = packets.repeat(_TELLERS, 1), torch.zeros_like(packets)

    def merge() -> None:
        kernels.quantize_merge(runs, rows, owned, answer, **form, **rule)

    def decode() -> None:
        kernels.quantize_decode(runs, packets, out, **form, weight=1.0)

    packed = word_bytes / 64
    return [
        _Case("int4 encode, time in memcpys", encode, 12 + packed, judged="time"),
        _Case(f"int4 merge of {_TELLERS} rows, time in memcpys", merge, 8 + (_TELLERS + 1) * packed, judged="time"),
        _Case("int4 decode, time in memcpys", decode, 4 + packed, judged="time"),
    ]


def _float_cases(grad: Tensor) -> list[_Case]:
    """Steps by gradients that travel as floats."""
    kernels = BACKENDS["native"]
    elements = grad.numel()
    runs = _one_run(elements)
    packets = torch.zeros(HEADER_BYTES + 4 * elements, dtype=torch.uint8)
    x, m, v = torch.randn(elements), torch.zeros(elements), torch.zeros(elements)
    sums = torch.zeros(1, 3, dtype=torch.float64)
    averages = {"beta1": 0.9, "beta2": 0.99}
    direction = {"eps": 1e-6, "unbias": 1.0, "correction": 1.0, "weight_decay": 0.01}
    step = {"eps": 1e-8, "rate": 1e-3, "correction": 1.0, "decay": 0.9999, "update_variance": True}

    def encode() -> None:
        kernels.dense_encode(runs, grad, packets, scale=1.0)

    def adam() -> None:
        kernels.adam_apply(runs, x, None, m, v, packets, None, **averages, **step)

    def lamb() -> None:
        kernels.lamb_measure(runs, x, None, m, v, packets, **averages, **direction, sums=sums)
        kernels.lamb_apply(runs, x, None, m, v, **direction, rate=1e-3)

    return [
        _Case("dense encode", encode, 8.0),
        _Case("Adam apply", adam, 28.0),
        _Case("LAMB, measure and apply", lamb, 40.0),
    ]


def _markov_cases(grad: Tensor) -> list[_Case]:
    """CD-Adam: signs of what has changed, and AMSGrad's step by them."""
    kernels = BACKENDS["native"]
    elements = grad.numel()
    runs = _one_run(elements)
    packets = torch.zeros(HEADER_BYTES + elements // 8, dtype=torch.uint8)
    rows = torch.randint(0, 256, (_TELLERS, packets.numel()), dtype=torch.uint8)
    said = torch.zeros(elements // 64, dtype=torch.int64)
    active = torch.full((elements // 64,), -1, dtype=torch.int64)
    busy = torch.zeros(elements // 64, dtype=torch.uint8)
    scales, row_scales, sums = torch.ones(1), torch.ones(_TELLERS), torch.zeros(1, 3, dtype=torch.float64)
    followed, mean = torch.zeros(elements), torch.zeros(elements)
    x, m, v, peak = torch.randn(elements), torch.zeros(elements), torch.zeros(elements), torch.zeros(elements)

    def encode(momentum: Tensor | None) -> Callable[[], object]:
        known = torch.zeros(elements)
        words = (said, busy, active, active)
        rule = {"beta": 0.9, "weight": 0.1, "scale": 1.0, "shift": 0, "mode": MarkovMode.ORDINARY}
        return lambda: kernels.markov_encode(
            runs, grad, momentum, known, *words, packets, sent_scales=scales, sums=sums, **rule
        )

    def merge() -> None:
        kernels.markov_merge(runs, rows, mean, followed, active, packets, scales=row_scales, sums=sums, shift=0)

    def apply() -> None:
        step = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "rate": 1e-3, "correction": 1.0, "decay": 0.9999}
        states = (followed, m, v, peak)
        kernels.amsgrad_apply(runs, x, None, *states, packets, scales, active, **step, source=Source.SIGNS)

    return [
        _Case("Markov encode, time in memcpys", encode(None), 12.625, judged="time"),
        _Case("Markov encode of momenta, time in memcpys", encode(torch.zeros(elements)), 20.625, judged="time"),
        _Case(f"Markov merge of {_TELLERS} rows, time in memcpys", merge, 12.25 + _TELLERS / 8, judged="time"),
        _Case("AMSGrad apply of signs, time in memcpys", apply, 40.25, judged="time"),
    ]


def _sparse_cases(grad: Tensor) -> list[_Case]:
    """What stands out of many elements: by itself, and in a count sketch of them."""
    kernels = BACKENDS["native"]
    elements = grad.numel()
    largest = torch.zeros(elements // 64, dtype=torch.int32)
    scratch = torch.zeros(2 * largest.numel(), dtype=torch.int64)
    sketch = CountSketch(kernels, rows=5, columns=elements // 50)
    table = torch.zeros(sketch.nbytes(elements), dtype=torch.uint8)
    peak = torch.rand(elements).add_(0.5)
    everything = torch.tensor([[0, elements]])
    picked = torch.zeros(elements // 500, dtype=torch.int32)

    def top_k() -> None:
        kernels.top_k(grad, largest, scratch)

    def add() -> None:
        sketch.add(grad, table)

    def pick() -> None:
        sketch.largest(table, peak, everything, picked)

    # A sketch of 5 rows of n/50 floats is 0.4 bytes an element.
    return [
        _Case("top-k, k = n/64, time in memcpys", top_k, 4.0 + 4 / 64, judged="time"),
        _Case("sketch add, 5 × n/50, time in memcpys", add, 4.8, judged="time"),
        _Case("sketch top-k, k = n/500, time in memcpys", pick, 4.4 + 4 / 500, judged="time"),
    ]


def _checksum_case(grad: Tensor) -> _Case:
    """Of the bytes that the memcpy copies; they are only read."""
    kernels = BACKENDS["native"]
    data = grad.view(torch.uint8)
    return _Case("CRC-32C of fp32, time in memcpys", lambda: kernels.crc32c(data), 4.0, judged="time")


def _slow_encodes(grad: Tensor) -> list[tuple[str, Callable[[], object], float]]:
    """What the same step costs in torch: in place and with torch.rand, and as our reference does, hash and all.

    Each with the share of the elements that it runs over (the reference takes seconds).
    """
    elements = grad.numel()
    m, b = torch.zeros(elements), torch.zeros(elements)
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    packed = torch.empty(HEADER_BYTES + elements // 8, dtype=torch.uint8)
    active = torch.full((elements // 64,), -1, dtype=torch.int64)
    part = max(64, elements // 20 // 64 * 64)

    def eager() -> None:
        m.mul_(0.8).add_(grad, alpha=0.2)
        b.mul_(0.8).add_(grad.abs(), alpha=0.2)
        bits = m > torch.rand(elements).mul_(2).sub_(1).mul_(b)
        packed[HEADER_BYTES:] = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)

    def ours() -> None:
        reference.birder_encode(_one_run(part), grad, m, b, active, packed, **_RULE)

    return [("eager torch with torch.rand", eager, 1.0), ("the torch reference", ours, part / elements)]


def _one_run(elements: int) -> Tensor:
    return torch.tensor([[0, 0, elements, HEADER_BYTES, elements // 8, 0]])


def _time(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def instruction_set() -> str:
    """Which native kernels are measured."""
    return native.isa()
