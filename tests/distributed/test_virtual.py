"""Virtual workers: as many threads of one process compute what as many processes do, to the bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import thinwire
from tests.conformance.test_conformance import OPTIMIZERS
from tests.distributed.common import Digest, Training, environment, token_loss, token_net, train, trained_each
from tests.harness import run_ranks
from thinwire.transport import virtual
from thinwire.transport.peers import Peers, virtual_worker


def virtually(workers: int, training: Training) -> list[list[Digest]]:
    """What `train` returns for each of so many virtual workers."""
    # They share an environment, which is the same for all of them anyway.
    with environment(training.environment):
        return virtual.run_workers(workers, train, replace(training, environment={}))


def test_they_have_the_bits_of_processes_under_ddp() -> None:
    runs = [Training(entry.make, {"lr": entry.lr}, steps=15) for entry in OPTIMIZERS]
    for run, processes in zip(runs, trained_each(3, [replace(run, attach=True) for run in runs]), strict=True):
        assert virtually(3, run) == processes, run


def test_nodes_of_them_have_the_bits_of_nodes() -> None:
    nodes = {"LOCAL_WORLD_SIZE": "2"}
    runs = [
        Training(entry.make, {"lr": entry.lr, "bucket_mb": 0.01}, steps=15, environment=nodes) for entry in OPTIMIZERS
    ]
    for run, processes in zip(runs, trained_each(4, runs), strict=True):
        assert virtually(4, run) == processes, run


def random_numbers(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(rank)
    net = token_net()
    torch.manual_seed(rank)
    optimizer = thinwire.Birder(net.parameters())
    drawn = []
    for step in range(3):
        token_loss(net, rank, step).backward()
        drawn.append(float(torch.rand(())))
        optimizer.step()
    return drawn


def test_each_has_random_numbers_of_its_own() -> None:
    before = torch.get_rng_state()
    assert virtual.run_workers(3, random_numbers) == run_ranks(random_numbers, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_find_each_other_and_nobody_else() -> None:
    def seen(worker: int, _: int) -> tuple[Any, ...]:
        peers = Peers.of(None)
        return peers.rank, peers.ranks(), peers.gather(10 * worker), peers.gather_integer(worker, "a test")

    assert virtual.run_workers(2, seen) == [(0, [0, 1], [0, 10], [0, 1]), (1, [0, 1], [0, 10], [0, 1])]
    assert not hasattr(virtual_worker, "peers")
    assert Peers.of(None).size == 1


def test_two_optimizers_do_not_mix_their_messages() -> None:
    def both(worker: int, _: int) -> list[torch.Tensor]:
        nets = [token_net(), token_net()]
        optimizers = [thinwire.Birder(net.parameters(), lr=1e-2, seed=seed) for seed, net in enumerate(nets)]
        for step in range(3):
            for net, optimizer in zip(nets, optimizers, strict=True):
                token_loss(net, worker, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets]

    first, second = virtual.run_workers(2, both)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(*first)


def test_an_error_of_one_ends_all() -> None:
    told: list[BaseException] = []

    def fail(worker: int, _: int) -> None:
        net = token_net()
        optimizer = thinwire.Birder(net.parameters())
        try:
            for step in range(3):
                if worker == 1 and step == 2:
                    raise ZeroDivisionError("worker 1")
                token_loss(net, worker, step).backward()
                optimizer.step()
        except thinwire.PeerLost as lost:
            told.append(lost)
            raise

    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError, match="worker 1"):
        virtual.run_workers(3, fail)
    assert len(told) == 2
    assert set(threading.enumerate()) <= before  # those of earlier tests may have ended


def test_workers_that_wait_for_each_other_are_told_so() -> None:
    def lopsided(worker: int, _: int) -> None:
        net = token_net()
        optimizer = thinwire.Birder(net.parameters())
        for step in range(2 - worker):
            token_loss(net, worker, step).backward()
            optimizer.step()

    with pytest.raises(thinwire.PeerLost, match="ended, or waits for something else"):
        virtual.run_workers(2, lopsided)


def test_workers_that_disagree_are_refused() -> None:
    def disagree(worker: int, _: int) -> None:
        net = token_net()
        optimizer = thinwire.Birder(net.parameters(), seed=worker)
        token_loss(net, worker, 0).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="disagree on seed"):
        virtual.run_workers(2, disagree)


def test_ctrl_c_ends_all() -> None:
    steps = 0

    def interrupted(worker: int, _: int) -> None:
        nonlocal steps
        peers = Peers.of(None)
        for step in range(10_000):
            steps += 1
            if step == 3 and worker == 1:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
            peers.gather(worker)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        virtual.run_workers(3, interrupted)
    assert steps < 20_000
    assert set(threading.enumerate()) <= before  # those of earlier tests may have ended


def test_there_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="workers=0: expected"):
        virtual.run_workers(0, print)
