"""An optimizer exchanges the gradients of an FSDP2 model between its replicas.

FSDP gathers parameters and reduce-scatters gradients inside of each replica as before. It no longer averages gradients
over the replicas (`thinwire._fsdp`): `.grad` stays the gradient of the replica, and each replica is a worker. FSDP
calls the hooks of a parameter when it has stored the shard of its gradient, so the exchange runs while backward
continues. A backward that FSDP does not reduce (`set_requires_gradient_sync(False)`) calls no hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire._fsdp import (
    check_all_reduce_hooks,
    check_materialized,
    replicate_group,
    resume_all_reduce,
    stop_all_reduce,
)
from thinwire._torch_compat import FsdpGroup
from thinwire.attachments.early_encoding import EarlyEncoding
from thinwire.attachments.fit import check_holds_all
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport.failures import on_mesh


def attach_fsdp(
    model: nn.Module, optimizer: WireOptimizer, grad_scaler: torch.amp.GradScaler | None, *, overlap: bool
) -> None:
    """Attach a model. All ranks of the mesh call this. For the arguments and errors see `thinwire.attach`."""
    groups = FsdpGroup.all_of(model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}

    def check() -> None:
        group = replicate_group(groups, "attach")
        ranks = torch.distributed.get_process_group_ranks(group)
        if ranks != optimizer._peers.ranks():
            raise ValueError(
                f"attach: the replicas of the model are on ranks {ranks}, those of the optimizer on "
                f"{optimizer._peers.ranks()}: give the optimizer the mesh that fully_shard was given"
            )
        check_all_reduce_hooks(groups, "attach")
        check_materialized(names, names, "attach")
        check_holds_all(model, optimizer, "FSDP")

    on_mesh(optimizer._peers, optimizer._shards.peers, check)
    optimizer._prepare(names)
    _attachments[model] = weakref.ref(FsdpAttachment(model, groups, optimizer, names, grad_scaler, overlap=overlap))


class FsdpAttachment:
    """What is registered in an FSDP2 model. The model and the hooks of the optimizer hold the only strong references.

    Args:
        model: the root module.
        groups: its groups.
        optimizer: holds its parameters.
        names: of the parameters.
        grad_scaler: the GradScaler in use, if any.
        overlap: whether to exchange during backward.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[FsdpGroup],
        optimizer: WireOptimizer,
        names: dict[Tensor, str],
        grad_scaler: torch.amp.GradScaler | None,
        *,
        overlap: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._groups = groups
        accumulate = "after model.set_requires_gradient_sync(False)"
        self._encoding = EarlyEncoding(optimizer, names, grad_scaler, self, overlap=overlap, accumulate=accumulate)
        stop_all_reduce(groups, "attach", self._on_all_reduce)

    def _on_all_reduce(self) -> None:
        """FSDP has the gradient of the replica now, and goes on to store it."""

    def detach(self) -> None:
        """Remove all hooks, and let FSDP average over the replicas again."""
        self._encoding.end()
        resume_all_reduce(self._groups)
        model = self._model()
        if model is not None:
            del _attachments[model]

    def discard_exchange(self) -> None:
        """Discard gradients that were sent and not applied. All ranks call this."""
        self._encoding.discard_exchange()


_attachments: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FsdpAttachment]] = weakref.WeakKeyDictionary()


def fsdp_attachment_of(model: nn.Module) -> FsdpAttachment | None:
    """The attachment of a root module, if there is one."""
    reference = _attachments.get(model)
    return reference() if reference is not None else None
