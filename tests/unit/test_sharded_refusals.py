"""Sharded parameters are refused by name, with the call that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import thinwire
from thinwire.optimizers.optimizer import WireOptimizer

OPTIMIZERS = [
    kind
    for kind in (getattr(thinwire, name) for name in thinwire.__all__)
    if isinstance(kind, type) and issubclass(kind, WireOptimizer)
]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_dtensors(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r'class DTensor: .*fully_shard \(FSDP2\).*thinwire\.compress\(model, "int4"\)'):
        optimizer(model.parameters())


def test_dtensors_of_local_steps() -> None:
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(
        TypeError, match=r'class DTensor: .*LocalSteps needs whole.*thinwire\.compress\(model, "int4"\)'
    ):
        thinwire.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1))


def test_attach_refuses_fsdp2() -> None:
    model = nn.Linear(3, 4)
    opt = thinwire.Birder(nn.Linear(3, 4).parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=r"attach: the model is sharded by fully_shard \(FSDP2\)"):
        thinwire.attach(model, opt)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name)
def test_fsdp1(strategy: ShardingStrategy, original: bool) -> None:
    net = nn.Linear(3, 4)
    opt = thinwire.Birder(net.parameters())
    model = FullyShardedDataParallel(
        net, sharding_strategy=strategy, use_orig_params=original, device_id=torch.device("cpu")
    )
    with pytest.raises(TypeError, match=r"is of FullyShardedDataParallel \(FSDP1\), which thinwire does not support"):
        thinwire.Birder(model.parameters())
    for wrapped in (model, nn.Sequential(model)):
        with pytest.raises(TypeError, match=r"attach: .*FullyShardedDataParallel \(FSDP1\)"):
            thinwire.attach(wrapped, opt)
        with pytest.raises(TypeError, match=r"compress: .*FullyShardedDataParallel \(FSDP1\)"):
            thinwire.compress(wrapped)
