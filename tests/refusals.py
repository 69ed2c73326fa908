"""Checkpoints that cannot be loaded, and everything that must be the same when one has been refused."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.forgeries import forge, reseal
from thinwire import checkpoint


def everything(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Digests of all that loading may change, by what it is."""
    state = optimizer._state_of_this_rank()
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    return {
        "model": _digest(sorted(model.state_dict().items())),
        "buffers that are not saved": _digest(list(model.named_buffers())),
        "parameters": _digest([(str(id(p)), p) for p in model.parameters()]),
        "state": _digest([(f"{p} {name}", t) for p, of in state["state"].items() for name, t in sorted(of.items())]),
        "groups": repr([sorted(group.items()) for group in groups]),
        "defaults": repr(sorted(optimizer.defaults.items())),
        "counters": repr((int(optimizer._step_count), optimizer._context.step, vars(optimizer._skips))),
        "channel": optimizer._rule.channel(),
        "torch": _digest([("", torch.get_rng_state())]),
        "python": _digest([("", torch.tensor(random.getstate()[1]))]),
    }


def _digest(tensors: list[tuple[str, Any]]) -> str:
    accumulated = hashlib.sha256()
    for name, value in tensors:
        accumulated.update(name.encode())
        if isinstance(value, torch.Tensor):
            accumulated.update(f"{value.dtype} {tuple(value.shape)}".encode())
            accumulated.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            accumulated.update(repr(value).encode())
    return accumulated.hexdigest()


Change = Callable[[Any], object]


def _of_rank(change: Change) -> Callable[[Path, int], None]:
    """Forges the file of a rank."""

    def forge_it(directory: Path, rank: int) -> None:
        file = f"rank-{rank:05d}.pt"
        contents = torch.load(directory / file, weights_only=True)
        change(contents)
        forge(directory, file, contents)

    return forge_it


def _of_model(change: Change) -> Callable[[Path, int], None]:
    def forge_it(directory: Path, rank: int) -> None:
        contents = torch.load(directory / "model.pt", weights_only=True)
        change(contents)
        forge(directory, "model.pt", contents)

    return forge_it


def _group(**entries: Any) -> Callable[[Path, int], None]:
    return _of_rank(lambda contents: contents["optimizer"]["param_groups"][0].update(entries))


def _state(contents: Any) -> dict[str, Any]:
    """Of the last parameter: those before it may have been loaded by then."""
    return list(contents["optimizer"]["state"].values())[-1]


def _everywhere(name: str, value: Any) -> Callable[[Path, int], None]:
    """In the state of every parameter."""

    def change(contents: Any) -> None:
        for of_one in contents["optimizer"]["state"].values():
            of_one[name] = value

    return _of_rank(change)


def _absurd_counters(value: float) -> Callable[[Path, int], None]:
    """Counters, schedules and flags of all parameters: whatever is small; the step, where it is the only one."""

    def change(contents: Any) -> None:
        for of_one in contents["optimizer"]["state"].values():
            small = [name for name in of_one if of_one[name].dim() == 0 or of_one[name].dtype == torch.float64]
            for name in small if len(small) == 1 else [name for name in small if name != "step"]:
                whole = not of_one[name].dtype.is_floating_point
                of_one[name] = torch.full_like(of_one[name], -7 if whole else value)

    return _of_rank(change)


def _random(**states: Any) -> Callable[[Path, int], None]:
    return _of_rank(lambda contents: contents["random"].update(states))


def _cast(tensors: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    tensors[name] = tensors[name].to(dtype)


def _first_moment(contents: Any) -> str:
    """The name of something that is as large as the parameter."""
    state = _state(contents)
    return max(sorted(state), key=lambda name: (state[name].numel(), state[name].dtype.is_floating_point))


def _reshape(contents: Any) -> None:
    name = _first_moment(contents)
    _state(contents)[name] = _state(contents)[name].flatten()[:-1]


def _recast(contents: Any) -> None:
    name = _first_moment(contents)
    _cast(_state(contents), name, torch.float16)


REFUSALS: dict[str, Callable[[Path, int], None]] = {
    "another class": lambda directory, rank: reseal(directory, lambda fields: fields.update(optimizer="Adam")),
    "another class of the state": _group(wire_class="Adam"),
    "another rank": _group(wire_world_size=17),
    "the model lacks an entry": _of_model(lambda model: model.pop("head.weight")),
    "the model has one more": _of_model(lambda model: model.update(more=torch.zeros(1))),
    "the model has another shape": _of_model(lambda model: model.update({"head.weight": torch.ones(3)})),
    "the model has another dtype": _of_model(lambda model: _cast(model, "head.weight", torch.float16)),
    "the model has something else": _of_model(lambda model: model.update({"head.weight": "ones"})),
    "the model has no values": _of_model(
        lambda model: model.update({"head.weight": model["head.weight"].to("meta")}),
    ),
    "a buffer of another shape": _of_rank(lambda rank: rank["model"].update({"norm.running_mean": torch.ones(2)})),
    "a buffer of another dtype": _of_rank(lambda rank: _cast(rank["model"], "norm.running_mean", torch.float64)),
    "a number among the names": _of_rank(lambda rank: rank["model"].update({7: torch.ones(2)})),
    "the state lacks an entry": _of_rank(lambda rank: _state(rank).pop(_first_moment(rank))),
    "the state has one more": _of_rank(lambda rank: _state(rank).update(more=torch.zeros(1))),
    "the state has another shape": _of_rank(_reshape),
    "the state has another dtype": _of_rank(_recast),
    "the state is truncated": _of_rank(lambda rank: rank["optimizer"]["state"].popitem()),
    "the state is empty": _of_rank(lambda rank: rank["optimizer"].update(state={})),
    "groups are truncated": _of_rank(lambda rank: rank["optimizer"]["param_groups"][0]["params"].pop()),
    "no groups": _of_rank(lambda rank: rank["optimizer"].update(param_groups=[])),
    "a rate of another type": _group(lr="fast"),
    "a rate that is no number": _group(lr=float("nan")),
    "a negative rate": _group(lr=-1.0),
    "a decay of another type": _group(weight_decay=[0.1]),
    "no rate": _of_rank(lambda rank: rank["optimizer"]["param_groups"][0].pop("lr")),
    "a negative step": _everywhere("step", torch.tensor(-1)),
    "an absurd step": _everywhere("step", torch.tensor(2**63 - 1)),
    "a step that is no number": _everywhere("step", float("nan")),
    "a step that is infinite": _everywhere("step", float("inf")),
    "steps that differ": _of_rank(lambda rank: _state(rank).update(step=torch.tensor(1))),
    "counters that are not finite": _absurd_counters(float("nan")),
    "absurd counters": _absurd_counters(-1e300),
    "a random state of another size": _random(torch=torch.zeros(5, dtype=torch.uint8)),
    "a random state of zeros": _random(torch=torch.zeros(5056, dtype=torch.uint8)),
    "a random state of another dtype": _random(torch=torch.zeros(5056)),
    "a random state of Python that is short": _random(python=(3, (1, 2, 3), None)),
    "a random state of Python that is another": _random(python=(3, tuple([2**40] * 625), None)),
}
"""By what is wrong; for a directory and a rank. The model has a `head` and a `norm`."""

OF_RANK_ZERO = {name for name in REFUSALS if "model" in name or "buffer" in name or "names" in name}
"""Those that are about the model: other ranks than those that saved take rank 0's."""


# Who loads them ------------------------------------------------------------------------------------------------------

DOCUMENTED = (ValueError, RuntimeError)
"""What `load` raises."""


class Scaled(nn.Linear):
    """A module with state that is not a tensor."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.calls = {"n": 0}
        self.breaks = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls["n"] += 1
        return super().forward(input) * (1 + self.calls["n"] / 100)

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.breaks:
            self.breaks = False
            self.calls["n"] = 10_000
            torch.rand(1)
            raise KeyError("n")
        self.calls = dict(state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)
        self.scaled = Scaled(3, 2)
        self.register_buffer("own", torch.ones(1).expand(3), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scaled(nn.functional.dropout(torch.tanh(self.head(self.norm(self.body(inputs)))), 0.2))


class Run:
    """Training in which everything must be as it was for it to go on as before."""

    def __init__(self, entry: Any, seed: int = 0, dtype: torch.dtype = torch.float32, rank: int = 0) -> None:
        torch.manual_seed(seed)
        self.net, self.rank = Net().to(dtype), rank
        self.optimizer = entry.make(self.net.parameters(), lr=0.01)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Every rank has batches of its own."""
        torch.manual_seed(seed + 1000 * self.rank)
        random.seed(seed + 1000 * self.rank)

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            inputs = torch.randn(8, 7, dtype=self.net.head.weight.dtype) * random.random()
            self.net(inputs).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def now(self) -> dict[str, str]:
        told = everything(self.net, self.optimizer)
        return {**told, "parameters": "", "extra": repr(self.net.scaled.calls)}

    def here(self) -> dict[str, str]:
        """The same, with the identities of parameters."""
        return {**everything(self.net, self.optimizer), "extra": repr(self.net.scaled.calls)}

    def load(self, path: Path, **options: Any) -> checkpoint.Checkpoint | None:
        return checkpoint.load(path, self.net, self.optimizer, **options)

    def refuse(self, path: Path, **options: Any) -> str:
        """Load what must be refused, and see that nothing has changed; what was raised."""
        before, told = self.here(), ""
        try:
            self.load(path, **options)
        except DOCUMENTED as error:
            told = f"{type(error).__name__}: {error}"
        assert told, "it was loaded"
        assert self.here() == before
        return told
