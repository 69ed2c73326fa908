"""What is in the files: the model, and what each rank has of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.checkpoint._files import damaged
from thinwire.optimizers.optimizer import WireOptimizer

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
        "random": random_states(model),
        "extra": extra,
    }


def _own_part(model: nn.Module, *, synchronized: bool) -> Contents:
    """The entries of the model's state in which ranks may differ: buffers, and between synchronisations all of it."""
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} if synchronized else set()
    return {name: value for name, value in model.state_dict().items() if name not in shared}


def random_states(model: nn.Module) -> Contents:
    """Where torch, on the CPU and on the model's GPUs, and Python are in drawing random numbers."""
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


def check_random_states(model: nn.Module, states: Contents) -> None:
    """See that `restore_random_states` will not fail, by giving the states to generators that nobody uses.

    Raises:
        ValueError: naming the one that is wrong.
    """
    devices = [torch.device("cpu"), *_cuda_devices(model)]
    for device, state in zip(devices, [states["torch"], *states["cuda"]], strict=False):
        try:
            torch.Generator(device).set_state(state)
        except Exception as error:  # of many kinds: of its type, shape, dtype, layout or contents
            raise ValueError(f"the random state of torch for {str(device)!r} cannot be restored: {error}") from error
    try:
        random.Random().setstate(states["python"])
    except Exception as error:
        raise ValueError(f"the random state of Python cannot be restored: {error}") from error


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(devices, key=lambda device: device.index or 0)


def check_model_state(module: nn.Module, state: Contents) -> None:
    """See that a model has the entries of a state dict, with their shapes and dtypes.

    A model with hooks or methods of its own for loading is not checked: they may rename entries and convert them.

    Raises:
        RuntimeError: naming those that differ.
    """
    if not _loads_as_torch_does(module):
        return
    own = module.state_dict()
    complaints = []
    for what, names in (("Missing", own.keys() - state.keys()), ("Unexpected", state.keys() - own.keys())):
        if names:
            complaints.append(f"{what} key(s) in state_dict: {_few(sorted(map(repr, names)))}")
    differing = []
    for name in own.keys() & state.keys():
        ours, theirs = _form(own[name]), _form(state[name])
        if isinstance(own[name], torch.Tensor) and ours != theirs:
            differing.append(f"{name!r} is {theirs} in the checkpoint, {ours} in the model")
    if differing:
        complaints.append(_few(sorted(differing)))
    if complaints:
        raise RuntimeError(
            f"the checkpoint is of another model than this {type(module).__name__}: {'; '.join(complaints)}"
        )


def _loads_as_torch_does(module: nn.Module) -> bool:
    return type(module).load_state_dict is nn.Module.load_state_dict and not any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        for part in module.modules()
    )


def _form(value: object) -> str:
    """What must be the same of two tensors for one to be copied into the other as it is."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = "" if value.layout == torch.strided else f", {value.layout}"
    where = ", without values" if value.is_meta else ""
    return f"{tuple(value.shape)} of {value.dtype}{kind}{where}"


def _few(items: list[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


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
