"""`delay=1`: the answer of a step is applied in the next one, and nothing else changes."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import (
    MANY_CASES_SECONDS,
    TokenNet,
    by_case,
    digest,
    each_case,
    named,
    run_nodes,
    token_loss,
    token_net,
)
from tests.distributed.fsdp_runs import locals_of, loss_of, mesh_of, sharded
from tests.distributed.oracle_cases import (
    OracleCase,
    assert_hierarchical_runs_are_the_oracle,
    assert_runs_are_the_oracle,
)
from tests.distributed.scenarios import (
    SEED,
    SHAPES,
    Scenario,
    partly_absent,
    ramp,
    rows_untouched,
    run_birder,
    sometimes_nonfinite,
)
from tests.distributed.stages import PAPER, noise, parameters
from tests.harness import run_ranks, run_ranks_expecting_errors
from tests.oracles.delayed_birder import DelayedBirderOracle
from tests.oracles.flat_space import Group
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import SCHEMES, rule_of
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport import virtual

SCENARIOS = {
    "defaults": Scenario(),
    "majority": Scenario(options={"downlink": "majority"}),
    "votes": Scenario(options={"downlink": "votes"}),
    "two groups": Scenario(shapes=(SHAPES[:2], SHAPES[2:]), lrs=(0.01, 0.03), decays=(0.0, 0.5)),
    "schedule": Scenario(schedule=ramp),
    "partly absent": Scenario(partly_absent),
    "rows untouched, votes, many buckets": Scenario(rows_untouched, options={"downlink": "votes", "bucket_mb": 0.0005}),
    "sometimes nonfinite": Scenario(sometimes_nonfinite),
}


def test_birder_is_the_oracle() -> None:
    delayed = {name: _with_delay(scenario) for name, scenario in SCENARIOS.items()}
    for name, ranks in by_case(run_ranks(each_case, 3, run_birder, delayed, timeout=MANY_CASES_SECONDS)).items():
        with named(name):
            _assert_it_is_the_oracle(SCENARIOS[name], ranks)


def _with_delay(scenario: Scenario) -> Scenario:
    return Scenario(**{**vars(scenario), "options": {**scenario.options, "delay": 1}})


def _assert_it_is_the_oracle(scenario: Scenario, ranks: Sequence[dict[str, Any]]) -> None:
    groups = zip(scenario.starting_values(), scenario.lrs, scenario.decays, strict=True)
    options = {name: value for name, value in scenario.options.items() if name != "bucket_mb"}
    oracle = DelayedBirderOracle([Group(*group) for group in groups], len(ranks), seed=SEED, **options)
    skipped = []
    for step in range(1, scenario.steps + 1):
        if scenario.schedule:
            for group in oracle.groups:
                group.lr = scenario.schedule(step)
        outcome = oracle.step([scenario.gradients_at(step, rank, len(ranks)) for rank in range(len(ranks))])
        skipped.append(outcome.skipped)
        for index, p in enumerate(oracle.parameters):
            where = f"step {step}, parameter {index}"
            ours = [of_rank["values"][step - 1][index] for of_rank in ranks]
            np.testing.assert_allclose(ours[0], p.value, rtol=1e-5, atol=1e-5, err_msg=where)
            assert all(np.array_equal(ours[0], other) for other in ours), where
    for of_rank in ranks:
        assert of_rank["skipped"] == sum(skipped[:-1])


WARM_UP: dict[str, Any] = {"betas": (0.9, 0.8), "warmup_steps": 6}
BETAS: dict[str, Any] = {"betas": (0.9, 0.8)}
OTHERS: dict[str, OracleCase] = {
    "1-bit Adam": OracleCase(thinwire.OneBitAdam, options={**WARM_UP, **PAPER}),
    "1-bit Adam, 4-bit warm-up": OracleCase(thinwire.OneBitAdam, options={**WARM_UP, **PAPER, "warmup_bits": 4}),
    "1-bit LAMB": OracleCase(thinwire.OneBitLamb, options=WARM_UP),
    "LAMB": OracleCase(thinwire.Lamb, options=BETAS),
    "CD-Adam": OracleCase(thinwire.CDAdam, options=BETAS),
    "CD-Adam, momenta": OracleCase(thinwire.CDAdam, options={**BETAS, "compress": "momentum"}),
    "CD-Adam, top-k": OracleCase(thinwire.CDAdam, options={**BETAS, "codec": "topk", "ratio": 0.1}),
}
OF_OTHERS: dict[str, dict[str, Any]] = {
    "schedule": {"scenario": Scenario(schedule=ramp)},
    "partly absent": {"scenario": Scenario(partly_absent)},
    "sometimes nonfinite": {"scenario": Scenario(sometimes_nonfinite)},
    "many buckets": {"scenario": Scenario(rows_untouched), "bucket_elements": 300},
    "synchronized": {"scenario": Scenario(schedule=ramp), "synchronize_after": (1, 8, 9, 15)},
}


def _delayed(*names: str) -> dict[str, OracleCase]:
    return {
        f"{other}, {name}": replace(case, **OF_OTHERS[name]).with_options(delay=1)
        for other, case in OTHERS.items()
        for name in names or OF_OTHERS
    }


def test_the_others_are_their_oracles() -> None:
    assert_runs_are_the_oracle(_delayed(), 3)


def test_the_others_are_their_oracles_on_other_grids() -> None:
    assert_runs_are_the_oracle(_delayed("sometimes nonfinite"), 2)
    assert_hierarchical_runs_are_the_oracle(_delayed("partly absent", "sometimes nonfinite"), 2, 2)
    assert_hierarchical_runs_are_the_oracle(_delayed("partly absent", "sometimes nonfinite"), 1, 2)


# The same bits, however gradients come ------------------------------------------------------------------------------


def _train(rank: int, world_size: int, run: Mapping[str, Any]) -> list[str]:
    """The digests of the parameters after each step, and after `synchronize()`."""
    net = token_net(run.get("dtype", torch.float32))
    options = {"lr": 1e-2, "delay": 1, **run["options"]}
    optimizer = run.get("optimizer", thinwire.Birder)(net.parameters(), **options)
    model = DDP(net) if run.get("attach") else net
    if isinstance(model, DDP):
        thinwire.attach(model, optimizer)
    digests = []
    for step in range(6):
        for micro in range(run.get("passes", 1)):
            last = micro == run.get("passes", 1) - 1
            with model.no_sync() if isinstance(model, DDP) and not last else nullcontext():
                token_loss(model, rank, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == run.get("look_at"):
            optimizer.state_dict()  # ends the exchange in flight, on one rank earlier than on the others
        digests.append(digest(net.parameters()))
        assert optimizer.is_synchronized == (step < run.get("warm_up", 0))
    assert not optimizer.is_synchronized
    optimizer.synchronize()
    assert optimizer.is_synchronized
    digests.append(digest(net.parameters()))
    return digests


TWO_STEPS: dict[str, Any] = {"options": {"warmup_steps": 2, "betas": (0.9, 0.5)}, "warm_up": 2, "scales": True}
"""A warm-up of so many steps. Scales belong to shards of buckets."""
RUNS: dict[str, dict[str, Any]] = {
    "Birder": {"options": {}},
    "Birder, votes, bfloat16": {"options": {"downlink": "votes"}, "dtype": torch.bfloat16},
    "Birder, clipped": {"options": {"clip_norm": 0.1}},
    "Birder, accumulating": {"options": {}, "passes": 2},
    "Distributed Lion": {"options": {}, "optimizer": thinwire.DistributedLion},
    "1-bit Adam": {**TWO_STEPS, "optimizer": thinwire.OneBitAdam},
    "1-bit LAMB": {**TWO_STEPS, "optimizer": thinwire.OneBitLamb},
    "LAMB": {"options": {}, "optimizer": thinwire.Lamb},
    "LAMB, bfloat16": {"options": {}, "optimizer": thinwire.Lamb, "dtype": torch.bfloat16},
    "CD-Adam": {"options": {}, "optimizer": thinwire.CDAdam, "scales": True},
    "CD-Adam, accumulating": {"options": {}, "optimizer": thinwire.CDAdam, "scales": True, "passes": 2},
    "CD-Adam, top-k": {
        "options": {"codec": "topk", "ratio": 0.1},
        "optimizer": thinwire.CDAdam,
        "scales": True,
        "dtype": torch.bfloat16,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attached": {"attach": True},
    "attached, small buckets": {"attach": True, "bucket_mb": 0.01},
    "small buckets, looked at": {"bucket_mb": 0.02, "look_at": 3},
}


def test_overlap_and_buckets_change_no_bit() -> None:
    cases = {}
    for (name, run), (variant, change) in itertools.product(RUNS.items(), VARIANTS.items()):
        if "scales" not in run or "bucket_mb" not in change:
            options = {**run["options"], "bucket_mb": change.get("bucket_mb")}
            cases[f"{name}: {variant}"] = {**run, **change, "options": options}
    found = by_case(run_ranks(each_case, 3, _train, cases, timeout=MANY_CASES_SECONDS))
    for case, ranks in found.items():
        assert ranks == [found[f"{case.partition(':')[0]}: plain"][0]] * 3, case
    for name, run in RUNS.items():
        plain = found[f"{name}: plain"]
        # All but the first delayed step move something. It is the first of all, unless a warm-up comes before it.
        assert len(set(plain[0])) == (6 if "warm_up" in run else 7), name
        if "passes" not in run:
            assert virtual.run_workers(3, _train, run) == plain, name


def test_nodes_change_no_bit() -> None:
    for nodes_and_ranks in ((2, 2), (1, 2)):
        cases = {}
        for name in ("Birder", "LAMB", "1-bit LAMB", "CD-Adam", "CD-Adam, top-k"):
            if nodes_and_ranks == (2, 2) or "warm_up" not in RUNS[name]:  # which never ends in a single node
                run = {**RUNS[name], "options": {**RUNS[name]["options"], "topology": "hierarchical"}}
                small = {} if "scales" in run else {"bucket_mb": 0.01}
                cases[f"{name}: plain"] = run
                cases[f"{name}: attached"] = {**run, "attach": True, "options": {**run["options"], **small}}
        found = by_case(run_nodes(each_case, *nodes_and_ranks, _train, cases, timeout=MANY_CASES_SECONDS))
        for case, ranks in found.items():
            assert ranks == [found[f"{case.partition(':')[0]}: plain"][0]] * len(ranks), case


def _contractions(rank: int, world_size: int, delay: int) -> list[float]:
    params = parameters((13, 21), (130,))
    optimizer = thinwire.CDAdam(params, delay=delay)
    seen = []
    for step in range(5):
        for index, p in enumerate(params):
            p.grad = noise(tuple(p.shape), rank, step, index)
        optimizer.step()
        seen.append(optimizer.metrics().contraction)  # with a delay, lanes still send
    return seen


def _contractions_of_both(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    return _contractions(rank, world_size, 0), _contractions(rank, world_size, 1)


def test_the_contraction_is_that_of_the_message_under_way() -> None:
    for at_once, delayed in run_ranks(_contractions_of_both, 2):
        assert at_once == delayed
        assert len(set(at_once)) == len(at_once)


# Compressed averaging -----------------------------------------------------------------------------------------------

STEPS = 5
ABSENT, NONFINITE = 2, 3
"""The steps in which one parameter has no gradient, and one rank has an infinite one."""


def _gradients(params: Sequence[nn.Parameter], rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    gradients = [torch.randn(p.numel(), generator=draw) for p in params]
    if step == NONFINITE and rank == 1:
        gradients[0][0] = math.inf
    return gradients


def _means(rank: int, world_size: int, compressor: str, delay: int) -> list[list[Tensor]]:
    params = list(token_net().parameters())
    averager = GradientAverager(params, rule_of(compressor, {}), bucket_mb=0.01, delay=delay)
    means = []
    for step in range(STEPS):
        averager.begin(2.0 ** (step // 2))
        gradients = [gradient * 2.0 ** (step // 2) for gradient in _gradients(params, rank, step)]
        for index, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
            averager.add(p, gradient, present=step != ABSENT or index != 1)
        averager.finish()
        means.append(gradients)
    if delay:
        averager.loss_scale_now = lambda: 2.0 ** ((STEPS - 1) // 2)
        averager.synchronize()
        means.append([torch.zeros(p.numel()) if p.grad is None else p.grad.view(-1) for p in params])
    return means


def _both(rank: int, world_size: int, compressor: str) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    return _means(rank, world_size, compressor, 0), _means(rank, world_size, compressor, 1)


FEW = ("int4", "topk", "randomk", "none")
"""Answers with a place for each element and without, with random numbers, and floats."""


@pytest.mark.parametrize(
    ("nodes", "ranks", "names"),
    [
        (3, 1, FEW),
        (2, 2, FEW[:2]),
        *(pytest.param(*grid, tuple(SCHEMES), marks=pytest.mark.long) for grid in [(3, 1), (2, 2)]),
    ],
    ids=str,
)
def test_each_mean_comes_one_step_later(nodes: int, ranks: int, names: Sequence[str]) -> None:
    cases = {name: name for name in names}
    found = by_case(run_nodes(each_case, nodes, ranks, _both, cases, timeout=MANY_CASES_SECONDS))
    for name, of_ranks in found.items():
        for rank, (at_once, later) in enumerate(of_ranks):
            for step in range(STEPS + 1):
                scale = 2.0 ** (min(step, STEPS - 1) // 2 - (step - 1) // 2) if step else 1.0
                for index, mean in enumerate(later[step]):
                    nothing = not step or (step - 1 == ABSENT and index == 1)
                    expected = np.zeros_like(mean) if nothing else at_once[step - 1][index] * scale
                    np.testing.assert_array_equal(mean, expected, err_msg=f"{name}, rank {rank}, {step}, {index}")
            assert math.isnan(later[NONFINITE + 1][2][0])


def _compressed(rank: int, world_size: int, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    net = token_net()
    model = DDP(net, **run.get("ddp", {}))
    handle = thinwire.compress(model, run.get("compressor", "int4"), delay=1, bucket_mb=run.get("bucket_mb"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    records = []
    for step in range(6):
        for micro in range(2):
            with nullcontext() if micro else model.no_sync():
                token_loss(model, rank, 10 * step + micro).backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        assert bool(any(grad.any() for grad in grads)) == (step > 0)
        optimizer.step()
        records.append((digest(grads), digest(net.parameters())))
        optimizer.zero_grad()
        if rank == 1 and step == 2:
            handle.state_dict()
    assert not handle.is_synchronized
    handle.synchronize()
    assert handle.is_synchronized
    optimizer.step()
    records.append(("", digest(net.parameters())))
    return records


def test_compress_in_ddp_changes_no_bit_with_buckets() -> None:
    runs = {
        "int4": {},
        "int4, small buckets": {"bucket_mb": 0.01, "ddp": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}},
    }
    found = by_case(run_ranks(each_case, 3, _compressed, runs, timeout=MANY_CASES_SECONDS))
    for name, ranks in found.items():
        assert ranks == [found["int4"][0]] * 3, name


class _Alternating(TokenNet):
    """Uses its head in every second forward only."""

    used = False

    def forward(self, tokens: Tensor) -> Tensor:
        self.used = not self.used
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.head(hidden) if self.used else hidden


def _alternate(rank: int, world_size: int, views: bool) -> list[tuple[bool, str]]:
    torch.manual_seed(0)
    net = _Alternating()
    model = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=views)
    thinwire.compress(model, "none", delay=1)
    seen = []
    for step in range(5):
        token_loss(model, rank, step).backward()
        grad = net.head.weight.grad
        seen.append((grad is not None and bool(grad.any()), digest([grad]) if grad is not None else ""))
        model.zero_grad()
    return seen


def test_a_parameter_that_no_rank_uses_now_gets_its_mean_all_the_same() -> None:
    """Otherwise a parameter that is used in every second step would never move."""
    for views in (False, True):
        first, second = run_ranks(_alternate, 2, views)
        assert first == second
        assert [moves for moves, _ in first] == [False, True, False, True, False]


# Faults and ends ----------------------------------------------------------------------------------------------------


def _lose_a_rank(rank: int, world_size: int, kind: str, note: Path) -> None:
    net = token_net()
    model = DDP(net)
    optimizer: Any = None
    if kind == "compress":
        _ = thinwire.compress(model, delay=1)
    else:
        optimizer = thinwire.Birder(net.parameters(), delay=1)
        thinwire.attach(model, optimizer)
    for step in range(4):
        if step == 3 and rank == 1:
            time.sleep(0.3)
            note.write_text(repr(time.monotonic()))
            os._exit(1)
        token_loss(model, rank, step).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(optimizer, WireOptimizer):
        optimizer.synchronize()
    else:
        token_loss(model, rank, 4).backward()


@pytest.mark.parametrize("kind", ["compress", "attach"])
def test_a_lost_rank_is_an_error_on_all_others(kind: str, tmp_path: Path) -> None:
    first, lost, third = run_ranks_expecting_errors(_lose_a_rank, 3, kind, tmp_path / "died")
    assert [first.type_name, lost.type_name, third.type_name] == ["PeerLost", "ProcessDied", "PeerLost"]
    # Less than the timeout of the process group. Not since the ranks were started, which may take long.
    died = float((tmp_path / "died").read_text())
    assert max(first.at, third.at) - died < 20.0


def _trained(
    rank: int, steps: int, *, attach: bool = False, delay: int = 1, of: str = "Birder"
) -> tuple[nn.Module, WireOptimizer]:
    net = token_net()
    run = RUNS[of]
    optimizer = run.get("optimizer", thinwire.Birder)(net.parameters(), lr=1e-2, delay=delay, **run["options"])
    model = DDP(net) if attach else net
    if isinstance(model, DDP):
        thinwire.attach(model, optimizer)
    for step in range(steps):
        _step(model, optimizer, rank, step)
    return model, optimizer


def _step(model: nn.Module, optimizer: WireOptimizer, rank: int, step: int) -> None:
    token_loss(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(optimizer: WireOptimizer) -> str:
    states = optimizer._state_of_this_rank()["state"]
    return digest(entry for of_one in states.values() for _, entry in sorted(of_one.items()))


def _end_in_flight(rank: int, world_size: int, of: str) -> None:
    model, optimizer = _trained(rank, 3, of=of)
    expected = _state(optimizer) if rank == 1 else None  # on one rank only
    _step(model, optimizer, rank, 3)
    after_four = _state(optimizer)
    _, closed = _trained(rank, 3, of=of)
    closed.close()
    assert expected is None or _state(closed) == expected
    with pytest.raises(RuntimeError, match="is closed"):
        _step(model, closed, rank, 3)
    model.zero_grad()
    other, loaded = _trained(rank, 2, of=of)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(optimizer.state_dict())  # with another exchange in flight
    assert _state(loaded) == after_four
    for step in (4, 5):  # the first of them applies the answer that was loaded
        _step(model, optimizer, rank, step)
        _step(other, loaded, rank, step)
        assert digest(other.parameters()) == digest(model.parameters())
    assert _state(loaded) == _state(optimizer)


OF_EACH_RANK = ("Birder", "1-bit LAMB", "CD-Adam", "CD-Adam, top-k")
"""Those whose states differ between ranks. All that LAMB keeps, the kept mean gradient included, is valid on any."""


@pytest.mark.parametrize("of", [*OF_EACH_RANK, "LAMB"])
def test_an_exchange_in_flight_is_part_of_the_state(of: str) -> None:
    run_ranks(_end_in_flight, 2, of)


def _misuse(rank: int, world_size: int) -> None:
    _, optimizer = _trained(rank, 3)
    with pytest.raises(ValueError, match="is of delay=1, this optimizer has delay=0"):
        thinwire.Birder(token_net().parameters()).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="is of delay=0, this optimizer has delay=1"):
        optimizer.load_state_dict(thinwire.Birder(token_net().parameters()).state_dict())
    with pytest.raises(RuntimeError, match="ranks disagree on delay"):
        _trained(rank, 1, delay=rank)
    attached, early = _trained(rank, 3, attach=True)
    token_loss(attached, rank, 3).backward()
    with pytest.raises(RuntimeError, match=r"synchronize\(\) between backward and step\(\)"):
        early.synchronize()


def test_misuse_is_refused() -> None:
    run_ranks(_misuse, 2)


def _differ(rank: int, world_size: int, kind: str) -> None:
    model, optimizer = _trained(rank, 3, attach=True)
    token_loss(model, rank, 3).backward()
    if rank == 1 and kind == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    elif rank == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()  # does not wait
    optimizer.zero_grad()
    with pytest.raises((thinwire.CorruptPacket, thinwire.GradientChanged)):
        optimizer.state_dict()
    token_loss(model, rank, 4).backward()


@pytest.mark.parametrize(
    ("kind", "errors"), [("lr", ["CorruptPacket"] * 2), ("gradient", ["CorruptPacket", "GradientChanged"])]
)
def test_what_differs_is_an_error_on_all_ranks_one_step_later(kind: str, errors: Sequence[str]) -> None:
    raised = run_ranks_expecting_errors(_differ, 2, kind)
    assert [error.type_name.replace("Disagreement", "CorruptPacket") for error in raised] == errors


def _overflow(rank: int, world_size: int) -> tuple[list[float], list[int], str]:
    net = token_net()
    model, optimizer = DDP(net), thinwire.Birder(net.parameters(), lr=1e-2, delay=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    thinwire.attach(model, optimizer, grad_scaler=scaler)
    scales, skipped = [], []
    for step in range(5):
        loss = token_loss(model, rank, step) * (math.inf if rank == 1 and step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        skipped.append(optimizer.metrics().skipped_steps)
    return scales, skipped, digest(net.parameters())


def test_scalers_learn_of_an_overflow_together_one_step_later() -> None:
    first, second = run_ranks(_overflow, 2)
    assert first == second
    assert first[:2] == ([1024.0, 1024.0, 1024.0, 512.0, 512.0], [0, 0, 0, 1, 1])


def _sharded_gradients(rank: int, world_size: int, delay: int) -> list[list[Tensor | None]]:
    """Those of a model that no optimizer moves."""
    model = sharded(mesh_of(world_size, 2))
    handle = thinwire.compress(model, "int4", delay=delay, bucket_mb=0.002)
    found = []
    for step in range(3):
        loss_of(model, rank, step).backward()
        found.append(locals_of(p.grad for p in model.parameters()))
        model.zero_grad()
    if delay:
        handle.synchronize()
        found.append(locals_of(p.grad for p in model.parameters()))
    return found


def _sharded(rank: int, world_size: int) -> None:
    at_once, later = (_sharded_gradients(rank, world_size, delay) for delay in (0, 1))
    assert not any(gradient is not None and gradient.any() for gradient in later[0])
    for now, then in zip(at_once, later[1:], strict=True):
        for ours, expected in zip(then, now, strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or expected is None or torch.equal(ours, expected)


def test_shards_get_their_means_one_step_later() -> None:
    run_ranks(_sharded, 4)


def test_what_cannot_be_delayed_is_refused() -> None:
    params = [nn.Parameter(torch.zeros(3, 4))]
    for delay in (2, -1, True, 0.5, None):
        with pytest.raises(ValueError, match=rf"delay={delay!r}: expected 0, or 1"):
            thinwire.Birder(params, delay=delay)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="delay=1: expected 0 here: ranks that have taken local steps"):
        thinwire.ZeroOneAdam(params, delay=1)
    with pytest.raises(ValueError, match="delay=1: expected 0 here: SketchedAMSGrad exchanges twice per step"):
        thinwire.SketchedAMSGrad(params, delay=1)
    with pytest.raises(ValueError, match="'powersgd' exchanges twice"):
        GradientAverager(params, rule_of("powersgd", {}), delay=1)


def _consolidated(worker: int, workers: int, of: str) -> dict[str, Any]:
    _, optimizer = _trained(worker, 3, of=of)
    optimizer.consolidate_state_dict()
    assert not optimizer.is_synchronized
    return optimizer.state_dict()


@pytest.mark.parametrize("of", OF_EACH_RANK)
@pytest.mark.parametrize("how", ["average", "reset"])
def test_other_ranks_cannot_apply_a_kept_answer(how: Any, of: str) -> None:
    saved, _ = virtual.run_workers(2, _consolidated, of)
    net, optimizer = _trained(0, 0, of=of)
    with pytest.warns(RuntimeWarning, match="the answer that delay=1 keeps for the next step is dropped"):
        thinwire.checkpoint.load_state_dict(optimizer, saved, on_mismatch=how)
    assert optimizer.is_synchronized
    before = digest(net.parameters())
    _step(net, optimizer, 0, 3)
    assert digest(net.parameters()) == before
    for step in (4, 5):  # after a reset, coordinates become active first
        _step(net, optimizer, 0, step)
    assert digest(net.parameters()) != before
