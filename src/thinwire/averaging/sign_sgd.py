"""`thinwire.SignSGD`: a step by the signs of the averaged gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from thinwire._checks import check_fraction


class SignSGD(Optimizer):
    """Moves every element by the learning rate, against the sign of its averaged gradient.

    J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar: "signSGD: compressed optimisation for non-convex
    problems", ICML 2018.

    `x ← (1 - lr·weight_decay)·x - lr·sign(g)`. An element whose gradient is zero only decays. For gradients that
    `thinwire.compress(model, "dct_topk", residual_decay=0.999)` has averaged it is DeMo. It knows nothing of other
    ranks.

    When not to use it: with gradients without momentum, whose signs are mostly noise.

    Args:
        params: as in torch.optim.
        lr: the learning rate: the length of each element's step, so start with that of Adam, or less.
        weight_decay: the decoupled weight decay.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        check_fraction("lr", lr)
        check_fraction("weight_decay", weight_decay)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As in torch.optim."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])
        return loss
