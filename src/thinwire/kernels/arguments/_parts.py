"""What the tensors of many kernels have in common."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.bounds import F32, LOW, U8, Bounds, Device, need_dense

MAX_PLANES = 32
MAX_WORDS = 2**57
"""So that their elements and bytes still have 64 bits."""
FLOAT32, BYTES = (F32,), (U8,)


def shifted(kernel: str, bounds: Bounds, shift: int) -> None:
    """States that begin at the element `shift` of the flat space have all elements of the runs."""
    if bounds.first < shift:
        raise ValueError(f"{kernel}: shift={shift}: expected at most {bounds.first}, the first element of its runs")


def parameter(kernel: str, bounds: Bounds, x: Tensor, low: Tensor | None, device: Device) -> None:
    """A parameter, or a master and its parameter."""
    need_dense(kernel, "x", x, FLOAT32, bounds.param, device)
    if low is not None:
        need_dense(kernel, "low", low, LOW, bounds.param, device)
        same_order(kernel, "low", low, x)


def same_order(kernel: str, name: str, tensor: Tensor, x: Tensor) -> None:
    """Both are walked together, so that another order of dimensions in memory would pair other elements."""
    if tensor.stride() != x.stride() and not (tensor.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"{kernel}: {name} has the stride {tensor.stride()}: expected that of x, {x.stride()}")


def given(kernel: str, name: str, tensor: Tensor | None) -> Tensor:
    """A tensor that some uses of a kernel do without, and this one does not."""
    if tensor is None:
        raise TypeError(f"{kernel}: {name} is None: expected a tensor, for what is asked of it")
    return tensor


def anchored(kernel: str, bounds: Bounds, anchor: Tensor | None, x: Tensor, device: Device) -> None:
    """An anchor, if there is one, which is walked with `x`."""
    if anchor is not None:
        need_dense(kernel, "anchor", anchor, FLOAT32, bounds.param, device)
        same_order(kernel, "anchor", anchor, x)
