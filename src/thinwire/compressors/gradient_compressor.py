"""The interface of compressors that average gradients for any optimizer, and of the schemes that describe them."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Protocol

from torch import Tensor

from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout


class GradientCompressor(Compressor, Protocol):
    """A compressor whose packets carry gradients, and whose answers are their mean."""

    def begin_step(self, step: int) -> None:
        """Prepare for an exchange, the first of which has the number 1. Random numbers depend on this number."""

    def encode(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """Add a part of a gradient, times `scale`, to the residual, and write it into the packets if that is possible
        before the bucket is complete. Without a gradient, it is zero.

        Returns:
            Whether the gradient was not finite; None if only the device knows. Such elements are left out.
        """
        ...

    def read_answers(self) -> None:
        """Prepare for `decode`, after the exchange."""

    def decode(self, part: Part, into: Tensor) -> None:
        """Write the answer for a part of a parameter into the parameter's gradient, a vector."""

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by a factor, because the loss scale has changed by it."""

    def contraction(self) -> float:
        """The fraction of the squared norm of this rank's last message that compression lost; NaN if unknown."""
        ...


class Scheme(abc.ABC):
    """A compressor and its options, before the parameters are known. Subclasses are frozen dataclasses of options.

    Raises:
        ValueError: by the constructor of a subclass, naming the option, its value and what is expected.
    """

    state_depends_on_buckets = False
    """Whether the residuals depend on how the flat space is cut into buckets, beyond their places."""

    no_decay: ClassVar[str | None] = None
    """Why `residual_decay` must be 1, if so."""

    @abc.abstractmethod
    def bind(self, layout: Layout, node: int, kernels: Kernels) -> GradientCompressor:
        """The compressor for a flat space, on a rank of worker `node`."""

    @abc.abstractmethod
    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """The bits per parameter that a worker sends to owners, and that an owner sends to each worker."""

    @property
    def worker_residual(self) -> bool:
        """Whether workers keep what their messages leave out, element by element. An option may say so."""
        return vars(self).get("error_feedback", True)

    def settings(self) -> dict[str, Any]:
        """The options on which all ranks must agree."""
        return dict(vars(self))
