"""What the tensors of many kernels have in common."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.bounds import F32, LOW, U8, Bounds, Device, need_dense

MAX_PLANES = 32
MAX_WORDS = 2**57
"""Their elements and bytes are still counted in 64 bits."""
FLOAT32, BYTES = (F32,), (U8,)


def shifted(kernel: str, bounds: Bounds, shift: int) -> None:
    """Check that states that begin at the flat element `shift` have all elements of the runs."""
    if bounds.first < shift:
        raise ValueError(f"{kernel}: shift={shift}: expected at most {bounds.first}, the first element of its runs")


def parameter(kernel: str, bounds: Bounds, x: Tensor, low: Tensor | None, device: Device) -> None:
    """Check a parameter, or a master and its parameter."""
    need_dense(kernel, "x", x, FLOAT32, bounds.param, device)
    if low is not None:
        need_dense(kernel, "low", low, LOW, bounds.param, device)
        same_order(kernel, "low", low, x)


def same_order(kernel: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """Check that both have the same order of dimensions in memory: otherwise the wrong elements would be paired."""
    if tensor.stride() != x.stride() and not (tensor.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"{kernel}: {name} has the stride {tensor.stride()}: expected that of x, {x.stride()}")


def given(kernel: str, name: str, tensor: Tensor | None) -> Tensor:
    """A tensor that is optional in general, but not in this mode."""
    if tensor is None:
        raise TypeError(f"{kernel}: {name} is None: expected a tensor in this mode")
    return tensor


def anchored(kernel: str, bounds: Bounds, anchor: Tensor | None, x: Tensor, device: Device) -> None:
    """Check an anchor, if there is one: it has the order of `x`."""
    if anchor is not None:
        need_dense(kernel, "anchor", anchor, FLOAT32, bounds.param, device)
        same_order(kernel, "anchor", anchor, x)
