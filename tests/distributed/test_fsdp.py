"""`thinwire.compress` in FSDP2: with floats it trains as FSDP2 does by itself; compressed, replicas stay equal."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, by_case, digest, each_case, run_nodes
from tests.distributed.fsdp_runs import (
    BLOCKS,
    Checkpointed,
    CheckpointedReentrant,
    FsdpRun,
    accumulate_without_reduction,
    loss_of,
    mesh_of,
    sharded,
    train,
    transformer,
)
from tests.harness import run_ranks
from thinwire.averaging.catalogue import NAMES


def accumulate_without_all_reduce(model: Any, rank: int, step: int) -> None:
    model.set_requires_all_reduce(False)
    loss_of(model, rank, 10 * step).backward()
    model.set_requires_all_reduce(True)
    loss_of(model, rank, 10 * step + 1).backward()


def backward_twice(model: Any, rank: int, step: int) -> None:
    loss_of(model, rank, 10 * step).backward()
    loss_of(model, rank, 10 * step + 1).backward()


def forward_twice(model: Any, rank: int, step: int) -> None:
    (loss_of(model, rank, 10 * step) + loss_of(model, rank, 10 * step + 1)).backward()


def freeze(model: Any) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(False)


def skip_a_block(model: Any, rank: int, step: int) -> None:
    model.skipped = step
    loss_of(model, rank, step).backward()


def sum_up(model: Any) -> None:
    model.set_force_sum_reduction_for_comms(True)


def divide_by_three(model: Any) -> None:
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(3.0)


def last_even_dimension(p: nn.Parameter) -> Shard:
    return Shard(p.dim() - 1 if p.shape[-1] % 2 == 0 else 0)


PLAIN = FsdpRun(steps=2)
EXACT = {
    "plain": PLAIN,
    "parameters stay gathered": replace(PLAIN, reshard_after_forward=False),
    "set_requires_gradient_sync": replace(PLAIN, backward=accumulate_without_reduction),
    "set_requires_all_reduce": replace(PLAIN, backward=accumulate_without_all_reduce),
    "forward twice": replace(PLAIN, backward=forward_twice),
    "sums": replace(PLAIN, configure=sum_up),
    "bfloat16, reduced in float32": replace(PLAIN, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "tied": replace(PLAIN, tied=True),
    "frozen": replace(PLAIN, prepare=freeze),
    "a block without a gradient": replace(PLAIN, backward=skip_a_block),
    "activation checkpointing": replace(PLAIN, block=Checkpointed),
    "reentrant checkpointing": replace(PLAIN, block=CheckpointedReentrant),
    "the last dimension where it is even": replace(PLAIN, placement=last_even_dimension),
}
ROUNDED = {
    # thinwire averages what was accumulated so far.
    "backward twice": (replace(PLAIN, backward=backward_twice), 1e-5),
    "divided by three": (replace(PLAIN, configure=divide_by_three), 1e-5),
    # torch rounds the mean of the replicas to bfloat16 or float16, thinwire does not.
    "reduced in bfloat16": (replace(PLAIN, policy=MixedPrecisionPolicy(None, torch.bfloat16)), 0.02),
    "bfloat16": (replace(PLAIN, policy=MixedPrecisionPolicy(torch.bfloat16)), 0.05),
    "reduced in float16": (replace(PLAIN, policy=MixedPrecisionPolicy(None, torch.float16)), 0.005),
}


def with_and_without(rank: int, world_size: int, run: FsdpRun, compressor: str, replicas: int) -> tuple[Any, Any]:
    mesh = mesh_of(world_size, replicas)
    return train(rank, mesh, run), train(rank, mesh, replace(run, compressor=compressor))


def compared(cases: dict[str, FsdpRun], compressor: str, world_size: int, replicas: int) -> dict[str, list[Any]]:
    """By case, for each rank the records without and with thinwire. Replicas are equal in both."""
    found = by_case(
        run_ranks(each_case, world_size, with_and_without, cases, compressor, replicas, timeout=MANY_CASES_SECONDS)
    )
    shards = world_size // replicas
    for name, ranks in found.items():
        for rank, (_, compressed) in enumerate(ranks):
            assert compressed.digest == ranks[rank % shards][1].digest, f"{name}: rank {rank} has other values"
    return found


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference between two lists of tensors, relative to the largest value of each tensor."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.size:
            worst = max(worst, float(abs(a - b).max() / max(abs(b).max(), 1e-9)))
    return worst


def test_floats_train_like_fsdp() -> None:
    for name, ranks in compared(EXACT, "none", 4, 2).items():
        for rank, (native, averaged) in enumerate(ranks):
            assert averaged.digest == native.digest, f"{name}, rank {rank}"
            assert averaged.norms == native.norms, f"{name}, rank {rank}"


def test_floats_are_rounded_later() -> None:
    cases = {name: replace(run, steps=1) for name, (run, _) in ROUNDED.items()}
    for name, ranks in compared(cases, "none", 4, 2).items():
        for rank, (native, averaged) in enumerate(ranks):
            found = difference(averaged.grads[0], native.grads[0])
            assert 0 < found < ROUNDED[name][1], f"{name}, rank {rank}: {found}"


def flat(tensors: list[Any]) -> np.ndarray:
    return np.concatenate([each.ravel() for each in tensors if each is not None])


@pytest.mark.parametrize(("world_size", "replicas"), [(4, 2), (2, 2), (3, 3)], ids=["2x2", "2x1", "3x1"])
def test_int4_is_close(world_size: int, replicas: int) -> None:
    """With error feedback errors do not add up: what one exchange leaves out comes with the next."""
    run = replace(PLAIN, steps=8, lr=0.0)
    for native, compressed in compared({"int4": run}, "int4", world_size, replicas)["int4"]:
        errors = [flat(ours) - flat(theirs) for ours, theirs in zip(compressed.grads, native.grads, strict=True)]
        norm = float(np.linalg.norm(flat(native.grads[0])))
        assert 0.01 < np.linalg.norm(errors[0]) / norm < 0.3
        assert np.linalg.norm(sum(errors)) / norm < 0.3


def digest_of(rank: int, world_size: int, run: FsdpRun, replicas: int) -> str:
    return train(rank, mesh_of(world_size, replicas), run).digest


@pytest.mark.parametrize(
    "names", [("powersgd", "topk", "laq"), pytest.param(NAMES, marks=pytest.mark.long)], ids=["three", "all"]
)
def test_replicas_are_equal_with_other_compressors(names: Sequence[str]) -> None:
    cases = {name: replace(PLAIN, compressor=name) for name in names}
    found = by_case(run_ranks(each_case, 4, digest_of, cases, 2, timeout=MANY_CASES_SECONDS))
    for name, (first, second, *others) in found.items():
        assert first != second
        assert others == [first, second], name


def test_replicas_of_one_node_are_averaged_as_floats() -> None:
    """Four replicas on two nodes."""
    cases = {str(name): replace(PLAIN, compressor=name) for name in ("none", "int4")}
    found = by_case(run_nodes(each_case, 2, 2, digest_of, cases, 4, timeout=MANY_CASES_SECONDS))
    for name, digests in found.items():
        assert len(set(digests)) == 1, name


def scaled(rank: int, world_size: int) -> list[tuple[float, str]]:
    """After each step, the scale and a digest of the parameters; rank 3 overflows in the fourth."""
    model = sharded(mesh_of(world_size, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    _ = thinwire.compress(model, "int4", grad_scaler=scaler)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(5):
        loss = loss_of(model, rank, step)
        scaler.scale(loss * torch.inf if (rank, step) == (3, 3) else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), digest(p.to_local() for p in model.parameters())))
    return found


def test_grad_scaler() -> None:
    ranks = run_ranks(scaled, 4)
    for rank, found in enumerate(ranks):
        assert [scale for scale, _ in found] == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0]
        assert found == ranks[rank % 2]
        digests = [each for _, each in found]
        assert digests[3] == digests[2]  # all ranks skip this step
        assert len(set(digests)) == 4


def mean_gradients(ranks: int, batch: int, skipped: list[int | None]) -> dict[str, torch.Tensor]:
    """The mean over the batches of all ranks, in one process and without FSDP."""
    model, total = transformer(), {}
    for rank in range(ranks):
        model.skipped = skipped[rank]
        (loss_of(model, rank, batch) / ranks).backward()
        total = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return total


def replicas_skip_blocks(rank: int, world_size: int) -> None:
    model = sharded(mesh_of(world_size, 2))
    thinwire.compress(model, "none", bucket_mb=0.002)
    for batch in range(3):
        skipped: list[int | None] = [(other // 2 + batch) % BLOCKS for other in range(world_size)]
        model.skipped = skipped[rank]
        loss_of(model, rank, batch).backward()
        expected = mean_gradients(world_size, batch, skipped)
        assert {name for name, p in model.named_parameters() if p.grad is not None} == expected.keys()
        for name, p in model.named_parameters():
            if name in expected and p.grad.to_local().numel():
                shard = expected[name].chunk(2)[rank % 2]
                torch.testing.assert_close(p.grad.to_local(), shard, msg=f"{name}, batch {batch}")
        model.zero_grad()


def test_replicas_may_use_different_parameters() -> None:
    run_ranks(replicas_skip_blocks, 4)


def exchange_during_backward(rank: int, world_size: int) -> list[tuple[str, int]]:
    """For each parameter in the order of its gradient, how many buckets were sent before."""
    model = sharded(mesh_of(world_size, 2))
    averager = thinwire.compress(model, "int4", bucket_mb=0.002)._averager
    found, add = [], averager.add

    def observed(p: torch.Tensor, gradient: torch.Tensor, *, present: bool = True) -> None:
        found.append((averager._names[p], averager._session._submitted))
        add(p, gradient, present=present)

    averager.add = observed  # type: ignore[method-assign]
    loss_of(model, rank, 0).backward()
    return found


def test_the_exchange_overlaps_backward() -> None:
    for found in run_ranks(exchange_during_backward, 4):
        order = list(dict.fromkeys(name.split(".")[1] if "blocks" in name else "root" for name, _ in found))
        assert order == ["2", "1", "0", "root"]
        sent = dict(found)
        assert 0 < sent["blocks.1.norm1.weight"] < sent["blocks.0.norm1.weight"] < sent["embedding.weight"]


def infinite_loss(rank: int, world_size: int) -> list[list[bool]]:
    """For each step, whether the gradients of all parameters are finite; rank 3 has an infinite loss in the second."""
    model, found = sharded(mesh_of(world_size, 2)), []
    compression = thinwire.compress(model, "int4", bucket_mb=0.002)
    for step in range(3):
        loss = loss_of(model, rank, step)
        (loss * torch.inf if (rank, step) == (3, 1) else loss).backward()
        grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        found.append([bool(grad.isfinite().all()) for grad in grads if grad.numel()])
        model.zero_grad()
    assert compression.metrics().skipped_steps == 1
    return found


def test_gradients_that_are_not_finite_reach_all_replicas() -> None:
    for first, second, third in run_ranks(infinite_loss, 4):
        assert all(first)
        assert not any(second)
        assert all(third)


def diverged(rank: int, world_size: int) -> str:
    """What a rank raises in the exchange after the parameters of rank 3 were changed."""
    model = sharded(mesh_of(world_size, 2))
    _ = thinwire.compress(model, check_replicas_every=1)
    loss_of(model, rank, 0).backward()
    if rank == 3:
        with torch.no_grad():
            model.blocks[1].up.weight.to_local()[0, 0] += 1
    try:
        loss_of(model, rank, 1).backward()
    except thinwire.ReplicasDiffer as error:
        return str(error)
    return ""


def test_replicas_that_differ_are_found() -> None:
    """By the ranks that hold the same shard."""
    first, second, third, fourth = run_ranks(diverged, 4)
    assert (first, third) == ("", "")
    assert second == fourth
    assert "parameter 'blocks.1.up.weight' differs between ranks: one value on rank 0, another on rank 1" in second


def left_alone(rank: int, world_size: int) -> bool:
    """Whether the ranks of one replica raise PeerLost in backward, when those of the other have closed."""
    model = sharded(mesh_of(world_size, 2))
    compression = thinwire.compress(model)
    loss_of(model, rank, 0).backward()
    if rank >= 2:
        compression.close()
        return False
    with pytest.raises(thinwire.PeerLost):
        loss_of(model, rank, 1).backward()
    return True


def test_a_lost_replica() -> None:
    assert run_ranks(left_alone, 4) == [True, True, False, False]


def resumed(rank: int, world_size: int) -> tuple[str, str]:
    """The digests after six steps in one run, and in two."""
    mesh = mesh_of(world_size, 2)

    def begin() -> tuple[Any, torch.optim.Optimizer, thinwire.Compression]:
        model = sharded(mesh)
        compression = thinwire.compress(model, "int3", bucket_mb=0.002)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), compression

    def take(steps: range, model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = begin()
    take(range(6), *whole[:2])
    half = begin()
    take(range(3), *half[:2])
    saved = [copy.deepcopy(each.state_dict()) for each in half]
    rest = begin()
    for each, state in zip(rest, saved, strict=True):
        each.load_state_dict(state)
    take(range(3, 6), *rest[:2])
    return tuple(digest(p.to_local() for p in model.parameters()) for model, *_ in (whole, rest))  # type: ignore[return-value]


def test_resume_is_exact() -> None:
    for whole, rest in run_ranks(resumed, 4):
        assert whole == rest


def collected(rank: int, world_size: int) -> bool:
    model = sharded(mesh_of(world_size, 2))
    averager = weakref.ref(thinwire.compress(model)._averager)
    loss_of(model, rank, 0).backward()
    assert averager() is not None  # the model keeps it
    del model
    gc.collect()
    return averager() is None


def test_the_exchange_ends_with_the_model() -> None:
    assert all(run_ranks(collected, 4))


def detached(rank: int, world_size: int) -> tuple[str, str, str, str]:
    """The gradients of a model after detach and of one that was never compressed; then of both, compressed."""
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # of the compiler
    mesh = mesh_of(world_size, 2)
    model, plain_model = sharded(mesh), sharded(mesh)
    _ = thinwire.compress(model, topology="flat")
    loss_of(model, rank, 0).backward()
    thinwire.detach(model)

    def gradients(of: Any) -> str:
        of.zero_grad()
        loss_of(of, rank, 1).backward()
        return digest(p.grad.to_local() for p in of.parameters() if p.grad is not None)

    after = gradients(model), gradients(plain_model)
    compiled_model: Any = torch.compile(plain_model, backend="aot_eager")
    for each in (model, compiled_model):
        _ = thinwire.compress(each, topology="flat")
    return *after, gradients(model), gradients(compiled_model)


def test_detach() -> None:
    for after, plain_gradients, again, new in run_nodes(detached, 4, 1):
        assert after == plain_gradients
        assert again == new != after


def compiled(rank: int, world_size: int) -> tuple[str, str]:
    # torch's compiler reads the .grad of intermediate tensors, which warns.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    mesh, digests = mesh_of(world_size, 2), []
    for compile_it in (False, True):
        model = sharded(mesh)
        thinwire.compress(model, "int4", bucket_mb=0.002)
        if compile_it:
            model.compile(backend="aot_eager")
        for step in range(2):
            loss_of(model, rank, step).backward()
        digests.append(digest(p.grad.to_local() for p in model.parameters() if p.grad is not None))
    return digests[0], digests[1]


def test_compiled_model() -> None:
    for eager, traced in run_ranks(compiled, 2):
        assert eager == traced


def final_loss(rank: int, world_size: int, compressor: str | None) -> float:
    """The mean loss of the last ten of sixty steps."""
    model = sharded(mesh_of(world_size, 2))
    if compressor is not None:
        thinwire.compress(model, compressor)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(60):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return float(np.mean(losses[-10:]))


def test_adamw_learns_as_without_compression() -> None:
    cases = {"native": None, "int4": "int4"}
    found = by_case(run_ranks(each_case, 4, final_loss, cases, timeout=MANY_CASES_SECONDS))
    native, compressed = np.mean(found["native"]), np.mean(found["int4"])
    assert native < 1.0  # log(29) = 3.4 at the start
    assert compressed < native + 0.15
