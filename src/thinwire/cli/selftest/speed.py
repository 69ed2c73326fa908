"""How fast: kernels against a memcpy on the same device, and training steps against DDP + AdamW in the same ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.cli.bench_exchange import SHAPE, VOCABULARY
from thinwire.cli.charlm import CharTransformer, ModelShape
from thinwire.cli.registry import OPTIMIZERS, Entry
from thinwire.cli.selftest.site import Site
from thinwire.kernels import ops
from thinwire.kernels.modes import MarkovMode, Source
from thinwire.transport.layout import WORD
from thinwire.transport.packet import HEADER_BYTES

SECONDS = 600.0
"""How long either may take."""
MEMCPY = "memcpy of fp32"
_VOTERS = 8
_LAUNCHES = 20
"""Kernels between two events on a GPU, which would otherwise measure how long one takes to start."""
_TIMED = ("birder", "onebit-adam", "zero-one-adam", "cd-adam")
_QUICK_SHAPE = ModelShape(layers=1, width=64, context=32)


# Kernels -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """How fast one is."""

    name: str
    elements: int
    seconds: float
    bytes_per_element: float
    """That it must read and write."""
    memcpy_ratio: float
    """Bytes a second, in units of a memcpy's."""

    @property
    def bytes_per_second(self) -> float:
        """What it reads and writes."""
        return self.elements * self.bytes_per_element / self.seconds


@dataclass(frozen=True)
class _Case:
    name: str
    bytes_per_element: float
    run: Callable[[], object]


def kernels(site: Site) -> list[Kernel]:
    """Measured by rank 0, while the others wait."""
    found = _measure_kernels(site) if site.rank == 0 else []
    dist.barrier()
    return found


def _measure_kernels(site: Site) -> list[Kernel]:
    elements = _elements(site)
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(site.device)
    to = torch.empty_like(gradient)
    cases = [_Case(MEMCPY, 8.0, lambda: to.copy_(gradient))]
    cases += [*_birder_cases(site, gradient), *_sign_cases(site, gradient), *_markov_cases(site, gradient)]
    taken: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range((3 if site.quick else 11) + 1):
        for case in cases:
            seconds = _seconds(site, case.run)
            if turn:  # the first turn compiles kernels and brings pages in
                taken[case.name].append(seconds)
    rates = {case.name: case.bytes_per_element / median(taken[case.name]) for case in cases}
    return [
        Kernel(case.name, elements, median(taken[case.name]), case.bytes_per_element, rates[case.name] / rates[MEMCPY])
        for case in cases
    ]


def _elements(site: Site) -> int:
    if site.quick or ops.backend(site.device).name == "reference":
        return 1 << 18
    return 1 << 23 if site.device.type == "cpu" else 1 << 25  # more than caches hold


def _seconds(site: Site, run: Callable[[], object]) -> float:
    if site.device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_LAUNCHES):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _LAUNCHES


def _run_of(elements: int) -> Tensor:
    return torch.tensor([[0, 0, elements, HEADER_BYTES, elements // 8, 0]])


def _packet(site: Site, elements: int) -> Tensor:
    return torch.zeros(HEADER_BYTES + elements // 8, dtype=torch.uint8, device=site.device)


def _rows(site: Site, elements: int) -> Tensor:
    shape = (_VOTERS, HEADER_BYTES + elements // 8)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=site.device)


def _birder_cases(site: Site, gradient: Tensor) -> list[_Case]:
    table, elements = site.kernels(), gradient.numel()
    runs, packet, rows = _run_of(elements), _packet(site, elements), _rows(site, elements)
    m, b, x = (torch.zeros_like(gradient) for _ in range(3))
    active = torch.full((elements // WORD,), -1, dtype=torch.int64, device=site.device)
    signal = torch.zeros(2, dtype=torch.int64, device=site.device)

    def encode() -> None:
        rule = {"beta": 0.8, "eps": 1e-12, "scale": 1.0, "amsgrad": False, "key": 1}
        table.birder_encode(runs, gradient, m, b, active, packet, **rule)

    at = {"first_word": 0, "words": elements // WORD, "answer": packet, "answer_byte": HEADER_BYTES, "signal": signal}

    def vote() -> None:
        table.vote_bit(rows, HEADER_BYTES, active, **at, key=2)

    def majority() -> None:
        table.vote_majority(rows, HEADER_BYTES, active, **at, casting=2)

    def apply() -> None:
        table.birder_apply(runs, x, None, active, packet, planes=1, workers=0, lr=1e-3, decay=0.9999)

    return [
        _Case("Birder, encode", 20.125, encode),
        _Case(f"Birder, vote of {_VOTERS}", (_VOTERS + 1) / 8, vote),
        _Case(f"Birder, majority of {_VOTERS}", (_VOTERS + 1) / 8, majority),
        _Case("Birder, apply", 8.125, apply),
    ]


def _sign_cases(site: Site, gradient: Tensor) -> list[_Case]:
    table, elements = site.kernels(), gradient.numel()
    runs, packet, rows = _run_of(elements), _packet(site, elements), _rows(site, elements)
    c, y, x = (torch.zeros_like(gradient) for _ in range(3))
    p = torch.ones_like(gradient)
    heard = torch.zeros(elements // WORD, dtype=torch.int64, device=site.device)
    scales, row_scales = torch.ones(1, device=site.device), torch.ones(_VOTERS, 1, device=site.device)
    sums = torch.zeros(1, 1, dtype=torch.float64, device=site.device)

    def encode() -> None:
        known = {"sent_scales": scales, "answer_scales": scales, "sums": sums}
        table.sign_encode(runs, gradient, c, heard, packet, **known, beta=0.9, weight=0.1, scale=1.0, shift=0)

    def merge() -> None:
        table.sign_merge(runs, rows, y, packet, scales=row_scales, last_scales=scales, sums=sums, shift=0)

    def apply() -> None:
        step = {"rate": 1e-3, "decay": 0.9999, "anchor": None, "m": None, "momentum": 0.0}
        table.sign_apply(runs, x, None, p, heard, scales, **step)

    return [
        _Case("scaled signs, encode", 12.25, encode),
        _Case(f"scaled signs, merge of {_VOTERS}", 8 + (_VOTERS + 1) / 8, merge),
        _Case("scaled signs, apply", 12.125, apply),
    ]


def _markov_cases(site: Site, gradient: Tensor) -> list[_Case]:
    table, elements = site.kernels(), gradient.numel()
    runs, packet = _run_of(elements), _packet(site, elements)
    known, followed, x, m, v, peak = (torch.zeros_like(gradient) for _ in range(6))
    said = torch.zeros(elements // WORD, dtype=torch.int64, device=site.device)
    busy = torch.zeros(elements // WORD, dtype=torch.uint8, device=site.device)
    active = torch.full_like(said, -1)
    scales, sums = torch.ones(1, device=site.device), torch.zeros(1, 3, dtype=torch.float64, device=site.device)

    def encode() -> None:
        rule = {"beta": 0.9, "weight": 0.1, "scale": 1.0, "shift": 0, "mode": MarkovMode.ORDINARY}
        words = (said, busy, active, active)
        table.markov_encode(runs, gradient, None, known, *words, packet, sent_scales=scales, sums=sums, **rule)

    def apply() -> None:
        step = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "rate": 1e-3, "correction": 1.0, "decay": 0.9999}
        states = (followed, m, v, peak)
        table.amsgrad_apply(runs, x, None, *states, packet, scales, active, **step, source=Source.SIGNS)

    return [_Case("CD-Adam, encode", 12.625, encode), _Case("CD-Adam, AMSGrad apply", 40.25, apply)]


# Steps ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Training steps of one optimizer, and of DDP + AdamW in turns with them."""

    label: str
    parameters: int
    per_second: float
    adamw_per_second: float

    @property
    def ratio(self) -> float:
        """How many times AdamW's."""
        return self.per_second / self.adamw_per_second


def steps(site: Site) -> list[Steps]:
    """Measured by all ranks together."""
    names = _TIMED[:1] if site.quick else _TIMED
    return [_time_steps(site, OPTIMIZERS[name]) for name in names]


def _time_steps(site: Site, entry: Entry) -> Steps:
    shape = _QUICK_SHAPE if site.quick else SHAPE
    torch.manual_seed(0)
    nets = [CharTransformer(VOCABULARY, shape).to(site.device) for _ in range(2)]
    ours, theirs = (DistributedDataParallel(net, **site.ddp_options(site.device, site.group)) for net in nets)
    where = {"topology": "flat", "process_group": site.group}
    optimizer = entry.build(ours.parameters(), {**where, **entry.measured()})
    thinwire.attach(ours, optimizer)
    adamw = torch.optim.AdamW(theirs.parameters(), fused=True)
    batch = 2 if site.device.type == "cpu" else 32
    windows = torch.randint(VOCABULARY, (batch, shape.context + 1)).to(site.device)

    def train(model: nn.Module, by: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(windows[:, :-1], windows[:, 1:]).backward()
            by.step()
            by.zero_grad()

    count = 1 if site.device.type == "cpu" else 10
    train(ours, optimizer, entry.stages.settling_steps)
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range((3 if site.quick else 10) + 1):
        for side, trained in enumerate(((ours, optimizer), (theirs, adamw))):
            dist.barrier()
            began = time.perf_counter()
            train(*trained, count)
            site.finish()
            dist.barrier()  # steps are over when the slowest rank is through with them
            if turn:
                taken[side].append((time.perf_counter() - began) / count)
    parameters = sum(p.numel() for p in ours.parameters())
    return Steps(entry.label + entry.stages.measured_name, parameters, *(1 / median(seconds) for seconds in taken))
