"""Local steps on real ranks: equal to the NumPy oracle, to the bit, and what a user relies on."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import digest, run_nodes
from tests.harness import run_ranks
from tests.oracles.local_steps import LocalSteps as Oracle
from tests.oracles.local_steps import mean
from tests.oracles.quantized_averaging import QuantizedAveraging
from thinwire.averaging.catalogue import NAMES, SCHEMES
from thinwire.compressors.quantized import QuantizedScheme
from thinwire.outer.fragment import divide
from thinwire.transport.virtual import run_workers

SHAPES = ((50, 37), (150,), (1,), (29, 150), (64,))
STEPS = 13
CASES: dict[str, dict[str, Any]] = {
    "int4": {"every": 4, "compressor": "int4"},
    "int2, decay": {"every": 3, "compressor": "int2", "residual_decay": 0.75, "outer_lr": 0.5, "outer_momentum": 0.0},
    "a schedule": {"every": [2, 3, 1, 8].__getitem__, "compressor": "int8"},
    "dense": {"every": 4, "compressor": "none", "outer_lr": 0.7, "outer_momentum": 0.9},
    "streaming": {"every": 6, "compressor": "int4", "fragments": 3, "delay": 2, "mix": 0.25},
    "weighted": {"every": 4, "compressor": "int4", "weighted": True, "fragments": 2},
    "delay": {"every": 5, "compressor": "none", "delay": 4},
    "clipped": {"every": 3, "compressor": "none", "clip_to_median": True},
}
CLOSE = ("clipped",)
"""Cases with a norm, which torch and NumPy add in different orders."""
EVERY = (4, 2, 3)
"""Of each rank, in `of_unequal_workers`."""
WORK = (3, 0, 4)
"""Of each rank in a step, in the case "weighted"."""
DEFAULTS = {"outer_lr": 0.7, "outer_momentum": 0.9}


class Given(torch.optim.Optimizer):
    """Moves each parameter down by its gradient: a product would be rounded in another way than NumPy does."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad)


def new_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def moves_of(rank: int, step: int) -> list[Tensor]:
    """Sizes differ by orders of magnitude, and the third parameter never moves."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    moves = [torch.randn(shape, generator=draw).mul_(10.0 ** (-index)) for index, shape in enumerate(SHAPES)]
    moves[2].zero_()
    return moves


def take_step(opt: thinwire.LocalSteps, params: Sequence[Tensor], rank: int, step: int) -> None:
    for p, move in zip(params, moves_of(rank, step), strict=True):
        p.grad = move.to(p.dtype)
    opt.step()
    opt.zero_grad()


def trajectories(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    found = {}
    for name, case in CASES.items():
        params = new_params()
        opt = thinwire.LocalSteps(Given(params), **case)
        steps = []
        for step in range(STEPS):
            if "weighted" in case:
                opt.count(WORK[rank])
            take_step(opt, params, rank, step)
            steps.append([p.detach().clone() for p in params])
        opt.close()
        found[name] = steps
    found["unequal workers"] = of_unequal_workers(rank, world_size)
    return found


def of_unequal_workers(rank: int, world_size: int) -> list[list[Tensor]]:
    """The parameters after each interval, of workers that take different numbers of steps, and weigh as much."""
    params, every = new_params(), EVERY[:world_size]
    opt = thinwire.LocalSteps(Given(params), every, weighted=True)
    intervals = []
    for interval in range(3):
        for step in range(every[rank]):
            assert opt.is_synchronized == (step == 0)
            opt.count(1)
            take_step(opt, params, rank, 10 * interval + step)
        intervals.append([p.detach().clone() for p in params])
    assert (opt.outer_steps, opt.metrics().steps) == (3, 3 * every[rank])
    take_step(opt, params, rank, 0)
    opt.count(1)
    opt.synchronize()
    opt.close()
    # Fragments in flight: replicas have the same reference values after every interval.
    params = new_params()
    opt = thinwire.LocalSteps(Given(params), every, fragments=2, delay=1, mix=0.5)
    for step in range(2 * every[rank]):
        take_step(opt, params, rank, step)
    assert equal_everywhere(opt._fragments[0].references)
    opt.synchronize()
    assert equal_everywhere(params)
    opt.close()
    return intervals


def oracle_of(case: Mapping[str, Any], workers: int, work: Sequence[int] = WORK) -> Oracle:
    options: dict[str, Any] = {**DEFAULTS, **case}
    every, compressor, decay = options.pop("every"), options.pop("compressor"), options.pop("residual_decay", 1.0)
    params = [p.detach().numpy() for p in new_params()]

    def averaging(indices: Sequence[int]) -> Callable[[list[list[np.ndarray]]], list[np.ndarray]]:
        if compressor == "none":
            return mean
        scheme = SCHEMES[compressor]()
        assert isinstance(scheme, QuantizedScheme)
        numels = [params[i].size for i in indices]
        exact = QuantizedAveraging(workers, numels, int(compressor[3:]), scheme.block, scheme.spread, decay=decay)

        def average(updates: list[list[np.ndarray]]) -> list[np.ndarray]:
            flat = [[update.reshape(-1) if update.any() else None for update in of_one] for of_one in updates]
            shapes = [update.shape for update in updates[0]]
            return [each.reshape(shape) for each, shape in zip(exact.exchange(flat), shapes, strict=True)]

        return average

    if options.pop("weighted", False):
        options["work"] = work[:workers]
    parts = divide([torch.empty(shape) for shape in SHAPES], options.pop("fragments", 1))
    length = every if callable(every) else lambda _: every
    return Oracle(params, workers, [(part, averaging(part)) for part in parts], every=cast(Any, length), **options)


@pytest.mark.parametrize("workers", [2, 3])
def test_equals_the_oracle_to_the_bit(workers: int) -> None:
    of_ranks = run_ranks(trajectories, workers)
    for name, case in CASES.items():
        oracle = oracle_of(case, workers)
        for step in range(STEPS):
            oracle.step([[move.numpy() for move in moves_of(rank, step)] for rank in range(workers)])
            for rank in range(workers):
                for index, expected in enumerate(oracle.theta[rank]):
                    where = f"{name}, step {step}, rank {rank}, parameter {index}"
                    found = of_ranks[rank][name][step][index]
                    if name in CLOSE:
                        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=where)
                        if step % case["every"] == case["every"] - 1:
                            np.testing.assert_array_equal(found, of_ranks[0][name][step][index], err_msg=where)
                    else:
                        np.testing.assert_array_equal(found, expected, err_msg=where)
    case = {"every": max(EVERY[:workers]), "compressor": "int4", "weighted": True}
    oracle = oracle_of(case, workers, EVERY[:workers])
    for interval in range(3):
        for step in range(max(EVERY[:workers])):
            # A worker that has taken its steps stays where it is.
            moves = [[move.numpy() for move in moves_of(rank, 10 * interval + step)] for rank in range(workers)]
            oracle.step(
                [own if step < EVERY[rank] else [np.zeros_like(move) for move in own] for rank, own in enumerate(moves)]
            )
        for rank in range(workers):
            for found, expected in zip(of_ranks[rank]["unequal workers"][interval], oracle.theta[rank], strict=True):
                np.testing.assert_array_equal(found, expected, err_msg=f"unequal workers, interval {interval}")


# Laws, each checked in the same two ranks -----------------------------------------------------------------------------

LARGE = 400_000


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(opt: thinwire.LocalSteps, model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        if opt._weighted:
            opt.count(rank + step)
        model(batch(rank, step)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def adam_steps(model: nn.Module, **settings: Any) -> thinwire.LocalSteps:
    return thinwire.LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)


def equal_everywhere(tensors: Sequence[Tensor]) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest(tensors))
    return len(set(found)) == 1


def check_compressors(rank: int, world_size: int) -> None:
    for name in NAMES:
        params = new_params()
        opt = thinwire.LocalSteps(Given(params), every=2, compressor=name)
        for step in range(5):
            take_step(opt, params, rank, step)
            assert opt.is_synchronized == (step % 2 == 1), (name, step)
            if step == 3:
                assert equal_everywhere(params), name
        assert not equal_everywhere(params), name
        assert equal_everywhere([fragment.reference for fragment in opt._fragments]), name
        assert all(bool(p.isfinite().all()) for p in params), name
        assert torch.equal(params[2], new_params()[2]), f"{name} moved a parameter without a gradient"
        assert opt.outer_steps == 2
        opt.close()


def check_bytes(rank: int, world_size: int) -> None:
    for name in ("none", "int4", "int2", "sign", "chunked_topk"):
        params = [nn.Parameter(torch.zeros(LARGE)) for _ in range(4)]
        opt = thinwire.LocalSteps(Given(params), every=3, compressor=name)
        for step in range(6):
            for p in params:
                p.grad = torch.randn(LARGE, generator=torch.Generator().manual_seed(step))
            opt.step()
        metrics = opt.metrics()
        up, down = SCHEMES[name]().bits_per_value(world_size)
        expected = 2 * 4 * LARGE * (up + down) / 8 * (world_size - 1) / world_size
        assert abs(metrics.bytes_sent / expected - 1) < 0.02, (name, metrics.bytes_sent, expected)
        assert metrics.bytes_sent_per_step == metrics.bytes_sent / 6
        assert (metrics.steps, metrics.exchanges, metrics.dropped_exchanges) == (6, 2, 0)
        assert 0 < metrics.cosine <= 1, name
        assert metrics.cosine > 0.999 if name == "none" else True, "all ranks have moved alike"
        assert metrics.peer_cosine > 0.999 if name == "none" else -1 <= metrics.peer_cosine <= 1
        assert metrics.update_norm > 0
        assert metrics.exposed_wait_seconds > 0
        assert "cosine" in metrics.as_dict()
        opt.close()


RESUMED: dict[str, dict[str, Any]] = {
    "in the middle of an interval": {"every": 7, "compressor": "int4", "residual_decay": 0.9, "weighted": True},
    "with a fragment in flight": {"every": 6, "compressor": "int2", "fragments": 2, "delay": 2, "mix": 0.5},
}


def check_resume(rank: int, world_size: int, folder: str) -> None:
    for name, settings in RESUMED.items():
        model = net()
        opt = adam_steps(model, **settings)
        train(opt, model, rank, range(10))
        assert not opt.is_synchronized
        if "delay" in settings:
            assert any(fragment.due is not None for fragment in opt._fragments)
        torch.save((model.state_dict(), opt.state_dict()), f"{folder}/{rank}.pt")
        train(opt, model, rank, range(10, 17))
        expected = digest([*model.state_dict().values(), *(fragment.reference for fragment in opt._fragments)])
        opt.close()
        of_model, of_optimizer = torch.load(f"{folder}/{rank}.pt", weights_only=True)
        other = net()
        again = adam_steps(other, **settings)
        other.load_state_dict(torch.load(f"{folder}/0.pt", weights_only=True)[0])  # parameters of another rank
        again.load_state_dict(of_optimizer)
        buffers = {key: value for key, value in of_model.items() if key in dict(other.named_buffers())}
        other.load_state_dict(buffers, strict=False)
        train(again, other, rank, range(10, 17))
        found = digest([*other.state_dict().values(), *(fragment.reference for fragment in again._fragments)])
        assert found == expected, name
        wrong = torch.load(f"{folder}/{1 - rank}.pt", weights_only=True)[1]
        with pytest.raises(ValueError, match=f"of rank {1 - rank} of 2, this is rank {rank} of 2"):
            again.load_state_dict(wrong)
        again.close()


def check_nonfinite(rank: int, world_size: int) -> None:
    params = new_params()
    opt = thinwire.LocalSteps(Given(params), every=2, compressor="int4", max_consecutive_skips=2)
    take_step(opt, params, rank, 0)
    for p, move in zip(params, moves_of(rank, 1), strict=True):
        p.grad = move
    if rank == 1:
        params[0].grad[3, 4] = math.nan  # type: ignore[index]
    opt.step()
    assert (opt.metrics().skipped_steps, opt.metrics().dropped_exchanges) == (rank, 0)
    assert equal_everywhere(params)
    before, momentum = [p.detach().clone() for p in params], opt._fragments[0].momentum.clone()
    take_step(opt, params, rank, 2)
    if rank == 1:
        params[3].data[0, 0] = math.inf
    logging.getLogger("thinwire").disabled = True
    take_step(opt, params, rank, 3)
    assert opt.metrics().dropped_exchanges == 1
    assert digest(params) == digest(before), "all ranks return to where they agreed"
    assert torch.equal(opt._fragments[0].momentum, momentum)
    for step in (4, 5):
        take_step(opt, params, rank, step)
    assert opt.metrics().dropped_exchanges == 1
    assert equal_everywhere(params)
    assert all(bool(p.isfinite().all()) for p in params)
    for step in range(6, 9):
        params[0].data[0, 0] = math.nan
        take_step(opt, params, rank, step)
    params[0].data[0, 0] = math.nan
    with pytest.raises(thinwire.TooManySkips, match="in 2 outer steps in a row, up to outer step 5"):
        take_step(opt, params, rank, 9)
    logging.getLogger("thinwire").disabled = False
    opt.close()


def check_torch_habits(rank: int, world_size: int) -> None:
    """Schedulers, a GradScaler, closures, low precision: as with the inner optimizer alone."""
    for of_inner in (False, True):
        model = net()
        opt = adam_steps(model, every=3)
        scheduler = torch.optim.lr_scheduler.StepLR(opt.inner if of_inner else opt, step_size=2, gamma=0.5)
        for step in range(4):
            train(opt, model, rank, range(step, step + 1))
            scheduler.step()
        assert opt.param_groups[0]["lr"] == opt.inner.param_groups[0]["lr"] == 1e-2 / 4
        assert opt.state[next(model.parameters())]["step"] == 4
        opt.close()

    digests = []
    for scaled in (False, True):
        model = net()
        opt = adam_steps(model, every=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(6):
            scaler.scale(model(batch(rank, step)).square().mean()).backward()
            if rank == 1 and step == 4:
                next(model.parameters()).grad[0, 0] = math.inf  # type: ignore[index]
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if scaled:
            assert scaler.get_scale() == (512.0 if rank else 1024.0), "each worker has a scale of its own"
        assert opt.metrics().skipped_steps == rank
        assert equal_everywhere(list(model.parameters()))
        digests.append(digest(model.parameters()))
        opt.close()
    assert digests[0] == digests[1], "a power of two changes nothing"

    params = new_params(torch.bfloat16)
    opt = thinwire.LocalSteps(Given(params), every=2, compressor="none")
    for step in range(4):
        take_step(opt, params, rank, step)
    assert equal_everywhere(params)
    for p, reference in zip(opt._fragments[0].params, opt._fragments[0].references, strict=True):
        assert torch.equal(p, reference.to(torch.bfloat16))
    assert any(not torch.equal(r, r.to(torch.bfloat16)) for r in opt._fragments[0].references), "kept in float32"
    opt.close()

    model = net()
    opt = thinwire.LocalSteps(torch.optim.LBFGS(model.parameters(), max_iter=3), every=2)

    def closure() -> float:
        opt.zero_grad()
        loss = model(batch(rank, 0)).square().mean()
        loss.backward()
        return loss.item()

    assert opt.step(closure) > opt.step(closure)  # type: ignore[operator]
    assert equal_everywhere(list(model.parameters()))
    opt.close()


def check_synchronize(rank: int, world_size: int) -> None:
    for settings in ({"every": 4}, {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5}):
        model = net()
        opt = adam_steps(model, **settings)
        train(opt, model, rank, range(3))
        opt.synchronize(model)
        assert equal_everywhere(list(model.state_dict().values())), "buffers included"
        assert opt.is_synchronized
        exchanges = opt.metrics().exchanges
        opt.synchronize()
        assert opt.metrics().exchanges == exchanges, "there was nothing to do"
        train(opt, model, rank, range(3, 7))
        assert opt.outer_steps == 2, "a new interval began at synchronize()"
        assert opt.is_synchronized == ("fragments" not in settings) == equal_everywhere(list(model.parameters()))
        if "fragments" not in settings:
            train(opt, model, rank, range(7, 8 - rank))
            with pytest.raises(RuntimeError, match="ranks disagree on the number of inner steps at synchronize"):
                opt.synchronize()
        opt.close()


def check_synchronize_after_a_fragment(rank: int, world_size: int) -> None:
    """A fragment that was exchanged after the last step has no work since, and workers weigh the same there."""
    params = new_params()
    opt = thinwire.LocalSteps(Given(params), every=4, fragments=2, weighted=True, compressor="none")
    for step in range(2):
        opt.count(1 + rank)
        take_step(opt, params, rank, step)
    assert [fragment.moved for fragment in opt._fragments] == [False, True]
    opt.synchronize()
    assert equal_everywhere(params)
    take_step(opt, params, rank, 2)
    with pytest.raises(RuntimeError, match="no rank has counted work"):  # it is still an error of a step
        take_step(opt, params, rank, 3)
    opt.close()


def check_a_rank_that_is_behind(rank: int, world_size: int) -> None:
    """Once an exchange has begun on all ranks, nobody waits for one that is behind: its messages need no step of it."""
    params, store = new_params(), dist.distributed_c10d._get_default_store()
    opt = thinwire.LocalSteps(Given(params), every=4, delay=3)
    for step in range(5):
        take_step(opt, params, rank, step)
    if rank == 0:
        store.wait([f"rank {other} has applied it" for other in range(1, world_size)])
    for step in range(5, 7):
        take_step(opt, params, rank, step)
    assert opt.outer_steps == 1
    store.set(f"rank {rank} has applied it", "")
    assert equal_everywhere(opt._fragments[0].references)
    opt.close()


def check_checkpoint(rank: int, world_size: int, folder: str) -> None:
    settings: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5}
    model = net()
    opt = adam_steps(model, **settings)
    train(opt, model, rank, range(7))
    thinwire.checkpoint.save(folder, model, opt, 7, extra={"rank": rank})
    train(opt, model, rank, range(7, 12))
    expected = digest(model.state_dict().values())
    opt.close()
    other = net()
    again = adam_steps(other, **settings)
    loaded = thinwire.checkpoint.load(folder, other, again)
    assert loaded is not None
    assert (loaded.step, loaded.exact, loaded.extra) == (7, True, {"rank": rank})
    train(again, other, rank, range(7, 12))
    assert digest(other.state_dict().values()) == expected

    # If loading fails on one rank, all ranks have what they had.
    load, before = again.inner.load_state_dict, digest([*other.parameters(), again._fragments[1].reference])

    def fail_once(state: dict[str, Any]) -> None:
        again.inner.load_state_dict = load  # type: ignore[method-assign]
        raise ValueError("not now")

    if rank == 1:
        again.inner.load_state_dict = fail_once  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not now"):
        thinwire.checkpoint.load(folder, other, again)
    assert digest([*other.parameters(), again._fragments[1].reference]) == before
    assert (again._schedule.step, again.inner.state[next(other.parameters())]["step"]) == (12, 12)
    train(again, other, rank, range(12, 16))
    again.close()

    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    fewer = adam_steps(net(), process_group=alone, **settings)
    with pytest.raises(ValueError, match="each rank of LocalSteps with AdamW has its own parameters and inner state"):
        thinwire.checkpoint.load(folder, net(), fewer, on_mismatch="average")


def all_laws(rank: int, world_size: int, folder: str) -> None:
    check_compressors(rank, world_size)
    check_bytes(rank, world_size)
    check_resume(rank, world_size, folder)
    check_nonfinite(rank, world_size)
    check_torch_habits(rank, world_size)
    check_synchronize(rank, world_size)
    check_synchronize_after_a_fragment(rank, world_size)
    check_a_rank_that_is_behind(rank, world_size)
    check_checkpoint(rank, world_size, f"{folder}/checkpoints")


def test_laws(tmp_path: Any) -> None:
    run_ranks(all_laws, 2, str(tmp_path), timeout=150.0)


# Misuse: every rank raises the same error, and nothing was sent -------------------------------------------------------


def refused(rank: int, make: Callable[[nn.Module], thinwire.LocalSteps], model: nn.Module) -> str:
    opt = make(model)
    model(batch(rank, 0)).square().mean().backward()
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        opt.step()
    assert opt.metrics().bytes_sent == 0
    opt.close()
    return str(caught.value)


def misuse(rank: int, world_size: int) -> dict[str, str]:
    def inner(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    steps = thinwire.LocalSteps
    first = rank == 0
    ddp, compressed = DistributedDataParallel(net()), DistributedDataParallel(net())
    thinwire.compress(compressed, "int4")
    attached = DistributedDataParallel(net())
    thinwire.attach(attached, thinwire.Birder(attached.parameters(), lr=1e-3))
    other = net()
    with torch.no_grad():
        next(other.parameters())[0, 0] += rank
    cases: dict[str, tuple[Callable[[nn.Module], thinwire.LocalSteps], nn.Module]] = {
        "DDP": (lambda m: steps(inner(m)), ddp),
        "compress": (lambda m: steps(inner(m)), compressed),
        "attach": (lambda m: steps(inner(m)), attached),
        "every": (lambda m: steps(inner(m), every=30 if first else 20), net()),
        "compressor": (lambda m: steps(inner(m), compressor="int4" if first else "int8"), net()),
        "option": (lambda m: steps(inner(m), block=64 if first else 32), net()),
        "lr": (lambda m: steps(inner(m, 0.1 if first else 0.2)), net()),
        "outer_lr": (lambda m: steps(inner(m), outer_lr=1.0 if first else 0.7), net()),
        "class": (lambda m: steps(inner(m) if first else torch.optim.Adam(m.parameters(), lr=1e-2)), net()),
        "weighted": (lambda m: steps(inner(m), weighted=first), net()),
        "clip": (lambda m: steps(inner(m), clip_to_median=first), net()),
        "numbers of others": (lambda m: steps(inner(m), every=[30, 20] if first else [20, 30]), net()),
        "too few numbers": (lambda m: steps(inner(m), every=[30]), net()),
        "nothing counted": (lambda m: steps(inner(m), every=1, weighted=True), net()),
        "schedule": (lambda m: steps(inner(m), every=lambda k: 0 if first else 3), net()),
        "values": (lambda m: steps(inner(m)), other),
    }
    found = {name: refused(rank, *case) for name, case in cases.items()}
    model = DistributedDataParallel(net())
    opt = steps(inner(model), every=2)
    for step in range(2):
        with model.no_sync():
            model(batch(rank, step)).square().mean().backward()
        opt.step()
    assert equal_everywhere(list(model.parameters()))
    opt.outer_lr = 0.5 + rank
    train_without_averaging(opt, model, rank)
    with pytest.raises(RuntimeError, match=r"ranks disagree on outer_lr of parameter group 0 in step 2: 0.5 on rank 0"):
        train_without_averaging(opt, model, rank)
    opt.close()
    return found


def train_without_averaging(opt: thinwire.LocalSteps, model: DistributedDataParallel, rank: int) -> None:
    with model.no_sync():
        model(batch(rank, 9)).square().mean().backward()
    opt.step()


def test_misuse_is_refused_on_every_rank() -> None:
    of_ranks = run_ranks(misuse, 2)
    assert of_ranks[0] == of_ranks[1]
    expected = {
        "DDP": "DistributedDataParallel averages the gradients of ranks 0, 1 in every backward",
        "compress": "thinwire.compress averages the gradients",
        "attach": "its parameters are attached to another optimizer (Birder)",
        "every": "ranks disagree on every: 30 on rank 0; 20 on rank 1",
        "compressor": "ranks disagree on the compressor: 'int4' on rank 0; 'int8' on rank 1",
        "option": "ranks disagree on block: 64 on rank 0; 32 on rank 1",
        "lr": "ranks disagree on lr of parameter group 0 of the inner optimizer: 0.1 on rank 0; 0.2 on rank 1",
        "outer_lr": "ranks disagree on outer_lr: 1.0 on rank 0; 0.7 on rank 1",
        "class": "ranks disagree on the class of the inner optimizer: 'SGD' on rank 0; 'Adam' on rank 1",
        "weighted": "ranks disagree on weighted: True on rank 0; False on rank 1",
        "clip": "ranks disagree on clip_to_median: True on rank 0; False on rank 1",
        "numbers of others": "ranks disagree on every: (30, 20) on rank 0; (20, 30) on rank 1",
        "too few numbers": "every=[30] for 2 ranks: expected one number for each rank",
        "nothing counted": "weighted=True, but no rank has counted work since the last exchange",
        "schedule": "every(0)=0: expected a number of inner steps, at least 1",
        "values": "ranks disagree on the checksum of the values of parameter 0",
    }
    for name, text in expected.items():
        assert text in of_ranks[0][name], (name, of_ranks[0][name])


# Several ranks per site, and virtual workers --------------------------------------------------------------------------


def sites(rank: int, world_size: int, with_mesh: bool) -> tuple[str, int]:
    """DDP inside a site of two ranks, local steps between two sites."""
    if with_mesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "rank"))
        group: Any = mesh.get_group("rank")
        settings: dict[str, Any] = {"mesh": mesh}
    else:
        group, settings = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], {}
        unequal = adam_steps(net(), every=[2, 2, 3, 4])
        with pytest.raises(ValueError, match=r"every=\[2, 2, 3, 4\]: ranks 2, 3 form one worker"):
            unequal.step()
        unequal.close()
    model = DistributedDataParallel(net(), process_group=group)
    opt = adam_steps(model, every=2, **settings)
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, digest(model.parameters()))
        assert len(set(found)) == (1 if step % 2 else 2), "each site is one worker"
    opt.close()
    return digest(model.parameters()), opt.metrics().exchanges


def test_a_site_of_several_ranks_is_one_worker() -> None:
    found = run_nodes(sites, 2, 2, False)
    assert len(set(found)) == 1
    assert run_ranks(sites, 4, True) == found, "a mesh says the same"


def digests_of_run(rank: int, world_size: int) -> str:
    params = new_params()
    opt = thinwire.LocalSteps(Given(params), every=6, fragments=3, delay=2, mix=0.25)
    for step in range(STEPS):
        take_step(opt, params, rank, step)
    return digest(params)


def test_virtual_workers_have_the_bits_of_processes() -> None:
    assert run_workers(3, digests_of_run) == run_ranks(digests_of_run, 3)
