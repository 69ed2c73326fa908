"""Gradient clipping: a framework's limit becomes the optimizer's own.

Under `attach`, gradients are sent while backward runs, so a framework that clips after backward is too late.
"""

from __future__ import annotations

from thinwire.optimizers.optimizer import WireOptimizer


def clip_in_optimizer(
    optimizer: WireOptimizer,
    argument: str,
    *,
    norm: float | None = None,
    value: float | None = None,
    default: float | None = None,
) -> None:
    """Let an optimizer clip as a framework would. It must not have taken a step.

    Args:
        optimizer: the optimizer. Limits that were given to its constructor win over a limit that nobody chose.
        argument: what the user gave to the framework, for messages.
        norm: the framework's limit of the norm.
        value: the framework's limit of each element.
        default: the limit that the framework has if the user chose none.

    Raises:
        ValueError: if the optimizer has other limits, and the framework's was chosen.
        RuntimeError: if the optimizer is in use already.
    """
    own = optimizer._clipping
    if (norm is None and value is None) or (own.norm, own.value) == (norm, value):
        return
    if own.clips:
        if default is not None and (norm, value) == (default, None):
            return
        given = ", ".join(f"{name}={limit!r}" for name, limit in own.settings().items())
        raise ValueError(f"{argument}, but the optimizer has {given}: expected one of them, or equal limits")
    try:
        optimizer._clip(norm, value)
    except RuntimeError as error:
        raise RuntimeError(f"{argument}: {error}") from error
