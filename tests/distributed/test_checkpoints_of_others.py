"""Code that saves `opt.state_dict()` in its own way: with torch.distributed.checkpoint, or on rank 0 only."""

from __future__ import annotations

import copy
import functools
import io
import linecache
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, by_case, digest, each_case, run_nodes, token_loss, token_net
from tests.distributed.stages import STAGES
from tests.harness import run_ranks
from thinwire import checkpoint

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    name: functools.partial(optimizer, lr=0.01, **schedule) for name, (optimizer, schedule) in STAGES.items()
}
for other in (thinwire.Birder, thinwire.CDAdam, thinwire.SketchedAMSGrad, thinwire.DistributedLion):
    OPTIMIZERS[other.__name__] = functools.partial(other, lr=0.01)
CLIPPING: dict[str, Callable[..., Any]] = {"clipping": functools.partial(OPTIMIZERS["Lamb"], clip_norm=0.1)}
"""Its shares of the norm are all that each rank has for itself."""
SAVED_AT, STEPS = 14, 3
ANY_RANKS = ("Birder", "DistributedLion", "Lamb", "SketchedAMSGrad")
"""Those whose state has nothing in it of the part that a rank answers for."""


class Run:
    def __init__(self, name: str, rank: int, **options: Any) -> None:
        self.rank, self.net = rank, token_net()
        self.optimizer = {**OPTIMIZERS, **CLIPPING}[name](self.net.parameters(), **options)

    def train(self, steps: range) -> list[str]:
        replicas = []
        for step in steps:
            token_loss(self.net, self.rank, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            replicas.append(digest(self.net.parameters()))
        return replicas

    def go_on(self, steps: int = STEPS) -> list[str]:
        return self.train(range(SAVED_AT, SAVED_AT + steps))

    def save_dcp(self, path: Path, options: StateDictOptions | None = None) -> None:
        net, optimizer = get_state_dict(self.net, self.optimizer, options=options)
        dcp.save({"net": net, "optimizer": optimizer}, checkpoint_id=path)

    def load_dcp(self, path: Path, options: StateDictOptions | None = None) -> None:
        net, optimizer = get_state_dict(self.net, self.optimizer, options=options)
        states = {"net": net, "optimizer": optimizer}
        dcp.load(states, checkpoint_id=path)
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=states["net"],
            optim_state_dict=states["optimizer"],
            options=options,
        )


def of_rank_zero(run: Run) -> dict[str, Any]:
    """What a trainer saves: the state of rank 0, in a file that all ranks read."""
    buffer = io.BytesIO()
    if run.rank == 0:
        torch.save({"net": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}, buffer)
    files = [buffer.getvalue()]
    dist.broadcast_object_list(files, src=0)
    return torch.load(io.BytesIO(files[0]), weights_only=True)


def shared_entries(optimizer: Any) -> dict[str, str]:
    """The digests of what the state dicts of all ranks have under the same names."""
    saved = optimizer.state_dict()["state"]
    # The anchors of 0/1 Adam are not read while replicas are equal.
    names = [name for name, value in saved[0].items() if not isinstance(value, dict) and name != "anchor"]
    return {name: digest(entries[name] for entries in saved.values()) for name in names}


WAYS = ("nested", "flat", "consolidated", "full")


def resume_in_all_ways(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    first = Run(name, rank)
    first.train(range(SAVED_AT))
    shared = shared_entries(first.optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    first.save_dcp(path / name / "nested")
    first.save_dcp(path / name / "flat", flat)
    first.optimizer.consolidate_state_dict()
    saved = of_rank_zero(first)
    full = [get_optimizer_state_dict(first.net, first.optimizer, options=StateDictOptions(full_state_dict=True))]
    dist.broadcast_object_list(full, src=0)
    runs = {"never stopped": first} | {way: Run(name, rank) for way in WAYS}
    runs["nested"].load_dcp(path / name / "nested")
    runs["flat"].load_dcp(path / name / "flat", flat)
    runs["consolidated"].net.load_state_dict(saved["net"])
    runs["consolidated"].optimizer.load_state_dict(saved["optimizer"])
    runs["full"].net.load_state_dict(saved["net"])
    set_optimizer_state_dict(runs["full"].net, runs["full"].optimizer, full[0])
    return {"shared": shared, **{way: run.go_on() for way, run in runs.items()}}


def assert_exact(results: list[dict[str, Any]]) -> None:
    for name, ranks in by_case(results).items():
        for of_rank in ranks:
            assert of_rank["shared"] == ranks[0]["shared"], name
            assert len(set(of_rank["never stopped"])) == STEPS
            for way in WAYS:
                assert of_rank[way] == of_rank["never stopped"], (name, way)


def test_any_checkpoint_is_exact_with_usual_keys(tmp_path: Path) -> None:
    cases = {name: name for name in (*OPTIMIZERS, *CLIPPING)}
    assert_exact(run_ranks(each_case, 2, resume_in_all_ways, cases, tmp_path, timeout=MANY_CASES_SECONDS))


def test_nodes_too(tmp_path: Path) -> None:
    cases = {name: name for name in ("Birder", "OneBitAdam", "ZeroOneAdam", "CDAdam")}
    assert_exact(run_nodes(each_case, 2, 2, resume_in_all_ways, cases, tmp_path, timeout=MANY_CASES_SECONDS))


def two_process_groups(rank: int, world_size: int, path: Path) -> tuple[list[str], list[str]]:
    """Each has its own model and optimizer, and all are in one checkpoint."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {"process_group": groups[rank % 2]}
    first, second = Run("CDAdam", rank, **options), Run("CDAdam", rank, **options)
    first.train(range(SAVED_AT))
    key = f"net of group {rank % 2}"
    net, optimizer = get_state_dict(first.net, first.optimizer)
    dcp.save({key: net, "optimizer": optimizer}, checkpoint_id=path)
    net, optimizer = get_state_dict(second.net, second.optimizer)
    states = {key: net, "optimizer": optimizer}
    dcp.load(states, checkpoint_id=path)
    second.net.load_state_dict(states[key])
    set_optimizer_state_dict(second.net, second.optimizer, states["optimizer"])
    return first.go_on(), second.go_on()


def test_process_groups_do_not_collide(tmp_path: Path) -> None:
    results = run_ranks(two_process_groups, 4, tmp_path)
    for never_stopped, resumed in results:
        assert resumed == never_stopped
    assert results[0] != results[1]


# Compression ----------------------------------------------------------------------------------------------------------


class CompressedRun:
    def __init__(self, rank: int, compressor: str) -> None:
        self.rank, self.net = rank, token_net()
        self.model = DistributedDataParallel(self.net)
        self.compression = thinwire.compress(self.model, compressor)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def train(self, steps: range) -> list[str]:
        replicas = []
        for step in steps:
            token_loss(self.model, self.rank, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            replicas.append(digest(self.net.parameters()))
        return replicas

    def states(self) -> dict[str, Any]:
        net, optimizer = get_state_dict(self.net, self.optimizer)
        return {"net": net, "optimizer": optimizer, "compression": self.compression}


def compression_as_stateful(rank: int, world_size: int, compressor: str, path: Path) -> list[list[str]]:
    first, second, third = (CompressedRun(rank, compressor) for _ in range(3))
    first.train(range(4))
    dcp.save(first.states(), checkpoint_id=path / compressor)
    first.compression.consolidate_state_dict(to=1)
    saved = [copy.deepcopy(first.compression.state_dict())]
    dist.broadcast_object_list(saved, src=1)
    never_stopped = first.train(range(4, 7))
    for run in (second, third):
        states = run.states()
        dcp.load(states, checkpoint_id=path / compressor)
        net, optimizer = states["net"], states["optimizer"]
        set_state_dict(run.net, run.optimizer, model_state_dict=net, optim_state_dict=optimizer)
    third.compression.load_state_dict(saved[0])
    return [never_stopped, second.train(range(4, 7)), third.train(range(4, 7))]


def test_compression_is_a_stateful(tmp_path: Path) -> None:
    cases = {name: name for name in ("int4", "powersgd")}
    results = by_case(run_ranks(each_case, 2, compression_as_stateful, cases, tmp_path))
    for compressor, ranks in results.items():
        for never_stopped, from_dcp, from_rank_one in ranks:
            assert from_dcp == never_stopped, compressor
            assert from_rank_one == never_stopped, compressor


# Only the state of rank 0 ---------------------------------------------------------------------------------------------


def caught_warnings(action: Callable[[], object], line: str) -> list[str]:
    """What `action` warns of. All warnings are about a line of this file that has `line` in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    for warning in caught:
        assert warning.filename == __file__, f"{warning.filename}: {warning.message}"
        assert line in linecache.getline(__file__, warning.lineno), f"line {warning.lineno}: {warning.message}"
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def rank_zero_for_all(rank: int, world_size: int, name: str) -> tuple[list[str], list[str], list[str]]:
    first, run = Run(name, rank), Run(name, rank)
    first.train(range(SAVED_AT))
    saved = of_rank_zero(first)
    run.net.load_state_dict(saved["net"])
    load = "set_optimizer_state_dict(run.net"
    warned = caught_warnings(lambda: set_optimizer_state_dict(run.net, run.optimizer, saved["optimizer"]), load)
    return first.go_on(), run.go_on(), warned


def test_the_state_of_rank_zero_serves_all() -> None:
    results = run_ranks(each_case, 3, rank_zero_for_all, {name: name for name in ANY_RANKS})
    for name, ranks in by_case(results).items():
        for rank, (never_stopped, resumed, warned) in enumerate(ranks):
            assert len(set(resumed)) == STEPS
            assert resumed == ranks[0][1]
            if name == "Lamb":  # nothing in it is a rank's own
                assert (resumed, warned) == (never_stopped, [])
                continue
            assert resumed != never_stopped
            told = f"RuntimeWarning: the state of rank 0 is loaded on rank {rank}: call consolidate_state_dict() on all"
            assert [warning[: len(told)] for warning in warned] == ([told] if rank else [])


def refuse_rank_zeros(rank: int, world_size: int, name: str) -> None:
    first, run = Run(name, rank), Run(name, rank)
    first.train(range(SAVED_AT))
    saved = of_rank_zero(first)
    before = digest(value for p in run.net.parameters() for value in run.optimizer.state[p].values())
    if rank:
        with pytest.raises(ValueError, match=r"the state of rank 0 is loaded on rank .* call consolidate_state_dict"):
            run.optimizer.load_state_dict(saved["optimizer"])
        assert digest(value for p in run.net.parameters() for value in run.optimizer.state[p].values()) == before


def test_what_a_rank_keeps_of_the_part_that_it_answers_for_is_no_other_ranks() -> None:
    run_ranks(each_case, 3, refuse_rank_zeros, {name: name for name in sorted(OPTIMIZERS.keys() - set(ANY_RANKS))})


def alone_and_together(rank: int, world_size: int) -> dict[str, list[str]]:
    """What each rank is told within two steps, if rank 0 makes state dicts and the others do, or do not."""

    def train_after(name: str, *savers: int) -> list[str]:
        run = Run(name, rank, check_replicas_every=2)

        def action() -> None:
            for _ in range(2):  # one warning is enough
                if rank in savers:
                    run.optimizer.state_dict()
                run.train(range(2))

        return caught_warnings(action, "self.optimizer.step()")

    return {
        "alone": train_after("Birder", 0),
        "all": train_after("Birder", 0, 1, 2),
        "some": train_after("CDAdam", 0, 1),
        "none": train_after("Birder"),
        "nothing of a rank's own": train_after("Lamb", 0),
    }


def consolidated_alone(rank: int, world_size: int) -> list[str]:
    run = Run("Birder", rank, check_replicas_every=1)

    def action() -> None:
        run.train(range(1))
        run.optimizer.consolidate_state_dict()
        of_rank_zero(run)
        run.train(range(1))

    return caught_warnings(action, "")


def test_a_state_that_only_one_rank_saves_is_a_warning() -> None:
    told = by_case(run_ranks(alone_and_together, 3))
    assert [len(of_rank) for of_rank in told["alone"]] == [1, 0, 0]
    assert "state_dict() was called on rank 0, but not on ranks 1, 2" in told["alone"][0][0]
    assert "Call consolidate_state_dict() on all ranks before state_dict()" in told["alone"][0][0]
    assert ["not on rank 2" in warning for of_rank in told["some"] for warning in of_rank] == [True, True]
    for case in ("all", "none", "nothing of a rank's own"):
        assert told[case] == [[], [], []]
    assert run_ranks(consolidated_alone, 2) == [[], []]


# Replicas that differ, other numbers of ranks, and misuse -------------------------------------------------------------


def between_synchronizations(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    runs = {way: Run("ZeroOneAdam", rank) for way in ("consolidated", "synchronized", "saved")}
    for run in runs.values():
        run.train(range(15))  # the last step was a local one
        assert not run.optimizer.is_synchronized
        with pytest.raises(RuntimeError, match=r"state_dict\(\) between two synchronizations of ZeroOneAdam: .*first"):
            run.optimizer.state_dict()
    runs["consolidated"].optimizer.consolidate_state_dict()
    checkpoint.save(path, runs["saved"].net, runs["saved"].optimizer, 15)
    runs["synchronized"].optimizer.synchronize()
    saved = of_rank_zero(runs["consolidated"])
    digests = {way: digest(run.net.parameters()) for way, run in runs.items()}
    digests["model.pt"] = digest(torch.load(path / "000001-step-15" / "model.pt", weights_only=True).values())
    never_stopped = runs["consolidated"].train(range(15, 19))
    resumed = Run("ZeroOneAdam", rank)
    resumed.net.load_state_dict(saved["net"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    return {"digests": digests, "never stopped": never_stopped, "resumed": resumed.train(range(15, 19))}


def test_replicas_that_differ_are_synchronized_before_they_are_saved(tmp_path: Path) -> None:
    results = run_ranks(between_synchronizations, 2, tmp_path)
    assert len({value for of_rank in results for value in of_rank["digests"].values()}) == 1
    for of_rank in results:
        assert of_rank["resumed"] == of_rank["never stopped"]


def save_both_ways(rank: int, world_size: int, name: str, path: Path) -> None:
    run = Run(name, rank)
    for saved_at in (4, 8, SAVED_AT):
        run.train(range(run_step(run), saved_at))
        checkpoint.save(path / name, run.net, run.optimizer, saved_at)
    run.optimizer.consolidate_state_dict()
    if rank == 0:
        torch.save(run.optimizer.state_dict(), path / f"{name}.pt")


def run_step(run: Run) -> int:
    return int(next(iter(run.optimizer.state.values()))["step"])


def load_both_ways(rank: int, world_size: int, name: str, path: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for policy in ("average", "reset"):
        first, second = Run(name, rank), Run(name, rank)
        found = checkpoint.load(path / name, first.net, first.optimizer, on_mismatch=policy)
        assert found is not None
        second.net.load_state_dict(torch.load(found.path / "model.pt", weights_only=True))
        saved = torch.load(path / f"{name}.pt", weights_only=True)
        for load in (
            lambda run=second, saved=saved: checkpoint.load_state_dict(run.optimizer, saved),
            lambda run=second, saved=saved: run.optimizer.load_state_dict(saved),
        ):
            with pytest.raises(ValueError, match=r"is of 3 ranks, this run has 2: .*on_mismatch='average'"):
                load()
        assert not checkpoint.load_state_dict(second.optimizer, saved, on_mismatch=policy)
        results[policy] = (first.go_on(), second.go_on())
    if name != "Lamb":  # nothing in it is a rank's own
        alone = {**saved, "state": {0: {"m": {"rank0": torch.zeros(1)}}}}
        with pytest.raises(
            ValueError, match=r"has the states of ranks \[0\], but on_mismatch='reset' needs those of all 3"
        ):
            checkpoint.load_state_dict(second.optimizer, alone, on_mismatch="reset")
    earlier = Run(name, rank)
    found = checkpoint.load(path / name, earlier.net, earlier.optimizer, on_mismatch="average", step=4)
    assert found is not None
    assert found.step == run_step(earlier) == 4
    with pytest.raises(ValueError, match=r"step=5: .* has no checkpoint of this step; it has 4, 8, 14"):
        checkpoint.load(path / name, earlier.net, earlier.optimizer, step=5)
    with pytest.raises(RuntimeError, match="ranks disagree on the step to load: 4 on rank 0; 8 on rank 1"):
        checkpoint.load(path / name, earlier.net, earlier.optimizer, step=4 + 4 * rank)
    with pytest.raises(ValueError, match=r"step='4': expected the step of a checkpoint"):
        checkpoint.load(path / name, earlier.net, earlier.optimizer, step="4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step=4: .* has no checkpoint of this step; it has none"):
        checkpoint.load(path / "nothing", earlier.net, earlier.optimizer, step=4)
    return results


def test_a_consolidated_state_continues_on_other_ranks_as_a_checkpoint_does(tmp_path: Path) -> None:
    cases = {name: name for name in ("Birder", "OneBitAdam", "CDAdam", "Lamb")}
    run_ranks(each_case, 3, save_both_ways, cases, tmp_path)
    for name, ranks in by_case(run_ranks(each_case, 2, load_both_ways, cases, tmp_path)).items():
        for policies in ranks:
            for policy, (from_checkpoint, from_state_dict) in policies.items():
                assert from_state_dict == from_checkpoint, (name, policy)


def misuses(rank: int, world_size: int) -> None:
    run = Run("CDAdam", rank)
    run.train(range(2))
    with pytest.raises(ValueError, match="to=2: expected a rank, from 0 to 1"):
        run.optimizer.consolidate_state_dict(to=2)
    with pytest.raises(RuntimeError, match=r"ranks disagree on the rank `to` of .*: 0 on rank 0; 1 on rank 1"):
        run.optimizer.consolidate_state_dict(to=rank)
    with pytest.raises(TypeError, match=r"optimizer is torch\.optim\.adamw\.AdamW, expected a thinwire optimizer"):
        checkpoint.load_state_dict(torch.optim.AdamW(run.net.parameters()), {})
    with pytest.raises(TypeError, match="state_dict is list, expected a dict"):
        checkpoint.load_state_dict(run.optimizer, [])  # type: ignore[arg-type]
    # A template that was filled from a file without this rank's state has what the new optimizer had: zeros.
    run.optimizer.consolidate_state_dict(to=1)
    states = [run.optimizer.state_dict()]
    dist.broadcast_object_list(states, src=1)
    for entries in states[0]["state"].values():
        entries["step"]["rank1"] = torch.tensor(0)
    with pytest.raises(ValueError, match="the state dict mixes step 2 of rank 0, step 0 of rank 1"):
        run.optimizer.load_state_dict(states[0])
    # A state dict is consolidated until the state changes.
    counts = [len(run.optimizer.state_dict()["state"][0]["known"])]
    run.train(range(1))
    counts.append(len(run.optimizer.state_dict()["state"][0]["known"]))
    assert counts == [1 + rank, 1]


def test_misuse() -> None:
    run_ranks(misuses, 2)
