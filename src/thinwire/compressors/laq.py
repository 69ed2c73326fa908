"""The scheme `laq`: quantised changes of gradients, sent only when they are large enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire._checks import INT64_MAX, is_integer, is_number
from thinwire.compressors._gradient_sums import GradientSums
from thinwire.compressors._lost_share import LostShare
from thinwire.compressors._packets import OwnedRuns
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.compressors.quantized import BLOCKS, payload_words
from thinwire.kernels.bounds import quantized_word_bytes
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part, Payload
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import HOST, untouched_zeros
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.state import State, amounts, counts

_BITS = (3, 4, 8)


class Laq:
    """Lazy aggregation, at workers and owners; see `LaqScheme`.

    Args:
        scheme: the options.
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
    """

    def __init__(self, scheme: LaqScheme, layout: Layout, node: int, kernels: Kernels) -> None:
        self._kernels, self._layout, self._scheme = kernels, layout, scheme
        self._format = {"bits": scheme.bits, "block": scheme.block}
        self._sums = GradientSums(layout, kernels)
        self._owned = OwnedRuns(layout, node)
        size = quantized_word_bytes(scheme.bits, scheme.block)
        self.payload = Payload(
            up_words=payload_words(size), down_words=payload_words(size), word_bytes=size, leaves_out_zeros=True
        )
        self.known = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """What the owners know of this worker's gradient, of its slices."""
        self.mean = untouched_zeros(self._owned.size, torch.float32, layout.device)
        """The mean of what they know of all workers, of the shards that this rank owns."""
        self.followed = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        """What all ranks know of that mean: the averaged gradient."""
        self.average_squares = torch.zeros(layout.shards, dtype=torch.float64, device=HOST)
        """By shard, the moving average of the squared norm of the averaged gradient."""
        self._up, self._down = _Sender(layout.shards), _Sender(layout.shards)
        longest = max((bucket.shard_elements for bucket in layout.buckets), default=0)
        self._scratch = [torch.zeros(longest, dtype=torch.float32, device=layout.device) for _ in range(3)]
        """For the sending lane, for the answering lane, and for the answering lane's difference."""
        self._lost = LostShare(layout.shards)

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._frames = buffers.frames

    def begin_step(self, step: int) -> None:
        """See `GradientCompressor`."""

    def encode(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """See `GradientCompressor`."""
        return self._sums.add(part, grad, scale)

    def seal(self, frame: Frame) -> None:
        """Send what is new in the gradients of a bucket, to each owner whose shard has changed enough."""
        bucket = frame.bucket
        first = bucket.own_start - bucket.state_shift
        for row, shard in enumerate(bucket.own_shards):
            number, length = bucket.shard_number(shard), bucket.shard_elements
            here = slice(first + row * length, first + (row + 1) * length)
            difference = self._sums.shard(bucket, row).sub_(self.known[here])
            values, known = self._scratch[0][:length], self.known[here]
            self._lost.note(number, *self._send(self._up, number, difference, values, frame.sent[row], known))
            difference.zero_()

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with what is new in the mean, if it has changed enough."""
        bucket, length = frame.bucket, frame.bucket.shard_elements
        first = bucket.start + shard * length
        at = first - bucket.shift_of(self._owned.shards)
        mean, (_, values, difference) = self.mean[at : at + length], (each[:length] for each in self._scratch)
        for packet in frame.received:
            self._decode(packet, values)
            mean.add_(values.mul_(1.0 / frame.received.shape[0]))
        torch.sub(mean, self.followed[first : first + length], out=difference)
        self._send(self._down, bucket.shard_number(shard), difference, values, frame.answers[shard], None)

    def _send(
        self, sender: _Sender, number: int, difference: Tensor, values: Tensor, packet: Tensor, known: Tensor | None
    ) -> tuple[float, float]:
        """Write a difference into a packet, and add what the packet says to `known`; or write zeros.

        Returns:
            The squared norms of the difference and of what was left out of it.
        """
        payload = packet[HEADER_BYTES : HEADER_BYTES + WORD_BYTES * self.payload.up_words(difference.numel() // WORD)]
        payload[-WORD_BYTES:] = 0  # the last word may be longer than the codes
        sums = torch.zeros(1, 2, dtype=torch.float64, device=self._layout.device)
        self._kernels.quantize_encode(
            _whole(difference), difference, None, packet, sums=sums, spread=1.0, scale=1.0, shift=0, **self._format
        )
        self._decode(packet, values)
        wanted, left_out = sums[0].tolist()
        change = float(self._kernels.square_sum(values))
        if sender.is_lazy(number, change, left_out, float(self.average_squares[number]), self._scheme):
            payload.zero_()
            return wanted, wanted
        if known is not None:
            known.add_(values)
        return wanted, left_out

    def _decode(self, packet: Tensor, values: Tensor) -> None:
        self._kernels.quantize_decode(_whole(values), packet, values, weight=1.0, **self._format)

    def read_answers(self) -> None:
        """Add all answers to the averaged gradient."""
        for frame in self._frames:
            bucket, length = frame.bucket, frame.bucket.shard_elements
            for shard, packet in enumerate(frame.answers):
                first, number = bucket.start + shard * length, bucket.shard_number(shard)
                values, followed = self._scratch[0][:length], self.followed[first : first + length]
                self._decode(packet, values)
                followed.add_(values)
                before = float(self.average_squares[number])
                square = float(self._kernels.square_sum(followed))
                self.average_squares[number] = before + (square - before) / self._scheme.history

    def decode(self, part: Part, into: Tensor) -> None:
        """See `GradientCompressor`."""
        for element, in_param, count, *_ in part.down_runs.tolist():
            into[in_param : in_param + count] = self.followed[element : element + count]

    def rescale(self, factor: float) -> None:
        """See `GradientCompressor`."""
        for values in (self.known, self.mean, self.followed):
            values.mul_(factor)
        for squares in (self.average_squares, self._up.errors, self._down.errors):
            squares.mul_(factor * factor)

    def contraction(self) -> float:
        """See `GradientCompressor`."""
        return self._lost.read()

    def state(self) -> State:
        """See `Compressor`."""
        shards = {
            "average_square": self.average_squares,
            "error": self._up.errors,
            "age": self._up.ages,
            "answer_error": self._down.errors,
            "answer_age": self._down.ages,
        }
        return State(
            own={"known": self.known},
            owned={"mean": self.mean},
            whole={"followed": self.followed},
            shards=shards,
            checks={name: amounts if table.is_floating_point() else counts for name, table in shards.items()},
        )


class _Sender:
    """What a sender of changes remembers of each shard.

    Args:
        shards: their number.
    """

    def __init__(self, shards: int) -> None:
        self.errors = torch.zeros(shards, dtype=torch.float64, device=HOST)
        """The squared norm of what the last message left out."""
        self.ages = torch.zeros(shards, dtype=torch.int64, device=HOST)
        """The number of exchanges since the last message."""

    def is_lazy(self, number: int, change: float, error: float, average: float, scheme: LaqScheme) -> bool:
        """Whether a shard sends nothing in this exchange; see `LaqScheme`.

        Args:
            number: of the shard.
            change: the squared norm of what would be sent.
            error: the squared norm of what would be left out.
            average: that of the averaged gradient, over the last exchanges.
            scheme: the options.
        """
        enough = scheme.patience * average + 3.0 * (error + float(self.errors[number]))
        if change <= enough and int(self.ages[number]) < scheme.max_age:
            self.ages[number] += 1
            return True
        self.errors[number], self.ages[number] = error, 0
        return False


def _whole(values: Tensor) -> Tensor:
    """A table of one run: all elements of a shard, whose codes begin after the header of a packet."""
    return torch.tensor([[0, 0, values.numel(), HEADER_BYTES, 0, 0]], dtype=torch.int64, device=HOST)


@dataclass(frozen=True)
class LaqScheme(Scheme):
    """LAQ, lazily aggregated quantised gradients: a worker sends the quantised change of its gradient, and only if that
    is large enough. Otherwise owners use its last one.

    J. Sun, T. Chen, G. B. Giannakis, Z. Yang: "Communication-efficient distributed learning via lazily aggregated
    quantized gradients", NeurIPS 2019.

    With Q the quantiser of `int4`, k what the owner knows of the gradient g of a worker, and ḡ the averaged gradient,
    for each shard of a bucket::

        δ = Q(g - k),  ε = g - k - δ
        lazy if ‖δ‖² ≤ patience·a + 3·(‖ε‖² + ‖ε'‖²), unless it was for `max_age` exchanges
        not lazy: send δ,  k ← k + δ,  ε' ← ε
        a ← a + (‖ḡ‖² - a) / history

    Owners do the same with the mean of all k, of which all ranks know ḡ. A packet of a lazy sender is a header of
    32 bytes with presence bits.

    Bits per value: `bits + 16/block` up and down if nobody is lazy, and almost none where all are.
    `handle.metrics()` has the bytes that were sent.
    Memory: 12 bytes per element: k, ḡ, and the sums of gradients; 4/n at the owners, and packets.

    When not to use it: with small batches. A worker is lazy while its gradient changes less than the averaged gradient
    is long. The noise of a batch alone is usually longer, and nobody is ever lazy. It suits large batches, workers that
    repeat the same data, and the end of deterministic training. On GPUs it is refused, because packets on a device have
    a fixed length.

    Differences from the paper: each packet is decided alone, by bucket, worker and owner, not once per worker. The
    quantiser has a radius per block and a level at zero. Answers are quantised and lazy too; in the paper all workers
    get the new parameters in every step. The paper compares with the last moves of the parameters divided by the
    learning rate, which for gradient descent are the averaged gradients that stand here, so that any optimizer may
    follow. Its weights of the last D moves are here those of a moving average.

    Args:
        bits: 3, 4 or 8 per value.
        block: the number of values that share a radius: 16, 32 or 64.
        patience: the sum of the weights ξ of the paper, in [0, 1]. With 0 only rounding errors make a sender lazy. Far
            above 1 a sender misses that the gradient has turned: with 4, a small classification diverged.
        history: the length of the moving average, in exchanges.
        max_age: send after so many lazy exchanges in any case; 0 to send always.

    Raises:
        ValueError: if an argument is out of range; for parameters that are not on the CPU.
    """

    state_depends_on_buckets = True
    no_decay = "keeps no residuals"

    bits: int = 4
    block: int = 64
    patience: float = 0.8
    history: int = 10
    max_age: int = 100

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits={self.bits!r}: expected 3, 4 or 8")
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block!r}: expected 16, 32 or 64 values per scale")
        if not is_number(self.patience) or not 0 <= self.patience <= 1:
            raise ValueError(f"patience={self.patience!r}: expected a number in [0, 1]")
        for name, least in (("history", 1), ("max_age", 0)):
            value = getattr(self, name)
            if not is_integer(value, least, INT64_MAX):
                raise ValueError(f"{name}={value!r}: expected a number of exchanges, at least {least}")

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> Laq:
        """See `Scheme`."""
        if layout.device.type != "cpu":
            raise ValueError(
                f"compressor 'laq' with parameters on {str(layout.device)!r}: expected parameters on the CPU, because "
                "packets on a device have a fixed length, and nothing would be saved"
            )
        return Laq(self, layout, node, kernels)

    @property
    def worker_residual(self) -> bool:
        """See `Scheme`. What a message leaves out is part of the next change."""
        return False

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`. Those of a step in which nobody is lazy."""
        bits = 8 * quantized_word_bytes(self.bits, self.block) / WORD
        return bits, bits
