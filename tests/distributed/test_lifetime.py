"""What happens to an attached model over its life: wrapped again, frozen, converted, forgotten, resumed half-way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.distributed.common import digest, run_nodes, token_loss, token_net
from tests.harness import run_ranks, run_ranks_expecting_errors
from thinwire.transport.peers import Peers


def _steps(model: nn.Module, opt: thinwire.Birder, rank: int, count: int, first: int = 0) -> None:
    for batch in range(first, first + count):
        token_loss(model, rank, batch).backward()
        opt.step()
        opt.zero_grad()


def _attached(net: nn.Module) -> tuple[DDP, thinwire.Birder]:
    model = DDP(net)
    opt = thinwire.Birder(model.parameters(), lr=1e-2)
    thinwire.attach(model, opt)
    return model, opt


def _wrap_again(rank: int, world_size: int) -> tuple[str, str]:
    net = token_net()
    model, opt = _attached(net)
    _steps(model, opt, rank, 3)
    model, opt = _attached(net)
    _steps(model, opt, rank, 3, first=3)
    wrapped = digest(net.parameters())

    plain = token_net()
    _steps(plain, thinwire.Birder(plain.parameters(), lr=1e-2), rank, 3)
    _steps(plain, thinwire.Birder(plain.parameters(), lr=1e-2), rank, 3, first=3)
    return wrapped, digest(plain.parameters())


def test_a_module_can_be_wrapped_and_attached_again() -> None:
    for wrapped, plain in run_ranks(_wrap_again, 2):
        assert wrapped == plain


def _forget(rank: int, world_size: int) -> bool:
    model, opt = _attached(token_net())
    _steps(model, opt, rank, 2)
    forgotten = weakref.ref(opt)
    del model, opt
    gc.collect()
    return forgotten() is None


def test_a_forgotten_optimizer_is_collected() -> None:
    assert run_ranks(_forget, 2) == [True, True]


def _freeze_then_thaw(rank: int, world_size: int, attach: bool) -> str:
    net = token_net()
    model = DDP(net) if attach else net
    opt = thinwire.Birder(model.parameters(), lr=1e-2)
    assert isinstance(net.embedding, nn.Embedding)
    net.embedding.weight.requires_grad_(False)
    if isinstance(model, DDP):
        thinwire.attach(model, opt)
    before = net.embedding.weight.clone()
    _steps(model, opt, rank, 3)
    assert torch.equal(net.embedding.weight, before)
    net.embedding.weight.requires_grad_(True)
    _steps(model, opt, rank, 3, first=3)
    assert not torch.equal(net.embedding.weight, before)
    return digest(net.parameters())


def test_a_parameter_may_be_frozen_when_attached_and_thawed_later() -> None:
    assert len({*run_ranks(_freeze_then_thaw, 2, True), *run_ranks(_freeze_then_thaw, 2, False)}) == 1


def _trial_backward(rank: int, world_size: int) -> list[bool]:
    model, opt = _attached(token_net())
    token_loss(model, rank, 99).backward()
    opt.zero_grad()
    encoded_early = []
    for batch in range(14):
        token_loss(model, rank, batch).backward()
        encoded_early.append(all(opt._session.encoded))
        opt.step()
        opt.zero_grad()
    return encoded_early


def test_overlap_comes_back_after_a_trial_backward() -> None:
    for encoded_early in run_ranks(_trial_backward, 2):
        assert not encoded_early[1]
        assert all(encoded_early[10:])


class _PartlyUsed(nn.Module):
    """The forward that is asked for nothing uses the head alone, whose gradients come first."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = token_net()

    def forward(self, tokens: torch.Tensor | None) -> torch.Tensor:
        return self.whole.get_submodule("head")(torch.ones(1, 150)) if tokens is None else self.whole(tokens)


def _load_between_backward_and_step(rank: int, world_size: int, used: str) -> tuple[str, str, bool]:
    net = _PartlyUsed()
    model = DDP(net)
    opt = thinwire.Birder(model.parameters(), lr=1e-2, bucket_mb=0.005)
    thinwire.attach(model, opt)
    _steps(model, opt, rank, 3)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    _steps(model, opt, rank, 2, first=3)
    straight = digest(net.parameters())
    partly = used == "partly" or (used == "partly on some ranks" and rank % 2 == 1)
    thrown_away = model(None).sum() if partly else token_loss(model, rank, 7)
    thrown_away.backward()
    some, not_all = any(opt._session.encoded), not all(opt._session.encoded)
    opt.zero_grad()
    net.load_state_dict(weights)
    opt.load_state_dict(saved)
    _steps(model, opt, rank, 2, first=3)
    return straight, digest(net.parameters()), some and (not_all is partly)


@pytest.mark.parametrize("used", ["all", "partly", "partly on some ranks"])
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
def test_a_state_may_be_loaded_between_backward_and_step(nodes: int, ranks: int, used: str) -> None:
    """Some or all buckets have been exchanged by then, and others are waited for."""
    for straight, resumed, as_planned in run_nodes(_load_between_backward_and_step, nodes, ranks, used):
        assert straight == resumed
        assert as_planned


def _other_initial_weights(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    net = nn.Linear(4, 4)
    net(torch.ones(1, 4)).sum().backward()
    thinwire.Birder(net.parameters()).step()


def test_replicas_that_start_apart_are_refused_on_every_rank() -> None:
    for error in run_ranks_expecting_errors(_other_initial_weights, 2):
        assert "ranks disagree on the checksum of the values of parameter 0" in error.message


def _group_after_the_optimizer(rank: int, world_size: int) -> None:
    # As if it had been made before init_process_group(): it took itself to be alone.
    net = nn.Linear(4, 4)
    opt = thinwire.Birder(net.parameters())
    opt._peers = Peers(None, rank=0, size=1)
    assert dist.get_world_size() == 2
    net(torch.ones(1, 4)).sum().backward()
    opt.step()


def test_an_optimizer_made_before_the_process_group_is_refused() -> None:
    for error in run_ranks_expecting_errors(_group_after_the_optimizer, 2):
        assert "torch.distributed has 2 ranks, but was initialised after thinwire was set up" in error.message


OPTIMIZERS = [
    *(thinwire.Birder, thinwire.OneBitAdam, thinwire.ZeroOneAdam, thinwire.OneBitLamb, thinwire.CDAdam),
    *(thinwire.SketchedAMSGrad, thinwire.DistributedLion, thinwire.Lamb),
]


def _stepped(net: nn.Module, opt: torch.optim.Optimizer) -> str:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 4, generator=generator).to(next(net.parameters()).dtype)
        net(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return digest([*net.parameters(), *(t for p in net.parameters() for t in opt.state[p].values())])


def _small_net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 40)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_the_first_step_follows_a_model_that_was_converted(kind: Callable[..., torch.optim.Optimizer]) -> None:
    net = _small_net().bfloat16()
    expected = _stepped(net, kind(net.parameters()))

    for between in ("nothing", "state_dict", "load_state_dict", "frozen"):
        net = _small_net()
        opt = kind(net.parameters())
        if between == "frozen":
            net.requires_grad_(False)
        net.bfloat16()
        if between == "state_dict":
            state = opt.state_dict()["state"][0]
            assert state.get("master", torch.zeros(())).dtype == torch.float32
            assert "master" in state
        elif between == "load_state_dict":  # as Accelerate does
            opt.load_state_dict(opt.state_dict())
        net.requires_grad_(True)
        assert _stepped(net, opt) == expected, between

    net = _small_net()
    opt = kind(net.parameters())
    net.bfloat16().float()
    net.weight.data = net.weight.data.t().contiguous().t()
    transposed = _small_net()
    transposed.bfloat16().float()
    transposed.weight.data = transposed.weight.data.t().contiguous().t()
    assert _stepped(net, opt) == _stepped(transposed, kind(transposed.parameters()))


def test_a_model_converted_after_the_first_step_is_refused() -> None:
    net = nn.Linear(4, 4)
    opt = thinwire.Birder(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    net.bfloat16()
    net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a parameter is .*bfloat16.*but was .*float32.*Convert the model first"):
        opt.step()


def test_a_conversion_to_a_dtype_that_has_no_kernels_is_refused() -> None:
    net = nn.Linear(4, 4)
    opt = thinwire.Birder(net.parameters())
    net.double()
    with pytest.raises(TypeError, match=r"a parameter of torch\.float64: expected float32"):
        opt.state_dict()


def test_an_optimizer_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: save state_dict\(\)"):
        copy.deepcopy(thinwire.Birder([nn.Parameter(torch.ones(3))]))


def test_a_group_that_is_refused_leaves_no_trace() -> None:
    p = nn.Parameter(torch.ones(3))
    opt = thinwire.Birder([p])
    with pytest.raises(ValueError, match="devices cpu, meta"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3, device="meta"))]})
    assert len(opt.param_groups) == 1
    p.grad = torch.ones(3)
    opt.step()
    assert not torch.equal(p, torch.ones(3))


def test_other_settings_than_those_saved_are_told() -> None:
    saved = thinwire.Birder([nn.Parameter(torch.ones(3))], seed=1).state_dict()
    with pytest.warns(RuntimeWarning, match=r"saved with seed=1.*this optimizer has seed=2.*never stopped"):
        thinwire.Birder([nn.Parameter(torch.ones(3))], seed=2).load_state_dict(saved)
