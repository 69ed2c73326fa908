"""The residuals of `thinwire.compress` in the state dict of the user's optimizer.

Frameworks save the state dict of the optimizer, wherever and whenever they like, and load it on every rank. torch lets
a hook add an entry to it and take it out again. So the residuals of all ranks are in the same file as the optimizer,
and are loaded with it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from thinwire._callers import warn_user
from thinwire.averaging.handle import Compression

ENTRY = "thinwire"


class Residuals:
    """Adds the residuals of all ranks to the state dict of an optimizer, and loads them with it."""

    def __init__(self) -> None:
        self._compression: Compression | None = None
        self._followed: weakref.ref[Optimizer] | None = None
        """The optimizer with whose state they travel."""
        self._gathered: dict[str, Any] | None = None
        """What `gather` found on rank 0, until the next step."""
        self._loaded: dict[str, Any] | None = None
        """Residuals that were loaded before there was a compression."""

    def follow(self, optimizer: Optimizer) -> None:
        """Travel with the state of this optimizer, from now on."""
        if self._followed is not None and self._followed() is optimizer:
            return
        self._followed = weakref.ref(optimizer)
        optimizer.register_state_dict_post_hook(self._add)
        optimizer.register_load_state_dict_pre_hook(self._take_out)
        optimizer.register_step_post_hook(self._forget)

    def belong_to(self, compression: Compression) -> None:
        """Continue with loaded residuals, if there are any, and save those of this compression from now on."""
        self._compression = compression
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            compression.load_state_dict(loaded)

    def gather(self) -> None:
        """Gather the residuals of all ranks for the next `state_dict()` on rank 0. All ranks call it, after a step."""
        if self._compression is not None:
            self._compression.consolidate_state_dict()
            self._gathered = self._compression.state_dict() if dist.get_rank() == 0 else None

    def _add(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        if self._gathered is not None:
            state_dict[ENTRY] = self._gathered

    def _take_out(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        residuals = state_dict.get(ENTRY)
        if residuals is None:
            if state_dict["state"]:
                warn_user(
                    "the optimizer's state has no residuals of thinwire.compress: it was saved without them. Training "
                    "continues, but not as if it had never stopped."
                )
        elif self._compression is None:
            self._loaded = residuals
        else:
            self._compression.load_state_dict(residuals)
        return {name: value for name, value in state_dict.items() if name != ENTRY}

    def _forget(self, *_: object) -> None:
        self._gathered = None
