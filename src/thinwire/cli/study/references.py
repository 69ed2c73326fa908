"""What the study compares with: optimizers of the exact mean gradient, and the paper's Distributed Lion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from thinwire.transport.peers import Peers


def _of_all_workers(tensors: list[Tensor]) -> list[list[Tensor]]:
    """For each tensor, those of all workers, by the slow path: time is not measured here."""
    return [list(of_workers) for of_workers in zip(*Peers.of(None).gather(tensors), strict=True)]


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Give every worker the mean of all, as DDP does."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    assert len(gradients) == len(parameters), "models of the study use all their parameters"
    for p, of_workers in zip(parameters, _of_all_workers(gradients), strict=True):
        total = torch.zeros_like(p)  # a new tensor: others may not have read the old one yet
        for gradient in of_workers:
            total += gradient
        p.grad = total.div_(len(of_workers))


class _OfTheMean(torch.optim.Optimizer):
    """An optimizer of torch's, given the mean gradient: what it computes under DDP."""

    bits = 32.0

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of all workers."""
        average_gradients([p for group in self.param_groups for p in group["params"]])
        return super().step(closure)


class MeanAdamW(_OfTheMean, torch.optim.AdamW):
    """DDP + AdamW."""


class MeanSGD(_OfTheMean, torch.optim.SGD):
    """DDP + SGD."""


class DistributedLion(torch.optim.Optimizer):
    """Distributed Lion with a majority vote (Liu et al., NeurIPS 2024), as an outside reference.

    Worker i sends `s_i = sign(β₁ m_i + (1 - β₁) g_i)`, and then `m_i ← β₂ m_i + (1 - β₂) g_i`; all of them take
    `x ← (1 - lr·λ) x - lr · sign(Σ s_i)`. A tie moves nothing.

    Args:
        params: as in torch.optim.
        lr: learning rate.
        betas: β₁ and β₂.
        weight_decay: decoupled decay λ.
    """

    bits = 1.0

    def __init__(self, params: ParamsT, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all workers."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            ballots = []
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                ballots.append(torch.sign(beta1 * m + (1 - beta1) * p.grad))
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)
            for p, of_workers in zip(group["params"], _of_all_workers(ballots), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.stack(of_workers).sum(0).sign_(), alpha=group["lr"])
