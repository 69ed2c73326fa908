"""Markov compression: what travels is a difference, to what everybody knows already.

A worker wants to tell `w`; what has been heard of it so far is `known`. It sends the encoding of `w - known`, and both
sides add that to `known`, which so runs after `w`, and about it where `w` comes to rest, in steps as large as the
encoding makes them. The owner of a shard does the same with the mean of what it knows of the workers, and everybody
follows in `followed`. No error is remembered: what an encoding leaves out is still there in the next difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.compressors import _bits as bits
from thinwire.compressors._bits import words_for
from thinwire.compressors._packets import OwnedRuns, SignPackets, payload_of
from thinwire.compressors.codecs import Codec, Projection
from thinwire.compressors.codecs.sign import Sign, add_signs
from thinwire.errors import CorruptPacket
from thinwire.kernels.modes import MarkovMode, Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part
from thinwire.transport.layout import WORD, Bucket, Layout
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.packet import HEADER_BYTES


class _Share:
    """Which share of a squared length some encodings have left out."""

    def __init__(self, parts: int) -> None:
        self._wanted = [0.0] * parts
        self._left_out = [0.0] * parts

    def note(self, part: int, wanted: float, left_out: float) -> None:
        self._wanted[part], self._left_out[part] = wanted, max(left_out, 0.0)

    def read(self) -> float:
        wanted = math.fsum(self._wanted)
        return math.fsum(self._left_out) / wanted if wanted > 0 else math.nan


class Markov:
    """Differences by any codec that is a projection, encoded a shard at a time.

    Args:
        layout: the flat space.
        node: this rank's worker.
        kernels: the backend.
        codec: makes a codec. There are two, as workers and owners encode at the same time.
    """

    def __init__(self, layout: Layout, node: int, kernels: Kernels, codec: Callable[[], Projection]) -> None:
        self._kernels = kernels
        self._up, self._down = codec(), codec()
        self._owned = OwnedRuns(layout, node)
        self.known = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """What the others know of this worker, of this rank's slices."""
        self.mean = untouched_zeros(self._owned.size, torch.float32, layout.device)
        """The mean of what is known of all workers, of the shards that this rank owns."""
        self.followed = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        """What everybody knows of that mean."""
        self._difference = untouched_zeros(layout.own_size, torch.float32, layout.device)
        self._answer = torch.zeros(
            max((b.shard_elements for b in layout.buckets), default=0), dtype=torch.float32, device=layout.device
        )
        self._unsaid = _Share(layout.shards)
        self.payload = payload_of(self._up)

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._frames = buffers.frames

    def encode(self, part: Part, grad: Tensor | None, m: Tensor | None, *, beta: float, scale: Scale) -> bool | None:
        """Take in a gradient, or with `m` let it into that momentum and take in this; whether it was not finite."""
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
        first = bucket.own_start - bucket.state_shift
        for row, shard in enumerate(bucket.own_shards):
            here = slice(first + row * length, first + (row + 1) * length)
            difference, packet = self._difference[here], _payload(frame.sent[row], self._up, length)
            wanted = float(self._kernels.square_sum(difference))
            self._up.encode(difference, packet)
            self._up.decode(packet, self.known[here])
            self._unsaid.note(bucket.shard_number(shard), wanted, wanted - self._up.square_sum(packet, length))

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the encoding of the difference between the new mean and what everybody knows of it."""
        bucket, length = frame.bucket, frame.bucket.shard_elements
        first = bucket.start + shard * length
        followed = self.followed[first : first + length]
        shift = bucket.shift_of(self._owned.shards)
        mean = self.mean[first - shift : first - shift + length]
        for worker, packet in enumerate(frame.received):
            with _told_of(f"the packet of worker {worker} for bucket {bucket.index}"):
                self._down.decode(_payload(packet, self._down, length), mean, 1.0 / frame.received.shape[0])
        difference = torch.sub(mean, followed, out=self._answer[:length])
        self._down.encode(difference, _payload(frame.answers[shard], self._down, length))

    def hear(self) -> None:
        """Follow all answers, when the whole exchange is done."""
        for frame in self._frames:
            length = frame.bucket.shard_elements
            for shard, packet in enumerate(frame.answers):
                first = frame.bucket.start + shard * length
                with _told_of(f"the answer for shard {shard} of bucket {frame.bucket.index}"):
                    self._down.decode(_payload(packet, self._down, length), self.followed[first : first + length])

    def contraction(self) -> float:
        """‖c - C(c)‖²/‖c‖² for the differences c that this rank has sent last; NaN where there were none."""
        return self._unsaid.read()


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    """A codec that cannot make sense of bytes is told whose they are; all ranks are going to hear of it."""
    try:
        yield
    except ValueError as error:
        raise CorruptPacket(f"{what}: {error}") from error


def _payload(packet: Tensor, codec: Codec, length: int) -> Tensor:
    return packet[HEADER_BYTES : HEADER_BYTES + codec.nbytes(length)]


class MarkovSign:
    """Differences by scaled signs, one pass over memory at a worker.

    The scale of a shard is known when all of it has been encoded, so `known` stays as it was before the last message,
    whose signs and scale are kept beside it: whoever reads `known` next adds them on the way. And as one bit has no
    zero, a map that is the same on all ranks tells which coordinates live; the bits of the others say hello, as in
    `thinwire.compressors.stochastic_sign`, but an active coordinate stays active. A word that is zero on all workers is
    *quiet*, and one bit more says so: everybody knows then that it is zero, and forgets what was known of it.
    docs/protocol.md has the rules.

    Args:
        layout: the flat space.
        node: this rank's worker.
        kernels: the backend.
    """

    def __init__(self, layout: Layout, node: int, kernels: Kernels) -> None:
        self._kernels = kernels
        self._owned = OwnedRuns(layout, node)
        self.known = untouched_zeros(layout.own_size, torch.float32, layout.device)
        """What the others knew of this worker before the last message, of this rank's slices."""
        self.said = torch.zeros(layout.own_size // WORD, dtype=torch.int64, device=layout.device)
        """The bits of the last message, a bit an element of this rank's slices."""
        self._busy = torch.zeros(layout.own_size // WORD, dtype=torch.uint8, device=layout.device)
        """Words of this rank's slices of which it means anything but zeros."""
        self.sent_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self.mean = untouched_zeros(self._owned.size, torch.float32, layout.device)
        """The mean of what is known of all workers, of the shards that this rank owns."""
        self.followed = torch.zeros(layout.size, dtype=torch.float32, device=layout.device)
        """What everybody knows of that mean."""
        self.active = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        self.spoke = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        """Who was active at the last message, and not in a quiet word."""
        self.heard = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        """The same for the message that is under way, or has just been heard."""
        self.answer_scales = torch.zeros(layout.shards, dtype=torch.float32, device=layout.device)
        self._mode = MarkovMode.ORDINARY
        self._owner_sums = [
            torch.zeros(len(table), 3, dtype=torch.float64, device=layout.device) for table in self._owned.tables
        ]
        self._codec = Sign(kernels)
        bits.places(layout.device)
        self.payload = payload_of(self._codec, words_for)

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._packets = SignPackets(buffers, self._codec, 3)  # of |c|, of c², and how many elements live

    def begin_step(self, *, greeting: bool) -> None:
        """Let the next exchange be an ordinary one, or one of hellos only, to be followed by `recall` or `give_up`."""
        self._mode = MarkovMode.ACTIVATION if greeting else MarkovMode.ORDINARY

    def recall(self, *, told: bool) -> None:
        """Hear the hellos, and say in the next exchange what was not said in the greeting.

        Args:
            told: whether there is a momentum, which remembers it.
        """
        self.hear()
        self.conclude()
        self._mode = MarkovMode.ORDINARY if told else MarkovMode.REPLAY

    def give_up(self) -> None:
        """Hear the hellos, and forget what was to be said."""
        self.hear()
        self.conclude()
        self.known.zero_()

    def encode(self, part: Part, grad: Tensor | None, m: Tensor | None, *, beta: float, scale: Scale) -> bool | None:
        """Send a gradient, or with `m` let it into that momentum and send this; whether it was not finite."""
        return self._kernels.markov_encode(
            part.up_runs,
            grad,
            m,
            self.known,
            self.said,
            self._busy,
            self.spoke,
            self.active,
            self._packets.buffers.sent,
            sent_scales=self.sent_scales,
            sums=self._packets.sums[part.index],
            beta=beta,
            weight=1.0 - beta,
            scale=scale,
            shift=part.frame.bucket.state_shift,
            mode=self._mode,
        )

    def seal(self, frame: Frame) -> None:
        """Add the scales."""
        bucket = frame.bucket
        first = (bucket.own_start - bucket.state_shift) // WORD
        for row, shard in enumerate(bucket.own_shards):
            busy = self._busy[first + row * bucket.shard_words : first + (row + 1) * bucket.shard_words]
            bits.pack(busy, self._busy_of(frame.sent[row], bucket))
            number, packets = bucket.shard_number(shard), self._packets
            to, also = packets.sent_scale(frame, row), self.sent_scales[number : number + 1]
            self._kernels.shard_scale(packets.all_sums, packets.rows_of[number], to, also, length=0)

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the scaled sign of the difference between the new mean and what everybody knows of it."""
        bucket = frame.bucket
        sums = self._owner_sums[bucket.index]
        at, answer = self._busy_at(bucket), frame.answers[shard]
        self._kernels.any_of(frame.received, at, words_for(bucket.shard_words), answer, at)
        first = bucket.first_word + shard * bucket.shard_words
        words = slice(first, first + bucket.shard_words)
        busy = bits.unpack(self._busy_of(answer, bucket), bucket.shard_words)
        self.heard[words] = torch.where(busy, self.active[words], 0)
        fallen_quiet = ~busy & (self.spoke[words] != 0)
        self._kernels.clear_words(self.mean, fallen_quiet, first=first - bucket.shift_of(self._owned.shards) // WORD)
        self._kernels.markov_merge(
            self._owned.tables[bucket.index],
            frame.received,
            self.mean,
            self.followed,
            self.heard,
            answer,
            scales=self._packets.received_scales(frame),
            sums=sums,
            shift=bucket.shift_of(self._owned.shards),
        )
        to = self._packets.answer_scale(frame, shard)
        self._kernels.shard_scale(sums, self._owned.rows[bucket.index], to, None, length=0)

    def hear(self) -> None:
        """Get to know the scales and the quiet words of all answers, when the whole exchange is done."""
        self._packets.read_answers(self.answer_scales)
        for frame in self._packets.buffers.frames:
            bucket = frame.bucket
            words = slice(bucket.first_word, bucket.stop // WORD)
            busy = bits.unpack(self._busy_of(frame.answers, bucket), bucket.shard_words).flatten()
            self.heard[words] = torch.where(busy, self.active[words], 0)
            fallen_quiet = ~busy & (self.spoke[words] != 0)
            self._kernels.clear_words(self.followed, fallen_quiet, first=bucket.first_word)
            own = bucket.own_start // WORD - bucket.first_word
            of_own = fallen_quiet[own : own + bucket.slice_elements // WORD]
            self._kernels.clear_words(self.known, of_own, first=(bucket.own_start - bucket.state_shift) // WORD)

    def follow(self, part: Part) -> None:
        """Follow the answer for a part of a parameter that takes no step by it."""
        answers = self._packets.buffers.answers
        add_signs(self._kernels, part.down_runs, self.followed, answers, self.answer_scales, self.heard)

    def conclude(self) -> None:
        """Bring the map of living coordinates up to date with the answers, when all of them have been followed."""
        self.spoke.copy_(self.heard)
        for bucket, signs, _ in self._packets.answers:
            # A bit of somebody who lives is a sign, and changes nothing here.
            self.active[bucket.first_word : bucket.stop // WORD].view(bucket.shards, -1).bitwise_or_(signs)

    def contraction(self) -> float:
        """‖c - C(c)‖²/‖c‖² for the differences c that this rank has sent last; NaN where there were none."""
        unsaid = _Share(len(self._packets.rows_of))
        scales = self.sent_scales.tolist()
        for number, (rows, scale) in enumerate(zip(self._packets.rows_of, scales, strict=True)):
            magnitudes, wanted, _ = self._packets.all_sums[rows].sum(0).tolist()
            unsaid.note(number, wanted, wanted - scale * magnitudes)
        return unsaid.read()

    def _busy_at(self, bucket: Bucket) -> int:
        """The byte of a packet at which it says which words are not quiet."""
        return HEADER_BYTES + self._codec.nbytes(bucket.shard_elements)

    def _busy_of(self, packets: Tensor, bucket: Bucket) -> Tensor:
        at = self._busy_at(bucket)
        return packets[..., at : at + WORD_BYTES * words_for(bucket.shard_words)]
