"""What `thinwire.attach` and `thinwire.compress` share: the communication hook of a DistributedDataParallel model.

DDP accepts one communication hook per model, and keeps it for good. thinwire registers the same hook for both. Its
state names what exchanges the gradients; after `thinwire.detach` it names nothing, and the hook averages as DDP does
without one.

Copies of a model (`copy.deepcopy`, pickle) are plain DDP models. What thinwire has registered in a model must not bring
an optimizer with threads and process groups into a copy. So all of it becomes inert when it is copied.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of its hook, which must be types.
import gc
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from thinwire import _torch_compat


def end_unsynchronized_forward(model: DistributedDataParallel, *, synchronizes: bool) -> None:
    """After a forward in which DDP's synchronization was turned off, set its flags as DDP would have.

    Args:
        model: the model.
        synchronizes: whether it was on before, because the user is not in `no_sync()`.
    """
    _torch_compat.set_gradient_synchronization(model, enabled=synchronizes)
    _torch_compat.set_buffer_synchronization(model, enabled=synchronizes)


class Exchanger(Protocol):
    """What exchanges the gradients of a model, and is alive as long as the model."""

    caller: str
    """The function that made it: "attach" or "compress"."""

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Called by DDP for each of its buckets."""
        ...

    def detach(self) -> None:
        """Return the model to plain DDP. All ranks call it."""


class _HookState:
    """The state of the communication hook. A copy of it belongs to no model.

    Args:
        model: the model in which the hook is registered.
    """

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        # Weak references: DDP's reducer holds this object, and the garbage collector cannot traverse the reducer.
        self._model = None if model is None else weakref.ref(model)
        self._exchanger: weakref.ref[Exchanger] | None = None

    def belongs_to(self, model: DistributedDataParallel) -> bool:
        """Whether DDP calls the hook with this state for a model. DDP registers no hooks in copies of a model."""
        return self._model is not None and self._model() is model

    @property
    def process_group(self) -> Any:
        """Of the model."""
        model = self._model() if self._model is not None else None
        assert model is not None, "its reducer calls the hook"
        return model.process_group

    @property
    def exchanger(self) -> Exchanger | None:
        """What exchanges gradients; None if the hook averages as DDP does."""
        return self._exchanger() if self._exchanger is not None else None

    @exchanger.setter
    def exchanger(self, exchanger: Exchanger | None) -> None:
        self._exchanger = None if exchanger is None else weakref.ref(exchanger)

    def __reduce__(self) -> tuple[Any, ...]:
        return _HookState, ()


def thinwire_hook(state: _HookState, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook."""
    exchanger = state.exchanger
    return allreduce_hook(state.process_group, bucket) if exchanger is None else exchanger.exchange(bucket)


class ModelHook:
    """A hook of a module. In a copy of the module it does nothing.

    Args:
        call: what the module calls; None for nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Called by the module."""
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, ()


class _RefusedJoin:
    """Takes the place of the method `join_hook` of a model. A copy of the model has the method again.

    Args:
        model: the model.
        caller: the function that took its exchange over.
    """

    def __init__(self, model: DistributedDataParallel, caller: str) -> None:
        self._model = model
        self._caller = caller

    def __call__(self, **_: Any) -> NoReturn:
        raise RuntimeError(
            f"join() on a model after thinwire.{self._caller}: ranks without data cannot take part in the exchange. "
            "Give all ranks equally many batches, for example with DistributedSampler(drop_last=True)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_join_hook, (self._model,)


def _own_join_hook(model: DistributedDataParallel) -> types.MethodType:
    """The method of the class, whatever the model has in its place."""
    return types.MethodType(type(model).join_hook, model)


def exchanger_of(model: DistributedDataParallel) -> Exchanger | None:
    """What exchanges the gradients of a model; None if DDP averages them, by itself or by a hook of the user."""
    for _, state in _torch_compat.communication_hooks(model):
        if isinstance(state, _HookState) and state.belongs_to(model):
            return state.exchanger
    return None


def check_hooks(model: DistributedDataParallel, caller: str) -> None:
    """Reject a model that another communication hook exchanges for.

    Raises:
        RuntimeError: naming the hook.
        ValueError: if the model was created with `mixed_precision=`.
    """
    advice = f"Wrap the module in a new DistributedDataParallel, and call {caller} once"
    exchanger = exchanger_of(model)
    if exchanger is not None:
        reason = {
            "compress": "thinwire.compress averages its gradients, so an optimizer must not exchange them again: use "
            "any torch.optim optimizer with compress, or attach a thinwire optimizer without compress",
            "attach": "It is attached to a thinwire optimizer, which exchanges gradients: use attach with a thinwire "
            "optimizer, or compress with any other optimizer",
        }[exchanger.caller]
        raise RuntimeError(
            f"{caller}: the model has a communication hook already (of thinwire.{exchanger.caller}). {reason}. Call "
            f"thinwire.detach(model) first, and call {caller} once"
        )
    for name, state in _torch_compat.communication_hooks(model):
        if not isinstance(state, _HookState):
            raise RuntimeError(
                f"{caller}: the model has a communication hook already ({name}), and DDP accepts only one. {advice}"
            )
    if model.mixed_precision is not None:
        raise ValueError(
            f"{caller}: the model was created with mixed_precision=, which replaces parameters during backward. Use "
            "torch.autocast, or bfloat16 parameters"
        )


def find_averaging_model(params: Iterable[Tensor]) -> str | None:
    """The class of a DistributedDataParallel or FSDP2 model that holds one of these parameters, if there is one."""
    model = next(averaging_models(params), None)
    return None if model is None else type(model).__name__


def averaging_models(params: Iterable[Tensor]) -> Iterator[nn.Module]:
    """The DistributedDataParallel and FSDP2 models that hold one of these parameters.

    Parameters do not refer to such a model, so this asks the garbage collector for all objects. It takes a fraction of
    a second: for use once, or before an error or a warning.
    """
    wanted, sharded = {id(p) for p in params}, _torch_compat.fully_sharded_class()
    for each in gc.get_objects():
        # By the type: `isinstance` runs code of objects that only pretend to be of a class.
        if issubclass(type(each), DistributedDataParallel):
            module = getattr(each, "module", None)
        else:
            module = each if sharded is not None and issubclass(type(each), sharded) else None
        if isinstance(module, nn.Module) and any(id(p) in wanted for p in module.parameters()):
            yield each


def take_over(model: DistributedDataParallel, exchanger: Exchanger) -> None:
    """Let an exchanger exchange the gradients of a model that `check_hooks` accepts, and refuse `join()`.

    Ranks without data cannot take part in an exchange. The model must keep the exchanger alive.
    """
    for _, state in _torch_compat.communication_hooks(model):
        if isinstance(state, _HookState) and state.belongs_to(model):
            break
    else:
        state = _HookState(model)
        _torch_compat.forget_communication_hooks(model)  # those that came with a copy
        model.register_comm_hook(state, thinwire_hook)
    state.exchanger = exchanger
    # DistributedDataParallel.join() and the Join context manager both call this before they send anything.
    model.join_hook = _RefusedJoin(model, exchanger.caller)  # type: ignore[method-assign]


def give_back(model: DistributedDataParallel) -> None:
    """Let DDP average the gradients of a model again."""
    for _, state in _torch_compat.communication_hooks(model):
        if isinstance(state, _HookState):
            state.exchanger = None
    del model.join_hook
