"""A packet that is not as it was sent, or not the one that was due, stops all ranks before anything is applied."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, digest, run_nodes, token_loss, token_net
from tests.distributed.stages import LOCAL_STEPS, PAPER, VARIANCE
from thinwire.kernels import reference
from thinwire.transport import packet
from thinwire.transport.buffers import MAX_CHANNELS
from thinwire.transport.messages import Messages, Pending

GOOD_STEPS = 2
BUCKETS = 5
SENDER = 1
SOON = 20.0
"""Seconds, far less than the timeout of the group."""
MULTIPLE = {"bucket_mb": 0.01}
SIGNS = {"betas": (0.9, 0.9), "warmup_steps": 10, **PAPER}

FIELDS = {"magic": (4, "<H"), "version": (6, "<H"), "flags": (8, "<H"), "sender": (10, "<H"), "step": (12, "<Q")}
FIELDS |= {"bucket": (20, "<I"), "length": (24, "<I"), "layout": (28, "<I")}


@dataclass(frozen=True)
class Case:
    """One message of the next step is changed between its sealing and the wire. What others get is not."""

    tag: int
    """Without the channel: even for packets and gradients, odd for answers."""
    to: int
    """The rank that gets it."""
    names: str
    """What the rank that gets it says is wrong."""
    byte: int = 40
    """Where a bit is flipped; from the end if negative."""
    apart: int = 1 << 20
    """And then after so many bytes again."""
    header: str | None = None
    """A field that gets another value instead, with a checksum that matches."""
    occurrence: int = 1
    optimizer: str = "Birder"
    options: Mapping[str, Any] = field(default_factory=dict)
    attach: bool = False
    good_steps: int = GOOD_STEPS
    bucket: int = 0
    sealed_by: int = SENDER
    """Ranks of a node pass on each other's answers from other nodes."""
    passed_on_to: tuple[int, ...] = ()
    synchronize: bool = False
    """Instead of a step."""

    @property
    def found(self) -> str:
        """How a rank that finds it begins."""
        return (
            f"packet from rank {self.sealed_by} for step {self.good_steps + 1}, bucket {self.bucket}: {self.names} is "
        )


def change(row: Tensor, case: Case) -> None:
    if case.header is None:
        row[case.byte :: case.apart] ^= 1 << 3
        return
    at, form = FIELDS[case.header]
    memory = bytearray(row.numpy().tobytes())
    (value,) = struct.unpack_from(form, memory, at)
    struct.pack_into(form, memory, at, value ^ packet.ACTIVATION)
    row.copy_(torch.frombuffer(memory, dtype=torch.uint8))
    struct.pack_into("<I", memory, 0, reference.crc32c(row[4:]))
    row.copy_(torch.frombuffer(memory, dtype=torch.uint8))


def tamper(case: Case) -> Callable[[], None]:
    """Change one message that this process sends from now on; what to call when it is over."""
    original, left, copies = Messages._start, case.occurrence, []

    def start(self: Messages, messages: Sequence[tuple[int, Tensor]], tag: int, *, sends: bool) -> Pending:
        nonlocal left
        to = [self._ranks[member] for member, _ in messages]
        if sends and tag // MAX_CHANNELS == case.tag and case.to in to:
            left -= 1
            if left == 0:
                member, row = messages[to.index(case.to)]
                copies.append(row.clone())  # which must stay until it has been sent
                change(copies[0], case)
                messages = [(member, copies[0]) if each[0] == member else each for each in messages]
        return original(self, messages, tag, sends=sends)

    Messages._start = start

    def stop() -> None:
        Messages._start = original
        assert copies, "there was no such message"

    return stop


@dataclass
class Seen:
    """What a rank saw of a case."""

    raised: str = "nothing"
    message: str = ""
    moved: bool = False
    again: str = "nothing"
    """What the next step raises."""
    lanes: int = 0
    """Threads that are left."""
    seconds: float = 0.0


def live_through(case: Case, rank: int) -> Seen:
    lanes, net = _lanes(), token_net()
    optimizer = getattr(thinwire, case.optimizer)(net.parameters(), lr=1e-2, **MULTIPLE, **case.options)
    model: torch.nn.Module = net
    if case.attach:
        model = DistributedDataParallel(net)
        thinwire.attach(model, optimizer)
    for step in range(case.good_steps):
        token_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, before = Seen(), digest(net.parameters())
    untouched = tamper(case) if rank == SENDER else lambda: None
    began = time.monotonic()
    try:
        if case.synchronize:
            assert not optimizer.is_synchronized
            optimizer.synchronize()
        else:
            token_loss(model, rank, 9).backward()
            optimizer.step()
    except RuntimeError as error:
        seen.raised, seen.message = type(error).__name__, str(error)
    untouched()
    seen.moved = digest(net.parameters()) != before
    try:
        optimizer.step()
    except RuntimeError as error:
        seen.again = type(error).__name__
    seen.seconds = time.monotonic() - began
    # A lane that was told to end may wait for a core.
    until = time.monotonic() + SOON
    while seen.again != "nothing" and _lanes() > lanes and time.monotonic() < until:
        time.sleep(0.01)
    seen.lanes = _lanes() - lanes
    return seen


def _lanes() -> int:
    return sum(thread.name == "thinwire-lane" for thread in threading.enumerate())


def live_through_all(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Seen]:
    return {name: live_through(case, rank) for name, case in cases.items()}


DENSE: dict[str, Any] = {"optimizer": "OneBitAdam", "options": SIGNS}
SKETCH: dict[str, Any] = {"optimizer": "SketchedAMSGrad"}
LOCAL: dict[str, Any] = {"optimizer": "ZeroOneAdam", "options": VARIANCE}
"""Its fifteenth step is a local one."""
FLAT = {
    "a packet": Case(0, 0, "checksum"),
    "its last bit": Case(0, 2, "checksum", byte=-1),
    "its checksum": Case(0, 2, "checksum", byte=2),
    "a packet of the last bucket": Case(2 * (BUCKETS - 1), 0, "checksum", bucket=BUCKETS - 1),
    "a packet under attach": Case(4, 2, "checksum", bucket=2, attach=True),
    "an answer": Case(1, 2, "checksum"),
    "an answer of the last bucket": Case(2 * BUCKETS - 1, 0, "checksum", bucket=BUCKETS - 1, attach=True),
    "a greeting": Case(0, 0, "checksum", good_steps=0),
    "a packet after a greeting": Case(0, 0, "checksum", good_steps=0, occurrence=2),
    "an answer after a greeting": Case(3, 0, "checksum", good_steps=0, occurrence=2, bucket=1),
    "dense floats": Case(2, 0, "checksum", bucket=1, **DENSE),
    "a dense answer": Case(3, 2, "checksum", bucket=1, **DENSE),
    "a sketch": Case(0, 0, "checksum", **SKETCH),
    "the mean of sketches": Case(1, 2, "checksum", **SKETCH),
    "values after a sketch": Case(0, 0, "checksum", occurrence=2, **SKETCH),
    "signs of synchronize()": Case(0, 2, "checksum", **LOCAL, good_steps=15, synchronize=True),
    "an answer of synchronize()": Case(1, 2, "checksum", **LOCAL, good_steps=15, synchronize=True),
    "the mean of values": Case(1, 0, "checksum", occurrence=2, **SKETCH),
    **{f"another {name}": Case(0, 0, name if name != "flags" else "activation", header=name) for name in FIELDS},
    "another step in an answer": Case(1, 2, "step", header="step"),
    "another length of floats": Case(0, 2, "length", header="length", **DENSE),
}
"""Of three ranks."""
NODES = {
    "gradients of the node": Case(0, 0, "checksum", byte=-3),
    "a header of gradients": Case(0, 0, "step", header="step"),
    "answers of the node": Case(1, 0, "checksum"),
    "an answer that is passed on": Case(1, 0, "checksum", byte=-1, sealed_by=3),
    "a packet between nodes": Case(2, 3, "checksum", bucket=1),
    "an answer between nodes": Case(3, 3, "checksum", bucket=1, passed_on_to=(2,)),
    "dense floats between nodes": Case(0, 3, "checksum", **DENSE),
    "gradients before a sketch": Case(0, 0, "checksum", **SKETCH),
    "sketches of the node": Case(0, 0, "checksum", **SKETCH, occurrence=2),
    "signs of synchronize()": Case(0, 3, "checksum", **LOCAL, good_steps=15, synchronize=True),
}
"""Of two nodes of two ranks: rank 0 is in the same node as the sender, rank 3 works on the same slice."""


@pytest.fixture(scope="module")
def flat() -> list[dict[str, Seen]]:
    return run_nodes(live_through_all, 3, 1, FLAT, timeout=MANY_CASES_SECONDS)


@pytest.fixture(scope="module")
def nodes() -> list[dict[str, Seen]]:
    return run_nodes(live_through_all, 2, 2, NODES, timeout=MANY_CASES_SECONDS)


def check(ranks: list[dict[str, Seen]], name: str, case: Case) -> None:
    for rank, of_rank in enumerate(ranks):
        seen = of_rank[name]
        assert seen.raised == "CorruptPacket", f"rank {rank}: {seen.message}"
        assert not seen.moved
        assert seen.again == "CorruptPacket"
        assert seen.lanes == 0
        assert seen.seconds < SOON
        if rank in (case.to, *case.passed_on_to):
            assert seen.message.startswith(case.found), seen.message
        else:
            assert f" refused a packet of step {case.good_steps + 1}" in seen.message


@pytest.mark.parametrize("name", FLAT)
def test_every_rank_refuses_and_none_moves(flat: list[dict[str, Seen]], name: str) -> None:
    check(flat, name, FLAT[name])


@pytest.mark.parametrize("name", NODES)
def test_in_nodes_too(nodes: list[dict[str, Seen]], name: str) -> None:
    check(nodes, name, NODES[name])


def test_a_local_step_is_refused_by_the_node_and_others_hear_when_they_need_it() -> None:
    """What does not leave a node is told to nobody else, until the connections close."""
    assert LOCAL_STEPS[0] == 15
    case = Case(0, 0, "checksum", **LOCAL, good_steps=14)
    ranks = [seen["it"] for seen in run_nodes(live_through_all, 2, 2, {"it": case})]
    assert [seen.raised for seen in ranks] == ["CorruptPacket", "CorruptPacket", "nothing", "nothing"]
    assert [seen.again for seen in ranks] == ["CorruptPacket", "CorruptPacket", "PeerLost", "PeerLost"]
    assert [seen.moved for seen in ranks] == [False, False, True, True]
    assert max(seen.seconds for seen in ranks) < SOON


NODE_OF = {1: 0, 2: 3}
"""By the number of ranks per node, the rank that gets a damaged commit round from the sender."""


def change_commit_round(ranks_a_node: int, apart: int) -> list[Seen]:
    case = Case(2 * BUCKETS, NODE_OF[ranks_a_node], "checksum", byte=5, apart=apart)
    return [seen["it"] for seen in run_nodes(live_through_all, 4 // ranks_a_node, ranks_a_node, {"it": case})]


@pytest.mark.parametrize("ranks_a_node", [1, 2])
def test_one_intact_copy_of_a_commit_round_is_enough(ranks_a_node: int) -> None:
    for seen in change_commit_round(ranks_a_node, packet.HEADER_BYTES * 2):
        assert (seen.raised, seen.moved, seen.again) == ("nothing", True, "nothing"), seen.message


@pytest.mark.parametrize("ranks_a_node", [1, 2])
def test_two_damaged_copies_stop_their_reader_and_then_all_ranks(ranks_a_node: int) -> None:
    """No message can report it: the other ranks fail when connections close, at the latest in the next step."""
    for rank, seen in enumerate(change_commit_round(ranks_a_node, packet.HEADER_BYTES)):
        if rank == NODE_OF[ranks_a_node]:
            assert seen.raised == "CorruptPacket"
            assert seen.message.startswith(f"packet from rank {SENDER} for step 3, bucket {BUCKETS}: checksum is ")
            assert not seen.moved
        assert seen.again in ("CorruptPacket", "PeerLost")
        assert seen.seconds < SOON
        assert seen.lanes == 0
