"""What a device reports and decides by itself, and what is refused before it is asked."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import thinwire
from tests.harness import run_ranks
from thinwire.compressors.stochastic_sign import StochasticSign
from thinwire.kernels import ops
from thinwire.kernels.header import CHECKED, NONFINITE, REFUSED, REFUSED_BY_PEER, Status
from thinwire.kernels.modes import Gate
from thinwire.optimizers.inputs import refuse_capture
from thinwire.transport.buffers import PacketBuffers
from thinwire.transport.layout import Layout
from thinwire.transport.peers import Peers
from thinwire.transport.report import Report
from thinwire.transport.streams import SynchronousStreams, streams_of, wait_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PARAMETERS = 150


def reported(present: set[int], flags: int = 0) -> Report:
    """A report of an exchange in which these parameters had a gradient."""
    layout = Layout([64] * PARAMETERS, 2, 64 * 70)
    life = torch.zeros(layout.size)
    buffers = PacketBuffers(
        layout, StochasticSign(layout, "bit", ops.BACKENDS["reference"], life, 0.0).payload, alone=True
    )
    report = Report(layout)
    report.status[Status.FLAGS] |= flags
    for frame in buffers.frames:
        bits = sum(1 << place for place, position in enumerate(frame.bucket.slots) if position in present)
        buffers.fill_presence(frame, bits)
        width = 8 * frame.presence_words
        frame.answers[0, frame.down_presence :][:width] = frame.sent[0, frame.up_presence :][:width]
        report.copy_presence(frame)
    return report


ODD = set(range(1, PARAMETERS, 2))


def test_gates_are_open_for_parameters_with_a_gradient_on_some_worker() -> None:
    report = reported(ODD)
    report.set_gates()
    assert {i for i, is_open in enumerate(report.gate.open.tolist()) if is_open} == {*ODD, PARAMETERS}
    outcome = report.read(report.copy_to_host())
    assert (set(outcome.present), outcome.flags, outcome.refusal) == (ODD, 0, None)
    report.open_gates()
    assert report.gate.open.all()


@pytest.mark.parametrize("flags", [NONFINITE, REFUSED])
def test_nobody_steps_when_anything_was_raised(flags: int) -> None:
    report = reported(ODD, flags)
    report.set_gates()
    assert not report.gate.open.any()
    assert bool(report.overflow()) == (flags == NONFINITE)
    assert report.read(report.copy_to_host()).flags == flags


def test_a_refusal_is_for_ever_and_an_overflow_is_not() -> None:
    report = reported(ODD, NONFINITE | REFUSED)
    report.begin()
    assert int(report.status[Status.FLAGS]) == REFUSED
    report.set_gates()
    assert not report.gate.open.any()


def test_a_report_is_not_overwritten_by_that_of_the_next_step() -> None:
    report = reported({3})
    first = report.copy_to_host()
    report.status[Status.FLAGS] |= NONFINITE
    second = report.copy_to_host()
    assert report.read(first).flags == 0
    assert report.read(second).flags == NONFINITE


def test_refusals_are_told_as_on_the_host() -> None:
    report = reported(set())
    words = {Status.CODE: CHECKED.index("step") + 1, Status.SENDER: 3, Status.STEP: 7, Status.BUCKET: 1}
    for field, value in {**words, Status.GOT: 8, Status.WANT: 7}.items():
        report.status[field] = value
    told = str(report.read(report.copy_to_host()).refusal)
    assert told.startswith("packet from rank 3 for step 7, bucket 1: step is 8, expected 7: all ranks must call step()")
    report.status[Status.CODE] = REFUSED_BY_PEER
    assert "rank 3 refused a packet of step 7" in str(report.read(report.copy_to_host()).refusal)


def test_kernels_of_the_host_find_and_step_as_those_of_a_device() -> None:
    status, gate = torch.zeros(8, dtype=torch.int64), Gate(torch.tensor([1, 0], dtype=torch.int32))
    kernels = ops.BACKENDS["native"].on_device(status, gate)
    runs = torch.tensor([[0, 0, 5, 0, 0, 0]])
    packets = torch.zeros(64, dtype=torch.uint8)
    status[Status.FLAGS] = REFUSED
    assert kernels.dense_encode(runs, torch.arange(5.0), packets, scale=1.0) is None
    assert int(status[Status.FLAGS]) == REFUSED
    assert kernels.dense_encode(runs, torch.tensor([1.0, 2.0, torch.inf, 3.0, 4.0]), packets, scale=1.0) is None
    assert int(status[Status.FLAGS]) == REFUSED | NONFINITE
    for parameter, moves in ((0, True), (1, False)):
        x = torch.zeros(5)
        gate.parameter = parameter
        kernels.dense_apply(runs, x, None, torch.ones(5).view(torch.uint8), lr=0.1, decay=1.0)
        assert bool(x.any()) == moves


def test_an_event_that_is_not_reached_in_time() -> None:
    class Never:
        def query(self) -> bool:
            return False

    assert wait_for(SynchronousStreams().record_event(), 0.0)
    assert not wait_for(Never(), 0.01)


def test_lanes_are_chosen_by_the_device_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_LANE", raising=False)
    assert streams_of(CPU) is None
    monkeypatch.setenv("THINWIRE_LANE", "stream")
    assert isinstance(streams_of(CPU), SynchronousStreams)
    monkeypatch.setenv("THINWIRE_LANE", "steam")
    with pytest.raises(ValueError, match="THINWIRE_LANE='steam': expected 'stream'"):
        streams_of(CPU)


# Which kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_KERNELS", raising=False)


@pytest.mark.usefixtures("no_wishes")
def test_gpus_have_triton_and_the_reference_says_so_once_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert ops.backend(CUDA).name == "triton"
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.5.1")
    monkeypatch.setattr(ops, "_warned", set())
    with pytest.warns(RuntimeWarning, match="Triton 3.6 or newer is not installed"):
        assert ops.backend(CUDA).name == "reference"

    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.backend(CUDA).name == "reference"
    monkeypatch.setenv("THINWIRE_KERNELS", "triton")
    with pytest.raises(RuntimeError, match=r"THINWIRE_KERNELS=triton, but Triton 3\.6 or newer is not installed"):
        ops.backend(CUDA)


def test_kernels_of_the_other_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "native")
    with pytest.raises(ValueError, match="'native' with parameters on a GPU"):
        ops.backend(CUDA)
    monkeypatch.setenv("THINWIRE_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs TRITON_INTERPRET=1"):
        ops.backend(CPU)


def test_nobody_imports_triton_without_a_gpu() -> None:
    # torch itself does, where it is installed: here it is not.
    step = (
        "import sys; sys.modules['triton'] = None; import torch, thinwire; net = torch.nn.Linear(3, 3); "
        "opt = thinwire.Birder(net.parameters()); net(torch.ones(1, 3)).sum().backward(); opt.step(); "
        "assert 'thinwire.kernels.triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", step], check=True, timeout=170)


# What is refused ------------------------------------------------------------------------------------------------------


def of_gloo(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="cuda") as caught:
        Peers.of(None).check_backend(CUDA)
    Peers.of(None).check_backend(CPU)
    return str(caught.value)


def test_parameters_on_a_gpu_need_nccl() -> None:
    for told in run_ranks(of_gloo, 2):
        assert "parameters on 'cuda:0', and a process group that serves" in told
        assert "expected one with nccl" in told


def stepping(**group: Any) -> thinwire.Birder:
    net = torch.nn.Linear(3, 3)
    optimizer = thinwire.Birder(net.parameters())
    optimizer.param_groups[0].update(group)
    net(torch.ones(1, 3)).sum().backward()
    return optimizer


def test_a_learning_rate_on_a_device_is_refused() -> None:
    optimizer = stepping(lr=torch.zeros((), device="meta"))
    with pytest.raises(ValueError, match="lr is a tensor on 'meta': expected a number, or a tensor on the CPU"):
        optimizer.step()


def test_a_step_inside_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_capture(CPU)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        refuse_capture(CUDA)


def test_a_scale_that_takes_the_place_of_another_in_memory_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GradScaler gives step() a new tensor every time, as a rule where the last one was."""
    monkeypatch.setenv("THINWIRE_LANE", "stream")
    optimizer = stepping()
    memory = torch.tensor([4.0])
    for value in (4.0, 8.0):
        memory.fill_(value)
        scale = torch.empty(0).set_(memory.untyped_storage(), 0, (1,), (1,))
        assert float(optimizer._inverse(scale)) == 1.0 / value
        assert optimizer._inverse(scale) is optimizer._inverse(scale)
        scale.mul_(2.0)
        assert float(optimizer._inverse(scale)) == 0.5 / value
