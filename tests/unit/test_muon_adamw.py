"""`thinwire.MuonAdamW`: the bits of torch's two optimizers, as one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import thinwire

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 6)
        self.hidden = nn.Linear(6, 8)
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(words))))


WORDS = torch.tensor([0, 3, 1, 4])


def train(model: Net, step: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        nn.functional.cross_entropy(model(WORDS), WORDS).backward()
        step()


def combined(model: Net) -> thinwire.MuonAdamW:
    return thinwire.MuonAdamW(model, lr=1e-2, weight_decay=0.1, adamw=[model.head], betas=(0.8, 0.9))


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_steps_are_those_of_torchs_optimizers() -> None:
    ours, theirs = Net(), Net()
    opt = combined(ours)
    muon = torch.optim.Muon([theirs.hidden.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [theirs.embedding.weight, theirs.hidden.bias, theirs.head.weight]
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))
    train(ours, opt.step, 3)
    train(theirs, lambda: (muon.step(), adamw.step()), 3)
    assert equal(ours, theirs)
    assert [group["param_names"] for group in opt.param_groups] == [
        ["hidden.weight"],
        ["embedding.weight", "hidden.bias", "head.weight"],
    ]


def test_a_scheduler_moves_both_parts() -> None:
    model = Net()
    opt = combined(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0 if step else 1.0)
    train(model, opt.step, 1)
    scheduler.step()
    before = copy.deepcopy(model)
    train(model, opt.step, 1)
    assert equal(model, before)


@pytest.mark.parametrize("how", ["loaded", "copied"])
def test_it_goes_on_where_it_was(how: str) -> None:
    model = Net()
    opt = combined(model)
    train(model, opt.step, 2)
    if how == "copied":
        other, again = copy.deepcopy((model, opt))
    else:
        other = copy.deepcopy(model)
        again = combined(other)
        again.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt.step, 2)
    train(other, again.step, 2)
    assert equal(model, other)


def test_muloco_is_local_steps_with_it() -> None:
    model = Net()
    opt = thinwire.LocalSteps.from_profile("muloco", combined(model), every=2)
    assert opt.outer_momentum == 0.6
    before = copy.deepcopy(model)
    train(model, opt.step, 4)
    assert not equal(model, before)
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    train(model, opt.step, 2)
    assert opt.outer_steps == 3


def test_wrong_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with pytest.raises(TypeError, match=r"model is list, expected the nn\.Module"):
        thinwire.MuonAdamW([*model.parameters()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"adamw has 'head': expected modules and parameters, such as \[model.head\]"):
        thinwire.MuonAdamW(model, adamw=["head"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no matrix of Embedding is left for Muon"):
        thinwire.MuonAdamW(model.embedding)
    opt = combined(model)
    with pytest.raises(RuntimeError, match="add_param_group of MuonAdamW: make a new one"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="has 1 parameter groups, 0 of them of Muon: expected that of a MuonAdamW"):
        opt.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"MuonAdamW needs torch\.optim\.Muon, of torch 2\.9 or later: this is"):
        combined(model)
