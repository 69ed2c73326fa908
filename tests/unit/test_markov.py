"""Markov compression as a compressor: workers and owners of one process, who exchange packets by copying them.

The kernels have tests of their own, and so have the codecs. Here the fused compressor sends what the general one sends,
to the bit. Also tested: what lies between exchanges, such as activation rounds and the activation map.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.formulas import Array, sign_of
from tests.unit.kernel_cases import ON_CPU
from thinwire.compressors.codecs.sign import Sign
from thinwire.compressors.codecs.topk import TopK
from thinwire.compressors.markov import Markov, MarkovSign
from thinwire.kernels.ops import BACKENDS, Kernels
from thinwire.transport.buffers import Frame, PacketBuffers
from thinwire.transport.layout import Layout
from thinwire.transport.packet import HEADER_BYTES

FULL_WORDS = [128, 256, 64, 320]
"""12 words, which all grids below cut into shards without padding: the general compressor counts that in its scales."""
PADDED = [130, 0, 1, 700, 65]
BUCKET = 400
BETA = 0.75
NATIVE = BACKENDS["native"]

Make = Callable[[Layout, int], Markov | MarkovSign]


class Rank:
    """A compressor and its packets; `node` is its worker, `own` its slice."""

    def __init__(self, layout: Layout, node: int, own: int, make: Make, momentum: bool) -> None:
        self.layout, self.node, self.own = layout, node, own
        self.compressor = make(layout, node)
        self.buffers = PacketBuffers(layout, self.compressor.payload, alone=layout.workers == 1)
        self.compressor.bind(self.buffers)
        self.m = torch.zeros(layout.own_size) if momentum else None
        spans = [(b.own_start, b.own_start + b.slice_elements) for b in layout.buckets]
        self.elements = np.concatenate([np.arange(*span) for span in spans])
        """Those of this rank's slices."""

    def encode(self, flat: Array | None) -> None:
        """All parts that are this rank's, of a gradient over the flat space, or of none."""
        values = None if flat is None else torch.tensor(flat, dtype=torch.float32)
        for slot, parts in zip(self.layout.slots, self.buffers.parts, strict=True):
            for part in parts:
                first = slot.start if self.layout.slices == 1 else part.frame.bucket.own_start
                if part.up_runs.shape[0]:
                    grad = None if values is None else values[first:]
                    assert not self.compressor.encode(part, grad, self.m, beta=BETA, scale=1.0)

    def known(self) -> Tensor:
        """What the others know of this rank's slices, the last message included."""
        compressor = self.compressor
        if isinstance(compressor, Markov):
            return compressor.known
        scales = compressor.sent_scales[torch.from_numpy(shard_of(self.layout)[self.elements])]
        told = compressor.known + torch.where(bits_of(compressor.sent_bits), scales, -scales)
        return torch.where(bits_of(compressor.signed_before)[self.elements], told, compressor.known)


def bits_of(words: Tensor) -> Tensor:
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), bitorder="little") == 1)


def shard_of(layout: Layout) -> Array:
    """The number of every element's shard."""
    return np.concatenate([np.repeat(range(b.shards), b.shard_elements) + b.shard_number(0) for b in layout.buckets])


class Network:
    """Nodes of ranks, and what they say and know, over the flat space."""

    def __init__(
        self,
        make: Make,
        nodes: int,
        ranks: int = 1,
        numels: Sequence[int] = FULL_WORDS,
        bucket: int = BUCKET,
        momentum: bool = False,
    ) -> None:
        layouts = [Layout(numels, nodes, bucket, slices=ranks, own_slice=own) for own in range(ranks)]
        self.layout, self.nodes, self.momentum = layouts[0], nodes, momentum
        self.ranks = [Rank(layouts[own], node, own, make, momentum) for node in range(nodes) for own in range(ranks)]
        self.fused = [rank.compressor for rank in self.ranks if isinstance(rank.compressor, MarkovSign)]
        self.shard_of = shard_of(self.layout)
        self.live = np.zeros(self.layout.size, dtype=bool)
        for slot in self.layout.slots:
            self.live[slot.start : slot.start + slot.numel] = True
        self._steps = 0

    def step(self, inputs: Array) -> None:
        """An exchange, which everybody follows. The first of the fused compressor is an activation round."""
        self._steps += 1
        if self.fused and self._steps == 1:
            self.greet(inputs)
            for compressor in self.fused:
                compressor.activate(has_momentum=self.momentum)
            self.exchange(None)
        else:
            for compressor in self.fused:
                compressor.begin_step(activation=False)
            self.exchange(inputs)
        for rank in self.ranks:
            rank.compressor.read_answers()
            if isinstance(rank.compressor, MarkovSign):
                for part in (part for parts in rank.buffers.parts for part in parts):
                    rank.compressor.follow(part)
                rank.compressor.update_activity()

    def greet(self, inputs: Array) -> None:
        self._steps = 1
        for compressor in self.fused:
            compressor.begin_step(activation=True)
        self.exchange(inputs)

    def exchange(self, inputs: Array | None) -> None:
        """Encode, and then seal, send, merge and answer, a bucket at a time."""
        for rank in self.ranks:
            rank.encode(None if inputs is None else inputs[rank.node])
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

    def known(self) -> Array:
        """Of every node."""
        flat = np.zeros((self.nodes, self.layout.size), dtype=np.float32)
        for rank in self.ranks:
            flat[rank.node, rank.elements] = rank.known().numpy()
        return flat

    def mean(self) -> Array:
        """What all owners together keep."""
        flat = np.full(self.layout.size, np.nan, dtype=np.float32)
        for rank in self.ranks:
            owned = rank.layout.owned_by(rank.node)
            numbers = [b.shard_number(owned.start) for b in rank.layout.buckets]
            flat[np.isin(self.shard_of, numbers)] = rank.compressor.mean.numpy()
        return flat

    def followed(self) -> Array:
        """The same on all ranks."""
        first = self.ranks[0].compressor.followed
        assert all(torch.equal(rank.compressor.followed, first) for rank in self.ranks)
        return first.numpy().copy()

    def active(self) -> Array:
        """The same on all ranks."""
        assert all(torch.equal(compressor.active, self.fused[0].active) for compressor in self.fused)
        return bits_of(self.fused[0].active).numpy()

    def packets(self) -> list[bytes]:
        """Signs and scales of all ranks."""
        return [signs_and_scales(f.sent, f) for rank in self.ranks for f in rank.buffers.frames]

    def answers(self) -> list[bytes]:
        return [signs_and_scales(f.answers, f) for f in self.ranks[0].buffers.frames]


def signs_and_scales(packets: torch.Tensor, frame: Frame) -> bytes:
    """Without headers, and without what only one of the compressors has to say."""
    return packets[:, HEADER_BYTES : HEADER_BYTES + 8 * (frame.bucket.shard_words + 1)].numpy().tobytes()


def fused(kernels: Kernels = NATIVE) -> Make:
    return lambda layout, node: MarkovSign(layout, node, kernels)


def general(kernels: Kernels = NATIVE, ratio: float | None = None) -> Make:
    codec = functools.partial(Sign, kernels) if ratio is None else functools.partial(TopK, kernels, ratio)
    return lambda layout, node: Markov(layout, node, kernels, codec)


def normal(network: Network, *seed: int) -> Array:
    """Numbers of which none is zero, but for the padding."""
    drawn = np.random.default_rng(seed).standard_normal((network.nodes, network.layout.size))
    return (drawn * network.live).astype(np.float32)


def whole(network: Network, *seed: int) -> Array:
    """Small odd numbers, by which scales and sums of the first steps are exact."""
    return 2.0 * np.random.default_rng(seed).integers(-8, 8, (network.nodes, network.layout.size)) + 1.0


GRIDS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 1)]
SCHEMES: dict[str, Make] = {"fused": fused(), "signs": general(), "top-k": general(ratio=0.1)}
each_kernels = pytest.mark.parametrize("kernels", ON_CPU.values(), ids=ON_CPU)
each_grid = pytest.mark.parametrize(("nodes", "ranks"), GRIDS)
each_scheme = pytest.mark.parametrize("name", SCHEMES)


# The fused compressor is the general one ------------------------------------------------------------------------------


@each_kernels
@each_grid
@pytest.mark.parametrize("momentum", [False, True], ids=["", "momentum"])
def test_workers_say_what_the_general_scheme_says(nodes: int, ranks: int, momentum: bool, kernels: Kernels) -> None:
    """To the bit. Owners add up what several workers say in another order, and so agree to rounding."""
    one = Network(fused(kernels), nodes, ranks, momentum=momentum)
    other = Network(general(kernels), nodes, ranks, momentum=momentum)
    for step in range(6):
        for network in (one, other):
            network.step(normal(network, 1, step))
        assert one.packets() == other.packets()
        np.testing.assert_array_equal(one.known(), other.known())
        rounding = 0.0 if nodes == 1 else 1e-5
        np.testing.assert_allclose(one.mean(), other.mean(), rtol=0, atol=rounding)
        np.testing.assert_allclose(one.followed(), other.followed(), rtol=0, atol=rounding)
    assert one.active().all()
    assert len(set(np.abs(one.followed()).tolist())) > 10


@each_kernels
@pytest.mark.parametrize(("nodes", "ranks"), [(nodes, ranks) for nodes, ranks in GRIDS if nodes != 3])
def test_owners_too_where_sums_are_exact(nodes: int, ranks: int, kernels: Kernels) -> None:
    """Two steps in numbers of a few bits, with shards of 128 elements."""
    numels = [128 * nodes * ranks]
    one, other = (Network(make(kernels), nodes, ranks, numels, bucket=numels[0]) for make in (fused, general))
    for step in range(2):
        for network in (one, other):
            network.step(whole(network, 2, step))
        assert one.answers() == other.answers()
        np.testing.assert_array_equal(one.mean(), other.mean())
        np.testing.assert_array_equal(one.followed(), other.followed())
    assert len(set(np.abs(one.followed()).tolist())) > 1


# What is known -------------------------------------------------------------------------------------------------------


@each_grid
@each_scheme
def test_owners_know_the_mean_of_what_is_known_of_workers(name: str, nodes: int, ranks: int) -> None:
    network = Network(SCHEMES[name], nodes, ranks, PADDED)
    for step in range(15):
        network.step(normal(network, 3, step))
        known, mean = network.known()[:, network.live], network.mean()[network.live]
        np.testing.assert_allclose(mean, known.mean(0), rtol=0, atol=1e-5)
        assert np.abs(mean).max() > 0.1


@each_grid
def test_padding_is_never_heard_of(nodes: int, ranks: int) -> None:
    network = Network(fused(), nodes, ranks, PADDED)
    for step in range(4):
        network.step(normal(network, 4, step))
        np.testing.assert_array_equal(network.active(), network.live)
        np.testing.assert_array_equal(network.followed() != 0, network.live)


# How much is left unsaid ---------------------------------------------------------------------------------------------


@each_grid
@each_scheme
def test_the_contraction_is_the_share_of_squares_left_unsaid(name: str, nodes: int, ranks: int) -> None:
    network = Network(SCHEMES[name], nodes, ranks)
    assert all(math.isnan(rank.compressor.contraction()) for rank in network.ranks)
    for step in range(4):
        inputs, before = normal(network, 5, step), network.known().astype(np.float64)
        network.step(inputs)
        for rank in network.ranks:
            c, left = (
                (inputs[rank.node] - known[rank.node])[rank.elements].astype(np.float64)
                for known in (before, network.known())
            )
            share = rank.compressor.contraction()
            np.testing.assert_allclose(share, np.sum(left**2) / np.sum(c**2), rtol=1e-5)
            if name != "top-k":
                shards = network.shard_of[rank.elements]
                said = sum(np.abs(c[shards == n]).sum() ** 2 / np.sum(shards == n) for n in np.unique(shards))
                np.testing.assert_allclose(share, 1 - said / np.sum(c**2), rtol=1e-5)
            assert 0.2 < share < 0.8


def test_of_a_single_shard_it_is_the_formula() -> None:
    network = Network(fused(), 1, bucket=10_000)
    c = normal(network, 6) * np.linspace(0.1, 1, network.layout.size, dtype=np.float32) ** 4
    network.step(c)
    formula = 1 - np.abs(c).sum(dtype=np.float64) ** 2 / (c.size * np.sum(c.astype(np.float64) ** 2))
    np.testing.assert_allclose(network.fused[0].contraction(), formula, rtol=1e-5)


def test_nothing_is_left_unsaid_when_all_is_said() -> None:
    network = Network(general(ratio=1.0), 2)
    network.step(normal(network, 7))
    assert [rank.compressor.contraction() for rank in network.ranks] == [0.0, 0.0]


# Who lives -----------------------------------------------------------------------------------------------------------

SLEEPER = 70


@each_kernels
@pytest.mark.parametrize("momentum", [False, True], ids=["", "momentum"])
@each_grid
def test_who_wakes_up_on_one_worker_is_exchanged_from_the_next_time_on(
    nodes: int, ranks: int, momentum: bool, kernels: Kernels
) -> None:
    network = Network(fused(kernels), nodes, ranks, momentum=momentum)
    lives = False
    for step, gradient in enumerate([0.0, 0.0, 3.0, 0.0, 0.0]):
        inputs, before = normal(network, 8, step), network.known().astype(np.float64)
        inputs[:, SLEEPER] = 0.0
        inputs[nodes - 1, SLEEPER] = gradient
        network.step(inputs)
        heard = [*network.known()[:, SLEEPER], network.mean()[SLEEPER], network.followed()[SLEEPER]]
        assert np.any(heard) == lives
        shard = network.shard_of == network.shard_of[SLEEPER]
        shard[SLEEPER] = lives  # who does not has no part in the scale either
        if not momentum:
            c = (inputs - before)[:, shard]
            message = (network.known() - before)[:, shard]
            np.testing.assert_allclose(message, np.abs(c).mean(1, keepdims=True) * sign_of(c), rtol=1e-4, atol=1e-6)
        lives = lives or gradient != 0
        assert network.active()[SLEEPER] == lives
        assert np.delete(network.active(), SLEEPER).all()
    assert lives


@each_kernels
@each_grid
def test_who_gives_up_has_said_nothing_but_hello(nodes: int, ranks: int, kernels: Kernels) -> None:
    """The next exchange is as the first of those who knew from the beginning that all live."""
    network, fresh = Network(fused(kernels), nodes, ranks), Network(general(kernels), nodes, ranks)
    network.greet(normal(network, 9))
    assert all(compressor.known.any() for compressor in network.fused), "else there would be nothing to give up"
    for compressor in network.fused:
        compressor.abandon()
        assert not compressor.known.any()
    assert network.active().all()
    for values in (network.known(), network.mean(), network.followed()):
        assert not values.any()
    for each in (network, fresh):
        each.step(normal(each, 10))
    assert network.packets() == fresh.packets()
    np.testing.assert_array_equal(network.known(), fresh.known())


@each_kernels
@each_grid
def test_a_word_without_anything_to_say_is_known_to_be_zero_at_once(nodes: int, ranks: int, kernels: Kernels) -> None:
    """And is exchanged as before when one worker has something to say again."""
    network = Network(fused(kernels), nodes, ranks)
    words = np.arange(network.layout.size) // 64
    quiet = words % 3 == 1
    for step in range(9):
        inputs = normal(network, 7, step)
        inputs[:, quiet] = 0.0 if 4 <= step < 7 else inputs[:, quiet]
        if step == 7:
            inputs[1:, quiet] = 0.0
        network.step(inputs)
        for state in (network.known()[0], network.mean(), network.followed()):
            assert np.all(state[..., network.live & ~quiet] != 0)
            assert np.all((state[..., network.live & quiet] == 0) == (4 <= step < 7)), step
    followed = network.followed()
    for rank in network.ranks:
        np.testing.assert_array_equal(rank.compressor.followed.numpy(), followed)
