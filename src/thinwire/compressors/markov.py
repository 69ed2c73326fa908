"""Markov compression: each message is the compressed difference to what the receivers already know.

A worker has a value `w`, of which the receivers know `known`. It sends the encoding of `w - known`, and both sides add
the decoded difference to `known`, which therefore follows `w`. The owner of a shard does the same with the mean of the
workers' known values, and all ranks add its answers to `followed`. There is no residual: what an encoding leaves out is
part of the next difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.compressors import _bits as bits
from thinwire.compressors._bits import words_for
from thinwire.compressors._lost_share import LostShare
from thinwire.compressors._packets import OwnedRuns, SignPackets, bytes_of, naming_packet, payload_of
from thinwire.compressors.codecs import Projection
from thinwire.compressors.codecs.sign import Sign, add_signs
from thinwire.kernels.modes import MarkovMode, Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part
from thinwire.transport.layout import WORD, Bucket, Layout
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.state import State


class Markov:
    """Sends differences with any codec that is a projection, shard by shard.

    Args:
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
        codec: makes a codec. It is called twice, because workers and owners encode at the same time.
    """

    def __init__(self, layout: Layout, node: int, kernels: Kernels, codec: Callable[[], Projection]) -> None:
        self._kernels = kernels
        self._up, self._down = codec(), codec()
        self._owned = OwnedRuns(layout, node)
        self.known = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """What the receivers know of this worker, of this rank's slices."""
        self.mean = untouched_zeros(self._owned.size, torch.float32, layout.device)
        """The mean of the known values of all workers, of the shards that this rank owns."""
        self.followed = untouched_zeros(layout.size, torch.float32, layout.device)
        """What all ranks know of that mean."""
        self._difference = untouched_zeros(layout.own_size, torch.float32, layout.device)
        self._answer = torch.zeros(
            max((b.shard_elements for b in layout.buckets), default=0), dtype=torch.float32, device=layout.device
        )
        self._sent_squares = [0.0] * layout.shards
        self._frames: Sequence[Frame] = ()
        self.payload = payload_of(self._up)

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._frames = buffers.frames

    def encode(self, part: Part, grad: Tensor | None, m: Tensor | None, *, beta: float, scale: Scale) -> bool | None:
        """Compute the difference for a gradient, or with `m` for the momentum it updates; whether it is not finite."""
        return self._kernels.markov_difference(
            part.up_runs,
            grad,
            m,
            self.known,
            self._difference,
            beta=beta,
            weight=1.0 - beta,
            scale=scale,
            shift=part.frame.bucket.state_shift,
        )

    def seal(self, frame: Frame) -> None:
        """Encode the differences of a bucket."""
        bucket, length = frame.bucket, frame.bucket.shard_elements
        for row, shard in enumerate(bucket.own_shards):
            here, packet = self._slice(bucket, row), bytes_of(frame.sent[row], self._up, length)
            self._up.encode(self._difference[here], packet)
            self._up.decode(packet, self.known[here])
            self._sent_squares[bucket.shard_number(shard)] = self._up.square_sum(packet, length)

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the encoded difference between the new mean and what all ranks know of it."""
        bucket, length = frame.bucket, frame.bucket.shard_elements
        first = bucket.start + shard * length
        followed = self.followed[first : first + length]
        shift = bucket.shift_of(self._owned.shards)
        mean = self.mean[first - shift : first - shift + length]
        for worker, packet in enumerate(frame.received):
            with naming_packet(f"the packet of worker {worker} for bucket {bucket.index}"):
                self._down.decode(bytes_of(packet, self._down, length), mean, 1.0 / frame.received.shape[0])
        difference = torch.sub(mean, followed, out=self._answer[:length])
        self._down.encode(difference, bytes_of(frame.answers[shard], self._down, length))

    def read_answers(self) -> None:
        """Add all answers to `followed`, after the exchange."""
        for frame in self._frames:
            length = frame.bucket.shard_elements
            for shard, packet in enumerate(frame.answers):
                first = frame.bucket.start + shard * length
                with naming_packet(f"the answer for shard {shard} of bucket {frame.bucket.index}"):
                    self._down.decode(bytes_of(packet, self._down, length), self.followed[first : first + length])

    def state(self) -> State:
        """See `Compressor`."""
        return State(own={"known": self.known}, owned={"mean": self.mean}, whole={"followed": self.followed})

    def contraction(self) -> float:
        """‖c - C(c)‖²/‖c‖² for the differences c that this rank sent last; NaN if there were none.

        Their norm is computed here, because it takes a pass over them that no step needs.
        """
        lost = LostShare(len(self._sent_squares))
        for bucket in (frame.bucket for frame in self._frames):
            for row, shard in enumerate(bucket.own_shards):
                number = bucket.shard_number(shard)
                wanted = float(self._kernels.square_sum(self._difference[self._slice(bucket, row)]))
                lost.note(number, wanted, wanted - self._sent_squares[number])
        return lost.read()

    def _slice(self, bucket: Bucket, row: int) -> slice:
        """Where this rank's slices have one of its shards of a bucket."""
        first = bucket.own_start - bucket.state_shift + row * bucket.shard_elements
        return slice(first, first + bucket.shard_elements)


class MarkovSign:
    """Sends differences as scaled signs, with one pass over memory per worker.

    The scale of a shard is known only after all of it is encoded, so `known` stays as it was before the last message.
    The worker keeps the signs and the scale of that message, and the next pass adds them on the fly. One bit has no
    zero, so inactive coordinates send activation bits, as in `thinwire.compressors.stochastic_sign`; an active
    coordinate stays active. A word that is zero on all workers is *quiet*. An additional bit per word marks it, and all
    ranks set their known values of a quiet word to zero. docs/protocol.md has the rules.

    Args:
        layout: the flat space.
        node: the number of this rank's worker.
        kernels: the backend.
    """

    def __init__(self, layout: Layout, node: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._owned = OwnedRuns(layout, node)
        self.known = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """What the receivers knew of this worker before the last message, of this rank's slices."""
        self.sent_bits = torch.zeros(layout.own_size // WORD, dtype=torch.int64, device=layout.device)
        """The bits of the last message, one per element of this rank's slices."""
        self._nonzero = torch.zeros(layout.own_size // WORD, dtype=torch.uint8, device=layout.device)
        """One byte per word of this rank's slices: 1 if any of its values is not zero."""
        self.sent_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self.mean = untouched_zeros(self._owned.size, torch.float32, layout.device)
        """The mean of the known values of all workers, of the shards that this rank owns."""
        self.followed = untouched_zeros(layout.size, torch.float32, layout.device)
        """What all ranks know of that mean."""
        self.active = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        self.signed_before = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        """The coordinates that had signs in the last message: active, and not in a quiet word."""
        self.signed_now = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        """The same for the message that is under way or was just read."""
        self.answer_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self._mode = MarkovMode.ORDINARY
        self._owner_sums = [
            torch.zeros(len(table), 3, dtype=torch.float64, device=layout.device) for table in self._owned.tables
        ]
        self._codec = Sign(kernels)
        bits.bit_positions(layout.device)  # cached here, before other streams use it
        self.payload = payload_of(self._codec, words_for)

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._packets = SignPackets(buffers, self._codec, 3)  # of |c|, of c², and the number of active elements

    def begin_step(self, *, activation: bool) -> None:
        """Begin an ordinary exchange, or an activation round, to be followed by `activate` or `abandon`."""
        self._mode = MarkovMode.ACTIVATION if activation else MarkovMode.ORDINARY

    def activate(self, *, has_momentum: bool) -> None:
        """Read the activation bits. The next exchange sends the values of this step.

        Args:
            has_momentum: whether a momentum holds these values; otherwise `known` holds the gradient until then.
        """
        self.read_answers()
        self.update_activity()
        self._mode = MarkovMode.ORDINARY if has_momentum else MarkovMode.REPLAY

    def abandon(self) -> None:
        """Read the activation bits, and discard what was to be sent."""
        self.read_answers()
        self.update_activity()
        self.known.zero_()

    def encode(self, part: Part, grad: Tensor | None, m: Tensor | None, *, beta: float, scale: Scale) -> bool | None:
        """Send a gradient, or with `m` the momentum that it updates; whether it is not finite."""
        return self._kernels.markov_encode(
            part.up_runs,
            grad,
            m,
            self.known,
            self.sent_bits,
            self._nonzero,
            self.signed_before,
            self.active,
            self._packets.buffers.sent,
            sent_scales=self.sent_scales,
            sums=self._packets.sums(part),
            beta=beta,
            weight=1.0 - beta,
            scale=scale,
            shift=part.frame.bucket.state_shift,
            mode=self._mode,
        )

    def seal(self, frame: Frame) -> None:
        """Add the scales, and the bits of words that are not quiet."""
        bucket = frame.bucket
        first = (bucket.own_start - bucket.state_shift) // WORD
        for row, shard in enumerate(bucket.own_shards):
            nonzero = self._nonzero[first + row * bucket.shard_words : first + (row + 1) * bucket.shard_words]
            bits.pack(nonzero, self._nonzero_of(frame.sent[row], bucket))
            number, packets = bucket.shard_number(shard), self._packets
            to, also = packets.sent_scales[bucket.index][row], self.sent_scales[number : number + 1]
            self._kernels.shard_scale(packets.all_sums, packets.rows_of[number], to, also, length=0)

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the scaled sign of the difference between the new mean and what all ranks know of it."""
        bucket = frame.bucket
        sums = self._owner_sums[bucket.index]
        at, answer = self._nonzero_at(bucket), frame.answers[shard]
        self._kernels.any_of(frame.received, at, words_for(bucket.shard_words), answer, at)
        first = bucket.first_word + shard * bucket.shard_words
        words = slice(first, first + bucket.shard_words)
        nonzero = bits.unpack(self._nonzero_of(answer, bucket), bucket.shard_words)
        self.signed_now[words] = torch.where(nonzero, self.active[words], 0)
        newly_quiet = ~nonzero & (self.signed_before[words] != 0)
        self._kernels.clear_words(self.mean, newly_quiet, first=first - bucket.shift_of(self._owned.shards) // WORD)
        self._kernels.markov_merge(
            self._owned.tables[bucket.index],
            frame.received,
            self.mean,
            self.followed,
            self.signed_now,
            answer,
            scales=self._packets.received_scales[bucket.index][:, 0].contiguous(),
            sums=sums,
            shift=bucket.shift_of(self._owned.shards),
        )
        to = self._packets.answer_scales(frame, shard)
        self._kernels.shard_scale(sums, self._owned.rows[bucket.index], to, None, length=0)

    def read_answers(self) -> None:
        """Read the scales and the quiet words of all answers, after the exchange."""
        self._packets.read_answers(self.answer_scales)
        for frame in self._packets.buffers.frames:
            bucket = frame.bucket
            words = slice(bucket.first_word, bucket.stop // WORD)
            nonzero = bits.unpack(self._nonzero_of(frame.answers, bucket), bucket.shard_words).flatten()
            self.signed_now[words] = torch.where(nonzero, self.active[words], 0)
            newly_quiet = ~nonzero & (self.signed_before[words] != 0)
            self._kernels.clear_words(self.followed, newly_quiet, first=bucket.first_word)
            own = bucket.own_start // WORD - bucket.first_word
            of_own = newly_quiet[own : own + bucket.slice_elements // WORD]
            self._kernels.clear_words(self.known, of_own, first=(bucket.own_start - bucket.state_shift) // WORD)

    def follow(self, part: Part) -> None:
        """Add the answer to `followed` for a part of a parameter that this step does not move."""
        answers = self._packets.buffers.answers
        add_signs(self._kernels, part.down_runs, self.followed, answers, self.answer_scales, self.signed_now)

    def update_activity(self) -> None:
        """Update the activation map from the answers, after all of them were added to `followed`."""
        self.signed_before.copy_(self.signed_now)
        for bucket, signs, _ in self._packets.answers:
            # The bit of an active coordinate is a sign; such a coordinate is active already.
            self.active[bucket.first_word : bucket.stop // WORD].view(bucket.shards, -1).bitwise_or_(signs)

    def state(self) -> State:
        """See `Compressor`."""
        return State(
            own={"known": self.known},
            whole={"followed": self.followed},
            owned={"mean": self.mean},
            own_words={"said": self.sent_bits},
            words={"alive": self.active, "spoke": self.signed_before},
            shards={"sent_scale": self.sent_scales},
        )

    def contraction(self) -> float:
        """‖c - C(c)‖²/‖c‖² for the differences c that this rank sent last; NaN if there were none."""
        lost = LostShare(len(self._packets.rows_of))
        for number, rows in enumerate(self._packets.rows_of):
            # Not from `sent_scales`: with a delay, a lane may be about to write them.
            magnitudes, wanted, active = self._packets.all_sums[rows].sum(0).tolist()
            lost.note(number, wanted, wanted - magnitudes**2 / max(active, 1.0))
        return lost.read()

    def _nonzero_at(self, bucket: Bucket) -> int:
        """The byte offset in a packet of the bits of words that are not quiet."""
        return HEADER_BYTES + self._codec.nbytes(bucket.shard_elements)

    def _nonzero_of(self, packets: Tensor, bucket: Bucket) -> Tensor:
        at = self._nonzero_at(bucket)
        return packets[..., at : at + WORD_BYTES * words_for(bucket.shard_words)]
