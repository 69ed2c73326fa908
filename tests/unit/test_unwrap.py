"""What frameworks wrap is found again, without importing them; an optimizer with state of its own is no wrapper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire._unwrap import distributed_model, unwrapped_model, unwrapped_optimizer


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def test_models() -> None:
    net = nn.Linear(3, 2)
    model = DDP(net)
    for wrapped in (model, compiled(model), DDP(compiled(net))):
        assert unwrapped_model(wrapped) is net
    assert distributed_model(model) is model
    assert distributed_model(compiled(model)) is model
    assert distributed_model(compiled(net)) is net
    for other in (net, nn.Sequential(net), nn.DataParallel(net), None, "net"):
        assert unwrapped_model(other) is other
        assert distributed_model(other) is other


class Delegate:
    """A wrapper with nothing of its own."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.optimizer.param_groups  # type: ignore[attr-defined]


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, with parameter groups and slow weights of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_optimizers() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    assert unwrapped_optimizer(Delegate(Delegate(optimizer))) is optimizer
    lookahead = Lookahead(optimizer)
    for other in (optimizer, lookahead, Delegate(None), None, 3):
        assert unwrapped_optimizer(other) is other


def test_optimizers_and_models_of_fabric() -> None:
    fabric = pytest.importorskip("lightning.fabric", reason="the extra 'integrations' is not installed")
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, wrapped = fabric.Fabric(accelerator="cpu", devices=1).setup(compiled(net), optimizer)
    assert unwrapped_model(model) is net
    assert unwrapped_optimizer(wrapped) is optimizer


def test_optimizers_of_lightning() -> None:
    core = pytest.importorskip("lightning.pytorch.core.optimizer", reason="the extra 'integrations' is not installed")
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    wrapped = core.LightningOptimizer(optimizer)
    assert isinstance(wrapped, torch.optim.SGD)
    assert unwrapped_optimizer(wrapped) is optimizer


def test_optimizers_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate", reason="the extra 'integrations' is not installed")
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, wrapped = accelerate.Accelerator(cpu=True).prepare(net, optimizer)
    assert wrapped is not optimizer
    assert unwrapped_optimizer(wrapped) is optimizer
    assert unwrapped_model(model) is net
