"""1-bit Adam: Adam until its variance has settled, then momentum by signs, scales and error feedback.

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
    warn_of_dense_run,
)
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.state import State, Tensors


class OneBitAdam(WireOptimizer):
    r"""1-bit Adam (Tang et al., ICML 2021): dense AdamW first, then one bit a parameter with error feedback.

    Warm-up is AdamW on the exact mean gradient. When it ends the variance is frozen as v̂, and with the momentum m that
    all workers share, worker i sends the scaled sign C(y) = ‖y‖₂/√len · sign(y) of::

        m ← C( mean_i C(β1 m + (1-β1) g_i + e_i) + ē )        x ← (1 - lr·λ) x - lr · m̂ / (√v̂ + ε)

    where e_i and ē are what the two compressions, at the worker and at the owner of a shard, have not said so far.
    There is one scale for each shard of a bucket.

    Example::

        model = DDP(net)
        opt = thinwire.OneBitAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.99), warmup_steps=1500)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or groups of them, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size, AdamW's.
        betas: decay of the momentum and of the variance. The variance looks back 1/(1-β2) steps, and the warm-up has at
            least as many: a smaller β2 than AdamW's 0.999 makes it short.
        eps: added to √v̂, as in AdamW.
        weight_decay: decoupled decay λ, as in AdamW.
        warmup_steps: how many steps are dense; a tenth to a fifth of the run is common. "auto": until the sum of the
            variance, without its bias, is at least 0.96 of what it was 1/(1-β2) steps before, and no learning rate has
            risen for as long. It is looked at 16 times in that many steps, and logged (logger "thinwire").
        total_steps: the length of the run, if you know it: you are warned if the warm-up is going to take all of it.
        variance_floor: at the switch √v̂ of a coordinate counts for at least this part of the root mean square of its
            parameter's. A sign says as much to a row that hardly ever has a gradient as to all others, and divided by
            next to nothing it would throw the row about. 0 is the paper's rule.
        maximize: ascend instead of descend.
        error_dtype: of the two error memories. torch.bfloat16 halves them.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical one the node is the
            worker: a rank keeps the error memory of its slice only.
        mesh: a two-dimensional DeviceMesh of the same ranks, a row a node, where LOCAL_WORLD_SIZE does not tell.
        node_dtype: of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the bytes.
        bucket_mb: size of an exchange, in megabytes of fp32 gradient; if None a quarter of the model, within 4 to 32.
            Scales belong to shards of buckets, so results depend on it.
        max_consecutive_skips: after so many steps in a row that were skipped for gradients that are not finite, step()
            raises TooManySkips; None for never.
        check_replicas_every: compare a hash of the parameters over all ranks after every so many steps; 0 for never.

    When not to use it:
        When gradients change their size a lot after the warm-up (a new task, a jump of the learning rate): the frozen
        variance does not follow. For short runs, whose warm-up is most of them: use `thinwire.Birder`. Watch the loss
        in the steps after the switch; if it rises, freeze later or lower the learning rate.

    Gradient clipping:
        Under `attach` gradients are on their way before `clip_grad_norm_` sees them, so that it has no effect. Without,
        it scales a worker's own gradient before it is averaged, another factor on each rank.

    Differences from the paper:
        * Bias correction as in Adam, of the momentum throughout, of the variance up to the freeze.
        * A scale a shard of a bucket instead of one a model, and decoupled weight decay.
        * The floor of the frozen variance.
        * A coordinate that has never had a gradient (v = 0) neither moves nor decays, during warm-up and after it.
        * After the switch a parameter without a gradient on a worker counts as one with zeros there; one without a
          gradient on all workers does not move, while its momentum decays.
        * The momentum takes part in a step that is skipped for a gradient that is not finite; parameters do not.
        * A gradient of more than 2⁶⁰ counts as one that is not finite: its square would stay in the variance.
        * In a hierarchical topology of a single node nothing is compressed and the warm-up never ends: it is AdamW.
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
        total_steps: int | None = None,
        variance_floor: float = 0.1,
        maximize: bool = False,
        error_dtype: torch.dtype = torch.float32,
        **wire: Unpack[WireOptions],
    ) -> None:
        rule = OneBitAdamRule(StageOptions(warmup_steps, variance_floor, error_dtype))
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, maximize=maximize), rule, **wire)
        warn_of_dense_run(warmup_steps, total_steps, largest_beta2(self.param_groups))


class OneBitAdamRule(UpdateRule):
    """The update rule of `OneBitAdam`.

    Args:
        options: when and how the second stage follows the first.
    """

    state_depends_on_buckets = True
    records_buckets = True

    def __init__(self, options: StageOptions) -> None:
        self._options = options

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

    def shared_state(self) -> Tensors:
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

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        updates = self._adam.updates
        if not self._stages.compressing:
            count, eps = updates.now[position] + 1, group["eps"]
            self._adam.apply(position, parts, x, low, group, variance_updates=count, eps=eps)
            return
        lr = float(group["lr"])
        updates.now[position] += 1
        rate = lr * correction(group["betas"][0], updates.now[position])
        for part in parts:
            self._stages.apply_signs(part, x, low, rate=rate, decay=1.0 - lr * group["weight_decay"])

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
