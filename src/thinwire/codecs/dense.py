"""No compression: an element travels as the float that it is."""

from __future__ import annotations

from thinwire.wire.buckets import WORD
from thinwire.wire.mail import WORD_BYTES, Frame, Payload
from thinwire.wire.packet import HEADER_BYTES

_FLOAT_BYTES = 4


def _float_words(shard_words: int) -> int:
    return shard_words * WORD * _FLOAT_BYTES // WORD_BYTES


class Dense:
    """For a single worker, whose answer is what it has sent: a node among which nothing is slow."""

    payload = Payload(up_words=_float_words, down_words=_float_words, element_bits=8 * _FLOAT_BYTES)

    def merge(self, frame: Frame, shard: int) -> None:
        """Answer with the only packet that there is."""
        floats = slice(HEADER_BYTES, HEADER_BYTES + WORD_BYTES * _float_words(frame.bucket.shard_words))
        frame.answers[shard, floats] = frame.received[0, floats]
