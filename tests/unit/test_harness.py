"""The harness decides what the distributed suites see, so it is held to its own words first."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    FailedRanksError,
    loopback_bytes_sent,
    private_network,
    run_ranks,
    run_ranks_expecting_errors,
)
from thinwire.testbed import TestbedUnavailable


def summed(rank: int, world_size: int, offset: int) -> torch.Tensor:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return total


def pid_unless_first(rank: int, world_size: int) -> int:
    if rank == 0:
        raise ValueError("rank 0 declines")
    return os.getpid()


def slow_last_rank(rank: int, world_size: int, pid_file: str) -> None:
    if rank == world_size - 1:
        with open(pid_file, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)


def declines(rank: int, world_size: int) -> None:
    raise ValueError(f"rank {rank} of {world_size} declines")


def dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def bytes_of_one_megabyte(rank: int, world_size: int) -> int:
    dist.barrier()
    before = loopback_bytes_sent()
    dist.barrier()
    payload = torch.zeros(1 << 20, dtype=torch.uint8)
    if rank == 0:
        dist.send(payload, 1)
    else:
        dist.recv(payload, 0)
    dist.barrier()
    return loopback_bytes_sent() - before


def test_results_come_in_rank_order_from_a_real_group() -> None:
    assert [int(r[0]) for r in run_ranks(summed, 3, 10)] == [33, 33, 33]


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(FailedRanksError, match=r"(?s)rank 0:.*pid_unless_first.*ValueError: rank 0 declines"):
        run_ranks(pid_unless_first, 2)


def test_a_silent_rank_is_named_and_killed(tmp_path: object) -> None:
    pid_file = os.path.join(str(tmp_path), "pid")
    with pytest.raises(FailedRanksError, match=r"ranks \[1\] had not finished"):
        run_ranks(slow_last_rank, 2, pid_file, timeout=20.0)  # so that the other one has time to finish
    with open(pid_file) as file:
        pid = int(file.read())
    assert not os.path.exists(f"/proc/{pid}")


def test_a_dead_rank_is_an_error() -> None:
    with pytest.raises(FailedRanksError, match=r"rank 1:\nthe process died without an outcome"):
        run_ranks(dies, 2)


def test_expected_errors_come_from_every_rank() -> None:
    errors = run_ranks_expecting_errors(declines, 3)
    assert [(e.type_name, e.message) for e in errors] == [("ValueError", f"rank {r} of 3 declines") for r in range(3)]
    with pytest.raises(FailedRanksError, match=r"ranks \[1, 2\] returned"):
        run_ranks_expecting_errors(pid_unless_first, 3)


def test_a_private_network_counts_only_its_own_bytes() -> None:
    try:
        with private_network() as network:
            sent = run_ranks(bytes_of_one_megabyte, 2, network=network)
    except TestbedUnavailable as error:
        pytest.skip(str(error))
    # A busy machine acknowledges late, and TCP then sends segments of 64 kB twice.
    assert 1.0 <= min(sent) / (1 << 20) <= max(sent) / (1 << 20) <= 1.5
