"""The methods that are compared: how each is set up on a DDP model, and what it has to send.

Thinwire's optimizers come from the registry, and its compressors from the table of averagings.
"""

# No `from __future__ import annotations` here: DDP inspects the annotations of its hooks and wants types, not strings.
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire._torch_compat import set_gradient_synchronization
from thinwire.cli.averagings import AVERAGINGS, Averaging
from thinwire.cli.local_runs import LOCAL_RUNS, LocalRun
from thinwire.cli.registry import OPTIMIZERS, Bits, Prepared, offered
from thinwire.cli.stages import LOCAL_CYCLE, MOSTLY_LOCAL

POWERSGD_RANK = 1
# torch's smallest: the hook averages densely in the steps before. Warm-up has more steps than that.
POWERSGD_BEGINS_AT = 2
SMALLEST_BUCKET_MB, LARGEST_BUCKET_MB = 1e-3, 1e6


@dataclass(frozen=True)
class Cluster:
    """So many hosts with so many ranks each; only what leaves a host is slow."""

    hosts: int
    ranks: int

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks


Shapes = Sequence[torch.Size]
"""Of all parameters of a model."""
Prepare = Callable[[DistributedDataParallel], Prepared]
Theory = Callable[[Cluster, Shapes], float]


def _nothing_in_the_way(_: Cluster) -> str | None:
    return None


@dataclass(frozen=True)
class Method:
    """One way to train."""

    description: str
    prepare: Prepare
    """Make the optimizer of a fresh DDP model, and register what replaces DDP's averaging."""
    theory: Theory
    """Bytes that must leave a host in a step, without headers of any kind."""
    obstacle: Callable[[Cluster], str | None] = _nothing_in_the_way
    """Why it makes no sense here, if so."""
    cycle: int = 1
    """Steps after which the same kinds of steps come again: only whole cycles can be compared."""
    ours: bool = False
    """Whether it is one of thinwire's."""


def method_named(name: str) -> Method:
    """A row of `METHODS`, or Birder with buckets of a size of one's own, as `with_buckets` names it.

    Raises:
        KeyError: for any other name.
    """
    size = bucket_size(name)
    return METHODS[name] if size is None else _thinwire("birder", f"flat, bucket_mb={size:g}", bucket_mb=size)


def with_buckets(megabytes: float) -> str:
    """The name of Birder with buckets of this size."""
    return f"birder@{megabytes:g}MB"


def bucket_size(name: str) -> float | None:
    """What `with_buckets` made a name of; None for any other name."""
    sized = re.fullmatch(r"birder@([0-9.e+-]+)MB", name)
    if sized is None:
        return None
    try:
        size = float(sized[1])
    except ValueError:
        return None
    return size if SMALLEST_BUCKET_MB <= size <= LARGEST_BUCKET_MB and with_buckets(size) == name else None


def is_method(name: str) -> bool:
    """Whether `method_named` knows the name."""
    return name in METHODS or bucket_size(name) is not None


def obstacle(name: str, cluster: Cluster) -> str | None:
    """Why a method is not measured on this cluster, if so."""
    return CANNOT_RUN[name]() if name in CANNOT_RUN else method_named(name).obstacle(cluster)


# What DDP is told -----------------------------------------------------------------------------------------------------


def _adamw(model: DistributedDataParallel) -> Prepared:
    return Prepared(torch.optim.AdamW(model.parameters(), fused=True), metrics=None)


def _keep_local(_: object, bucket: GradBucket) -> Future[Tensor]:
    kept: Future[Tensor] = Future()
    kept.set_result(bucket.buffer())
    return kept


def _average_bf16(_: object, bucket: GradBucket) -> Future[Tensor]:
    # torch's bf16_compress_hook does the same, but refuses gloo, whose all_reduce adds bf16 well.
    gradients = bucket.buffer()
    narrow = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None, "every rank is a member of the default group"

    def widen(_: Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(narrow)

    return work.get_future().then(widen)


def _with_hook(hook: Callable[[Any, GradBucket], Future[Tensor]], state: Callable[[], Any]) -> Prepare:
    def prepare(model: DistributedDataParallel) -> Prepared:
        model.register_comm_hook(state(), hook)
        return _adamw(model)

    return prepare


def _powersgd_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_BEGINS_AT
    )


# What has to be sent --------------------------------------------------------------------------------------------------


def _elements(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes)


def _ring(cluster: Cluster, size: float) -> float:
    """All-reduce around a ring whose order is that of the hosts: of every host one rank sends to another host."""
    return 2 * (cluster.world - 1) / cluster.world * size if cluster.hosts > 1 else 0.0


def _dense(element_size: int) -> Theory:
    return lambda cluster, shapes: _ring(cluster, element_size * _elements(shapes))


def _low_rank(rank: int, least_saving: int) -> Theory:
    """PowerSGD sends two thin matrices for a tensor, unless that saves no more than a factor of `least_saving`."""

    def theory(cluster: Cluster, shapes: Shapes) -> float:
        sent = 0
        for shape in shapes:
            rows = shape[0] if shape else 1
            columns = shape.numel() // rows
            thin = (rows + columns) * min(rows, columns, rank)
            sent += thin if len(shape) > 1 and least_saving * thin < shape.numel() else shape.numel()
        return _ring(cluster, 4 * sent)

    return theory


def _between_ranks(bits: Bits) -> Theory:
    """Every rank sends to the owners of shards, and as an owner its answer to every rank."""

    def theory(cluster: Cluster, shapes: Shapes) -> float:
        on_other_hosts = (cluster.world - cluster.ranks) / cluster.world
        return cluster.ranks * on_other_hosts * (bits.up + bits.down(cluster.world)) * _elements(shapes) / 8

    return theory


def _between_hosts(cluster: Cluster, shapes: Shapes) -> float:
    """Hosts vote, not ranks: what leaves a host no longer grows with its ranks."""
    return 2 * (cluster.hosts - 1) / cluster.hosts * _elements(shapes) / 8


# The rows -------------------------------------------------------------------------------------------------------------


def _thinwire(
    name: str,
    described_as: str,
    *,
    settings: Mapping[str, Any] | None = None,
    overlap: bool = True,
    theory: Theory | None = None,
    obstacle: Callable[[Cluster], str | None] = _nothing_in_the_way,
    cycle: int = 1,
    **options: Any,
) -> Method:
    """An optimizer of the registry, with `settings` instead of those of its measured stage, and other options added."""
    entry = OPTIMIZERS[name]
    arguments = {"topology": "flat", **(entry.measured() if settings is None else settings), **options}

    def prepare(model: DistributedDataParallel) -> Prepared:
        return entry.prepare(model, arguments, overlap=overlap)

    description = f"DDP + thinwire.{entry.optimizer.__name__}, {described_as}"
    return Method(description, prepare, theory or _between_ranks(entry.bits), obstacle, cycle, ours=True)


def _compressed(entry: Averaging) -> Method:
    """AdamW with `thinwire.compress`."""

    def prepare(model: DistributedDataParallel) -> Prepared:
        return entry.prepare(model, entry.measured(), topology="flat")

    def theory(cluster: Cluster, shapes: Shapes) -> float:
        bits = entry.bits(cluster.world)
        if bits is None:  # only PowerSGD's bytes depend on shapes
            return _low_rank(entry.options["rank"], least_saving=1)(cluster, shapes)
        up, down = bits
        return _between_ranks(Bits(up, lambda workers: down))(cluster, shapes)

    options = {**entry.options, **({"delay": entry.delay} if entry.delay else {})}
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    description = f'DDP with thinwire.compress(model, "{entry.compressor}"{arguments}) + fused AdamW, flat'
    return Method(description, prepare, theory, ours=True)


def _local_steps(entry: LocalRun) -> Method:
    """AdamW in local steps."""

    def prepare(model: DistributedDataParallel) -> Prepared:
        set_gradient_synchronization(model, enabled=False)  # as under no_sync()
        return entry.prepare(model, {})

    def theory(cluster: Cluster, shapes: Shapes) -> float:
        up, down = entry.bits(cluster.world)
        return _between_ranks(Bits(up, lambda workers: down))(cluster, shapes)

    description = (
        f'thinwire.LocalSteps.from_profile("{entry.profile}", fused AdamW, every={entry.every}), flat; means over '
        f"{entry.every} steps"
    )
    return Method(description, prepare, theory, cycle=entry.every, ours=True)


def _needs_several_ranks_a_host(cluster: Cluster) -> str | None:
    return "one rank per host: the same as flat" if cluster.ranks == 1 else None


def _no_onebit_adam() -> str:
    """Tried with deepspeed 0.19.6, the last release that has it: none of its backends works without an accelerator."""
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "deepspeed is not installed: pip install 'thinwire[bench]'"
    return (
        f"deepspeed {version} has no 1-bit backend for CPU and gloo: 'nccl' and 'mpi' import cupy, 'hccl' is for "
        "Ascend, and 'compressed' raises \"This op had not been implemented on CPU backend.\""
    )


_VARIANTS: dict[str, dict[str, Method]] = {
    "birder": {
        "birder-no-overlap": _thinwire("birder", "flat, exchanged in step() instead of during backward", overlap=False),
    },
    "birder-votes": {
        "birder-hierarchical": _thinwire(
            "birder",
            "hierarchical: hosts vote",
            theory=_between_hosts,
            obstacle=_needs_several_ranks_a_host,
            topology="hierarchical",
        ),
    },
    "onebit-adam": {
        "onebit-adam-warmup": _thinwire(
            "onebit-adam",
            "flat, in its warm-up: floats",
            settings={"warmup_steps": "auto", "warmup_bits": None},
            theory=_between_ranks(Bits.each_way(32)),
        ),
    },
    "onebit-adam-4bit": {
        "onebit-adam-4bit-warmup": _thinwire(
            "onebit-adam-4bit",
            "flat, in its warm-up: 4-bit gradients, and a scale of 16 bits per 64 of them",
            settings={"warmup_steps": "auto"},
            theory=_between_ranks(Bits.each_way(4 + 16 / 64)),
        ),
    },
    "zero-one-adam": {
        "zero-one-adam-local": _thinwire(
            "zero-one-adam",
            f"flat, synchronising at every {LOCAL_CYCLE}th step; means over {LOCAL_CYCLE} steps",
            settings=MOSTLY_LOCAL,
            theory=_between_ranks(Bits.each_way(1 / LOCAL_CYCLE)),
            cycle=LOCAL_CYCLE,
        ),
    },
}
"""Optimizers of the registry with other options, by the entry that they follow in lists."""


def _registered() -> dict[str, Method]:
    found: dict[str, Method] = {}
    for name, entry in offered("bench step").items():
        found[name] = _thinwire(name, entry.measured_as)
        found |= _VARIANTS.get(name, {})
    return found


METHODS: dict[str, Method] = {
    "ddp-adamw": Method("DDP averaging in fp32 + fused AdamW", _adamw, _dense(4)),
    "ddp-bf16": Method("DDP averaging in bf16 + fused AdamW", _with_hook(_average_bf16, state=lambda: None), _dense(2)),
    "powersgd": Method(
        f"DDP with torch's PowerSGD hook of rank {POWERSGD_RANK} + fused AdamW",
        _with_hook(powerSGD_hook.powerSGD_hook, _powersgd_state),
        _low_rank(POWERSGD_RANK, least_saving=2),  # the hook's min_compression_rate
    ),
    **_registered(),
    **{name: _compressed(entry) for name, entry in AVERAGINGS.items()},
    **{name: _local_steps(entry) for name, entry in LOCAL_RUNS.items() if entry.measured},
    "local": Method(
        "DDP with a hook that sends nothing + fused AdamW: the limit",
        _with_hook(_keep_local, state=lambda: None),
        lambda cluster, shapes: 0.0,
    ),
}

CANNOT_RUN: dict[str, Callable[[], str]] = {"deepspeed-1bit-adam": _no_onebit_adam}
"""Methods that a reader will look for, and why there is no figure for them."""
