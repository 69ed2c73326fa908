"""The stochastic sign: one bit that is right on average, and a way to say nothing.

A coordinate `u` in [-1, 1] travels as `+1` with probability `(1 + u) / 2`, which needs no scale and no memory of
errors: `E[Q(u)] = u`. What one bit cannot say is zero. So this compressor keeps, identical on all ranks, a map of
the coordinates that live; the bits of the others say hello instead of voting, and a rolling roll call finds those that
have fallen silent. docs/protocol.md has the rules.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Payload
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.packet import HEADER_BYTES

REFRESH_PERIOD = 256
"""Steps between two roll calls of a coordinate; the roll call is this fraction of the bytes."""

Downlink = Literal["bit", "majority", "votes"]


class StochasticSign:
    """Votes up, an answer down: a re-sampled bit, what most say, or the number of votes.

    Args:
        layout: the flat space.
        downlink: "bit", "majority" or "votes".
        kernels: the backend.
        life: the state that tells which coordinates live: those above `eps`.
        eps: threshold of life.
    """

    def __init__(self, layout: Layout, downlink: Downlink, kernels: Kernels, life: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._life = life
        self._eps = eps
        self._step = 0
        self._key = 0
        self._downlink = downlink
        self._frames: list[Frame] = []
        self.workers = layout.workers if downlink == "votes" else 0
        """How many votes an answer counts; 0 when it is a sign."""
        self.planes = planes = layout.workers.bit_length() if downlink == "votes" else 1
        self.active = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        self._votes_of = layout.workers
        # Sum of |2c - n| over a sample of living coordinates, and their number.
        self._signal = torch.zeros(2, dtype=torch.int64, device=layout.device)
        self._last_signal = torch.zeros_like(self._signal)
        self.payload = Payload(
            up_words=lambda shard_words: shard_words + _refresh_words(shard_words),
            down_words=lambda shard_words: planes * shard_words + _refresh_words(shard_words),
        )

    def bind(self, buffers: PacketBuffers) -> None:
        """See `Compressor`."""
        self._frames = buffers.frames

    def begin_step(self, step: int, key: int) -> None:
        """Whose turn it is at the roll call and in ties follows from the step, and the owners' draws from the key."""
        self._step, self._key = step, key
        self._signal.zero_()

    def seal(self, frame: Frame) -> None:
        """Call the roll: which coordinates of the own slice live, for the words whose turn it is."""
        bucket = frame.bucket
        self._kernels.activity_refresh(
            self._life,
            shift=bucket.state_shift,
            first_word=bucket.own_start // WORD,
            shard_words=bucket.shard_words,
            shards=len(bucket.own_shards),
            period=REFRESH_PERIOD,
            phase=self._step % REFRESH_PERIOD,
            eps=self._eps,
            packets=frame.sent,
            offset=HEADER_BYTES + WORD_BYTES * bucket.shard_words,
        )

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer the votes received for `shard`, in its packet among the bucket's answers."""
        words = frame.bucket.shard_words
        answer = frame.answers[shard]
        votes = {
            "first_word": frame.bucket.first_word + shard * words,
            "words": words,
            "answer": answer,
            "answer_byte": HEADER_BYTES,
            "signal": self._signal,
        }
        if self._downlink == "majority":
            casting = self._step % self._votes_of
            self._kernels.vote_majority(frame.received, HEADER_BYTES, self.active, casting=casting, **votes)
        elif self._downlink == "votes":
            self._kernels.vote_count(frame.received, HEADER_BYTES, self.active, planes=self.planes, **votes)
        else:
            self._kernels.vote_bit(frame.received, HEADER_BYTES, self.active, key=self._key, **votes)
        up, down = (HEADER_BYTES + WORD_BYTES * planes * words for planes in (1, self.planes))
        self._kernels.any_of(frame.received, up, _refresh_words(words), answer, down)

    def mean_abs_vote(self) -> float:
        """Mean |ū| over a sample of the coordinates that this rank has answered for in the last step that was taken."""
        total, coordinates = self._last_signal.tolist()
        return total / (self._votes_of * coordinates) if coordinates else math.nan

    def conclude(self, taken: Tensor | None = None) -> None:
        """Remember what votes were like when a step is taken; `taken` tells whether, where only a device knows."""
        signal = self._signal if taken is None else torch.where(taken != 0, self._signal, self._last_signal)
        self._last_signal.copy_(signal)

    def adopt(self) -> None:
        """Bring the map of living coordinates up to date with the answers."""
        for frame in self._frames:
            self._kernels.activity_update(
                self.active,
                first_word=frame.bucket.first_word,
                shard_words=frame.bucket.shard_words,
                answers=frame.answers,
                byte=HEADER_BYTES,
                planes=self.planes,
                period=REFRESH_PERIOD,
                phase=self._step % REFRESH_PERIOD,
            )


def _refresh_words(shard_words: int) -> int:
    return -(-shard_words // REFRESH_PERIOD)
