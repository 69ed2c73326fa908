"""What went wrong in DeepSpeed's 1-bit optimizers, as it was published, a test each; DESIGN.md lists them as traps."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.common import digest, run_nodes, token_loss, token_net
from tests.distributed.stages import FREEZE, LOCAL_STEPS, STAGES, flat, make, noise, parameters
from tests.harness import run_ranks

each_optimizer = pytest.mark.parametrize("name", STAGES)


# "The fp32 path drops the first gradient" ----------------------------------------------------------------------------


def first_step(rank: int, world_size: int, name: str) -> dict[str, Any]:
    (p,) = parameters((13, 11))
    start = p.detach().clone()
    optimizer = make(name, [p], lr=0.1, weight_decay=0.2, eps=1e-6)
    p.grad = noise((13, 11), rank, 1)
    optimizer.step()
    return {"start": start, "end": p, "m": optimizer.state[p]["m"], "v": optimizer.state[p]["v"]}


@each_optimizer
def test_first_gradient_dropped_in_fp32(name: str) -> None:
    mean = np.mean([noise((13, 11), rank, 1).double().numpy() for rank in range(2)], axis=0)
    for seen in run_ranks(first_step, 2, name):
        np.testing.assert_allclose(seen["m"], 0.1 * mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(seen["v"], 0.1 * mean**2, rtol=1e-5, atol=1e-7)
        x = seen["start"].astype(np.float64)
        direction = mean / (np.abs(mean) + 1e-6) + 0.2 * x
        coefficient = np.linalg.norm(x) / np.linalg.norm(direction) if "Lamb" in name else 1.0
        np.testing.assert_allclose(seen["end"], x - 0.1 * coefficient * direction, rtol=1e-4, atol=1e-5)


# "Rows that never had a gradient explode after the freeze" -----------------------------------------------------------

NEVER, LATE = slice(5, 7), 7
"""Rows of a table. The late one has its first gradient after the freeze, on the last rank alone."""
FIRST_LATE_STEP = FREEZE + 4


def rows_at_rest(rank: int, world_size: int, name: str) -> list[list[torch.Tensor]]:
    """A table, a parameter of zero gradients, one without any, and one without any before the freeze."""
    table, zeros, _absent, late = params = parameters((9, 70), (66,), (5,), (130,))
    optimizer = make(name, params, lr=0.05, weight_decay=5.0, bucket_mb=0.002)
    seen = [[p.detach().clone() for p in params]]
    for step in range(1, 31):
        table.grad = noise((9, 70), rank, step)
        table.grad[NEVER] = 0
        if step < FIRST_LATE_STEP or rank < world_size - 1:
            table.grad[LATE] = 0
        zeros.grad = torch.zeros(66)
        late.grad = noise((130,), rank, step, 1) if step >= FIRST_LATE_STEP else None
        optimizer.step()
        seen.append([p.detach().clone() for p in params])
    return seen


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
@each_optimizer
def test_a_row_that_never_had_a_gradient_explodes_after_the_freeze(name: str, nodes: int, ranks: int) -> None:
    """Weight decay would be 0.75 a step. What has its first gradient after the freeze has no variance, ever."""
    for seen in run_nodes(rows_at_rest, nodes, ranks, name):
        start = seen[0]
        for step, (table, zeros, absent, late) in enumerate(seen):
            np.testing.assert_array_equal(table[NEVER], start[0][NEVER])
            np.testing.assert_array_equal(zeros, start[1])
            np.testing.assert_array_equal(absent, start[2])
            if step < FIRST_LATE_STEP or name != "Lamb":  # LAMB freezes nothing
                np.testing.assert_array_equal(table[LATE], start[0][LATE])
                np.testing.assert_array_equal(late, start[3])
            for values in (table, late):
                assert np.abs(values).max() < 10, f"exploded in step {step}"
        moved = seen[-1][0] != start[0]
        assert moved[:5].all()
        assert moved[8].all()
        if name == "Lamb":
            assert moved[LATE].all()
            assert np.all(seen[-1][3] != start[3])


# "Weight decay in 0/1 Adam leaks into the momentum, 10 times the configured value" -----------------------------------

LR, DECAY = 0.01, 20.0


def decayed(rank: int, world_size: int, name: str, weight_decay: float) -> list[tuple[torch.Tensor, str, bool]]:
    """Gradients up to the freeze, zeros after it; what momenta, errors and answers are after every step."""
    params = parameters((13, 7), (70,), ())
    optimizer = make(name, params, lr=LR, weight_decay=weight_decay)
    seen = []
    for step in range(1, 31):
        for i, p in enumerate(params):
            p.grad = noise(tuple(p.shape), rank, step, i) if step <= FREEZE else torch.zeros_like(p)
        optimizer.step()
        kept = [
            value
            for p in params
            for key, value in sorted(optimizer.state[p].items())
            if key not in ("anchor", "interval")  # a value, and what weight decay has left of it
        ]
        seen.append((flat(params), digest(kept), optimizer.is_synchronized))
    return seen


@pytest.mark.parametrize("name", ["ZeroOneAdam", "OneBitAdam"])
def test_weight_decay_leaks_into_the_momentum(name: str) -> None:
    """With decay and without, momenta and steps are the same; values shrink by the factor that was asked for."""
    with_decay, without = (run_ranks(decayed, 2, name, weight_decay) for weight_decay in (DECAY, 0.0))
    start = flat(parameters((13, 7), (70,), ())).numpy()
    for of_rank, of_rank_without in zip(with_decay, without, strict=True):
        assert [kept for _, kept, _ in of_rank] == [kept for _, kept, _ in of_rank_without]
        before, agreed = (0, start, start), (0, start, start)
        for step, (ours, theirs) in enumerate(zip(of_rank, of_rank_without, strict=True), 1):
            (x, _, synchronized), plain_x = ours, theirs[0]
            then, x_then, plain_then = agreed if synchronized else before
            shrunk = (1 - LR * DECAY) ** (step - then) * x_then
            np.testing.assert_allclose(x, shrunk + (plain_x - plain_then), rtol=0, atol=2e-6)
            before = (step, x, plain_x)
            agreed = before if synchronized else agreed
        assert np.abs(before[2] - start).max() > 0.02
        assert {synchronized for *_, synchronized in of_rank} == ({True, False} if name == "ZeroOneAdam" else {True})


# "Its reload splits replicas" ----------------------------------------------------------------------------------------

SAVED_AT = {
    "OneBitAdam": (4, FREEZE, 15),
    "ZeroOneAdam": (3, 5, FREEZE, 14, 15, 20),
    "Lamb": (4,),
    "OneBitLamb": (4, FREEZE, FREEZE + 1, 15),
}
LAST = 23
Digests = list[tuple[int, bool, str]]


class Run:
    def __init__(self, name: str, rank: int) -> None:
        self.rank = rank
        self.net = token_net()
        self.optimizer = make(name, self.net.parameters(), weight_decay=0.1)

    def train(self, steps: range) -> Digests:
        seen = []
        for step in steps:
            token_loss(self.net, self.rank, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append((step, self.optimizer.is_synchronized, digest(self.net.parameters())))
        return seen

    def save(self) -> bytes:
        buffer = io.BytesIO()
        # state_dict() refuses to save between two synchronizations.
        state = self.optimizer._state_of_this_rank()
        torch.save({"net": self.net.state_dict(), "optimizer": state}, buffer)
        return buffer.getvalue()

    def load(self, weights: bytes, state: bytes) -> None:
        self.net.load_state_dict(torch.load(io.BytesIO(weights), weights_only=True)["net"])
        self.optimizer.load_state_dict(torch.load(io.BytesIO(state), weights_only=True)["optimizer"])


def never_stopped(rank: int, world_size: int, name: str, synchronise: bool) -> tuple[dict[int, bytes], Digests]:
    """Checkpoints on the way, and what came of it."""
    run, saved, seen = Run(name, rank), {}, []
    for step in range(1, LAST + 1):
        seen += run.train(range(step, step + 1))
        if step in SAVED_AT[name]:
            if synchronise:
                run.optimizer.synchronize()
            saved[step] = run.save()
    return saved, seen


def resumed(
    rank: int, world_size: int, name: str, saved: list[dict[int, bytes]], weights_of_rank_0: bool
) -> dict[int, Digests]:
    seen = {}
    for step, state in saved[rank].items():
        run = Run(name, rank)
        nn.init.zeros_(run.net.get_parameter("hidden.weight"))  # what is not loaded shows
        run.load(saved[0][step] if weights_of_rank_0 else state, state)
        seen[step] = run.train(range(step + 1, LAST + 1))
    return seen


def assert_replicas_meet(of_ranks: list[Digests]) -> None:
    for of_rank in of_ranks:
        for (_, synchronized, parameters_now), first in zip(of_rank, of_ranks[0], strict=True):
            assert synchronized == first[1]
            assert not synchronized or parameters_now == first[2]


@each_optimizer
def test_reload_splits_replicas(name: str) -> None:
    """Every rank has saved its own weights, which in ZeroOneAdam's local steps differ. New processes go on."""
    went_on = run_ranks(never_stopped, 2, name, False)
    runs = run_ranks(resumed, 2, name, [saved for saved, _ in went_on], False)
    for rank, (_, seen) in enumerate(went_on):
        assert len({parameters_now for *_, parameters_now in seen}) == LAST
        for step in SAVED_AT[name]:
            assert runs[rank][step] == seen[step:]
    assert_replicas_meet([seen for _, seen in went_on])
    parted = [ours[0] for ours, theirs in zip(went_on[0][1], went_on[1][1], strict=True) if ours != theirs]
    assert parted == ([step for step in LOCAL_STEPS if step <= LAST] if name == "ZeroOneAdam" else [])


def test_reload_splits_replicas_after_synchronize_and_with_one_file_of_weights() -> None:
    """Weights of rank 0 for everybody, as most people save them; states are each rank's own."""
    went_on = run_ranks(never_stopped, 2, "ZeroOneAdam", True)
    runs = run_ranks(resumed, 2, "ZeroOneAdam", [saved for saved, _ in went_on], True)
    for rank, (_, seen) in enumerate(went_on):
        # A later synchronize() is no part of an earlier resumption.
        assert runs[rank][SAVED_AT["ZeroOneAdam"][-1]] == seen[SAVED_AT["ZeroOneAdam"][-1] :]
    for step in SAVED_AT["ZeroOneAdam"]:
        assert_replicas_meet([of_rank[step] for of_rank in runs])


def test_reload_splits_replicas_with_one_file_of_weights_from_a_local_step() -> None:
    """Not what one should do. All the same replicas are equal as soon as they synchronise."""
    went_on = run_ranks(never_stopped, 2, "ZeroOneAdam", False)
    runs = run_ranks(resumed, 2, "ZeroOneAdam", [saved for saved, _ in went_on], True)
    for step in SAVED_AT["ZeroOneAdam"]:
        assert_replicas_meet([of_rank[step] for of_rank in runs])


# "Four collectives per tensor made 644 a step" -----------------------------------------------------------------------


def rounds_of_steps(rank: int, world_size: int, name: str) -> tuple[int, list[int]]:
    params = parameters(*[(100,)] * 50)
    optimizer = make(name, params, bucket_mb=0.01)
    counts = [0]
    for step in range(1, 26):
        for i, p in enumerate(params):
            p.grad = noise((100,), rank, step, i)
        optimizer.step()
        counts.append(optimizer.metrics().rounds)
    return len(optimizer._session.layout.buckets), np.diff(counts).tolist()


@each_optimizer
def test_four_collectives_a_tensor(name: str) -> None:
    """Two rounds a bucket, however many tensors, and one at the end; none in a local step."""
    for buckets, rounds in run_ranks(rounds_of_steps, 2, name):
        assert 1 < buckets < 5
        local = LOCAL_STEPS if name == "ZeroOneAdam" else ()
        assert rounds == [0 if step in local else 2 * buckets + 1 for step in range(1, 26)]


# "max_coeff=1 in LAMB stops training for good" -----------------------------------------------------------------------


def learn(rank: int, world_size: int, name: str) -> tuple[list[float], float]:
    """A small classification; the loss before every step, and at last what bounded the layer's steps."""
    inputs = noise((256, 20), rank, 7)
    labels = (inputs @ noise((20, 5), 8)).argmax(1)
    weight = nn.Parameter(3 * noise((20, 5), 9))  # so large that its factor is more than 1
    optimizer = make(name, [weight], lr=0.2, weight_decay=0.0, max_coeff=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 70)
    losses = []
    for step in range(70):
        batch = torch.arange(step * 32, step * 32 + 32) % 256
        loss = nn.functional.cross_entropy(inputs[batch] @ weight, labels[batch])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, float(optimizer.state[weight].get("coefficient", 1.0))


@pytest.mark.parametrize("name", ["Lamb", "OneBitLamb"])
def test_max_coeff_1_in_lamb_stops_training_for_good(name: str) -> None:
    """Factors of exactly 1 were left out of the average that takes their place after the freeze: it stayed 0."""
    for losses, coefficient in run_ranks(learn, 2, name):
        assert coefficient == pytest.approx(1.0)
        at_the_switch = losses[FREEZE]
        assert at_the_switch < 0.8 * losses[0]
        assert np.mean(losses[-5:]) < 0.1 * at_the_switch
