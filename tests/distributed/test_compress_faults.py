"""`thinwire.compress` when something fails: lost ranks, changed packets, replicas that drift apart."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import run_nodes, token_loss, token_net
from tests.harness import run_ranks_expecting_errors
from thinwire.compressors.quantized import Quantized
from thinwire.transport.messages import Messages, Pending

SOON = 20.0
"""Seconds after a death, less than the timeout of the process group."""


def backward(model: DDP, rank: int, step: int) -> str:
    """The class of what backward raised, if anything."""
    try:
        token_loss(model, rank, step).backward()
    except (thinwire.PeerLost, thinwire.CorruptPacket, thinwire.ReplicasDiffer, thinwire.TooManySkips) as error:
        return type(error).__name__
    model.zero_grad()
    return ""


def lose_a_rank(rank: int, world_size: int, note: Path) -> None:
    model = DDP(token_net())
    _ = thinwire.compress(model)
    for step in range(2):  # at its second forward DDP exchanges the order of its buckets
        token_loss(model, rank, step).backward()
    if rank == 1:
        time.sleep(0.5)  # the others are waiting for its packets by then
        note.write_text(repr(time.monotonic()))
        os._exit(1)
    token_loss(model, rank, 2).backward()


def test_a_lost_rank_is_an_error_of_backward(tmp_path: Path) -> None:
    first, lost, third = run_ranks_expecting_errors(lose_a_rank, 3, tmp_path / "died")
    assert [first.type_name, lost.type_name, third.type_name] == ["PeerLost", "ProcessDied", "PeerLost"]
    # Not since the ranks were started: a fork server may take long to import torch.
    died = float((tmp_path / "died").read_text())
    assert max(first.at, third.at) - died < SOON


def change_a_packet(rank: int, world_size: int) -> list[str]:
    model = DDP(token_net())
    _ = thinwire.compress(model)
    found = [backward(model, rank, 0)]
    if rank == 1:
        send = Messages.send

        def changed(self: Messages, rows: torch.Tensor | Sequence[torch.Tensor], tag: int) -> Pending:
            for row in rows:
                row[-20] ^= 8
            return send(self, rows, tag)

        Messages.send = changed
    found.append(backward(model, rank, 1))
    dist.barrier()
    return found


def test_a_changed_packet_is_an_error_on_all_ranks() -> None:
    assert run_nodes(change_a_packet, 3, 1) == [["", "CorruptPacket"]] * 3


def drift(rank: int, world_size: int) -> list[str]:
    model = DDP(token_net())
    _ = thinwire.compress(model, check_replicas_every=2)
    found = []
    for step in range(4):
        found.append(backward(model, rank, step))
        if step == 2 and rank == 1:
            with torch.no_grad():
                model.module.get_parameter("scale").add_(1e-6)
    return found


def test_replicas_that_differ_are_found() -> None:
    for found in run_nodes(drift, 2, 1):
        assert found == ["", "", "", "ReplicasDiffer"]


def overflow(rank: int, world_size: int) -> list[str]:
    model = DDP(token_net())
    _ = thinwire.compress(model, max_consecutive_skips=3)
    found = []
    for _ in range(3):
        try:
            (token_loss(model, rank, 0) * float("inf")).backward()
            found.append("")
        except thinwire.TooManySkips as error:
            found.append(str(error))
        model.zero_grad()
    return found


def test_too_many_gradients_that_are_not_finite() -> None:
    for found in run_nodes(overflow, 2, 1):
        assert found[:2] == ["", ""]
        assert "in 3 exchanges in a row" in found[2]


def fail_in_a_lane(rank: int, world_size: int) -> str:
    model = DDP(token_net())
    _ = thinwire.compress(model)
    if rank == 0:

        def merge(*_: object) -> None:
            raise MemoryError("of this test")

        Quantized.merge = merge  # pyright: ignore[reportAttributeAccessIssue]
    try:
        token_loss(model, rank, 0).backward()
    except (RuntimeError, thinwire.PeerLost) as error:
        return f"{type(error).__name__}, {type(error.__cause__).__name__}"
    return ""


def test_an_exception_in_a_lane_surfaces_in_backward() -> None:
    failing, other = run_nodes(fail_in_a_lane, 2, 1)
    assert failing == "RuntimeError, MemoryError"
    assert other.startswith("PeerLost")
