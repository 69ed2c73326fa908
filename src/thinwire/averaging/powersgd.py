"""PowerSGD: each gradient matrix is sent as a product of two thin ones.

Thijs Vogels, Sai Praneeth Karimireddy, Martin Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization". NeurIPS 2019.

Worker i has the matrix `M_i = gradient + residual`, with `rows × columns` elements. All workers know the same `Q`, with
`columns × rank` elements. One step of power iteration per exchange, starting from the last one's result::

    P = mean_i(M_i Q)          P̂ = orthonormal columns of P
    Q ← mean_i(M_iᵀ P̂)         averaged gradient = P̂ Qᵀ          residual_i ← M_i - P̂ Qᵀ

Bits per value: `32·rank·(rows + columns)/(rows·columns)`. Parameters with one dimension, and matrices that this would
not make smaller, are averaged as floats. Memory: 8 bytes per parameter for the residual and `M`, and `Q`.

When not to use it: for models with few large matrices, such as wide embeddings with few layers; over links with a long
round trip, because an exchange takes two rounds and does not run during backward; and where int4 is enough, which
changes each gradient less.

Differences from the paper: a matrix is the memory of the parameter, cut into as many rows as its first dimension has.
Orthonormal columns are computed by Gram-Schmidt with sums in a fixed order, so that all ranks get the same bits on any
processor. In a hierarchical topology a worker is a node, and each of its ranks multiplies its own slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire._checks import INT64_MAX, is_integer
from thinwire.averaging.rule import AveragingRule
from thinwire.compressors.all_reduce import EncodedAllReduce
from thinwire.compressors.codecs.dense import Floats
from thinwire.compressors.local import NO_PAYLOAD
from thinwire.kernels.modes import LARGEST, Scale
from thinwire.kernels.reference.words import by_halves, padded
from thinwire.optimizers.rule import Context, Group
from thinwire.transport import packet
from thinwire.transport.buffers import Frame, PacketBuffers, Part
from thinwire.transport.compressor import Compressor
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.session import LOCAL
from thinwire.transport.state import State, Tensors


class PowerSgdRule(AveragingRule):
    """See the module.

    Args:
        rank: the number of columns of both factors.
        seed: of the first `Q`.
        error_feedback: whether to keep residuals.
        residual_decay: see `AveragingRule`.

    Raises:
        ValueError: naming the option.
    """

    no_delay = (
        "compressor 'powersgd' exchanges twice per step, and the second exchange needs the answer of the first. Use "
        "'int4', for example"
    )

    def __init__(
        self, rank: int = 4, seed: int = 0, *, error_feedback: bool = True, residual_decay: float = 1.0
    ) -> None:
        super().__init__("powersgd", residual_decay)
        if not is_integer(rank, 1, 1024):
            raise ValueError(f"rank={rank!r}: expected an integer from 1 to 1024")
        if not is_integer(seed, 0, INT64_MAX):
            raise ValueError(f"seed={seed!r}: expected an integer in [0, 2**63)")
        if not isinstance(error_feedback, bool):
            raise ValueError(f"error_feedback={error_feedback!r}: expected True or False")
        self._rank, self._seed, self._error_feedback = rank, seed, error_feedback

    def options(self) -> dict[str, Any]:
        """See `AveragingRule`."""
        return {"rank": self._rank, "seed": self._seed, "error_feedback": self._error_feedback}

    def bind(self, context: Context) -> tuple[dict[str, Compressor], State]:
        """See `UpdateRule`."""
        state = self.begin_run(context)
        layout, rank = context.layout, self._rank
        if context.session.side is not None:
            raise ValueError(
                f"compressor 'powersgd' with parameters on {str(layout.device)!r}: expected parameters on the CPU"
            )
        self._matrix = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """The node's gradient plus the residual, of this rank's slices."""
        self._residual = untouched_zeros(layout.own_size, torch.float32, layout.device)
        shapes = [(p.shape[0], p.numel() // p.shape[0]) if p.dim() > 1 and p.numel() else None for p in context.params]
        self._shapes = [shape if shape and rank * sum(shape) < shape[0] * shape[1] else None for shape in shapes]
        """By position, rows and columns; None for parameters that are averaged as floats."""
        q_sizes = [shape[1] * rank if shape else 0 for shape in self._shapes]
        p_sizes = [
            shape[0] * rank if shape else slot.numel for shape, slot in zip(self._shapes, layout.slots, strict=True)
        ]
        draw = torch.Generator(device="cpu").manual_seed(self._seed)
        # Uniform numbers: the bits of normal ones depend on the processor.
        q = torch.rand(sum(q_sizes), dtype=torch.float32, generator=draw) - 0.5
        self._q = q.to(layout.device)
        self._factors_q = list(self._q.split(q_sizes))
        topology, kernels = context.topology, context.kernels
        marks = (Floats(), len(layout.slots))
        self._up = EncodedAllReduce([(Floats(), sum(p_sizes)), marks], topology, kernels, 1)
        self._down = EncodedAllReduce([(Floats(), sum(q_sizes))], topology, kernels, 2)
        self._factors_p = list(_floats(self._up)[: sum(p_sizes)].split(p_sizes))
        self._new_q = list(_floats(self._down)[: sum(q_sizes)].split(q_sizes))
        self._present: list[int] = []
        self._into_matrix: dict[int, Tensor] = {}
        self._lost = self._wanted = 0.0
        if self._error_feedback:
            state.own["residual"] = self._residual
        state.common["q"] = self._q
        return {LOCAL: _Nothing()}, state

    def compared_state(self) -> Tensors:
        """See `UpdateRule`."""
        return {"q": self._q}

    def rescale(self, factor: float) -> None:
        """See `AveragingRule`. `Q` is only a direction: it may have any scale."""
        self._residual.mul_(factor)

    def channel(self) -> str:
        """See `UpdateRule`. Only factors leave the node, in two separate exchanges."""
        return LOCAL

    def encode(self, position: int, part: Part, grad: Tensor | None, group: Group, scale: Scale) -> bool | None:
        """See `UpdateRule`."""
        runs = self._into_matrix.get(part.index)
        if runs is None:
            runs = part.up_runs.clone()
            runs[:, 3] = torch.float32.itemsize * (runs[:, 0] - part.frame.bucket.state_shift)
            self._into_matrix[part.index] = runs
        return self.context.kernels.dense_encode(
            runs, grad, self._matrix.view(torch.uint8), scale=scale, largest=LARGEST
        )

    def settle(self, flags: int) -> int:
        """See `UpdateRule`. Both exchanges take place on all ranks, or only the first."""
        session, step = self.context.session, self.context.step
        with session.meter.encode:
            if flags & packet.NONFINITE:
                self._matrix.zero_()  # the residual must not take this gradient
            if self._error_feedback:
                self._matrix += self._residual
            whole = self._whole_matrix()
            for position, factor in enumerate(self._factors_p):
                shape, matrix = self._shapes[position], self._of(whole, position)
                if shape is None:
                    factor.copy_(matrix)
                else:
                    q = self._factors_q[position].view(shape[1], self._rank)
                    torch.mm(matrix.view(shape), q, out=factor.view(shape[0], self._rank))
        # Which parameters have a gradient on some worker: a node knows only its own.
        marks = self._up.packets[1].view(torch.float32)
        marks.zero_()
        marks[session.present()] = 1.0
        flags |= self._up.exchange(session.transport, step, flags)
        marked = marks.tolist()
        self._present = [position for position in range(len(self._shapes)) if marked[position] > 0]
        if flags & packet.NONFINITE:
            return flags
        with session.meter.encode:
            for position, shape in enumerate(self._shapes):
                if shape is not None:
                    p = self._factors_p[position].view(shape[0], self._rank)
                    orthonormalize(p)
                    new_q = self._new_q[position].view(shape[1], self._rank)
                    torch.mm(self._of(whole, position).view(shape).t(), p, out=new_q)
        flags |= self._down.exchange(session.transport, step, flags)
        self._wanted = self._lost = 0.0
        return flags

    def present(self) -> list[int]:
        """See `UpdateRule`."""
        return self._present

    def apply(self, position: int, parts: Sequence[Part], x: Tensor, low: Tensor | None, group: Group) -> None:
        """See `UpdateRule`."""
        shape, slot = self._shapes[position], self.context.layout.slots[position]
        if shape is None:
            mean = self._factors_p[position]
        else:
            p, new_q = self._factors_p[position].view(shape[0], -1), self._new_q[position].view(shape[1], -1)
            mean = product(p, new_q)
            # Where P has a column of zeros, so has the new Q. It would stay zero for ever.
            q = self._factors_q[position].view_as(new_q)
            q.copy_(torch.where(p.any(0), new_q, q))
        self.gradient_at(position).copy_(mean)
        square_sum = self.context.kernels.square_sum
        for part in parts:
            shift = part.frame.bucket.state_shift
            for element, _, count, *_ in part.up_runs.tolist():
                here = slice(element - shift, element - shift + count)
                matrix, residual = self._matrix[here], self._residual[here]
                self._wanted += float(square_sum(matrix))
                if shape is None:
                    residual.zero_()
                else:
                    torch.sub(matrix, mean[element - slot.start : element - slot.start + count], out=residual)
                    self._lost += float(square_sum(residual))

    def contraction(self) -> float:
        """See `UpdateRule`. Relative to the mean of all workers, so it includes the differences between them."""
        return self._lost / self._wanted if self._wanted > 0 else float("nan")

    def _whole_matrix(self) -> Tensor:
        """The matrix over the whole flat space, with zeros in the slices of the other ranks of the node."""
        layout = self.context.layout
        if layout.slices == 1:
            return self._matrix
        whole = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        for bucket in layout.buckets:
            first, shift = bucket.own_start, bucket.state_shift
            last = first + bucket.slice_elements
            whole[first:last] = self._matrix[first - shift : last - shift]
        return whole

    def _of(self, whole: Tensor, position: int) -> Tensor:
        slot = self.context.layout.slots[position]
        return whole[slot.start : slot.start + slot.numel]


class _Nothing:
    """The compressor of a channel whose packets are empty: the rule exchanges something else."""

    payload = NO_PAYLOAD

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""

    def seal(self, frame: Frame) -> None:
        """See `Compressor`."""

    def merge(self, frame: Frame, shard: int) -> None:
        """See `Compressor`."""

    def state(self) -> State:
        """See `Compressor`."""
        return State()


def _floats(reduction: EncodedAllReduce) -> Tensor:
    return reduction.packets[0].view(torch.float32)


def orthonormalize(p: Tensor) -> None:
    """Make the columns of a matrix orthonormal by Gram-Schmidt, in place. A column of zeros stays zero.

    All operations are exact to the bit on any processor: products, and sums by halves. Each column is made orthogonal
    twice: of one that depends on the others, the first pass leaves only rounding errors, which are not orthogonal.
    """
    for j in range(p.shape[1]):
        column = p[:, j].contiguous()
        for _ in range(2):
            norm = _sum(column * column).sqrt()
            if not float(norm) > _SMALLEST_NORM:
                column.zero_()
                break
            column /= norm
            for i in range(j):
                column -= p[:, i] * _sum(column * p[:, i])
        norm = _sum(column * column).sqrt()
        p[:, j] = column / norm if float(norm) > 0 else column


_SMALLEST_NORM = 1e-18
"""Below it, squares are not normal numbers any more."""


def _sum(values: Tensor) -> Tensor:
    """The sum in a fixed order."""
    length = 1 << max(0, values.numel() - 1).bit_length()
    return by_halves(padded(values, length), length)[0] if length > 1 else values[0]


def product(p: Tensor, q: Tensor) -> Tensor:
    """`p qᵀ` as a vector, column after column of the factors: the same bits on any processor, unlike a BLAS."""
    total = torch.outer(p[:, 0], q[:, 0])
    for j in range(1, p.shape[1]):
        total += torch.outer(p[:, j], q[:, j])
    return total.view(-1)
