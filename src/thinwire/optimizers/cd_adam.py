"""CD-Adam: AMSGrad on a gradient of which only compressed differences are sent, in both directions.

Yujia Wang, Lu Lin, Jinghui Chen: "Communication-Compressed Adaptive Gradient Method for Distributed Nonconvex
Optimization". AISTATS 2022.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.compressors.codecs.topk import TopK, check_ratio
from thinwire.compressors.dense import Dense
from thinwire.compressors.kept_answers import KeptWords
from thinwire.compressors.markov import Markov, MarkovSign
from thinwire.kernels.modes import Scale, Source
from thinwire.optimizers.adam import (
    DENSE,
    SQUARABLE,
    adam_defaults,
    check_adam_group,
    correction,
    root_correction,
    signed,
)
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule, exchange_after_activation
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State, Tensors

CodecName = Literal["sign", "topk"]
Compress = Literal["gradient", "momentum"]


class CDAdam(WireOptimizer):
    r"""CD-Adam (Wang, Lin and Chen, AISTATS 2022): compressed AMSGrad, without a warm-up or a frozen variance.

    Workers and owners send the compressed difference between their value and what the receivers already know of it.
    With C(y) = ‖y‖₁/len · sign(y) for each shard of a bucket, the first line runs on worker i, the second on the owner
    of a shard (its last update on all ranks), and the rest on all ranks::

        q_i = C(g_i - ĝ_i)        ĝ_i ← ĝ_i + q_i
        ĝ ← ĝ + mean(q_i)         q = C(ĝ - g̃)           g̃ ← g̃ + q

        m ← β1 m + (1-β1) g̃       v ← β2 v + (1-β2) g̃²   v̂ ← max(v̂, v)
        x ← (1 - lr·λ) x - lr/(1-β1ᵗ) · m / (√v̂/√(1-β2ᵗ) + ε)

    All of these values start at zero. g̃ is the same on all ranks, to the bit.

    Example::

        model = DDP(net)
        opt = thinwire.CDAdam(model.parameters(), lr=1e-3)  # no momentum by default: the lag of g̃ acts as one
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    `opt.metrics().contraction` is ‖y - C(y)‖²/‖y‖² of this rank's last message; for signs that is 1 - ‖y‖₁²/(d‖y‖₂²).
    It is near 0.36 for normally distributed differences, and approaches 1 if a few elements dominate. The larger it
    is, the more slowly g̃ follows.

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size. Steps are AMSGrad's, but of a gradient that lags: search around AdamW's learning rate.
        betas: decay of the momentum and of the variance. None: (0, 0.99) for signs of gradients, otherwise (0.9, 0.99).
            With signs of gradients, g̃ lags behind the gradient, which has the effect of a momentum; a second momentum
            makes steps oscillate. In `thinwire study`, one seed of a transformer ends at a loss of 2.11 with β1 = 0 and
            of 2.18 with β1 = 0.5.
        eps: added to √v̂, as in AdamW.
        weight_decay: decoupled decay λ, as in AdamW.
        codec: "sign": one bit per element and one scale per shard. "topk": the largest elements of each shard by index
            and value, 64 bits each.
        ratio: for "topk", the fraction of elements that is sent, in (0, 1]. The default sends as many bytes as signs.
        compress: "gradient": send g_i - ĝ_i, as in the paper. "momentum": send μ_i - ĝ_i, where each worker keeps its
            own average μ_i ← β1 μ_i + (1-β1) g_i, after EF21-SGDM. With small noisy batches, the noise of one step is
            most of every difference, and the average reduces it. It costs 4 more bytes per parameter. In the demo it
            was no better: try both.
        maximize: ascend instead of descend.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical topology the node is the
            worker, and a rank keeps ĝ_i only for its slice.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32.
            Scales, and the elements that "topk" selects, belong to shards of buckets, so results depend on it.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 1 to apply the answer of each step in the next one, as in `thinwire.Birder`: step t computes m, v, v̂ and
            x from g̃ of step t-1. ĝ_i, ĝ and g̃ themselves follow as without a delay. Costs no memory, but with "sign" a
            pass over g̃; in a hierarchical topology with a single node 4 bytes per parameter.

    When not to use it:
        With small noisy batches: differences of gradients are then mostly noise. One bit with one scale per shard
        carries little of them, and g̃ lags behind. In `thinwire study` it ends a few per cent above AdamW's loss on text
        (docs/convergence.md). `thinwire.Birder` needs no warm-up either and tolerates noise.

        With "sign", if single coordinates often have no gradient for a while, but never 64 neighbours at once. Their g̃
        oscillates about zero in steps of the whole shard's scale, and because Adam normalizes these steps, the
        coordinates wander by up to 0.35 lr per step. Rows of an embedding are fine, unless momenta are compressed:
        these decay but do not reach zero. With "topk", coordinates whose gradients are always among the smaller ones
        of their shard are never sent.

        If single gradients are sometimes huge: v̂ is a maximum and never decreases, and with "sign" the scale spreads
        such a gradient over the whole shard. Beyond 10⁸ times the usual size, the float32 copies of ĝ_i and ĝ diverge
        permanently. If memory is short: it keeps 20 bytes per parameter, AdamW 8.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. A spike on one rank stays in what all ranks know of it until later messages
        have corrected it. Under `attach`, `clip_grad_norm_` would come after gradients were sent, and `step()` raises
        GradientChanged. Without `attach` it works too, and clips this rank's own gradient.

    Differences from the paper:
        * Bias correction as in torch's Adam(amsgrad=True), and decoupled weight decay.
        * One scale per shard of a bucket instead of one per model. It covers only coordinates that have had a gradient.
        * With "sign", one bit marks 64 consecutive coordinates whose gradients are zero on all workers. ĝ_i, ĝ and g̃
          become zero there at once.
        * A coordinate that never had a gradient on any worker neither moves nor decays. (With "sign" it would
          oscillate, because one bit has no zero.) If its first gradient comes after the first step, that gradient only
          activates it.
        * `compress="momentum"`, `codec="topk"` and `delay` are additions.
        * A parameter without a gradient on one worker counts as zeros there, and its μ_i does not change. A parameter
          without a gradient on all workers does not move, while g̃ still follows.
        * If a step is skipped because a gradient is not finite, the exchange still takes place: ĝ_i and g̃ follow, and
          the non-finite element contributes nothing new. m, v and parameters do not change.
        * In a hierarchical topology with a single node, nothing is compressed: it is AMSGrad on the mean gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        codec: CodecName = "sign",
        ratio: float = 1 / 64,
        compress: Compress = "gradient",
        maximize: bool = False,
        **wire: Unpack[WireOptions],
    ) -> None:
        rule = CDAdamRule(codec, ratio, compress)
        if betas is None:
            betas = (0.0, 0.99) if (codec, compress) == ("sign", "gradient") else (0.9, 0.99)
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, maximize=maximize), rule, **wire)


@dataclass
class CDAdamRule(UpdateRule):
    """The update rule of `CDAdam`; its arguments are those of the optimizer.

    Raises:
        ValueError: naming the argument.
    """

    codec: CodecName
    ratio: float
    compress: Compress
    state_depends_on_buckets = True
    records_buckets = True
    no_delay = None

    def __post_init__(self) -> None:
        if self.codec not in get_args(CodecName):
            raise ValueError(f"codec={self.codec!r}: expected 'sign' or 'topk'")
        if self.compress not in get_args(Compress):
            raise ValueError(f"compress={self.compress!r}: expected 'gradient' or 'momentum'")
        check_ratio(self.ratio)

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {"codec": self.codec, "ratio": self.ratio, "compress": self.compress}

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        layout, kernels, node = context.layout, context.kernels, context.topology.node
        self._m, self._v, self._peak = (untouched_zeros(layout.size, torch.float32, layout.device) for _ in range(3))
        state = State(whole={"m": self._m, "v": self._v, "peak": self._peak})
        self._updates = state.add_numbers("updates", len(layout.slots), torch.int64)
        self._average: Tensor | None = None
        self._signs: MarkovSign | None = None
        self._markov: Markov | MarkovSign | None = None
        self._kept: KeptWords | None = None
        """With a delay, what is applied in the next step, if nothing is compressed. Otherwise that is g̃."""
        if not context.topology.compresses:
            self._dense = Dense(kernels)
            if context.delayed:
                self._kept = KeptWords(layout, Dense.payload.word_bytes)
                state.include(self._kept.state())
            return {DENSE: self._dense}, state
        if self.compress == "momentum":
            self._average = untouched_zeros(layout.own_size, torch.float32, layout.device)
            state.own["average"] = self._average
        if self.codec == "topk":
            self._markov = Markov(layout, node, kernels, functools.partial(TopK, kernels, self.ratio))
        else:
            self._markov = self._signs = MarkovSign(layout, node, kernels)
        state.include(self._markov.state())
        return {self.codec: self._markov}, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        followed = {} if self._markov is None else {"followed": self._markov.followed}
        kept = {} if self._kept is None else self._kept.state().words
        return {"m": self._m, "v": self._v, "peak": self._peak, **followed, **kept}

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        if self._signs is not None:
            self._signs.begin_step(activation=self._activates)

    def channel(self) -> str:
        """See `UpdateRule`."""
        return DENSE if self._markov is None else self.codec

    @property
    def _activates(self) -> bool:
        """Whether this step begins with an activation round."""
        return self._signs is not None and self.context.step == 1

    def first_flags(self) -> int:
        """See `UpdateRule`."""
        return packet.ACTIVATION if self._activates else 0

    @property
    def defers(self) -> bool:
        """See `UpdateRule`."""
        return not self._activates and self.codec == "sign"

    def revert(self, positions: Sequence[int]) -> None:
        """See `UpdateRule`."""
        for position in positions:
            self._updates.now[position] -= 1

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        scale = signed(scale, group)
        if self._markov is None:
            return self._dense.encode(part, grad, scale, SQUARABLE)
        return self._markov.encode(part, grad, self._average, beta=group["betas"][0], scale=scale)

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        if self._signs is not None and self._activates:
            if flags & packet.NONFINITE:
                self._signs.abandon()
                return flags
            self._signs.activate(has_momentum=self._average is not None)
            flags = exchange_after_activation(self)
        if self._markov is not None:
            self._markov.read_answers()
        if flags & packet.NONFINITE:
            self._follow(range(len(self.context.params)))
        return flags

    @property
    def answers_at_once(self) -> bool:
        """See `UpdateRule`. The activation round is an exchange before that of the differences."""
        return self._activates

    def keep(self) -> None:
        """See `UpdateRule`. With a delay, g̃ follows as soon as an exchange has ended, because owners compute the next
        answers from it. It is then left alone until the next exchange has ended, and `apply` comes before that."""
        if self._kept is not None:
            self._kept.keep(self.context.session.channel.buffers)
        else:
            self._follow(range(len(self.context.params)))

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        self._updates.now[position] += 1
        updates, markov, kept = self._updates.now[position], self._markov, self._kept
        signs = None if self.context.delayed else self._signs  # with a delay, g̃ has the answer already
        answers = self.context.session.channel.buffers.answers if kept is None else kept.memory
        for part in parts:
            self.context.kernels.amsgrad_apply(
                part.down_runs if kept is None else kept.runs(part),
                x,
                low,
                None if markov is None else markov.followed,
                self._m,
                self._v,
                self._peak,
                answers,
                None if signs is None else signs.answer_scales,
                None if signs is None else signs.signed_now,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                rate=lr * correction(beta1, updates),
                correction=root_correction(beta2, updates),
                decay=1.0 - lr * group["weight_decay"],
                source=Source.FLOATS if markov is None else Source.STATE if signs is None else Source.SIGNS,
            )

    def after_apply(self) -> None:
        """See `UpdateRule`."""
        if not self.context.delayed:
            present = set(self.present())
            self._follow([position for position in range(len(self.context.params)) if position not in present])

    def _follow(self, positions: Sequence[int]) -> None:
        """Add the answers to g̃ for parameters that this step does not move. After that, all answers are in g̃."""
        if self._signs is not None:
            for position in positions:
                for part in self.context.session.channel.buffers.parts[position]:
                    self._signs.follow(part)
            self._signs.update_activity()

    def portable(self, state: State, *, private: bool) -> State:
        """See `UpdateRule`."""
        portable = super().portable(state, private=private)
        if self._markov is None:
            return portable
        if not private:
            # g̃ follows the mean of all ĝ_i, and restarts from zero with them.
            return replace(
                portable, whole={name: whole for name, whole in portable.whole.items() if name != "followed"}
            )
        # Owners know only the mean of all ĝ_i. If every worker continues from that mean, it is still their mean.
        own = {name: own for name, own in portable.own.items() if name != "known"}
        return replace(portable, own=own, owned={"mean": self._markov.mean, "known": self._markov.mean})

    def contraction(self) -> float:
        """See `UpdateRule`."""
        return float("nan") if self._markov is None else self._markov.contraction()
