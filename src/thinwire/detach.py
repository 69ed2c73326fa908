"""`thinwire.detach`: end what `thinwire.attach` or `thinwire.compress` has begun."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import _first_use
from thinwire._ddp import exchanger_of
from thinwire._unwrap import distributed_model
from thinwire.attachments.ddp import ddp_attachment_of
from thinwire.attachments.fsdp import fsdp_attachment_of
from thinwire.averaging.fsdp import detach_replicas


def detach(model: nn.Module) -> None:
    """Return a model to plain averaging, after `thinwire.attach` or `thinwire.compress`. All ranks call it.

    From the next forward on DDP, or FSDP2 between its replicas, averages dense gradients again, for any optimizer.
    Call it after `step()`: gradients of an attached model that were sent and not applied are discarded.

    A DDP model with `static_graph=True` that was attached cannot average again: wrap its module in a new one. Using it
    raises RuntimeError.

    After `attach` the optimizer stays usable. Its state can be saved, it can be attached again, and it can take steps
    on a module without DDP. After `compress` the averaging is closed. Its residuals can still be saved.

    Args:
        model: the model that was given to `attach` or `compress`; also inside the wrapper of a framework or of
            torch.compile. For a module that was attached before it was wrapped, the module or what wraps it.

    Raises:
        TypeError: if it is not a module.
        ValueError: if it is neither attached nor compressed.
    """
    inner = distributed_model(model)
    if not isinstance(inner, nn.Module):
        raise TypeError(f"detach: model is {type(inner).__name__}, expected the module given to attach or compress")
    wrapped = inner.module if isinstance(inner, DistributedDataParallel) else inner
    awaited = _first_use.cancel(wrapped)
    attachment = ddp_attachment_of(wrapped) or fsdp_attachment_of(wrapped)
    exchanger = exchanger_of(inner) if isinstance(inner, DistributedDataParallel) else None
    if attachment is not None:
        attachment.detach()
        attachment.discard_exchange()
    elif exchanger is not None:
        exchanger.detach()
    elif not detach_replicas(inner) and not awaited:
        raise ValueError(
            f"detach: the model ({type(inner).__name__}) is neither attached nor compressed. Pass the model that was "
            "given to thinwire.attach or thinwire.compress"
        )
