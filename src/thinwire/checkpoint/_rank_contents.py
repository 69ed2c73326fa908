"""The contents of a rank's file: optimizer state, private part of the model, random states, and the user's `extra`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.checkpoint._files import damaged
from thinwire.checkpoint._model import private_state
from thinwire.checkpoint._random_states import random_states
from thinwire.optimizers.optimizer import WireOptimizer

_PARTS = {"optimizer": dict, "model": dict, "random": dict, "extra": dict}
_OPTIMIZER_PARTS = {"state": dict, "param_groups": list}
_RANDOM_PARTS = {"torch": torch.Tensor, "python": tuple, "cuda": list}


def rank_contents(module: nn.Module, optimizer: WireOptimizer, extra: dict[str, Any]) -> dict[str, Any]:
    """What this rank saves.

    Raises:
        RuntimeError: between backward and `step()`.
    """
    return {
        "optimizer": optimizer.state_dict(),
        "model": private_state(module, synchronized=optimizer.is_synchronized),
        "random": random_states(module),
        "extra": extra,
    }


def checked_rank(path: Path, contents: Any) -> dict[str, Any]:
    """The contents of a rank's file.

    Raises:
        CorruptCheckpoint: if a part is missing or has the wrong type.
    """
    if not (
        _has_parts(contents, _PARTS)
        and _has_parts(contents["optimizer"], _OPTIMIZER_PARTS)
        and all(isinstance(group, dict) for group in contents["optimizer"]["param_groups"])
        and _has_parts(contents["random"], _RANDOM_PARTS)
    ):
        raise damaged(path, "is not the file of a rank")
    return contents


def _has_parts(contents: Any, parts: dict[str, type]) -> bool:
    return isinstance(contents, dict) and all(isinstance(contents.get(name), kind) for name, kind in parts.items())
