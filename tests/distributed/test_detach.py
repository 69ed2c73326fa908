"""`thinwire.detach`, copies of an attached or compressed model, and optimizers that were not attached."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import thinwire
from tests.distributed.common import MANY_CASES_SECONDS, by_case, digest, each_case, token_loss, token_net
from tests.harness import run_ranks, run_ranks_expecting_errors


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def attached(model: DDP) -> torch.optim.Optimizer:
    opt = thinwire.Birder(model.parameters(), lr=1e-2)
    thinwire.attach(model, opt)
    return opt


def compressed(model: DDP) -> torch.optim.Optimizer:
    thinwire.compress(model)
    return sgd(model)


def steps(model: nn.Module, opt: torch.optim.Optimizer, rank: int, first: int, count: int = 3) -> str:
    for batch in range(first, first + count):
        token_loss(model, rank, batch).backward()
        opt.step()
        opt.zero_grad()
    return digest(model.parameters())


# detach ---------------------------------------------------------------------------------------------------------------

Case = tuple[Callable[[DDP], torch.optim.Optimizer], dict[str, Any], bool]
DETACHED: dict[str, Case] = {
    "attached": (attached, {}, False),
    "attached, between backward and step": (attached, {}, True),
    "attached with bucket views": (attached, {"gradient_as_bucket_view": True}, False),
    "attached with unused parameters": (attached, {"find_unused_parameters": True}, False),
    "compressed": (compressed, {}, False),
    "compressed with a static graph": (compressed, {"static_graph": True}, False),
}


def detached(rank: int, world_size: int, case: Case) -> tuple[str, str, str, str]:
    """The parameters after steps of SGD on a detached model, and on a model that was never anything else. Then after
    the same exchange was begun again, in the same model and in a new one."""
    begin, options, late = case
    net = token_net()
    model = DDP(net, **options)
    steps(model, begin(model), rank, 0)
    if late:
        token_loss(model, rank, 99).backward()
    thinwire.detach(model)
    net.zero_grad()
    other = DDP(copy.deepcopy(net))
    plain = steps(model, sgd(net), rank, 3), steps(other, sgd(other), rank, 3)
    assert digest(model.parameters()) == digest(other.parameters())
    another = DDP(copy.deepcopy(net), **options)
    return *plain, steps(model, begin(model), rank, 6), steps(another, begin(another), rank, 6)


def test_ddp_averages_again_after_detach() -> None:
    for name, ranks in by_case(run_ranks(each_case, 2, detached, DETACHED, timeout=MANY_CASES_SECONDS)).items():
        assert ranks[0] == ranks[1], name
        detached_model, plain, again, new = ranks[0]
        assert detached_model == plain, name
        assert again == new != plain, name


def a_static_graph_after_detach(rank: int, world_size: int) -> None:
    model = DDP(token_net(), static_graph=True)
    steps(model, attached(model), rank, 0)
    thinwire.detach(model)
    new = DDP(model.module)
    steps(new, sgd(new), rank, 3)
    with torch.no_grad():
        model(torch.zeros(2, dtype=torch.long))
    token_loss(model, rank, 6)


def test_a_static_graph_needs_a_new_model_after_detach() -> None:
    for error in run_ranks_expecting_errors(a_static_graph_after_detach, 2):
        assert "static_graph=True that was attached and detached" in error.message


def the_same_optimizer_again(rank: int, world_size: int) -> tuple[str, str]:
    def run(detach: bool) -> str:
        model = DDP(token_net())
        opt = attached(model)
        steps(model, opt, rank, 0)
        if detach:
            thinwire.detach(model)
            thinwire.attach(model, opt)
        return steps(model, opt, rank, 3)

    return run(detach=False), run(detach=True)


def test_an_optimizer_can_be_attached_again() -> None:
    for straight, again in run_ranks(the_same_optimizer_again, 2):
        assert straight == again


def test_detach_needs_a_model_that_is_attached() -> None:
    with pytest.raises(ValueError, match=r"\(Linear\) is neither attached nor compressed"):
        thinwire.detach(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="model is int, expected the module"):
        thinwire.detach(3)  # pyright: ignore[reportArgumentType]


# Copies ---------------------------------------------------------------------------------------------------------------


def saved_and_loaded(model: DDP) -> DDP:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[DDP], Any]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
}


def copied(rank: int, world_size: int, begin: Callable[[DDP], torch.optim.Optimizer]) -> None:
    straight_model, model = DDP(token_net()), DDP(token_net())
    straight_opt, opt = begin(straight_model), begin(model)
    steps(straight_model, straight_opt, rank, 0)
    steps(model, opt, rank, 0)
    plain = DDP(copy.deepcopy(model.module))
    token_loss(plain, rank, 9).backward()
    averaged = digest(p.grad for p in plain.parameters() if p.grad is not None)
    for name, copied_by in COPIES.items():
        twin = copied_by(model)
        assert isinstance(twin, DDP), name
        with twin.join():  # which thinwire refuses
            token_loss(twin, rank, 9).backward()
        assert digest(p.grad for p in twin.parameters() if p.grad is not None) == averaged, name
        again = copy.deepcopy(pickle.loads(pickle.dumps(twin)))
        again_opt = begin(again)
        again.zero_grad()
        assert steps(again, again_opt, rank, 3) != digest(model.parameters()), name
    assert steps(model, opt, rank, 3) == steps(straight_model, straight_opt, rank, 3)
    pickle.dumps(model.module)


def test_copies_are_plain_models_and_disturb_nothing() -> None:
    begins = {"attached": attached, "compressed": compressed}
    run_ranks(each_case, 2, copied, begins, timeout=MANY_CASES_SECONDS)


# Optimizers that were not attached ------------------------------------------------------------------------------------


def another_optimizer(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    _ = attached(model)
    steps(model, sgd(model), rank, 0, 1)


def another_thinwire_optimizer(rank: int, world_size: int) -> None:
    model = DDP(token_net())
    opt = attached(model)
    steps(model, opt, rank, 0, 2)
    steps(model, thinwire.Birder(model.parameters()), rank, 2, 1)


def another_optimizer_from_the_third_step(rank: int, world_size: int) -> None:
    """It was accepted before it got a parameter that is attached."""
    free = nn.Parameter(torch.ones(3))
    other = torch.optim.SGD([free], lr=0.1)
    model = DDP(token_net())
    opt = attached(model)
    for batch in range(3):
        token_loss(model, rank, batch).backward()
        free.grad = torch.ones(3)
        other.step()
        opt.step()
        opt.zero_grad()
    other.add_param_group({"params": list(model.parameters())})
    other.step()


@pytest.mark.parametrize(
    ("attempt", "name"),
    [
        (another_optimizer, "SGD"),
        (another_thinwire_optimizer, "Birder"),
        (another_optimizer_from_the_third_step, "SGD"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_another_optimizer_is_refused(attempt: Callable[[int, int], None], name: str) -> None:
    message = rf"step\(\) of {name}, but its parameters are attached to another optimizer \(Birder\).*thinwire\.detach"
    for error in run_ranks_expecting_errors(attempt, 2):
        assert error.type_name == "RuntimeError"
        assert re.search(message, error.message), error.message


class Lookahead(torch.optim.Optimizer):
    """Averages the weights of every second step with older ones."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.optimizer = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


def accepted(rank: int, world_size: int) -> list[str]:
    """Optimizers that may step: one built on the attached one, and any for a model that replaced an attached one."""
    net = token_net()
    model = DDP(net)
    opt = attached(model)
    results = [steps(model, Lookahead(opt), rank, 0)]
    del model, opt
    model = DDP(net)
    results.append(steps(model, sgd(net), rank, 3))
    return results


def test_optimizers_that_may_step() -> None:
    first, second = run_ranks(accepted, 2)
    assert first == second
