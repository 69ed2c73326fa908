"""Birder: one bit per parameter in both directions, without a warm-up, scales or residuals.

Hanyang Peng, Shuang Qin, Yue Yu, Jin Wang, Hui Wang, Ge Li: "Birder: Communication-Efficient 1-bit Adaptive Optimizer
for Practical Distributed DNN Training". NeurIPS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire._checks import check_seed
from thinwire.compressors.stochastic_sign import Downlink
from thinwire.kernels import rng
from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import signed
from thinwire.optimizers.inputs import check_number
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.optimizers.votes import Votes
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.state import State, Tensors

_GAINS = {"bit": 2.0, "majority": 1.5, "votes": 1.5}
"""The best values in `thinwire study`."""


class Birder(WireOptimizer):
    r"""Birder (Peng et al., NeurIPS 2023): a 1-bit adaptive optimizer for data-parallel training.

    Worker i keeps two averages of its own gradient g. It computes their ratio and clamps it to [-1, 1]::

        m ← β m + (1-β) g        b ← β_b b + (1-β_b) |g|        u = clamp(κ · m / (b + ε) · (1-β_bᵗ)/(1-βᵗ))

    `beta_b=None` is the paper's rule: β_b = β and κ = 1. Then |m| ≤ b, and nothing is clamped or corrected. The
    defaults are the settings that did best in `thinwire study` (docs/convergence.md).

    The worker sends u as one bit, `+1` with probability (1+u)/2. The owner of a shard averages the bits,
    ū = mean Q(u_i), and answers with one bit. All ranks move by it::

        x ← (1 - lr·λ) x - lr · Q(ū)

    `downlink="majority"` replaces Q(ū) by sign(ū). `downlink="votes"` replaces it by ū itself.

    Example::

        model = DDP(net)
        opt = thinwire.Birder(model.parameters(), lr=1e-3, weight_decay=0.1)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `beta`, `beta_b`,
            `gain`, `weight_decay` and `maximize`.
        lr: step size. With `downlink="bit"` or "majority", every active coordinate moves by exactly this much per step.
        beta: decay of m, in [0, 1). It is smaller than AdamW's, because one bit of a long average is mostly noise.
        beta_b: decay of b. None: the same as `beta`, as in the paper. The default is larger and makes b less noisy.
        gain: κ. A larger u carries more signal and less sampling noise; the best learning rate falls by about the same
            factor. None: 1 with `beta_b=None`, which is the paper's rule; otherwise 2 with `downlink="bit"` and 1.5
            with the others.
        eps: a coordinate whose b is at most `eps` counts as having no gradient and becomes inactive.
        weight_decay: decoupled decay λ, as in AdamW.
        amsgrad: never let b decrease. The paper's proof assumes this; its experiments do not use it.
        maximize: ascend instead of descend.
        downlink: what owners answer.
            "bit": one re-sampled bit, as in the paper.
            "majority": the sign that most workers sent. In a tie, the sign of one worker, a different one at each step.
            This is also one bit down, without the noise of sampling, but biased: its expectation is not the mean of all
            u_i. It increases with that mean, about √(2n/π) times as steeply for small means.
            "votes": the number of votes, in ceil(log2(n+1)) bits. This removes the noise of the second sampling and is
            unbiased.
        seed: seed of the sampling; the same on all ranks.
        process_group: the ranks that train together; the default group if None.
        topology: "flat": every rank is a worker. "hierarchical": every node is a worker. Its ranks average their
            gradients over their fast link. Each rank then keeps m and b only for its slice of the model, and exchanges
            only that slice with the other nodes, so 1/G of the bytes leave a node of G ranks. This saves 8 (1 - 1/G)
            bytes per parameter for m and b, and costs 4 bytes (2 in bfloat16) to stage gradients. "auto": hierarchical
            if there are several nodes of several ranks according to `mesh` or torchrun's LOCAL_WORLD_SIZE, else flat.
        mesh: for ordinary parameters, a two-dimensional DeviceMesh of the same ranks, one row per node, if
            LOCAL_WORLD_SIZE is not set. For parameters that `fully_shard` (FSDP2) has sharded, their mesh: replicas
            first, then shards. Packets then go to the other replicas only, each of which is a worker, and `attach` is
            needed: docs/fsdp.md.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32. Results do not depend on it.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm before anything else happens to it, also under `attach`.
            Each parameter p has a part of the limit: g_p ← g_p min(1, τ_p/‖g_p‖), τ_p = clip_norm √((q_p + d_p/d)/2),
            where d_p of d elements are those of p, and q_p is its average share of the squared norm so far. The norm
            of the whole gradient is then at most `clip_norm`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value], before `clip_norm`, at
            the cost of a copy of the gradient. None: no limit.
        delay: 1 to apply the answer of each step in the next one, as in Pipe-SGD (Li et al., NeurIPS 2018), on CPUs:
            x_{t+1} = (1 - lr_t·λ) x_t - lr_t · answer_{t-1}. The exchange then has a whole step to itself, forward
            included, and a link may be as slow as one step before anybody waits. The first step moves nothing, and
            `synchronize()` applies the last answer. Costs 2 bits per parameter. `thinwire.optimizers.delay` defines
            the details. 0: no delay.
        state_dtype: the dtype of m and b. torch.bfloat16 halves their memory. Use it only with `beta` and `beta_b` of
            at most 0.99: an average that changes by less than 1/256 per step would not change at all.

    When not to use it:
        With few workers and tiny batches, the answer is mostly noise: its variance is 1 - ū² per coordinate, no matter
        how many workers there are. Watch `metrics().mean_abs_vote`. Near 0.8/√n, workers send random bits; a larger
        batch, `downlink="votes"` or "majority" helps. Where a dense all-reduce costs nothing (one machine, or
        100 Gbit/s and a small model), AdamW is simpler.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. A coordinate moves by at most `lr` per step in any case, but a spike dominates
        its averages for many steps. Under `attach`, `clip_grad_norm_` would come after gradients were sent, and
        `step()` raises GradientChanged. Without `attach` it works too, and clips this rank's own gradient.

    Differences from the paper:
        * ε is part of the comparison, and a coordinate whose b is at most ε on all workers neither moves nor decays. In
          the paper it would follow a random walk, because one bit has no zero; docs/protocol.md explains how thinwire
          represents it. A coordinate that becomes active again moves from the step after its first gradient.
        * The division m/b is never carried out: the worker sends `+1` if m > r (b + ε), with r uniform on [-1, 1) and
          the factors of `beta_b` and `gain` on the right. t is the number of the step. If the averages of a coordinate
          start later, or restart after `checkpoint.load(on_mismatch="reset")`, its u is ±1 for some steps.
        * The owner draws one worker's bit at random instead of sampling Q(ū): the same distribution, fewer operations.
        * Decoupled weight decay, `beta_b`, `gain`, `downlink="majority"` and "votes", `state_dtype` and fp32 masters of
          bf16 and fp16 parameters are additions.
        * In a hierarchical topology with a single node, nothing is compressed: x ← (1 - lr·λ) x - lr · u.
        * A parameter whose `grad` is None on all workers does not change in that step, as in torch.optim.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        beta: float = 0.7,
        eps: float = 1e-12,
        weight_decay: float = 0.01,
        *,
        beta_b: float | None = 0.95,
        gain: float | None = None,
        amsgrad: bool = False,
        maximize: bool = False,
        downlink: Downlink = "bit",
        seed: int = 0,
        state_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        rule = BirderRule(seed, eps, amsgrad, downlink, state_dtype)
        if gain is None:
            gain = 1.0 if beta_b is None else _GAINS[downlink]
        averages = {"beta": beta, "beta_b": beta_b, "gain": gain}
        defaults = {"lr": lr, **averages, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, rule, **wire)


@dataclass
class BirderRule(UpdateRule):
    """The update rule of `Birder`; its arguments are those of the optimizer.

    Raises:
        ValueError: naming the argument.
    """

    seed: int
    eps: float
    amsgrad: bool
    downlink: Downlink
    state_dtype: torch.dtype

    no_delay = None
    encode_numbers = ("beta", "beta_b", "gain", "maximize")

    def __post_init__(self) -> None:
        if self.downlink not in get_args(Downlink):
            raise ValueError(f"downlink={self.downlink!r}: expected 'bit', 'majority' or 'votes'")
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype={self.state_dtype!r}: expected torch.float32 or torch.bfloat16")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps={self.eps!r}: expected a number >= 0")
        check_seed(self.seed)

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_number(group, "lr")
        check_number(group, "beta", below=1)
        check_number(group, "beta_b", below=1, none="beta")
        check_number(group, "gain", above=True)
        check_number(group, "weight_decay")
        for name, value in (("eps", self.eps), ("amsgrad", self.amsgrad)):
            if group.get(name, value) != value:
                raise ValueError(
                    f"{name}={group[name]!r} in a parameter group: all groups must use the same value, {value!r}"
                )

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {
            "seed": self.seed,
            "eps": self.eps,
            "amsgrad": self.amsgrad,
            "downlink": self.downlink,
            "state_dtype": str(self.state_dtype),
        }

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        layout = context.layout
        self._m = untouched_zeros(layout.own_size, self.state_dtype, layout.device)
        self._b = untouched_zeros(layout.own_size, self.state_dtype, layout.device)
        # With amsgrad, b never decreases, so m decides: a coordinate is inactive when its m has decayed to eps.
        self._votes = Votes(context, self.downlink, self._m if self.amsgrad else self._b, self.eps)
        state = State(own={"m": self._m, "b": self._b})
        state.include(self._votes.state())
        return self._votes.compressors, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return self._votes.state().words

    def begin_step(self) -> None:
        """See `UpdateRule`. Derives the random keys of this step."""
        step, seed = self.context.step, self.context.seed(self.seed)
        self._worker_key = rng.worker_key(seed, step, self.context.topology.node)
        self._votes.begin_step(rng.owner_key(seed, step))

    def channel(self) -> str:
        """See `UpdateRule`."""
        return self._votes.channel()

    def first_flags(self) -> int:
        """See `UpdateRule`."""
        return self._votes.first_flags()

    @property
    def defers(self) -> bool:
        """See `UpdateRule`."""
        return not self._votes.activates

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        beta, beta_b = group["beta"], group["beta_b"]
        level = 1.0 if beta_b is None else self._filled(beta) / self._filled(beta_b)
        averages = {
            "beta": beta,
            "beta_b": beta_b,
            "level": level / group["gain"],
            "eps": self.eps,
            "scale": signed(scale, group),
            "amsgrad": self.amsgrad,
            "shift": part.frame.bucket.state_shift,
        }
        kernels, state, packets = self.context.kernels, (self._m, self._b), self.context.session.channel.buffers.sent
        signs, key = self._votes.signs, self._worker_key
        if signs is None:
            return kernels.birder_direction(part.up_runs, grad, *state, packets, **averages)
        return kernels.birder_encode(part.up_runs, grad, *state, signs.active, packets, **averages, key=key)

    def _filled(self, beta: float) -> float:
        """The total weight of the gradients so far in an average; the rest is the weight of its initial zero."""
        return 1.0 - beta**self.context.step

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        return self._votes.settle(flags, self)

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        self._votes.apply(parts, x, low, group)

    @property
    def apply_numbers(self) -> Sequence[str] | None:
        """See `UpdateRule`."""
        return self._votes.apply_numbers

    def apply_joined(self, positions: Sequence[int], part: Part, x: Tensor, group: Group) -> bool:
        """See `UpdateRule`."""
        self._votes.apply((part,), x, None, group)
        return True

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
        # An active coordinate whose b is zero would send random bits, so without b no coordinate is active.
        return super().portable(state, private=private) if private else State()

    def mean_abs_vote(self) -> float:
        """See `UpdateRule`."""
        return self._votes.mean_abs_vote()
