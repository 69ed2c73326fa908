"""How fast the kernels are, each as a ratio to a memcpy in the same run on the same thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from thinwire.kernels import native, reference
from thinwire.kernels.ops import BACKENDS
from thinwire.wire.packet import HEADER_BYTES

_VOTERS = 8
_RULE = {"beta": 0.8, "eps": 1e-12, "scale": 1.0, "amsgrad": False, "key": 1}


@dataclass(frozen=True)
class Row:
    """One kernel: its median time, the bytes it must move, and the ratio that it is judged by."""

    name: str
    seconds: float
    bytes_per_element: float
    baseline: str
    baseline_seconds: float
    ratio: float
    """Bytes a second against the baseline's where the baseline is a memcpy; else how many times faster."""
    bar: float | None


@dataclass(frozen=True)
class _Case:
    name: str
    run: Callable[[], object]
    bytes_per_element: float
    bar: float | None = None
    by_time: bool = False
    """Judged by time against a memcpy of as many fp32 elements, instead of by bytes a second."""


def measure(elements: int, repeats: int) -> list[Row]:
    """Run every kernel over `elements` elements, in rounds that take turns, so that noise hits all alike."""
    elements = -(-elements // 64) * 64
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(elements, repeats)
    finally:
        torch.set_num_threads(threads)


def _measure(elements: int, repeats: int) -> list[Row]:
    torch.manual_seed(0)
    grad = torch.randn(elements)
    to = torch.empty_like(grad)
    copy = _Case("memcpy of fp32", lambda: to.copy_(grad), 8.0)
    cases = [copy, *_cases(grad)]
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(repeats + 1):
        for case in cases:
            taken = _time(case.run)
            if turn:  # the first turn only brings the pages in
                seconds[case.name].append(taken)
    middle = {name: median(taken) for name, taken in seconds.items()}
    memcpy = middle[copy.name]
    rows: list[Row] = []
    for case in cases:
        taken = middle[case.name]
        traffic = 1.0 if case.by_time else case.bytes_per_element / copy.bytes_per_element
        ratio = memcpy / taken * traffic
        rows.append(Row(case.name, taken, case.bytes_per_element, copy.name, memcpy, ratio, case.bar))
    encode = middle["encode"]
    for name, run, share, bar in _slow_encodes(grad):
        taken = median([_time(run) for _ in range(repeats)]) / share
        rows.append(Row(f"encode, times faster than {name}", encode, 20.125, name, taken, taken / encode, bar))
    return rows


def _cases(grad: Tensor) -> list[_Case]:
    kernels = BACKENDS["native"]
    elements = grad.numel()
    words = elements // 64
    up = torch.zeros(HEADER_BYTES + elements // 8, dtype=torch.uint8)
    votes = torch.randint(0, 256, (_VOTERS, up.numel()), dtype=torch.uint8)
    planes = _VOTERS.bit_length()
    counts = torch.zeros(HEADER_BYTES + planes * (elements // 8), dtype=torch.uint8)
    alive = torch.full((words,), -1, dtype=torch.int64)
    x = torch.randn(elements)
    master = torch.randn(elements)
    low = master.to(torch.bfloat16)
    signal = torch.zeros(2, dtype=torch.int64)

    def encode(gradient: Tensor, state_dtype: torch.dtype) -> Callable[[], object]:
        runs = _one_run(elements)
        m, b = (torch.zeros(elements, dtype=state_dtype) for _ in range(2))
        return lambda: kernels.birder_encode(runs, gradient, m, b, alive, up, **_RULE)

    def apply(parameter: Tensor, narrow: Tensor | None, *, counted: bool) -> Callable[[], object]:
        runs = _one_run(elements)
        answer = {"planes": planes, "workers": _VOTERS} if counted else {"planes": 1, "workers": 0}
        packets = counts if counted else up
        return lambda: kernels.birder_apply(runs, parameter, narrow, alive, packets, **answer, lr=1e-3, decay=0.9999)

    at = {"first_word": 0, "words": words, "answer_byte": HEADER_BYTES, "signal": signal}

    def vote_bit() -> None:
        kernels.vote_bit(votes, HEADER_BYTES, alive, **at, answer=up, key=2)

    def vote_count() -> None:
        kernels.vote_count(votes, HEADER_BYTES, alive, **at, answer=counts, planes=planes)

    fp32, bf16 = torch.float32, torch.bfloat16
    return [
        _Case("encode", encode(grad, fp32), 20.125, bar=0.9),
        _Case("encode, bf16 gradient", encode(grad.to(bf16), fp32), 18.125),
        _Case("encode, fp16 gradient", encode(grad.to(torch.float16), fp32), 18.125),
        _Case("encode, bf16 state", encode(grad, bf16), 12.125),
        _Case("apply", apply(x, None, counted=False), 8.125, bar=0.9),
        _Case("apply, bf16 parameter and fp32 master", apply(master, low, counted=False), 12.125),
        _Case(f"apply of {_VOTERS} votes", apply(x, None, counted=True), 8.0 + planes / 8),
        _Case(f"vote of {_VOTERS} rows to a bit, by time", vote_bit, (_VOTERS + 1) / 8, bar=1.0, by_time=True),
        _Case(f"vote of {_VOTERS} rows to counts, by time", vote_count, (_VOTERS + planes) / 8, by_time=True),
    ]


def _slow_encodes(grad: Tensor) -> list[tuple[str, Callable[[], object], float, float | None]]:
    """What the same step costs in torch: in place and with torch.rand, and as our reference does, hash and all.

    Each with the share of the elements that it runs over (the reference takes seconds), and its bar.
    """
    elements = grad.numel()
    m, b = torch.zeros(elements), torch.zeros(elements)
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    packed = torch.empty(HEADER_BYTES + elements // 8, dtype=torch.uint8)
    alive = torch.full((elements // 64,), -1, dtype=torch.int64)
    part = max(64, elements // 20 // 64 * 64)

    def eager() -> None:
        m.mul_(0.8).add_(grad, alpha=0.2)
        b.mul_(0.8).add_(grad.abs(), alpha=0.2)
        bits = m > torch.rand(elements).mul_(2).sub_(1).mul_(b)
        packed[HEADER_BYTES:] = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)

    def ours() -> None:
        reference.birder_encode(_one_run(part), grad, m, b, alive, packed, **_RULE)

    return [("eager torch with torch.rand", eager, 1.0, None), ("the torch reference", ours, part / elements, 20.0)]


def _one_run(elements: int) -> Tensor:
    return torch.tensor([[0, 0, elements, HEADER_BYTES, elements // 8]])


def _time(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def instruction_set() -> str:
    """Which native kernels are measured."""
    return native.isa()
