"""The side stream of a device, on CPUs: THINWIRE_LANE=stream runs what a GPU would, in order, over gloo.

Laws 1 and 2: collectives instead of messages, gates instead of decisions, another backend; the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.test_conformance import OPTIMIZERS, Entry
from tests.distributed.common import (
    MANY_CASES_SECONDS,
    Digest,
    Training,
    assert_same_runs,
    brain_net,
    environment,
    half_net,
    run_nodes,
    token_loss,
    token_net,
    train_each,
)
from tests.harness import run_ranks

STREAM = {"THINWIRE_LANE": "stream"}
ON_DEVICES = [entry for entry in OPTIMIZERS if entry.optimizer is not thinwire.SketchedAMSGrad]
every_entry = pytest.mark.parametrize("entry", ON_DEVICES, ids=str)


def on_stream(training: Training, **changes: object) -> Training:
    return replace(training, environment={**training.environment, **STREAM}, **changes)


def of(entry: Entry, **changes: object) -> Training:
    return replace(Training(entry.optimizer, {"lr": entry.lr, **entry.options}, steps=15), **changes)


@every_entry
def test_streams_and_lanes_give_the_same_bits(entry: Entry) -> None:
    plain = of(entry)
    assert_same_runs(2, plain, on_stream(plain, attach=True))


def test_buckets_and_dtypes_do_not_matter_on_streams_either() -> None:
    downlinks = (Training(options={"downlink": downlink}) for downlink in ("majority", "votes"))
    clipped = Training(options={"clip_norm": 0.3, "clip_value": 0.05})
    for plain in (*downlinks, clipped, Training(model=half_net), Training(model=brain_net)):
        small = {**plain.options, "bucket_mb": 0.01}
        assert_same_runs(2, plain, on_stream(plain, attach=True), on_stream(plain, options=small))


def test_a_worker_alone_needs_no_exchange() -> None:
    plain = Training()
    assert_same_runs(1, plain, on_stream(plain))


@every_entry
def test_nodes_are_workers_on_streams_too(entry: Entry) -> None:
    options = {"lr": entry.lr, **entry.options, "topology": "hierarchical", "node_dtype": torch.bfloat16}
    plain = of(entry, options=options, steps=13)
    for expected, stream in run_nodes(train_each, 2, 2, [plain, on_stream(plain)], timeout=MANY_CASES_SECONDS):
        assert stream == expected


def troubled(model: nn.Module, rank: int, batch: int) -> Tensor:
    """A gradient is infinite at the second step, and at the thirteenth, by when all have been through their stages; and
    a parameter has none on any worker in some steps, and on one of them in others."""
    absent = {"scale": batch in (30, 40, 110), "head.bias": batch in (50, 130) and rank == 0}
    for name, p in model.named_parameters():
        p.requires_grad_(not absent.get(name.removeprefix("module."), False))
    return token_loss(model, rank, batch) * (torch.inf if rank == 1 and batch in (10, 120) else 1.0)


@every_entry
def test_steps_that_are_skipped_or_not_for_all_are_so_on_the_device(entry: Entry) -> None:
    plain = of(entry, loss=troubled)
    for expected, stream in run_ranks(train_each, 2, [plain, on_stream(plain)], timeout=MANY_CASES_SECONDS):
        assert stream == expected
        assert len(set(stream)) == plain.steps - 2, "two steps are skipped"


def counts_of_skips(rank: int, world_size: int, environments: Sequence[dict[str, str]]) -> list[tuple[int, str]]:
    counted = []
    for variables in environments:
        with environment(variables):
            net = token_net()
            optimizer = thinwire.Birder(net.parameters(), max_consecutive_skips=3)
            raised = ""
            try:
                for step in range(9):
                    (token_loss(net, rank, step) * (torch.inf if step in (2, 4, 5, 6) else 1.0)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 3:
                        assert optimizer.metrics().skipped_steps == 1
            except thinwire.TooManySkips as error:
                raised = str(error)
            counted.append((optimizer.metrics().skipped_steps, raised.partition(",")[0]))
    return counted


def test_skips_are_counted_when_the_host_hears_of_them() -> None:
    for threads, stream in run_ranks(counts_of_skips, 2, [{}, STREAM]):
        assert threads == stream == (4, "3 steps in a row")


TRITON = {**STREAM, "THINWIRE_KERNELS": "triton"}


def small_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 5))


def small_loss(model: nn.Module, rank: int, batch: int, *, infinite: bool = True) -> Tensor:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(100 * batch + rank))
    return model(x).square().mean() * (torch.inf if infinite and rank == 1 and batch == 30 else 1.0)


SHORT = {
    thinwire.OneBitAdam: {"betas": (0.5, 0.5), "warmup_steps": 2},
    thinwire.ZeroOneAdam: {
        "betas": (0.5, 0.5),
        "var_freeze_step": 2,
        "var_update_scaler": 1,
        "local_step_scaler": 1,
        "local_step_clipper": 2,
    },
    thinwire.OneBitLamb: {"betas": (0.5, 0.5), "warmup_steps": 2},
}


def interpreted(rank: int, world_size: int, plain: Training) -> list[list[Digest]]:
    """A run with lanes and native kernels, and one in which Triton's kernels run on rank 1, where gradients are
    infinite. Rank 0 keeps the native ones there: what they read in the packets of the others must be the same too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)  # NumPy's, as it interprets infinities
        return train_each(rank, world_size, [plain, replace(plain, environment=TRITON if rank == 1 else STREAM)])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "optimizer",
    [thinwire.Birder, thinwire.OneBitAdam, thinwire.ZeroOneAdam, thinwire.OneBitLamb, thinwire.CDAdam],
    ids=lambda optimizer: optimizer.__name__,
)
def test_triton_kernels_give_the_same_bits(optimizer: type[torch.optim.Optimizer]) -> None:
    """A whole run by the kernels of a GPU, which Triton interprets here: slow, so it is a small one."""
    # Several buckets for one of them: that is a matter of the stream, not of the kernels.
    options = {**SHORT.get(optimizer, {}), "bucket_mb": 0.001 if optimizer is thinwire.Birder else None}
    plain = Training(optimizer, options, small_net, small_loss, steps=5)
    for expected, triton in run_ranks(interpreted, 2, plain, timeout=300):
        assert triton == expected


def refused(rank: int, world_size: int) -> str:
    with environment(STREAM), pytest.raises(ValueError, match="SketchedAMSGrad") as caught:
        thinwire.SketchedAMSGrad(token_net().parameters())
    return str(caught.value)


def test_what_has_no_place_on_a_device_is_refused() -> None:
    assert all("CPU" in text for text in run_ranks(refused, 2))
