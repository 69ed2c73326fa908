"""Where tensors are made does not depend on torch's default device: what is the host's is on the CPU, all else where
parameters are. Whatever is made without saying where becomes a tensor without values here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.test_conformance import Entry, every_optimizer
from thinwire import SketchedAMSGrad

STEPS = 16


def trained(entry: Entry, default: str) -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator, device="cpu")) for shape in ((70, 3), (5,))]
    with torch.device(default):
        optimizer = entry.make(params, lr=1e-2)
        for _ in range(STEPS):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, device="cpu")
            optimizer.step()
        optimizer.metrics()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        optimizer.step()
    return [p.detach() for p in params], saved


@every_optimizer
@pytest.mark.parametrize("lane", ["", "stream"])
def test_another_default_device_changes_nothing(entry: Entry, lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lane and entry.optimizer is SketchedAMSGrad:
        pytest.skip("is refused there")
    monkeypatch.setenv("THINWIRE_LANE", lane)
    (expected, _), (values, saved) = trained(entry, "cpu"), trained(entry, "meta")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(values, expected, strict=True))
    assert all(value.device.type == "cpu" for state in saved["state"].values() for value in state.values())
