"""One vote per coordinate: what the rules of Birder and Distributed Lion share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.compressors.stochastic_sign import Downlink, StochasticSign
from thinwire.optimizers.adam import DENSE
from thinwire.optimizers.rule import Context, Group, UpdateRule, exchange_after_activation
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.state import State

VOTES = "votes"
"""The name of the channel."""


class Votes:
    """Sends votes, and moves parameters by the answers. If nothing is compressed, directions are sent as floats.

    Args:
        context: the run.
        downlink: what owners answer.
        activity: the private state that decides which coordinates are active: those whose magnitude exceeds `eps`.
        eps: the threshold.
    """

    def __init__(self, context: Context, downlink: Downlink, activity: Tensor, eps: float) -> None:
        self._context = context
        self.signs: StochasticSign | None = None
        """None if nothing is compressed."""
        self.compressors: dict[str, Compressor] = {DENSE: Dense(context.kernels)}
        if context.topology.compresses:
            self.signs = StochasticSign(context.layout, downlink, context.kernels, activity, eps)
            self.compressors = {VOTES: self.signs}

    def state(self) -> State:
        """The activation map, equal on all ranks."""
        return State() if self.signs is None else self.signs.state()

    def begin_step(self, key: int) -> None:
        """Prepare for a step; `key` decides the owners' random draws."""
        if self.signs is not None:
            self.signs.begin_step(self._context.step, key)

    def channel(self) -> str:
        """See `UpdateRule`."""
        return DENSE if self.signs is None else VOTES

    @property
    def activates(self) -> bool:
        """Whether this step begins with an activation round."""
        return self.signs is not None and self._context.step == 1

    def first_flags(self) -> int:
        """See `UpdateRule`."""
        return packet.ACTIVATION if self.activates else 0

    def settle(self, flags: int, rule: UpdateRule) -> int:
        """After an activation round, exchange the votes of `rule`; the flags to continue with."""
        if self.signs is None or not self.activates:
            return flags
        self.signs.update_activity()  # no coordinate was active, so all bits were activation bits
        return flags if flags & packet.NONFINITE else exchange_after_activation(rule)

    def apply(self, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """Move a parameter: x ← (1 - lr·λ) x - lr · answer."""
        lr = float(group["lr"])
        move = {"lr": lr, "decay": 1.0 - lr * group["weight_decay"]}
        kernels, answers, signs = self._context.kernels, self._context.session.channel.buffers.answers, self.signs
        for part in parts:
            if signs is None:
                kernels.dense_apply(part.down_runs, x, low, answers, **move)
            else:
                counts = {"planes": signs.planes, "workers": signs.counted_workers}
                kernels.birder_apply(part.down_runs, x, low, signs.active, answers, **counts, **move)

    def after_apply(self) -> None:
        """See `UpdateRule`."""
        if self.signs is not None:
            self.signs.update_activity()
            self.signs.record_votes(self._context.session.step_gate())

    def mean_abs_vote(self) -> float:
        """See `UpdateRule`."""
        return math.nan if self.signs is None else self.signs.mean_abs_vote()
