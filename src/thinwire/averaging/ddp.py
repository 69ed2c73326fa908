"""Compressed averaging inside DistributedDataParallel, as a communication hook.

DDP calls the hook once per bucket, in the same order on all ranks, when all gradients of the bucket are ready. Buckets
of 25 MB would delay most of the exchange until backward is nearly over. So a hook on each parameter encodes its
gradient as soon as autograd has accumulated it, and the session exchanges its own buckets while backward continues. The
communication hook encodes what is left. For the last bucket it waits for the exchange and writes the means into all
buckets. DDP then copies them into `.grad`, as after an all-reduce.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hook, which must be types.
import functools
import weakref
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire._ddp import AVERAGING_HOOK, check_hooks, disable_join
from thinwire._torch_compat import at_end_of_backward, post_accumulate_hooks, synchronizes_gradients
from thinwire.averaging.averager import GradientAverager, loss_scale
from thinwire.transport.failures import on_all_ranks
from thinwire.transport.layout import is_dense
from thinwire.transport.peers import Peers


def average_ddp(
    model: DistributedDataParallel,
    make: Callable[[dict[Tensor, str], ProcessGroup | None], GradientAverager],
    grad_scaler: torch.amp.GradScaler | None,
) -> GradientAverager:
    """Let an averager replace the all-reduce of a model. All ranks call this.

    Args:
        model: the model.
        make: makes the averager of parameters with names, for a process group. It may raise on any rank.
        grad_scaler: the GradScaler in use, if any.

    Raises:
        TypeError, ValueError, RuntimeError: on every rank, as `make` or the agreement of ranks; or if the model has a
            communication hook already.
    """
    ignored = set(model.parameters_to_ignore)
    names = {p: name for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}

    def build() -> GradientAverager:
        check_hooks(model, "compress")
        return make(names, model.process_group)

    averager = on_all_ranks(Peers.of(model.process_group), build)
    averager._prepare(names)
    DdpHook(averager, grad_scaler).register(model)
    disable_join(model, "compress")
    return averager


class DdpHook:
    """The communication hook of a model.

    Args:
        averager: holds the trainable parameters of the model.
        grad_scaler: the GradScaler in use, if any.
    """

    def __init__(self, averager: GradientAverager, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._averager = averager
        self._grad_scaler = grad_scaler
        self._synchronizes = False
        """Whether the next backward averages gradients."""
        self._encodes_early = False
        """Whether gradients are complete when autograd has accumulated into them once."""
        self._under_way = False
        """Whether the exchange of this backward has begun."""
        self._failed = False
        """Whether it has failed."""

    def register(self, model: DistributedDataParallel) -> None:
        """Let DDP call this hook instead of its all-reduce."""

        def compressed_averaging(_: object, bucket: GradBucket) -> Future[Tensor]:
            if bucket.index() == 0:
                self._failed = False
            if not self._failed:
                try:
                    self._exchange(bucket)
                except BaseException as error:  # Ctrl-C too
                    # DDP would turn it into a RuntimeError. Raised at the end of backward, it keeps its class.
                    self._failed = True
                    at_end_of_backward(functools.partial(_raise, error))
            # DDP reads the buffer only after the hook of the last bucket.
            buffer = bucket.buffer()
            done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            done.set_result(buffer)
            return done

        compressed_averaging.__name__ = AVERAGING_HOOK  # by which `attach` recognizes it
        model.register_comm_hook(None, compressed_averaging)
        # With a static graph, autograd may accumulate into a gradient several times.
        self._encodes_early = not model.static_graph
        model.register_forward_pre_hook(self._before_forward)
        for p in self._averager.params:
            _register_gradient_hook(p, weakref.ref(self))

    def _before_forward(self, model: nn.Module, _: object) -> None:
        # DDP decides in forward whether the next backward synchronizes; no_sync() must surround both.
        if torch.is_grad_enabled():
            assert isinstance(model, DistributedDataParallel)
            self._synchronizes = synchronizes_gradients(model)

    def on_accumulated(self, p: Tensor) -> None:
        """Encode a gradient that autograd has accumulated, if it is the one that DDP will give to the hook."""
        if not self._encodes_early or not self._synchronizes or len(post_accumulate_hooks(p)) > 1:
            return  # a hook of the user may still change it
        if not self._under_way and not self._averager.connected:
            return  # all ranks agree in the communication hook, which they call in the same order
        grad = p.grad
        if grad is None or grad.dtype != p.dtype or grad.stride() != p.stride() or not is_dense(p):
            return
        self._begin()
        self._averager.encode(p, grad.detach().as_strided((grad.numel(),), (1,)))

    def _begin(self) -> None:
        if not self._under_way:
            self._averager.begin(loss_scale(self._grad_scaler))
            self._under_way = True

    def _exchange(self, bucket: GradBucket) -> None:
        averager, buffer = self._averager, bucket.buffer()
        self._begin()
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # A vector, whatever the strides of the parameter: gradients are packed in the buffer.
            first = gradient.storage_offset() - buffer.storage_offset()
            # DDP's buckets have zeros for a parameter that this backward did not use.
            averager.add(p, buffer[first : first + gradient.numel()], present=p.grad is not None)
        if bucket.is_last():
            self._under_way = False
            averager.finish()


def _register_gradient_hook(p: Tensor, hook: weakref.ref[DdpHook]) -> None:
    def on_accumulated(p: Tensor) -> None:
        alive = hook()
        if alive is not None:
            alive.on_accumulated(p)

    # A weak reference, because the garbage collector cannot traverse hooks of parameters.
    p.register_post_accumulate_grad_hook(on_accumulated)


def _raise(error: BaseException) -> NoReturn:
    raise error
