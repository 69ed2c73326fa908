"""What is in the files: the model, and what each rank has of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint._files import damaged
from thinwire.optimizers._base import WireOptimizer

Contents = dict[str, Any]


def bare(model: nn.Module) -> nn.Module:
    """The module itself, whatever DistributedDataParallel and torch.compile have wrapped around it."""
    while True:
        compiled = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled, nn.Module):
            model = compiled
        else:
            return model


def of_rank(model: nn.Module, optimizer: WireOptimizer, extra: dict[str, Any]) -> Contents:
    """What this rank saves.

    Raises:
        RuntimeError: between backward and `step()`.
    """
    return {
        "optimizer": optimizer.state_dict(),
        "model": _own_part(model, synchronized=optimizer.is_synchronized),
        "random": _random_states(model),
        "extra": extra,
    }


def _own_part(model: nn.Module, *, synchronized: bool) -> Contents:
    """The entries of the model's state in which ranks may differ: buffers, and between synchronisations all of it."""
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} if synchronized else set()
    return {name: value for name, value in model.state_dict().items() if name not in shared}


def _random_states(model: nn.Module) -> Contents:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices(model)],
    }


def restore_random_states(model: nn.Module, states: Contents) -> None:
    """Go on drawing random numbers where the saved run would have."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    # The devices of the model, in order: after a restart they may have other numbers.
    for device, state in zip(_cuda_devices(model), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(devices, key=lambda device: device.index or 0)


_PARTS = {"optimizer": dict, "model": dict, "random": dict, "extra": dict}
_OF_OPTIMIZER = {"state": dict, "param_groups": list}
_OF_RANDOM = {"torch": torch.Tensor, "python": tuple, "cuda": list}


def checked_rank(path: Path, contents: Any) -> Contents:
    """What a rank's file holds, if it has the parts that such a file has.

    Raises:
        CorruptCheckpoint: when it has not.
    """
    if not (
        _has(contents, _PARTS)
        and _has(contents["optimizer"], _OF_OPTIMIZER)
        and all(isinstance(group, dict) for group in contents["optimizer"]["param_groups"])
        and _has(contents["random"], _OF_RANDOM)
    ):
        raise damaged(path, "is not the file of a rank")
    return contents


def checked_model(path: Path, contents: Any) -> Contents:
    """What the model's file holds, if it is a state dict.

    Raises:
        CorruptCheckpoint: when it is not.
    """
    if not isinstance(contents, dict) or not all(isinstance(name, str) for name in contents):
        raise damaged(path, "is not the state dict of a model")
    return contents


def _has(contents: Any, parts: dict[str, type]) -> bool:
    return isinstance(contents, dict) and all(isinstance(contents.get(name), kind) for name, kind in parts.items())
