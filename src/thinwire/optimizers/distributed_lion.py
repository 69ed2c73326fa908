"""Distributed Lion: each worker sends the sign of its Lion update, and all ranks move by the majority.

Bo Liu, Lemeng Wu, Lizhang Chen, Kaizhao Liang, Jiaxu Zhu, Chen Liang, Raghuraman Krishnamoorthi, Qiang Liu:
"Communication Efficient Distributed Training with Distributed Lion". NeurIPS 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.kernels import rng
from thinwire.kernels.modes import Scale
from thinwire.kernels.reference.words import each_run, flat
from thinwire.optimizers.adam import SQUARABLE, check_betas, signed
from thinwire.optimizers.inputs import check_number
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.optimizers.votes import Votes
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State, Tensors

Downlink = Literal["majority", "votes"]

_EPS = 1e-12
"""A coordinate whose update is at most this no longer has gradients and becomes inactive."""
_CHUNK = 1 << 15
"""Elements that are updated at a time, so that temporaries stay in the cache."""


class DistributedLion(WireOptimizer):
    r"""Distributed Lion (Liu et al., NeurIPS 2024): Lion with one bit per parameter.

    Worker i interpolates between its momentum and its own gradient g, sends the sign as one bit, and then updates its
    momentum. The owner of a shard answers with the majority, and all ranks move by it::

        δ_i = sign(β1 m_i + (1-β1) g)        m_i ← β2 m_i + (1-β2) g        x ← (1 - lr·λ) x - lr · sign(Σ δ_i)

    `downlink="votes"` replaces the majority by the mean of all δ_i, the paper's averaging variant.

    Example::

        model = DDP(net)
        opt = thinwire.DistributedLion(model.parameters(), lr=3e-4, weight_decay=0.1)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`,
            `weight_decay` and `maximize`.
        lr: step size. With a majority, every active coordinate moves by exactly this much per step. Lion's authors
            suggest a third to a tenth of AdamW's learning rate.
        betas: β1 of the update and β2 of the momentum, in [0, 1).
        weight_decay: decoupled decay λ, as in AdamW. Use three to ten times AdamW's, because `lr` is smaller.
        maximize: ascend instead of descend.
        downlink: "majority": one bit down. "votes": the number of votes, in ceil(log2(n+1)) bits.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32. Results do not depend on it.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 1 to apply the answer of each step in the next one, as in `thinwire.Birder`.

    When not to use it:
        As a first choice: thinwire includes it as a reference. In `thinwire study` Lion ended 5.8 % above AdamW's loss
        on text, Birder with as many bits 1.9 % (docs/convergence.md). Signs of noisy gradients are biased: if workers
        have small batches, coordinates whose gradients are mostly noise move as fast as all others. The local update is
        written in torch, not as a fused kernel, and takes several passes over memory.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. A coordinate moves by at most `lr` per step in any case, but a spike dominates
        its momentum for many steps. Under `attach`, `clip_grad_norm_` would come after gradients were sent, and
        `step()` raises GradientChanged. Without `attach` it works too, and clips this rank's own gradient.

    Differences from the paper:
        * In a tie, the majority is the sign that one worker sent, a different worker at each step. In the paper the
          coordinate does not move.
        * A coordinate without a gradient on all workers neither moves nor decays, because one bit has no zero. A
          coordinate that gets its first gradient later moves from the next step on. A worker whose update is at most
          10⁻¹² sends a random bit.
        * A worker without a gradient for a parameter repeats its last δ. A parameter without a gradient on all workers
          does not move.
        * Elements whose gradient is not finite, or beyond 2⁶⁰, do not change m, and all ranks skip the step.
        * In a hierarchical topology with a single node, nothing is compressed: it is Lion on the mean gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        *,
        maximize: bool = False,
        downlink: Downlink = "majority",
        **wire: Unpack[WireOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, DistributedLionRule(downlink), **wire)


@dataclass
class DistributedLionRule(UpdateRule):
    """The update rule of `DistributedLion`; its argument is that of the optimizer.

    Raises:
        ValueError: naming the argument.
    """

    downlink: Downlink

    no_delay = None

    def __post_init__(self) -> None:
        if self.downlink not in get_args(Downlink):
            raise ValueError(f"downlink={self.downlink!r}: expected 'majority' or 'votes'")

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_number(group, "lr")
        check_number(group, "weight_decay")
        check_betas(group)

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {"downlink": self.downlink}

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        layout = context.layout
        self._m = untouched_zeros(layout.own_size, torch.float32, layout.device)
        self._update = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """β1 m + (1-β1) g, whose sign is sent."""
        self._votes = Votes(context, self.downlink, self._update, _EPS)
        state = State(own={"m": self._m, "update": self._update})
        state.include(self._votes.state())
        return self._votes.compressors, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return self._votes.state().words

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        self._key = rng.worker_key(self.context.seed(0), self.context.step, self.context.topology.node)
        self._votes.begin_step(key=0)  # owners draw nothing

    def channel(self) -> str:
        """See `UpdateRule`."""
        return self._votes.channel()

    def first_flags(self) -> int:
        """See `UpdateRule`."""
        return self._votes.first_flags()

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        shift, packets, signs = (
            part.frame.bucket.state_shift,
            self.context.session.channel.buffers.sent,
            self._votes.signs,
        )
        nonfinite = False
        for run in each_run(part.up_runs):
            here = slice(run.element - shift, run.element - shift + run.count)
            if grad is not None:
                nonfinite |= self._absorb(flat(grad)[run.of_param], here, group["betas"], signed(scale, group))
            if signs is None:
                update = self._update[here]
                # dense_apply does not move a coordinate whose direction is NaN.
                run.floats_in(packets).copy_(torch.where(update.abs() > _EPS, update.sign(), math.nan))
        if signs is not None:
            # Birder's vote, u > r (b + ε) · level, with b = u and a level of 1/2: it is the sign of u if |u| > ε, and
            # a random bit if nothing is left of u.
            vote = {"beta": 0.0, "scale": 1.0, "eps": _EPS, "level": 0.5, "amsgrad": True, "key": self._key}
            state = (self._update, self._update)
            self.context.kernels.birder_encode(part.up_runs, None, *state, signs.active, packets, **vote, shift=shift)
        return nonfinite

    def _absorb(self, grad: Tensor, here: slice, betas: tuple[float, float], scale: Scale) -> bool:
        """Update Lion's two averages, except where the gradient is not finite; whether that was so anywhere."""
        (beta1, beta2), nonfinite = betas, False
        chunks = (values.split(_CHUNK) for values in (grad, self._m[here], self._update[here]))
        for gradient, m, update in zip(*chunks, strict=True):
            g = gradient.to(torch.float32) * scale
            finite = g.abs() <= SQUARABLE
            if bool(finite.all()):
                torch.mul(m, beta1, out=update)
                update += g * (1.0 - beta1)
                m *= beta2
                m += g * (1.0 - beta2)
            else:
                nonfinite = True
                update.copy_(torch.where(finite, m * beta1 + g * (1.0 - beta1), update))
                m.copy_(torch.where(finite, m * beta2 + g * (1.0 - beta2), m))
        return nonfinite

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        return self._votes.settle(flags, self)

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        self._votes.apply(parts, x, low, group)

    @property
    def answers_at_once(self) -> bool:
        """See `UpdateRule`. The activation round is an exchange before that of the votes."""
        return self._votes.activates

    def keep(self) -> None:
        """See `UpdateRule`."""
        self._votes.keep()

    def after_apply(self) -> None:
        """See `UpdateRule`."""
        self._votes.after_apply()

    def portable(self, state: State, *, private: bool) -> State:
        """See `UpdateRule`."""
        # An active coordinate whose update is zero would send random bits, so without updates none is active.
        return super().portable(state, private=private) if private else State()

    def mean_abs_vote(self) -> float:
        """See `UpdateRule`."""
        return self._votes.mean_abs_vote()
