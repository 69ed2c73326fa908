"""Arguments that all optimizers take beside those of their papers."""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.wire.topology import Choice


class WireOptions(TypedDict, total=False):
    """Who takes part, how packets travel, and what is watched. The optimizers' docstrings tell what each does."""

    process_group: dist.ProcessGroup | None
    topology: Choice
    mesh: DeviceMesh | None
    node_dtype: torch.dtype
    bucket_mb: float | None
    max_consecutive_skips: int | None
    check_replicas_every: int
