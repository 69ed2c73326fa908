"""What the suites of the frameworks share: every optimizer with a schedule of a few steps, and a net with dropout."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.distributed.common import TokenNet
from tests.distributed.stages import make

SECONDS = 150.0
"""Importing a framework takes seconds, in each rank."""
MICROBATCHES = 2
"""Of every step."""
OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "Birder": functools.partial(thinwire.Birder, lr=0.01, clip_norm=0.5),
    "CDAdam": functools.partial(thinwire.CDAdam, lr=0.01),
    "DistributedLion": functools.partial(thinwire.DistributedLion, lr=0.01),
    "SketchedAMSGrad": functools.partial(thinwire.SketchedAMSGrad, lr=0.01),
    **{name: functools.partial(make, name) for name in ("OneBitAdam", "ZeroOneAdam", "Lamb", "OneBitLamb")},
}
COMPRESSORS = ("int4", "powersgd")
"""Their optimizer is AdamW."""


def needs(framework: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed: pip install '.[dev]'")


def as_torchrun_does(rank: int, world_size: int) -> None:
    """Set what frameworks read to learn that they were launched by torchrun. The process group exists already."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
    settings |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": 1}
    settings |= {"HF_HUB_OFFLINE": 1, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    os.environ.update({name: str(value) for name, value in settings.items()})
    warnings.filterwarnings("ignore", module=r"accelerate|lightning|torch|transformers")


class DroppingNet(TokenNet):
    """`TokenNet` with dropout: its gradients depend on the random numbers of the rank."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(tokens))) * self.scale
        return self.head(nn.functional.dropout(hidden, 0.3, self.training))


def dropping_net(rank: int) -> DroppingNet:
    """The same weights on every rank, and other random numbers from now on."""
    torch.manual_seed(0)
    net = DroppingNet()
    torch.manual_seed(100 + rank)
    return net
