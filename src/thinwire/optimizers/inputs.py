"""Validates parameters, gradients and hyper-parameters, and converts them to the form that kernels take."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire._torch_compat import TensorDictionary, is_of_fsdp1, is_zero_without_memory
from thinwire.errors import GradientChanged
from thinwire.kernels import ops
from thinwire.transport.layout import is_dense

LOW_PRECISION = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, *LOW_PRECISION)


def check_parameters(params: Iterable[Tensor]) -> None:
    """Reject parameters that kernels cannot process.

    Raises:
        TypeError: naming the dtype, or the class of a tensor subclass that wraps other tensors. DTensors are not given
            to this function: `thinwire.optimizers.sharding` checks them, and this function their shards.
        ValueError: for a lazily negated parameter, whose memory holds the negative of its values.
    """
    for p in params:
        if hasattr(p, "__tensor_flatten__"):
            raise TypeError(
                f"a parameter of class {type(p).__name__}: kernels need the memory of an ordinary tensor. Expected a "
                "torch.nn.Parameter that is not wrapped"
            )
        if is_of_fsdp1(p):
            raise TypeError(
                f"a parameter of shape {tuple(p.shape)} is of FullyShardedDataParallel (FSDP1), which thinwire does "
                "not support. Use DistributedDataParallel, or fully_shard (FSDP2) on a mesh of replicas and shards"
            )
        if p.is_neg():
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is a lazily negated view (is_neg()): kernels would read its "
                "memory with the wrong sign. Make it from tensor.resolve_neg()"
            )
        if p.dtype not in _DTYPES:
            hint = "; torch.view_as_real gives a real one" if p.is_complex() else ""
            raise TypeError(f"a parameter of {p.dtype}: expected float32, bfloat16 or float16{hint}")


_averaged: TensorDictionary = TensorDictionary()
"""For parameters whose gradients `thinwire.compress` averages, a weak reference to what averages them."""


def mark_averaged(params: Iterable[Tensor], by: object) -> None:
    """Record what averages the gradients of these parameters."""
    for p in params:
        _averaged[p] = weakref.ref(by)


def unmark_averaged(params: Iterable[Tensor]) -> None:
    """Record that the gradients of these parameters are no longer averaged."""
    for p in params:
        _averaged.pop(p, None)


def check_not_averaged(params: Iterable[Tensor]) -> None:
    """Reject parameters whose gradients are averaged already.

    Raises:
        RuntimeError: naming the shape of the first one.
    """
    for p in params:
        reference = _averaged.get(p)
        if reference is not None and reference() is not None:
            raise RuntimeError(
                f"thinwire.compress averages the gradients of a parameter of shape {tuple(p.shape)} already, and a "
                "thinwire optimizer would exchange them again. Use any torch.optim optimizer with compress, or a "
                "thinwire optimizer without compress; thinwire.detach(model) ends compress"
            )


def form_of(p: Tensor) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...], str]:
    """The properties of a parameter that must not change after the optimizer was made."""
    return p.dtype, p.device, p.shape, p.stride(), "lazily negated" if p.is_neg() else "as it is in memory"


def check_frozen(frozen: Iterable[Tensor]) -> None:
    """Reject gradients of parameters that were frozen when the optimizer was made.

    Raises:
        RuntimeError: naming the shape.
    """
    for p in frozen:
        if p.grad is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a gradient, but was frozen when the optimizer was made "
                "and is in no packet. Freeze parameters after you make the optimizer, or make a new one"
            )


def check_rates_on_host(groups: Iterable[dict[str, Any]]) -> None:
    """Reject learning rates on a device, because the host would wait for them in every step.

    Raises:
        ValueError: naming the device.
    """
    for group in groups:
        lr = group.get("lr")
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            raise ValueError(f"lr is a tensor on {str(lr.device)!r}: expected a number, or a tensor on the CPU")


def refuse_capture(device: torch.device) -> None:
    """Reject a step inside the capture of a CUDA graph, before anything is sent.

    Raises:
        RuntimeError: if the current stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() while a CUDA graph is captured: keys and headers differ in every exchange, so a graph cannot replay"
            " it. Capture forward and backward, and call step() outside of the graph"
        )


def checksum(p: Tensor) -> int:
    """CRC-32C of a parameter's values. Values on a GPU are copied to the host; calls are rare."""
    values = p.detach() if is_dense(p) else p.detach().contiguous()
    if values.device.type != "cpu":
        values = values.cpu()
    return ops.backend(values.device).crc32c(values.as_strided((values.numel(),), (1,)).view(torch.uint8))


def in_order_of(p: Tensor, grad: Tensor | None) -> Tensor | None:
    """A gradient in the memory order of its parameter; a copy only if the two orders differ.

    Raises:
        TypeError: for gradients that cannot be encoded.
    """
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise TypeError(
            f"a gradient with layout {grad.layout} for a parameter of shape {tuple(p.shape)}: thinwire needs dense "
            "gradients. Use sparse=False in nn.Embedding; rows without a gradient cost one bit per element and do not "
            "move"
        )
    if grad.dtype not in _DTYPES:
        raise TypeError(f"a gradient of {grad.dtype}: expected float32, bfloat16 or float16")
    if grad.shape != p.shape or grad.device != p.device or hasattr(grad, "__tensor_flatten__"):
        raise TypeError(
            f"a gradient of class {type(grad).__name__}, shape {tuple(grad.shape)} on {grad.device}: expected an "
            f"ordinary tensor of shape {tuple(p.shape)} on {p.device}, like its parameter"
        )
    # Autograd may return lazily negated views, for example from complex arithmetic. Kernels read memory, which then
    # has the opposite sign.
    grad = grad.resolve_neg()
    if is_zero_without_memory(grad):
        grad = grad.clone()  # zeros without memory
    if not is_dense(p):
        return grad.contiguous()
    if grad.stride() == p.stride() or (grad.is_contiguous() and p.is_contiguous()):
        return grad
    return torch.empty_like(p, dtype=grad.dtype).copy_(grad)


_SAMPLE = 16


def sample_size(numel: int) -> int:
    """The number of elements that `sample_of` copies."""
    return min(numel, _SAMPLE)


def sample_stride(numel: int) -> int:
    """The distance between them."""
    return max(1, numel // _SAMPLE)


def sample_of(grad: Tensor) -> Tensor:
    """Copies of a few elements of a gradient, spread over all of it, to notice changes."""
    count = grad.numel()
    flat = grad.detach()
    if is_dense(flat):
        return flat.as_strided((sample_size(count),), (sample_stride(count),)).clone()
    return flat.reshape(-1)[:: sample_stride(count)][:_SAMPLE].clone()


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two samples are equal, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def changed_gradient(parameter: str) -> GradientChanged:
    """The error for a gradient that was changed too late."""
    return GradientChanged(
        f"the gradient of {parameter} was changed between backward and step(), for example by clip_grad_norm_. Under "
        "thinwire.attach gradients are sent while backward runs, so the change would have no effect, and no rank takes "
        "this step. To clip gradients, give clip_norm= or clip_value= to the optimizer and remove the other clipping "
        "(transformers.Trainer clips unless you set max_grad_norm=0: use max_grad_norm=0 and clip_norm=1.0; Lightning: "
        "gradient_clip_val=None). For other changes use thinwire.attach(model, optimizer, overlap=False), which sends "
        "gradients in step()"
    )


def check_number(
    group: dict[str, Any], name: str, *, above: bool = False, below: float = math.inf, none: str | None = None
) -> None:
    """Reject a hyper-parameter that is not a finite number of at least 0.

    Args:
        group: a parameter group.
        name: the name of the hyper-parameter.
        above: whether to reject 0 as well.
        below: the value must be less than this.
        none: what None stands for, if None is allowed.

    Raises:
        ValueError: naming the hyper-parameter, its value, and what is expected.
    """
    value = group[name]
    if value is None and none is not None:
        return
    try:
        number = math.nan if value is None or isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # a list, a tensor of several numbers
        number = math.nan
    if not 0 <= number < below or (above and not number):
        wanted = f"in [0, {below:g})" if below < math.inf else "> 0" if above else ">= 0"
        alternative = "" if none is None else f", or None for {none}"
        raise ValueError(f"{name}={value!r}: expected a number {wanted}{alternative}")


def make_plain(group: dict[str, Any]) -> None:
    """Convert NumPy numbers in a parameter group to Python's, because torch.load(weights_only=True) rejects them.

    Schedules that are computed with NumPy store them there. np.float64 is a subclass of float, so all else accepts it.
    """
    for key, value in group.items():
        if key != "params" and type(value) not in _PLAIN:
            group[key] = _plain(value)


_PLAIN = (float, int, bool, str, type(None), Tensor)


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        return value if all(type(each) in _PLAIN for each in value) else type(value)(map(_plain, value))
    # NumPy's scalars and arrays, recognized without importing NumPy, which is optional for torch.
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        numbers = value.tolist()
        return tuple(numbers) if isinstance(numbers, list) else numbers
    return value
