"""Bytes that thinwire gives torch.distributed to send, counted at the methods of process groups (law 5).

Below them is the network, which on a GPU machine has no counter that is the same for NVLink, InfiniBand and Ethernet;
above them are all functions of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire._torch_compat import ALL_GATHER_METHOD
from thinwire.transport.connections import DESCRIPTION


@dataclass
class Counter:
    """What other ranks were sent so far."""

    bytes: int = 0


def _sent(group: dist.ProcessGroup, tensors: list[Tensor], *_: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _cut(group: dist.ProcessGroup, _: Tensor, given: Tensor, to: Any, splits: list[int], *__: Any) -> int:
    own = splits[group.rank()] if splits else given.shape[0] // group.size()
    return given[own:].nbytes


def _listed(group: dist.ProcessGroup, _: list[Tensor], given: list[Tensor], *__: Any) -> int:
    return sum(tensor.nbytes for member, tensor in enumerate(given) if member != group.rank())


def _to_all(group: dist.ProcessGroup, _: Any, given: Tensor | list[Tensor], *__: Any) -> int:
    tensors = [given] if isinstance(given, Tensor) else given
    return (group.size() - 1) * sum(tensor.nbytes for tensor in tensors)


_SIZES: dict[str, Callable[..., int]] = {
    "send": _sent,
    "all_to_all_single": _cut,
    "alltoall_base": _cut,
    "alltoall": _listed,
    "allgather": _to_all,
    "all_gather_single": _to_all,
    ALL_GATHER_METHOD: _to_all,
}
"""Of all ways to send that an exchange may use, by names that not every version of torch has."""


@contextmanager
def counted_bytes(description: str = DESCRIPTION) -> Iterator[Counter]:
    """Count what is sent inside, by all threads, over groups of this description."""
    counter = Counter()
    kind = dist.ProcessGroup
    # Not getattr(): what it returns for a method of C++ would be put back as a function that has no self.
    originals = {name: vars(kind)[name] for name in _SIZES if name in vars(kind)}

    def counting(original: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            if group.group_desc == description:
                counter.bytes += size(group, *args)
            return original(group, *args, **options)

        return call

    try:
        for name in originals:
            setattr(kind, name, counting(getattr(kind, name), _SIZES[name]))
        yield counter
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)
