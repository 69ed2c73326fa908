"""What is refused on one rank changes nothing on any: with the ranks that saved, and with others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.test_conformance import OPTIMIZERS, Entry
from tests.distributed.checkpoint_runs import Case
from tests.distributed.checkpoint_runs import Run as AttachedRun
from tests.distributed.common import named
from tests.harness import run_ranks
from tests.refusals import OF_RANK_ZERO, REFUSALS, Run
from thinwire import checkpoint

SAVED_AT, STEPS = 21, 4
"""Replicas of 0/1 Adam differ by then."""
NAME = f"000001-step-{SAVED_AT}"
SECONDS = 110.0


def truncate(directory: Path, rank: int) -> None:
    os.truncate(directory / f"rank-{rank:05d}.pt", 100)


CHOSEN = (
    "another class of the state",
    "a buffer of another shape",
    "a buffer of another dtype",
    "the state has another shape",
    "the state is truncated",
    "a rate of another type",
    "a negative step",
    "counters that are not finite",
    "a random state of zeros",
)
SPOILED: dict[str, Callable[[Path, int], None]] = {
    **{name: REFUSALS[name] for name in CHOSEN},
    "a file is truncated": truncate,
}


def spoil(path: Path, refusal: str, rank: int, spoiled_rank: int) -> Path:
    """A copy of a checkpoint that must be refused; made by rank 0 for all."""
    bad = path / refusal.replace(" ", "-")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(path / "good" / NAME, bad / NAME)
        SPOILED[refusal](bad / NAME, spoiled_rank)
    dist.barrier()
    return bad


def fail_in_a_module(run: Run) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        torch.rand(1)
        raise LookupError("a hook has failed")

    handle = run.net.scaled.register_load_state_dict_pre_hook(fail)


def fail_in_the_optimizer(run: Run) -> None:
    def fail(_: Any) -> None:
        handle.remove()
        raise LookupError("a hook has failed")

    handle = run.optimizer.register_load_state_dict_post_hook(fail)


BREAKS = (fail_in_a_module, fail_in_the_optimizer)


each_set_of_entries = pytest.mark.parametrize(
    "entries",
    [
        pytest.param([entry for entry in OPTIMIZERS if not entry.variant], id="optimizers"),
        pytest.param([entry for entry in OPTIMIZERS if entry.variant], id="variants", marks=pytest.mark.long),
    ],
)


def save(rank: int, world_size: int, path: Path, entries: Sequence[Entry]) -> None:
    for entry in entries:
        run = Run(entry, rank=rank).train(SAVED_AT)
        checkpoint.save(path / str(entry) / "good", run.net, run.optimizer, SAVED_AT)


def go_on(run: Run, path: Path, options: dict[str, Any]) -> dict[str, str]:
    """What becomes of a run that goes on from the checkpoint; some of which is about what was before, or no matter."""
    found = run.load(path / "good", **options)
    assert found is not None
    if not found.exact:
        run.seed(9)  # random states stay as they were
    return {**run.train(STEPS).now(), "defaults": ""}


def refuse_each(
    rank: int,
    world_size: int,
    path: Path,
    entries: Sequence[Entry],
    options: dict[str, Any],
    refusals: Sequence[str],
) -> int:
    """How many times something was refused."""
    times = 0
    for entry in entries:
        of_entry = path / str(entry)
        with named(str(entry)):
            end = go_on(Run(entry, seed=3, rank=rank), of_entry, options)
            for refusal in refusals:
                with named(refusal):
                    # Of the model other ranks take what rank 0 had.
                    spoiled_rank = 0 if options and refusal in OF_RANK_ZERO else 1
                    bad = spoil(of_entry, refusal, rank, spoiled_rank)
                    run = Run(entry, seed=5, rank=rank).train(3)
                    run.optimizer.synchronize()
                    told = run.refuse(bad, **options)
                    assert told.startswith("CorruptCheckpoint") == (refusal == "a file is truncated")
                    if not options:
                        assert "rank 1: " in told
                    assert go_on(run, of_entry, options) == end
                    times += 1
            for broken in BREAKS:
                with named(broken.__name__):
                    run = Run(entry, seed=5, rank=rank).train(3)
                    if rank == world_size - 1:
                        broken(run)
                    assert "LookupError: a hook has failed" in run.refuse(of_entry / "good", **options)
                    assert go_on(run, of_entry, options) == end
                    times += 1
    return times


@each_set_of_entries
def test_the_file_of_one_rank_is_refused_by_all(entries: Sequence[Entry], tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, entries, timeout=SECONDS)
    times = len(entries) * (len(SPOILED) + len(BREAKS))
    assert run_ranks(refuse_each, 2, tmp_path, entries, {}, tuple(SPOILED), timeout=SECONDS) == [times] * 2


OF_OTHERS = (
    "another class of the state",
    "a buffer of another shape",
    "the state is truncated",
    "counters that are not finite",
    "a file is truncated",
)


@each_set_of_entries
@pytest.mark.parametrize(("ranks", "how"), [(1, "reset"), (3, "average")])
def test_other_ranks_check_the_states_of_all_that_saved(
    ranks: int, how: str, entries: Sequence[Entry], tmp_path: Path
) -> None:
    run_ranks(save, 2, tmp_path, entries, timeout=SECONDS)
    times = len(entries) * (len(OF_OTHERS) + len(BREAKS))
    options = {"on_mismatch": how}
    assert run_ranks(refuse_each, ranks, tmp_path, entries, options, OF_OTHERS, timeout=SECONDS) == [times] * ranks


# Between backward and step() -----------------------------------------------------------------------------------------


def load_in_the_middle_of_a_step(rank: int, world_size: int, path: Path) -> list[str]:
    """Gradients are on their way when a checkpoint is to be loaded; what comes of the step, with and without it."""
    ends = []
    for disturbed in (False, True):
        run = AttachedRun(Case(attach=True), rank)
        run.train(2)
        if not disturbed:
            run.save(path)
        run.train(1)
        run.loss(torch.arange(16) + rank).backward()
        if disturbed:
            with pytest.raises(RuntimeError, match=r"between backward and step\(\)"):
                run.load(path)
        run.optimizer.step()
        run.optimizer.zero_grad()
        ends.append(run.now())
    return ends


def test_nothing_is_loaded_in_the_middle_of_a_step(tmp_path: Path) -> None:
    for undisturbed, disturbed in run_ranks(load_in_the_middle_of_a_step, 2, tmp_path):
        assert undisturbed == disturbed


# When a load fails after it has begun ---------------------------------------------------------------------------------


def fail_while_loading(rank: int, world_size: int, path: Path) -> list[str]:
    """Rank 1 fails when the others have loaded; all go back, and go on as if nothing had been tried."""
    ends = []
    for disturbed in (False, True):
        run = AttachedRun(Case(attach=True), rank)
        run.train(2)
        if not disturbed:
            run.save(path)
        run.train(1)
        if disturbed:
            if rank == 1:
                run.optimizer.register_load_state_dict_pre_hook(_fail)
            with pytest.raises(ValueError, match="a hook has failed"):
                run.load(path)
        run.train(2)
        ends.append(run.now())
    return ends


def _fail(*_: Any) -> None:
    raise LookupError("a hook has failed")


def test_ranks_agree_again_after_a_load_that_failed_on_one(tmp_path: Path) -> None:
    for undisturbed, disturbed in run_ranks(fail_while_loading, 2, tmp_path):
        assert undisturbed == disturbed
