"""Small parameters that are encoded and moved together, against the same one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire.averaging.averager import GradientAverager
from thinwire.averaging.catalogue import rule_of
from thinwire.kernels import native
from thinwire.kernels.joined import JoinedRuns, plain_addresses
from thinwire.optimizers import joint_calls
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport.virtual import run_workers

pytestmark = pytest.mark.skipif(not native.available(), reason="only native kernels take joined runs")

SIZES = (5, 700, 64, 1, 3000, 0, 130, 2, 65, 900, 31, 64, 77)
STEPS = 8
WITHOUT, SPOILED, MOVED = 3, 4, 5
"""The steps without some gradients, with gradients that kernels cannot read as they are, and after parameters moved."""


def _average(params: Sequence[nn.Parameter], **wire: Any) -> tuple[WireOptimizer, Callable[[], object]]:
    averager = GradientAverager(params, rule_of("int4", {}), **wire)

    def step() -> None:
        averager.begin()
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            averager.add(p, p.grad.view(-1))
        averager.finish()
        with torch.no_grad():
            for p in params:
                assert p.grad is not None
                p.sub_(p.grad)

    return averager, step


def _groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[::2], "weight_decay": 0.3}, {"params": params[1::2], "weight_decay": 0.0, "lr": 0.02}]


def _birder(params: Sequence[nn.Parameter], **wire: Any) -> tuple[WireOptimizer, Callable[[], object]]:
    optimizer = thinwire.Birder(_groups(params), lr=0.01, **wire)
    return optimizer, optimizer.step


def _adam(params: Sequence[nn.Parameter], **wire: Any) -> tuple[WireOptimizer, Callable[[], object]]:
    groups = _groups(params)
    groups[1]["betas"] = (0.8, 0.5)
    settings = {"warmup_steps": 2, "scale_block": 64, **wire}
    optimizer = thinwire.OneBitAdam(groups, lr=0.01, betas=(0.9, 0.5), **settings)
    return optimizer, optimizer.step


KINDS: dict[str, Callable[..., tuple[WireOptimizer, Callable[[], object]]]] = {
    "birder": _birder,
    "birder delay": lambda params, **wire: _birder(params, delay=1, **wire),
    "onebit_adam": _adam,
    "onebit_adam dense": lambda params, **wire: _adam(params, warmup_bits=None, **wire),
    "int4": _average,
}


def _spoil(p: nn.Parameter, position: int) -> None:
    """Give a parameter the same gradient in a form that is not plain."""
    assert p.grad is not None
    if position % 3 == 0:
        p.grad = torch.stack([p.grad, p.grad], dim=1)[:, 0]
    elif position % 6 == 1:
        p.grad = torch.complex(p.grad, -p.grad).conj().imag
        assert p.grad.is_neg()


def _train(worker: int, _: int, kind: str) -> tuple[list[Tensor], dict[str, Any], int]:
    generator = torch.Generator().manual_seed(worker)
    params = [nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]
    if kind != "int4":
        params[2] = nn.Parameter(torch.ones(8, 8).t().contiguous().t())  # not contiguous
        params[4] = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
    optimizer, step = KINDS[kind](params, bucket_mb=0.01)
    calls = 0
    for turn in range(STEPS):
        for position, p in enumerate(params):
            grad = torch.randn(p.numel(), generator=generator).to(p.dtype).view(p.shape)
            p.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad
            if turn == WITHOUT and position % 4 == 1 and kind != "int4":
                p.grad = None
            if turn == SPOILED and kind != "int4":
                _spoil(p, position)
            if turn == MOVED:
                p.data = p.data.clone()
        if turn == 6:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.1
        step()
        joins = optimizer._joint_calls._known.get(optimizer._session.channel.buffers, {})
        calls += sum(len(each._joins) for _, each in joins.values())
    optimizer.synchronize()
    return [p.detach().clone() for p in params], optimizer.state_dict(), calls


@pytest.mark.parametrize("most", [1 << 19, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_joined_calls_give_the_same_bits(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_calls, "MOST_ELEMENTS", most)
    together = run_workers(2, _train, kind)
    monkeypatch.setattr(joint_calls, "MOST_ELEMENTS", 0)
    alone = run_workers(2, _train, kind)
    for (params, state, calls), (expected, expected_state, none) in zip(together, alone, strict=True):
        assert calls > 0
        assert none == 0
        assert all(map(torch.equal, params, expected))
        for entry, expected_entry in zip(_tensors(state["state"]), _tensors(expected_state["state"]), strict=True):
            assert torch.equal(entry, expected_entry)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.nan_to_num()]
    return [tensor for value in tree.values() for tensor in _tensors(value)] if isinstance(tree, dict) else []


class _OfUser(Tensor):
    pass


def test_only_plain_tensors_have_addresses() -> None:
    plain = torch.ones(6)
    assert plain_addresses([plain, plain], [6, 6]) == [plain.data_ptr()] * 2
    assert plain_addresses([nn.Parameter(plain)], [6]) == [plain.data_ptr()]
    for other in (
        None,
        torch.ones(7),
        torch.ones(6, dtype=torch.float64),
        torch.ones(6, dtype=torch.bfloat16),
        torch.ones(12)[::2],
        torch.ones(6).to_sparse(),
        torch.empty(6, device="meta"),
        torch.imag(torch.ones(6, dtype=torch.complex64).conj()),
        torch._efficientzerotensor(6),
        torch.ones(6).as_subclass(_OfUser),
    ):
        assert plain_addresses([plain, other], [6, 6]) is None


def test_tables_lead_to_each_tensor() -> None:
    memory = torch.arange(100.0)
    tensors = [memory[50:60], memory[3:20]]
    runs = [torch.tensor([[0, 0, 4, 0, 0, 0], [64, 4, 6, 0, 0, 0]]), torch.tensor([[128, 0, 17, 0, 0, 0]])]
    joined = JoinedRuns([runs[:1], runs[1:]])
    assert joined.point_to([tensor.data_ptr() for tensor in tensors])
    assert joined.memory.data_ptr() == memory[3:].data_ptr()
    assert [table[:, 1].tolist() for table in joined.tables] == [[47, 51], [0]]


def test_tensors_that_are_not_aligned_are_not_joined() -> None:
    joined = JoinedRuns([[torch.tensor([[0, 0, 4, 0, 0, 0]])] * 2])
    assert not joined.point_to([64, 66])
    assert not joined.point_to([])
