"""`thinwire.SignSGD`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire


def test_steps_have_the_length_of_the_learning_rate() -> None:
    p, idle = nn.Parameter(torch.tensor([1.0, -2.0, 3.0])), nn.Parameter(torch.ones(2))
    opt = thinwire.SignSGD([p, idle], lr=0.5, weight_decay=0.5)
    p.grad = torch.tensor([1e-9, -7.0, 0.0])
    assert opt.step(lambda: 3.0) == 3.0
    assert p.tolist() == [0.75 * 1 - 0.5, 0.75 * -2 + 0.5, 0.75 * 3]
    assert idle.tolist() == [1.0, 1.0]
    assert p.grad.tolist() == pytest.approx([1e-9, -7.0, 0.0]), "the gradient stays as it is"


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="lr=-1: expected a number >= 0"):
        thinwire.SignSGD([nn.Parameter(torch.ones(1))], lr=-1)
    with pytest.raises(ValueError, match="weight_decay='a': expected a number >= 0"):
        thinwire.SignSGD([nn.Parameter(torch.ones(1))], weight_decay="a")  # type: ignore[arg-type]
