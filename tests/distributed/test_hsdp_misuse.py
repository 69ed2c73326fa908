"""thinwire's optimizers on FSDP2 parameters: what cannot be done is refused on every rank of the mesh."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from tests.distributed.fsdp_runs import loss_of, mesh_of, sharded
from tests.distributed.hsdp_runs import HsdpRun, build
from tests.harness import run_ranks, run_ranks_expecting_errors


def refused_at_construction(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size, 2)
    model = sharded(mesh)

    def refused(
        error: type[Exception], match: str, kind: Any = thinwire.Birder, /, of: Any = model, **options: Any
    ) -> None:
        with pytest.raises(error, match=match):
            kind(of.parameters(), **options)

    refused(TypeError, r"class DTensor: .*\(FSDP2\).*thinwire\.Birder\(model\.parameters\(\), mesh=mesh\).*compress")
    refused(ValueError, r"no other replicas.*Expected two dimensions", mesh=init_device_mesh("cpu", (world_size,)))
    refused(ValueError, r"no other replicas", mesh=mesh_of(world_size, 1))
    refused(ValueError, r"is on .*: expected the mesh that fully_shard was given", mesh=mesh_of(world_size, 4))
    refused(ValueError, r"process_group=.*expected None", mesh=mesh, process_group=mesh.get_group(0))
    refused(ValueError, r"clip_norm=1.0 with parameters of class DTensor.*clip_value=", mesh=mesh, clip_norm=1.0)
    refused(ValueError, r"delay=1 with parameters of class DTensor.*expected 0", mesh=mesh, delay=1)
    for kind in (thinwire.Lamb, thinwire.OneBitLamb):
        refused(TypeError, rf"{kind.__name__} with .*DTensor.*the norms of whole layers", kind, mesh=mesh)
    refused(
        TypeError,
        r"SketchedAMSGrad with .*the largest elements of whole gradients",
        thinwire.SketchedAMSGrad,
        mesh=mesh,
    )
    refused(TypeError, r"OneBitAdam with .*warmup_steps=\"auto\"", thinwire.OneBitAdam, mesh=mesh, warmup_steps="auto")
    one_dimension: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["shard"])
    refused(ValueError, r"expected the mesh that fully_shard was given", of=one_dimension, mesh=mesh)
    both = nn.ModuleList([nn.Linear(3, 3), model])
    refused(TypeError, r"class Parameter beside others of class DTensor", of=both, mesh=mesh)
    whole = thinwire.Birder(nn.Linear(3, 3).parameters())
    with pytest.raises(TypeError, match=r"class DTensor beside others that are whole"):
        whole.add_param_group({"params": list(model.parameters())})

    with pytest.raises(TypeError, match=r"the model is sharded.*thinwire\.Birder\(model\.parameters\(\), mesh=mesh\)"):
        thinwire.attach(model, whole)
    optimizer = thinwire.Birder(model.parameters(), mesh=mesh)
    with pytest.raises(TypeError, match=r"'0' is sharded by fully_shard \(FSDP2\), but not the model that contains it"):
        thinwire.attach(nn.Sequential(model), optimizer)
    with pytest.raises(ValueError, match=r"does not hold parameter 'unused'.*FSDP would no longer average"):
        thinwire.attach(model, thinwire.Birder(model.blocks.parameters(), mesh=mesh))
    compression = thinwire.compress(model)
    with pytest.raises(RuntimeError, match=r"attach: thinwire\.compress averages the gradients of this model already"):
        thinwire.attach(model, optimizer)
    thinwire.detach(model)
    del compression
    thinwire.attach(model, optimizer)
    with pytest.raises(RuntimeError, match=r"compress: this model is attached to a thinwire optimizer already"):
        thinwire.compress(model)


def test_refused_before_anything_is_sent() -> None:
    run_ranks(refused_at_construction, 4)


# In a step ------------------------------------------------------------------------------------------------------------


def not_attached(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size, 2)
    model = sharded(mesh)
    optimizer = thinwire.Birder(model.parameters(), mesh=mesh)
    loss_of(model, rank, 0).backward()
    optimizer.step()


def other_rate_of_a_shard(rank: int, world_size: int) -> None:
    """Ranks with the same shard agree."""
    model, optimizer = build(mesh_of(world_size, 2), HsdpRun())
    for step in range(3):
        loss_of(model, rank, step).backward()
        optimizer.param_groups[0]["lr"] = 1e-3 if step < 2 or rank % 2 else 2e-3
        optimizer.step()
        optimizer.zero_grad()


def other_settings_of_a_shard(rank: int, world_size: int) -> None:
    build(mesh_of(world_size, 2), HsdpRun(options={"seed": rank % 2}))


def clipped_too_late(rank: int, world_size: int) -> None:
    """The gradients of rank 1 change; it holds another shard than ranks 0 and 2."""
    model, optimizer = build(mesh_of(world_size, 2), HsdpRun())
    for step in range(2):
        loss_of(model, rank, step).backward()
        if step and rank == 1:
            model.blocks[0].up.weight.grad.to_local().mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def changed_replica(rank: int, world_size: int) -> None:
    model, optimizer = build(mesh_of(world_size, 2), HsdpRun())
    loss_of(model, rank, 0).backward()
    if rank == 3:
        with torch.no_grad():
            model.blocks[1].up.weight.to_local()[0, 0] += 1
    optimizer.step()


@pytest.mark.parametrize(
    ("attempt", "messages"),
    [
        (not_attached, {"RuntimeError": r"has averaged them before thinwire.*thinwire\.attach\(model, optimizer\)"}),
        (
            other_rate_of_a_shard,
            {"RuntimeError": r"ranks disagree on lr of parameter group 0 in step 3: 0\.002 on rank 0"},
        ),
        (other_settings_of_a_shard, {"RuntimeError": r"ranks disagree on seed: 0 on rank 0; 1 on rank 1"}),
        (
            clipped_too_late,
            {
                "GradientChanged": r"the gradient of parameter 'blocks\.0\.up\.weight' was changed",
                "CorruptPacket": r"rank 0",
                "RuntimeError": r"step 2 has failed on rank [13], which holds another shard",
            },
        ),
        (
            changed_replica,
            {"ReplicasDiffer": r"'blocks\.1\.up\.weight' differs between ranks: one value on rank 0, anoth"},
        ),
    ],
)
def test_refused_on_every_rank(attempt: Callable[[int, int], None], messages: dict[str, str]) -> None:
    outcomes = run_ranks_expecting_errors(attempt, 4)
    assert {outcome.type_name for outcome in outcomes} == messages.keys()
    for outcome in outcomes:
        assert re.search(messages[outcome.type_name], outcome.message, re.DOTALL), outcome.traceback


def left_alone(rank: int, world_size: int) -> None:
    """One rank of four dies. The rank of the other shard and replica hears of it from the one of its replica."""
    model, optimizer = build(mesh_of(world_size, 2), HsdpRun())
    loss_of(model, rank, 0).backward()
    if rank == 3:
        os._exit(1)
    optimizer.step()


def test_a_lost_rank() -> None:
    first, *others = (outcome.type_name for outcome in run_ranks_expecting_errors(left_alone, 4))
    assert others == ["PeerLost", "PeerLost", "ProcessDied"]
    assert first in ("PeerLost", "RuntimeError")  # the rank of its replica tells it, or ends before that
