"""CD-Adam: AMSGrad on gradients of which only the changes travel, compressed, in both directions.

Yujia Wang, Lu Lin, Jinghui Chen: "Communication-Compressed Adaptive Gradient Method for Distributed Nonconvex
Optimization". AISTATS 2022.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.compressors.codecs.topk import TopK, check_ratio
from thinwire.compressors.dense import Dense
from thinwire.compressors.markov import Markov, MarkovSign
from thinwire.kernels.modes import Scale, Source
from thinwire.optimizers._adam import SQUARABLE, AdamLike, correction, root_correction, signed
from thinwire.optimizers._greeting import Greeting
from thinwire.optimizers._options import Unpack, WireOptions
from thinwire.optimizers._state import State, Tensors
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.layout import Layout

CodecName = Literal["sign", "topk"]
Compress = Literal["gradient", "momentum"]


class CDAdam(Greeting, AdamLike):
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

    _state_has_buckets = True

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
        if codec not in get_args(CodecName):
            raise ValueError(f"codec={codec!r}: expected 'sign' or 'topk'")
        if compress not in get_args(Compress):
            raise ValueError(f"compress={compress!r}: expected 'gradient' or 'momentum'")
        check_ratio(ratio)
        self._codec: CodecName = codec
        self._ratio = ratio
        self._compress: Compress = compress
        if betas is None:
            betas = (0.0, 0.99) if (codec, compress) == ("sign", "gradient") else (0.9, 0.99)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **wire)

    def _settings(self) -> dict[str, Any]:
        # Scales belong to shards of buckets: other buckets would be another run.
        return {
            "bucket_mb": self._bucket_mb,
            "codec": self._codec,
            "ratio": self._ratio,
            "compress": self._compress,
        }

    def _declare(self, layout: Layout) -> tuple[dict[str, Compressor], State]:
        self._m, self._v, self._peak = (
            torch.zeros(layout.size, dtype=torch.float32, device=layout.device) for _ in range(3)
        )
        state = State(whole={"m": self._m, "v": self._v, "peak": self._peak})
        self._updates = self._layer_numbers("updates", state, layout, torch.int64)
        self._average: Tensor | None = None
        self._signs: MarkovSign | None = None
        self._markov: Markov | MarkovSign | None = None
        if not self._topology.compresses:
            self._dense = Dense(self._kernels)
            return {"dense": self._dense}, state
        if self._compress == "momentum":
            self._average = state.own["average"] = torch.zeros(
                layout.own_size, dtype=torch.float32, device=layout.device
            )
        node = self._topology.node
        if self._codec == "topk":
            self._markov = Markov(layout, node, self._kernels, functools.partial(TopK, self._kernels, self._ratio))
        else:
            self._markov = self._signs = MarkovSign(layout, node, self._kernels)
            state.own_words["said"] = self._signs.said
            state.words.update(alive=self._signs.active, spoke=self._signs.spoke)
            state.shards["sent_scale"] = self._signs.sent_scales
        state.own["known"] = self._markov.known
        state.owned["mean"] = self._markov.mean
        state.whole["followed"] = self._markov.followed
        return {self._codec: self._markov}, state

    def _agreed_state(self) -> Tensors:
        followed = {} if self._markov is None else {"followed": self._markov.followed}
        return {"m": self._m, "v": self._v, "peak": self._peak, **followed}

    def _portable(self, *, private: bool) -> State:
        state = super()._portable(private=private)
        if self._markov is None:
            return state
        if not private:
            # What is followed is the mean of what is known, and starts from zero with it.
            return replace(state, whole={name: whole for name, whole in state.whole.items() if name != "followed"})
        # All that the owners know of workers is their mean. If it is what is known of each, it is their mean again.
        own = {name: own for name, own in state.own.items() if name != "known"}
        return replace(state, own=own, owned={"mean": self._markov.mean, "known": self._markov.mean})

    def _begin_step(self) -> None:
        """See `WireOptimizer._begin_step`."""
        super()._begin_step()
        if self._signs is not None:
            self._signs.begin_step(greeting=self._greets())

    @property
    def _has_hellos(self) -> bool:
        return self._signs is not None

    @property
    def _needs_no_host(self) -> bool:
        return not self._greets() and self._codec == "sign"

    def _not_taken(self, positions: Sequence[int]) -> None:
        self._take_back(self._updates, positions)

    def _local(
        self, position: int, part: Part, grad: Tensor | None, group: dict[str, Any], scale: Scale
    ) -> bool | None:
        scale = signed(scale, group)
        if self._markov is None:
            return self._dense.encode(part, grad, scale, SQUARABLE)
        return self._markov.encode(part, grad, self._average, beta=group["betas"][0], scale=scale)

    def _settle(self, flags: int) -> int:
        if self._signs is not None and self._greets():
            if flags & packet.NONFINITE:
                self._signs.give_up()
                return flags
            self._signs.recall(told=self._average is not None)
            flags = self._exchange_after_greeting()
        if self._markov is not None:
            self._markov.hear()
        if flags & packet.NONFINITE:
            self._follow(range(len(self._flat_params)))
        return flags

    def _apply(
        self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: dict[str, Any]
    ) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        self._updates.now[position] += 1
        updates, buffers, signs, markov = self._updates.now[position], self._channel.buffers, self._signs, self._markov
        for part in parts:
            self._kernels.amsgrad_apply(
                part.down_runs,
                x,
                low,
                None if markov is None else markov.followed,
                self._m,
                self._v,
                self._peak,
                buffers.answers,
                None if signs is None else signs.answer_scales,
                None if signs is None else signs.heard,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                rate=lr * correction(beta1, updates),
                correction=root_correction(beta2, updates),
                decay=1.0 - lr * group["weight_decay"],
                source=Source.FLOATS if markov is None else Source.STATE if signs is None else Source.SIGNS,
            )

    def _conclude(self) -> None:
        present = set(self._present())
        self._follow([position for position in range(len(self._flat_params)) if position not in present])

    def _follow(self, positions: Sequence[int]) -> None:
        """Follow the answers for parameters that take no step by them; with that all have been followed."""
        if self._signs is not None:
            for position in positions:
                for part in self._channel.buffers.parts[position]:
                    self._signs.follow(part)
            self._signs.conclude()

    def _contraction(self) -> float:
        return float("nan") if self._markov is None else self._markov.contraction()
