"""LAQ on real ranks: which packets have no payload, how many bytes that saves, and that nothing else changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest, run_nodes
from tests.harness import run_ranks
from tests.oracles.averaging import LaqOracle
from tests.oracles.flat_space import WORD
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.compressors.laq import Laq
from thinwire.transport.messages import Messages
from thinwire.transport.packet import HEADER_BYTES
from thinwire.transport.virtual import run_workers

NUMELS = (5000, 300, 7000)
BUCKET_MB = 0.02
STEPS = 14
OPTIONS: dict[str, Any] = {"bits": 4, "block": 32, "patience": 0.8, "history": 4, "max_age": 5}
COMMIT_BYTES = 2 * HEADER_BYTES


def gradients_of(rank: int, step: int) -> list[Tensor]:
    """The first parameter hardly changes, the second has no pattern, the third jumps at step 8 and has no gradient on
    rank 0 at step 10."""
    noise = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for index, numel in enumerate(NUMELS):
        size = (0.02, 1.0, 0.05)[index]
        base = torch.randn(numel, generator=torch.Generator().manual_seed(index + 10 * (index == 2 and step >= 8)))
        found.append(base + size * torch.randn(numel, generator=noise))
    if step == 10 and rank == 0:
        found[2].zero_()
    return found


def averages(rank: int, world_size: int) -> tuple[list[list[np.ndarray]], list[tuple[int, int, int]], int]:
    """The averaged gradients of each step; the bytes sent and received and the rounds so far; the bytes of a bucket."""
    params = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
    averager = GradientAverager(params, rule_of("laq", OPTIONS), bucket_mb=BUCKET_MB)
    answers, counted = [], []
    for step in range(STEPS):
        averager.begin()
        gradients = gradients_of(rank, step)
        for p, gradient in zip(params, gradients, strict=True):
            averager.add(p, gradient)
        averager.finish()
        answers.append([gradient.numpy() for gradient in gradients])
        metrics = averager.metrics()
        counted.append((metrics.bytes_sent, metrics.bytes_received, metrics.rounds))
    averager.close()
    return answers, counted, averager._session.layout.buckets[0].slice_elements


@pytest.mark.parametrize("workers", [2, 3])
def test_equals_the_oracle_and_sends_its_bytes(workers: int) -> None:
    of_ranks = run_ranks(averages, workers)
    oracle = LaqOracle(NUMELS, workers, bucket_elements=int(BUCKET_MB * 2**20 / 4), **OPTIONS)
    before = [(0, 0)] * workers
    silent = 0
    for step in range(STEPS):
        gradients = [[g.numpy() for g in gradients_of(rank, step)] for rank in range(workers)]
        expected = oracle.step(gradients)
        silent += len(oracle.silent)
        for rank, (answers, counted, _) in enumerate(of_ranks):
            for found, wanted in zip(answers[step], expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=f"step {step}, rank {rank}")
            sent, received, rounds = counted[step]
            assert (sent - before[rank][0], received - before[rank][1]) == bytes_of(oracle, rank, workers), step
            assert rounds == (step + 1) * (2 * len(oracle.shards) // workers + 1)
            before[rank] = sent, received
    share = silent / (STEPS * len(oracle.senders))
    assert 0.3 < share < 0.9, "some are lazy, and some are not"
    assert max(sender.age for sender in oracle.senders.values()) <= OPTIONS["max_age"]


def bytes_of(oracle: LaqOracle, rank: int, workers: int) -> tuple[int, int]:
    """What a rank sends and receives in the last step of the oracle."""
    sent = received = (workers - 1) * COMMIT_BYTES
    for number, shard in enumerate(oracle.shards):
        words = -(-shard.length * (2 * WORD // OPTIONS["block"] + WORD * OPTIONS["bits"] // 8) // 8)
        for sender in [*range(workers), None]:
            size = HEADER_BYTES + 8 + (0 if (number, sender) in oracle.silent else 8 * words)
            owner = number % workers
            if sender is None:  # the answer
                sent += (workers - 1) * size if owner == rank else 0
                received += size if owner != rank else 0
            elif sender != owner:
                sent += size if sender == rank else 0
                received += size if owner == rank else 0
    return sent, received


# Leaving out zeros changes nothing else -------------------------------------------------------------------------------


def digests(rank: int, world_size: int, leaves_out: bool) -> tuple[list[str], int]:
    """Of the gradients of a model that sees the same batch again and again."""
    made = Laq.__init__

    def whole(self: Laq, *args: Any) -> None:
        made(self, *args)
        self.payload = dataclasses.replace(self.payload, leaves_out_zeros=leaves_out)

    Laq.__init__ = whole  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
        model = DistributedDataParallel(net)
        handle = thinwire.compress(model, "laq", bucket_mb=0.004, **OPTIONS)
    finally:
        Laq.__init__ = made  # type: ignore[method-assign]
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(rank))
    found = []
    for _ in range(12):
        (model(inputs) - 1.0).square().mean().backward()
        found.append(digest(p.grad for p in net.parameters() if p.grad is not None))
        opt.step()
        opt.zero_grad()
    sent = handle.metrics().bytes_sent
    handle.close()
    return found, sent


def both(rank: int, world_size: int) -> tuple[tuple[list[str], int], tuple[list[str], int]]:
    return digests(rank, world_size, True), digests(rank, world_size, False)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)], ids=["2", "2x2"])
def test_whole_packets_give_the_same_bits_and_cost_more(nodes: int, ranks: int) -> None:
    of_ranks = run_nodes(both, nodes, ranks)
    for (short, sent), (whole, more) in of_ranks:
        assert short == whole == of_ranks[0][0][0]
        assert sent < 0.8 * more


def virtual(rank: int, world_size: int) -> list[list[np.ndarray]]:
    return averages(rank, world_size)[0]


def test_virtual_workers_have_the_bits_of_processes() -> None:
    for ours, theirs in zip(run_workers(2, virtual), run_ranks(virtual, 2), strict=True):
        for step, answers in enumerate(ours):
            for one, other in zip(answers, theirs[step], strict=True):
                np.testing.assert_array_equal(one, other)


# Damage ---------------------------------------------------------------------------------------------------------------

BITS = {
    "the checksum": (1, 4),
    "the flag that there is no payload": (8, 32),
    "the length": (24, 2),
    "presence": (33, 1),
}


def damaged(rank: int, world_size: int) -> dict[str, list[str]]:
    found = {}
    for name, (byte, mask) in BITS.items():
        for odd in (0, 1):  # packets, answers
            params = [nn.Parameter(torch.zeros(300))]
            averager = GradientAverager(params, rule_of("laq", OPTIONS))
            original, seen = Messages._start, []

            def start(
                self: Messages, messages: Any, tag: int, *, sends: bool, of: Any = (byte, mask, odd, original, seen)
            ) -> Any:
                at, bits, kind, start_of, changed = of
                if sends and rank == 1 and tag // 4 == kind and messages[0][1].numel() == HEADER_BYTES + 8:
                    row = messages[0][1].clone()
                    row[at] ^= bits
                    changed.append(row)
                    messages = [(messages[0][0], row)]
                return start_of(self, messages, tag, sends=sends)

            errors = []
            for step in range(2):
                averager.begin()
                averager.add(params[0], torch.ones(300))
                if step == 1:
                    Messages._start = start  # type: ignore[method-assign]
                try:
                    averager.finish()
                except RuntimeError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                finally:
                    Messages._start = original  # type: ignore[method-assign]
            assert bool(seen) == (rank == 1), f"{name}: there was no such message"
            found[f"{name}, {odd}"] = errors
            averager.close()
    return found


def test_a_damaged_short_message_stops_all_ranks() -> None:
    for name, *errors in zip(*[found.items() for found in run_ranks(damaged, 2)], strict=True):
        for case, of_rank in (name, *errors):
            assert len(of_rank) == 1, (case, of_rank)
            assert of_rank[0].startswith("CorruptPacket"), (case, of_rank)
