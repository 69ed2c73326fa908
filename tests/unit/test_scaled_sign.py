"""The scaled sign as a compressor: workers and owners of one process, who exchange packets by copying them.

The kernels have tests of their own. Here it is what lies between them: which scale belongs to which shard, what becomes
of memories from one exchange to the next, and that nothing is lost on the way (law 4).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.formulas import Array, double, sign_of
from tests.unit.kernel_cases import REFERENCE, each_state
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.kernels.modes import Output
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import PacketBuffers, Part
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.packet import HEADER_BYTES

NUMELS = [130, 0, 1, 700, 65]
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
"""Of a sum of three numbers that is stored; as a share of it."""


class Rank:
    """A compressor and its packets; `node` is its worker, `own` its slice."""

    def __init__(self, layout: Layout, node: int, own: int, kernels: Kernels, dtype: torch.dtype, **options: Any):
        self.layout, self.node, self.own = layout, node, own
        self.compressor = ScaledSign(layout, node, kernels, dtype, **options)
        self.buffers = PacketBuffers(layout, self.compressor.payload, alone=layout.workers == 1)
        self.compressor.bind(self.buffers)

    def each_part(self, flat: Array, use: Callable[[Part, torch.Tensor], object]) -> None:
        """Call `use` with every part that this rank encodes, and its gradient out of the flat space."""
        values = torch.tensor(flat, dtype=torch.float32)
        for slot, parts in zip(self.layout.slots, self.buffers.parts, strict=True):
            for part in parts:
                bucket = part.frame.bucket
                inside = (slot.start, slot.start + slot.numel)
                if self.layout.slices > 1:
                    inside = (bucket.own_start, bucket.own_start + bucket.slice_elements)
                if part.up_runs.shape[0]:
                    use(part, values[slice(*inside)])


class Network:
    """Nodes of ranks, and what they say, keep and hear, as arrays over the flat space with 0 for the padding."""

    def __init__(
        self,
        nodes: int,
        ranks: int = 1,
        numels: Sequence[int] = NUMELS,
        bucket: int = 400,
        dtype: torch.dtype = torch.float32,
        kernels: Kernels = REFERENCE,
        keep_previous: bool = False,
        scale_block: int | None = None,
    ) -> None:
        layouts = [Layout(numels, nodes, bucket, slices=ranks, own_slice=own) for own in range(ranks)]
        self.layout = layouts[0]
        self.ranks = [
            Rank(layouts[own], node, own, kernels, dtype, keep_previous=keep_previous, scale_block=scale_block)
            for node in range(nodes)
            for own in range(ranks)
        ]
        self.nodes = nodes
        self.shard_of = np.concatenate(
            [np.repeat(range(b.shards), b.shard_words * WORD) + b.shard_number(0) for b in self.layout.buckets]
        )
        longest = max(b.shard_elements for b in self.layout.buckets)
        self.block = scale_block or longest
        in_shard = np.concatenate([np.tile(np.arange(b.shard_elements), b.shards) for b in self.layout.buckets])
        self.scale_of = self.shard_of * -(-longest // self.block) + in_shard // self.block
        self.live = np.zeros(self.layout.size, dtype=bool)
        for slot in self.layout.slots:
            self.live[slot.start : slot.start + slot.numel] = True

    def random_inputs(self, seed: object) -> Array:
        """A vector for each node."""
        drawn = np.random.default_rng(seed).standard_normal((self.nodes, self.layout.size))  # type: ignore[arg-type]
        return (drawn * self.live).astype(np.float32).astype(np.float64)

    def encode(self, inputs: Array, *, beta: float = 0.0, weight: float = 1.0) -> None:
        for rank in self.ranks:
            compressor = rank.compressor
            rank.each_part(
                inputs[rank.node],
                lambda part, grad, compressor=compressor: compressor.encode(
                    part, grad, beta=beta, weight=weight, scale=1.0
                ),
            )

    def exchange(self) -> None:
        """Seal, send, merge and answer, a bucket at a time."""
        for frames in zip(*(rank.buffers.frames for rank in self.ranks), strict=True):
            for rank, frame in zip(self.ranks, frames, strict=True):
                rank.compressor.seal(frame)
            for rank, frame in zip(self.ranks, frames, strict=True):
                senders = (f for other, f in zip(self.ranks, frames, strict=True) if other.own == rank.own)
                for row, sender in enumerate(senders):
                    frame.received[row] = sender.sent[rank.node]
                rank.compressor.merge(frame, frame.bucket.own_shards[rank.node])
            for rank, answered in zip(self.ranks, frames, strict=True):
                shard = answered.bucket.own_shards[rank.node]
                for frame in frames:
                    frame.answers[shard] = answered.answers[shard]

    def adopt(self) -> None:
        for rank in self.ranks:
            rank.compressor.read_answers()

    def said(self) -> Array:
        """What stands in the packets of each node."""
        flat = np.zeros((self.nodes, self.layout.size))
        for rank in self.ranks:
            for frame in rank.buffers.frames:
                rows = zip(frame.bucket.own_shards, frame.sent, strict=True)
                for shard, packet in rows:
                    self._put(flat[rank.node], frame.bucket.shard_number(shard), packet)
        return flat

    def answered(self) -> Array:
        """What stands in the answers, the same for all."""
        flat = np.zeros(self.layout.size)
        for frame in self.ranks[0].buffers.frames:
            for shard, packet in enumerate(frame.answers):
                self._put(flat, frame.bucket.shard_number(shard), packet)
        return flat

    def _put(self, flat: Array, number: int, packet: torch.Tensor) -> None:
        here = np.flatnonzero(self.shard_of == number)
        bits, scales = read(packet, here.size // WORD, self.block)
        scale = scales[np.arange(here.size) // self.block]
        flat[here] = np.where(self.live[here], np.where(bits, scale, -scale), 0.0)

    def kept_by_workers(self) -> Array:
        """e = c - s sign(c) of each node."""
        flat = np.zeros((self.nodes, self.layout.size))
        for rank in self.ranks:
            c, scales = double(rank.compressor.sent), double(rank.compressor.sent_scales)
            for b in rank.layout.buckets:
                here = np.arange(b.own_start, b.own_start + b.slice_elements)
                inside = c[here - b.state_shift]
                flat[rank.node, here] = inside - scales[self.scale_of[here]] * sign_of(inside)
        return flat * self.live

    def kept_by_owners(self) -> Array:
        """y - S sign(y)"""
        flat = np.zeros(self.layout.size)
        for rank in self.ranks:
            owned = rank.layout.owned_by(rank.node)
            y, scales = double(rank.compressor.answered), double(rank.compressor.answer_scales)
            for b in rank.layout.buckets:
                here = np.flatnonzero(self.shard_of == b.shard_number(owned.start))
                inside = y[here - b.shift_of(owned)]
                flat[here] = inside - scales[self.scale_of[here]] * sign_of(inside)
        return flat * self.live


def read(packet: torch.Tensor, words: int, block: int) -> tuple[Array, Array]:
    """The signs of a packet and the scales of its blocks, by the page."""
    data = packet.numpy().tobytes()
    bits = np.unpackbits(
        np.frombuffer(data[HEADER_BYTES : HEADER_BYTES + 8 * words], dtype=np.uint8), bitorder="little"
    )
    scales = struct.unpack_from(f"<{-(-words * WORD // block)}f", data, HEADER_BYTES + 8 * words)
    return bits == 1, np.array(scales)


each_grid = pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 1), (3, 1), (2, 2)])
each_block = pytest.mark.parametrize("block", [None, 64, 128], ids=lambda block: f"blocks of {block}")


# Law 4 ---------------------------------------------------------------------------------------------------------------


@each_state
@each_grid
@each_block
def test_sent_and_kept_make_the_input(nodes: int, ranks: int, state_dtype: torch.dtype, block: int | None) -> None:
    """At every step and both ends, and over all steps together."""
    network = Network(nodes, ranks, dtype=state_dtype, scale_block=block)
    put_in, put_out, heard = 0.0, 0.0, 0.0
    for step in range(12):
        inputs = network.random_inputs((1, step))
        worker_input = network.kept_by_workers() + inputs
        owner_error = network.kept_by_owners()
        network.encode(inputs)
        network.exchange()
        said, answered = network.said(), network.answered()
        network.adopt()
        assert_equal_but_for_rounding(said + network.kept_by_workers(), worker_input, state_dtype)
        owner_input = said.mean(0) + owner_error
        assert_equal_but_for_rounding(answered + network.kept_by_owners(), owner_input, state_dtype)
        put_in, put_out, heard = put_in + inputs, put_out + said, heard + answered
        if state_dtype == torch.float32:
            np.testing.assert_allclose(put_out + network.kept_by_workers(), put_in, rtol=0, atol=1e-5)
            remains = network.kept_by_workers().mean(0) + network.kept_by_owners()
            np.testing.assert_allclose(heard + remains, put_in.mean(0), rtol=0, atol=1e-5)
        assert np.abs(network.kept_by_workers()[:, network.live]).mean() > 0.1  # else there would be nothing to keep


def assert_equal_but_for_rounding(actual: Array, expected: Array, dtype: torch.dtype) -> None:
    assert (np.abs(actual - expected) <= ROUNDING[dtype] * (1 + np.abs(expected))).all()


def test_local_steps_are_kept_until_they_are_said() -> None:
    """What 0/1 Adam does: several steps into the memory and nothing sent, then all of it at once."""
    network = Network(2)
    memories = [torch.zeros(network.layout.size) for _ in network.ranks]
    put_in, put_out = np.zeros((2, network.layout.size)), np.zeros((2, network.layout.size))
    for step in range(12):
        local = step % 4 != 3
        gradients = network.random_inputs((2, step))
        for rank, m in zip(network.ranks, memories, strict=True):
            compressor, packets = rank.compressor, None if local else rank.buffers.sent
            rank.each_part(
                gradients[rank.node],
                lambda part, grad, compressor=compressor, m=m, packets=packets: compressor.encode_momentum(
                    part,
                    grad,
                    m,
                    beta=0.5,
                    scale=1.0,
                    rate=0.25,
                    packets=packets,
                    output=Output.NOTHING if packets is None else Output.SIGNS,
                ),
            )
            if local:
                compressor.sent_scales.zero_()
        put_in += 0.25 * np.stack([double(m) for m in memories])
        if not local:
            network.exchange()
            network.adopt()
            put_out += network.said()
        np.testing.assert_allclose(put_out + network.kept_by_workers(), put_in, rtol=0, atol=1e-5)


# Scales --------------------------------------------------------------------------------------------------------------


@each_state
@each_grid
@each_block
def test_a_scale_is_the_root_mean_square_of_its_shard_or_block_without_padding(
    nodes: int, ranks: int, state_dtype: torch.dtype, block: int | None
) -> None:
    network = Network(nodes, ranks, dtype=state_dtype, scale_block=block)
    network.encode(network.random_inputs(3) * np.linspace(0.1, 10, network.layout.size))
    network.exchange()
    said = network.said()
    c = said + network.kept_by_workers()
    partly_padded = 0
    assert block is None or len(np.unique(network.scale_of)) > network.layout.shards or ranks > 1
    for number in np.unique(network.scale_of):
        here = (network.scale_of == number) & network.live
        partly_padded += 0 < here.sum() < (network.scale_of == number).sum()
        for of_node, scaled_signs in zip(c[:, here], said[:, here], strict=True):
            root_mean_square = np.sqrt(np.mean(of_node**2)) if of_node.size else 0.0
            np.testing.assert_allclose(np.abs(scaled_signs), root_mean_square, rtol=1e-6)
    assert partly_padded > 0


def test_a_shard_of_nothing_but_padding_says_nothing() -> None:
    """Two words for four workers: there is a shard for each, but nothing in two of them."""
    network = Network(4, numels=[70], bucket=1000)
    for step in range(3):
        network.encode(network.random_inputs((4, step)) + 1.0 * network.live, beta=0.9)
        network.exchange()
        network.adopt()
        for rank in network.ranks:
            for scales in (rank.compressor.sent_scales, rank.compressor.answer_scales):
                assert (scales > 0).tolist() == [True, True, False, False]
            assert not rank.compressor.answer[2:].any()
            assert bool(torch.isfinite(rank.compressor.answered).all())


def test_an_input_of_zeros_has_a_scale_of_zero_and_leaves_the_error_as_it_is() -> None:
    network = Network(2)
    network.encode(np.zeros((2, network.layout.size)))
    network.exchange()
    assert not network.said().any()
    assert not network.answered().any()
    network.adopt()
    assert not network.kept_by_workers().any()


# From one exchange to the next ---------------------------------------------------------------------------------------


@each_grid
def test_what_was_adopted_goes_into_the_next_input(nodes: int, ranks: int) -> None:
    network = Network(nodes, ranks)
    network.encode(network.random_inputs(5))
    network.exchange()
    answered = network.answered()
    network.adopt()
    gradients = network.random_inputs(6)
    expected = network.kept_by_workers() + 0.75 * answered + 0.25 * gradients
    network.encode(gradients, beta=0.75, weight=0.25)
    for rank in network.ranks:
        for b in rank.layout.buckets:
            here = np.arange(b.own_start, b.own_start + b.slice_elements)
            c = double(rank.compressor.sent)[here - b.state_shift]
            np.testing.assert_allclose(c, expected[rank.node][here], rtol=0, atol=1e-5)


@each_grid
def test_adopt_takes_answers_over_and_may_remember_those_before(nodes: int, ranks: int) -> None:
    network = Network(nodes, ranks, keep_previous=True)
    heard = [np.zeros(network.layout.size)]
    for step in range(3):
        network.encode(network.random_inputs((7, step)), beta=0.5, weight=0.5)
        network.exchange()
        for rank in network.ranks:  # nothing is taken over until the whole exchange is done
            np.testing.assert_array_equal(
                stands_for(network, rank.compressor.answer, rank.compressor.answer_scales), heard[-1]
            )
        network.adopt()
        heard.append(network.answered())
        assert np.any(heard[-1] != heard[-2])
        for rank in network.ranks:
            compressor = rank.compressor
            assert compressor.previous_answer is not None
            assert compressor.previous_answer_scales is not None
            np.testing.assert_array_equal(stands_for(network, compressor.answer, compressor.answer_scales), heard[-1])
            before = stands_for(network, compressor.previous_answer, compressor.previous_answer_scales)
            np.testing.assert_array_equal(before, heard[-2])


def stands_for(network: Network, words: torch.Tensor, scales: torch.Tensor) -> Array:
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little") == 1
    values = double(scales)[network.shard_of]
    return np.where(network.live, np.where(bits, values, -values), 0.0)


@each_state
@each_grid
def test_a_dense_momentum_is_what_was_left_unsaid(nodes: int, ranks: int, state_dtype: torch.dtype) -> None:
    network = Network(nodes, ranks, dtype=state_dtype)
    momentum = network.random_inputs(8)[0]
    factors = [1.5, 0.5, 0.9, 2.0, 0.25]
    expected = np.zeros(network.layout.size)
    for slot, factor in zip(network.layout.slots, factors, strict=True):
        here = slice(slot.start, slot.start + slot.numel)
        expected[here] = factor * momentum[here]
    for rank in network.ranks:
        rank.compressor.start_from(torch.tensor(momentum, dtype=torch.float32), factors)
    kept = network.kept_by_workers()
    assert_equal_but_for_rounding(kept, np.stack([expected] * nodes), state_dtype)
    # Nothing has been heard yet: whatever beta is, the first exchange is of the momentum and the gradient alone.
    gradients = network.random_inputs(9)
    network.encode(gradients, beta=0.9, weight=0.1)
    network.exchange()
    for said, c in zip(network.said(), kept + 0.1 * gradients, strict=True):
        certain = np.abs(c) > 2.0**-6
        np.testing.assert_array_equal(np.sign(said)[certain], np.sign(c)[certain])


def test_a_momentum_can_become_the_memory_in_which_it_stands() -> None:
    layout = Layout(NUMELS, 2, 400)
    momentum = torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    live = Network(2).live
    expected = momentum.numpy() * np.float32(0.9)
    compressor = ScaledSign(layout, 0, REFERENCE, torch.float32, momentum)
    compressor.bind(PacketBuffers(layout, compressor.payload, alone=False))
    compressor.start_from(momentum, [0.9] * len(NUMELS))
    assert compressor.sent.data_ptr() == momentum.data_ptr()
    np.testing.assert_array_equal(momentum.numpy()[live], expected[live])


@each_grid
def test_after_forget_it_is_as_if_nothing_had_been_said(nodes: int, ranks: int) -> None:
    used, fresh = Network(nodes, ranks), Network(nodes, ranks)
    for step in range(3):
        used.encode(used.random_inputs((10, step)), beta=0.5, weight=0.5)
        used.exchange()
        used.adopt()
    for rank in used.ranks:
        rank.compressor.reset()
    for step in range(3):
        for network in (used, fresh):
            network.encode(network.random_inputs((11, step)), beta=0.5, weight=0.5)
            network.exchange()
            network.adopt()
        np.testing.assert_array_equal(used.said(), fresh.said())
        np.testing.assert_array_equal(used.answered(), fresh.answered())


@each_state
@each_grid
@each_block
def test_what_is_left_unsaid_can_fade(nodes: int, ranks: int, state_dtype: torch.dtype, block: int | None) -> None:
    """A factor for each parameter, at both ends. With 1 nothing is lost, although it takes other numbers to say so."""
    network = Network(nodes, ranks, dtype=state_dtype, scale_block=block)
    factors = [1.0, 0.5, 0.9, 0.0, 0.25]
    of_element = np.zeros(network.layout.size)
    for slot, factor in zip(network.layout.slots, factors, strict=True):
        of_element[slot.start : slot.start + slot.numel] = factor
    network.encode(network.random_inputs(12))
    network.exchange()
    network.adopt()
    of_workers, of_owners = network.kept_by_workers(), network.kept_by_owners()
    for rank in network.ranks:
        rank.compressor.scale_residuals(factors)
    assert_equal_but_for_rounding(network.kept_by_workers(), of_element * of_workers, state_dtype)
    assert_equal_but_for_rounding(network.kept_by_owners(), of_element * of_owners, state_dtype)
