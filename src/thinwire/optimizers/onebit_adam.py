"""1-bit Adam: Adam on few bits until its variance has settled, then a momentum in signs and scales, with residuals.

Hanlin Tang, Shaoduo Gan, Ammar Ahmad Awan, Samyam Rajbhandari, Conglong Li, Xiangru Lian, Ji Liu, Ce Zhang, Yuxiong He:
"1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed". ICML 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import AdamMoments, adam_defaults, check_adam_group, correction, signed
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.optimizers.warmup import (
    DenseThenSigns,
    Length,
    StageOptions,
    check_length,
    largest_beta2,
    warn_of_long_warmup,
)
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.state import State, Tensors


class OneBitAdam(WireOptimizer):
    r"""1-bit Adam (Tang et al., ICML 2021): AdamW first, at 4 bits, then one bit per parameter with error feedback.

    The warm-up is AdamW on the quantised mean gradient, at 4.25 bits per parameter and direction::

        g = Q( mean_i Q(g_i + e_i) + ē )

    At its end the variance is frozen as v̂. From then on all workers share the momentum m, and worker i sends a scaled
    sign, C(y) = ‖y‖₂/√len · sign(y)::

        m ← C( mean_i C(β1 m + (1-β1) g_i + e_i) + ē )        x ← (1 - lr·λ) x - lr · m̂ / (√v̂ + ε)

    e_i is the residual of the worker, and ē that of the owner of a shard: what their compressed messages have left out
    so far. There is one scale per `scale_block` parameters.

    With a warm-up of 30 % of the run, a run sends 2 bits per parameter and direction on average. With AdamW's own
    settings it ends where AdamW ends, within its standard deviation: docs/convergence.md. `warmup_bits=None` and
    `scale_block=None` are the paper's: a dense warm-up, and large blocks.

    Example::

        model = DDP(net)
        opt = thinwire.OneBitAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.99), warmup_steps=3000)  # of 10,000 steps
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size, the same as AdamW's.
        betas: decay of the momentum and of the variance. The variance averages over 1/(1-β2) steps, and the warm-up
            takes at least that many. A β2 smaller than AdamW's 0.999 makes it short.
        eps: added to √v̂, as in AdamW.
        weight_decay: decoupled decay λ, as in AdamW.
        warmup_steps: the length of the warm-up: 30 % of the run, or 15 % if it is dense. "auto": until the sum of the
            bias-corrected variance is at least 0.96 of its value 1/(1-β2) steps earlier, and no learning rate has risen
            for that long. It is checked 16 times in that many steps, and the end is logged (logger "thinwire").
        warmup_bits: 4 or 8 sends the gradients of the warm-up quantised: so many bits each, and 16 bits for the scale
            of each block of 64, with residuals at workers and owners. These take 4 + 4/n bytes per parameter with n
            workers, on a CPU only until the warm-up ends. With a single worker nothing is quantised. None sends
            float32.
        total_steps: the length of the run, if known. The constructor warns if the warm-up would take all of it.
        variance_floor: when the variance is frozen, √v̂ of a coordinate is at least this fraction of the root mean
            square over its parameter. A sign moves a row that rarely has a gradient as much as any other; divided by a
            tiny √v̂ it would make huge steps. 0 is the paper's rule.
        maximize: ascend instead of descend.
        scale_block: the number of parameters that share a scale after the warm-up: a multiple of 64, counted from the
            start of a shard. A parameter then costs 1 + 32/scale_block bits per direction, such as 1.008 with 4096.
            Every block is a unit of work, so small blocks take time, and below 1,024 also memory: about 1 kB per
            block. None: one scale per shard.
        error_dtype: the dtype of all residuals. torch.bfloat16 halves their memory.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical topology the node is the
            worker, and a rank keeps the residual only of its slice.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: the size of a bucket, in megabytes of fp32 gradient. None: a quarter of the model, but at least 4 and
            at most 32.
            Scales belong to shards of buckets, so results depend on it.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 1 to apply the answer of each step in the next one, as in `thinwire.Birder`, after the warm-up. Workers
            still encode with the momentum of the step before, so messages are as without a delay. Costs no memory.

    When not to use it:
        When gradients change their magnitude a lot after the warm-up (a new task, a jump of the learning rate): the
        frozen variance does not follow. For the fewest bytes:
        `thinwire.Birder` sends one bit from the first step on. Watch the loss in the steps after the freeze; if it
        rises, freeze later or lower the learning rate.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. The frozen variance does not grow with a spike, which then moves parameters
        far. Under `attach`, `clip_grad_norm_` would come after gradients were sent, and `step()` raises
        GradientChanged. Without `attach` it works too, and clips this rank's own gradient.

    Differences from the paper:
        * Bias correction as in Adam: of the momentum throughout, of the variance until the freeze.
        * One scale per shard of a bucket, or per block of `scale_block` parameters, instead of one per model; and
          decoupled weight decay.
        * The variance floor.
        * A coordinate that never had a gradient (v = 0) neither moves nor decays, in the warm-up and after it.
        * After the warm-up, a parameter without a gradient on one worker counts as zeros there. A parameter without a
          gradient on all workers does not move, while its momentum decays.
        * If a step is skipped because a gradient is not finite, the momentum still changes; parameters do not.
        * A gradient above 2⁶⁰ counts as not finite, because its square would stay in the variance.
        * In a hierarchical topology with a single node, nothing is compressed and the warm-up never ends: it is AdamW.
        * The quantised warm-up is not in the paper. Its residuals are dropped when the warm-up ends. A step that is
          skipped in it changes the residuals, and neither the momentum nor the variance. A coordinate whose gradients
          are so small in their block that each of them is rounded to zero has v = 0, and does not move.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        warmup_steps: Length = "auto",
        warmup_bits: int | None = 4,
        total_steps: int | None = None,
        variance_floor: float = 0.1,
        maximize: bool = False,
        scale_block: int | None = 4096,
        error_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        options = StageOptions(warmup_steps, variance_floor, error_dtype, warmup_bits, scale_block)
        defaults = adam_defaults(lr, betas, eps, weight_decay, maximize=maximize)
        super().__init__(params, defaults, OneBitAdamRule(options), **wire)
        warn_of_long_warmup(options, total_steps, largest_beta2(self.param_groups))


class OneBitAdamRule(UpdateRule):
    """The update rule of `OneBitAdam`.

    Args:
        options: when and how the compressed stage follows the warm-up.
    """

    state_depends_on_buckets = True
    records_buckets = True
    no_delay = None
    encode_numbers = ("betas", "maximize")

    def __init__(self, options: StageOptions) -> None:
        self._options = options
        self.scale_block = options.scale_block
        if options.warmup_steps == "auto":
            self.needs_whole = 'the variance of all parameters for warmup_steps="auto"'

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)
        check_length(self._options.warmup_steps, group["betas"][1])

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return self._options.settings()

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        state = State()
        self._adam = AdamMoments(context, state)
        self._stages = DenseThenSigns(context, state, self._adam, self._options)
        return self._stages.compressors, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._adam.v}

    def progress(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return self._stages.progress()

    def channel(self) -> str:
        """See `UpdateRule`."""
        return self._stages.channel()

    def begin_step(self) -> None:
        """See `UpdateRule`."""
        self._stages.begin_step()

    @property
    def defers(self) -> bool:
        """See `UpdateRule`."""
        return self._stages.compressing

    def revert(self, positions: Sequence[int]) -> None:
        """See `UpdateRule`."""
        for position in positions:
            self._adam.updates.now[position] -= 1

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        return self._stages.encode(part, grad, group, signed(scale, group))

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        self._stages.settle()
        return flags

    @property
    def delays(self) -> bool:
        """See `UpdateRule`. The answer is the momentum, which is kept in any case: workers encode with it."""
        return self._stages.compressing

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        updates = self._adam.updates
        if not self._stages.compressing:
            count, eps, gradient = updates.now[position] + 1, group["eps"], self._stages.mean.floats
            self._adam.apply(position, parts, x, low, group, variance_updates=count, eps=eps, gradient=gradient)
            return
        lr = float(group["lr"])
        updates.now[position] += 1
        rate = lr * correction(group["betas"][0], updates.now[position])
        for part in parts:
            self._stages.apply_signs(part, x, low, rate=rate, decay=1.0 - lr * group["weight_decay"])

    @property
    def apply_numbers(self) -> Sequence[str] | None:
        """See `UpdateRule`."""
        return ("lr", "betas", "weight_decay") if self._stages.compressing else None

    def apply_joined(self, positions: Sequence[int], part: Part, x: Tensor, group: Group) -> bool:
        """See `UpdateRule`. The bias correction depends on the number of updates, which differs for parameters that
        had no gradient in some step."""
        counts = self._adam.updates.now
        count = counts[positions[0]] + 1
        if any(counts[position] + 1 != count for position in positions):
            return False
        for position in positions:
            counts[position] = count
        lr = float(group["lr"])
        rate = lr * correction(group["betas"][0], count)
        self._stages.apply_signs(part, x, None, rate=rate, decay=1.0 - lr * group["weight_decay"])
        return True

    def end_step(self) -> None:
        """See `UpdateRule`."""
        self._stages.end_step(lambda: [1.0] * len(self.context.params))

    def before_save(self, saved: dict[str, Any]) -> None:
        """See `UpdateRule`."""
        self._stages.before_save(saved)

    def portable(self, state: State, *, private: bool) -> State:
        """See `UpdateRule`."""
        return self._stages.portable(state, self.encode, private=private)

    @property
    def needs_compression(self) -> bool:
        """See `UpdateRule`."""
        return self._stages.compressing
