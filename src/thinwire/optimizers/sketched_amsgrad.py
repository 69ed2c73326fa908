"""SketchedAMSGrad: a count sketch of all momenta selects the coordinates to fetch, and only these move.

Wenhan Xian, Feihu Huang, Heng Huang: "Communication-Efficient Adam-Type Algorithms for Distributed Data Mining". 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire._checks import check_seed, is_integer
from thinwire.compressors.all_reduce import EncodedAllReduce
from thinwire.compressors.codecs.count_sketch import MAX_ELEMENTS, CountSketch
from thinwire.compressors.codecs.dense import Floats
from thinwire.compressors.sketching import Sketching
from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import adam_defaults, check_adam_group, signed
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import HOST
from thinwire.transport.session import LOCAL
from thinwire.transport.state import State, Tensors

_LARGEST = 2.0**56
"""The largest gradient that is accepted. Coordinates that are not picked accumulate in e, which must stay below 2⁶⁰. A
coordinate with a larger gradient has a large v̂ and is rarely picked, so e would exceed that limit, and every step from
then on would be skipped."""


class SketchedAMSGrad(WireOptimizer):
    r"""SketchedAMSGrad (Xian, Huang and Huang, 2022): sum sketches, then fetch the k largest coordinates.

    A worker adds the residual e, what it has not sent so far, to its momentum. All ranks receive the mean of the
    workers' count sketches S::

        m ← β1 m + (1-β1) g        p = m + (lr_before/lr) e        s = mean over workers of S(p)

    All ranks pick the same k coordinates I: those with the largest |U(s)|/√v̂, where U(s) is the sketch's estimate of a
    coordinate. A second exchange fetches the exact means p̄ and ḡ of p and g on I. Only the coordinates in I change::

        v ← β2 v + (1-β2) ḡ²        v̂ ← max(v̂, v)        x ← x - lr · p̄/√v̂        e = p off I, 0 on I

    v and v̂ start at ε.

    Each step sends rows · columns + 2k floats, plus one per parameter tensor, each of them up and down. With the
    defaults that is 4 bits per parameter and direction, an eighth of what DDP sends.

    The accuracy of the sketch: an estimate is within √(8/columns)·‖p̄‖₂ of the true value with probability 0.984
    (5 rows). With the default columns, that bound is 20 times the root mean square of p̄. Larger coordinates are found.
    A smaller one may be missed; it then stays in e and grows there until it is found. Estimates are never applied.

    Example::

        model = DDP(net)
        opt = thinwire.SketchedAMSGrad(model.parameters(), lr=1e-3)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or parameter groups, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size. A coordinate that is picked moves by all that has accumulated for it, so the rate is smaller than
            AdamW's. What is sent depends on it: under `attach`, set it before backward, as schedulers do.
        betas: decay of the momentum and of the variance.
        eps: the initial value of v, a squared gradient. When a coordinate is picked for the first time, it moves by
            everything that has accumulated for it. If its gradient happens to be small in that step, the divisor is
            little more than √ε. Nothing else bounds the step, so too small an ε makes it huge. Coordinates whose
            gradients are below √ε move slowly.
        weight_decay: decoupled decay λ. It applies to a coordinate from the step after its first update on.
        rows: the number of independent estimates in a sketch, 1 to 15.
        columns: the number of cells per row. None: a fiftieth of the number of parameters, at least 64.
        k: how many coordinates move per step, at most all. None: a hundredth of the parameters, at least 32.
        seed: seed of the hashes; the same on all ranks.
        maximize: ascend instead of descend.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical topology the node is the
            worker: each of its ranks sketches one slice, and the sketches are summed on the fast link.
        mesh: a two-dimensional DeviceMesh of the same ranks, one row per node, if LOCAL_WORLD_SIZE is not set.
        node_dtype: the dtype of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the
            bytes.
        bucket_mb: how much is sketched at a time while backward runs, in megabytes of fp32 gradient. None: a quarter of
            the model, but at least 4 and at most 32. In a flat topology results do not depend on it. In a hierarchical
            one it decides which rank sketches which elements, and so the rounding of sums.
        max_consecutive_skips: `step()` raises TooManySkips after this many skipped steps in a row. All ranks skip a
            step if a gradient on any rank is not finite. None: never.
        check_replicas_every: compare a hash of the parameters across all ranks every this many steps; 0 for never.
        clip_norm: clip this rank's own gradient to this norm, as in `thinwire.Birder`. None: no limit.
        clip_value: clip each element of this rank's own gradient to [-clip_value, clip_value]. None: no limit.
        delay: 0. `delay=1` of other optimizers is refused here, with the reason.

    When not to use it:
        When a step must be fast: nothing can be sent before all gradients are known, so backward does not hide the
        exchange, and the sketch takes twenty passes over the parameters. For dense models and short runs
        (`thinwire demo --optimizer sketched-amsgrad` shows one), `thinwire.Birder` sends less and moves every
        coordinate. SketchedAMSGrad is for gradients dominated by a few coordinates, fewer than `columns`. Otherwise
        noise decides what is picked: with an embedding of which a fifth of the rows was in use, 75 % of the picks were
        of rows without gradients.

    Gradient clipping:
        Use `clip_norm` or `clip_value`. The variance never falls after a spike, so later steps stay small. Under
        `attach`, `clip_grad_norm_` would come after gradients were sent, and `step()` raises GradientChanged. Without
        `attach` it works too, and clips this rank's own gradient.

    Differences from the paper:
        * v is updated on I only, by the exact mean gradient. This is the consistent reading of the paper.
        * Decoupled weight decay.
        * A coordinate that never had a gradient neither moves nor decays: if it is picked, p̄ = ḡ = 0.
        * No coordinate of a parameter whose learning rate is 0 is picked; its residual waits for the next rate above 0.
        * A parameter without a gradient on one worker counts as zeros there. A parameter without a gradient on all
          workers is not picked from, while its momentum accumulates in e.
        * If a step is skipped because a gradient is not finite, nothing is picked. A gradient above 2⁵⁶ counts as not
          finite.
        * In a hierarchical topology with a single node, nothing is compressed: all coordinates are picked.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-4,
        weight_decay: float = 0.01,
        *,
        rows: int = 5,
        columns: int | None = None,
        k: int | None = None,
        seed: int = 0,
        maximize: bool = False,
        **wire: Unpack[WireOptions],
    ) -> None:
        rule = SketchedAMSGradRule(rows, columns, k, seed)
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, maximize=maximize), rule, **wire)


@dataclass
class SketchedAMSGradRule(UpdateRule):
    """The update rule of `SketchedAMSGrad`; its arguments are those of the optimizer.

    Raises:
        ValueError: naming the argument.
    """

    rows: int
    columns: int | None
    k: int | None
    seed: int

    no_delay = (
        "SketchedAMSGrad exchanges twice per step, and the second exchange needs the answer of the first. The next "
        "step would have to wait for the first, and then for all of the second"
    )
    needs_whole = "the largest elements of whole gradients"

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)
        if group["eps"] < torch.finfo(torch.float32).tiny:
            raise ValueError(f"eps={group['eps']!r}: expected a normal float32 number, such as 1e-4")

    def settings(self) -> dict[str, Any]:
        """See `UpdateRule`."""
        return {"rows": self.rows, "columns": self.columns, "k": self.k, "seed": self.seed}

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        self.context = context
        layout, topology, kernels = context.layout, context.topology, context.kernels
        elements = sum(slot.numel for slot in layout.slots)
        if context.session.side is not None:
            raise ValueError(
                f"SketchedAMSGrad with parameters on {str(layout.device)!r}: the sums of a sketch depend on the "
                "order of their terms, which only the CPU kernels keep. Expected parameters on the CPU"
            )
        if layout.size >= MAX_ELEMENTS:
            raise ValueError(f"{elements} parameters: a count sketch can distinguish at most 2**31 - 1")
        k = min(elements, max(32, math.ceil(elements / 100))) if self.k is None else self.k
        if not is_integer(k, min(elements, 1), elements):
            raise ValueError(f"k={k!r}: expected an integer from 1 to the number of parameters, {elements}")
        columns = max(64, math.ceil(elements / 50)) if self.columns is None else self.columns
        self._sketch = CountSketch(kernels, self.rows, columns, self.seed)
        self._m, self._error, self._gradient = (
            torch.zeros(layout.own_size, dtype=torch.float32, device=layout.device) for _ in range(3)
        )
        self._v, self._peak = (torch.ones(layout.size, dtype=torch.float32, device=layout.device) for _ in range(2))
        for position, slot in enumerate(layout.slots):
            for flat in (self._v, self._peak):
                flat[slot.start : slot.stop] = context.group_of(position)["eps"]
        state = State(own={"m": self._m, "error": self._error}, whole={"v": self._v, "peak": self._peak})
        self._rates = state.add_numbers("rate", len(layout.slots), torch.float64)
        """The last learning rate of each parameter that was not zero; zero if there was none."""
        self._sketches: EncodedAllReduce | None = None
        if topology.compresses:
            self._sketches = EncodedAllReduce(
                [(self._sketch, elements), (Floats(), len(layout.slots))], topology, kernels, 1
            )
        else:
            k = elements
        self._values = EncodedAllReduce([(Floats(), k), (Floats(), k)], topology, kernels, 2)
        self._indices = torch.zeros(k, dtype=torch.int32, device=HOST)
        self._picked = 0
        ranges = [[slot.start, slot.numel] for slot in layout.slots]
        self._ranges = torch.tensor(ranges, dtype=torch.int64, device=HOST).view(-1, 2)
        self._slot_edges = _edges([(slot.start, slot.start + slot.numel) for slot in layout.slots])
        self._own_edges = _edges([(b.own_start, b.own_start + b.slice_elements) for b in layout.buckets])
        self._moving: list[int] = []
        """Positions of the parameters that have a gradient on some worker and a learning rate above zero."""
        into = None if self._sketches is None else (self._sketch, self._sketches.packets[0])
        return {LOCAL: Sketching(self._error, into)}, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._v, "peak": self._peak}

    def channel(self) -> str:
        """See `UpdateRule`. Only sketches and picked values leave the node, in two separate exchanges."""
        return LOCAL

    def before_exchange(self) -> None:
        """See `UpdateRule`."""
        # What is sent depends on the learning rate, so the whole exchange uses the rate at its beginning.
        self._rates_now = [float(group["lr"]) for group in self.context.groups]
        if self._sketches is not None:
            self._sketches.packets[0].zero_()

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        lr, before, beta = self._rate_of(position), self._rates.now[position], group["betas"][0]
        return self.context.kernels.momentum_sum(
            part.up_runs,
            grad,
            self._m,
            self._error,
            self._gradient,
            beta=beta,
            weight=1.0 - beta,
            scale=signed(scale, group),
            ratio=before / lr if before and lr else 1.0,
            shift=part.frame.bucket.state_shift,
            largest=_LARGEST,
        )

    def _rate_of(self, position: int) -> float:
        return self._rates_now[self.context.group_index[position]]

    def settle(self, flags: int) -> int:
        """See `UpdateRule`."""
        session = self.context.session
        self._moving = session.present()
        if self._sketches is not None:
            flags |= self._merge(self._sketches, flags)
        self._moving = [position for position in self._moving if self._rate_of(position) > 0]
        if not flags & packet.NONFINITE:
            with session.meter.apply:
                self._pick()
                self._take_out()
            flags |= self._values.exchange(session.transport, self.context.step, flags)
        return flags

    def _merge(self, sketches: EncodedAllReduce, flags: int) -> int:
        """Average the sketches, and find the parameters with a gradient on any worker; return all ranks' flags."""
        marks = sketches.packets[1].view(torch.float32)
        marks.zero_()
        marks[self._moving] = 1.0
        seen = sketches.exchange(self.context.session.transport, self.context.step, flags)
        marked = marks.tolist()
        self._moving = [position for position in range(len(self.context.params)) if marked[position] > 0]
        return seen

    def _pick(self) -> None:
        """Select the coordinates to fetch."""
        ranges = self._ranges[self._moving]
        self._picked = min(self._indices.numel(), int(ranges[:, 1].sum()))
        indices = self._indices[: self._picked]
        if self._sketches is not None:
            self._sketch.largest(self._sketches.packets[0], self._peak, ranges, indices)
        elif self._picked:
            of_ranges = [torch.arange(first, first + n, dtype=torch.int32, device=HOST) for first, n in ranges.tolist()]
            torch.cat(of_ranges, out=indices)

    def _take_out(self) -> None:
        """Move this rank's values at the picked coordinates from its residual into the packets."""
        indices = self._indices[: self._picked]
        momenta, gradients = (values.view(torch.float32) for values in self._values.packets)
        momenta.zero_()
        gradients.zero_()
        for bucket, (low, high) in zip(self.context.layout.buckets, _between(indices, self._own_edges), strict=True):
            own = indices[low:high] - bucket.state_shift
            torch.index_select(self._error, 0, own, out=momenta[low:high])
            torch.index_select(self._gradient, 0, own, out=gradients[low:high])
            self._error.index_fill_(0, own.long(), 0.0)
        self._picked_of = _between(indices, self._slot_edges)

    def present(self) -> list[int]:
        """See `UpdateRule`."""
        return self._moving

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        slot, lr = self.context.layout.slots[position], float(group["lr"])
        decay = 1.0 - lr * group["weight_decay"]
        first, last = self._picked_of[position]
        if first == last and decay == 1.0 and low is None:
            return
        picked = slice(first, last)
        momenta, gradients = (values.view(torch.float32) for values in self._values.packets)
        self.context.kernels.sparse_amsgrad(
            x,
            low,
            self._v[slot.start : slot.stop],
            self._peak[slot.start : slot.stop],
            self._indices[: self._picked][picked],
            momenta[picked],
            gradients[picked],
            first=slot.start,
            beta2=group["betas"][1],
            eps=group["eps"],
            rate=lr,
            decay=decay,
        )

    def end_step(self) -> None:
        """See `UpdateRule`."""
        for position in range(len(self.context.params)):
            self._rates.now[position] = self._rate_of(position) or self._rates.now[position]


def _edges(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Ranges of the flat space in the form that `_between` takes."""
    return torch.tensor(ranges, dtype=torch.int32, device=HOST).view(-1)


def _between(indices: Tensor, edges: Tensor) -> list[tuple[int, int]]:
    """For each range, the first and last position of the ascending `indices` that lie within it."""
    places = torch.searchsorted(indices, edges).tolist()
    return list(zip(places[::2], places[1::2], strict=True))
