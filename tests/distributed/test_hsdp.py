"""thinwire's optimizers on FSDP2 parameters: the bits of the same optimizer on local shards, and equal replicas."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, by_case, digest, each_case
from tests.distributed.fsdp_runs import BlockWithoutKeyBias, FsdpRun, accumulate_without_reduction, loss_of, mesh_of
from tests.distributed.hsdp_runs import HsdpRun, advance, build, by_hand, options_of, shards_of
from tests.harness import run_ranks

ZERO_ONE = {"var_freeze_step": 2, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
OPTIMIZERS = {
    "birder": HsdpRun(options={"seed": 5}),
    "birder, votes": HsdpRun(options={"seed": 5, "downlink": "votes", "clip_value": 0.01}),
    # Lion sends a random bit for an update of zero, by a seed that differs between shards and cannot be set by hand.
    "lion": HsdpRun(thinwire.DistributedLion, model=FsdpRun(block=BlockWithoutKeyBias)),
    "cd_adam": HsdpRun(thinwire.CDAdam),
    "onebit_adam": HsdpRun(thinwire.OneBitAdam, {"warmup_steps": 2, "betas": (0.9, 0.5)}),
    "zero_one_adam": HsdpRun(thinwire.ZeroOneAdam, ZERO_ONE, steps=6),
}


def against_ordinary_parameters(rank: int, world_size: int, run: HsdpRun) -> tuple[list[str], list[int]]:
    """Digests and bytes sent: attached, attached without overlap (for one optimizer), and by hand."""
    mesh = mesh_of(world_size, 2)
    digests, sent = [], []
    for overlap in (True, False) if run.options.get("seed") == 5 else (True,):
        model, optimizer = build(mesh, replace(run, overlap=overlap))
        advance(model, optimizer, rank, run, range(run.steps))
        digests.append(digest(shards_of(model)))
        sent.append(optimizer.metrics().bytes_sent)
    shards, optimizer = by_hand(rank, mesh, run)
    return [*digests, digest(shards)], [*sent, optimizer.metrics().bytes_sent]


def test_shards_get_the_bits_of_ordinary_parameters() -> None:
    """Which the suites of the optimizers compare with their oracles."""
    ranks = run_ranks(each_case, 4, against_ordinary_parameters, OPTIMIZERS, timeout=MANY_CASES_SECONDS)
    for name, found in by_case(ranks).items():
        for digests, sent in found:
            assert len(set(digests)) == 1, name
            assert len(set(sent)) == 1, name


# One launch for what needs one run each -------------------------------------------------------------------------------


def one_bit(rank: int, world_size: int, _: None) -> None:
    """A rank sends one bit per element of its shard up and one down, and headers; replicas have other gradients."""
    mesh = mesh_of(world_size, 2)
    model, optimizer = build(mesh, HsdpRun(options={"bucket_mb": None, "check_replicas_every": 0}))
    advance(model, optimizer, rank, HsdpRun(), range(2))
    before = optimizer.metrics().bytes_sent
    loss_of(model, rank, 2).backward()
    grad: Any = model.blocks[0].up.weight.grad
    gradients = mesh_gather(grad.to_local(), mesh)
    assert not torch.equal(*gradients)
    optimizer.step()
    elements = sum(each.numel() for each in shards_of(model))
    assert elements / 8 <= optimizer.metrics().bytes_sent - before < 2 * elements / 8


def mesh_gather(tensor: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    """From each replica, its tensor for the shard of this rank."""
    gathered = [torch.empty_like(tensor) for _ in range(mesh.size(0))]
    torch.distributed.all_gather(gathered, tensor.contiguous(), group=mesh.get_group(0))
    return gathered


def nonfinite(rank: int, world_size: int, _: None) -> None:
    """One element on one rank: all ranks of the mesh skip the step."""
    model, optimizer = build(mesh_of(world_size, 2), HsdpRun(overlap=False))
    for step in range(4):
        loss_of(model, rank, step).backward()
        if (rank, step) == (3, 2):
            model.blocks[1].up.weight.grad.to_local()[0, 0] = torch.inf
        before = digest(shards_of(model))
        optimizer.step()
        optimizer.zero_grad()
        assert (digest(shards_of(model)) == before) == (step == 2)
    assert optimizer.metrics().skipped_steps == 1


def nonfinite_in_a_local_step(rank: int, world_size: int, _: None) -> None:
    """Only the replica skips it, with all of its shards. Replicas are equal after the synchronization."""
    mesh = mesh_of(world_size, 2)
    model, optimizer = build(mesh, HsdpRun(thinwire.ZeroOneAdam, ZERO_ONE, overlap=False))
    for step in range(6):
        loss_of(model, rank, step).backward()
        if (rank, step) == (3, 4):
            model.blocks[1].up.weight.grad.to_local()[0, 0] = torch.inf
        before = digest(shards_of(model))
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.is_synchronized == (step != 4)
        assert (digest(shards_of(model)) == before) == (step == 4 and rank >= 2)
    first, second = mesh_gather(torch.cat([each.view(-1) for each in shards_of(model)]), mesh)
    assert torch.equal(first, second)
    assert optimizer.metrics().skipped_steps == (rank >= 2)


def accumulates(rank: int, world_size: int, _: None) -> None:
    """Overlap has no influence on the bits. The exchange ends with the model and the optimizer."""
    digests = set()
    for overlap in (True, False):
        run = HsdpRun(backward=accumulate_without_reduction, overlap=overlap)
        model, optimizer = build(mesh_of(world_size, 2), run)
        advance(model, optimizer, rank, run, range(3))
        digests.add(digest(shards_of(model)))
        alive = weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert alive() is None
    assert len(digests) == 1


def scaled(rank: int, world_size: int, _: None) -> None:
    """An overflow on one rank: all ranks skip the step and lower the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    mesh = mesh_of(world_size, 2)
    model, optimizer = build(mesh, HsdpRun())
    thinwire.detach(model)
    thinwire.attach(model, optimizer, grad_scaler=scaler)
    scales = []
    for step in range(4):
        loss = loss_of(model, rank, step)
        scaler.scale(loss * torch.inf if (rank, step) == (3, 2) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0]
    assert optimizer.metrics().skipped_steps == 1


def detached(rank: int, world_size: int, _: None) -> None:
    """FSDP averages again, and another optimizer may step."""
    mesh = mesh_of(world_size, 2)
    model = build(mesh, HsdpRun())[0]
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) of SGD, but its parameters are attached to another optimizer"):
        other.step()
    thinwire.detach(model)
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    first, second = mesh_gather(model.blocks[0].up.weight.grad.to_local(), mesh)
    assert torch.equal(first, second)
    other.step()


ONCE = [one_bit, nonfinite, nonfinite_in_a_local_step, accumulates, scaled, detached]


def call(rank: int, world_size: int, function: Any) -> None:
    function(rank, world_size, None)


def test_one_run_each() -> None:
    cases = {function.__name__: function for function in ONCE}
    run_ranks(each_case, 4, call, cases, timeout=MANY_CASES_SECONDS)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def load(model: Any, optimizer: Any, path: str) -> None:
    found = states(model, optimizer)
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def brain(model: Any) -> None:
    model.to(torch.bfloat16)


RESUMED = {
    **{name: run for name, run in OPTIMIZERS.items() if name not in ("birder", "birder, votes", "zero_one_adam")},
    "birder, bfloat16": HsdpRun(model=FsdpRun(prepare=brain)),
    "one shard": HsdpRun(thinwire.DistributedLion, replicas=4),
    "zero_one_adam": HsdpRun(thinwire.ZeroOneAdam, ZERO_ONE),
}


def resumed(rank: int, world_size: int, run: HsdpRun, path: str) -> tuple[str, str]:
    """A run that never stopped, and one that continues in a new model and optimizer."""
    mesh, path = mesh_of(world_size, run.replicas), f"{path}/{run.optimizer.__name__}{run.replicas}"
    first, saved = 3, range(3, 6)
    model, optimizer = build(mesh, run)
    advance(model, optimizer, rank, run, range(first))
    optimizer.synchronize()
    dcp.save(states(model, optimizer), checkpoint_id=path)
    advance(model, optimizer, rank, run, saved)
    again, its_optimizer = build(mesh, run)
    advance(again, its_optimizer, rank, run, range(7, 8))
    load(again, its_optimizer, path)
    advance(again, its_optimizer, rank, run, saved)
    optimizer.synchronize()
    its_optimizer.synchronize()
    check_entries(optimizer.state_dict()["state"], model, f"replica{mesh.get_local_rank(0)}")
    return digest(shards_of(model)), digest(shards_of(again))


def check_entries(entries: dict[int, dict[str, Any]], model: Any, replica: str) -> None:
    """Entries that are as large as the shard are DTensors like the parameter, or of one replica."""
    for index, p in enumerate(model.parameters()):
        shaped = 0
        for value in entries[index].values():
            if isinstance(value, DTensor):
                assert (value.device_mesh, value.placements, value.shape) == (p.device_mesh, p.placements, p.shape)
                shaped += 1
            elif isinstance(value, dict) and replica in value:
                own = value[replica]
                assert (own.placements, own.shape) == (p.placements[1:], p.shape)
                shaped += 1
        assert shaped


def test_resume_is_exact(tmp_path: Path) -> None:
    ranks = run_ranks(each_case, 4, resumed, RESUMED, str(tmp_path), timeout=MANY_CASES_SECONDS)
    for name, found in by_case(ranks).items():
        for whole, rest in found:
            assert whole == rest, name


def another_mesh(rank: int, world_size: int) -> None:
    """Refused, before anything changes."""
    model, optimizer = build(mesh_of(world_size, 2), HsdpRun())
    saved = optimizer.state_dict()
    _, other = build(mesh_of(world_size, 4), HsdpRun())
    before = digest(shards_of(model))
    with pytest.raises(
        ValueError, match=r"of topology flat, 2 replicas of 2 shards, on ranks \[\[0, 1\], \[2, 3\]\], "
    ):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(\) with sharded parameters"):
        optimizer.consolidate_state_dict()
    with pytest.raises(TypeError, match=r"Birder with sharded parameters \(FSDP2\), which thinwire.checkpoint cannot"):
        thinwire.checkpoint.save("nowhere", model, optimizer, 1)
    assert digest(shards_of(model)) == before
    plain = torch.nn.Linear(3, 3)
    unsharded = thinwire.Birder(plain.parameters(), **options_of(HsdpRun()))
    with pytest.raises(ValueError, match=r"2 replicas of 2 shards.*, this optimizer has flat"):
        unsharded.load_state_dict(saved)


def test_other_ways_to_save_and_load_are_refused() -> None:
    run_ranks(another_mesh, 4)
