"""What every compressor of `thinwire.compress` must do, whatever its paper. A new one is a line in `COMPRESSORS`.

Each law runs all compressors one after another in the same processes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.conformance.test_conformance import CLASSES, FEATURES, LEARNT, STEPS, classification
from tests.distributed.averaging_runs import Averaging, train
from tests.distributed.common import MANY_CASES_SECONDS, digest, named, run_nodes, token_loss, token_net
from tests.instruction_sets import instruction_sets
from tests.saved_states import of_one_rank
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import NAMES, SCHEMES, rule_of


@dataclass(frozen=True)
class Entry:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.02
    """A learning rate of AdamW at which it learns the small classification within 150 steps."""
    learns: bool = True
    """False if the task, of 105 parameters, is too small: a sketch of so few has no large elements."""

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


COMPRESSORS = [
    Entry("int4"),
    Entry("int4", {"error_feedback": False}),
    Entry("int4", {"block": 16, "residual_dtype": torch.bfloat16}),
    Entry("int8"),
    Entry("int3"),
    Entry("int2"),
    Entry("int1"),
    Entry("sign"),
    Entry("onebit_sgd"),
    Entry("signsgd"),
    Entry("qsgd"),
    Entry("qsgd", {"levels": 15, "norm": "l2", "block": 64, "error_feedback": True}),
    Entry("terngrad"),
    Entry("natural"),
    Entry("topk", {"ratio": 0.1}),
    Entry("gtopk", {"ratio": 0.1}),
    Entry("chunked_topk"),
    Entry("dct_topk", {"k": 64}),
    Entry("randomk", {"ratio": 0.2}, lr=0.04),
    Entry("count_sketch", {"cells": 0.5, "ratio": 0.1}, learns=False),
    Entry("laq"),
    Entry("laq", {"bits": 8, "block": 16, "patience": 0.4, "history": 3}, learns=False),
    Entry("powersgd", {"rank": 2}),
    Entry("powersgd", {"error_feedback": False}),
    Entry("none"),
]
FLAT_AND_LONG_GRIDS = pytest.mark.parametrize(
    ("nodes", "ranks"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)], ids=["2", "2x2"]
)
GRIDS = pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)], ids=["2", "2x2"])


def test_every_compressor_is_in_the_table() -> None:
    assert {entry.name for entry in COMPRESSORS} == set(NAMES)


def each_compressor(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    results = {}
    for entry in COMPRESSORS:
        with named(str(entry)):
            results[str(entry)] = function(rank, world_size, entry, *args)
    return results


def run_each(function: Callable[..., Any], nodes: int, ranks: int, *args: Any) -> dict[str, list[Any]]:
    """What each rank returned, by compressor."""
    of_ranks = run_nodes(each_compressor, nodes, ranks, function, *args, timeout=2 * MANY_CASES_SECONDS)
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


# Learning -------------------------------------------------------------------------------------------------------------


def learn(rank: int, world_size: int, entry: Entry) -> tuple[float, str]:
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, CLASSES)
    model = DistributedDataParallel(net)
    _ = thinwire.compress(model, entry.name, **entry.options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=entry.lr)
    inputs, labels = classification(rank, world_size)
    losses = []
    for step in range(STEPS):
        batch = torch.arange(step * 32, step * 32 + 32) % len(inputs)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(np.mean(losses[-10:])), digest(net.parameters())


@FLAT_AND_LONG_GRIDS
def test_learns_with_adamw_and_replicas_stay_equal(nodes: int, ranks: int) -> None:
    outcomes = run_each(learn, nodes, ranks)
    too_high = {
        str(entry): [loss for loss, _ in outcomes[str(entry)]]
        for entry in COMPRESSORS
        if entry.learns and max(loss for loss, _ in outcomes[str(entry)]) > LEARNT
    }
    assert not too_high
    for name, of_ranks in outcomes.items():
        assert len({parameters for _, parameters in of_ranks}) == 1, name


# The same bits --------------------------------------------------------------------------------------------------------


def on_each_backend(rank: int, world_size: int, entry: Entry) -> dict[str, list[tuple[str, str]]]:
    run = Averaging(entry.name, entry.options, ddp={}, steps=3)
    backends = [{"THINWIRE_KERNELS": "reference"}, *({"THINWIRE_ISA": isa} for isa in instruction_sets())]
    return {str(backend): train(rank, world_size, replace(run, environment=backend)) for backend in backends}


def test_all_backends_and_instruction_sets_give_the_same_bits() -> None:
    for name, of_ranks in run_each(on_each_backend, 2, 1).items():
        records = list(itertools.chain.from_iterable(of_rank.values() for of_rank in of_ranks))
        assert all(record == records[0] for record in records), name


def resume(rank: int, world_size: int, entry: Entry) -> tuple[list[str], list[str]]:
    """The gradients of six backward passes, and of two runs of three, of which the second one continues."""

    def run(first: int, last: int, state: dict[str, Any] | None) -> tuple[list[str], dict[str, Any]]:
        net = token_net()
        model = DistributedDataParallel(net)
        handle = thinwire.compress(model, entry.name, bucket_mb=0.01, **entry.options)
        if state is not None:
            handle.load_state_dict(state)
        digests = []
        for step in range(first, last):
            token_loss(model, rank, step).backward()
            digests.append(digest(p.grad for p in net.parameters() if p.grad is not None))
            model.zero_grad()
        return digests, handle.state_dict()

    straight, _ = run(0, 6, None)
    before, state = run(0, 3, None)
    return straight, before + run(3, 6, state)[0]


@FLAT_AND_LONG_GRIDS
def test_a_loaded_state_continues_to_the_bit(nodes: int, ranks: int) -> None:
    for name, of_ranks in run_each(resume, nodes, ranks).items():
        for straight, resumed in of_ranks:
            assert straight == resumed, name
        assert len({tuple(straight) for straight, _ in of_ranks}) == 1, name


# Numbers that are not finite ------------------------------------------------------------------------------------------


def one_bad_step(rank: int, world_size: int, entry: Entry) -> list[tuple[bool, str]]:
    """Per step, whether all gradients are finite, and their digest; at step 1 the last rank has a NaN."""
    net = token_net()
    model = DistributedDataParallel(net)
    handle = thinwire.compress(model, entry.name, **entry.options)
    seen = []
    for step in range(4):
        loss = token_loss(model, rank, step)
        (loss * math.nan if step == 1 and rank == world_size - 1 else loss).backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        assert len({bool(grad.isfinite().all()) for grad in grads}) == 1
        seen.append((bool(grads[0].isfinite().all()), digest(grads)))
        model.zero_grad()
    assert (handle.metrics().steps, handle.metrics().skipped_steps) == (4, 1)
    for entries in of_one_rank(handle.state_dict())["state"].values():
        for tensor in entries.values():
            assert tensor.isfinite().all()
    return seen


@GRIDS
def test_a_nan_on_one_rank_reaches_all_and_no_residual(nodes: int, ranks: int) -> None:
    for name, (first, *others) in run_each(one_bad_step, nodes, ranks).items():
        assert [finite for finite, _ in first] == [True, False, True, True], name
        assert all(other == first for other in others), name


# Bytes ----------------------------------------------------------------------------------------------------------------

ELEMENTS = 327_680
"""Whole chunks of the chunked top-k, with two shards."""


def send(rank: int, world_size: int, entry: Entry) -> tuple[float, float]:
    """The bits per parameter that a rank sends in an exchange, and the fraction of its message that was lost."""
    p = nn.Parameter(torch.zeros(ELEMENTS))
    averager = GradientAverager([p], rule_of(entry.name, entry.options))
    draw = torch.Generator().manual_seed(rank)
    for _ in range(2):
        averager.begin()
        averager.add(p, torch.randn(ELEMENTS, generator=draw))
        averager.finish()
    metrics = averager.metrics()
    averager.close()
    return 8 * metrics.bytes_sent / ELEMENTS / metrics.steps, metrics.contraction


def test_bytes_are_those_of_the_formula() -> None:
    workers = 2
    outcomes = run_each(send, workers, 1)
    for entry in COMPRESSORS:
        if entry.name not in SCHEMES:
            continue
        up, down = SCHEMES[entry.name](**entry.options).bits_per_value(workers)
        # To each of the other workers, the packets of its shard up, and the answer for the own shard down.
        expected = (up + down) * (workers - 1) / workers
        for sent, _ in outcomes[str(entry)]:
            assert sent == pytest.approx(expected, rel=0.02), entry
