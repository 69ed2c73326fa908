"""What users hand over, parameters and gradients, checked and brought into the form that kernels take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire._checks import MANY, is_integer
from thinwire.kernels import ops
from thinwire.wire.buckets import is_dense

LOW_PRECISION = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, *LOW_PRECISION)


def check_dtypes(params: Iterable[Tensor]) -> None:
    """Refuse parameters that have no kernels.

    Raises:
        TypeError: naming the dtype.
    """
    for p in params:
        if p.dtype not in _DTYPES:
            hint = "; torch.view_as_real gives a real one" if p.is_complex() else ""
            raise TypeError(f"a parameter of {p.dtype}: expected float32, bfloat16 or float16{hint}")


def form_of(p: Tensor) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
    """What a parameter must not change once there is an optimizer."""
    return p.dtype, p.device, p.shape, p.stride()


def refuse_thawed(frozen: Iterable[Tensor]) -> None:
    """Refuse gradients of parameters that were frozen when the optimizer was made.

    Raises:
        RuntimeError: naming the shape.
    """
    for p in frozen:
        if p.grad is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a gradient, but was frozen when the optimizer was made "
                "and has no place on the wire. Make the optimizer first and freeze then, or make a new one"
            )


def checksum(p: Tensor) -> int:
    """CRC-32C of a parameter's values; of one on a GPU the host makes a copy, as this is asked for rarely."""
    values = p.detach() if is_dense(p) else p.detach().contiguous()
    if values.device.type != "cpu":
        values = values.cpu()
    return ops.backend(values.device).crc32c(values.as_strided((values.numel(),), (1,)).view(torch.uint8))


def gradient_of(p: Tensor) -> Tensor | None:
    """The gradient in the memory order of its parameter; a copy only where the two differ.

    Raises:
        TypeError: for gradients that cannot be encoded.
    """
    grad = p.grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise TypeError(
            f"a gradient with layout {grad.layout} for a parameter of shape {tuple(p.shape)}: thinwire needs dense "
            "gradients, for nn.Embedding that is sparse=False (rows without a gradient cost one bit and do not move)"
        )
    if grad.dtype not in _DTYPES:
        raise TypeError(f"a gradient of {grad.dtype}: expected float32, bfloat16 or float16")
    if not is_dense(p):
        return grad.contiguous()
    if grad.stride() == p.stride() or (grad.is_contiguous() and p.is_contiguous()):
        return grad
    return torch.empty_like(p, dtype=grad.dtype).copy_(grad)


def check_seed(seed: int) -> None:
    """Refuse what is no seed.

    Raises:
        ValueError: naming the argument.
    """
    if not is_integer(seed, 0, MANY):
        raise ValueError(f"seed={seed!r}: expected an integer in [0, 2**63)")
