"""One vote per coordinate: what the rules of Birder and Distributed Lion share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.compressors.kept_answers import NAME, KeptWords
from thinwire.compressors.stochastic_sign import Downlink, StochasticSign
from thinwire.optimizers.adam import DENSE
from thinwire.optimizers.rule import Context, Group, UpdateRule, exchange_after_activation
from thinwire.transport import packet
from thinwire.transport.buffers import WORD_BYTES, Part
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
        self._kept: KeptWords | None = None
        """With a delay, the answers that are applied in the next step."""
        self._kept_active: Tensor | None = None
        """The activation map of the exchange that they come from: it tells votes from activation bits."""
        if context.delayed:
            word_bytes, planes = (WORD_BYTES, self.signs.planes) if self.signs else (Dense.payload.word_bytes, 1)
            self._kept = KeptWords(context.layout, word_bytes, planes)
            self._kept_active = None if self.signs is None else torch.zeros_like(self.signs.active)

    def state(self) -> State:
        """The activation map and the answers that are kept, equal on all ranks."""
        state = State() if self.signs is None else self.signs.state()
        if self._kept is not None:
            state.include(self._kept.state())
        if self._kept_active is not None:
            state.words[f"{NAME}_alive"] = self._kept_active
        return state

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

    @property
    def apply_numbers(self) -> Sequence[str] | None:
        """The numbers of parameter groups that `apply` reads, if it takes parts of several parameters in one. Answers
        that are kept have tables of their own."""
        return ("lr", "weight_decay") if self._kept is None else None

    def apply(self, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """Move a parameter: x ← (1 - lr·λ) x - lr · answer."""
        lr = float(group["lr"])
        move = {"lr": lr, "decay": 1.0 - lr * group["weight_decay"]}
        kernels, signs = self._context.kernels, self.signs
        answers = self._context.session.channel.buffers.answers if self._kept is None else self._kept.memory
        for part in parts:
            runs = part.down_runs if self._kept is None else self._kept.runs(part)
            if signs is None:
                kernels.dense_apply(runs, x, low, answers, **move)
            else:
                active = signs.active if self._kept_active is None else self._kept_active
                counts = {"planes": signs.planes, "workers": signs.counted_workers}
                kernels.birder_apply(runs, x, low, active, answers, **counts, **move)

    def keep(self) -> None:
        """See `UpdateRule`. The next exchange uses the activation map that these answers give."""
        assert self._kept is not None, "only with a delay"
        self._kept.keep(self._context.session.channel.buffers)
        if self.signs is not None and self._kept_active is not None:
            self._kept_active.copy_(self.signs.active)
            self._read_activity()

    def after_apply(self) -> None:
        """See `UpdateRule`."""
        if self._kept is None:
            self._read_activity()

    def _read_activity(self) -> None:
        if self.signs is not None:
            self.signs.update_activity()
            self.signs.record_votes(self._context.session.step_gate())

    def mean_abs_vote(self) -> float:
        """See `UpdateRule`."""
        return math.nan if self.signs is None else self.signs.mean_abs_vote()
