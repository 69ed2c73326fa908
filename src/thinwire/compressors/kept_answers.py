"""Answers that are kept aside while the next exchange uses the packet buffers, for `delay=1`.

`KeptWords` keeps them as they were received, without headers, in the order of the flat space: as many bits per element
as an answer has. `KeptMeans` keeps them decoded, 4 bytes per element, for compressors whose answers have no place for
each element. Both are equal on all ranks, and neither depends on buckets, so they are saved as state of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.compressors.gradient_compressor import GradientCompressor
from thinwire.transport.buffers import PacketBuffers, Part, Payload
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.memory import untouched_zeros
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.state import State

NAME = "delayed"
"""With this the names of kept answers begin, in the state of a parameter."""


class KeptWords:
    """The payloads of answers in which every word of 64 elements has as many bytes.

    Args:
        layout: the flat space.
        word_bytes: the bytes of a word in a plane; see `Payload`.
        planes: the number of planes, one after another in an answer.
    """

    def __init__(self, layout: Layout, word_bytes: int, planes: int = 1) -> None:
        words = layout.size // WORD
        self._word_bytes, self._plane_bytes = word_bytes, words * word_bytes
        self.memory = untouched_zeros(planes * words * word_bytes, torch.uint8, layout.device)
        """What `runs` points into."""
        self._planes = list(self.memory.view(planes, words, word_bytes))
        self._runs: dict[int, Tensor] = {}

    def keep(self, buffers: PacketBuffers) -> None:
        """Copy the answers of all buckets."""
        for frame in buffers.frames:
            bucket = frame.bucket
            first, size = bucket.start // WORD, bucket.shard_words * self._word_bytes
            for number, plane in enumerate(self._planes):
                answers = frame.answers[:, HEADER_BYTES + number * size : HEADER_BYTES + (number + 1) * size]
                plane[first : first + bucket.shards * bucket.shard_words].view(bucket.shards, size).copy_(answers)

    def runs(self, part: Part) -> Tensor:
        """The runs of a part, whose answers are in `memory`."""
        if part.index not in self._runs:
            self._runs[part.index] = runs = part.down_runs.clone()
            runs[:, 3] = runs[:, 0] // WORD * self._word_bytes
            runs[:, 4] = self._plane_bytes
        return self._runs[part.index]

    def state(self) -> State:
        """What must be saved for a run to continue with the same bits."""
        if len(self._planes) == 1:
            return State(words={NAME: self._planes[0]})
        return State(words={f"{NAME}_{number}": plane for number, plane in enumerate(self._planes)})


class KeptMean(Protocol):
    """The mean of an exchange, which a rule applies later."""

    def keep(self, buffers: PacketBuffers) -> None:
        """Keep the answers of an exchange that has ended."""

    def read(self, position: int, parts: Sequence[Part], into: Tensor) -> None:
        """Write the mean for a parameter into a vector of its length."""

    def state(self) -> State:
        """What must be saved for a run to continue with the same bits."""
        ...


@runtime_checkable
class PlacedAnswers(Protocol):
    """A compressor whose answers have a place for each element, of as many bits."""

    @property
    def payload(self) -> Payload:
        """The size of what it puts into packets."""
        ...

    def decoder(self, runs: Tensor, answers: Tensor) -> Callable[[Tensor], Any]:
        """A function that writes the answer for some runs into a vector of their parameter's length."""
        ...


class _KeptCodes:
    """A mean as it was received."""

    def __init__(self, layout: Layout, compressor: PlacedAnswers) -> None:
        self._compressor = compressor
        self._words = KeptWords(layout, compressor.payload.word_bytes)
        self._decoders: dict[int, Callable[[Tensor], Any]] = {}

    def keep(self, buffers: PacketBuffers) -> None:
        """See `KeptMean`."""
        self._words.keep(buffers)

    def read(self, position: int, parts: Sequence[Part], into: Tensor) -> None:
        """See `KeptMean`."""
        for part in parts:
            if part.index not in self._decoders:
                self._decoders[part.index] = self._compressor.decoder(self._words.runs(part), self._words.memory)
            self._decoders[part.index](into)

    def state(self) -> State:
        """See `KeptMean`."""
        return self._words.state()


class _KeptFloats:
    """A decoded mean."""

    def __init__(self, layout: Layout, compressor: GradientCompressor) -> None:
        self._layout, self._compressor = layout, compressor
        self._means = untouched_zeros(layout.size, torch.float32, layout.device)

    def keep(self, buffers: PacketBuffers) -> None:
        """See `KeptMean`."""
        for position, parts in enumerate(buffers.parts):
            for part in parts:
                self._compressor.decode(part, self._mean(position))

    def read(self, position: int, parts: Sequence[Part], into: Tensor) -> None:
        """See `KeptMean`."""
        into.copy_(self._mean(position))

    def _mean(self, position: int) -> Tensor:
        slot = self._layout.slots[position]
        return self._means[slot.start : slot.start + slot.numel]

    def state(self) -> State:
        """See `KeptMean`."""
        return State(whole={NAME: self._means})


def kept_mean(layout: Layout, compressor: GradientCompressor) -> KeptMean:
    """Memory for one mean of a compressor."""
    if isinstance(compressor, PlacedAnswers):
        return _KeptCodes(layout, compressor)
    return _KeptFloats(layout, compressor)
