"""The ways to train that a plan compares: what each sends, what it computes for that, what it keeps, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Exchange = Literal["nothing", "all-reduce", "owners"]

_INT4_BITS, _INT8_BITS = 4.25, 8.25
"""Per value, with the scale of each block of 64."""
WARM_UP = 0.15
"""The part of a run that 1-bit Adam's warm-up takes, in the convergence study too."""


def _all(buckets: int) -> int:
    return buckets


def _three_quarters(buckets: int) -> int:
    return max(1, 3 * buckets // 4)


@dataclass(frozen=True)
class LossCost:
    """What the convergence study measured, against a tuned AdamW with as many steps (docs/convergence.md)."""

    text: str
    """Loss of the character transformer, in per cent."""
    pictures: str
    """Accuracy of the convolutional net, in points."""
    link: str = "docs/convergence.md"


@dataclass(frozen=True)
class Method:
    """One way to train. Kernels are names of `thinwire.planning.costs.KERNEL_BYTES`."""

    name: str
    title: str
    lines: str
    """What to change in a script that uses DDP and AdamW."""
    exchange: Exchange
    up_bits: float
    """Per parameter, to the owners of shards; of an all-reduce, of each element."""
    down_bits: float
    encode: tuple[str, ...] = ()
    """Kernels over all elements, on the training thread, while backward runs."""
    merge: str | None = None
    """The kernel for each element of each packet that an owner receives."""
    update: str | None = None
    """The kernel for each element that an owner answers."""
    apply: tuple[str, ...] = ()
    """Kernels over all elements, after the exchange."""
    buckets: int = 4
    """About how many thinwire makes."""
    window: Callable[[int], int] = _all
    """How many of so many buckets an owner can receive at the same time."""
    state_bytes: float = 8.0
    """Per parameter, beyond parameters and gradients."""
    every: int = 1
    """Steps from one exchange to the next."""
    overlaps: bool = True
    """Whether gradients are sent while backward runs."""
    dense_part: float = 0.0
    """The part of a run that sends dense gradients first."""
    loss: LossCost | None = None
    """None for the method that the others are compared with, or that has not been studied."""
    note: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is one of thinwire's."""
        return self.exchange == "owners"

    def bytes_per_step(self, elements: int, hosts: int, ranks_per_host: int, *, flat: bool = False) -> float:
        """Payload that leaves a host in a step, as a mean over steps of both kinds, without headers.

        Args:
            elements: the number of parameters.
            hosts: the number of hosts.
            ranks_per_host: the number of ranks on each.
            flat: whether every rank is a worker. Otherwise every host is one.
        """
        if hosts == 1:
            return 0.0
        world = hosts * ranks_per_host
        ring = 2 * (world - 1) / world * elements / 8
        if self.exchange == "all-reduce":
            return ring * self.up_bits / self.every
        if self.exchange == "nothing":
            return 0.0
        senders, workers, own = (ranks_per_host, world, ranks_per_host) if flat else (1, hosts, 1)
        sent = senders * (workers - own) / workers * (self.up_bits + self.down_bits) * elements / 8
        return (1 - self.dense_part) * sent / self.every + self.dense_part * ring * 32


def _attach(optimizer: str, arguments: str = "lr=1e-3, weight_decay=0.1") -> str:
    return f"opt = thinwire.{optimizer}(model.parameters(), {arguments}); thinwire.attach(model, opt)"


BASELINE = "ddp"
LOCAL_INTERVAL = 4
"""Of 0/1 Adam after its first steps, as in the convergence study."""

_SIGNS = {"encode": ("sign encode",), "merge": "sign merge", "update": "sign update", "apply": ("sign apply",)}

_METHODS = (
    Method(
        "ddp", "DDP fp32", "", "all-reduce", 32, 32, encode=("copy",), apply=("copy", "adamw"),
        note="what the others are compared with",
    ),
    Method(
        "ddp-bf16", "DDP bf16", "model.register_comm_hook(None, bf16_compress_hook)", "all-reduce", 16, 16,
        encode=("copy", "convert"), apply=("convert", "copy", "adamw"),
        note="torch's bf16_compress_hook, which needs NCCL",
    ),
    Method(
        "int8", "compress int8", 'thinwire.compress(model, "int8")', "owners", _INT8_BITS, _INT8_BITS,
        encode=("copy", "quantize encode"), merge="quantize merge", update="quantize update",
        apply=("quantize decode", "copy", "adamw"), buckets=8, window=_three_quarters, state_bytes=15.0,
        loss=LossCost("+0.0 %", "+0.03 points"),
    ),
    Method(
        "int4", "compress int4", 'thinwire.compress(model, "int4")', "owners", _INT4_BITS, _INT4_BITS,
        encode=("copy", "quantize encode"), merge="quantize merge", update="quantize update",
        apply=("quantize decode", "copy", "adamw"), buckets=8, window=_three_quarters, state_bytes=14.0,
        loss=LossCost("+0.2 %", "+0.08 points"),
    ),
    Method(
        "birder", "Birder", _attach("Birder"), "owners", 1, 1,
        encode=("birder encode",), merge="birder merge", apply=("birder apply",), state_bytes=8.5,
        loss=LossCost("+1.7 %", "-0.08 points"), note="half of AdamW's learning rate",
    ),
    Method(
        "onebit-adam", "1-bit Adam",
        _attach("OneBitAdam", 'lr=1e-3, warmup_steps="auto", warmup_bits=None, scale_block=None'), "owners", 1, 1,
        **_SIGNS, state_bytes=13.0, dense_part=WARM_UP, loss=LossCost("+0.3 %", "-0.11 points"),
        note=f"with a dense warm-up of {WARM_UP:.0%} of the run",
    ),
    Method(
        "zero-one-adam", "0/1 Adam", _attach("ZeroOneAdam", f"lr=1e-3, local_step_clipper={LOCAL_INTERVAL}"),
        "owners", 1, 1, **_SIGNS, state_bytes=18.5, every=LOCAL_INTERVAL, loss=LossCost("+1.8 %", "-1.17 points"),
        note=f"when it synchronizes in every {LOCAL_INTERVAL}th step, as in the study",
    ),
)  # fmt: skip


def local_steps(every: int) -> Method:
    """Local AdamW steps with an int4 exchange of what changed, after `every` of them.

    Raises:
        ValueError: for less than one step.
    """
    if every < 1:
        raise ValueError(f"every={every}: expected the steps from one exchange to the next, 1 or more")
    return Method(
        f"local-{every}", f"local steps, H={every}",
        f'opt = thinwire.LocalSteps(opt, every={every}, compressor="int4")',
        "owners", _INT4_BITS, _INT4_BITS, encode=("copy", "quantize encode"), merge="quantize merge",
        update="quantize update", apply=("quantize decode", "copy"), buckets=8, window=_three_quarters,
        state_bytes=22.0, every=every, overlaps=False,
        note="int4 outer updates; its loss depends on H and has not been studied here",
    )  # fmt: skip


METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})
"""All methods by name, without local steps."""

NOTHING_SENT = Method("local", "no network", "", "nothing", 0, 0, encode=("copy",), apply=("copy", "adamw"))
"""DDP + AdamW that sends nothing: the limit."""

DENSE = replace(METHODS["ddp"], name="dense", exchange="owners", window=lambda buckets: 1, buckets=4)
"""Gradients in fp32 through the owners: 1-bit Adam's warm-up."""


def without_exchange(method: Method) -> Method:
    """The steps of a method between two exchanges: local steps of the optimizer that it uses."""
    return replace(NOTHING_SENT, name=f"{method.name}, local step", encode=(), apply=("adamw",))
