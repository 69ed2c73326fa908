"""Schemes that average gradients, on real ranks, against the NumPy oracle of the whole exchange."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed.common import MANY_CASES_SECONDS, by_case, each_case, run_nodes
from tests.oracles import averaging
from tests.oracles.averaging import AveragingOracle, Compress, LaqOracle, SketchedOracle
from thinwire.compressors.chunked_topk import ChunkedTopKScheme
from thinwire.compressors.dct_topk import DctTopKScheme
from thinwire.compressors.gradient_compressor import GradientCompressor, Scheme
from thinwire.compressors.gtopk import GlobalTopKScheme
from thinwire.compressors.laq import LaqScheme
from thinwire.compressors.natural import NaturalScheme
from thinwire.compressors.onebit_sgd import OneBitSGDScheme
from thinwire.compressors.qsgd import QSGDScheme
from thinwire.compressors.randomk import RandomKScheme
from thinwire.compressors.sign import SignScheme
from thinwire.compressors.signsgd import SignSGDScheme
from thinwire.compressors.sketched import CountSketchScheme
from thinwire.compressors.terngrad import TernGradScheme
from thinwire.compressors.topk import TopKScheme
from thinwire.kernels.modes import Scale
from thinwire.transport import packet
from thinwire.transport.buffers import Part
from thinwire.transport.peers import Peers
from thinwire.transport.session import Session
from thinwire.transport.topology import choose

NUMELS = (1500, 1, 0, 130, 700)
BUCKET_MB = 0.004
STEPS = 3
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A scheme, and its oracle, given what `AveragingOracle` takes."""

    scheme: Scheme
    oracle: Callable[..., AveragingOracle]
    residuals: tuple[bool, bool] = (True, True)
    """Whether workers and owners have one."""


def pair(scheme: Scheme, up: Compress, down: Compress, **more: Any) -> Case:
    """A compressor in each direction."""
    residuals = more.get("worker_residual", True), more.get("owner_residual", True)
    return Case(scheme, functools.partial(AveragingOracle, up=up, down=down, **more), residuals)


def same(scheme: Scheme, compress: Compress, **more: Any) -> Case:
    """The same compressor in both directions."""
    return pair(scheme, compress, compress, **more)


def sketched(**options: Any) -> Case:
    return Case(CountSketchScheme(**options), functools.partial(SketchedOracle, **options), (False, False))


NO_MEMORY = {"worker_residual": False, "owner_residual": False}
CASES: dict[str, Case] = {
    "topk": pair(TopKScheme(0.05), averaging.top_k(0.05), averaging.exact, owner_residual=False),
    "topk, dense answers": pair(TopKScheme(0.6), averaging.top_k(0.6), averaging.exact, owner_residual=False),
    "gtopk": same(GlobalTopKScheme(0.05), averaging.top_k(0.05)),
    "randomk": same(RandomKScheme(0.1, seed=5), averaging.random_k(0.1), owner_residual=False, seed=5),
    "chunked_topk": same(ChunkedTopKScheme(k=16), averaging.chunked_top_k(16)),
    "chunked_topk, union": Case(
        ChunkedTopKScheme(k=16, union=True),
        lambda numels, workers, **more: AveragingOracle(
            numels, workers, averaging.chunked_top_k(16), averaging.chunked_top_k(16 * workers), **more
        ),
    ),
    "dct_topk": same(DctTopKScheme(k=16), averaging.dct_top_k(16)),
    "qsgd": same(QSGDScheme(block=96, seed=1), averaging.levels(7, 96, "max"), **NO_MEMORY, seed=1),
    "qsgd, l2, 8 bits": same(QSGDScheme(100, norm="l2"), averaging.levels(100, 512, "l2"), **NO_MEMORY),
    "qsgd, error feedback": same(QSGDScheme(15, block=64, error_feedback=True), averaging.levels(15, 64, "max")),
    "terngrad": same(TernGradScheme(block=64, seed=2), averaging.levels(1, 64, "max"), **NO_MEMORY, seed=2),
    "natural": same(NaturalScheme(seed=3), averaging.natural, **NO_MEMORY, seed=3),
    "natural, error feedback": same(NaturalScheme(error_feedback=True), averaging.natural),
    "sign": same(SignScheme(), averaging.scaled_sign(None)),
    "sign, blocks": same(SignScheme(block=96), averaging.scaled_sign(96)),
    "signsgd": pair(
        SignSGDScheme(0.5, seed=4), averaging.fixed_sign(1.0), averaging.fixed_sign(0.5), **NO_MEMORY, sums=True, seed=4
    ),
    "onebit_sgd": same(OneBitSGDScheme(block=96), averaging.half_means(96)),
    "laq": Case(LaqScheme(), LaqOracle, (False, False)),
    "laq, 3 bits": Case(
        LaqScheme(3, 16, patience=1.0, history=2),
        functools.partial(LaqOracle, bits=3, block=16, patience=1.0, history=2),
        (False, False),
    ),
    "count_sketch": sketched(ratio=0.05, cells=0.4, rows=3, momentum=0.0, seed=6),
    "count_sketch, momentum": sketched(ratio=0.05, cells=0.5, rows=5, momentum=0.5, seed=7),
}


class Encoder:
    """Adds gradients to a compressor."""

    def __init__(self, compressor: GradientCompressor) -> None:
        self._compressor = compressor

    def before_exchange(self) -> None:
        pass

    def encode(self, position: int, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        return self._compressor.encode(part, grad, scale)

    def for_lanes(self) -> Encoder:
        return self


def gradients_of(rank: int, step: int) -> list[Tensor | None]:
    """Tensor 1 is absent everywhere at step 2, and tensor 3 on rank 0 at step 3."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    gradients: list[Tensor | None] = []
    for numel, dtype in zip(NUMELS, DTYPES, strict=True):
        sizes = torch.linspace(0.1, 2.0, numel)[torch.randperm(numel, generator=draw)]
        gradients.append((torch.randn(numel, generator=draw) * sizes).to(dtype))
    if step == 2:
        gradients[1] = None
    if step == 3 and rank == 0:
        gradients[3] = None
    return gradients


def averages(rank: int, world_size: int, named: tuple[str, Scheme]) -> dict[str, Any]:
    """The answers of each step, by tensor; and where this rank's state lies in the flat space."""
    name, scheme = named
    peers = Peers.of(None)
    topology = choose("auto", None, peers)
    session = Session(NUMELS, torch.device("cpu"), peers, topology, bucket_mb=BUCKET_MB)
    compressor = scheme.bind(session.layout, topology.node, session.kernels)
    session.open_channels({"averages": compressor})
    session.connect(name)
    encoder = Encoder(compressor)
    found = []
    for step in range(1, STEPS + 1):
        session.begin_step(step, "averages")
        compressor.begin_step(step)
        gradients = gradients_of(rank, step)
        # Positions are those of the flat space, which has the last tensor first. Ranks may encode in any order.
        for position in sorted(range(len(NUMELS)), key=lambda position: (position * (rank + 2)) % 7):
            grad = gradients[session.layout.slots[position].index]
            session.encode(position, None if grad is None else grad * 2.0, 0.5, encoder)
        assert not session.wait() & packet.NONFINITE
        compressor.read_answers()
        answers = [torch.full((n,), torch.nan) for n in NUMELS]
        for slot, parts in zip(session.layout.slots, session.channel.buffers.parts, strict=True):
            for part in parts:
                compressor.decode(part, answers[slot.index])
        found.append([answer.numpy() for answer in answers])
    layout, owned = session.layout, session.layout.owned_by(topology.node)
    own = [range(b.own_start, b.own_start + b.slice_elements) for b in layout.buckets]
    held = [b.start + owned.start * b.shard_elements for b in layout.buckets]
    state = compressor.state()
    result = {
        "answers": found,
        "own": np.concatenate([np.asarray(elements) for elements in own]),
        "owned": np.concatenate(
            [np.arange(at, at + b.shard_elements) for at, b in zip(held, layout.buckets, strict=True)]
        ),
        "node": topology.node,
        "bucket_elements": int(BUCKET_MB * 2**20 / 4),
        "residual": state.own["residual"].numpy().copy() if "residual" in state.own else None,
        "answer_residual": state.owned["answer_residual"].numpy().copy() if "answer_residual" in state.owned else None,
        "contraction": compressor.contraction(),
    }
    session.disconnect()
    return result


def of_nodes(nodes: int, ranks: int, step: int) -> list[list[np.ndarray | None]]:
    """The mean of each node's gradients, by tensor; None where no rank of it has one."""
    of_ranks = [gradients_of(rank, step) for rank in range(nodes * ranks)]
    means: list[list[np.ndarray | None]] = []
    for node in range(nodes):
        members = of_ranks[node * ranks : (node + 1) * ranks]
        mean: list[np.ndarray | None] = []
        for numel, *tensors in zip(NUMELS, *members, strict=True):
            arrays = [np.zeros(numel) if tensor is None else tensor.double().numpy() for tensor in tensors]
            mean.append(None if all(tensor is None for tensor in tensors) else np.add.reduce(arrays) / ranks)
        means.append(mean)
    return means


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 1), (3, 1), (2, 2)], ids=["1", "2", "3", "2x2"])
def test_averages_and_residuals_are_those_of_the_oracle(nodes: int, ranks: int) -> None:
    schemes = {name: (name, case.scheme) for name, case in CASES.items()}
    results = run_nodes(each_case, nodes, ranks, averages, schemes, timeout=MANY_CASES_SECONDS)
    for name, of_ranks in by_case(results).items():
        _compare(name, CASES[name], of_ranks, nodes, ranks)


def _compare(name: str, case: Case, of_ranks: list[dict[str, Any]], nodes: int, ranks: int) -> None:
    close: Callable[..., None] = np.testing.assert_allclose
    oracle = case.oracle(NUMELS, nodes, slices=ranks, bucket_elements=of_ranks[0]["bucket_elements"])
    assert len(oracle.shards) > nodes * ranks, "several buckets"
    for step in range(1, STEPS + 1):
        expected = oracle.step(of_nodes(nodes, ranks, step))
        for rank, found in enumerate(of_ranks):
            for index, (wanted, answer) in enumerate(zip(expected, found["answers"][step - 1], strict=True)):
                where = f"{name}, rank {rank}, step {step}, tensor {index}"
                close(answer, wanted, rtol=2e-5, atol=2e-6, err_msg=where)
                assert np.array_equal(answer, of_ranks[0]["answers"][step - 1][index]), where
    for rank, found in enumerate(of_ranks):
        where = f"{name}, rank {rank}"
        if found["residual"] is not None:
            residual = oracle.residuals[found["node"]][found["own"]]
            close(found["residual"], residual, rtol=2e-5, atol=2e-6, err_msg=where)
        if found["answer_residual"] is not None:
            residual = oracle.answer_residual[found["owned"]]
            close(found["answer_residual"], residual, rtol=2e-5, atol=2e-6, err_msg=where)
        if ranks == 1:
            lost = math.nan if isinstance(oracle, SketchedOracle) else oracle.lost[rank]
            close(found["contraction"], lost, rtol=1e-4, err_msg=where)
        assert (found["residual"] is not None, found["answer_residual"] is not None) == case.residuals
