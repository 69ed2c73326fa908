"""CD-Adam: AMSGrad on gradients of which only the changes travel, compressed, in both directions.

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
from thinwire.transport.state import State, Tensors

CodecName = Literal["sign", "topk"]
Compress = Literal["gradient", "momentum"]


class CDAdam(WireOptimizer):
    r"""CD-Adam (Wang, Lin and Chen, AISTATS 2022): compressed AMSGrad, no warm-up and nothing frozen.

    Workers and owners send how far what they have to say is from what is known of it. With C(y) = ‖y‖₁/len · sign(y)
    for each shard of a bucket, worker i, the owner of a shard, and everybody::

        q_i = C(g_i - ĝ_i)        ĝ_i ← ĝ_i + q_i
        ĝ ← ĝ + mean(q_i)         q = C(ĝ - g̃)           g̃ ← g̃ + q

        m ← β1 m + (1-β1) g̃       v ← β2 v + (1-β2) g̃²   v̂ ← max(v̂, v)
        x ← (1 - lr·λ) x - lr/(1-β1ᵗ) · m / (√v̂/√(1-β2ᵗ) + ε)

    All of it begins at zero. g̃ is the same on all ranks, to the bit.

    Example::

        model = DDP(net)
        opt = thinwire.CDAdam(model.parameters(), lr=1e-3)  # without momentum: what travels has enough of it
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    `opt.metrics().contraction` is ‖y - C(y)‖²/‖y‖² of this rank's last message, 1 - ‖y‖₁²/(d‖y‖₂²) for signs: near 0.36
    for normally distributed differences, nearer to 1 the more a few of them stand out, and the slower g̃ follows.

    Args:
        params: parameters or groups of them, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size. Steps are AMSGrad's, but of a gradient that lags: search around AdamW's.
        betas: decay of the momentum and of the variance. If None (0, 0.99) for signs of gradients: g̃ trails behind the
            gradient, which is a momentum by itself, and another one on top makes steps swing (in `thinwire study` one
            seed of a transformer ends at 2.11 with β1 = 0 and at 2.18 with 0.5). Else (0.9, 0.99).
        eps: added to √v̂, as in AdamW.
        weight_decay: decoupled decay λ, as in AdamW.
        codec: "sign" for one bit an element and a scale a shard; "topk" for the largest elements of each shard by index
            and value, 64 bits each.
        ratio: for "topk" the share of elements that travel, in (0, 1]. The default sends as many bytes as signs do.
        compress: "gradient" sends g_i - ĝ_i, as in the paper. "momentum" sends μ_i - ĝ_i with each worker's own average
            μ_i ← β1 μ_i + (1-β1) g_i, after EF21-SGDM, since with noisy small batches the noise of one step is most of
            every difference. 4 bytes a parameter more. In the demo it was no better: try both.
        maximize: ascend instead of descend.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical one the node is the
            worker: a rank keeps ĝ_i of its slice only.
        mesh: a two-dimensional DeviceMesh of the same ranks, a row a node, where LOCAL_WORLD_SIZE does not tell.
        node_dtype: of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the bytes.
        bucket_mb: size of an exchange, in megabytes of fp32 gradient; if None a quarter of the model, within 4 to 32.
            Scales (and the elements of "topk") belong to shards of buckets, so results depend on it.
        max_consecutive_skips: after so many steps in a row that were skipped for gradients that are not finite, step()
            raises TooManySkips; None for never.
        check_replicas_every: compare a hash of the parameters over all ranks after every so many steps; 0 for never.

    When not to use it:
        With small noisy batches: differences of gradients are then mostly noise, of which one bit with one scale a
        shard says little, and g̃ trails behind: in `thinwire study` it ends a few per cent above AdamW's loss on text
        (docs/convergence.md). `thinwire.Birder` needs no warm-up either and copes with noise.

        With "sign", where coordinates often have no gradient for a while, but not 64 neighbours at once: g̃ swings about
        zero there in steps of the whole shard's scale, and as Adam takes every swing for large they wander by up to
        0.35 lr a step (rows of an embedding are fine, unless momenta are compressed, which fade but do not end). With
        "topk" coordinates whose gradients are always among the smaller ones of their shard are never sent.

        Where single gradients are sometimes huge: v̂ is a maximum and does not forget, "sign" tells the whole shard of
        it by the scale, and beyond 10⁸ times their usual size the float32 memories ĝ_i and ĝ part for good. Where
        memory is short: it keeps 20 bytes a parameter, AdamW 8.

    Gradient clipping:
        Under `attach` gradients are on their way before `clip_grad_norm_` sees them, so that it has no effect. Without,
        it scales a worker's own gradient, and g̃ follows the mean of clipped gradients.

    Differences from the paper:
        * Bias correction as in torch's Adam(amsgrad=True), and decoupled weight decay.
        * A scale a shard of a bucket instead of one a model, and of those coordinates only that have had a gradient.
        * With "sign", 64 coordinates in a row whose gradients are zero on all workers are told to be so, by one bit:
          ĝ_i, ĝ and g̃ are zero there at once.
        * A coordinate that has never had a gradient on any worker neither moves nor decays ("sign" would shake it: one
          bit has no zero). Its first gradient after the first step only announces it.
        * `compress="momentum"`, `codec="topk"`.
        * A parameter without a gradient on a worker counts as one with zeros there (its μ_i stays); one without a
          gradient on all workers does not move, while g̃ follows.
        * A step that is skipped for a gradient that is not finite is exchanged (ĝ_i and g̃ follow, the element in
          question says nothing new), but neither m, v nor parameters change.
        * In a hierarchical topology of a single node nothing is compressed: it is AMSGrad on the mean gradient.
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
        self._m, self._v, self._peak = (
            torch.zeros(layout.size, dtype=torch.float32, device=layout.device) for _ in range(3)
        )
        state = State(whole={"m": self._m, "v": self._v, "peak": self._peak})
        self._updates = state.add_numbers("updates", len(layout.slots), torch.int64)
        self._average: Tensor | None = None
        self._signs: MarkovSign | None = None
        self._markov: Markov | MarkovSign | None = None
        if not context.topology.compresses:
            self._dense = Dense(kernels)
            return {DENSE: self._dense}, state
        if self.compress == "momentum":
            self._average = torch.zeros(layout.own_size, dtype=torch.float32, device=layout.device)
            state.own["average"] = self._average
        if self.codec == "topk":
            self._markov = Markov(layout, node, kernels, functools.partial(TopK, kernels, self.ratio))
        else:
            self._markov = self._signs = MarkovSign(layout, node, kernels)
        state.include(self._markov.state())
        return {self.codec: self._markov}, state

    def shared_state(self) -> Tensors:
        """See `UpdateRule`."""
        followed = {} if self._markov is None else {"followed": self._markov.followed}
        return {"m": self._m, "v": self._v, "peak": self._peak, **followed}

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

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        self._updates.now[position] += 1
        updates, signs, markov = self._updates.now[position], self._signs, self._markov
        for part in parts:
            self.context.kernels.amsgrad_apply(
                part.down_runs,
                x,
                low,
                None if markov is None else markov.followed,
                self._m,
                self._v,
                self._peak,
                self.context.session.channel.buffers.answers,
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
        present = set(self.present())
        self._follow([position for position in range(len(self.context.params)) if position not in present])

    def _follow(self, positions: Sequence[int]) -> None:
        """Add the answers to g̃ for parameters that take no step by them. With that, all answers are added."""
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
        # Owners know only the mean of all ĝ_i. If every worker continues with it, it is their mean again.
        own = {name: own for name, own in portable.own.items() if name != "known"}
        return replace(portable, own=own, owned={"mean": self._markov.mean, "known": self._markov.mean})

    def contraction(self) -> float:
        """See `UpdateRule`."""
        return float("nan") if self._markov is None else self._markov.contraction()
