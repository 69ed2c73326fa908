"""Compressed averaging inside DistributedDataParallel.

A hook on each parameter encodes its gradient as soon as autograd has accumulated it, and the session exchanges its own
buckets while backward continues.

For DDP such a backward runs under `no_sync()`: it would copy all gradients into its buckets and back, which are two
passes over memory. When all gradients are there, a callback at the end of backward waits for the exchange and writes
the means into `.grad`.

With `static_graph`, `find_unused_parameters` or `gradient_as_bucket_view` DDP knows more than that, or copies nothing.
There the exchange is a communication hook. DDP calls it once per bucket, in the same order on all ranks, when all
gradients of the bucket are ready. It encodes what is left, and for the last bucket it waits for the exchange and writes
the means into all buckets. DDP then copies them into `.grad`, as after an all-reduce.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hook, which must be types.
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire._ddp import ModelHook, check_hooks, end_unsynchronized_forward, give_back, take_over
from thinwire._torch_compat import (
    at_end_of_backward,
    post_accumulate_hook_count,
    set_gradient_synchronization,
    synchronizes_gradients,
)
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
    DdpHook(model, averager, grad_scaler)
    return averager


_MOST_NAMES = 5
"""In a message."""


class DdpHook:
    """Averages the gradients of a model. See `thinwire._ddp.Exchanger`.

    The forward hook of the model holds the only strong reference.

    Args:
        model: the model.
        averager: holds the trainable parameters of the model.
        grad_scaler: the GradScaler in use, if any.
    """

    caller = "compress"

    def __init__(
        self,
        model: DistributedDataParallel,
        averager: GradientAverager,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = model
        self._averager = averager
        self._grad_scaler = grad_scaler
        self._synchronizes = False
        """Whether the next backward averages gradients."""
        # With a static graph, autograd may accumulate into a gradient several times.
        self._encodes_early = not model.static_graph
        """Whether gradients are complete when autograd has accumulated into them once."""
        self._under_way = False
        """Whether the exchange of this backward has begun."""
        self._failed = False
        """Whether it has failed."""
        self._direct = False
        """Whether the next backward writes the means into `.grad` without DDP."""
        self._expect_all()
        self._contents: dict[int, tuple[int, list[tuple[Tensor, int, Tensor]]]] = {}
        """For each bucket of DDP, the address of its buffer and what it contains; see `_contents_of`."""
        averager.loss_scale_now = functools.partial(loss_scale, grad_scaler)
        take_over(model, self)
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(ModelHook(self._before_forward)),
            model.register_forward_hook(ModelHook(self._after_forward), always_call=True),
        ]
        own: weakref.ref[DdpHook] = weakref.ref(self)
        self._hooks += [_register_gradient_hook(p, position, own) for position, p in enumerate(averager.params)]

    def detach(self) -> None:
        """See `thinwire._ddp.Exchanger`."""
        for hook in self._hooks:
            hook.remove()
        give_back(self._model)
        self._averager.release()

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """See `thinwire._ddp.Exchanger`."""
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

    def _before_forward(self, model: nn.Module, _: object) -> None:
        # DDP decides in forward whether the next backward synchronizes; no_sync() must surround both.
        if torch.is_grad_enabled():
            assert isinstance(model, DistributedDataParallel)
            self._synchronizes = synchronizes_gradients(model)
            if self._synchronizes and 0 < self._missing < len(self._arrived):
                self._refuse_unfinished()
            self._direct = self._synchronizes and not (
                model.static_graph or model.find_unused_parameters or model.gradient_as_bucket_view
            )
            if self._direct:
                set_gradient_synchronization(model, enabled=False)

    def _after_forward(self, model: nn.Module, *_: object) -> None:
        if self._direct and torch.is_grad_enabled():
            assert isinstance(model, DistributedDataParallel)
            end_unsynchronized_forward(model, synchronizes=True)

    def _refuse_unfinished(self) -> NoReturn:
        names = [self._averager.name_of(position) for position, arrived in enumerate(self._arrived) if not arrived]
        listed = ", ".join(map(repr, names[:_MOST_NAMES])) + (" and others" if len(names) > _MOST_NAMES else "")
        raise RuntimeError(
            f"the last backward gave no gradient to {listed}, so no gradient was averaged. Use all parameters in the "
            "loss, or create the model with DistributedDataParallel(find_unused_parameters=True). If that backward "
            "failed, make a new model and a new compression"
        )

    def on_accumulated(self, p: Tensor, position: int) -> None:
        """Encode a gradient that autograd has accumulated, if it is the one that is averaged."""
        if not self._synchronizes:
            return
        if self._direct:
            self._note(position)
        if not self._encodes_early or post_accumulate_hook_count(p) > 1:
            return  # a hook of the user may still change it
        if not self._under_way and not self._averager.connected:
            return  # all ranks agree at the end of backward, or in the communication hook, in the same order
        grad = p.grad
        if grad is None or grad.dtype is not p.dtype or grad.stride() != p.stride() or not is_dense(p):
            return
        self._begin()
        self._averager.encode(position, _memory_of(grad))

    def _expect_all(self) -> None:
        """Note that no parameter has got a gradient in a direct backward."""
        self._arrived = [False] * len(self._averager.params)
        self._missing = len(self._arrived)
        """How many have not arrived."""

    def _note(self, position: int) -> None:
        """Note that a parameter has got its gradient in a direct backward."""
        if self._arrived[position]:
            with self._averager.abort_on_error():
                self._averager.refuse_second_gradient(position)
        self._arrived[position] = True
        self._missing -= 1
        if not self._missing:
            at_end_of_backward(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the means of a direct backward, and write them into `.grad`."""
        averager = self._averager
        self._synchronizes = False  # as in DDP: a second backward after the same forward averages nothing
        self._expect_all()
        self._begin()
        copied: list[tuple[Tensor, Tensor]] = []
        for position, p in enumerate(averager.params):
            grad = p.grad
            vector = None if grad is None else _vector(p, grad)
            if vector is None:  # of another order or dtype, or a hook of the user has taken it away
                mean = torch.zeros_like(p) if _fills_memory(p) else torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                if grad is None:
                    p.grad = mean
                else:
                    copied.append((grad, mean.copy_(grad)))
                vector = _memory_of(mean)
            if averager.is_encoded(position):
                averager.write_to(position, vector)
            else:
                averager.add(p, vector, present=grad is not None)
        self._under_way = False
        averager.finish()
        for grad, mean in copied:
            grad.copy_(mean)

    def _begin(self) -> None:
        if not self._under_way:
            self._averager.begin(loss_scale(self._grad_scaler))
            self._under_way = True

    def _exchange(self, bucket: GradBucket) -> None:
        averager = self._averager
        self._begin()
        for p, position, gradient in self._contents_of(bucket):
            if averager.is_encoded(position):
                averager.write_to(position, gradient)
            else:
                # DDP's buckets have zeros for a parameter that this backward did not use.
                averager.add(p, gradient, present=p.grad is not None)
        if bucket.is_last():
            self._synchronizes = False  # as in DDP: a second backward after the same forward averages nothing
            self._under_way = False
            self._give_to_unused(averager.finish())

    def _give_to_unused(self, averaged: Sequence[Tensor]) -> None:
        """Give delayed means to parameters that this backward did not use. If no rank has used them, DDP leaves their
        gradients as they are. Without a delay there is no mean then."""
        unused = {p for p in averaged if p.grad is None}
        for _, contents in self._contents.values() if unused else ():
            for p, _, vector in contents:
                if p in unused:
                    mean = vector.as_strided(p.shape, p.stride()) if is_dense(p) else vector.view_as(p)
                    p.grad = mean if self._model.gradient_as_bucket_view else mean.clone()

    def _contents_of(self, bucket: GradBucket) -> list[tuple[Tensor, int, Tensor]]:
        """The parameters of a bucket, with their positions and their gradients in its buffer, as vectors."""
        buffer, params = bucket.buffer(), bucket.parameters()
        known = self._contents.get(bucket.index())
        # DDP rebuilds its buckets after the first backward, and keeps them from then on.
        if (
            known is None
            or known[0] != buffer.data_ptr()
            or len(known[1]) != len(params)
            or any(p is not entry[0] for p, entry in zip(params, known[1], strict=True))
        ):
            contents = []
            for p, gradient in zip(params, bucket.gradients(), strict=True):
                # A vector, whatever the strides of the parameter: gradients are packed in the buffer.
                first = gradient.storage_offset() - buffer.storage_offset()
                contents.append((p, self._averager.position_of(p), buffer[first : first + gradient.numel()]))
            known = self._contents[bucket.index()] = (buffer.data_ptr(), contents)
        return known[1]


def _register_gradient_hook(p: Tensor, position: int, hook: weakref.ref[DdpHook]) -> RemovableHandle:
    def on_accumulated(p: Tensor) -> None:
        alive = hook()
        if alive is not None:
            alive.on_accumulated(p, position)

    # A weak reference, because the garbage collector cannot traverse hooks of parameters.
    return p.register_post_accumulate_grad_hook(on_accumulated)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _vector(p: Tensor, grad: Tensor) -> Tensor | None:
    """The memory of a gradient as a vector, if it has the dtype and the order of its parameter."""
    if grad.dtype is not p.dtype:
        return None
    alike = grad.is_contiguous() and p.is_contiguous()
    return _memory_of(grad) if alike or (grad.stride() == p.stride() and _fills_memory(p)) else None


def _memory_of(dense: Tensor) -> Tensor:
    """The memory of a tensor without gaps or overlaps, as a vector."""
    dense = dense.detach()
    return dense.view(-1) if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))


def _fills_memory(p: Tensor) -> bool:
    """Whether the elements of a parameter, in some order, are memory without gaps or overlaps: torch keeps the strides
    of such tensors only."""
    return torch.empty_like(p, device="meta").stride() == p.stride()
