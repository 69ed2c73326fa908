"""A checkpoint that is refused leaves everything as it was, to the bit, and the next one loads."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.test_conformance import OPTIMIZERS, Entry, every_optimizer
from tests.distributed.common import named
from tests.refusals import REFUSALS, Net, Run
from thinwire import checkpoint

SAVED_AT, STEPS = 14, 3
NAME = f"000001-step-{SAVED_AT}"


Saved = tuple[Path, dict[str, str]]
"""A checkpoint, and what becomes of a run that goes on from it."""


@pytest.fixture
def saved(entry: Entry, tmp_path: Path) -> Saved:
    run = Run(entry).train(SAVED_AT)
    checkpoint.save(tmp_path / "saved", run.net, run.optimizer, SAVED_AT)
    return tmp_path / "saved", run.train(STEPS).now()


def assert_refused(run: Run, path: Path, saved: Saved) -> str:
    """The text of the refusal, after which nothing has changed, and the good checkpoint loads."""
    told = run.refuse(path)
    run.load(saved[0])
    end = run.train(STEPS).now()
    assert {**end, "defaults": ""} == {**saved[1], "defaults": ""}
    return told


@every_optimizer
def test_what_is_refused_changes_nothing(entry: Entry, saved: Saved, tmp_path: Path) -> None:
    for number, (refusal, spoil) in enumerate(REFUSALS.items()):
        with named(refusal):
            bad = tmp_path / f"bad{number}"
            shutil.copytree(saved[0] / NAME, bad / NAME)
            spoil(bad / NAME, 0)
            assert_refused(Run(entry, seed=5).train(3), bad, saved)


# Modules that fail midway --------------------------------------------------------------------------------------------


def break_before_the_last(net: Net) -> None:
    """The hooks of a module run when those before it are loaded."""

    def fail(*_: Any) -> None:
        handle.remove()
        random.random()
        torch.rand(1)
        raise LookupError("a hook has failed")

    handle = net.scaled.register_load_state_dict_pre_hook(fail)


def break_after_all(net: Net) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise RuntimeError("a hook has failed")

    handle = net.register_load_state_dict_post_hook(fail)


def break_extra_state(net: Net) -> None:
    net.scaled.breaks = True


def replace_then_break(net: Net) -> None:
    """A module may put other tensors in the place of its own, and change others."""

    def fail(*_: Any) -> None:
        handle.remove()
        net.head.weight = nn.Parameter(torch.zeros(3, 5))
        net.head.bias.data = torch.zeros(7)
        net.norm.running_mean = torch.zeros(1)
        net.norm.register_buffer("another", torch.zeros(1))
        raise RuntimeError("a hook has failed")

    handle = net.scaled.register_load_state_dict_pre_hook(fail)


def take_a_missing_key(net: Net) -> None:
    """A hook may rename entries: torch alone knows whether it then fits, and says so when all is loaded."""
    due = ["head.bias"]

    def lose(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        if due:
            del state[due.pop()]

    net.head.register_load_state_dict_pre_hook(lose)


BREAKS: dict[str, tuple[Callable[[Net], None], str]] = {
    "a hook before the last": (break_before_the_last, "LookupError: a hook has failed"),
    "a hook after all": (break_after_all, "a hook has failed"),
    "extra state": (break_extra_state, "KeyError"),
    "tensors are replaced": (replace_then_break, "a hook has failed"),
    "a key is missing": (take_a_missing_key, "Missing key(s)"),
}


@every_optimizer
def test_a_module_that_fails_midway_changes_nothing(entry: Entry, saved: Saved) -> None:
    for how, (spoil, expected) in BREAKS.items():
        with named(how):
            run = Run(entry, seed=5).train(3)
            spoil(run.net)
            assert expected in assert_refused(run, saved[0], saved)


@every_optimizer
def test_an_optimizer_that_fails_at_the_end_changes_nothing(entry: Entry, saved: Saved) -> None:
    run = Run(entry, seed=5).train(3)

    def fail(_: Any) -> None:
        handle.remove()
        raise RuntimeError("a hook has failed")

    handle = run.optimizer.register_load_state_dict_post_hook(fail)
    assert "hook has failed" in assert_refused(run, saved[0], saved)


def test_what_users_refer_to_is_still_there(tmp_path: Path) -> None:
    """Schedulers, and users, keep groups and states of an optimizer."""
    run = Run(OPTIMIZERS[0]).train(2)
    checkpoint.save(tmp_path, run.net, run.optimizer, 2)

    def fail(_: Any) -> None:
        raise RuntimeError("a hook has failed")

    run.optimizer.register_load_state_dict_post_hook(fail)
    groups, group, state = run.optimizer.param_groups, run.optimizer.param_groups[0], run.optimizer.state
    with pytest.raises(RuntimeError, match="a hook has failed"):
        run.load(tmp_path)
    assert run.optimizer.param_groups is groups
    assert run.optimizer.param_groups[0] is group
    assert run.optimizer.state is state


# Half precision ------------------------------------------------------------------------------------------------------


@every_optimizer
def test_masters_of_half_precision_are_left_alone(entry: Entry, tmp_path: Path) -> None:
    first = Run(entry, dtype=torch.bfloat16).train(SAVED_AT)
    checkpoint.save(tmp_path, first.net, first.optimizer, SAVED_AT)
    end = first.train(STEPS).now()
    run = Run(entry, seed=5, dtype=torch.bfloat16).train(3)
    break_after_all(run.net)
    assert_refused(run, tmp_path, (tmp_path, end))


@every_optimizer
def test_a_model_of_another_precision_is_refused(entry: Entry, saved: Saved) -> None:
    run = Run(entry, seed=5, dtype=torch.bfloat16).train(3)
    before = run.here()
    told = r"'body.bias' is \(5,\) of torch.float32 in the checkpoint, \(5,\) of torch.bfloat16 in the model"
    with pytest.raises(RuntimeError, match=told):
        run.load(saved[0])
    assert run.here() == before
