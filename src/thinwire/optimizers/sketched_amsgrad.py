"""SketchedAMSGrad: a count sketch of everybody's momenta tells which coordinates to fetch, and only these move.

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

from thinwire._checks import is_integer
from thinwire.compressors.all_reduce import Sum
from thinwire.compressors.codecs.count_sketch import MAX_ELEMENTS, CountSketch
from thinwire.compressors.codecs.dense import Floats
from thinwire.compressors.sketching import Sketching
from thinwire.kernels.modes import Scale
from thinwire.optimizers.adam import adam_defaults, check_adam_group, signed
from thinwire.optimizers.inputs import check_seed
from thinwire.optimizers.optimizer import Unpack, WireOptimizer, WireOptions
from thinwire.optimizers.rule import Context, Group, UpdateRule
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import HOST
from thinwire.transport.session import LOCAL
from thinwire.transport.state import State, Tensors

_LARGEST = 2.0**56
"""The largest gradient that is taken in. What is not picked gathers in e, which must stay below 2⁶⁰: a larger gradient,
whose coordinate is hardly ever picked because its v̂ is as large, would let all steps be skipped from then on."""


class SketchedAMSGrad(WireOptimizer):
    r"""SketchedAMSGrad (Xian, Huang and Huang, 2022): sketches are summed, and the k largest coordinates fetched.

    A worker adds to its momentum what it has not sent so far, and everybody gets the mean of the count sketches S::

        m ← β1 m + (1-β1) g        p = m + (lr_before/lr) e        s = mean over workers of S(p)

    The same k coordinates I are picked everywhere: those with the largest |U(s)|/√v̂, where U(s) is what the sketch says
    of a coordinate. A second exchange fetches the exact means p̄ and ḡ of p and g on I, and on I alone::

        v ← β2 v + (1-β2) ḡ²        v̂ ← max(v̂, v)        x ← x - lr · p̄/√v̂        e = p off I, 0 on I

    with v = v̂ = ε in the beginning.

    On the wire: rows · columns + 2k floats a step (and one a parameter tensor), each twice: up and down. With the
    defaults that is 4 bits a parameter and direction, an eighth of what DDP sends.

    What the sketch is good for: an estimate is within √(8/columns)·‖p̄‖₂ of the truth with probability 0.984 (5 rows),
    with the default columns 20 times the root mean square of p̄. Coordinates that stand out by more are found; others
    may be missed in one step, stay in e, and grow there until they are. What is applied is never an estimate.

    Example::

        model = DDP(net)
        opt = thinwire.SketchedAMSGrad(model.parameters(), lr=1e-3)
        thinwire.attach(model, opt)
        ...
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters or groups of them, as in torch.optim. Groups may have their own `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
        lr: step size. A coordinate that is picked moves by all that has gathered for it, so the rate is smaller than
            AdamW's. What is sent depends on it: under `attach` set it before backward, as schedulers do.
        betas: decay of the momentum and of the variance.
        eps: where v begins, so a squared gradient. A coordinate that is picked for the first time moves by what has
            gathered for it in all steps before, divided by little more than √ε if its gradient happens to be small just
            then: nothing else bounds steps, and too small an ε makes them huge. Coordinates whose gradients are below
            √ε move slowly.
        weight_decay: decoupled decay λ, of coordinates from the step after their first on.
        rows: independent estimates in a sketch, 1 to 15.
        columns: cells of a row; if None a fiftieth of the number of parameters, at least 64.
        k: how many coordinates move in a step, at most all; if None a hundredth, at least 32.
        seed: of the hashes; the same on all ranks.
        maximize: ascend instead of descend.
        process_group: the ranks that train together; the default group if None.
        topology: "flat", "hierarchical" or "auto", as in `thinwire.Birder`. In a hierarchical one the node is the
            worker: its ranks sketch a slice each, and their sketches are summed on the fast link.
        mesh: a two-dimensional DeviceMesh of the same ranks, a row a node, where LOCAL_WORLD_SIZE does not tell.
        node_dtype: of gradients on the link inside a node: torch.float32, or torch.bfloat16 for half the bytes.
        bucket_mb: how much is sketched at a time while backward runs, in megabytes of fp32 gradient; if None a quarter
            of the model, within 4 to 32. In a flat topology results do not depend on it; in a hierarchical one it
            decides who sketches what, and so the rounding of sums.
        max_consecutive_skips: after so many steps in a row that were skipped for gradients that are not finite, step()
            raises TooManySkips; None for never.
        check_replicas_every: compare a hash of the parameters over all ranks after every so many steps; 0 for never.

    When not to use it:
        When a step must be quick: nothing can be sent before all gradients are there, so the wire is not hidden behind
        backward, and reading the sketch takes dozens of passes over the parameters. For dense models and short runs
        (`thinwire demo --optimizer sketched-amsgrad` shows one): `thinwire.Birder` sends less and moves everything. It
        is for gradients of which a few coordinates, fewer than `columns`, hold most. Where they do not, noise decides
        what is picked: with an embedding of which a fifth of the rows is in use, 75 % of the picks were of rows that
        had nothing to say.

    Gradient clipping:
        Under `attach` gradients are on their way before `clip_grad_norm_` sees them, so that it has no effect. Without,
        it scales a worker's own gradient.

    Differences from the paper:
        * v is updated on I only, by the exact mean gradient (the consistent reading).
        * Decoupled weight decay.
        * A coordinate that has never had a gradient neither moves nor decays: if it is picked, p̄ = ḡ = 0.
        * A parameter whose learning rate is 0 is not picked from; its errors wait for the next rate that is not.
        * A parameter without a gradient on a worker counts as one with zeros there; one without a gradient on all
          workers is not picked from, while its momenta gather in e.
        * A step that is skipped for a gradient that is not finite is one in which nothing is picked. A gradient of more
          than 2⁵⁶ counts as one that is not finite.
        * In a hierarchical topology of a single node nothing is compressed: all coordinates are picked.
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

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def check_group(self, group: Group) -> None:
        """See `UpdateRule`."""
        check_adam_group(group)
        if group["eps"] < torch.finfo(torch.float32).tiny:
            raise ValueError(f"eps={group['eps']!r}: expected a number that float32 has too, such as 1e-4")

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
                f"SketchedAMSGrad with parameters on {str(layout.device)!r}: sums in a sketch depend on the order "
                "of their terms, which is kept on the CPU only. Expected parameters there, or another optimizer"
            )
        if layout.size >= MAX_ELEMENTS:
            raise ValueError(f"{elements} parameters: a count sketch tells at most 2**31 - 1 apart")
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
            for start in (self._v, self._peak):
                start[slot.start : slot.stop] = context.group_of(position)["eps"]
        state = State(own={"m": self._m, "error": self._error}, whole={"v": self._v, "peak": self._peak})
        self._rates = state.add_numbers("rate", len(layout.slots), torch.float64)
        """The last learning rate that was not zero, or zero."""
        self._sketches: Sum | None = None
        if topology.compresses:
            self._sketches = Sum([(self._sketch, elements), (Floats(), len(layout.slots))], topology, kernels, 1)
        else:
            k = elements
        self._values = Sum([(Floats(), k), (Floats(), k)], topology, kernels, 2)
        self._indices = torch.zeros(k, dtype=torch.int32, device=HOST)
        self._picked = 0
        ranges = [[slot.start, slot.numel] for slot in layout.slots]
        self._ranges = torch.tensor(ranges, dtype=torch.int64, device=HOST).view(-1, 2)
        self._slot_edges = _edges([(slot.start, slot.start + slot.numel) for slot in layout.slots])
        self._own_edges = _edges([(b.own_start, b.own_start + b.slice_elements) for b in layout.buckets])
        self._moving: list[int] = []
        """Positions of the parameters that have a gradient on some worker, and a learning rate."""
        into = None if self._sketches is None else (self._sketch, self._sketches.packets[0])
        return {LOCAL: Sketching(self._error, into)}, state

    def shared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"v": self._v, "peak": self._peak}

    def channel(self) -> str:
        """See `UpdateRule`. Only sketches and picked values leave the node, by exchanges of their own."""
        return LOCAL

    def before_exchange(self) -> None:
        """See `UpdateRule`."""
        # What is sent depends on the learning rate. The one that counts is that at the beginning of the exchange.
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

    def _merge(self, sketches: Sum, flags: int) -> int:
        """Average the sketches, and find out which parameters have a gradient on any worker; the flags of all ranks."""
        marks = sketches.packets[1].view(torch.float32)
        marks.zero_()
        marks[self._moving] = 1.0
        seen = sketches.exchange(self.context.session.transport, self.context.step, flags)
        marked = marks.tolist()
        self._moving = [position for position in range(len(self.context.params)) if marked[position] > 0]
        return seen

    def _pick(self) -> None:
        """Find the coordinates to fetch."""
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
        mine = slice(first, last)
        momenta, gradients = (values.view(torch.float32) for values in self._values.packets)
        self.context.kernels.sparse_amsgrad(
            x,
            low,
            self._v[slot.start : slot.stop],
            self._peak[slot.start : slot.stop],
            self._indices[: self._picked][mine],
            momenta[mine],
            gradients[mine],
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
    """For each range the part of the ascending `indices` that lies within it."""
    places = torch.searchsorted(indices, edges).tolist()
    return list(zip(places[::2], places[1::2], strict=True))
