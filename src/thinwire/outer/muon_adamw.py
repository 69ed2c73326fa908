"""`thinwire.MuonAdamW`: the inner optimizer of MuLoCo, one optimizer made of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_OF_MUON = "ns_steps"
"""A setting that groups of Muon have, and groups of AdamW have not."""


class MuonAdamW(Optimizer):
    """Muon for the hidden matrices of a model, and AdamW for all other parameters: torch's own, as one optimizer.

    K. Jordan et al.: "Muon: an optimizer for hidden layers in neural networks", 2024.
    J. Liu et al.: "Muon is scalable for LLM training", arXiv 2502.16982, 2025 (the common learning rate).

    Example::

        inner = thinwire.MuonAdamW(model, lr=2e-3, adamw=[model.head])     # the output layer is for AdamW too
        opt = thinwire.LocalSteps.from_profile("muloco", inner, every=30)

    Muon takes the parameters with two dimensions, AdamW the others: biases, norms, convolutions, the weights of
    `nn.Embedding`, and what `adamw` names. No module says that it is the output layer, so name it; if it shares its
    weight with an embedding, AdamW has it already.

    The steps of Muon are `0.2·√(longer side)` times an orthogonal matrix (`adjust_lr_fn="match_rms_adamw"`), about as
    long as AdamW's. So both parts have one learning rate and one weight decay: start with those of AdamW. The first
    parameter group is Muon's, the second AdamW's; schedulers, state dicts and GradScaler see one optimizer.

    When not to use it: with FSDP, whose shards are not matrices. A step of Muon takes some ten products of matrices
    per weight, which is little beside large batches, and much beside small ones.

    Args:
        model: the model.
        lr: the learning rate of both parts.
        weight_decay: the decoupled weight decay of both parts.
        adamw: modules and parameters that AdamW takes, such as the output layer.
        momentum: Muon's momentum, with Nesterov's step.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        RuntimeError: if torch has no Muon: it came with torch 2.9.
        TypeError: if `model` is not a module, or `adamw` has something else than modules and parameters.
        ValueError: if no matrix is left for Muon; for what torch's optimizers refuse.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        adamw: Iterable[nn.Module | Tensor] = (),
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"MuonAdamW needs torch.optim.Muon, of torch 2.9 or later: this is {torch.__version__}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}, expected the nn.Module")
        others = _left_to_adamw(model, adamw)
        named = list(model.named_parameters())
        matrices = [(name, p) for name, p in named if p.dim() == 2 and p not in others]
        rest = [(name, p) for name, p in named if p.dim() != 2 or p in others]
        if not matrices:
            raise ValueError(
                f"no matrix of {type(model).__name__} is left for Muon: expected parameters with two dimensions that "
                "are not in embeddings, nor in `adamw`"
            )
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        groups = torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **shared).param_groups
        if rest:
            groups = groups + torch.optim.AdamW(rest, betas=betas, eps=eps, **shared).param_groups
        self._parts: list[Optimizer] = []
        super().__init__(groups, shared)
        self._make_parts()

    def _make_parts(self) -> None:
        """Give each group to the optimizer that it is for. Groups and state are those of this optimizer, not copies."""
        self._parts = []
        for group in self.param_groups:
            part = torch.optim.Muon([group]) if _OF_MUON in group else torch.optim.AdamW([group])
            part.state = self.state
            self._parts.append(part)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_parts()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of Muon, and one of AdamW.

        Args:
            closure: re-evaluates the model and returns the loss, as in torch.optim.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the model that it is made with has all parameters.

        Raises:
            RuntimeError: always.
        """
        if self._parts:
            raise RuntimeError("add_param_group of MuonAdamW: make a new one with the whole model")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim.

        Raises:
            ValueError: if it is not that of a MuonAdamW for the same model.
        """
        groups = state_dict["param_groups"]
        found = [_OF_MUON in group for group in groups]
        expected = [_OF_MUON in group for group in self.param_groups]
        if found != expected:
            raise ValueError(
                f"the state dict has {len(groups)} parameter groups, {sum(found)} of them of Muon: expected that of a "
                f"MuonAdamW, with {len(expected)}, the first of Muon"
            )
        super().load_state_dict(state_dict)


def _left_to_adamw(model: nn.Module, named: Iterable[nn.Module | Tensor]) -> set[Tensor]:
    others = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    for each in named:
        if isinstance(each, nn.Module):
            others.update(each.parameters())
        elif isinstance(each, Tensor):
            others.add(each)
        else:
            raise TypeError(f"adamw has {each!r:.60}: expected modules and parameters, such as [model.head]")
    return others
