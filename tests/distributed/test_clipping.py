"""Clipping under `attach`: what `clip_norm` does against spikes, and changes of gradients that come too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import by_case, digest, each_case, environment, named, token_loss, token_net
from tests.harness import run_ranks
from tests.oracles import clipping as oracle

# Spikes --------------------------------------------------------------------------------------------------------------

SPIKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "OneBitAdam": (thinwire.OneBitAdam, {"lr": 0.02, "betas": (0.9, 0.9), "warmup_steps": 30}),
    "Birder": (thinwire.Birder, {"lr": 0.01}),
}


def regress(rank: int, world_size: int, case: tuple[Any, dict[str, Any]], **clip: Any) -> float:
    """The loss at the end of a regression in which gradients are 10,000 times too large in every twentieth step."""
    make, options = case
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    teacher = nn.Linear(16, 4)
    model = DistributedDataParallel(net)
    optimizer = make(net.parameters(), weight_decay=0.0, **options, **clip)
    thinwire.attach(model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(200):
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * (1 - step / 200)
        x = torch.randn(32, 16, generator=generator)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        losses.append(loss.item())
        (loss * (1e4 if step % 20 == 10 else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(np.mean(losses[-15:]))


def regress_both(rank: int, world_size: int, case: tuple[Any, dict[str, Any]]) -> tuple[float, float]:
    return regress(rank, world_size, case), regress(rank, world_size, case, clip_norm=0.5)


def test_spikes_ruin_a_run_and_clip_norm_saves_it() -> None:
    for name, ranks in by_case(run_ranks(each_case, 2, regress_both, SPIKES, timeout=100)).items():
        for without, with_norm in ranks:
            assert with_norm < 0.1, name
            assert without > 3 * with_norm, name


# Changes that come too late ------------------------------------------------------------------------------------------


def clip_norm(net: nn.Module) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def replace(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = None if p.grad is None else p.grad * 2


def write_one(net: nn.Module) -> None:
    (*_, p) = net.parameters()
    assert p.grad is not None
    p.grad[0] = 1.0


CHANGES: dict[str, Callable[[nn.Module], None]] = {"clip": clip_norm, "replace": replace, "write one": write_one}


def attached(**options: Any) -> tuple[nn.Module, DistributedDataParallel, thinwire.Birder]:
    net = token_net()
    model = DistributedDataParallel(net)
    optimizer = thinwire.Birder(net.parameters(), lr=1e-2)
    thinwire.attach(model, optimizer, **options)
    return net, model, optimizer


def change(rank: int, world_size: int, case: str, at_step: int, ranks: tuple[int, ...]) -> tuple[str, str]:
    net, model, optimizer = attached()
    for step in range(at_step):
        token_loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = digest(net.parameters())
    token_loss(model, rank, at_step).backward()
    if rank in ranks:
        CHANGES[case](net)
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    assert digest(net.parameters()) == before
    with pytest.raises(RuntimeError):  # for good
        optimizer.step()
    return type(raised.value).__name__, str(raised.value)


def change_in_turn(rank: int, world_size: int) -> dict[str, list[tuple[str, str]]]:
    told = {}
    for case in CHANGES:
        with named(case):
            told[case] = [change(rank, world_size, case, step, (0, 1)) for step in (0, 2)]
    return told


def test_a_gradient_that_is_changed_after_it_was_sent_is_an_error_in_the_first_step_and_later() -> None:
    for told in run_ranks(change_in_turn, 2):
        for case, steps in told.items():
            for kind, text in steps:
                assert kind == "GradientChanged", case
                for advice in ("clip_norm=", "overlap=False", "max_grad_norm=0", "parameter '"):
                    assert advice in text


def clip_to_infinity(rank: int, world_size: int) -> tuple[str, str]:
    """The parameters after a few steps, with a call that only computes the norm, as in transformers.Trainer, and
    without."""
    digests = []
    for clips in (True, False):
        net, model, optimizer = attached()
        for step in range(3):
            token_loss(model, rank, step).backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        digests.append(digest(net.parameters()))
    return digests[0], digests[1]


def test_a_write_that_changes_nothing_is_no_change() -> None:
    for with_norm, without in run_ranks(clip_to_infinity, 2):
        assert with_norm == without


def change_on_one(rank: int, world_size: int) -> tuple[str, str]:
    return change(rank, world_size, "clip", 2, (1,))


def change_on_a_stream(rank: int, world_size: int) -> tuple[str, str]:
    """As a GPU does it, where the host learns of the outcome later."""
    with environment({"THINWIRE_LANE": "stream"}):
        net, model, optimizer = attached()
        seen = []
        for step in range(3):
            seen.append(digest(net.parameters()))
            token_loss(model, rank, step).backward()
            if step == 2 and rank == 1:
                clip_norm(net)
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(RuntimeError) as raised:
            optimizer.metrics()
        assert digest(net.parameters()) == seen[-1]
        return type(raised.value).__name__, str(raised.value)


def test_a_change_on_one_rank_is_an_error_on_all_on_streams_too() -> None:
    told = run_ranks(change_on_a_stream, 2)
    assert [kind for kind, _ in told] == ["CorruptPacket", "GradientChanged"]


def test_a_change_on_one_rank_is_an_error_on_all() -> None:
    told = run_ranks(change_on_one, 3)
    assert [kind for kind, _ in told] == ["CorruptPacket", "GradientChanged", "CorruptPacket"]
    assert "rank 1 refused a packet of step 3: see the error of that rank" in told[0][1]


def fine(rank: int, world_size: int) -> dict[str, str]:
    """Changes that do not come too late, or are none: no error, and clipped in every step alike."""
    results = {}
    net, model, optimizer = attached(overlap=False)
    plain = token_net()
    unattached = thinwire.Birder(plain.parameters(), lr=1e-2)
    for step in range(3):
        for module, each in ((model, optimizer), (plain, unattached)):
            token_loss(module, rank, step).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            each.step()
            each.zero_grad()
        assert digest(net.parameters()) == digest(plain.parameters())
    results["overlap=False"] = digest(net.parameters())

    net = token_net()
    model = DistributedDataParallel(net)
    optimizer = thinwire.Birder(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    thinwire.attach(model, optimizer, grad_scaler=scaler)
    for step in range(3):
        scaler.scale(token_loss(model, rank, step)).backward()
        if step:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    results["unscale_"] = digest(net.parameters())

    net, model, optimizer = attached()
    for step in range(3):
        with model.no_sync():
            token_loss(model, rank, 10 + step).backward()
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)  # before the backward that sends it
        token_loss(model, rank, step).backward()
        optimizer.zero_grad()  # as usual: gradients that were sent stay sent
        optimizer.step()
    results["accumulation"] = digest(net.parameters())
    return results


def test_changes_that_are_in_time_are_none() -> None:
    first, second = run_ranks(fine, 2)
    assert first == second


# compress ------------------------------------------------------------------------------------------------------------


def average(rank: int, world_size: int, norm: float | None, value: float | None, scale: float) -> list[list[Any]]:
    """Averaged gradients of three steps with the compressor "none", and this rank's own before clipping."""
    net, own = token_net(), token_net()
    model = DistributedDataParallel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1 else None
    thinwire.compress(model, "none", clip_norm=norm, clip_value=value, grad_scaler=scaler)
    steps = []
    for step in range(3):
        loss, own_loss = token_loss(model, rank, step), token_loss(own, rank, step)
        ((loss if scaler is None else scaler.scale(loss)) * (100 if step == 1 else 1)).backward()
        (own_loss * (100 if step == 1 else 1)).backward()
        steps.append([[(p.grad / scale).numpy(), q.grad.numpy().copy()] for p, q in pairs(net, own)])
        net.zero_grad()
        own.zero_grad()
    return steps


def pairs(net: nn.Module, own: nn.Module) -> list[tuple[Any, Any]]:
    return list(zip(net.parameters(), own.parameters(), strict=True))


@pytest.mark.parametrize(("norm", "value", "scale"), [(0.25, None, 1.0), (0.5, 0.01, 256.0)])
def test_compress_clips_each_rank_before_it_averages(norm: float | None, value: float | None, scale: float) -> None:
    ranks = run_ranks(average, 2, norm, value, scale)
    sizes = [each[1].size for each in reversed(ranks[0][0])]
    oracles = [oracle.Clipping(sizes, norm, value) for _ in ranks]
    for step in range(3):
        clipped = [
            each.step([own for _, own in reversed(rank[step])]) for each, rank in zip(oracles, ranks, strict=True)
        ]
        for position, (mean, _) in enumerate(reversed(ranks[0][step])):
            first, second = (np.asarray(of_rank[position]) for of_rank in clipped)
            expected = (first + second) * np.float32(0.5)
            np.testing.assert_allclose(mean, expected, rtol=2e-6, atol=1e-12)
        whole = np.sqrt(sum(float((mean.astype(np.float64) ** 2).sum()) for mean, _ in ranks[0][step]))
        assert norm is None or whole <= norm * (1 + 1e-5)
