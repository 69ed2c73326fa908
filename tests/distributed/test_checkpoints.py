"""thinwire.checkpoint between ranks: law 7, one directory or many, and what goes wrong on one rank heard by all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.distributed.checkpoint_runs import ZERO_ONE, Case, Run, listed
from tests.distributed.common import in_nodes
from tests.distributed.stages import WARM_UP
from tests.forgeries import Malicious, forge
from tests.harness import run_ranks, run_ranks_expecting_errors
from thinwire import checkpoint

# Law 7 ---------------------------------------------------------------------------------------------------------------


def stop_and_resume(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    first = Run(case, rank)
    first.train(case.saved_at)
    synchronized = [first.optimizer.is_synchronized]
    first.save(path)
    replica = first.replica()
    synchronized.append(first.optimizer.is_synchronized)
    never_stopped = first.train(case.steps)
    second = Run(case, rank, seed=99, loads=True)
    found = second.load(path)
    assert found is not None
    resumed = second.train(case.steps)
    return {
        "states": (first.state(), second.state()),
        "synchronized": synchronized,
        "replica": replica,
        "never_stopped": never_stopped,
        "loaded": (found.path, found.step, found.extra["rank"], found.exact),
        "resumed": resumed,
    }


CASES = {
    "birder": Case(),
    "birder, attached": Case(attach=True),
    "birder, loaded before attach": Case(attach=True, load_before_attach=True),
    "birder, delayed, attached": Case(options={"delay": 1}, attach=True),
    "birder, bfloat16": Case(dtype=torch.bfloat16),
    "birder, bfloat16, attached": Case(dtype=torch.bfloat16, attach=True),
    "0/1 adam": Case(thinwire.ZeroOneAdam, ZERO_ONE, saved_at=16, steps=6),
    "0/1 adam, apart": Case(thinwire.ZeroOneAdam, ZERO_ONE, saved_at=20, steps=6),
    "0/1 adam, apart, attached": Case(thinwire.ZeroOneAdam, ZERO_ONE, attach=True, saved_at=20, steps=6),
    "0/1 adam, apart, bfloat16": Case(thinwire.ZeroOneAdam, ZERO_ONE, dtype=torch.bfloat16, saved_at=20, steps=6),
    "cd-adam": Case(thinwire.CDAdam),
    "cd-adam, delayed, attached": Case(thinwire.CDAdam, {"delay": 1}, attach=True),
    "cd-adam, top-k, delayed": Case(thinwire.CDAdam, {"delay": 1, "codec": "topk", "ratio": 0.1}),
    "lamb, delayed, attached": Case(thinwire.Lamb, {"delay": 1}, attach=True),
    "1-bit lamb, delayed": Case(thinwire.OneBitLamb, {**WARM_UP, "delay": 1, "lr": 0.02}, saved_at=12),
    "sketched amsgrad": Case(thinwire.SketchedAMSGrad),
}


GRIDS = {"1": (1, 1), "3": (3, 1), "2x2": (2, 2)}
PLACES = [
    ("1", "birder"),
    *[("3", case) for case in CASES],
    *[
        ("2x2", case)
        for case in (
            "birder, attached",
            "0/1 adam, apart, attached",
            "0/1 adam",
            "cd-adam",
            "cd-adam, delayed, attached",
        )
    ],
]


@pytest.mark.parametrize(("grid", "case"), PLACES)
def test_resuming_is_never_having_stopped(grid: str, case: str, tmp_path: Path) -> None:
    nodes, ranks = GRIDS[grid]
    outcomes = run_ranks(in_nodes, nodes * ranks, ranks, stop_and_resume, CASES[case], tmp_path)
    final = tmp_path / f"000001-step-{CASES[case].saved_at}"
    for rank, outcome in enumerate(outcomes):
        assert outcome["resumed"] == outcome["never_stopped"]
        assert outcome["states"][0] == outcome["states"][1]
        assert len(set(outcome["resumed"])) == CASES[case].steps
        assert outcome["loaded"] == (final, CASES[case].saved_at, rank, True)
        delayed = "delayed" in case
        assert outcome["synchronized"] == ["apart" not in case and not delayed, not delayed]
    # Between synchronisations replicas differ. They are made equal before they are saved.
    assert len({outcome["replica"] for outcome in outcomes}) == 1


def test_the_directory_is_as_documented(tmp_path: Path) -> None:
    run_ranks(in_nodes, 4, 2, stop_and_resume, CASES["birder"], tmp_path)
    (path,) = (tmp_path / name for name in listed(tmp_path))
    assert (tmp_path / ".lock").is_file()
    files = ["model.pt", *(f"rank-0000{rank}.pt" for rank in range(4))]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *files]
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest.pop("files")) == files
    del manifest["sha256"]
    assert manifest == {
        "format": 1,
        "thinwire": thinwire.__version__,
        "step": 3,
        "optimizer": "Birder",
        "world_size": 4,
        "nodes": [[0, 1], [2, 3]],
        "bucket_mb": None,
    }


# Damage --------------------------------------------------------------------------------------------------------------


def save_twice(rank: int, world_size: int, path: Path) -> list[str]:
    run, seen = Run(Case(), rank), []
    for _ in range(2):
        run.train(1)
        run.save(path)
        seen.append(run.now())
    return seen


def load(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> tuple[str, str, list[str]]:
    run = Run(Case(), rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run.load(path, **options)
    assert found is not None
    return run.now(), found.path.name, [f"{w.category.__name__}: {w.message}" for w in caught]


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def alter(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def be_malicious(path: Path) -> None:
    contents = torch.load(path, weights_only=True)
    contents["optimizer"] = Malicious(path.parents[2] / "touched")
    forge(path.parent, path.name, contents)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("rank-00001.pt", truncate, "has 100 bytes"),
        ("rank-00001.pt", alter, "has been altered"),
        ("rank-00001.pt", Path.unlink, "is missing"),
        ("rank-00001.pt", be_malicious, "is rejected by torch.load(weights_only=True)"),
        ("model.pt", alter, "has been altered"),
        ("manifest.json", truncate, "is not JSON"),
    ],
)
def test_damage_is_heard_by_every_rank(
    file: str, damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    saved = run_ranks(save_twice, 2, path)
    damage(path / "000002-step-2" / file)
    told = f"{path}/000002-step-2/{file} {reason}"
    for error in run_ranks_expecting_errors(load, 2, path, {}):
        assert error.type_name == "CorruptCheckpoint"
        assert error.message.startswith(f"rank 1: {told}" if file.startswith("rank") else told)
    for rank, (state, name, warned) in enumerate(run_ranks(load, 2, path, {"fallback": True})):
        assert (state, name) == (saved[rank][0], "000001-step-1")
        assert len(warned) == 1
        assert warned[0].startswith("RuntimeWarning: ")
        assert told in warned[0]
    assert not (tmp_path / "touched").exists()


# A directory on every machine ----------------------------------------------------------------------------------------


def on_machines(rank: int, world_size: int, path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Two ranks share each machine's disk."""
    return function(rank, world_size, path / f"machine{rank // 2}", *args)


def test_every_machine_keeps_the_files_of_its_ranks(tmp_path: Path) -> None:
    saved = run_ranks(on_machines, 4, tmp_path, save_twice)
    for machine, ranks in enumerate([(0, 1), (2, 3)]):
        names = ["000001-step-1", "000002-step-2"]
        assert listed(tmp_path / f"machine{machine}") == names
        for path in (tmp_path / f"machine{machine}" / name for name in names):
            files = ["manifest.json", "model.pt", *(f"rank-0000{rank}.pt" for rank in ranks)]
            assert sorted(file.name for file in path.iterdir()) == files
    for rank, (state, name, warned) in enumerate(run_ranks(on_machines, 4, tmp_path, load, {})):
        assert (state, name, warned) == (saved[rank][1], "000002-step-2", [])


def load_and_save(rank: int, world_size: int, path: Path, keep: int) -> tuple[str, str]:
    run = Run(Case(), rank)
    run.load(path)
    run.train(1)
    return run.save(path, keep=keep).name, run.now()


def test_a_crash_between_the_renames_of_two_machines(tmp_path: Path) -> None:
    saved = run_ranks(on_machines, 4, tmp_path, save_twice)
    shutil.rmtree(tmp_path / "machine1" / "000002-step-2")
    for rank, (state, name, warned) in enumerate(run_ranks(on_machines, 4, tmp_path, load, {})):
        assert (state, name, warned) == (saved[rank][0], "000001-step-1", [])
    # What one machine has alone is no one's turn to be kept: the number is not used again, and the other has two.
    for name, state in run_ranks(on_machines, 4, tmp_path, load_and_save, 2):
        assert name == "000003-step-2"
        assert state in [of_rank[1] for of_rank in saved]
    assert listed(tmp_path / "machine1") == ["000001-step-1", "000003-step-2"]
    assert {"000001-step-1", "000003-step-2"} <= set(listed(tmp_path / "machine0"))


def test_a_machine_without_any_is_no_new_start(tmp_path: Path) -> None:
    run_ranks(on_machines, 4, tmp_path, save_twice)
    shutil.rmtree(tmp_path / "machine1")
    for error in run_ranks_expecting_errors(on_machines, 4, tmp_path, load, {}):
        assert error.type_name == "CorruptCheckpoint"
        assert "no checkpoint is visible to all ranks" in error.message
        assert "000002-step-2 on ranks 0, 1, none on ranks 2, 3" in error.message


def test_machines_with_checkpoints_of_different_runs(tmp_path: Path) -> None:
    for run in ("a", "b"):
        run_ranks(on_machines, 4, tmp_path / run, save_twice)
    shutil.rmtree(tmp_path / "a" / "machine1")
    (tmp_path / "b" / "machine1").rename(tmp_path / "a" / "machine1")
    path = tmp_path / "a" / "machine1" / "000002-step-2" / "rank-00002.pt"
    forge(path.parent, path.name, torch.load(path, weights_only=True) | {"extra": {"something": "else"}})
    for error in run_ranks_expecting_errors(on_machines, 4, tmp_path / "a", load, {}):
        assert error.type_name == "CorruptCheckpoint"
        assert "not the same checkpoint on all machines: manifest.json of ranks 2, 3 differs" in error.message


# Other ranks than saved ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [1, 3])
def test_another_number_of_ranks_is_refused_with_the_choices(now: int, tmp_path: Path) -> None:
    run_ranks(save_twice, 2, tmp_path)
    for error in run_ranks_expecting_errors(load, now, tmp_path, {"fallback": True}):
        assert error.type_name == "ValueError"
        assert error.message.startswith(f"000002-step-2 was saved by 2 ranks (now {now})")
        assert "on_mismatch='average'" in error.message
        assert "'reset'" in error.message


def test_other_nodes_are_refused(tmp_path: Path) -> None:
    run_ranks(save_twice, 4, tmp_path)
    for error in run_ranks_expecting_errors(in_nodes, 4, 2, load, tmp_path, {}):
        assert error.type_name == "ValueError"
        assert "000002-step-2 was saved by nodes [0] [1] [2] [3] (now [0 1] [2 3])" in error.message


def save_then_load_with(
    rank: int, world_size: int, path: Path, optimizer: Callable[..., Any], bucket_mb: float
) -> bool:
    Run(Case(optimizer), rank).save(path)
    found = Run(Case(optimizer, {"bucket_mb": bucket_mb}), rank).load(path)
    return found is not None and found.exact


def test_other_buckets_matter_only_where_the_state_has_them(tmp_path: Path) -> None:
    assert run_ranks(save_then_load_with, 2, tmp_path / "birder", thinwire.Birder, 1.0) == [True, True]
    for error in run_ranks_expecting_errors(save_then_load_with, 2, tmp_path / "cd-adam", thinwire.CDAdam, 1.0):
        assert error.type_name == "ValueError"
        assert "was saved by bucket_mb=None (now 1.0)" in error.message


@pytest.mark.parametrize("how", ["average", "reset"])
def test_other_ranks_need_the_files_of_all(how: str, tmp_path: Path) -> None:
    run_ranks(on_machines, 4, tmp_path, save_twice)
    for error in run_ranks_expecting_errors(on_machines, 2, tmp_path, load, {"on_mismatch": how}):
        assert error.type_name == "CorruptCheckpoint"
        assert "machine0/000002-step-2 lacks rank-00002.pt, rank-00003.pt" in error.message
        assert "copy all rank-….pt files into each of them" in error.message


def go_on_with(rank: int, world_size: int, path: Path, case: Case, how: str) -> tuple[Any, list[str], str]:
    run = Run(case, rank, loads=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = run.load(path, on_mismatch=how)
    assert found is not None
    assert torch.equal(torch.get_rng_state(), before)  # whose would it be?
    replicas = [run.replica()]
    run.train(2)
    run.optimizer.synchronize()
    return (found.step, found.extra["rank"], found.exact), replicas, run.replica()


@pytest.mark.parametrize("how", ["average", "reset"])
@pytest.mark.parametrize("case", ["birder, attached", "0/1 adam, apart"])
def test_other_ranks_go_on(case: str, how: str, tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 3, CASES[case], tmp_path)
    outcomes = run_ranks(go_on_with, 2, tmp_path, CASES[case], how)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == (CASES[case].saved_at, 0, False)
    assert outcomes[0][1] != [outcomes[0][2]]


# What goes wrong on one rank -----------------------------------------------------------------------------------------


def save_badly(rank: int, world_size: int, path: Path, trouble: str) -> None:
    """Rank 1 is in trouble."""
    case = Case(attach=trouble == "half a step")
    run = Run(case, rank)
    run.train(2)
    bad = rank == 1
    if trouble == "half a step":
        loss = run.loss(torch.arange(16))
        if bad:
            loss.backward()
    if trouble == "limit" and bad:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checkpoint.save(
        path / "file" / "x" if trouble == "file" and bad else path / "run",
        run.net if trouble != "model" or not bad else None,  # type: ignore[arg-type]
        run.optimizer,
        step=2 + (trouble == "step" and bad),
        extra={"value": Malicious(path / "touched")} if trouble == "extra" and bad else None,
        keep=0 if trouble == "keep" and bad else 1,
    )


TROUBLES = {
    "step": ("ValueError", "ranks save different steps: step=2 on rank 0, step=3 on rank 1"),
    "extra": ("ValueError", "rank 1: rank-00001.pt would not load: `extra`"),
    "file": ("NotADirectoryError", "[Errno 20] rank 1: Not a directory"),
    "limit": ("OSError", "[Errno 27] rank 1: File too large"),
    "keep": ("ValueError", "rank 1: keep=0: expected"),
    "model": ("TypeError", "rank 1: model is NoneType, expected a torch.nn.Module"),
    "half a step": ("RuntimeError", "rank 1: state_dict() between backward and step()"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_of_one_rank_is_heard_by_all_and_destroys_nothing(trouble: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    saved = run_ranks(save_twice, 2, tmp_path / "run")
    kind, told = TROUBLES[trouble]
    for error in run_ranks_expecting_errors(save_badly, 2, tmp_path, trouble):
        assert error.type_name == kind
        assert told in error.message
    assert listed(tmp_path / "run") == ["000001-step-1", "000002-step-2"]
    assert not (tmp_path / "touched").exists()
    assert [state for state, _, _ in run_ranks(load, 2, tmp_path / "run", {})] == [of_rank[1] for of_rank in saved]


def refuse_then_go_on(rank: int, world_size: int, path: Path) -> list[str]:
    """Rank 1 asks in the middle of a step; both are refused, and the step ends as if nobody had asked."""
    states = []
    for disturbed in (False, True):
        run = Run(Case(attach=True), rank)
        run.train(2)
        loss = run.loss(torch.arange(16) + rank)
        if rank == 1:
            loss.backward()
        if disturbed:
            with pytest.raises(RuntimeError, match=r"rank 1: state_dict\(\) between backward and step"):
                run.save(path)
        if rank == 0:
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        states.append(run.now())
    return states


def test_a_refusal_in_the_middle_of_a_step_leaves_the_step_as_it_was(tmp_path: Path) -> None:
    for straight, disturbed in run_ranks(refuse_then_go_on, 2, tmp_path):
        assert straight == disturbed


def save_while_one_is_gone(rank: int, world_size: int, path: Path) -> None:
    run = Run(Case(), rank)
    run.train(1)
    if rank == 1:
        os._exit(0)
    run.save(path)


def test_a_rank_that_is_gone_is_no_hang(tmp_path: Path) -> None:
    survivor, gone = run_ranks_expecting_errors(save_while_one_is_gone, 2, tmp_path)
    assert (survivor.type_name, gone.type_name) == ("PeerLost", "ProcessDied")
    assert list(tmp_path.iterdir()) == []
