"""Checkpoints of a compression with forged parts: they are refused and change nothing, and the next one loads."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.averaging_runs import Averaging, PlainLoop
from tests.distributed.common import digest
from tests.forgeries import forge
from tests.refusals import Net
from thinwire import checkpoint
from thinwire.averaging.handle import Compression
from thinwire.errors import CorruptCheckpoint

FILE = "rank-00000.pt"
SAVED_AT = 2
NAME = f"000001-step-{SAVED_AT}"


class Run:
    """On one rank. Most compressors keep nothing there; PowerSGD does."""

    def __init__(self, seed: int = 0, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.net = Net()
        self.loop = PlainLoop(self.net, Averaging("powersgd", {"rank": 1}))
        self.compression = Compression(self.loop.averager)
        self.optimizer = optimizer(self.net.parameters(), lr=0.01)

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.net(torch.randn(8, 7) * random.random()).square().mean().backward()
            self.loop.average()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def now(self) -> str:
        states = [part.state_dict()["state"] for part in (self.optimizer, self.compression)]
        kept = [value for state in states for of_one in state.values() for _, value in sorted(of_one.items())]
        groups = repr([part.state_dict()["param_groups"] for part in (self.optimizer, self.compression)])
        numbers = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
        return digest([*self.net.parameters(), *self.net.buffers(), *kept, *numbers]) + groups

    def load(self, path: Path) -> checkpoint.Checkpoint | None:
        return checkpoint.load(path, self.net, self.optimizer, compression=self.compression)


def of_first(contents: Any, part: str) -> dict[str, Any]:
    return contents[part]["state"][0]


FORGERIES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "no compression": (lambda c: c.pop("compression"), CorruptCheckpoint, "is not the file of a rank"),
    "no optimizer": (lambda c: c.pop("optimizer"), CorruptCheckpoint, "is not the file of a rank"),
    "a group that is not a dict": (
        lambda c: c["optimizer"].update(param_groups=[3]),
        CorruptCheckpoint,
        "is not the file of a rank",
    ),
    "a compression without groups": (
        lambda c: c["compression"].pop("param_groups"),
        CorruptCheckpoint,
        "is not the file of a rank",
    ),
    "parts that are swapped": (
        lambda c: c.update(optimizer=c["compression"], compression=c["optimizer"]),
        ValueError,
        "the state dict is of another optimizer, this is thinwire.compress",
    ),
    "a residual of another shape": (
        lambda c: of_first(c, "compression").update(residual=torch.zeros(2)),
        ValueError,
        "'residual' is (2,) of torch.float32 in the state dict, this compression needs (5, 7)",
    ),
    "a residual that is not finite": (
        lambda c: of_first(c, "compression")["residual"].fill_(torch.inf),
        ValueError,
        "'residual' in the state dict has values that are not finite",
    ),
    "another rank": (
        lambda c: c["compression"]["param_groups"][0].update(wire_world_size=3),
        ValueError,
        "the state dict is of 3 ranks, this run has 1",
    ),
    "fewer parameters": (
        lambda c: c["optimizer"]["param_groups"][0]["params"].pop(),
        ValueError,
        "the saved optimizer has parameter groups of [7] parameters, this AdamW of [8]",
    ),
    "one more group": (
        lambda c: c["optimizer"]["param_groups"].append({"params": []}),
        ValueError,
        "the saved optimizer has parameter groups of [8, 0] parameters, this AdamW of [8]",
    ),
    "parameters without numbers": (
        lambda c: c["optimizer"]["param_groups"][0].update(params=[[0]] * 8),
        ValueError,
        "parameter group 0 of the saved optimizer has no list of the numbers of its parameters",
    ),
    "a state that is not a dict": (
        lambda c: c["optimizer"]["state"].update({3: [1]}),
        ValueError,
        "the state of parameter 3 of the saved optimizer is list, expected a dict",
    ),
    "no rate": (
        lambda c: c["optimizer"]["param_groups"][0].pop("lr"),
        ValueError,
        "parameter group 0 of the saved optimizer lacks 'lr'",
    ),
    "a state without values": (
        lambda c: of_first(c, "optimizer").update(exp_avg=torch.zeros(5, 7, device="meta")),
        ValueError,
        "cannot be loaded: NotImplementedError",
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    run = Run().train(SAVED_AT)
    checkpoint.save(path, run.net, run.optimizer, SAVED_AT, compression=run.compression)
    return path


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_part_changes_nothing(forgery: str, saved: Path, tmp_path: Path) -> None:
    change, kind, told = FORGERIES[forgery]
    forged = tmp_path / "forged"
    directory = Path(shutil.copytree(saved / NAME, forged / NAME))
    contents = torch.load(directory / FILE, weights_only=True)
    change(contents)
    forge(directory, FILE, contents)
    run = Run(seed=5).train(3)
    before = run.now()
    with pytest.raises(kind) as refusal:
        run.load(forged)
    assert refusal.type is kind
    assert told in str(refusal.value)
    assert run.now() == before
    never_stopped = Run().train(SAVED_AT + 2).now()
    assert run.load(saved) is not None
    assert run.train(2).now() == never_stopped


def test_what_users_refer_to_is_restored(saved: Path) -> None:
    run = Run(seed=5).train(1)

    def fail(_: torch.optim.Optimizer) -> None:
        raise RuntimeError("a hook has failed")

    run.optimizer.register_load_state_dict_post_hook(fail)
    groups, group, state = run.optimizer.param_groups, run.optimizer.param_groups[0], run.optimizer.state
    moments = [of_one["exp_avg"] for of_one in state.values()]
    before = run.now()
    with pytest.raises(RuntimeError, match="a hook has failed"):
        run.load(saved)
    assert run.now() == before
    assert run.optimizer.param_groups is groups
    assert run.optimizer.param_groups[0] is group
    assert run.optimizer.state is state
    assert all(of_one["exp_avg"] is moment for of_one, moment in zip(state.values(), moments, strict=True))


class WithHistory(torch.optim.SGD):
    """Keeps lists in its state, and loads by writing into what it has."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append({"grad": p.grad.clone()})
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, of_one in enumerate(self.state.values()):
            loaded = state_dict["state"][number]["history"]
            of_one["history"][0]["grad"].copy_(loaded[0]["grad"])
            of_one["history"][1:] = loaded[1:]
        if len(self.state) and self.param_groups[0]["lr"] == 7.0:
            raise RuntimeError("it is too late for that")


def test_an_optimizer_that_loads_in_place_is_restored(tmp_path: Path) -> None:
    first = Run(optimizer=WithHistory).train(SAVED_AT)
    checkpoint.save(tmp_path, first.net, first.optimizer, SAVED_AT, compression=first.compression)
    run = Run(seed=5, optimizer=WithHistory).train(3)
    run.optimizer.param_groups[0]["lr"] = 7.0

    def history() -> list[str]:
        return [digest(entry["grad"] for entry in of_one["history"]) for of_one in run.optimizer.state.values()]

    before = history()
    with pytest.raises(RuntimeError, match="too late"):
        run.load(tmp_path)
    assert history() == before
    run.optimizer.param_groups[0]["lr"] = 0.1
    assert run.load(tmp_path) is not None
    assert history() != before


def test_rates_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    """A schedule that NumPy computes puts its numbers into groups, and weights_only=True rejects those."""
    run = Run().train(1)
    run.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    checkpoint.save(tmp_path, run.net, run.optimizer, 1, compression=run.compression)
    assert type(run.optimizer.param_groups[0]["lr"]) is np.float64
    run.load(tmp_path)
    assert type(run.optimizer.param_groups[0]["lr"]) is float
