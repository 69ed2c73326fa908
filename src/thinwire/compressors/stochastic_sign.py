"""The stochastic sign: one unbiased bit per coordinate.

A coordinate `u` in [-1, 1] is sent as `+1` with probability `(1 + u) / 2`, which needs no scale and no residual:
`E[Q(u)] = u`. One bit has no zero, so all ranks keep the same activation map, one bit per coordinate. An inactive
coordinate sends an activation bit instead of a vote. The activity refresh finds coordinates that no longer have
gradients. docs/protocol.md has the rules.
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
from thinwire.transport.state import State

REFRESH_PERIOD = 256
"""Steps between two refreshes of a coordinate. The refresh adds one word per this many words of votes."""

Downlink = Literal["bit", "majority", "votes"]


class StochasticSign:
    """Workers send votes; owners answer with a re-sampled bit, the majority, or the number of votes.

    Args:
        layout: the flat space.
        downlink: "bit", "majority" or "votes".
        kernels: the backend.
        activity: the state that decides which coordinates are active: those whose magnitude is above `eps`.
        eps: the threshold.
    """

    def __init__(self, layout: Layout, downlink: Downlink, kernels: Kernels, activity: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._activity = activity
        self._eps = eps
        self._step = 0
        self._key = 0
        self._downlink = downlink
        self._frames: list[Frame] = []
        self.counted_workers = layout.workers if downlink == "votes" else 0
        """The number of votes that an answer counts; 0 if the answer is a sign."""
        self.planes = planes = layout.workers.bit_length() if downlink == "votes" else 1
        self.active = torch.zeros(layout.size // WORD, dtype=torch.int64, device=layout.device)
        self._workers = layout.workers
        # The sum of |2c - n| over a sample of active coordinates, and their number.
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
        """Begin a step: it decides which words are refreshed and which worker breaks ties. Owners draw with `key`."""
        self._step, self._key = step, key
        self._signal.zero_()

    def seal(self, frame: Frame) -> None:
        """Add the activity refresh: which coordinates are active, for the words that this step refreshes."""
        bucket = frame.bucket
        self._kernels.activity_refresh(
            self._activity,
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
        """Answer the votes for `shard`."""
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
            tie_breaker = self._step % self._workers
            self._kernels.vote_majority(frame.received, HEADER_BYTES, self.active, casting=tie_breaker, **votes)
        elif self._downlink == "votes":
            self._kernels.vote_count(frame.received, HEADER_BYTES, self.active, planes=self.planes, **votes)
        else:
            self._kernels.vote_bit(frame.received, HEADER_BYTES, self.active, key=self._key, **votes)
        up, down = (HEADER_BYTES + WORD_BYTES * planes * words for planes in (1, self.planes))
        self._kernels.any_of(frame.received, up, _refresh_words(words), answer, down)

    def state(self) -> State:
        """See `Compressor`."""
        return State(words={"alive": self.active})

    def mean_abs_vote(self) -> float:
        """Mean |ū| over a sample of the coordinates that this rank merged, in the last step that was not skipped."""
        total, coordinates = self._last_signal.tolist()
        return total / (self._workers * coordinates) if coordinates else math.nan

    def record_votes(self, taken: Tensor | None = None) -> None:
        """Record the votes of a step for `mean_abs_vote`, unless the flag `taken` on the device is 0."""
        signal = self._signal if taken is None else torch.where(taken != 0, self._signal, self._last_signal)
        self._last_signal.copy_(signal)

    def update_activity(self) -> None:
        """Update the activation map from the answers."""
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
