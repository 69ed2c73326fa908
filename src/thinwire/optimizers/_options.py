"""Arguments that all optimizers take beside those of their papers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack  # which torch depends on; typing has it from Python 3.11 on

from thinwire.transport.topology import Choice

__all__ = ["Unpack", "WireOptions", "spelled_out"]


class WireOptions(TypedDict, total=False):
    """Who takes part, how packets travel, and what is watched. The optimizers' docstrings tell what each does."""

    process_group: dist.ProcessGroup | None
    topology: Choice
    mesh: DeviceMesh | None
    node_dtype: torch.dtype
    bucket_mb: float | None
    max_consecutive_skips: int | None
    check_replicas_every: int


def spelled_out(constructor: Callable[..., None], base: Callable[..., None]) -> inspect.Signature:
    """The signature of a constructor with `**wire`, for people and tools to read: the options as `base` has them."""
    own, options = inspect.signature(constructor), inspect.signature(base).parameters
    named = [p for p in own.parameters.values() if p.name not in ("self", "wire")]
    spelled = [options[name] for name in WireOptions.__annotations__] if "wire" in own.parameters else []
    return own.replace(parameters=[*named, *spelled])
