"""`state_dict()` and `load_state_dict()` of what `thinwire.compress` returns, and what they refuse."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import in_nodes
from tests.distributed.compressed_runs import Case, Run
from tests.distributed.reshard_cases import packed, unpacked
from tests.forked import Run as ForkedRun
from tests.forked import run_to_the_end
from tests.harness import run_ranks
from tests.saved_states import of_one_rank
from thinwire.averaging.handle import Compression

State = dict[str, Any]


def load_between_backward_passes(rank: int, world_size: int, case: Case) -> tuple[list[str], list[str]]:
    """What a run comes to, and what it comes to when it returns to an earlier state."""
    run = Run(case, rank)
    run.train(2)
    everything = (run.net, run.optimizer, run.compression, run.schedule, run.scaler)
    # Through a file: a state dict has the memory of the run.
    saved = [packed(each.state_dict()) for each in everything]
    random_states = torch.get_rng_state(), random.getstate()
    steps = run.train(3)
    run.backward()
    for each, state in zip(everything, saved, strict=True):
        each.load_state_dict(unpacked(state))
    torch.set_rng_state(random_states[0])
    random.setstate(random_states[1])
    run.optimizer.zero_grad()
    return steps, run.train(3)


@pytest.mark.parametrize(("world_size", "ranks_a_node"), [(1, 1), (2, 1), (4, 2)], ids=["1", "2", "2x2"])
def test_loading_between_backward_passes(world_size: int, ranks_a_node: int) -> None:
    case = Case(scaled=True)
    for steps, again in run_ranks(in_nodes, world_size, ranks_a_node, load_between_backward_passes, case):
        assert again == steps
        assert len(set(steps)) == len(steps)


# What is refused -----------------------------------------------------------------------------------------------------


def other_model() -> Compression:
    torch.manual_seed(0)
    return thinwire.compress(DistributedDataParallel(nn.Linear(3, 2)), "int4", bucket_mb=1.0)


def attempts(rank: int, world_size: int, saved: list[list[bytes]]) -> dict[str, str]:
    """What is raised, or warned, by state dicts; `saved` has those of 2 flat ranks, and of 2 nodes of 2."""
    run = Run(Case(), rank)
    run.train(1)
    before = run.now()

    def attempt(compression: Compression, state: Any) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                compression.load_state_dict(state)
            except (TypeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
        (warning,) = caught
        return f"{warning.category.__name__}: {warning.message}"

    own, flat, paired = of_one_rank(run.compression.state_dict()), *([unpacked(one) for one in of] for of in saved)

    def altered(change: Callable[[State], object]) -> State:
        state = copy.deepcopy(own)
        change(state)
        return state

    refused = {
        "not a dict": attempt(run.compression, [own]),
        "another optimizer": attempt(run.compression, run.optimizer.state_dict()),
        "a thinwire optimizer": attempt(run.compression, thinwire.Birder(run.net.parameters()).state_dict()),
        "another rank": attempt(run.compression, flat[1 - rank]),
        "other ranks": attempt(run.compression, paired[rank]),
        "another model": attempt(other_model(), own),
        "another shape": attempt(run.compression, altered(lambda s: s["state"][0].update(residual=torch.zeros(3)))),
        "not finite": attempt(run.compression, altered(lambda s: s["state"][0]["residual"].fill_(torch.nan))),
        "another compressor": attempt(Run(Case("none"), rank).compression, own),
    }
    assert run.now() == before
    loaded = {
        "another number of bits": attempt(Run(Case("int8"), rank).compression, own),
        "another block": attempt(Run(replace(Case(), options={"block": 32}), rank).compression, own),
    }
    run.train(1)  # it still works
    return refused | loaded


TOLD = {
    "not a dict": "TypeError: state_dict is list, expected a dict, as state_dict() returns it",
    "another optimizer": "ValueError: the state dict is of another optimizer, this is thinwire.compress",
    "a thinwire optimizer": "ValueError: the state dict is of Birder, this is thinwire.compress",
    "another rank": "thinwire.compress keeps state for the shards that a rank owns, and each rank owns different ",
    "other ranks": "ValueError: the state dict is of 4 ranks, this run has 2: each rank has its own state",
    "another model": "ValueError: the state dict has parameter groups of [5] parameters, this compression of [2]",
    "another shape": "ValueError: parameter 0: 'residual' is (3,) of torch.float32 in the state dict, this compression "
    "needs (20, 13) of torch.float32",
    "not finite": "ValueError: parameter 0: 'residual' in the state dict has values that are not finite",
    "another compressor": "ValueError: parameter 0: the state dict has ['answer_residual', 'loss_scale', 'residual', "
    "'step'], this compression keeps ['loss_scale', 'step']. Was the state saved with another compressor?",
    "another number of bits": "RuntimeWarning: the state was saved with the compressor=int4, … this compression has "
    "the compressor=int8, … Training continues, but not as if it had never stopped.",
    "another block": "RuntimeWarning: the state was saved with the compressor=int4, … block=64, … this compression has "
    "the compressor=int4, … block=32, ",
}
"""What each message has, in this order."""


def state_after_a_step(rank: int, world_size: int) -> bytes:
    run = Run(Case(), rank)
    run.train(1)
    return packed(run.compression.state_dict())


def test_what_is_refused_and_what_is_warned_about() -> None:
    saved = [run_ranks(state_after_a_step, 2), run_ranks(in_nodes, 4, 2, state_after_a_step)]
    for of_rank in run_ranks(attempts, 2, saved):
        assert of_rank.keys() == TOLD.keys()
        for attempt, told in of_rank.items():
            assert re.search(".*".join(map(re.escape, TOLD[attempt].split("…"))), told), f"{attempt}: {told}"


def refuse_another_topology(rank: int, world_size: int, state: bytes) -> str:
    run = Run(Case(), rank)
    with pytest.raises(ValueError, match="topology") as refusal:
        run.compression.load_state_dict(unpacked(state))
    return str(refusal.value)


def test_another_topology_is_refused() -> None:
    (state, *_) = run_ranks(in_nodes, 4, 2, state_after_a_step)
    for told in run_ranks(refuse_another_topology, 4, state):
        assert told.startswith("the state dict is of topology 2 nodes of 2 ranks, this compression has flat")


def load_the_state_of_rank_0(rank: int, world_size: int, saved: bytes) -> str:
    run = Run(Case("topk"), rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.compression.load_state_dict(unpacked(saved))
    run.train(1)
    return " ".join(str(warning.message) for warning in caught)


def state_of_topk(rank: int, world_size: int) -> bytes:
    return packed(Run(Case("topk"), rank).compression.state_dict())


def test_state_without_owners_is_loaded_by_any_rank_with_a_warning() -> None:
    saved = run_ranks(state_of_topk, 2)[0]
    first, second = run_ranks(load_the_state_of_rank_0, 2, saved)
    assert not first
    assert second.startswith("the state of rank 0 is loaded on rank 1: call consolidate_state_dict() on all ranks")


def load_alone(rank: int, world_size: int) -> tuple[str, str]:
    run = Run(Case(), rank)
    run.train(1)
    saved = packed(run.compression.state_dict())
    run.train(1)
    if rank == 1:
        run.compression.load_state_dict(unpacked(saved))
    with pytest.raises(RuntimeError) as raised:
        run.backward()
    return raised.type.__name__, str(raised.value)


def test_one_rank_that_loads_alone_is_an_error_on_all() -> None:
    # The group would notice later than the deadline, which leaves a busy machine time to start the ranks.
    (ended,) = run_to_the_end([ForkedRun(load_alone, 2, timeout=120.0, deadline=100.0, in_haste=True)])
    assert [rank.status for rank in ended] == [0, 0], ended
    (kind, told), (other_kind, other) = (rank.report for rank in ended)
    assert (kind, other_kind) == ("PeerLost", "PeerLost")
    assert "load_state_dict()" in told or "caused pair closure" in told, told
    assert "the agreement of all ranks" in other


def load_different(rank: int, world_size: int) -> str:
    run = Run(Case(), rank)
    run.train(1)
    saved = packed(run.compression.state_dict())
    run.train(1)
    run.compression.load_state_dict(unpacked(saved) if rank == 1 else run.compression.state_dict())
    with pytest.raises(RuntimeError, match="disagree") as raised:
        run.backward()
    return str(raised.value)


def test_ranks_that_load_different_states_disagree() -> None:
    for told in run_ranks(load_different, 2):
        assert "ranks disagree on the number of steps taken: 2 on rank 0; 1 on rank 1" in told


def use_after_close(rank: int, world_size: int) -> str:
    run = Run(Case(), rank)
    run.train(1)
    run.compression.close()
    assert run.compression.state_dict()["state"]
    with pytest.raises(RuntimeError, match="closed") as raised:
        run.backward()
    return str(raised.value)


def test_a_closed_compression_still_has_its_state() -> None:
    for told in run_ranks(use_after_close, 2):
        assert told == (
            "this thinwire.compress is closed: make a new one, and load the state_dict() of this one. Call "
            "thinwire.detach(model) first, if a model was given to thinwire.attach or thinwire.compress"
        )
