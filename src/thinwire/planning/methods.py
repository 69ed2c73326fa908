"""The ways to train that a plan compares: what each sends, what it computes for that, what it keeps, what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from thinwire.optimizers.local_steps import local_interval, variance_steps

Exchange = Literal["nothing", "all-reduce", "owners"]

_INT4_BITS, _INT8_BITS = 4.25, 8.25
"""Per value, with the scale of each block of 64."""
_SIGN_BITS = 1 + 32 / 4096
"""Per value, with the scale of each block of 4,096."""
RUN_STEPS = 10_000
"""The length of the run that the lines to paste are for, where arguments depend on it."""


def _all(buckets: int) -> int:
    return buckets


def _three_quarters(buckets: int) -> int:
    return -(-3 * buckets // 4)


@dataclass(frozen=True)
class LossCost:
    """What the convergence study measured, against a tuned AdamW with as many steps (docs/convergence.md)."""

    text: str
    """Loss of the character transformer, in per cent."""
    pictures: str
    """Accuracy of the convolutional net, in points."""
    deviations: float
    """How far it ended behind AdamW in the task where it was furthest behind, in AdamW's standard deviations."""
    link: str = "docs/convergence.md"

    @property
    def none(self) -> bool:
        """Whether it ended where AdamW ended, within a standard deviation, in every task."""
        return self.deviations <= 1


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
    bucket_mb: float | None = None
    """Their size instead, as the argument of the optimizers."""
    window: Callable[[int], int] = _all
    """How many of so many buckets an owner can receive at the same time."""
    state_bytes: float = 8.0
    """Per parameter, beyond parameters and gradients."""
    overlaps: bool = True
    """Whether gradients are sent while backward runs."""
    others: tuple[tuple[float, Method], ...] = ()
    """Steps that are not like this: each kind with the part of a run that it takes. The rest is as described here."""
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
        own_part = 1 - sum(part for part, _ in self.others)
        sent = own_part * self._bytes_of_exchange(elements, hosts, ranks_per_host, flat=flat)
        return sent + sum(
            part * other.bytes_per_step(elements, hosts, ranks_per_host, flat=flat) for part, other in self.others
        )

    def _bytes_of_exchange(self, elements: int, hosts: int, ranks_per_host: int, *, flat: bool) -> float:
        world = hosts * ranks_per_host
        if self.exchange == "nothing":
            return 0.0
        if self.exchange == "all-reduce":
            return 2 * (world - 1) / world * self.up_bits * elements / 8
        senders, workers, own = (ranks_per_host, world, ranks_per_host) if flat else (1, hosts, 1)
        return senders * (workers - own) / workers * (self.up_bits + self.down_bits) * elements / 8


def _attached(optimizer: str, arguments: str) -> str:
    return f"opt = thinwire.{optimizer}(model.parameters(), {arguments})\nthinwire.attach(model, opt)"


BASELINE = "ddp"
LOCAL_INTERVAL = 4
"""Steps from one exchange to the next in 0/1 Adam, at the end of a run."""
RECOMMENDED_INTERVAL = 30
"""The same of `thinwire.LocalSteps`, by default."""
_TENTH = RUN_STEPS // 10
_QUANTISED_PART = 0.3

_DDP = Method(
    "ddp", "DDP fp32", "", "all-reduce", 32, 32, encode=("copy",), apply=("copy", "adamw"),
    note="what the others are compared with",
)  # fmt: skip
NOTHING_SENT = Method("local", "no network", "", "nothing", 0, 0, encode=("copy",), apply=("copy", "adamw"))
"""DDP + AdamW that sends nothing: the limit."""
_LOCAL_STEP = replace(NOTHING_SENT, name="local step", encode=(), apply=("adamw",))
DENSE_WARM_UP = replace(_DDP, name="dense warm-up", exchange="owners", window=lambda buckets: 1)
"""Gradients in fp32 through the owners: variance steps of 0/1 Adam, and the paper's warm-up of 1-bit Adam."""
_QUANTISED = {"merge": "quantize merge", "update": "quantize update", "window": _three_quarters}
_QUANTISED_WARM_UP = Method(
    "4-bit warm-up", "4-bit warm-up", "", "owners", _INT4_BITS, _INT4_BITS, encode=("quantize encode",),
    apply=("quantize decode", "adamw"), **_QUANTISED,
)  # fmt: skip
_SIGNS = {"encode": ("sign encode",), "merge": "sign merge", "update": "sign update", "apply": ("sign apply",)}


def _zero_one_others() -> tuple[tuple[float, Method], ...]:
    """The steps of 0/1 Adam that send floats, and those that send nothing, with their parts of the run."""
    dense = len(variance_steps(_UPDATES_IN_A_ROW, _TENTH))
    after = RUN_STEPS - _TENTH
    synchronizing = sum(step % local_interval(step, _TENTH, LOCAL_INTERVAL) == 0 for step in range(1, after + 1))
    return (dense / RUN_STEPS, DENSE_WARM_UP), ((after - synchronizing) / RUN_STEPS, _LOCAL_STEP)


_UPDATES_IN_A_ROW = 16
"""Of the variance in 0/1 Adam, by default: `var_update_scaler`."""

_METHODS = (
    _DDP,
    Method(
        "ddp-bf16", "DDP bf16", "model.register_comm_hook(None, bf16_compress_hook)", "all-reduce", 16, 16,
        encode=("copy", "convert"), apply=("convert", "copy", "adamw"),
        note="torch's bf16_compress_hook, which needs NCCL",
    ),
    Method(
        "int8", "compress int8", 'thinwire.compress(model, "int8")', "owners", _INT8_BITS, _INT8_BITS,
        encode=("copy", "quantize encode"), apply=("quantize decode", "copy", "adamw"), buckets=8, **_QUANTISED,
        state_bytes=15.0, loss=LossCost("+0.0 %", "+0.03 points", 0.0),
    ),
    Method(
        "int4", "compress int4", 'thinwire.compress(model, "int4")', "owners", _INT4_BITS, _INT4_BITS,
        encode=("copy", "quantize encode"), apply=("quantize decode", "copy", "adamw"), buckets=8, **_QUANTISED,
        state_bytes=14.0, loss=LossCost("+0.2 %", "+0.08 points", 0.3),
    ),
    Method(
        "onebit-adam", "1-bit Adam",
        _attached("OneBitAdam", "lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=3000"),
        "owners", _SIGN_BITS, _SIGN_BITS, **_SIGNS, state_bytes=15.0, others=((_QUANTISED_PART, _QUANTISED_WARM_UP),),
        loss=LossCost("-0.1 %", "+0.01 points", 0.0),
        note=f"the mean over a run with 4 bits for {_QUANTISED_PART:.0%} of it, then 1 bit. warmup_steps is "
        f"{_QUANTISED_PART:.0%} of your run, all other settings are AdamW's",
    ),
    Method(
        "birder", "Birder", _attached("Birder", "lr=1e-3, weight_decay=0.1"), "owners", 1, 1,
        encode=("birder encode",), merge="birder merge", apply=("birder apply",), state_bytes=8.5,
        loss=LossCost("+1.7 %", "-0.08 points", 2.6), note="half of AdamW's learning rate",
    ),
    Method(
        "zero-one-adam", "0/1 Adam",
        _attached(
            "ZeroOneAdam",
            f"lr=1e-3, var_freeze_step={_TENTH}, local_step_scaler={_TENTH}, local_step_clipper={LOCAL_INTERVAL}",
        ),
        "owners", _SIGN_BITS, _SIGN_BITS, **_SIGNS, state_bytes=18.5, others=_zero_one_others(),
        loss=LossCost("+1.8 %", "-1.17 points", 2.8),
        note=f"the mean over a run of {RUN_STEPS:,} steps that sends in every {LOCAL_INTERVAL}th step at its end",
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
        "inner = torch.optim.AdamW(net.parameters(), lr=4e-4)\n"
        f'opt = thinwire.LocalSteps(inner, every={every}, compressor="int4")',
        "owners", _INT4_BITS, _INT4_BITS,
        # The inner step, then how far parameters have moved. The outer step has the traffic of another AdamW step.
        encode=("adamw", "copy", "quantize encode"), apply=("quantize decode", "adamw", "copy"), buckets=8,
        **_QUANTISED, state_bytes=26.0, others=((1 - 1 / every, _LOCAL_STEP),), overlaps=False,
        note="int4 outer updates of a module that is not in DDP; the loss depends on H",
    )  # fmt: skip


METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _METHODS})
"""All methods by name, without local steps."""
