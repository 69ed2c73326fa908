"""The model in a checkpoint: its state dict, and whether it fits a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire._torch_compat import loads_state_by_default
from thinwire.checkpoint._files import damaged

_MOST_LISTED = 8
"""How many differences an error lists; it counts the others."""


def check_model(model: object) -> None:
    """Reject what cannot be saved as one model.

    Raises:
        TypeError: if it is not a module, or if this rank has only shards of its parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    sharded = [name for name, p in model.named_parameters() if _is_sharded(p)]
    if sharded:
        raise TypeError(
            f"model has sharded parameters, such as {sharded[0]!r}, of which each rank has a part: save the model and "
            "its optimizer with torch.distributed.checkpoint, and the state_dict() of the compression on every rank"
        )


def _is_sharded(p: torch.Tensor) -> bool:
    if not hasattr(p, "__tensor_flatten__"):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and only models with such parameters need it

    return isinstance(p, DTensor)


def private_state(module: nn.Module) -> dict[str, Any]:
    """The entries of the state dict that may differ between ranks that are synchronized: buffers."""
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in shared}


def checked_model(path: Path, contents: Any) -> dict[str, Any]:
    """The contents of the model's file.

    Raises:
        CorruptCheckpoint: if they are not a state dict.
    """
    if not isinstance(contents, dict) or not all(isinstance(name, str) for name in contents):
        raise damaged(path, "is not the state dict of a model")
    return contents


def check_model_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Check that a module has exactly the entries of a state dict, with their shapes and dtypes.

    A module with its own hooks or methods for loading is not checked, because they may rename and convert entries.

    Raises:
        RuntimeError: listing the differences.
    """
    if not loads_state_by_default(module):
        return
    own = module.state_dict()
    complaints = []
    for what, names in (("Missing", own.keys() - state.keys()), ("Unexpected", state.keys() - own.keys())):
        if names:
            complaints.append(f"{what} key(s) in state_dict: {_shortened(sorted(map(repr, names)))}")
    differing = []
    for name in own.keys() & state.keys():
        ours, theirs = _description(own[name]), _description(state[name])
        if isinstance(own[name], torch.Tensor) and ours != theirs:
            differing.append(f"{name!r} is {theirs} in the checkpoint, {ours} in the model")
    if differing:
        complaints.append(_shortened(sorted(differing)))
    if complaints:
        raise RuntimeError(
            f"the checkpoint is of another model than this {type(module).__name__}: {'; '.join(complaints)}"
        )


def _description(value: object) -> str:
    """The properties that two tensors must share for one to be copied into the other without conversion."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = "" if value.layout == torch.strided else f", {value.layout}"
    where = ", without values" if value.is_meta else ""
    return f"{tuple(value.shape)} of {value.dtype}{kind}{where}"


def _shortened(items: list[str]) -> str:
    more = len(items) - _MOST_LISTED
    return ", ".join(items[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
