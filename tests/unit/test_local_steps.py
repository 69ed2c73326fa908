"""Local steps in one process: arguments, state dicts, and what follows from the formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire.outer.fragment import divide
from thinwire.outer.profiles import PROFILES
from thinwire.outer.schedule import Schedule


def sgd(*params: Tensor, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params or [nn.Parameter(torch.ones(3))], lr=lr)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "every": (lambda: thinwire.LocalSteps(sgd(), every=0), ValueError, "every=0: expected a number of inner steps"),
    "a bool": (lambda: thinwire.LocalSteps(sgd(), every=True), ValueError, "every=True: expected"),
    "of each rank": (
        lambda: thinwire.LocalSteps(sgd(), [3, 0]),
        ValueError,
        r"every\[1\]=0: expected a number of inner",
    ),
    "clip_to_median": (
        lambda: thinwire.LocalSteps(sgd(), clip_to_median=1),  # type: ignore[arg-type]
        ValueError,
        "clip_to_median=1: expected",
    ),
    "demo": (
        lambda: thinwire.LocalSteps.from_profile("demo", sgd()),
        ValueError,
        r"profile='demo': DeMo exchanges in every step.*thinwire.compress\(model, \"dct_topk\", residual_decay=0.999\)",
    ),
    "compressor": (lambda: thinwire.LocalSteps(sgd(), 3, "int5"), ValueError, "compressor='int5': expected one of"),
    "option": (lambda: thinwire.LocalSteps(sgd(), 3, ratio=0.1), TypeError, "'int4' has no option 'ratio'"),
    "outer_lr": (lambda: thinwire.LocalSteps(sgd(), outer_lr=0.0), ValueError, r"outer_lr=0.0: expected a number > 0"),
    "momentum": (
        lambda: thinwire.LocalSteps(sgd(), outer_momentum=1.0),
        ValueError,
        r"outer_momentum=1.0: expected a number in \[0, 1\)",
    ),
    "mix": (lambda: thinwire.LocalSteps(sgd(), mix=1), ValueError, r"mix=1: expected a number in \[0, 1\)"),
    "delay": (
        lambda: thinwire.LocalSteps(sgd(), every=6, delay=4, fragments=2),
        ValueError,
        "delay=4 with every=6 and fragments=2: expected at most 3",
    ),
    "a delay of all steps": (lambda: thinwire.LocalSteps(sgd(), every=6, delay=6), ValueError, "expected at most 5"),
    "fragments": (lambda: thinwire.LocalSteps(sgd(), every=3, fragments=4), ValueError, "at least one inner step per"),
    "decay": (lambda: thinwire.LocalSteps(sgd(), residual_decay=2.0), ValueError, r"residual_decay=2.0: expected"),
    "weighted": (lambda: thinwire.LocalSteps(sgd(), weighted=2), ValueError, "weighted=2: expected True or False"),  # type: ignore[arg-type]
    "error_reset": (lambda: thinwire.LocalSteps(sgd(), error_reset=1), ValueError, "error_reset=1: expected True or"),  # type: ignore[arg-type]
    "step_compressor alone": (
        lambda: thinwire.LocalSteps(sgd(), step_compressor="topk"),
        ValueError,
        "step_compressor='topk' without error_reset=True",
    ),
    "step_options alone": (
        lambda: thinwire.LocalSteps(sgd(), error_reset=True, step_options={"ratio": 0.1}),
        ValueError,
        "step_options={'ratio': 0.1} without step_compressor",
    ),
    "error_reset and delay": (
        lambda: thinwire.LocalSteps(sgd(), error_reset=True, delay=1),
        ValueError,
        "delay=1 with error_reset=True: expected 0",
    ),
    "error_reset and mix": (lambda: thinwire.LocalSteps(sgd(), error_reset=True, mix=0.5), ValueError, "mix=0.5 with"),
    "error_reset and weighted": (
        lambda: thinwire.LocalSteps(sgd(), error_reset=True, weighted=True),
        ValueError,
        "weighted=True with error_reset=True: expected False",
    ),
    "error_reset and clipping": (
        lambda: thinwire.LocalSteps(sgd(), error_reset=True, clip_to_median=True),
        ValueError,
        "clip_to_median=True with error_reset=True: expected False",
    ),
    "steps of each rank": (
        lambda: thinwire.LocalSteps(sgd(), [3, 2], error_reset=True, step_compressor="topk"),
        ValueError,
        r"every=\[3, 2\] with step_compressor='topk': expected one number for all ranks",
    ),
    "error_reset and decay": (
        lambda: thinwire.LocalSteps(sgd(), error_reset=True, residual_decay=0.9),
        ValueError,
        "residual_decay=0.9 with error_reset=True: expected 1.0",
    ),
    "a step_option": (
        lambda: thinwire.LocalSteps(sgd(), error_reset=True, step_compressor="topk", step_options={"k": 1}),
        TypeError,
        "'topk' has no option 'k'",
    ),
    "count": (lambda: thinwire.LocalSteps(sgd()).count(1), RuntimeError, "make it with weighted=True"),
    "work": (lambda: thinwire.LocalSteps(sgd(), weighted=True).count(-1), ValueError, "work=-1: expected a number of"),
    "inner": (lambda: thinwire.LocalSteps(nn.Linear(1, 1)), TypeError, "expected a torch.optim.Optimizer"),  # type: ignore[arg-type]
    "one of ours": (
        lambda: thinwire.LocalSteps(thinwire.Birder([nn.Parameter(torch.ones(3))], lr=0.1)),
        TypeError,
        "inner is thinwire.Birder, which exchanges gradients in every step",
    ),
    "nested": (lambda: thinwire.LocalSteps(thinwire.LocalSteps(sgd())), TypeError, "inner is thinwire.LocalSteps"),
    "complex": (
        lambda: thinwire.LocalSteps(sgd(nn.Parameter(torch.ones(3, dtype=torch.complex64)))),
        TypeError,
        "a parameter of torch.complex64",
    ),
    "profile": (lambda: thinwire.LocalSteps.from_profile("loco", sgd()), ValueError, "expected one of diloco, diloco-"),
    "attach": (
        lambda: thinwire.attach(nn.Linear(1, 1), thinwire.LocalSteps(sgd())),  # type: ignore[arg-type]
        TypeError,
        "LocalSteps",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    make, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize("name", ["none", "signsgd", "terngrad", "natural", "qsgd", "count_sketch", "laq", "powersgd"])
def test_error_reset_needs_a_residual_of_the_worker(name: str) -> None:
    with pytest.raises(ValueError, match=f"compressor='{name}' with error_reset=True: its workers keep no residual"):
        thinwire.LocalSteps(sgd(), 3, name, error_reset=True)
    with pytest.raises(ValueError, match=f"step_compressor='{name}' with error_reset=True: its workers keep no resid"):
        thinwire.LocalSteps(sgd(), 3, error_reset=True, step_compressor=name)
    with pytest.raises(ValueError, match="compressor='int4', error_feedback=False with error_reset=True"):
        thinwire.LocalSteps(sgd(), 3, "int4", error_feedback=False, error_reset=True)


def test_errors_of_the_first_step() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = thinwire.LocalSteps(sgd(*embedding.parameters()))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"a gradient with layout torch.sparse_coo for a parameter of shape \(4, 2\)"):
        opt.step()
    with pytest.raises(ValueError, match="fragments=2 for 1 trainable parameters"):
        thinwire.LocalSteps(sgd(), every=4, fragments=2).step()
    with pytest.raises(ValueError, match=r"every\(0\)=2.5: expected a number of inner steps"):
        thinwire.LocalSteps(sgd(), every=lambda k: 2.5).step()  # type: ignore[arg-type, return-value]


def test_later_changes_are_refused() -> None:
    p, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
    opt = thinwire.LocalSteps(sgd(p, frozen), every=2)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(TypeError, match="complex64"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.complex64))]})
    assert len(opt.param_groups) == 2
    opt.step()
    with pytest.raises(RuntimeError, match="add_param_group after the first step"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    frozen.requires_grad_().grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(2,\) has a gradient, but was frozen"):
        opt.step()
    frozen.grad = None
    opt.inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match="the inner optimizer has other parameters than in the first step"):
        opt.step()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(opt)
    opt.close()
    with pytest.raises(RuntimeError, match="this LocalSteps is closed"):
        opt.step()


def test_values_that_are_loaded_before_the_first_step_are_where_it_begins() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = thinwire.LocalSteps(sgd(p), every=1, compressor="none", outer_lr=1.0, outer_momentum=0.0)
    opt.load_state_dict(opt.state_dict())  # as Accelerate does
    p.data.fill_(5.0)
    p.grad = torch.ones(3)
    opt.step()
    assert p.tolist() == pytest.approx([4.9] * 3)
    with pytest.raises(ValueError, match="expected that of a LocalSteps, with 'thinwire'"):
        opt.load_state_dict(opt.inner.state_dict())
    saved = opt.state_dict()
    opt.inner.load_state_dict(saved)  # the inner optimizer can go on alone
    other = thinwire.LocalSteps(sgd(nn.Parameter(torch.ones(4))), every=1)
    with pytest.raises(ValueError, match=r"'reference' of a fragment is \(3,\) of torch.float32 in the state dict"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match="the counters of the state dict are"):
        opt.load_state_dict({**saved, "thinwire": {**saved["thinwire"], "step": -1}})


def test_one_worker_with_an_outer_rate_of_1_is_the_inner_optimizer() -> None:
    values = []
    for local in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        opt = thinwire.LocalSteps(inner, every=3, outer_lr=1.0, outer_momentum=0.0) if local else inner
        for step in range(7):
            opt.zero_grad()
            model(torch.full((2, 4), float(step))).square().mean().backward()
            opt.step()
        values.append(model.weight.detach().clone())
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-7)  # θ_ref - (θ_ref - θ) is rounded twice


def test_momentum_is_that_of_torchs_sgd() -> None:
    """The outer update is torch's SGD with Nesterov momentum, whose gradient is Δ."""
    p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    opt = thinwire.LocalSteps(sgd(p, lr=1.0), every=1, compressor="none", outer_lr=0.7, outer_momentum=0.9)
    outer = torch.optim.SGD([q], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(6):
        p.grad = torch.linspace(-1, 1, 5) * (step + 1)
        q.grad = p.grad.clone()
        opt.step()
        outer.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_at_reference() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = thinwire.LocalSteps(sgd(p), every=2)
    with opt.at_reference():
        assert p.tolist() == [1.0] * 3, "before the first step there is no other value"
    p.grad = torch.ones(3)
    opt.step()
    moved = p.detach().clone()
    with opt.at_reference():
        assert p.tolist() == [1.0] * 3
        assert p.requires_grad
    assert torch.equal(p, moved)


def test_profiles() -> None:
    for name in PROFILES:
        params = [nn.Parameter(torch.ones(3)) for _ in range(5)]
        opt = thinwire.LocalSteps.from_profile(name, sgd(*params), every=30)
        assert opt.outer_lr == PROFILES[name]["outer_lr"]
        opt.step()
    assert "k=64" in repr(thinwire.LocalSteps.from_profile("sparse-loco", sgd()))
    assert thinwire.LocalSteps.from_profile("diloco", sgd(), outer_lr=0.5).outer_lr == 0.5


def test_fragments_are_balanced_and_strided() -> None:
    layers = [torch.empty(n) for _ in range(6) for n in (100, 10)]
    parts = divide(layers, 3)
    assert sorted(i for part in parts for i in part) == list(range(12))
    sizes = [sum(layers[i].numel() for i in part) for part in parts]
    assert max(sizes) - min(sizes) <= 20
    assert all(len({i // 6 for i in part}) == 2 for part in parts), "each has layers of both halves"


@pytest.mark.parametrize(("every", "fragments", "delay"), [(5, 1, 0), (6, 3, 2), (7, 3, 1), (8, 8, 1)])
def test_one_fragment_is_in_flight_at_a_time(every: int, fragments: int, delay: int) -> None:
    schedule = Schedule(every, fragments, delay)
    sent = [schedule.advance()[0] for _ in range(3 * every)]
    assert sent.count(None) == 3 * (every - fragments)
    steps = np.flatnonzero([fragment is not None for fragment in sent])
    assert (np.diff(steps) >= max(delay, 1)).all()
    assert [fragment for fragment in sent if fragment is not None] == [*range(fragments)] * 3
    assert schedule.outer_step == 3
