"""Where a law is tested: one rank's view of its device and of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from thinwire.kernels import ops
from thinwire.kernels.header import STATUS_WORDS
from thinwire.kernels.modes import Gate
from thinwire.kernels.ops import Kernels

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What carries the bytes of each kind of device that can be tested."""


@dataclass(frozen=True)
class Site:
    """What is the same for all that is tested in a rank."""

    device: torch.device
    group: dist.ProcessGroup
    """Of all ranks, by the backend that is tested. Ranks exchange their findings over gloo."""
    quick: bool = False

    @classmethod
    def here(cls, device_type: str, *, quick: bool) -> Site:
        """That of this rank, whose default group is one of gloo."""
        world = dist.group.WORLD
        assert world is not None, "there is a default group"
        if device_type == "cpu":
            return cls(CPU, world, quick)
        device = torch.device(device_type, dist.get_rank())
        torch.cuda.set_device(device)
        group = dist.new_group(backend=BACKENDS[device_type])
        assert isinstance(group, dist.ProcessGroup), "all ranks are members of it"
        return cls(device, group, quick)

    @property
    def rank(self) -> int:
        """This one."""
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def kernels(self) -> Kernels:
        """Those of the device, bound as optimizers there bind them."""
        table = ops.backend(self.device)
        if self.device.type == "cpu" and table.name != "triton":
            return table
        status = torch.zeros(STATUS_WORDS, dtype=torch.int64, device=self.device)
        return table.on_device(status, Gate(torch.ones(1, dtype=torch.int32, device=self.device)))

    def finish(self) -> None:
        """Wait until the device has completed its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ddp_options(self, device: torch.device, group: dist.ProcessGroup) -> dict[str, Any]:
        """What DistributedDataParallel wants to know of a model there."""
        return {"process_group": group, "device_ids": None if device.type == "cpu" else [device.index]}


@dataclass
class Findings:
    """What a rank has to say of a law."""

    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""

    def expect(self, fine: bool, complaint: str) -> None:
        """Complain, unless all is fine."""
        if not fine:
            self.complaints.append(complaint)
