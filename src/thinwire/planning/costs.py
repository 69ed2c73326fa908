"""What the work around an exchange costs: kernels per element, messages, bytes, calls.

On CPUs these numbers are measured. On GPUs nothing has been measured: they follow from the bytes that a kernel reads
and writes, as in docs/gpu-roofline.md, until `thinwire selftest --device cuda --json` gives measured ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

KERNEL_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "copy": 8.0,
        "convert": 6.0,
        "adamw": 28.0,
        "birder encode": 20.125,
        "birder merge": 0.125,
        "birder apply": 8.125,
        "sign encode": 12.25,
        "sign merge": 0.125,
        "sign update": 8.125,
        "sign apply": 12.125,
        "quantize encode": 12.53,
        "quantize merge": 0.53,
        "quantize update": 8.53,
        "quantize decode": 4.53,
        "checksum": 1.0,
    }
)
"""The kernels of a step, and the bytes of memory that each reads and writes per element (`thinwire bench kernels`).

"merge" is for each element of each packet that an owner receives, "update" for each element that it answers,
"checksum" for each byte of a packet."""

GPUS: Mapping[str, float] = MappingProxyType({"a100": 2039e9, "h100": 3350e9, "v100": 900e9})
"""Bytes per second of device memory, from NVIDIA's data sheets: A100 80GB SXM, H100 SXM, V100 SXM2."""
_ATTAINED = 0.85
"""The assumed part of it that a kernel reaches; see docs/gpu-roofline.md."""
_LAUNCH = 10e-6
"""The time of the host to launch a kernel, at most; see docs/gpu-roofline.md."""
_LAUNCHES_PER_BUCKET = 15
_SUM_SECONDS = 20e-9 / 2048
"""Per element: scales of signs are summed in a fixed order, 20 ns per tile; see docs/gpu-roofline.md."""
_CHECKSUM_SECONDS = 224 / 4 / 9.75e12
"""Per byte: 224 integer instructions for 4 bytes at half the rate of an A100's data sheet; see docs/gpu-roofline.md."""
_NCCL_CALL = 20e-6
"""Assumed for an all-reduce."""
_NCCL_MESSAGE = 5e-6
"""Assumed for each message of an all-to-all, of either side."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a core, or of a GPU.

    Args:
        source: where they come from, in words.
        kernels: per element, by the names of `KERNEL_BYTES`.
        message: of either side for each message.
        byte: of either side for each byte of a message.
        part: for each parameter that is encoded or applied.
        bucket: of each rank for each bucket.
        exchange: of each rank for each exchange.
        all_reduce: of each rank for each all-reduce.
        all_reduce_byte: of each rank for each byte that it sends in an all-reduce, additions included.
        serial: whether a bucket must be complete before the next one is sent: on GPUs, where one stream does all.
    """

    source: str
    kernels: Mapping[str, float]
    message: float = 0.0
    byte: float = 0.0
    part: float = 0.0
    bucket: float = 0.0
    exchange: float = 0.0
    all_reduce: float = 0.0
    all_reduce_byte: float = 0.0
    serial: bool = False

    def __post_init__(self) -> None:
        missing = sorted(set(KERNEL_BYTES) - set(self.kernels))
        if missing:
            raise ValueError(f"kernels has no cost for {missing[0]!r}: expected all of {', '.join(KERNEL_BYTES)}")
        for name, value in {**self.kernels, "message": self.message, "byte": self.byte, "part": self.part}.items():
            if not value >= 0:
                raise ValueError(f"the cost of {name!r} is {value}: expected seconds, zero or more")

    @classmethod
    def nothing(cls) -> Costs:
        """All work is free: what is left is computation and the network."""
        return cls("work that costs nothing", dict.fromkeys(KERNEL_BYTES, 0.0))

    @classmethod
    def of_gpu(cls, name: str) -> Costs:
        """From the memory bandwidth of a GPU.

        Args:
            name: one of `GPUS`.

        Raises:
            ValueError: for another name.
        """
        if name not in GPUS:
            raise ValueError(f"gpu={name!r}: expected one of {', '.join(GPUS)}, or a file of thinwire selftest --json")
        seconds = {kernel: size / (_ATTAINED * GPUS[name]) for kernel, size in KERNEL_BYTES.items()}
        seconds["sign encode"] += _SUM_SECONDS
        seconds["sign update"] += _SUM_SECONDS
        seconds["checksum"] = _CHECKSUM_SECONDS
        return cls(
            f"estimated for a GPU of type {name} from its memory bandwidth (docs/gpu-roofline.md), not measured",
            seconds,
            message=_NCCL_MESSAGE,
            part=_LAUNCH,
            bucket=_LAUNCHES_PER_BUCKET * _LAUNCH,
            all_reduce=_NCCL_CALL,
            serial=True,
        )

    @classmethod
    def of_selftest(cls, text: str) -> Costs:
        """From the JSON of `thinwire selftest --device cuda --json FILE`.

        What it does not time is estimated from the bandwidth of its memcpy.

        Raises:
            ValueError: for any other text.
        """
        try:
            figures = json.loads(text)
            timed = {kernel["name"]: kernel["seconds"] / kernel["elements"] for kernel in figures["kernels"]}
            copy, device = timed["memcpy of fp32"], str(figures["device"])
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            raise ValueError("not a file of `thinwire selftest --json FILE` with its kernels") from None
        seconds = {kernel: size / KERNEL_BYTES["copy"] * copy for kernel, size in KERNEL_BYTES.items()}
        measured = {ours: timed[theirs] for ours, theirs in _SELFTEST_KERNELS.items() if theirs in timed}
        seconds.update(measured)
        on_gpu = cls.of_gpu("a100")
        return replace(on_gpu, source=f"measured on {device} by thinwire selftest", kernels=seconds)


_SELFTEST_KERNELS = {
    "copy": "memcpy of fp32",
    "birder encode": "Birder, encode",
    "birder apply": "Birder, apply",
    "sign encode": "scaled signs, encode",
    "sign apply": "scaled signs, apply",
}
