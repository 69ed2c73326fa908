"""What goes wrong on a side stream stops all ranks, and nothing is applied, though the host hears of it later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.distributed.common import by_case, digest, each_case, environment, run_nodes, token_loss, token_net
from tests.harness import run_ranks
from thinwire.compressors.codecs.topk import TopK
from thinwire.compressors.markov import Markov
from thinwire.kernels.header import HEADER_BYTES
from thinwire.transport.collectives import Collectives

STREAM = {"THINWIRE_LANE": "stream"}
GOOD_STEPS = 2


@dataclass(frozen=True)
class Case:
    """Of the collectives of the third step one brings something to a rank that was not sent."""

    collective: str
    """"scatter" or "gather"."""
    call: int
    """Which of those of the step, from 1."""
    rank: int
    names: str
    """What the rank says of it."""
    byte: int = 40
    every: int = 0
    """Whether the bit is flipped again and again, so many bytes apart."""
    sender: int = 1
    silent: bool = False
    """Whether nobody needs to notice."""


FLAT = {
    "a packet": Case("scatter", 1, 0, "packet from rank 1 for step 3, bucket 0: checksum"),
    "a later packet": Case("scatter", 3, 2, "packet from rank 1 for step 3, bucket 2: checksum"),
    "its magic": Case("scatter", 1, 0, "checksum", byte=4),
    "an answer": Case("gather", 2, 2, "packet from rank 1 for step 3, bucket 1: checksum"),
    "a commit round, in one copy": Case("gather", 6, 0, "", byte=20, silent=True),
    "a commit round, in both": Case(
        "gather", 6, 0, "packet from rank 1 for step 3, bucket 5: checksum", 20, HEADER_BYTES
    ),
}


@dataclass
class Flip:
    """Lets a collective of the step under way bring something else."""

    case: Case
    calls: int = 0
    armed: bool = False

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        collective: Callable[..., None] = getattr(Collectives, self.case.collective)

        def changed(members: Collectives, *rows: Tensor) -> None:
            collective(members, *rows)
            if self.armed:
                self.calls += 1
                if self.calls == self.case.call:
                    row = rows[-1][self.case.sender]
                    row[self.case.byte :: self.case.every or row.numel()] ^= 8

        patch.setattr(Collectives, self.case.collective, changed)


def struck(rank: int, world_size: int, case: Case, options: dict[str, Any]) -> tuple[list[str], str]:
    """What the parameters are from the last good step on, and what is raised in the end."""
    flip = Flip(case)
    with environment(STREAM), pytest.MonkeyPatch.context() as patch:
        if rank == case.rank:
            flip.patch(patch)
        net = token_net()
        optimizer = thinwire.Birder(net.parameters(), bucket_mb=0.01, check_replicas_every=0, **options)
        digests, raised = [], ""
        try:
            for step in range(1, 6):
                flip.armed = step == GOOD_STEPS + 1
                token_loss(net, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step >= GOOD_STEPS:
                    digests.append(digest(net.parameters()))
        except (thinwire.CorruptPacket, thinwire.PeerLost) as error:
            digests.append(digest(net.parameters()))
            raised = str(error)
            with pytest.raises(type(error)):
                optimizer.step()
    return digests, raised


def check(case: Case, ranks: list[tuple[list[str], str]]) -> None:
    if case.silent:
        assert all(not raised and len(set(digests)) == 4 for digests, raised in ranks)
        return
    for rank, (digests, raised) in enumerate(ranks):
        told = case.names if rank == case.rank else f"rank {case.rank} refused a packet of step 3"
        alone = case.call == 6 and rank != case.rank  # who was told that all was right goes on for a step
        assert (told in raised) or alone, (rank, raised)
        assert raised
        assert len(set(digests)) == 1 or alone, "a step was applied after a packet had been refused"


def test_a_packet_that_was_changed_is_the_end_for_all_before_anything_is_applied() -> None:
    ranks = run_ranks(each_case, 3, struck, FLAT, {}, timeout=100)
    for name, of_case in by_case(ranks).items():
        check(FLAT[name], of_case)


NODES = {
    "a gradient": Case("scatter", 1, 2, "packet from rank 3 for step 3, bucket 0: checksum", byte=100),
    "an answer of the node": Case("gather", 2, 2, "packet from rank", byte=50),
}


def test_the_same_inside_a_node() -> None:
    options = {"topology": "hierarchical"}
    ranks = run_nodes(each_case, 2, 2, struck, NODES, options, timeout=100)
    for name, of_case in by_case(ranks).items():
        for digests, raised in of_case:
            assert "packet" in raised, name
            assert len(set(digests)) == 1, name
        assert NODES[name].names in of_case[2][1], name


def unequal_gradients(rank: int, world_size: int) -> str:
    with environment(STREAM):
        net = token_net()
        optimizer = thinwire.Birder(net.parameters(), topology="hierarchical")
        before = digest(net.parameters())
        token_loss(net, rank, 0).backward()
        if rank == 1:
            net.get_parameter("scale").grad = None
        with pytest.raises(thinwire.CorruptPacket) as caught:
            optimizer.step()
        assert digest(net.parameters()) == before
        return str(caught.value)


def test_ranks_of_a_node_must_have_gradients_for_the_same_parameters() -> None:
    told = run_nodes(unequal_gradients, 2, 2)
    assert all("gradients for different parameters in step 1" in text for text in told[:2])
    assert all("refused a packet of step 1" in text for text in told[2:])


def lost(rank: int, world_size: int) -> str:
    with environment(STREAM), pytest.MonkeyPatch.context() as patch:
        net = token_net()
        optimizer = thinwire.Birder(net.parameters(), bucket_mb=0.01)
        for step in range(4):
            if step == 2 and rank == 1:

                def torn(*_: object) -> None:
                    raise RuntimeError("the cable is out")

                patch.setattr(Collectives, "scatter", torn)
            token_loss(net, rank, step).backward()
            try:
                optimizer.step()
            except (thinwire.PeerLost, RuntimeError) as error:
                with pytest.raises(type(error)):
                    optimizer.step()
                return f"{type(error).__name__} {step} {error}"
            optimizer.zero_grad()
    return "nothing"


def test_a_rank_that_fails_is_lost_to_the_others_at_once() -> None:
    told = run_ranks(lost, 3)
    assert "RuntimeError 2" in told[1]
    assert "the cable is out" in told[1]
    for text in (told[0], told[2]):
        assert text.startswith("PeerLost 2"), text
        assert "packets" in text


def scaled_by(rank: int, world_size: int, variables: dict[str, str]) -> tuple[list[float], list[str]]:
    """Scales and parameters of a run with a GradScaler under attach, in which a rank overflows."""
    with environment(variables):
        net = token_net()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = thinwire.Birder(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        thinwire.attach(ddp, optimizer, grad_scaler=scaler)
        scales, digests = [], []
        for step in range(7):
            loss = token_loss(ddp, rank, step) * (torch.inf if step == 3 and rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            digests.append(digest(net.parameters()))
        return scales, digests


def both_scaled(rank: int, world_size: int) -> tuple[Any, Any]:
    return scaled_by(rank, world_size, {}), scaled_by(rank, world_size, STREAM)


def test_grad_scalers_hear_of_an_overflow_of_any_rank_from_the_device() -> None:
    for threads, stream in run_ranks(both_scaled, 2):
        assert stream == threads
        scales, digests = stream
        assert scales[3] == scales[2] / 2
        assert digests[3] == digests[2] != digests[4]


def nonsense(rank: int, world_size: int) -> tuple[str, bool]:
    """What is raised when an owner cannot make sense of a packet whose header is right, and whether anything moved."""
    with environment(STREAM), pytest.MonkeyPatch.context() as patch:
        net = token_net()
        optimizer = thinwire.CDAdam(net.parameters(), codec="topk")
        for step in range(2):
            before = digest(net.parameters())
            if step == 1 and rank == 1:

                def refuse(*_: object) -> None:
                    raise ValueError("a packet of top-k has indices beyond")

                patch.setattr(TopK, "decode", refuse)
                patch.setattr(Markov, "seal", lambda *_: None)
            token_loss(net, rank, step).backward()
            try:
                optimizer.step()
            except thinwire.CorruptPacket as error:
                return str(error), digest(net.parameters()) != before
    return "nothing", True


def test_a_packet_that_makes_no_sense_is_the_end_for_all() -> None:
    told = run_ranks(nonsense, 3)
    assert told[1] == ("the packet of worker 0 for bucket 0: a packet of top-k has indices beyond", False)
    assert told[0] == told[2] == ("rank 1 refused a packet of step 2: see the error of that rank for the reason", False)
