"""Who runs in the demo: DDP + AdamW, and the optimizers that can take its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import thinwire

WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Contender:
    """An optimizer class with the settings that suit the demo's model."""

    label: str
    optimizer: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer for these parameters."""
        return self.optimizer(parameters, **self.settings)


def adamw() -> Contender:
    """What everybody uses today; 5e-3 did best of 2e-3, 3e-3, 5e-3 and 8e-3 in 500 steps of the demo, with one seed."""
    settings = {"lr": 5e-3, "betas": (0.9, 0.99), "weight_decay": WEIGHT_DECAY, "fused": True}
    return Contender("DDP + AdamW", torch.optim.AdamW, settings)


def _birder(downlink: str, seed: int) -> Contender:
    # From a study of 800 steps on tinyshakespeare, a model of the same size.
    lr, beta = {"bit": (4e-3, 0.8), "votes": (6e-3, 0.7)}[downlink]
    settings = {"lr": lr, "beta": beta, "weight_decay": WEIGHT_DECAY, "downlink": downlink, "seed": seed}
    return Contender("DDP + Birder", thinwire.Birder, settings)


# What `--optimizer` offers. A new optimizer is one line: its name, and its settings for a downlink and a seed.
CHALLENGERS: dict[str, Callable[[str, int], Contender]] = {
    "birder": _birder,
}
