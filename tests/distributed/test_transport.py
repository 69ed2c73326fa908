"""The transport by itself: a compressor of the test, no optimizer. Vectors are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed.common import environment, run_nodes
from thinwire.kernels import ops
from thinwire.metrics import Meter
from thinwire.transport.bucket_exchange import BucketExchange, Presence
from thinwire.transport.buffers import WORD_BYTES, Frame, PacketBuffers, Part, Payload
from thinwire.transport.channel import Channel
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.open_transport import open_transport
from thinwire.transport.packet import HEADER_BYTES, NONFINITE
from thinwire.transport.peers import Peers
from thinwire.transport.state import State
from thinwire.transport.stream_transport import SideStream
from thinwire.transport.topology import choose

NUMELS = [100, 0, 700, 64, 333]
BUCKET_ELEMENTS = 512
STREAM = {"THINWIRE_LANE": "stream"}
ABSENT = 3
"""The index of a parameter that only rank 1 has a gradient for."""


def float_words(shard_words: int) -> int:
    return shard_words * WORD * 4 // WORD_BYTES


class Mean:
    """Sends floats, and answers with their mean."""

    payload = Payload(up_words=float_words, down_words=float_words, word_bytes=256)

    def bind(self, buffers: PacketBuffers) -> None:
        self._sent = buffers.sent
        self._answers = buffers.answers

    def encode(self, part: Part, vector: Tensor | None) -> int:
        """Write a vector into the packets; the flags to raise."""
        for _, start, count, byte, *_ in part.up_runs.tolist():
            values = torch.zeros(count) if vector is None else vector[start : start + count]
            self._sent[byte : byte + 4 * count] = values.contiguous().view(torch.uint8)
        return 0 if vector is None or bool(vector.isfinite().all()) else NONFINITE

    def seal(self, frame: Frame) -> None:
        pass

    def merge(self, frame: Frame, shard: int) -> None:
        floats = slice(HEADER_BYTES, HEADER_BYTES + WORD_BYTES * float_words(frame.bucket.shard_words))
        frame.answers[shard, floats] = frame.received[:, floats].view(torch.float32).mean(dim=0).view(torch.uint8)

    def state(self) -> State:
        return State()

    def decode(self, parts: list[Part], vector: Tensor) -> None:
        for part in parts:
            for _, start, count, byte, *_ in part.down_runs.tolist():
                vector[start : start + count] = self._answers[byte : byte + 4 * count].view(torch.float32)


def vectors_of(rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(10 * rank + step)
    # Small integers, whose means over 1, 2 and 4 ranks are exact in float32.
    return [torch.randint(-64, 64, (numel,), generator=draw).float() for numel in NUMELS]


def has_gradient(rank: int, index: int, variables: Mapping[str, str]) -> bool:
    """On a GPU, or its stand-in, all ranks of a node have gradients for the same parameters."""
    return index != ABSENT or rank == 1 or variables == STREAM


def average(
    rank: int, world_size: int, variables: Mapping[str, str], steps: int
) -> list[tuple[list[int], list[Tensor], int, int]]:
    """Per step: the indices of the parameters present, the means, the flags, and the bytes sent to other nodes."""
    with environment(dict(variables)):
        peers, meter = Peers.of(None), Meter()
        topology = choose("hierarchical", None, peers)
        layout = Layout(NUMELS, topology.workers, BUCKET_ELEMENTS, slices=topology.slices, own_slice=topology.own_slice)
        side, kernels = SideStream.of(layout), ops.backend(layout.device)
        if side is not None:
            kernels = side.bind(kernels)
        mean = Mean()
        channel = Channel(mean, layout, topology, 0)
        transport = open_transport(peers, topology, "test", layout.device, kernels, meter, side)
        results = []
        for step in range(1, steps + 1):
            vectors = vectors_of(rank, step)
            if step == 2 and rank == 0:
                vectors[0][5] = torch.inf
            buffers, presence, flags = channel.buffers, Presence(len(layout.buckets)), 0
            with transport.abort_on_error():
                transport.begin(channel, step)
                for frame in buffers.frames:
                    for position, part in buffers.contents[frame.bucket.index]:
                        index = layout.slots[position].index
                        vector = vectors[index] if has_gradient(rank, index, variables) else None
                        presence.now[frame.bucket.index] |= 0 if vector is None else part.presence
                        if transport.node is None:
                            flags |= mean.encode(part, vector)
                        else:
                            transport.node.stage(position, frame.bucket, vector, 1.0)
                    transport.submit(
                        BucketExchange(
                            channel, frame, step, flags, presence, lambda _, part, of_node: mean.encode(part, of_node)
                        )
                    )
                transport.wait()
            present = transport.present(channel)
            for position in present:
                mean.decode(buffers.parts[position], vectors[layout.slots[position].index])
            indices = sorted(layout.slots[position].index for position in present)
            results.append((indices, vectors, transport.flags_seen, meter.bytes_sent))
        transport.close()
        return results


@pytest.mark.parametrize(
    ("nodes", "ranks", "variables"),
    [(4, 1, {}), (2, 2, {}), (1, 2, {}), (1, 1, {}), (2, 1, STREAM), (2, 2, STREAM)],
    ids=["flat", "hierarchical", "one node", "alone", "stream", "stream in nodes"],
)
def test_vectors_are_averaged_over_all_ranks(nodes: int, ranks: int, variables: dict[str, str]) -> None:
    of_ranks = run_nodes(average, nodes, ranks, variables, 3)
    for step in (1, 3):
        gradients = [
            [
                vector.numpy() * has_gradient(rank, index, variables)
                for index, vector in enumerate(vectors_of(rank, step))
            ]
            for rank in range(nodes * ranks)
        ]
        for results in of_ranks:
            present, means, flags, sent = results[step - 1]
            assert present == [
                index for index, numel in enumerate(NUMELS) if numel and (nodes * ranks > 1 or index != ABSENT)
            ]
            assert flags == 0
            assert (sent > 0) == (nodes > 1)
            for index in present:
                np.testing.assert_array_equal(means[index], np.mean([of_rank[index] for of_rank in gradients], axis=0))


def test_a_value_that_is_not_finite_raises_a_flag_on_all_ranks() -> None:
    for nodes, ranks in ((2, 1), (2, 2)):
        for results in run_nodes(average, nodes, ranks, {}, 2):
            assert [flags for _, _, flags, _ in results] == [0, NONFINITE]
