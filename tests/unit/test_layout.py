"""The flat space, for any shapes: every element has one place, and nothing but shapes and world size decides where."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.transport.buffers import PacketBuffers, Payload
from thinwire.transport.layout import MAX_ELEMENTS, WORD, Layout, is_dense
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.topology import Topology

NUMELS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 200), st.integers(0, 5000)), max_size=12)
WORLD_SIZE = st.integers(1, 9)
BUCKET_ELEMENTS = st.integers(1, 9000)
PATIENT = settings(deadline=None)  # a busy machine is no finding


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS)
def test_parameters_stand_in_reverse_order_at_whole_words(numels: list[int], world_size: int, bucket: int) -> None:
    slots = Layout(numels, world_size, bucket).slots
    assert [slot.index for slot in slots] == list(reversed(range(len(numels))))
    assert [slot.numel for slot in slots] == numels[::-1]
    end = 0
    for slot in slots:
        assert slot.start == end  # no room is wasted beyond the alignment
        end = math.ceil((slot.start + slot.numel) / WORD) * WORD


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS)
def test_buckets_tile_the_space_in_equal_sizes(numels: list[int], world_size: int, bucket: int) -> None:
    layout = Layout(numels, world_size, bucket)
    end = 0
    for expected, b in enumerate(layout.buckets):
        assert (b.index, b.start, b.shards) == (expected, end, world_size)
        assert b.stop - b.start == b.shards * b.shard_words * WORD > 0
        end = b.stop
    sizes = [b.shard_words for b in layout.buckets]
    assert len(set(sizes[:-1])) <= 1
    assert all(last <= first for first, last in pairwise(sizes))
    used = max((slot.start + slot.numel for slot in layout.slots), default=0)
    assert used <= layout.size == end
    assert layout.size - used < WORD * (world_size + 1)  # padding: the last word, and less than a word a shard


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS)
def test_every_element_is_in_exactly_one_bucket_and_shard(numels: list[int], world_size: int, bucket: int) -> None:
    layout = Layout(numels, world_size, bucket)
    members: dict[int, set[int]] = {b.index: set() for b in layout.buckets}
    for position, slot in enumerate(layout.slots):
        end = slot.start
        for piece in layout.pieces(slot):
            assert piece.start == end < piece.stop
            end = piece.stop
            home = layout.buckets[piece.bucket]
            shard_start = home.start + piece.shard * home.shard_words * WORD
            assert shard_start <= piece.start < piece.stop <= shard_start + home.shard_words * WORD
            assert piece.shard < world_size
            members[piece.bucket].add(position)
        assert end == slot.start + slot.numel
    for b in layout.buckets:
        assert set(b.slots) >= members[b.index]
        assert list(b.slots) == sorted(b.slots)
        assert all(layout.slots[p].numel == 0 for p in set(b.slots) - members[b.index])


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, BUCKET_ELEMENTS)
def test_an_elements_identity_depends_on_shapes_only(numels: list[int], world_size: int, one: int, two: int) -> None:
    """Random numbers are keyed by it: another bucket size or world size must not move an element."""
    assert Layout(numels, world_size, one).slots == Layout(numels, 1, two).slots


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS)
def test_every_rank_computes_the_same_layout(numels: list[int], world_size: int, bucket: int) -> None:
    one, other = Layout(numels, world_size, bucket), Layout(list(numels), world_size, bucket)
    assert (one.slots, one.buckets, one.fingerprint) == (other.slots, other.buckets, other.fingerprint)
    assert one.fingerprint != Layout([*numels, 1], world_size, bucket).fingerprint
    assert one.fingerprint != Layout(numels, world_size + 1, bucket).fingerprint


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, st.integers(1, 3))
def test_runs_address_every_word_of_the_packets_once(
    numels: list[int], world_size: int, bucket: int, planes: int
) -> None:
    layout = Layout(numels, world_size, bucket)
    payload = Payload(up_words=lambda words: words + 1, down_words=lambda words: planes * words + 1)
    buffers = PacketBuffers(layout, payload, alone=False)
    taken_up: set[int] = set()
    taken_down: set[int] = set()
    for slot, parts in zip(layout.slots, buffers.parts, strict=True):
        pieces = list(layout.pieces(slot))
        up = [(part.frame, run) for part in parts for run in part.up_runs.tolist()]
        down = [(part.frame, run) for part in parts for run in part.down_runs.tolist()]
        for piece, (frame, run), (_, answer) in zip(pieces, up, down, strict=True):
            assert frame.bucket.index == piece.bucket
            assert run[:3] == answer[:3] == [piece.start, piece.start - slot.start, piece.stop - piece.start]
            assert run[5] == answer[5] == frame.bucket.shard_number(piece.shard)
            packet = frame.sent_at + piece.shard * frame.sent.shape[1]
            take(run, 1, packet + HEADER_BYTES, packet + frame.up_presence, taken_up)
            packet = frame.answers_at + piece.shard * frame.answers.shape[1]
            take(answer, planes, packet + HEADER_BYTES, packet + frame.down_presence, taken_down)
    assert max(taken_up, default=-8) + 8 <= buffers.sent.numel()
    assert max(taken_down, default=-8) + 8 <= buffers.answers.numel()
    assert sum(map(len, buffers.contents)) == sum(map(len, buffers.parts))


def take(run: list[int], planes: int, start: int, stop: int, taken: set[int]) -> None:
    """Claim the words of a run, all its planes, within the bytes of a packet from `start` to `stop`."""
    _, _, count, byte, plane_bytes, _ = run
    for plane in range(planes):
        first = byte + plane * plane_bytes
        words = range(first, first + 8 * math.ceil(count / WORD), 8)
        assert start <= words.start < words.stop <= stop
        assert not taken.intersection(words)
        taken.update(words)


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, st.data())
def test_presence_bits_come_back_as_they_were_written(
    numels: list[int], world_size: int, bucket: int, data: st.DataObject
) -> None:
    layout = Layout(numels, world_size, bucket)
    buffers = PacketBuffers(layout, Payload(up_words=lambda words: words, down_words=lambda words: words), alone=False)
    for frame in buffers.frames:
        bits = data.draw(st.integers(0, 2 ** len(frame.bucket.slots) - 1))
        buffers.write_presence(frame, bits)
        frame.answers[:] = frame.sent  # here a packet up is as long as one down
        assert buffers.read_presence(frame) == bits
        assert not buffers.sent_memory[frame.sent_at : frame.sent_at + HEADER_BYTES].tobytes().strip(b"\0")


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@PATIENT
@given(st.lists(SHAPES, min_size=1, max_size=5), WORLD_SIZE)
def test_views_cover_the_flat_tensor_in_the_parameters_shape(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = Layout([math.prod(shape) for shape in shapes], world_size, 256)
    flat = torch.zeros(layout.size)
    for slot in layout.slots:
        like = torch.empty(shapes[slot.index])
        view = layout.view(flat, slot, like)
        assert view.shape == like.shape
        view += 1
        assert torch.all(flat[slot.start : slot.start + slot.numel] == 1)
    assert int(flat.sum()) == sum(math.prod(shape) for shape in shapes)


def test_views_follow_channels_last_and_straighten_what_is_not_dense() -> None:
    layout = Layout([2 * 3 * 4 * 5, 6], 2, 256)
    flat = torch.zeros(layout.size)
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    transposed = torch.empty(2, 3).t()
    assert is_dense(image)
    assert not is_dense(transposed)
    last, first = layout.slots
    assert layout.view(flat, first, image).stride() == image.stride()
    assert layout.view(flat, last, transposed).is_contiguous()


def test_a_model_beyond_the_random_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_ELEMENTS} elements per model"):
        Layout([MAX_ELEMENTS + 1], 2, 1 << 20)


# Slices: the ranks of a node -----------------------------------------------------------------------------------------

NODES, RANKS = st.integers(1, 4), st.integers(1, 4)


def layouts(numels: list[int], nodes: int, ranks: int, bucket: int) -> list[Layout]:
    """Those of the ranks of a node, a slice each."""
    return [Layout(numels, nodes, bucket, slices=ranks, own_slice=own) for own in range(ranks)]


@PATIENT
@given(NUMELS, NODES, RANKS, BUCKET_ELEMENTS)
def test_every_element_has_one_slice_shard_and_owner(numels: list[int], nodes: int, ranks: int, bucket: int) -> None:
    grid = tuple(tuple(range(node * ranks, node * ranks + ranks)) for node in range(nodes))
    topologies = [Topology(grid, node, own, "here") for node in range(nodes) for own in range(ranks)]
    of_node = layouts(numels, nodes, ranks, bucket)
    owners = torch.zeros(of_node[0].size, dtype=torch.int64)
    for rank, topology in enumerate(topologies):
        for b in of_node[topology.own_slice].buckets:
            assert (b.slices, b.shards, len(b.own_shards)) == (ranks, nodes * ranks, nodes)
            assert b.slice_elements * ranks == b.stop - b.start
            assert b.own_start == b.start + topology.own_slice * b.slice_elements
            mine = [shard for shard in range(b.shards) if topology.owner(shard) == rank]
            assert mine == [b.own_shards[topology.node]]
            first = b.start + mine[0] * b.shard_words * WORD
            assert b.own_start <= first < b.own_start + b.slice_elements
            owners[first : first + b.shard_words * WORD] += 1
    assert bool((owners == 1).all())


@PATIENT
@given(NUMELS, NODES, RANKS, BUCKET_ELEMENTS)
def test_ranks_of_a_node_differ_in_their_slice_only(numels: list[int], nodes: int, ranks: int, bucket: int) -> None:
    first, *others = layouts(numels, nodes, ranks, bucket)
    assert first.slots == Layout(numels, 1, bucket).slots
    for other in others:
        assert (other.slots, other.size, other.fingerprint) == (first.slots, first.size, first.fingerprint)
        assert [(b.start, b.stop, b.slots) for b in other.buckets] == [
            (b.start, b.stop, b.slots) for b in first.buckets
        ]
    if ranks > 1:
        assert first.fingerprint != Layout(numels, nodes * ranks, bucket).fingerprint


@PATIENT
@given(NUMELS, NODES, RANKS, BUCKET_ELEMENTS)
def test_the_states_of_a_node_tile_the_space(numels: list[int], nodes: int, ranks: int, bucket: int) -> None:
    """A rank keeps its slices one after another, without a gap; those of all ranks are everything, once."""
    held: list[int] = []
    for layout in layouts(numels, nodes, ranks, bucket):
        assert layout.own_size * ranks == layout.size
        end = 0
        for b in layout.buckets:
            assert b.own_start - b.state_shift == end
            end += b.slice_elements
            held += range(b.own_start, b.own_start + b.slice_elements)
        assert end == layout.own_size
    assert sorted(held) == list(range(layouts(numels, nodes, ranks, bucket)[0].size))


@PATIENT
@given(NUMELS, NODES, st.integers(2, 4), BUCKET_ELEMENTS)
def test_own_views_of_all_ranks_cover_a_parameter_once(numels: list[int], nodes: int, ranks: int, bucket: int) -> None:
    of_node = layouts(numels, nodes, ranks, bucket)
    states = [flat_numbers(layout) for layout in of_node]
    for slot in of_node[0].slots:
        like = torch.empty(slot.numel)
        views = [layout.own_view(state, slot, like) for layout, state in zip(of_node, states, strict=True)]
        elements = sorted(element for view in views for element in view.tolist())
        assert elements == list(range(slot.start, slot.start + slot.numel))
        for view, state in zip(views, states, strict=True):
            assert view.dim() == 1
            assert view.tolist() == sorted(view.tolist())
            assert view.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()


def flat_numbers(layout: Layout) -> torch.Tensor:
    """A state that holds, at every element's place, the number of the element in the flat space."""
    state = torch.zeros(layout.own_size, dtype=torch.int64)
    for b in layout.buckets:
        here = torch.arange(b.own_start, b.own_start + b.slice_elements)
        state[here - b.state_shift] = here
    return state


def test_one_slice_keeps_the_shape_of_the_parameter() -> None:
    layout = Layout([2 * 3], 2, 256, slices=1)
    assert layout.own_view(torch.zeros(layout.own_size), layout.slots[0], torch.empty(2, 3)).shape == (2, 3)


# Held shards: what owners keep, and tables of shards -----------------------------------------------------------------


def shards_of_elements(layout: Layout) -> list[tuple[int, int]]:
    """For every element of the flat space, one after another, its bucket and its shard there."""
    return [(b.index, shard) for b in layout.buckets for shard in range(b.shards) for _ in range(b.shard_words * WORD)]


def held_elements(layout: Layout, held: range) -> list[int]:
    """The elements of the shards `held` of every bucket, in the order in which a state has them."""
    return [element for element, (_, shard) in enumerate(shards_of_elements(layout)) if shard in held]


def some_held(layout: Layout, first: int, length: int) -> range:
    """A stretch of a bucket's shards that lies within it."""
    shards = layout.workers * layout.slices
    first = first % shards
    return range(first, min(first + length, shards))


HELD = st.tuples(st.integers(0, 15), st.integers(1, 4))


@PATIENT
@given(NUMELS, NODES, RANKS, BUCKET_ELEMENTS, HELD)
def test_a_state_of_held_shards_is_one_bucket_after_another(
    numels: list[int], nodes: int, ranks: int, bucket: int, held: tuple[int, int]
) -> None:
    layout = Layout(numels, nodes, bucket, slices=ranks)
    shards = some_held(layout, *held)
    expected = held_elements(layout, shards)
    assert layout.held_size(shards) == len(expected)
    homes = shards_of_elements(layout)
    for place, element in enumerate(expected):
        assert element - layout.buckets[homes[element][0]].shift_of(shards) == place


@PATIENT
@given(NUMELS, NODES, RANKS, BUCKET_ELEMENTS, HELD)
def test_a_held_view_has_those_elements_of_a_parameter_that_are_held(
    numels: list[int], nodes: int, ranks: int, bucket: int, held: tuple[int, int]
) -> None:
    layout = Layout(numels, nodes, bucket, slices=ranks)
    shards = some_held(layout, *held)
    elements = held_elements(layout, shards)
    state = torch.tensor(elements, dtype=torch.int64)
    for slot in layout.slots:
        view = layout.held_view(state, slot, shards)
        inside = range(slot.start, slot.start + slot.numel)
        assert view.tolist() == [element for element in elements if element in inside]
        assert view.untyped_storage().data_ptr() == state.untyped_storage().data_ptr()


@PATIENT
@given(NUMELS, NODES, RANKS, BUCKET_ELEMENTS)
def test_a_shard_view_has_the_entries_of_the_shards_that_a_parameter_reaches_into(
    numels: list[int], nodes: int, ranks: int, bucket: int
) -> None:
    layout = Layout(numels, nodes, bucket, slices=ranks)
    homes = shards_of_elements(layout)
    numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
    assert layout.shards == len(numbers)
    for (index, shard), number in numbers.items():
        assert layout.buckets[index].shard_number(shard) == number
    table = torch.arange(layout.shards)
    for slot in layout.slots:
        reached = {numbers[homes[element]] for element in range(slot.start, slot.start + slot.numel)}
        assert layout.shard_view(table, slot).tolist() == sorted(reached)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_rank_owns_one_shard_of_every_bucket(nodes: int, ranks: int) -> None:
    grid = tuple(tuple(range(node * ranks, node * ranks + ranks)) for node in range(nodes))
    of_node = layouts([5000], nodes, ranks, 1000)
    assert len(of_node[0].buckets) > 1
    for node in range(nodes):
        for own in range(ranks):
            topology = Topology(grid, node, own, "here")
            owned = of_node[own].owned_by(node)
            assert list(owned) == [s for s in range(nodes * ranks) if topology.owner(s) == grid[node][own]]
