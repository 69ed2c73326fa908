"""`ThinwireCallback`: thinwire in the Trainer of Transformers.

Example::

    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.add_callback(ThinwireCallback(trainer, thinwire.Birder))

docs/frameworks.md has the whole script.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from thinwire._callers import warn_user
from thinwire._ddp import exchanger_of
from thinwire._unwrap import distributed_model, unwrapped_optimizer
from thinwire.attach import attach
from thinwire.averaging.handle import Compression
from thinwire.compress import compress
from thinwire.integrations._limits import clip_in_optimizer
from thinwire.integrations._metrics import MetricsLog
from thinwire.integrations._residuals import Residuals
from thinwire.optimizers.optimizer import WireOptimizer

_OF_ADAMW = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Arguments of TrainingArguments that only the optimizers of Transformers read."""


class ThinwireCallback(TrainerCallback):
    """Lets thinwire exchange gradients in a `transformers.Trainer`. Add it to the trainer on all ranks.

    With a thinwire optimizer::

        trainer.add_callback(ThinwireCallback(trainer, thinwire.Birder))

    The trainer makes the optimizer when training starts, with `learning_rate`, `weight_decay` and the schedule of its
    TrainingArguments, and without weight decay for biases and norms, as it does for AdamW. Instead of a class here, you
    may give an optimizer to the trainer: `Trainer(optimizers=(optimizer, None))` and `ThinwireCallback(trainer)`.

    With any other optimizer, and compressed averaging::

        trainer.add_callback(ThinwireCallback(trainer, compressor="int4"))

    What it does, besides `thinwire.attach` or `thinwire.compress` with the trainer's GradScaler:

    * `checkpoint-N` has the states of all ranks, and `trainer.train(resume_from_checkpoint=...)` continues as if the
      run had never stopped, to the bit;
    * replicas are equal when the trainer evaluates or saves, also with `thinwire.ZeroOneAdam`;
    * `max_grad_norm` becomes `clip_norm` of a thinwire optimizer (docs/guide.md, gradient clipping), and the trainer's
      own clipping, which would come too late, is off. `grad_norm` in the logs is the norm of the gradient of rank 0
      before it is clipped. With `compressor`, the trainer clips the averaged gradient, as usual;
    * the trainer's logs have the metrics of rank 0: `thinwire/bytes_sent`, `thinwire/waited_share`, and so on.

    To do this, it gives the trainer its own copy of `args`, and wraps `create_optimizer` and `log`.

    Args:
        trainer: the trainer, or an object of a subclass.
        optimizer: the class of a thinwire optimizer, or None.
        compressor: the name of a compressor of `thinwire.compress`, or None.
        **options: for the optimizer, such as `downlink="votes"`, or for `thinwire.compress`.

    Raises:
        TypeError: if `trainer` or `optimizer` is something else.
        ValueError: if both or neither of `optimizer` and `compressor` are given, or an option that TrainingArguments
            determine, or if TrainingArguments have arguments of AdamW, which the optimizer would not read.
        ValueError, RuntimeError: when training starts, if the optimizer has another limit than `max_grad_norm`, or
            cannot take it over any more; if the optimizer is not thinwire's; or if the trainer does not use
            DistributedDataParallel.
    """

    def __init__(
        self,
        trainer: Trainer,
        optimizer: type[WireOptimizer] | None = None,
        *,
        compressor: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"ThinwireCallback: trainer is {type(trainer).__name__}, expected a transformers.Trainer: "
                "trainer.add_callback(ThinwireCallback(trainer, thinwire.Birder))"
            )
        self._trainer = trainer
        self._compressor = compressor
        self._compress_options = options
        self._compression: Compression | None = None
        self._residuals = Residuals()
        self._metrics: MetricsLog | None = None
        self._gathered_at = -1
        """The step whose states of all ranks are gathered."""
        self._max_grad_norm = trainer.args.max_grad_norm
        if compressor is None:
            _check_arguments(trainer.args)
            if optimizer is not None:
                _set_optimizer(trainer, optimizer, options)
            elif options:
                raise ValueError(f"ThinwireCallback: {_named(options)} without the class of an optimizer")
            # A copy: the user's arguments may serve another trainer.
            trainer.args = copy.copy(trainer.args)
            trainer.args.max_grad_norm = 0.0
        elif optimizer is not None:
            raise ValueError(
                f"ThinwireCallback: optimizer={optimizer.__name__} and compressor={compressor!r}: expected one of "
                "them, because a thinwire optimizer compresses already"
            )
        self._create_optimizer, trainer.create_optimizer = trainer.create_optimizer, self._create_own_optimizer
        self._log, trainer.log = trainer.log, self._log_with_metrics

    # When training starts ---------------------------------------------------------------------------------------------

    def _create_own_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Called by the trainer before it wraps the model and loads a checkpoint."""
        created = self._create_optimizer(*args, **kwargs)
        inner = unwrapped_optimizer(created)
        if self._compressor is None:
            if not isinstance(inner, WireOptimizer):
                raise TypeError(
                    f"ThinwireCallback: the trainer's optimizer is {type(inner).__name__}, which is not thinwire's. "
                    "Use ThinwireCallback(trainer, thinwire.Birder), or ThinwireCallback(trainer, compressor='int4')"
                )
            limit = self._max_grad_norm
            if limit and limit > 0:
                clip_in_optimizer(inner, f"TrainingArguments(max_grad_norm={limit})", norm=limit, default=_DEFAULT_NORM)
        elif isinstance(inner, WireOptimizer):
            raise ValueError(
                f"ThinwireCallback: compressor={self._compressor!r}, but the trainer's optimizer is thinwire's "
                f"{type(inner).__name__}, which compresses already. Leave out compressor"
            )
        else:
            self._residuals.follow(inner)
        return created

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Attach the model, or compress its averaging."""
        trainer = self._trainer
        if trainer.state is not state:
            raise ValueError(
                "ThinwireCallback was added to another trainer than the one that it was made for: "
                "trainer.add_callback(ThinwireCallback(trainer, ...))"
            )
        self._gathered_at = -1
        optimizer = unwrapped_optimizer(trainer.optimizer)
        model = distributed_model(trainer.model_wrapped)
        if args.world_size > 1 and not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"ThinwireCallback: the trainer has wrapped the model in {type(model).__name__}, not in "
                "DistributedDataParallel. thinwire does not work with DeepSpeed, FSDP or tensor parallelism of Trainer"
            )
        # In a second train(), the model is ours already.
        first_time = self._compressor is not None and self._compression is None
        if isinstance(model, DistributedDataParallel) and (first_time or exchanger_of(model) is None):
            scaler = trainer.accelerator.scaler
            if self._compressor is None:
                attach(model, optimizer, grad_scaler=scaler)
            else:
                self._compression = compress(model, self._compressor, grad_scaler=scaler, **self._compress_options)
                self._residuals.belong_to(self._compression)
        source = optimizer if self._compressor is None else self._compression
        self._metrics = MetricsLog(source) if source is not None else None

    # While it runs ----------------------------------------------------------------------------------------------------

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make replicas equal, and gather states, if the trainer is about to need them."""
        self._before_use(args, state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """As at the end of a step."""
        self._before_use(args, state, control)

    def _before_use(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        optimizer = unwrapped_optimizer(self._trainer.optimizer)
        if isinstance(optimizer, WireOptimizer) and (
            control.should_evaluate or control.should_save or control.should_training_stop
        ):
            optimizer.synchronize()
        # "best" decides only after the evaluation.
        saves = control.should_save or (control.should_evaluate and args.save_strategy == SaveStrategy.BEST)
        if saves and not args.save_only_model and self._gathered_at != state.global_step:
            self._gathered_at = state.global_step
            if isinstance(optimizer, WireOptimizer):
                optimizer.consolidate_state_dict()
            self._residuals.gather()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Warn about a checkpoint that this callback could not prepare."""
        if not args.save_only_model and self._gathered_at != state.global_step and state.is_world_process_zero:
            warn_user(
                f"checkpoint-{state.global_step} has the optimizer state of rank 0 only, so a run cannot resume from "
                "it exactly: another callback asked for it after ThinwireCallback was called. Add ThinwireCallback last"
            )

    def _log_with_metrics(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._metrics is not None:
            logs.update(self._metrics.read())
        self._log(logs, *args, **kwargs)


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
_DEFAULT_NORM: Any = _DEFAULTS["max_grad_norm"]


def _check_arguments(args: TrainingArguments) -> None:
    for name in _OF_ADAMW:
        value = getattr(args, name)
        if value != _DEFAULTS[name]:
            raise ValueError(
                f"TrainingArguments({name}={value!r}) is for the optimizers of Transformers, and thinwire's do not "
                "read it. Leave it out, and give the optimizer's own arguments to ThinwireCallback"
            )


def _set_optimizer(trainer: Trainer, optimizer: type[WireOptimizer], options: dict[str, Any]) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, WireOptimizer)):
        kind = optimizer.__name__ if isinstance(optimizer, type) else f"an object of {type(optimizer).__name__}"
        raise TypeError(
            f"ThinwireCallback: optimizer is {kind}, expected the class of a thinwire optimizer, such as "
            "thinwire.Birder. Give an object to Trainer(optimizers=(optimizer, None))"
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise ValueError(
            f"ThinwireCallback: optimizer={optimizer.__name__}, but the trainer was given an optimizer already: "
            "expected one of them. ThinwireCallback(trainer) takes the trainer's"
        )
    for name, argument in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if name in options:
            raise ValueError(
                f"ThinwireCallback: {name}={options[name]!r}: expected TrainingArguments({argument}="
                f"{options[name]!r}), which the trainer passes on"
            )
    trainer.optimizer_cls_and_kwargs = (optimizer, {"lr": trainer.args.learning_rate, **options})


def _named(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
