"""A short run of every optimizer on real text, to a loss that nothing reaches by chance, or with half of the signs.

`thinwire study` is the long one. This one is part of the tests: whatever breaks an update shows in it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire.cli.charlm import ModelShape
from thinwire.cli.schedule import learning_rate_factor
from thinwire.cli.study.methods import METHODS, Setting
from thinwire.cli.study.runs import Run, run_virtually
from thinwire.cli.study.tasks import LAST_RATE, Sources, tasks

TASK = replace(tasks(Sources())["text"], steps=120, shape=ModelShape(layers=1, width=32, context=16))
LEARNT = 2.6
"""AdamW has 2.4 then, and who knows how often each character occurs, but no more, 3.25."""
LEARNT_LATE = 3.0
"""Of averages of one to three elements in a hundred: the others wait in residuals, and few steps are left for them."""
LEARNT_SPARSELY = 3.5
"""Of one that moves one coordinate in a hundred at a step, and learns how often characters occur; 4.6 is nothing."""
HALFWAY = 3.0
"""After half as many steps."""
BARS = {"sketched-amsgrad": LEARNT_SPARSELY, "compress-topk": LEARNT_LATE, "compress-gtopk": LEARNT_LATE}
"""Of those that do not reach `LEARNT`."""
OURS = [
    name
    for name, method in METHODS.items()
    if method.only is None and method.by_default and name not in ("adamw", "lion")
]
IN_LOCAL_STEPS = ["diloco-int4-h15", "streaming-int4-h30"]
"""The others need more than the eight outer steps of a run as short as this."""


def setting_of(name: str) -> Setting:
    method = METHODS[name]
    return Setting(method.lr, method.betas[0], method.decays[0])


def bar(name: str) -> float:
    return BARS.get(name, LEARNT)


@pytest.mark.parametrize("name", [*OURS, *IN_LOCAL_STEPS])
def test_it_learns_as_it_should(name: str) -> None:
    result = run_virtually(Run(TASK, name, setting_of(name), seed=0))
    assert result.points[0].score.loss > bar(name)
    assert result.final.loss < bar(name)


def test_characters_alone_are_not_enough() -> None:
    """The bar is below what the frequencies of characters tell."""
    frequency = torch.bincount(TASK.take(torch.arange(0, TASK.examples, 16))[0].flatten()).double()
    frequency /= frequency.sum()
    assert -(frequency * frequency.clamp_min(1e-12).log()).sum() > LEARNT + 0.5


@pytest.mark.parametrize("name", OURS)
def test_steps_at_random_do_not_get_there(name: str) -> None:
    torch.manual_seed(0)
    model = TASK.model()
    for step in range(TASK.steps):
        rate = setting_of(name).lr * learning_rate_factor(step, TASK.steps, LAST_RATE)
        for p in model.parameters():
            p.data.add_(torch.randint(0, 2, p.shape).mul_(2).sub_(1), alpha=rate)
    with torch.no_grad():
        assert TASK.validate(model, last=False).loss > bar(name) + 0.5


@pytest.mark.parametrize(
    "name", ["birder-bit", *(pytest.param(name, marks=pytest.mark.long) for name in ("onebit-adam", "cd-adam"))]
)
def test_half_of_the_workers_that_pull_the_other_way_do_not_get_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lost sign, a swapped row or a wrong worker's key would do."""
    backward = torch.Tensor.backward
    calls = 0

    def turned(loss: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        backward(loss if calls % 2 else -loss)

    monkeypatch.setattr(torch.Tensor, "backward", turned)
    result = run_virtually(Run(replace(TASK, steps=60), name, setting_of(name), seed=0))
    assert calls == 4 * 60
    assert result.final.loss > HALFWAY
    monkeypatch.undo()
    assert run_virtually(Run(replace(TASK, steps=60), name, setting_of(name), seed=0)).final.loss < HALFWAY
