"""What a paper says of an optimizer, and the moments of a step at which it may say more.

`thinwire.optimizers._base` decides when each of these is called.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thinwire.kernels.modes import Scale
from thinwire.optimizers._state import State, Tensors
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout

LOCAL = "local"
"""The name of a compressor whose packets stay inside the node."""


class Paper(Optimizer, abc.ABC):
    """The methods that differ from paper to paper."""

    _state_has_buckets = False
    """Whether what is kept depends on how the flat space is cut into buckets."""
    _kept: State
    """What `_declare` has said."""
    _step_count: Tensor
    _channels: dict[str, Any]
    _flat_params: list[Tensor]
    """The parameters that take part, in the order of the flat space."""
    _kept_of: list[Tensors]
    """By position, what is kept for each of them."""
    _shown_of: list[Tensors]
    """The same memory in other tensors, which `state` shows to users: they may do to them what they like."""

    @abc.abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyper-parameters that make no sense."""

    def _complete_group(self, group: dict[str, Any]) -> None:
        """Fill in hyper-parameters that a group of an older state dict lacks."""

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Arguments of the constructor, beyond those of parameter groups, on which all ranks must agree."""

    @abc.abstractmethod
    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        """Allocate the flat state; tell by which compressors the optimizer speaks, and what is kept, to be saved.

        A compressor whose name is LOCAL is for steps in which nothing leaves the node.
        """

    @abc.abstractmethod
    def _local(
        self, position: int, part: Part, grad: Tensor | None, group: dict[str, Any], scale: Scale
    ) -> bool | None:
        """The local rule for a part of a parameter, given a gradient to be multiplied by `scale`.

        Writes what is sent for `part.up_runs` into the packets; returns whether the gradient was not finite. Without a
        gradient that is what the state says as it is. Runs on a lane in a hierarchical topology.
        """

    @abc.abstractmethod
    def _apply(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any]
    ) -> None:
        """Move a parameter by the answer. `x` is fp32, dense; if it is a master, `low` is the parameter."""

    def _progress(self) -> dict[str, Any]:
        """How far the run has come, on which all ranks must agree too."""
        return {"the number of steps taken": int(self._step_count)}

    def _agreed_state(self) -> Tensors:
        """What is kept that must be the same on all ranks now, to be compared before the first exchange."""
        return {}

    def _channel_now(self) -> str:
        """The name of the compressor of the step under way; the only one, unless a paper says otherwise."""
        (name,) = self._channels
        return name

    def _agreed_value(self, position: int) -> Tensor:
        """What a parameter is on all ranks, whatever a rank has made of it since."""
        return self._flat_params[position]

    @property
    def is_synchronized(self) -> bool:
        """Whether all replicas are equal. They always are, but for optimizers with local steps."""
        return True

    def synchronize(self) -> None:
        """Make all replicas equal, before evaluating or saving; a matter of optimizers with local steps."""

    @property
    def _skips_together(self) -> bool:
        """Whether all ranks skip the step under way if one of them does."""
        return True

    def _first_flags(self) -> int:
        """The flags with which this step's packets start out."""
        return 0

    def _before_exchange(self) -> None:
        """What happens before the first parameter of an exchange is encoded."""

    def _settle(self, flags: int) -> int:
        """What happens between the exchange and the apply, given the flags seen; returns those to go on with."""
        return flags

    def _conclude(self) -> None:
        """What happens after the apply."""

    def _end_step(self) -> None:
        """What happens at the end of a step, taken or skipped."""

    # When a run goes on with other ranks, see `thinwire.optimizers._elastic` -----------------------------------------

    def _portable(self, *, private: bool) -> State:
        """What counts now of what is kept, such that the flat space can be cut anew for other workers and shards.

        A name may stand in another kind than `_declare` has put it into: `own` is averaged over workers, `owned` is put
        together. What is left out starts from zero. Asked once, of an optimizer that takes no steps any more.

        Args:
            private: whether with what every worker keeps for itself.
        """
        shared = self._kept.shared()
        return replace(shared, own=self._kept.own, owned=self._kept.owned) if private else shared

    @property
    def _needs_compression(self) -> bool:
        """Whether what is kept now makes no sense in a topology that does not compress."""
        return False

    def _anchors(self) -> dict[int, Tensor]:
        """By position, for parameters that this worker has moved on its own, the values that all have agreed on."""
        return {}

    def _inherit(self, values: Mapping[str, Tensor], anchors: Mapping[int, Tensor]) -> None:
        """What happens when the state has been taken over from a run of other ranks.

        Args:
            values: what all its workers had, joined, of the whole flat space.
            anchors: where they last agreed, as `_anchors`.
        """

    def _contraction(self) -> float:
        """Which share of what this rank had to say in the last step was left unsaid."""
        return math.nan

    def _mean_abs_vote(self) -> float:
        """How much the workers agreed in the last step."""
        return math.nan
