"""thinwire.checkpoint with `thinwire.compress` and any optimizer: resuming is exact, on all ranks or on none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import thinwire
from tests.distributed.checkpoint_runs import NoisyNet
from tests.distributed.common import MANY_CASES_SECONDS, by_case, digest, each_case, environment, in_nodes, run_nodes
from tests.distributed.compressed_runs import BUCKET_MB, Case, Run
from tests.distributed.reshard_cases import packed, unpacked
from tests.harness import run_ranks, run_ranks_expecting_errors
from tests.saved_states import SavedStates
from thinwire import checkpoint

SAVED_AT = STEPS = 3
MOMENTUM = {"momentum": 0.9, "nesterov": True}
CASES = {
    "adamw": Case(),
    "sgd": Case(optimizer=torch.optim.SGD, settings=MOMENTUM),
    "adamw, a GradScaler": Case(scaled=True),
    "adamw, bfloat16": Case(dtype=torch.bfloat16),
    "adamw, residuals in bfloat16": Case(options={"residual_dtype": torch.bfloat16}),
    "adamw, topk": Case("topk", {"ratio": 0.1}),
    "adamw, powersgd": Case("powersgd", {"rank": 1}),
    "adamw, qsgd": Case("qsgd"),
    "sgd, count_sketch": Case("count_sketch", optimizer=torch.optim.SGD),
    "sgd, laq": Case("laq", optimizer=torch.optim.SGD),
    "adamw, none": Case("none"),
    "adamw, delayed, a GradScaler": Case(options={"delay": 1}, scaled=True),
    "adamw, topk, delayed": Case("topk", {"ratio": 0.1, "delay": 1}),
}
WITHOUT_RESIDUALS = ("adamw, qsgd", "adamw, none")


def stop_and_resume(rank: int, world_size: int, case: Case, path: Path) -> dict[str, Any]:
    path = path / str(list(CASES.values()).index(case))
    first = Run(case, rank)
    first.train(SAVED_AT)
    saved = first.save(path)
    never_stopped = first.train(STEPS)
    second = Run(case, rank, seed=99)
    second.train(2)  # what it has by then is replaced
    found = second.load(path)
    assert found is not None
    return {
        "never stopped": never_stopped,
        "loaded": (found.path == saved, found.step, found.extra["rank"], found.exact),
        "scale": second.scaler.get_scale(),
        "residuals": digest(second.residuals()),
        "resumed": second.train(STEPS),
        "replica": (first.replica(), second.replica()),
    }


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)], ids=["2", "2x2"])
def test_resuming_is_never_having_stopped(nodes: int, ranks: int, tmp_path: Path) -> None:
    of_ranks = run_nodes(each_case, nodes, ranks, stop_and_resume, CASES, tmp_path, timeout=MANY_CASES_SECONDS)
    for name, outcomes in by_case(of_ranks).items():
        for rank, outcome in enumerate(outcomes):
            assert outcome["resumed"] == outcome["never stopped"], f"{name}, rank {rank}"
            assert len(set(outcome["resumed"])) == STEPS, name
            assert outcome["loaded"] == (True, SAVED_AT, rank, True), name
            assert outcome["scale"] == (512.0 if CASES[name].scaled else 1.0)
        assert len({replica for outcome in outcomes for replica in outcome["replica"]}) == 1, name
        # Each rank must have its own residuals.
        differing = 1 if name in WITHOUT_RESIDUALS else nodes * ranks
        assert len({outcome["residuals"] for outcome in outcomes}) == differing, name


def save(rank: int, world_size: int, case: Case, path: Path) -> bytes:
    run = Run(case, rank)
    run.train(SAVED_AT)
    run.save(path)
    return packed({"compression": run.compression.state_dict(), "optimizer": run.optimizer.state_dict()})


def test_the_files_are_as_documented(tmp_path: Path) -> None:
    run_ranks(save, 2, CASES["adamw"], tmp_path)
    path = tmp_path / f"000001-step-{SAVED_AT}"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["optimizer"] == "AdamW with thinwire.compress"
    assert manifest["bucket_mb"] == BUCKET_MB
    saved = torch.load(path / "rank-00001.pt", weights_only=True)
    assert sorted(saved) == ["compression", "extra", "model", "optimizer", "random"]
    # Without thinwire it is the state dict of AdamW.
    net = NoisyNet()
    net.load_state_dict(torch.load(path / "model.pt", weights_only=True))
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.02 * 0.9
    assert len(optimizer.state) == len(list(net.parameters()))


# Other ranks than saved ----------------------------------------------------------------------------------------------


def load(rank: int, world_size: int, case: Case, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    run = Run(case, rank, seed=99)
    run.train(1)
    found = run.load(path, **options)
    assert found is not None
    loaded = packed({"compression": run.compression.state_dict(), "optimizer": run.optimizer.state_dict()})
    before = run.replica()
    run.train(2)
    return {"exact": found.exact, "step": found.step, "loaded": loaded, "before": before, "after": run.replica()}


def saved_states(of_ranks: list[bytes], nodes: tuple[tuple[int, ...], ...]) -> SavedStates:
    states = [unpacked(of_rank)["compression"] for of_rank in of_ranks]
    return SavedStates(states, [tuple(p.shape) for p in NoisyNet().parameters()], nodes, BUCKET_MB)


FLAT, PAIRS, TWO = ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0,), (1,))


@pytest.mark.parametrize("how", ["average", "reset"])
@pytest.mark.parametrize(("ranks_a_node", "after"), [(1, TWO), (2, PAIRS)], ids=["4 to 2", "4 to 2x2"])
def test_other_ranks_continue(ranks_a_node: int, after: tuple[tuple[int, ...], ...], how: str, tmp_path: Path) -> None:
    case, ranks = CASES["adamw"], sum(map(len, after))
    saved = run_ranks(save, 4, case, tmp_path)
    options = {"on_mismatch": how}
    outcomes = run_ranks(in_nodes, ranks, ranks_a_node, load, case, tmp_path, options)
    old = saved_states(saved, FLAT)
    new = saved_states([outcome["loaded"] for outcome in outcomes], after)
    for name, kept in (
        ("residual", old.of_workers("residual").mean(0)),
        ("answer_residual", old.of_owners("answer_residual")),
    ):
        assert kept.any()
        of_new = new.of_workers(name) if name == "residual" else new.of_owners(name)[None]
        for values in of_new:
            np.testing.assert_allclose(values, kept * (how == "average"), rtol=1e-6, atol=1e-30)
    assert new.shared("loss_scale").all()
    assert (new.shared("step") == SAVED_AT).all()
    optimizer = unpacked(saved[0])["optimizer"]
    for outcome in outcomes:
        assert (outcome["exact"], outcome["step"]) == (False, SAVED_AT)
        same_state(unpacked(outcome["loaded"])["optimizer"], optimizer)
    assert len({(outcome["before"], outcome["after"]) for outcome in outcomes}) == 1
    assert outcomes[0]["before"] != outcomes[0]["after"]


@pytest.mark.parametrize("how", ["average", "reset"])
@pytest.mark.parametrize(("ranks_a_node", "after"), [(1, TWO), (2, PAIRS)], ids=["4 to 2", "4 to 2x2"])
def test_lazy_senders_continue_with_other_ranks(
    ranks_a_node: int, after: tuple[tuple[int, ...], ...], how: str, tmp_path: Path
) -> None:
    """Owners still know the mean of what they know of each worker."""
    case = CASES["sgd, laq"]
    saved = run_ranks(save, 4, case, tmp_path)
    outcomes = run_ranks(in_nodes, sum(map(len, after)), ranks_a_node, load, case, tmp_path, {"on_mismatch": how})
    old = saved_states(saved, FLAT)
    new = saved_states([outcome["loaded"] for outcome in outcomes], after)
    of_all = old.of_workers("known").mean(0)
    assert of_all.any()
    np.testing.assert_allclose(old.of_owners("mean"), of_all, rtol=1e-4, atol=1e-6)
    for known in new.of_workers("known"):
        np.testing.assert_allclose(known, of_all * (how == "average"), rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(new.of_owners("mean"), old.of_owners("mean") * (how == "average"), rtol=1e-6, atol=1e-30)
    assert len({(outcome["before"], outcome["after"]) for outcome in outcomes}) == 1
    assert outcomes[0]["before"] != outcomes[0]["after"]


def same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entries in theirs["state"].items():
        for name, value in entries.items():
            assert torch.equal(ours["state"][number][name], value), f"{name} of parameter {number}"


@pytest.mark.parametrize(
    ("world_size", "ranks_a_node", "told"),
    [
        (2, 1, "was saved by 4 ranks (now 2): the state of a rank does not fit"),
        (4, 2, "was saved by nodes [0] [1] [2] [3] (now [0 1] [2 3]) and bucket_mb=0.0005 (now None)"),
    ],
)
def test_other_ranks_are_refused_by_default(world_size: int, ranks_a_node: int, told: str, tmp_path: Path) -> None:
    run_ranks(save, 4, CASES["adamw"], tmp_path)
    case = CASES["adamw"] if ranks_a_node == 1 else Case(options={"bucket_mb": None})
    for error in run_ranks_expecting_errors(in_nodes, world_size, ranks_a_node, load, case, tmp_path, {}):
        assert error.type_name == "ValueError"
        assert told in error.message
        assert "on_mismatch='average'" in error.message


# What is refused -----------------------------------------------------------------------------------------------------


class Broken(torch.optim.AdamW):
    """Rank 1 cannot load it, and notices when half of it is loaded."""

    breaks = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.breaks:
            for of_one in self.state.values():
                of_one["exp_avg"].zero_()
            super().load_state_dict(state_dict)
            torch.rand(1)
            raise LookupError("the state is from another planet")
        super().load_state_dict(state_dict)


def refuse_then_load(rank: int, world_size: int, path: Path, options: dict[str, Any]) -> list[str]:
    """The messages of what is refused, each of which changes nothing; in the end the checkpoint is loaded."""
    case = Case(optimizer=Broken)
    run = Run(case, rank)
    run.train(SAVED_AT)
    run.save(path)
    never_stopped = run.train(STEPS)
    if options:
        with environment({"LOCAL_WORLD_SIZE": "2"}):
            other = Run(case, rank, seed=99)
    else:
        other = Run(case, rank, seed=99)
    optimizer = other.optimizer
    assert isinstance(optimizer, Broken)
    other.train(2)
    groups, state, before = other.optimizer.param_groups, other.optimizer.state, other.now()
    told = []

    def refuse(model: Any, optimizer: Any, **arguments: Any) -> None:
        random_before = torch.get_rng_state()
        arguments = {"compression": other.compression, **options, **arguments}
        with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
            checkpoint.load(path, model, optimizer, **arguments)
        told.append(f"{raised.type.__name__}: {raised.value}")
        assert other.now() == before
        assert torch.equal(torch.get_rng_state(), random_before)
        assert other.optimizer.state is state
        assert other.optimizer.param_groups is groups

    optimizer.breaks = rank == 1
    refuse(other.model, optimizer)
    optimizer.breaks = False
    sgd = torch.optim.SGD(other.net.parameters(), lr=0.1)
    refuse(other.model, sgd)
    refuse(other.model, sgd if rank == 1 else other.optimizer)
    refuse(other.model, Broken([p for p in other.net.parameters() if p.dim() > 1]))
    birder = thinwire.Birder(other.net.parameters())
    refuse(other.model, birder if rank == 1 else other.optimizer)
    refuse(other.model, birder, compression=None)
    refuse(other.model, other.compression)
    found = other.load(path, **options)
    assert found is not None
    continued = other.train(STEPS)
    assert options or continued == never_stopped
    return told


@pytest.mark.parametrize("options", [{}, {"on_mismatch": "reset"}], ids=["same ranks", "other ranks"])
def test_what_is_refused_changes_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    for told in run_ranks(refuse_then_load, 2, tmp_path, options):
        another_class = "ValueError: 000001-step-3 is a checkpoint of Broken with thinwire.compress, this optimizer is "
        assert told[0].startswith("ValueError: rank 1: ")
        assert told[0].endswith("LookupError: the state is from another planet")
        assert told[1] == f"{another_class}SGD with thinwire.compress"
        assert told[2].startswith("ValueError: rank 1: 000001-step-3 is a checkpoint of Broken")
        assert told[3] == ("ValueError: the saved optimizer has parameter groups of [5] parameters, this Broken of [2]")
        assert told[4].startswith("TypeError: rank 1: optimizer is thinwire.optimizers.birder.Birder, which exchanges")
        assert told[5] == f"{another_class}Birder"
        assert told[6].startswith(
            "TypeError: optimizer is thinwire.averaging.handle.Compression, expected a torch.optim"
        )


def load_compressed_with_birder(rank: int, world_size: int, path: Path) -> None:
    net = NoisyNet()
    birder = thinwire.Birder(net.parameters())
    checkpoint.save(path, net, birder, 1)
    Run(Case(), rank).load(path)


def test_a_checkpoint_without_compression_is_refused(tmp_path: Path) -> None:
    for error in run_ranks_expecting_errors(load_compressed_with_birder, 2, tmp_path):
        assert error.type_name == "ValueError"
        assert error.message == (
            "000001-step-1 is a checkpoint of Birder, this optimizer is AdamW with thinwire.compress"
        )


def save_badly(rank: int, world_size: int, path: Path, trouble: str) -> None:
    run = Run(Case(), rank)
    run.train(1)
    if trouble == "another optimizer" and rank == 1:
        run.optimizer = torch.optim.SGD(run.net.parameters(), lr=0.1)
    if trouble == "a thinwire optimizer" and rank == 1:
        run.optimizer = thinwire.Birder(run.net.parameters())
    if trouble == "during backward":
        # A hook of the first layer runs when most gradients are sent.
        run.net.embedding.weight.register_hook(lambda _: run.save(path) and None)
        run.backward()
    run.save(path)


TROUBLES = {
    "another optimizer": (
        "ValueError",
        "ranks save different optimizers: optimizer=AdamW with thinwire.compress on rank 0, "
        "optimizer=SGD with thinwire.compress on rank 1. All ranks must save the same optimizer",
    ),
    "a thinwire optimizer": ("TypeError", "rank 1: optimizer is thinwire.optimizers.birder.Birder, which exchanges"),
    "during backward": ("RuntimeError", "state_dict() during backward: gradients of this step"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_of_one_rank_is_raised_on_all(trouble: str, tmp_path: Path) -> None:
    kind, told = TROUBLES[trouble]
    for error in run_ranks_expecting_errors(save_badly, 2, tmp_path, trouble):
        assert error.type_name == kind
        assert told in error.message
    assert not any(path.name != ".lock" for path in tmp_path.iterdir())


def test_other_optimizers_need_a_compression(tmp_path: Path) -> None:
    net = NoisyNet()
    adam, birder = torch.optim.AdamW(net.parameters()), thinwire.Birder(net.parameters())
    calls: list[Callable[..., Any]] = [
        lambda **given: checkpoint.save(tmp_path, net, adam, 1, **given),
        lambda **given: checkpoint.load(tmp_path, net, adam, **given),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=r"optimizer is torch.optim.adamw.AdamW, expected .* also pass compression="
        ):
            call()
        with pytest.raises(
            TypeError, match=r"compression is thinwire.optimizers.birder.Birder, expected the object that"
        ):
            call(compression=birder)


def save_shards(rank: int, world_size: int, path: Path) -> str:
    run = Run(Case(), rank)
    sharded = nn.Module()
    mesh = init_device_mesh("cpu", (world_size,))
    sharded.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    told = "sharded parameters, such as 'weight', of which"
    with pytest.raises(TypeError, match=told):
        checkpoint.load(path, sharded, run.optimizer, compression=run.compression)
    with pytest.raises(TypeError, match=told) as refusal:
        checkpoint.save(path, sharded, run.optimizer, 1, compression=run.compression)
    return str(refusal.value)


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(save_shards, 2, tmp_path):
        assert "save the model and its optimizer with torch.distributed.checkpoint" in told
    assert not list(tmp_path.iterdir())
