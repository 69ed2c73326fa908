"""The contents of a rank's file: states of optimizers, the private part of the model, random states and `extra`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.checkpoint._files import damaged
from thinwire.checkpoint._model import private_state
from thinwire.checkpoint._optimizers import Optimizers
from thinwire.checkpoint._random_states import random_states

_PARTS = {"model": dict, "random": dict, "extra": dict}
_STATE_DICT_PARTS = {"state": dict, "param_groups": list}
_RANDOM_PARTS = {"torch": torch.Tensor, "python": tuple, "cuda": list}


def rank_contents(module: nn.Module, optimizers: Optimizers, extra: dict[str, Any]) -> dict[str, Any]:
    """What this rank saves.

    Raises:
        RuntimeError: while an exchange is under way.
    """
    return {
        **optimizers.contents(),
        "model": private_state(module),
        "random": random_states(module),
        "extra": extra,
    }


def checked_rank(path: Path, contents: Any, optimizers: Optimizers) -> dict[str, Any]:
    """The contents of a rank's file.

    Raises:
        CorruptCheckpoint: if a part is missing or has the wrong type.
    """
    if not (
        _has_parts(contents, _PARTS)
        and all(_is_state_dict(contents.get(part)) for part in optimizers.parts)
        and _has_parts(contents["random"], _RANDOM_PARTS)
    ):
        raise damaged(path, "is not the file of a rank")
    return contents


def _is_state_dict(contents: Any) -> bool:
    return _has_parts(contents, _STATE_DICT_PARTS) and all(isinstance(each, dict) for each in contents["param_groups"])


def _has_parts(contents: Any, parts: dict[str, type]) -> bool:
    return isinstance(contents, dict) and all(isinstance(contents.get(name), kind) for name, kind in parts.items())
