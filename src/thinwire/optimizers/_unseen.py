"""Steps of which the host hears later how they went, because only the device knows when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire._torch_compat import scale_passed_to_step, write_count
from thinwire.kernels.modes import Scale
from thinwire.metrics import Meter
from thinwire.optimizers._paper import Paper
from thinwire.optimizers._safety import Skips
from thinwire.transport import packet
from thinwire.transport.lanes import Transport
from thinwire.transport.side_stream import Side, StreamTransport


class UnseenSteps(Paper):
    """What an optimizer does that may leave steps to a device.

    Such a step is asked for as if it were taken, for all parameters. Gates on the device keep those out that have no
    gradient on any worker, and all of them where a gradient was not finite or a packet was refused. The host makes up
    for it when it hears.
    """

    _side: Side | None = None
    """Of the device; None on a CPU, where lanes are threads and the host always knows."""
    _transport: Transport | None
    _meter: Meter
    _skips: Skips
    _step_number: int
    _inverted: tuple[Tensor, int, Tensor] | None = None
    """A scale, its version, and what is left of it."""
    _overflowed = False
    """Whether a gradient was not finite in the last step, on any rank; of one that was left to the device nobody knows
    yet."""

    @property
    def _needs_no_host(self) -> bool:
        """Whether nothing that the host decides or counts in the step under way depends on how the exchange goes, but
        for what `_not_taken` makes good."""
        return False

    def _not_taken(self, positions: Sequence[int]) -> None:
        """Take back what the host has counted for parameters that did not take the last step."""

    @property
    def _is_unseen(self) -> bool:
        """Whether the step under way, or just asked for, was left to the device."""
        return self._side is not None and self._side.unseen

    def _learn(self) -> None:
        """Hear of steps that were left to the device.

        Raises:
            CorruptPacket: when a packet was refused; nothing has been applied since.
            TooManySkips: as `step()` does.
        """
        if not isinstance(self._transport, StreamTransport) or self._side is None or not self._is_unseen:
            return
        self._side.unseen = False
        for step, findings in self._transport.outcomes(before=self._step_number):
            skipped = bool(findings.flags & packet.NONFINITE)
            self._meter.skipped_steps += skipped
            taken = set() if skipped else set(findings.present)
            self._not_taken([position for position in range(len(self._flat_params)) if position not in taken])
            self._skips.note(step, skipped=skipped)

    def _present_on(self, transport: StreamTransport) -> list[int]:
        """The positions of the parameters that take the step under way, or of all where only the device knows."""
        return list(range(len(self._flat_params))) if self._is_unseen else transport.present

    def _turn(self, position: int) -> None:
        """Let the kernels that come next be about a parameter, or, beyond the last, about the step as a whole."""
        if self._side is not None:
            self._side.report.gate.parameter = position

    def _overflow(self) -> bool | Tensor:
        """Whether a gradient was not finite in the last step, on any rank: a tensor of one float where only the device
        knows."""
        if self._side is not None and self._is_unseen:
            return self._side.report.overflow()
        return self._overflowed

    def _amp_scale(self) -> Scale:
        return self._inverse(scale_passed_to_step(self))

    def _inverse(self, scale: Tensor | None) -> Scale:
        """What gradients of a loss that was multiplied by `scale` are multiplied by."""
        if scale is None:
            return 1.0
        if self._side is None:
            return 1.0 / float(scale)
        # Asked for every gradient, and changed once a step. The scale is held, lest another takes its place in memory.
        if self._inverted is None or self._inverted[0] is not scale or self._inverted[1] != write_count(scale):
            inverse = scale.detach().to(torch.float64).reciprocal().to(torch.float32)
            self._inverted = (scale, write_count(scale), inverse)
        return self._inverted[2]

    def _taken(self) -> Tensor | None:
        """Whether the step just asked for is taken, where only the device knows."""
        return self._side.report.gate.open[-1] if self._side is not None and self._is_unseen else None

    def _refuse_rates_on_devices(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse what would make the host wait in every step."""
        for group in groups:
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                raise ValueError(f"lr is a tensor on {str(lr.device)!r}: expected a number, or a tensor on the CPU")

    def _refuse_capture(self, device: torch.device) -> None:
        """Refuse to be part of a CUDA graph, before anything is sent."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() while a CUDA graph is captured: no two exchanges have the same keys and headers. "
                "Capture forward and backward, and call step() outside of the graph"
            )
