"""`metrics().as_dict()`: totals and rates."""

from __future__ import annotations

import dataclasses
import math
import time
from types import SimpleNamespace

import pytest
import torch

import thinwire
from thinwire.metrics import Meter, Metrics


def read(meter: Meter) -> Metrics:
    return meter.read(mean_abs_vote=0.5, contraction=math.nan)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time that meters see, however long a test takes."""
    monkeypatch.setattr("thinwire.metrics.time", SimpleNamespace(perf_counter=lambda: 100.0))
    return 100.0


def test_totals_by_name_without_what_was_not_measured() -> None:
    meter = Meter(steps=3, bytes_sent=400)
    metrics = read(meter)
    numbers = metrics.as_dict()
    names = {each.name for each in dataclasses.fields(Metrics)}
    assert names - numbers.keys() == {"contraction"}
    assert all(numbers[name] == getattr(metrics, name) for name in names & numbers.keys())
    assert all(map(math.isfinite, numbers.values()))


def test_rates_of_a_whole_life_and_since_earlier_metrics(now: float) -> None:
    meter = Meter(steps=10, bytes_sent=1000, bytes_received=3000, began=now - 8.0)
    meter.exposed_wait.seconds = 2.0
    earlier = read(meter)
    numbers = earlier.as_dict()
    assert numbers["steps_per_second"] == pytest.approx(10 / 8)
    assert numbers["bytes_sent_per_second"] == pytest.approx(1000 / 8)
    assert numbers["bytes_received_per_second"] == pytest.approx(3000 / 8)
    assert numbers["waited_share"] == pytest.approx(2 / 8)

    meter.began -= 4.0
    meter.steps, meter.bytes_sent = 12, 1800
    meter.exposed_wait.seconds = 5.0
    numbers = read(meter).as_dict(since=earlier)
    assert numbers["steps"] == 12
    assert numbers["steps_per_second"] == pytest.approx(2 / 4)
    assert numbers["bytes_sent_per_second"] == pytest.approx(800 / 4)
    assert numbers["bytes_received_per_second"] == 0
    assert numbers["waited_share"] == pytest.approx(3 / 4)
    assert "steps_per_second" not in earlier.as_dict(since=earlier)  # no time has passed


def test_of_an_optimizer() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = thinwire.Birder([p])
    before = optimizer.metrics()
    time.sleep(0.01)
    p.grad = torch.ones(3)
    optimizer.step()
    numbers = optimizer.metrics().as_dict(since=before)
    assert numbers["steps"] == 1
    assert 0 < numbers["steps_per_second"] <= 100
    assert 0 <= numbers["waited_share"] < 1
