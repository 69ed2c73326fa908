"""What the work around an exchange costs on this machine's CPUs: a memcpy for the kernels, and a few exchanges.

Costs are seconds of cores, as the system counts them for a process. They do not depend on what else runs, so ranks that
share cores can be simulated from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from thinwire.optimizers.birder import Birder
from thinwire.planning.costs import Costs

KERNELS_IN_MEMCPYS: Mapping[str, float] = MappingProxyType(
    {
        "copy": 1.0,
        "convert": 0.75,
        "adamw": 1.77,
        "birder encode": 1.61,
        "birder merge": 0.064,
        "birder apply": 0.69,
        "sign encode": 1.14,
        "sign merge": 0.1,
        "sign update": 0.89,
        "sign apply": 1.01,
        "quantize encode": 1.6,
        "quantize merge": 0.35,
        "quantize update": 0.73,
        "quantize decode": 0.68,
        "checksum": 0.145,
    }
)
"""The time of each kernel on a CPU, that of a memcpy of as many fp32 elements = 1 (`thinwire bench kernels`)."""

MESSAGE, PART, EXCHANGE, ALL_REDUCE = 90e-6, 15e-6, 3e-3, 1e-3
"""Seconds of a core on the machine of docs/benchmarks: per message and side, parameter, exchange, all-reduce."""
BYTE, ALL_REDUCE_BYTE = 0.35e-9, 0.85e-9
MEMCPY = 0.41e-9
"""Seconds per fp32 element on the machine of docs/benchmarks: 10.2 ms for 25 M elements."""

_ELEMENTS = 1 << 22
_REPEATS = 10
_BUCKETS = 8
_MESSAGE_BYTES_PART = 0.4
"""Of what a byte costs in an all-reduce, which also adds: sending it, or receiving it."""


def benchmarked_costs() -> Costs:
    """Costs of the machine of docs/benchmarks."""
    kernels = {name: memcpys * MEMCPY for name, memcpys in KERNELS_IN_MEMCPYS.items()}
    return Costs("the machine of docs/benchmarks", kernels, message=MESSAGE, exchange=EXCHANGE)


def quick_costs() -> Costs:
    """Costs of this machine from a memcpy, with those of messages from the machine of docs/benchmarks."""
    return Costs(
        "a memcpy on this machine; messages as on the machine of docs/benchmarks",
        _kernels(),
        message=MESSAGE,
        byte=BYTE,
        part=PART,
        exchange=EXCHANGE,
        all_reduce=ALL_REDUCE,
        all_reduce_byte=ALL_REDUCE_BYTE,
    )


def measure_costs() -> Costs:
    """Costs of this machine, measured by all ranks of the default process group together.

    The ranks must share one machine, or have equal ones. What they send to each other should not be limited by links.

    Raises:
        ValueError: for a single rank, which sends nothing.
    """
    ranks = dist.get_world_size()
    if ranks < 2:
        raise ValueError(f"world size {ranks}: expected two ranks or more, which send something to each other")
    tiny, large = torch.ones(64), torch.ones(_ELEMENTS // 2)
    call = _core_seconds(lambda: dist.all_reduce(tiny))
    sent = 2 * (ranks - 1) / ranks * 4 * large.numel()
    all_reduce_byte = max(0.0, _core_seconds(lambda: dist.all_reduce(large)) - call) / sent
    one_bucket, many_buckets = (_core_seconds(_exchange(buckets)) for buckets in (1, _BUCKETS))
    # A bucket is sent to and received from every other rank, and so is its answer.
    sides = 4 * (ranks - 1)
    message = max(0.0, many_buckets - one_bucket) / (_BUCKETS - 1) / sides
    # The commit round sends and receives one more.
    exchange = max(0.0, one_bucket - message * sides * 1.5)
    costs = Costs(
        f"measured on this machine by {ranks} ranks",
        _kernels(),
        message=message,
        byte=_MESSAGE_BYTES_PART * all_reduce_byte,
        part=PART,
        exchange=exchange,
        all_reduce=call,
        all_reduce_byte=all_reduce_byte,
    )
    return _mean_over_ranks(costs)


def _kernels() -> dict[str, float]:
    a = torch.ones(_ELEMENTS)
    b = torch.empty_like(a)
    taken: list[float] = []
    for _ in range(_REPEATS):
        began = time.thread_time()
        b.copy_(a)
        taken.append(time.thread_time() - began)
    threads = torch.get_num_threads()
    memcpy = median(taken) / _ELEMENTS
    return {name: memcpys * memcpy * threads for name, memcpys in KERNELS_IN_MEMCPYS.items()}


def _exchange(buckets: int) -> Callable[[], object]:
    """Steps of Birder on a small parameter, in so many buckets of which each is a word per rank."""
    words = dist.get_world_size() * buckets
    p = nn.Parameter(torch.ones(64 * words))
    p.grad = torch.randn(p.numel(), generator=torch.Generator().manual_seed(dist.get_rank()))
    step = Birder([p], topology="flat", bucket_mb=4 * p.numel() / buckets / 2**20).step
    for _ in range(2):  # the first one opens connections
        step()
    return step


def _core_seconds(run: Callable[[], object]) -> float:
    run()
    dist.barrier()
    began = time.process_time()
    for _ in range(_REPEATS):
        run()
    return (time.process_time() - began) / _REPEATS


def _mean_over_ranks(costs: Costs) -> Costs:
    names = ("message", "byte", "exchange", "all_reduce", "all_reduce_byte")
    kernels = list(costs.kernels)
    values = torch.tensor(
        [*(getattr(costs, name) for name in names), *(costs.kernels[kernel] for kernel in kernels)], dtype=torch.float64
    )
    dist.all_reduce(values)
    means = (values / dist.get_world_size()).tolist()
    return replace(
        costs,
        kernels=dict(zip(kernels, means[len(names) :], strict=True)),
        **dict(zip(names, means[: len(names)], strict=True)),
    )
