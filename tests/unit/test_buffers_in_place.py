"""Packets as large as the gradients themselves: an answer takes the place of the packet that it answers."""

from __future__ import annotations

import dataclasses
from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.compressors.dense import Dense
from thinwire.kernels import ops
from thinwire.transport.buffers import PacketBuffers
from thinwire.transport.layout import Layout

PATIENT = settings(deadline=None, max_examples=50)
NUMELS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=10)
BUCKET_ELEMENTS = st.integers(1, 4000)


def dense_mail(numels: list[int], workers: int, bucket: int) -> tuple[PacketBuffers, Dense]:
    compressor = Dense(ops.BACKENDS["reference"])
    buffers = PacketBuffers(Layout(numels, workers, bucket), compressor.payload, alone=workers == 1)
    compressor.bind(buffers)
    return buffers, compressor


@PATIENT
@given(NUMELS, st.integers(1, 4), st.integers(1, 3), BUCKET_ELEMENTS)
def test_an_answer_takes_the_place_of_its_packet(numels: list[int], nodes: int, ranks: int, bucket: int) -> None:
    for own in range(ranks):
        layout = Layout(numels, nodes, bucket, slices=ranks, own_slice=own)
        buffers = PacketBuffers(layout, Dense.payload, alone=nodes == 1)
        assert buffers.sent is buffers.answers
        for frame in buffers.frames:
            assert frame.sent is frame.own_answers
            assert frame.up_presence == frame.down_presence
            assert frame.sent.data_ptr() == buffers.sent.data_ptr() + frame.sent_at
            assert frame.answers.data_ptr() == buffers.answers.data_ptr() + frame.answers_at
            assert frame.sent_at - frame.answers_at == frame.bucket.own_shards.start * frame.answers.shape[1]
        assert sum(frame.answers.numel() for frame in buffers.frames) == buffers.answers.numel()
        for part in chain.from_iterable(buffers.parts):
            answers = {run[0]: run[3] for run in part.down_runs.tolist()}
            assert all(answers[run[0]] == run[3] for run in part.up_runs.tolist())


@PATIENT
@given(NUMELS, st.integers(2, 5), BUCKET_ELEMENTS, st.integers(1, 4))
def test_buckets_of_a_window_are_received_in_memory_of_their_own(
    numels: list[int], workers: int, bucket: int, window: int
) -> None:
    payload = dataclasses.replace(Dense.payload, receive_window=lambda _: window)
    buffers = PacketBuffers(Layout(numels, workers, bucket), payload, alone=False)
    assert buffers.receive_window == window
    frames = buffers.frames
    largest = max((frame.sent.numel() for frame in frames), default=0)
    assert buffers.memory[2].numel() <= window * largest
    for i, frame in enumerate(frames):
        assert frame.received.shape == frame.sent.shape
        for earlier in frames[max(0, i - window + 1) : i]:
            earlier.received.fill_(1)
        frame.received.fill_(77)
        assert all((earlier.received == 1).all() for earlier in frames[max(0, i - window + 1) : i])
        if i >= window:
            assert frame.received.data_ptr() == frames[i - window].received.data_ptr()
    assert not buffers.answers.any()  # the received packets are no part of them


@PATIENT
@given(NUMELS, BUCKET_ELEMENTS)
def test_a_worker_alone_needs_no_room(numels: list[int], bucket: int) -> None:
    buffers, _ = dense_mail(numels, 1, bucket)
    for frame in buffers.frames:
        assert frame.received is frame.sent
        buffers.sent_memory[frame.sent_at] = 77
        assert frame.received[0, 0] == frame.answers[0, 0] == 77


@PATIENT
@given(NUMELS, st.integers(1, 4), BUCKET_ELEMENTS, st.integers(0, 2**32 - 1))
def test_every_worker_reads_the_mean_where_it_wrote_its_own(
    numels: list[int], workers: int, bucket: int, seed: int
) -> None:
    """An exchange among mails of one process, a bucket at a time, as lanes do it."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [[torch.randn(numel, generator=generator) for numel in numels[::-1]] for _ in range(workers)]
    posts = [dense_mail(numels, workers, bucket) for _ in range(workers)]
    for (buffers, compressor), of_worker in zip(posts, gradients, strict=True):
        for parts, gradient in zip(buffers.parts, of_worker, strict=True):
            assert not any(compressor.encode(part, gradient, 1.0) for part in parts)
    for frames in zip(*(buffers.frames for buffers, _ in posts), strict=True):
        for owner, ((_, compressor), frame) in enumerate(zip(posts, frames, strict=True)):
            if frame.received is not frame.sent:
                for worker, sender in enumerate(frames):
                    frame.received[worker] = sender.sent[owner]
            compressor.merge(frame, owner)
        for frame in frames:
            for owner, answered in enumerate(frames):
                frame.answers[owner] = answered.answers[owner]
    for buffers, _ in posts:
        for position, parts in enumerate(buffers.parts):
            runs = [run for part in parts for run in part.down_runs.tolist()]
            heard = [buffers.answers[byte : byte + 4 * count].view(torch.float32) for _, _, count, byte, *_ in runs]
            mean = torch.stack([of_worker[position] for of_worker in gradients]).mean(0)
            torch.testing.assert_close(torch.cat([torch.zeros(0), *heard]), mean, rtol=1e-5, atol=1e-5)
