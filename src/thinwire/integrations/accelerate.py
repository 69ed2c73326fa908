"""`attach` and `compress` for Accelerate: as `thinwire.attach` and `thinwire.compress`, and `save_state` is exact.

Example::

    optimizer = thinwire.Birder(model.parameters(), lr=1e-3)
    thinwire.integrations.accelerate.attach(accelerator, model, optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

docs/frameworks.md has the whole script.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

import thinwire
from thinwire._callers import warn_user
from thinwire._unwrap import distributed_model, unwrapped_model, unwrapped_optimizer
from thinwire.averaging.handle import Compression
from thinwire.integrations._rank_state import at_next_forward, restore, state_of_rank
from thinwire.optimizers.optimizer import WireOptimizer

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def attach(accelerator: Accelerator, model: nn.Module, optimizer: Any, *, overlap: bool = True) -> None:
    """Let a thinwire optimizer exchange the gradients of a model. All ranks call it, before or after `prepare`.

    It does what `thinwire.attach` does, with the accelerator's GradScaler. In addition, `accelerator.save_state` saves
    the states of all ranks, of equal replicas. In the middle of a gradient accumulation it also saves the gradients of
    each rank, in `thinwire_<rank>.bin`. `accelerator.load_state` continues as if the run had never stopped, to the bit,
    if the data loader does. Random numbers continue in the first forward, because data loaders draw some before.

    `accelerator.clip_grad_norm_` would come too late: use `clip_norm=` of the optimizer. `step()` raises an error
    otherwise.

    Args:
        accelerator: the accelerator that prepares the model.
        model: the model, before or after `accelerator.prepare`.
        optimizer: a thinwire optimizer, before or after `accelerator.prepare`.
        overlap: see `thinwire.attach`.

    Raises:
        TypeError: if `accelerator` is something else, or uses FSDP, DeepSpeed or another parallelism.
        TypeError, ValueError, RuntimeError: see `thinwire.attach`.
    """
    _check(accelerator, "attach")
    thinwire.attach(model, optimizer, overlap=overlap, grad_scaler=accelerator.scaler)
    inner: WireOptimizer = unwrapped_optimizer(optimizer)
    _save_all_ranks(accelerator, model, inner)


def compress(accelerator: Accelerator, model: nn.Module, compressor: str = "int4", **options: Any) -> Compression:
    """Average the gradients of a model in compressed form, for any optimizer. All ranks call it, after `prepare`.

    It does what `thinwire.compress` does, with the accelerator's GradScaler. In addition, `accelerator.save_state`
    saves the residuals of all ranks, and what `attach` says.

    `DistributedDataParallelKwargs(comm_hook=...)` of Accelerate cannot do this: it offers hooks of torch only.

    Args:
        accelerator: the accelerator that has prepared the model.
        model: the model that `accelerator.prepare` returned.
        compressor: see `thinwire.compress`.
        **options: see `thinwire.compress`.

    Returns:
        See `thinwire.compress`. It is registered for checkpointing.

    Raises:
        TypeError: if `accelerator` is something else, or uses FSDP, DeepSpeed or another parallelism; or if `model` has
            not been prepared.
        TypeError, ValueError, RuntimeError: see `thinwire.compress`.
    """
    _check(accelerator, "compress")
    compression = thinwire.compress(model, compressor, grad_scaler=accelerator.scaler, **options)
    accelerator.register_for_checkpointing(compression)
    _save_all_ranks(accelerator, model, compression)
    return compression


def _check(accelerator: Accelerator, caller: str) -> None:
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"{caller}: accelerator is {type(accelerator).__name__}, expected accelerate.Accelerator: "
            f"thinwire.integrations.accelerate.{caller}(accelerator, model, ...)"
        )
    if accelerator.distributed_type not in _SUPPORTED:
        raise TypeError(
            f"{caller}: the accelerator uses {accelerator.distributed_type.value}, expected DistributedDataParallel. "
            "thinwire does not work with DeepSpeed, FSDP or other parallelisms of Accelerate"
        )


def _save_all_ranks(accelerator: Accelerator, model: nn.Module, owner: WireOptimizer | Compression) -> None:
    module = unwrapped_model(model)

    def path(directory: str) -> Path:
        return Path(directory) / f"thinwire_{accelerator.process_index}.bin"

    def prepared(models: list[nn.Module]) -> nn.Module:
        for model in models:
            if unwrapped_model(model) is module:
                return distributed_model(model)
        raise RuntimeError(
            f"the {type(module).__name__} that was given to thinwire.integrations.accelerate was never prepared, so "
            "its state would be missing: call accelerator.prepare(model, optimizer)"
        )

    def before_save(models: list[nn.Module], _: object, directory: str) -> None:
        prepared(models)
        owner.consolidate_state_dict()
        state = state_of_rank(module, accumulating=not accelerator.sync_gradients)
        torch.save(state, path(directory))

    def before_load(models: list[nn.Module], directory: str) -> None:
        if not path(directory).exists():
            warn_user(
                f"{directory} was saved without thinwire.integrations.accelerate: it has no {path(directory).name}. "
                "Training continues, but not as if it had never stopped."
            )
            return
        state = torch.load(path(directory), map_location="cpu", weights_only=True)
        at_next_forward(prepared(models), functools.partial(restore, module, state))

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
