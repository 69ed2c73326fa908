"""What every optimizer of thinwire must do, whatever its paper. A new one is a line in `OPTIMIZERS`."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import (
    Training,
    assert_same_runs,
    digest,
    run_nodes,
    token_loss,
    token_net,
    trained_each,
)
from tests.distributed.stages import PAPER
from tests.instruction_sets import instruction_sets


@dataclass(frozen=True)
class Entry:
    optimizer: type[torch.optim.Optimizer]
    lr: float
    """A learning rate at which it learns the small classification below within 150 steps."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Such that all its stages are over, or under way, after 15 steps."""
    dense_steps: int = 0
    """How many of the first three steps send gradients as they are."""
    buckets_matter: bool = False
    """Whether results depend on the size of buckets, because scales do."""
    sparse: bool = False
    """Whether a step moves some coordinates only."""
    variant: str = ""
    """What is special about it, where an optimizer stands here more than once."""

    def __str__(self) -> str:
        return self.optimizer.__name__ + (f"-{self.variant}" if self.variant else "")

    def make(self, params: Any, **options: Any) -> Any:
        return self.optimizer(params, **{**self.options, **options})


WARM_UP = {"betas": (0.9, 0.9), "warmup_steps": 10}
INT4 = {"warmup_bits": 4}
BLOCKS = {"scale_block": 128}
VARIANCE = {
    "betas": (0.9, 0.9),
    "var_freeze_step": 10,
    "var_update_scaler": 4,
    "local_step_scaler": 3,
    "local_step_clipper": 4,
}
OPTIMIZERS = [
    Entry(thinwire.Birder, lr=0.02),
    Entry(thinwire.DistributedLion, lr=0.02),
    Entry(thinwire.OneBitAdam, 0.04, {**WARM_UP, **PAPER}, dense_steps=3, buckets_matter=True),
    Entry(thinwire.OneBitAdam, 0.04, {**WARM_UP, **INT4}, buckets_matter=True, variant="int4-warm-up"),
    Entry(thinwire.OneBitAdam, 0.04, {**WARM_UP, **INT4, **BLOCKS}, buckets_matter=True, variant="blocks"),
    Entry(thinwire.ZeroOneAdam, 0.06, VARIANCE, dense_steps=3, buckets_matter=True),
    Entry(thinwire.ZeroOneAdam, 0.06, {**VARIANCE, **INT4}, buckets_matter=True, variant="int4-warm-up"),
    Entry(thinwire.Lamb, 0.05, dense_steps=3),
    Entry(thinwire.OneBitLamb, 0.12, WARM_UP, dense_steps=3, buckets_matter=True),
    Entry(thinwire.OneBitLamb, 0.12, {**WARM_UP, **INT4}, buckets_matter=True, variant="int4-warm-up"),
    Entry(thinwire.CDAdam, 0.06, buckets_matter=True),
    Entry(thinwire.CDAdam, 0.06, {"codec": "topk", "ratio": 0.1}, buckets_matter=True, sparse=True, variant="topk"),
    Entry(thinwire.SketchedAMSGrad, 0.02, sparse=True),
]

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS, ids=str)


@dataclass(frozen=True)
class Grid:
    """Nodes, and ranks a node. With one rank on each it is a flat topology."""

    nodes: int
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks}"

    @property
    def environment(self) -> dict[str, str]:
        """As torchrun sets it."""
        return {"LOCAL_WORLD_SIZE": str(self.ranks)}

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Every rank's result."""
        return run_nodes(function, self.nodes, self.ranks, *args, timeout=timeout)


HIERARCHY = Grid(2, 2)


def each_grid(*flat: int, long: Sequence[int | Grid] = ()) -> pytest.MarkDecorator:
    """Flat topologies of so many ranks, and a hierarchical one; those in `long` run in `make test-all` only."""
    others = [pytest.param(grid if isinstance(grid, Grid) else Grid(grid), marks=pytest.mark.long) for grid in long]
    grids = [grid for grid in (*map(Grid, flat), HIERARCHY) if grid not in long]
    return pytest.mark.parametrize("grid", [*grids, *others], ids=str)


def test_every_public_optimizer_is_in_the_table() -> None:
    public = [getattr(thinwire, name) for name in thinwire.__all__]
    classes = {c for c in public if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    # Local steps are of any optimizer, and the other two send nothing.
    assert classes - {thinwire.LocalSteps, thinwire.MuonAdamW, thinwire.SignSGD} == {
        entry.optimizer for entry in OPTIMIZERS
    }


# Learning ------------------------------------------------------------------------------------------------------------

FEATURES, CLASSES, SAMPLES, STEPS = 20, 5, 512, 150
LEARNT = 0.4
"""A loss that says the task was learnt; not knowing anything is log(5) = 1.6."""


def classification(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the data: labels are those of a hidden linear teacher."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    return inputs[rank::world_size], labels[rank::world_size]


def learn(rank: int, world_size: int, entry: Entry) -> tuple[float, float, str]:
    torch.manual_seed(0)
    net = nn.Linear(FEATURES, CLASSES)
    model = DistributedDataParallel(net)
    optimizer = entry.make(net.parameters(), lr=entry.lr)
    thinwire.attach(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    inputs, labels = classification(rank, world_size)
    losses = []
    for step in range(STEPS):
        batch = torch.arange(step * 32, step * 32 + 32) % len(inputs)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    optimizer.synchronize()
    return losses[0], float(np.mean(losses[-10:])), digest(net.parameters())


@every_optimizer
@each_grid(2, long=(1, 4, HIERARCHY))
def test_it_learns_and_replicas_stay_equal(grid: Grid, entry: Entry) -> None:
    results = grid.run(learn, entry)
    for first, last, replica in results:
        assert first > 1.5
        assert last < LEARNT
        assert replica == results[0][2]


@every_optimizer
def test_random_steps_of_that_size_do_not_learn_it(entry: Entry) -> None:
    """Otherwise the test above would say nothing."""
    inputs, labels = classification(0, 1)
    best = math.inf
    for seed in range(20):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        net = nn.Linear(FEATURES, CLASSES)
        with torch.no_grad():
            for step in range(STEPS):
                for p in net.parameters():
                    coins = 2.0 * torch.randint(0, 2, p.shape, generator=generator) - 1
                    p += entry.lr * (1 - step / STEPS) * coins
            best = min(best, nn.functional.cross_entropy(net(inputs), labels).item())
    assert best > 2 * LEARNT


# The laws ------------------------------------------------------------------------------------------------------------


CLIPPED = {"clip_norm": 0.3, "clip_value": 0.05}
"""Limits that the gradients of `token_loss` exceed, but not all of them and not always."""


def overlapped_and_plain(grid: Grid, entry: Entry, **more: Any) -> tuple[Training, Training]:
    """Two runs, the second without overlap, and with other buckets if it may have them."""
    options = {"lr": entry.lr, "bucket_mb": 0.01, **more}
    overlapped = Training(entry.make, options, steps=16, environment=grid.environment, attach=True)
    # Who sketches what in a node depends on buckets, and the rounding of sums on that.
    buckets_matter = entry.buckets_matter or (entry.optimizer is thinwire.SketchedAMSGrad and grid.ranks > 1)
    other_size = options["bucket_mb"] if buckets_matter else None
    return overlapped, dataclasses.replace(overlapped, attach=False, options={**options, "bucket_mb": other_size})


@every_optimizer
@each_grid(3, long=(1,))
def test_overlap_and_bucket_size_change_nothing(grid: Grid, entry: Entry) -> None:
    assert_same_runs(grid.nodes * grid.ranks, *overlapped_and_plain(grid, entry))


@every_optimizer
@each_grid(3, long=(1, HIERARCHY))
def test_overlap_and_bucket_size_change_nothing_where_gradients_are_clipped(grid: Grid, entry: Entry) -> None:
    overlapped, plain = overlapped_and_plain(grid, entry, **CLIPPED)
    unclipped = dataclasses.replace(overlapped_and_plain(grid, entry)[0], steps=2)
    runs = trained_each(grid.nodes * grid.ranks, [overlapped, plain, unclipped])
    assert runs[0] == runs[1]
    assert [digests[:2] for digests in runs[0]] != runs[2], "nothing was clipped"


@every_optimizer
@each_grid(2, long=(3, HIERARCHY))
def test_all_kernels_give_the_same_bits(grid: Grid, entry: Entry) -> None:
    """The native kernels of the machine's best instruction set; with more ranks, those of every instruction set."""
    world_size = grid.nodes * grid.ranks
    choices = [{"THINWIRE_KERNELS": "reference"}, {"THINWIRE_KERNELS": "native"}]
    if world_size > 2:
        choices += [{"THINWIRE_KERNELS": "native", "THINWIRE_ISA": isa} for isa in instruction_sets()]
    runs = [
        Training(entry.make, {"lr": entry.lr}, steps=18, environment={**grid.environment, **variables})
        for variables in choices
    ]
    assert_same_runs(world_size, *runs)


SAVED_AFTER = {4: 10, 15: 6}
"""After which steps runs are saved, and how many are compared from there: the first ten cross the end of a warm-up."""


def resume(rank: int, world_size: int, entry: Entry) -> dict[int, tuple[list[str], list[str]]]:
    """What a run has in the steps after it was saved, and what one has in them that began there."""

    def start() -> tuple[nn.Module, Any]:
        net = token_net()
        return net, entry.make(net.parameters(), lr=entry.lr, clip_norm=CLIPPED["clip_norm"])

    def train(net: nn.Module, optimizer: Any, steps: range) -> list[str]:
        digests = []
        for step in steps:
            token_loss(net, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(net.parameters()))
        return digests

    net, optimizer = start()
    never_stopped: list[str] = []
    checkpoints: dict[int, io.BytesIO] = {}
    for step in range(max(steps + compared for steps, compared in SAVED_AFTER.items())):
        if step in SAVED_AFTER:
            optimizer.synchronize()  # 0/1 Adam refuses to save between two synchronizations
            checkpoints[step] = io.BytesIO()
            torch.save((net.state_dict(), optimizer.state_dict()), checkpoints[step])
        never_stopped += train(net, optimizer, range(step, step + 1))

    compared = {}
    for steps, checkpoint in checkpoints.items():
        net, optimizer = start()
        checkpoint.seek(0)
        weights, state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
        afterwards = range(steps, steps + SAVED_AFTER[steps])
        compared[steps] = [never_stopped[step] for step in afterwards], train(net, optimizer, afterwards)
    return compared


@every_optimizer
@each_grid(2)
def test_resuming_is_exact(grid: Grid, entry: Entry) -> None:
    for compared in grid.run(resume, entry):
        assert list(compared) == list(SAVED_AFTER)
        for steps, (never_stopped, resumed) in compared.items():
            assert resumed == never_stopped, f"saved after {steps} steps"


def skip(rank: int, world_size: int, entry: Entry) -> list[tuple[bool, int, bool]]:
    """(moved, skipped so far, state finite) after each of five steps; rank 1 has a NaN in the third."""
    net = token_net()
    optimizer = entry.make(net.parameters(), lr=entry.lr)
    seen = []
    for step in range(5):
        before = digest(net.parameters())
        token_loss(net, rank, step).backward()
        if rank == 1 and step == 2:
            gradient = net.get_parameter("hidden.bias").grad
            assert gradient is not None
            gradient[5] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        finite = all(bool(s.isfinite().all()) for p in net.parameters() for s in optimizer.state[p].values())
        seen.append((digest(net.parameters()) != before, optimizer.metrics().skipped_steps, finite))
    return seen


@every_optimizer
@each_grid(3)
def test_a_nan_on_one_rank_skips_the_step_on_all(grid: Grid, entry: Entry) -> None:
    for seen in grid.run(skip, entry):
        assert seen == [(True, 0, True), (True, 0, True), (False, 1, True), (True, 1, True), (True, 1, True)]


def rest(rank: int, world_size: int, entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper half of the vocabulary never occurs."""
    net = token_net()
    optimizer = entry.make(net.parameters(), lr=entry.lr, weight_decay=0.1)
    embedding = net.get_parameter("embedding.weight")
    start = embedding.detach().clone()
    for step in range(20):
        token_loss(net, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return start, embedding


@every_optimizer
@each_grid(2, long=(HIERARCHY,))
def test_rows_without_a_gradient_keep_their_value(grid: Grid, entry: Entry) -> None:
    for start, end in grid.run(rest, entry):
        np.testing.assert_array_equal(start[25:], end[25:])
        moved = start[:25] != end[:25]
        assert moved.any() if entry.sparse else moved.all()


# The interface of torch.optim ----------------------------------------------------------------------------------------


@every_optimizer
def test_a_closure_is_evaluated_once_and_its_loss_returned(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = entry.make([p], lr=entry.lr)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        losses.append(loss)
        return loss

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert torch.any(p < 1) if entry.sparse else torch.all(p < 1)


@every_optimizer
def test_a_scheduler_can_stop_it(entry: Entry) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = entry.make([p], lr=entry.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 3 else 0.0)
    values = []
    for _ in range(6):
        p.grad = torch.ones(5)
        optimizer.step()
        scheduler.step()
        values.append(digest([p]))
    assert len(set(values)) == 3
    assert len(set(values[2:])) == 1


@every_optimizer
def test_groups_have_their_own_learning_rate(entry: Entry) -> None:
    still, moving = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = entry.make([{"params": [still], "lr": 0.0}, {"params": [moving]}], lr=entry.lr)
    still.grad, moving.grad = torch.ones(5), torch.ones(5)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(5))
    assert torch.all(moving < 1)


@every_optimizer
def test_a_negative_learning_rate_is_refused(entry: Entry) -> None:
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        entry.make([nn.Parameter(torch.ones(5))], lr=-1.0)


def measured(rank: int, world_size: int, entry: Entry) -> dict[str, float]:
    net = token_net()
    optimizer = entry.make(net.parameters(), lr=entry.lr)
    before = dataclasses.asdict(optimizer.metrics())
    assert all(math.isnan(before.pop(name)) for name in ("mean_abs_vote", "contraction"))
    assert before.pop("elapsed_seconds") > 0
    assert not any(before.values()), f"something was counted before the first step: {before}"
    for step in range(3):
        token_loss(net, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dataclasses.asdict(optimizer.metrics())


@every_optimizer
@each_grid(2)
def test_metrics_count_what_happened(grid: Grid, entry: Entry) -> None:
    elements = sum(p.numel() for p in token_net().parameters())
    share = elements / grid.ranks
    for metrics in grid.run(measured, entry):
        assert metrics["steps"] == 3
        assert metrics["skipped_steps"] == 0
        assert metrics["rounds"] >= 2 * 3
        dense = share * 4 * entry.dense_steps
        assert dense + share / 8 * (3 - entry.dense_steps) < metrics["bytes_sent"] < 1.1 * dense + 0.25 * share * 4 * 3
        assert metrics["bytes_received"] == metrics["bytes_sent"]
        for name in ("encode_seconds", "merge_seconds", "apply_seconds", "wire_seconds", "exposed_wait_seconds"):
            assert 0 < metrics[name] < 60, name
        for name in ("node_bytes_sent", "stage_seconds", "node_seconds"):
            assert (metrics[name] > 0) is (grid.ranks > 1), name
        for name in ("mean_abs_vote", "contraction"):
            assert math.isnan(metrics[name]) or 0 <= metrics[name] <= 1, name


# Documentation -------------------------------------------------------------------------------------------------------


@every_optimizer
def test_the_docstring_says_what_a_user_must_know(entry: Entry) -> None:
    text = entry.optimizer.__doc__ or ""
    assert re.search(r"::\n\n +\S+ (←|=) ", text), "the formula, as the paper has it, indented"
    assert re.search(r"\([^)]+, [^)]*\d{4}\)", text.splitlines()[0]), "the citation, in the first line"
    for section in ("Args:", "When not to use it:", "Differences from the paper:"):
        assert re.search(rf"^ *{section}$\n +\S", text, re.MULTILINE), section
