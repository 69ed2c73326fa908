"""`thinwire.compress` in FSDP2: what cannot be done is refused on every rank of the mesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from tests.distributed.fsdp_runs import FsdpRun, loss_of, mesh_of, sharded, transformer
from tests.harness import run_ranks_expecting_errors


def compress_module(module: Any, mesh: DeviceMesh) -> None:
    thinwire.compress(fully_shard(module, mesh=mesh))  # pyright: ignore[reportArgumentType]


def shards_only(rank: int, world_size: int) -> None:
    compress_module(nn.Linear(4, 4), init_device_mesh("cpu", (world_size,)))


def two_meshes(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh_of(world_size, 4))
    compress_module(model, mesh_of(world_size, 2))


def not_sharded(rank: int, world_size: int) -> None:
    thinwire.compress(transformer())


def all_reduce_hook(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    model.blocks[1].set_all_reduce_hook(print)
    thinwire.compress(model)


def parameter_hook(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    model.blocks[1].up.bias.register_post_accumulate_grad_hook(print)
    thinwire.compress(model)


def compress_twice(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    _ = thinwire.compress(model)
    thinwire.compress(model)


def complex_parameter(rank: int, world_size: int) -> None:
    compress_module(nn.Linear(4, 4, dtype=torch.complex64), mesh_of(world_size, 2))


def sparse_gradients(rank: int, world_size: int) -> None:
    compress_module(nn.Sequential(nn.Embedding(9, 9, sparse=True)), mesh_of(world_size, 2))


def on_the_meta_device(rank: int, world_size: int) -> None:
    compress_module(nn.Linear(4, 4, device="meta"), mesh_of(world_size, 2))


def wire_optimizer(rank: int, world_size: int) -> None:
    thinwire.Birder(sharded(mesh_of(world_size, 2)).parameters())


def unknown_name_on_one_rank(rank: int, world_size: int) -> None:
    thinwire.compress(sharded(mesh_of(world_size, 2)), "int5" if rank == 3 else "int4")


def other_compressor_on_one_rank(rank: int, world_size: int) -> None:
    thinwire.compress(sharded(mesh_of(world_size, 2)), "int8" if rank == 3 else "int4")


def other_values_on_one_rank(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    with torch.no_grad():
        model.blocks[2].up.bias.to_local().add_(rank == 3)
    thinwire.compress(model)


def freeze_a_bias(model: nn.Module) -> None:
    model.get_parameter("blocks.1.up.bias").requires_grad_(False)


def unfrozen_later(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2), FsdpRun(prepare=freeze_a_bias))
    _ = thinwire.compress(model)
    model.blocks[1].up.bias.requires_grad_(True)
    loss_of(model, rank, 0).backward()


def replaced_later(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    _ = thinwire.compress(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss_of(model, rank, 0).backward()


class FailingError(Exception):
    """Raised by a hook."""


def backward_after_a_failed_one(rank: int, world_size: int) -> None:
    """The gradient of the embedding fails, when blocks have sent theirs."""
    model = sharded(mesh_of(world_size, 2))
    _ = thinwire.compress(model)

    def fail(_: torch.Tensor) -> None:
        raise FailingError

    loss_of(model, rank, 0).backward()
    model.zero_grad()
    handle = model.embedding.register_forward_hook(lambda *hooked: hooked[2].register_hook(fail) and None)
    with pytest.raises(FailingError):
        loss_of(model, rank, 1).backward()
    handle.remove()
    model.reset_iter_state()
    loss_of(model, rank, 2).backward()


def after_close(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    thinwire.compress(model).close()
    loss_of(model, rank, 0).backward()


@pytest.mark.parametrize(
    ("attempt", "type_name", "message"),
    [
        (shards_only, "ValueError", r"no replicas .*Expected a mesh with two dimensions, replicas and shards"),
        (
            two_meshes,
            "ValueError",
            r"different replicas for different parameters, on ranks \[0, 1, 2, 3\] and \[\d, \d\]",
        ),
        (not_sharded, "TypeError", r"model is Transformer, expected .*DistributedDataParallel, .*fully_shard"),
        (all_reduce_hook, "RuntimeError", r"the model has an all-reduce hook"),
        (parameter_hook, "RuntimeError", r"parameter 'blocks\.1\.up\.bias' has a hook"),
        (compress_twice, "RuntimeError", r"averages the gradients of this model already"),
        (complex_parameter, "TypeError", r"a parameter of torch\.complex64"),
        (sparse_gradients, "TypeError", r"'0' is FSDPEmbedding\(sparse=True\)|'0' is Embedding\(sparse=True\)"),
        (on_the_meta_device, "ValueError", r"parameter 'weight' is on the meta device"),
        (wire_optimizer, "TypeError", r"class DTensor: .*thinwire\.compress"),
        (unknown_name_on_one_rank, "ValueError", r"rank 1: .*compressor='int5'"),
        (other_compressor_on_one_rank, "RuntimeError", r"ranks disagree on the compressor"),
        (other_values_on_one_rank, "RuntimeError", r"ranks disagree on the checksum of the values of parameter"),
        (unfrozen_later, "RuntimeError", r"parameter 'blocks\.1\.up\.bias' requires gradients, but was frozen"),
        (replaced_later, "RuntimeError", r"parameters of the model were replaced"),
        (backward_after_a_failed_one, "RuntimeError", r"got a gradient twice in one exchange"),
        (after_close, "RuntimeError", r"is closed"),
    ],
)
def test_refused_on_every_rank(attempt: Callable[[int, int], None], type_name: str, message: str) -> None:
    for outcome in run_ranks_expecting_errors(attempt, 4):
        assert outcome.type_name == type_name, outcome.traceback
        assert re.search(message, outcome.message), outcome.message
