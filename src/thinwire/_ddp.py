"""What `thinwire.attach` and `thinwire.compress` require of a DistributedDataParallel model."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from thinwire import _torch_compat

AVERAGING_HOOK = "compressed_averaging"
"""The name of the communication hook of `thinwire.compress`."""
ATTACHED_HOOK = "_unexpected_exchange"
"""The name of the one of `thinwire.attach`."""


def check_hooks(model: DistributedDataParallel, caller: str) -> None:
    """Reject a model that another communication hook exchanges for.

    Raises:
        RuntimeError: naming the hook.
        ValueError: if the model was created with `mixed_precision=`.
    """
    hooks = _torch_compat.communication_hooks(model)
    if hooks:
        reason = {
            AVERAGING_HOOK: ". thinwire.compress averages its gradients, so an optimizer must not exchange them "
            "again: use any torch.optim optimizer with compress, or attach a thinwire optimizer without compress",
            ATTACHED_HOOK: ". It is attached to a thinwire optimizer, which exchanges gradients: use attach with "
            "a thinwire optimizer, or compress with any other optimizer",
        }.get(hooks[0], ", and DDP accepts only one")
        raise RuntimeError(
            f"{caller}: the model has a communication hook already ({hooks[0]}){reason}. Wrap the module in a new "
            f"DistributedDataParallel, and call {caller} once"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            f"{caller}: the model was created with mixed_precision=, which replaces parameters during backward. Use "
            "torch.autocast, or bfloat16 parameters"
        )


def disable_join(model: DistributedDataParallel, caller: str) -> None:
    """Let `join()` raise before it sends anything, because ranks without data cannot take part in an exchange."""

    def join_hook(**_: Any) -> NoReturn:
        raise RuntimeError(
            f"join() on a model after thinwire.{caller}: ranks without data cannot take part in the exchange. Give "
            "all ranks equally many batches, for example with DistributedSampler(drop_last=True)"
        )

    # DistributedDataParallel.join() and the Join context manager both call this before they send anything.
    model.join_hook = join_hook  # type: ignore[method-assign]
