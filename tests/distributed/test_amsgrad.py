"""CDAdam and SketchedAMSGrad: replicas after hundreds of steps, what they become when nothing is left out, their bytes,
and how they go along with DDP, low precision and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import Training, brain_net, digest, run_nodes, train_each
from tests.distributed.stages import flat, noise, parameters
from tests.harness import run_ranks


@dataclass(frozen=True)
class Kind:
    """An optimizer, and which of its states are the same on all ranks."""

    optimizer: type[torch.optim.Optimizer]
    common: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, params: Any, **options: Any) -> Any:
        return self.optimizer(params, **{**self.options, **options})


AMSGRAD = ("m", "v", "peak", "updates", "followed")
KINDS = {
    "signs": Kind(thinwire.CDAdam, (*AMSGRAD, "alive", "spoke")),
    "signs of momenta": Kind(thinwire.CDAdam, (*AMSGRAD, "alive", "spoke"), {"compress": "momentum"}),
    "top-k": Kind(thinwire.CDAdam, AMSGRAD, {"codec": "topk"}),
    "sketch": Kind(thinwire.SketchedAMSGrad, ("v", "peak", "rate")),
}
each_kind = pytest.mark.parametrize("name", KINDS)


# Law 1 ---------------------------------------------------------------------------------------------------------------

TOKENS, WIDTH = 8, 9
USED = TOKENS * WIDTH + WIDTH * 70 + 70 + 70 * 5 + 5


class Small(nn.Module):
    """The last four rows of the embedding never have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS + 4, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


def train_long(rank: int, world_size: int, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net, kind = Small(), KINDS[name]
    start = flat(net.parameters())
    optimizer = kind.make(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(200):
        tokens = torch.randint(0, TOKENS, (16,), generator=generator)
        labels = torch.randint(0, 5, (16,), generator=generator)
        nn.functional.cross_entropy(net(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [optimizer.state[p] for p in net.parameters()]
    return {
        "common": {name: digest(of_p[name] for of_p in state) for name in kind.common},
        "parameters": digest(net.parameters()),
        "own": digest(of_p[own] for of_p in state for own in ("known", "error") if own in of_p),
        "moved": int((flat(net.parameters()) != start).sum()),
        "followed": flat(of_p["followed"] for of_p in state) if "followed" in kind.common else None,
        "living": [np.unpackbits(of_p["alive"].numpy().view(np.uint8)).sum() for of_p in state if "alive" in of_p],
    }


@each_kind
@pytest.mark.parametrize(("nodes", "ranks"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_replicas_are_equal_after_hundreds_of_steps(nodes: int, ranks: int, name: str) -> None:
    results = run_nodes(train_long, nodes, ranks, name)
    first = results[0]
    for of_rank in results:
        assert of_rank["common"] == first["common"]
        assert of_rank["parameters"] == first["parameters"]
    assert len({of_rank["own"] for of_rank in results}) == nodes * ranks, "ranks had the same to say"
    assert 200 < first["moved"] <= USED
    if first["followed"] is not None:
        assert np.isfinite(first["followed"]).all()
        assert 200 < np.count_nonzero(first["followed"]) <= USED
    if name.startswith("signs"):
        assert first["living"] == [TOKENS * WIDTH, WIDTH * 70, 70, 70 * 5, 5]
        assert first["moved"] == USED


# Ranks that differ ---------------------------------------------------------------------------------------------------

DIFFERENCES: dict[type[torch.optim.Optimizer], dict[str, tuple[Any, Any, Any]]] = {
    thinwire.CDAdam: {
        "codec": ("sign", "sign", "topk"),
        "ratio": (0.1, 0.2, 0.1),
        "compress": ("momentum", "gradient", "gradient"),
        "bucket_mb": (1.0, 2.0, 1.0),
    },
    thinwire.SketchedAMSGrad: {"seed": (0, 1, 2), "rows": (5, 5, 4), "columns": (64, 65, 64), "k": (11, 10, 10)},
}


def disagree(rank: int, world_size: int, optimizer: Any, attach: bool) -> dict[str, str]:
    """What `attach` or the first step says of each difference; nobody hangs, so that the next can be tried."""
    said = {}
    for option, values in DIFFERENCES[optimizer].items():
        torch.manual_seed(0)
        net = nn.Linear(30, 3)
        before = digest(net.parameters())
        made = optimizer(net.parameters(), **{option: values[rank]})
        try:
            if attach:
                thinwire.attach(DistributedDataParallel(net), made)
            else:
                for p in net.parameters():
                    p.grad = torch.ones_like(p)
                made.step()
        except RuntimeError as error:
            said[option] = str(error)
        assert digest(net.parameters()) == before, "it moved"
    return said


@pytest.mark.parametrize("attach", [False, True], ids=["first step", "attach"])
@pytest.mark.parametrize("optimizer", DIFFERENCES, ids=lambda optimizer: optimizer.__name__)
def test_ranks_that_differ_in_a_setting_are_told_so_everywhere(optimizer: Any, attach: bool) -> None:
    for said in run_ranks(disagree, 3, optimizer, attach):
        for option, values in DIFFERENCES[optimizer].items():
            assert said[option].startswith(f"ranks disagree on {option}: {values[0]!r} on rank")
            for value in values:
                holders = [str(rank) for rank in range(3) if values[rank] == value]
                ranks = f"rank{'s' * (len(holders) > 1)} {', '.join(holders)}"
                assert f"{value!r} on {ranks}" in said[option]


# Nothing left out ----------------------------------------------------------------------------------------------------

SHAPES = ((70,), (9, 8), ())
ELEMENTS = 70 + 9 * 8 + 1
DECAY = 0.1


def rate(step: int) -> float:
    return 0.01 / (1 + step % 4)


def gradients_at(step: int, rank: int) -> list[Tensor | None]:
    """The first parameter has none on rank 0 in every second step, the second on no rank in every third."""
    gradients: list[Tensor | None] = [noise(shape, step, rank, i) for i, shape in enumerate(SHAPES)]
    if step % 2 == 1 and rank == 0:
        gradients[0] = None
    if step % 3 == 2:
        gradients[1] = None
    return gradients


def mean_gradients(step: int, world_size: int) -> list[Tensor | None]:
    means: list[Tensor | None] = []
    for of_ranks in zip(*(gradients_at(step, rank) for rank in range(world_size)), strict=True):
        present = [g for g in of_ranks if g is not None]
        means.append(torch.stack(present).sum(0) / world_size if present else None)
    return means


def give(params: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient


def beside_adamw(rank: int, world_size: int, options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The parameters after every step, and those of torch's AdamW on the mean gradient."""
    params, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer = thinwire.CDAdam(params, betas=(0.9, 0.99), weight_decay=DECAY, **options)
    adamw = torch.optim.AdamW(theirs, betas=(0.9, 0.99), eps=1e-8, weight_decay=DECAY, amsgrad=True)
    values = []
    for step in range(50):
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = rate(step)
        give(params, gradients_at(step, rank))
        give(theirs, mean_gradients(step, world_size))
        optimizer.step()
        adamw.step()
        values.append((flat(params), flat(theirs)))
    return values


@pytest.mark.parametrize(
    ("nodes", "ranks", "options"),
    [
        (2, 1, {"codec": "topk", "ratio": 1.0}),
        (1, 2, {"topology": "hierarchical"}),
        (1, 2, {"topology": "hierarchical", "codec": "topk", "ratio": 0.1}),
        (1, 2, {"topology": "hierarchical", "compress": "momentum"}),
    ],
    ids=str,
)
def test_cd_adam_that_says_everything_is_torchs_amsgrad(nodes: int, ranks: int, options: dict[str, Any]) -> None:
    for values in run_nodes(beside_adamw, nodes, ranks, options):
        for step, (ours, theirs) in enumerate(values):
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6, err_msg=f"step {step}")


def pick_all(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    params = parameters(*SHAPES)
    optimizer = thinwire.SketchedAMSGrad(params, weight_decay=DECAY, eps=1e-6, **options)
    values = []
    for step in range(50):
        optimizer.param_groups[0]["lr"] = rate(step)
        give(params, gradients_at(step, rank))
        optimizer.step()
        values.append(flat(params))
    return values


def dense_rule(world_size: int) -> list[np.ndarray]:
    """The rule of SketchedAMSGrad without a sketch: all coordinates that have a gradient on some rank are picked."""
    xs = [p.detach().double().numpy() for p in parameters(*SHAPES)]
    ms, es = ([np.zeros((world_size, *shape)) for shape in SHAPES] for _ in range(2))
    vs, peaks = ([np.full(shape, 1e-6) for shape in SHAPES] for _ in range(2))
    moved = [False] * len(SHAPES)
    values = []
    for step in range(50):
        of_ranks = [gradients_at(step, rank) for rank in range(world_size)]
        for i, shape in enumerate(SHAPES):
            given = [gradients[i] for gradients in of_ranks]
            g = np.stack([np.zeros(shape) if one is None else one.double().numpy() for one in given])
            ms[i] = 0.9 * ms[i] + 0.1 * g
            p = ms[i] + (rate(step - 1) / rate(step) if step else 1.0) * es[i]
            es[i] = p
            if any(one is not None for one in given):
                vs[i] = 0.99 * vs[i] + 0.01 * g.mean(0) ** 2
                peaks[i] = np.maximum(peaks[i], vs[i])
                decay = 1 - rate(step) * DECAY if moved[i] else 1.0
                xs[i] = decay * xs[i] - rate(step) * p.mean(0) / np.sqrt(peaks[i])
                moved[i], es[i] = True, np.zeros_like(p)
        values.append(np.concatenate(xs, None))
    return values


@pytest.mark.parametrize(
    ("nodes", "ranks", "options"),
    [(2, 1, {"k": ELEMENTS, "rows": 2, "columns": 3}), (1, 2, {"k": 5, "topology": "hierarchical"})],
    ids=str,
)
def test_sketched_amsgrad_that_picks_all_needs_no_sketch(nodes: int, ranks: int, options: dict[str, Any]) -> None:
    """Whatever `k` is, a single node does."""
    expected = dense_rule(2)
    for values in run_nodes(pick_all, nodes, ranks, options):
        for step, (ours, theirs) in enumerate(zip(values, expected, strict=True)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=f"step {step}")


# What it costs, and what is lost -------------------------------------------------------------------------------------

LARGE = ((300, 200), (50_000,), (70,))
D = 300 * 200 + 50_000 + 70
SKETCH = {"rows": 5, "columns": 2000, "k": 1500}
MEASURED: dict[str, Kind] = {
    **KINDS,
    "sketch": Kind(thinwire.SketchedAMSGrad, (), SKETCH),
    "all by index": Kind(thinwire.CDAdam, (), {"codec": "topk", "ratio": 1.0}),
}


def measure(rank: int, world_size: int) -> dict[str, tuple[float, float, float]]:
    """Bytes sent and received a step, and the contraction; the first step has a greeting."""
    measured = {}
    for name, kind in MEASURED.items():
        params = parameters(*LARGE)
        optimizer = kind.make(params)
        metrics = []
        for step in range(4):
            give(params, [noise(shape, step, rank, i) for i, shape in enumerate(LARGE)])
            optimizer.step()
            metrics.append(optimizer.metrics())
        first, *_, last = metrics
        sent, received = last.bytes_sent - first.bytes_sent, last.bytes_received - first.bytes_received
        measured[name] = sent / 3, received / 3, last.contraction
    return measured


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_the_formula_and_the_contraction_is_a_share(world_size: int) -> None:
    both_ways = 2 * (world_size - 1) / world_size
    floats = SKETCH["rows"] * SKETCH["columns"] + 2 * SKETCH["k"] + len(LARGE)
    for measured in run_ranks(measure, world_size):
        for name, (sent, received, contraction) in measured.items():
            assert sent == received
            if name == "sketch":
                assert 1.0 <= sent / (both_ways * 4 * floats) <= 1.03
                assert math.isnan(contraction)
            elif name == "all by index":
                assert 1.0 <= sent / (both_ways * 8 * D) <= 1.1
                assert contraction == 0.0
            else:
                assert 1.0 <= sent / (both_ways * D / 8) <= 1.1
                assert 0.2 < contraction < 1.0


# Along with others ---------------------------------------------------------------------------------------------------


@each_kind
def test_attached_and_accumulating_is_the_plain_loop(name: str) -> None:
    """With parameters in float32 and in bfloat16, and replicas are equal after every step."""
    kind = KINDS[name]
    plain = Training(kind.make, microbatches=(3, 1, 2))
    low = replace(plain, model=brain_net, options={"lr": 0.05})
    overlap: dict[str, Any] = {"attach": True, "ddp": {"gradient_as_bucket_view": True}}
    results = run_ranks(train_each, 2, [plain, replace(plain, **overlap), low, replace(low, **overlap)])
    assert results[0] == results[1]
    in_full, in_full_overlapped, in_low, in_low_overlapped = results[0]
    assert in_full_overlapped == in_full
    assert in_low_overlapped == in_low
    for digests in (in_full, in_low):
        assert len(set(digests)) == plain.steps, "some step moved nothing"


def tiny_steps(rank: int, world_size: int, name: str) -> tuple[Tensor, Tensor]:
    """1e-4 from 1.0 is far below half a unit in the last place of bfloat16."""
    p = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    options: dict[str, Any] = {"k": 70} if name == "sketch" else {"ratio": 1.0}
    optimizer = KINDS[name].make([p], lr=1e-4, weight_decay=0.0, **options)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    master = optimizer.state[p]["master"]
    assert master.dtype == torch.float32
    assert torch.equal(master.to(p.dtype), p)
    return p.detach(), master


@each_kind
def test_low_precision_moves_by_steps_below_its_resolution(name: str) -> None:
    first, second = run_ranks(tiny_steps, 2, name)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    p, master = first
    # AMSGrad moves by the learning rate; where v begins at eps, and m is not corrected, by somewhat more.
    assert np.all(master < 1 - 150 * 1e-4)
    assert np.all(master > 1 - 500 * 1e-4)
    np.testing.assert_allclose(p, master, rtol=2.0**-8)


def overflow(rank: int, world_size: int, overflow_at: int) -> dict[str, tuple[list[bool], int, str]]:
    """Whether each step moved, how many were skipped, and where it ended; with and without overlap."""
    seen = {}
    for name, kind in KINDS.items():
        for attached in (False, True):
            torch.manual_seed(0)
            net = nn.Linear(20, 70)
            model = DistributedDataParallel(net) if attached else net
            optimizer = kind.make(net.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            if isinstance(model, DistributedDataParallel):
                thinwire.attach(model, optimizer, grad_scaler=scaler)
            moved = []
            for step in range(4):
                loss = model(noise((8, 20), step, rank)).square().mean()
                before = digest(net.parameters())
                scaler.scale(loss * math.inf if step == overflow_at and rank == 1 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                moved.append(digest(net.parameters()) != before)
            assert all(bool(s.isfinite().all()) for p in net.parameters() for s in optimizer.state[p].values())
            seen[f"{name}, {attached}"] = moved, optimizer.metrics().skipped_steps, digest(net.parameters())
    return seen


@pytest.mark.parametrize("overflow_at", [0, 2])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
def test_an_overflow_on_one_rank_is_skipped_by_all(nodes: int, ranks: int, overflow_at: int) -> None:
    first, *others = run_nodes(overflow, nodes, ranks, overflow_at)
    assert all(other == first for other in others)
    for name in KINDS:
        assert first[f"{name}, True"] == first[f"{name}, False"], "overlap makes a difference"
        moved, skipped, _ = first[f"{name}, True"]
        assert moved == [step != overflow_at for step in range(4)], name
        assert skipped == 1


TABLE, STOPS_AT = (40, 64), 20


def idle_rows(rank: int, world_size: int) -> tuple[float, float]:
    """How far rows move, in learning rates, after half of them have lost their gradient for good."""
    table = torch.nn.Parameter(noise(TABLE, 0, 0))
    optimizer = thinwire.CDAdam([table], lr=1e-3, weight_decay=0.0)
    start = table.detach().clone()
    for step in range(200):
        if step == STOPS_AT:
            start = table.detach().clone()
        table.grad = noise(TABLE, step, rank)
        if step >= STOPS_AT:
            table.grad[: TABLE[0] // 2] = 0.0
        optimizer.step()
    moved = (table.detach() - start).abs() / 1e-3
    return float(moved[: TABLE[0] // 2].max()), float(moved[TABLE[0] // 2 :].mean())


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_whose_gradient_stops_come_to_rest(world_size: int) -> None:
    """What is left is the momentum that they had: at most 1 + 0.9 + 0.81 + ... = 10 steps of a rate or two."""
    for idle, busy in run_ranks(idle_rows, world_size):
        assert idle < 20
        assert busy > 1
