"""Packets as large as the gradients themselves: an answer takes the place of the packet that it answers."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels import ops
from thinwire.schemes.dense import Dense
from thinwire.wire.buckets import Layout
from thinwire.wire.mail import Mail

PATIENT = settings(deadline=None, max_examples=50)
NUMELS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=10)
BUCKET_ELEMENTS = st.integers(1, 4000)


def dense_mail(numels: list[int], workers: int, bucket: int) -> tuple[Mail, Dense]:
    scheme = Dense(ops.BACKENDS["reference"])
    mail = Mail(Layout(numels, workers, bucket), scheme.payload, alone=workers == 1)
    scheme.learn(mail)
    return mail, scheme


@PATIENT
@given(NUMELS, st.integers(1, 4), st.integers(1, 3), BUCKET_ELEMENTS)
def test_an_answer_takes_the_place_of_its_packet(numels: list[int], nodes: int, ranks: int, bucket: int) -> None:
    for own in range(ranks):
        layout = Layout(numels, nodes, bucket, slices=ranks, own_slice=own)
        mail = Mail(layout, Dense.payload, alone=nodes == 1)
        assert mail.sent is mail.answers
        for frame in mail.frames:
            assert frame.sent is frame.own_answers
            assert frame.up_presence == frame.down_presence
            assert frame.sent.data_ptr() == mail.sent.data_ptr() + frame.sent_at
            assert frame.answers.data_ptr() == mail.answers.data_ptr() + frame.answers_at
            assert frame.sent_at - frame.answers_at == frame.bucket.own_shards.start * frame.answers.shape[1]
        assert sum(frame.answers.numel() for frame in mail.frames) == mail.answers.numel()
        for part in chain.from_iterable(mail.parts):
            answers = {run[0]: run[3] for run in part.down_runs.tolist()}
            assert all(answers[run[0]] == run[3] for run in part.up_runs.tolist())


@PATIENT
@given(NUMELS, st.integers(2, 5), BUCKET_ELEMENTS)
def test_all_buckets_are_received_in_one_room(numels: list[int], workers: int, bucket: int) -> None:
    mail, _ = dense_mail(numels, workers, bucket)
    assert mail.one_room
    for frame in mail.frames:
        assert frame.received.untyped_storage().nbytes() == max(frame.sent.numel() for frame in mail.frames)
        assert frame.received.shape == frame.sent.shape
        assert frame.received.data_ptr() == mail.frames[0].received.data_ptr()
        frame.received.fill_(77)
    assert not mail.answers.any()  # the room is no part of them


@PATIENT
@given(NUMELS, BUCKET_ELEMENTS)
def test_a_worker_alone_needs_no_room(numels: list[int], bucket: int) -> None:
    mail, _ = dense_mail(numels, 1, bucket)
    assert not mail.one_room
    for frame in mail.frames:
        assert frame.received is frame.sent
        mail.sent_memory[frame.sent_at] = 77
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
    for (mail, scheme), of_worker in zip(posts, gradients, strict=True):
        for parts, gradient in zip(mail.parts, of_worker, strict=True):
            assert not any(scheme.encode(part, gradient, 1.0) for part in parts)
    for frames in zip(*(mail.frames for mail, _ in posts), strict=True):
        for owner, ((_, scheme), frame) in enumerate(zip(posts, frames, strict=True)):
            if frame.received is not frame.sent:
                for worker, sender in enumerate(frames):
                    frame.received[worker] = sender.sent[owner]
            scheme.merge(frame, owner)
        for frame in frames:
            for owner, answered in enumerate(frames):
                frame.answers[owner] = answered.answers[owner]
    for mail, _ in posts:
        for position, parts in enumerate(mail.parts):
            runs = [run for part in parts for run in part.down_runs.tolist()]
            heard = [mail.answers[byte : byte + 4 * count].view(torch.float32) for _, _, count, byte, *_ in runs]
            mean = torch.stack([of_worker[position] for of_worker in gradients]).mean(0)
            torch.testing.assert_close(torch.cat([torch.zeros(0), *heard]), mean, rtol=1e-5, atol=1e-5)
