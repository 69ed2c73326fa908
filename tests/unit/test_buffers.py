"""Every bit of every parameter has one address, inside its own packet; and presence bits come through an exchange.

tests/unit/test_layout.py follows the run tables word by word. Here the buffers are used as an optimizer uses them: the
real compressor decides how large packets are, and kernels write through the addresses.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.compressors.dense import Dense
from thinwire.compressors.stochastic_sign import REFRESH_PERIOD, Downlink, StochasticSign
from thinwire.kernels import ops
from thinwire.transport.buffers import Frame, PacketBuffers, Part
from thinwire.transport.layout import WORD, Layout
from thinwire.transport.packet import HEADER_BYTES

REFERENCE = ops.BACKENDS["reference"]
PATIENT = settings(deadline=None, max_examples=50)
NUMELS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=10)
WORLD_SIZE = st.integers(1, 6)
BUCKET_ELEMENTS = st.integers(1, 4000)
DOWNLINK = st.sampled_from(["bit", "majority", "votes"])


def stochastic_sign(layout: Layout, downlink: Downlink) -> StochasticSign:
    return StochasticSign(layout, downlink, REFERENCE, torch.zeros(layout.own_size), 0.0)


def mail_for(numels: list[int], world_size: int, bucket: int, downlink: Downlink = "bit") -> tuple[PacketBuffers, int]:
    """The buffers of the stochastic sign, and how many planes of bits its answers have."""
    layout = Layout(numels, world_size, bucket)
    compressor = stochastic_sign(layout, downlink)
    return PacketBuffers(layout, compressor.payload, alone=world_size == 1), compressor.planes


def runs_of(parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
    """The run tables, up and down, of all the parts together."""
    tables = [(part.up_runs, part.down_runs) for part in parts]
    none = torch.zeros((0, 6), dtype=torch.int64)
    return torch.cat([none, *(up for up, _ in tables)]), torch.cat([none, *(down for _, down in tables)])


def bit_addresses(runs: Tensor, plane: int) -> list[int]:
    """The address, in bits, of every element."""
    return [
        8 * (byte + plane * plane_bytes) + i
        for _, _, count, byte, plane_bytes, _ in runs.tolist()
        for i in range(count)
    ]


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, DOWNLINK)
def test_every_bit_has_an_address_of_its_own(
    numels: list[int], world_size: int, bucket: int, downlink: Downlink
) -> None:
    buffers, planes = mail_for(numels, world_size, bucket, downlink)
    up, down = runs_of(chain.from_iterable(buffers.parts))
    for buffer, runs, planes_here in ((buffers.sent, up, 1), (buffers.answers, down, planes)):
        addresses = [bit for plane in range(planes_here) for bit in bit_addresses(runs, plane)]
        assert len(addresses) == len(set(addresses)) == planes_here * sum(numels)
        assert all(0 <= bit < 8 * buffer.numel() for bit in addresses)


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS)
def test_the_parts_of_a_parameter_cover_it_once_and_in_order(numels: list[int], world_size: int, bucket: int) -> None:
    buffers, _ = mail_for(numels, world_size, bucket)
    contents: list[list[tuple[int, Part]]] = [[] for _ in buffers.frames]
    for position, (slot, parts) in enumerate(zip(buffers.layout.slots, buffers.parts, strict=True)):
        for runs in runs_of(parts):
            end = 0
            for element, in_param, count, *_ in runs.tolist():
                assert in_param == element - slot.start == end
                assert count > 0
                end += count
            assert end == slot.numel
        homes = [part.frame.bucket.index for part in parts]
        assert homes == sorted(set(homes))
        for home, part in zip(homes, parts, strict=True):
            contents[home].append((position, part))
    assert contents == buffers.contents
    assert all(contents)  # else a bucket would never be complete, or never be sent


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, DOWNLINK)
def test_a_run_stays_inside_the_bits_of_the_packet_of_its_shard(
    numels: list[int], world_size: int, bucket: int, downlink: Downlink
) -> None:
    """Header, roll call and presence are out of its reach, and it is at the place that the shard's owner looks at."""
    buffers, planes = mail_for(numels, world_size, bucket, downlink)
    for part in chain.from_iterable(buffers.parts):
        frame, home = part.frame, part.frame.bucket
        shard_elements = WORD * home.shard_words
        for runs, at, packets, presence, planes_here in (
            (part.up_runs, frame.sent_at, frame.sent, frame.up_presence, 1),
            (part.down_runs, frame.answers_at, frame.answers, frame.down_presence, planes),
        ):
            for element, _, count, byte, plane_bytes, number in runs.tolist():
                assert home.start <= element < home.stop
                shard, offset = divmod(element - home.start, shard_elements)
                assert number == home.shard_number(shard)
                assert offset + count <= shard_elements
                assert byte == at + shard * packets.shape[1] + HEADER_BYTES + offset // 8
                assert plane_bytes == 8 * home.shard_words
                activity_refresh = 8 * -(-home.shard_words // REFRESH_PERIOD)
                assert HEADER_BYTES + planes_here * plane_bytes + activity_refresh == presence
                assert presence == packets.shape[1] - 8 * frame.presence_words


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, DOWNLINK)
def test_frames_fill_the_buffers_without_gaps_or_overlap(
    numels: list[int], world_size: int, bucket: int, downlink: Downlink
) -> None:
    buffers, _ = mail_for(numels, world_size, bucket, downlink)
    sent_at = answers_at = 0
    for frame in buffers.frames:
        assert (frame.sent_at, frame.answers_at) == (sent_at, answers_at)
        assert frame.sent.data_ptr() == buffers.sent.data_ptr() + sent_at
        assert frame.answers.data_ptr() == buffers.answers.data_ptr() + answers_at
        assert frame.sent.shape == frame.received.shape
        assert frame.sent.shape[0] == frame.answers.shape[0] == world_size
        assert frame.sent.is_contiguous()
        assert frame.answers.is_contiguous()
        assert frame.received.is_contiguous()
        assert frame.sent.shape[1] % 8 == frame.answers.shape[1] % 8 == 0  # words stay aligned
        sent_at += frame.sent.numel()
        answers_at += frame.answers.numel()
    assert (sent_at, answers_at) == (buffers.sent.numel(), buffers.answers.numel())


@PATIENT
@given(NUMELS, BUCKET_ELEMENTS)
def test_a_worker_alone_reads_what_it_wrote(numels: list[int], bucket: int) -> None:
    buffers, _ = mail_for(numels, 1, bucket)
    for frame in buffers.frames:
        assert frame.received.data_ptr() == frame.sent.data_ptr()
        buffers.sent_memory[frame.sent_at] = 77
        assert frame.received[0, 0] == 77


def test_what_is_received_has_a_place_of_its_own() -> None:
    """Packets of any bucket may come before those of another are answered, and while the own ones are being sent."""
    buffers, _ = mail_for([5000, 700], 3, 1000)
    assert len(buffers.frames) > 3
    places = {frame.received.data_ptr() for frame in buffers.frames} | {
        frame.sent.data_ptr() for frame in buffers.frames
    }
    assert len(places) == 2 * len(buffers.frames)
    for frame in buffers.frames:
        frame.received[0, 0] = 77
        assert frame.sent[0, 0] == 0


# What kernels write arrives ------------------------------------------------------------------------------------------


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS, st.integers(0, 2**32 - 1))
def test_bits_encoded_through_the_runs_are_found_by_the_owners(
    numels: list[int], world_size: int, bucket: int, seed: int
) -> None:
    """Element e of the flat space is bit e - start of its shard's packet, whichever parameter it belongs to."""
    buffers, _ = mail_for(numels, world_size, bucket)
    size = buffers.layout.size
    present = torch.zeros(size, dtype=torch.bool)
    for slot in buffers.layout.slots:
        present[slot.start : slot.start + slot.numel] = True
    flat = torch.rand(size, generator=torch.Generator().manual_seed(seed)) * present
    for part in chain.from_iterable(buffers.parts):
        REFERENCE.birder_encode(
            part.up_runs,
            None,
            torch.zeros(size),
            flat,
            torch.zeros(size // WORD, dtype=torch.int64),
            buffers.sent,
            beta=0.0,
            eps=0.5,
            scale=1.0,
            amsgrad=False,
            key=0,
        )
    hellos = torch.zeros(0, dtype=torch.bool)
    for frame in buffers.frames:
        for packet in frame.sent:
            bits = packet[HEADER_BYTES : HEADER_BYTES + 8 * frame.bucket.shard_words, None] >> torch.arange(8) & 1
            hellos = torch.cat([hellos, bits.flatten() == 1])
    assert torch.equal(hellos, flat > 0.5)


# Presence ------------------------------------------------------------------------------------------------------------


def answer_presence(frame: Frame, shard: int) -> None:
    """What an owner does with the presence bits that it has received."""
    REFERENCE.vote_bit(
        frame.received,
        frame.up_presence,
        None,
        first_word=0,
        words=frame.presence_words,
        answer=frame.answers[shard],
        answer_byte=frame.down_presence,
        key=0,
        signal=None,
    )


@PATIENT
@given(NUMELS, WORLD_SIZE, BUCKET_ELEMENTS)
def test_a_parameter_has_a_presence_bit_of_its_own_in_every_bucket(
    numels: list[int], world_size: int, bucket: int
) -> None:
    buffers, _ = mail_for(numels, world_size, bucket)
    for position, parts in enumerate(buffers.parts):
        for part in parts:
            assert part.presence == 1 << list(part.frame.bucket.slots).index(position)
            assert part.presence < 1 << WORD * part.frame.presence_words


@PATIENT
@given(NUMELS, st.integers(2, 5), st.integers(500, 4000), DOWNLINK, st.data())
def test_a_parameter_is_present_when_any_worker_has_it(
    numels: list[int], world_size: int, bucket: int, downlink: Downlink, data: st.DataObject
) -> None:
    """An exchange among mails of one process: packet j of worker i becomes row i at owner j."""
    workers = [mail_for(numels, world_size, bucket, downlink)[0] for _ in range(world_size)]
    for frames in zip(*(buffers.frames for buffers in workers), strict=True):
        parameters = len(frames[0].bucket.slots)
        bits = [data.draw(st.integers(0, 2**parameters - 1)) for _ in workers]
        for buffers, frame, present in zip(workers, frames, bits, strict=True):
            buffers.write_presence(frame, present)
        for owner, frame in enumerate(frames):
            for worker, sender in enumerate(frames):
                frame.received[worker] = sender.sent[owner]
            answer_presence(frame, owner)
        for frame in frames:
            for owner, answered in enumerate(frames):
                frame.answers[owner] = answered.answers[owner]
        union = 0
        for present in bits:
            union |= present
        for buffers, frame in zip(workers, frames, strict=True):
            assert buffers.read_presence(frame) == union


@pytest.mark.parametrize("parameters", [1, 63, 64, 65, 130])
def test_presence_of_many_parameters_takes_whole_words_and_touches_nothing_else(parameters: int) -> None:
    buffers, _ = mail_for([1] * parameters, 2, 10**6)
    (frame,) = buffers.frames
    assert frame.presence_words == -(-parameters // 64)
    buffers.sent.fill_(0xA5)
    present = (1 << parameters) - 1
    buffers.write_presence(frame, present)
    for packet in frame.sent:
        assert bool((packet[: frame.up_presence] == 0xA5).all())
        words = packet[frame.up_presence :].contiguous().numpy().tobytes()
        assert int.from_bytes(words, "little") == present
    buffers.write_presence(frame, 0)
    assert not bool(frame.sent[:, frame.up_presence :].any())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("numels", [[], [0], [0, 0, 0]], ids=str)
def test_nothing_to_send_needs_no_mail(numels: list[int], world_size: int) -> None:
    """A model of which everything is frozen or empty."""
    buffers, _ = mail_for(numels, world_size, 1000)
    assert buffers.frames == []
    assert buffers.sent.numel() == buffers.answers.numel() == 0
    assert buffers.parts == [[] for _ in numels]


# Slices: the ranks of a node -----------------------------------------------------------------------------------------

PAYLOADS = {"bit": 1, "votes": 1, "dense": 32}
"""Bits an element, in one plane."""


def mails_of_a_node(
    numels: list[int], nodes: int, ranks: int, bucket: int, payload: str
) -> list[tuple[PacketBuffers, int]]:
    """The buffers of each rank, and how many planes its answers have."""
    mails = []
    for own in range(ranks):
        layout = Layout(numels, nodes, bucket, slices=ranks, own_slice=own)
        if payload == "dense":
            mails.append((PacketBuffers(layout, Dense.payload, alone=nodes == 1), 1))
        else:
            compressor = stochastic_sign(layout, "votes" if payload == "votes" else "bit")
            mails.append((PacketBuffers(layout, compressor.payload, alone=nodes == 1), compressor.planes))
    return mails


def claim(run: list[int], planes: int, bits: int, start: int, stop: int, taken: set[int]) -> None:
    """Take the words of a run, which must lie within the bytes from `start` to `stop` and be nobody else's."""
    _, _, count, byte, plane_bytes, _ = run
    for plane in range(planes):
        first = byte + plane * plane_bytes
        words = range(first, first + 8 * bits * -(-count // WORD), 8)
        assert start <= words.start < words.stop <= stop
        assert not taken.intersection(words)
        taken.update(words)


@PATIENT
@given(NUMELS, st.integers(1, 4), st.integers(2, 4), BUCKET_ELEMENTS, st.sampled_from(sorted(PAYLOADS)))
def test_the_ranks_of_a_node_send_every_element_once(
    numels: list[int], nodes: int, ranks: int, bucket: int, payload: str
) -> None:
    """Between them; each sends its own slice, to its owners, at a gradient's place in the mean of that slice."""
    sent: list[int] = []
    for buffers, _ in mails_of_a_node(numels, nodes, ranks, bucket, payload):
        taken: set[int] = set()
        for part in chain.from_iterable(buffers.parts):
            frame, home = part.frame, part.frame.bucket
            for run in part.up_runs.tolist():
                element, in_slice, count, *_ = run
                assert in_slice == element - home.own_start
                assert 0 <= in_slice < in_slice + count <= home.slice_elements
                packet = frame.sent_at + in_slice // (WORD * home.shard_words) * frame.sent.shape[1]
                claim(run, 1, PAYLOADS[payload], packet + HEADER_BYTES, packet + frame.up_presence, taken)
                sent += range(element, element + count)
            # What a part has in a slice is one stretch of it: the mean of a node is taken of all of it at once.
            stretches = [(start, start + count) for _, start, count, *_ in part.up_runs.tolist()]
            assert all(stop == start for (_, stop), (start, _) in pairwise(stretches))
        assert max(taken, default=-8) + 8 <= buffers.sent.numel()
        assert all(frame.sent.shape[0] == nodes for frame in buffers.frames)
    slots = mails_of_a_node(numels, nodes, ranks, bucket, payload)[0][0].layout.slots
    assert sorted(sent) == [e for slot in slots for e in range(slot.start, slot.start + slot.numel)]


@PATIENT
@given(NUMELS, st.integers(1, 4), st.integers(2, 4), BUCKET_ELEMENTS, st.sampled_from(sorted(PAYLOADS)))
def test_every_rank_of_a_node_finds_all_answers(
    numels: list[int], nodes: int, ranks: int, bucket: int, payload: str
) -> None:
    mails = mails_of_a_node(numels, nodes, ranks, bucket, payload)
    for own, (buffers, planes) in enumerate(mails):
        taken: set[int] = set()
        for slot, parts in zip(buffers.layout.slots, buffers.parts, strict=True):
            end = 0
            for part in parts:
                frame, home = part.frame, part.frame.bucket
                for run in part.down_runs.tolist():
                    element, in_param, count, *_ = run
                    assert in_param == element - slot.start == end
                    end += count
                    shard = (element - home.start) // (WORD * home.shard_words)
                    packet = frame.answers_at + shard * frame.answers.shape[1]
                    bits, start = PAYLOADS[payload], packet + HEADER_BYTES
                    claim(run, planes, bits, start, packet + frame.down_presence, taken)
            assert end == slot.numel
        assert max(taken, default=-8) + 8 <= buffers.answers.numel()
        for frame in buffers.frames:
            assert frame.answers.shape[0] == nodes * ranks
            assert frame.own_answers.shape[0] == nodes
            offset = own * nodes * frame.answers.shape[1]
            assert frame.own_answers.data_ptr() == frame.answers.data_ptr() + offset
        # Answers are shared as blocks of bytes: they must mean the same everywhere.
        for mine, first in zip(chain.from_iterable(buffers.parts), chain.from_iterable(mails[0][0].parts), strict=True):
            assert torch.equal(mine.down_runs, first.down_runs)
