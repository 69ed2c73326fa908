"""Continues saved runs on other ranks, without checkpoints on disk."""

from __future__ import annotations

from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.optimizers.reshard import Policy, SavedRun, load, read


def adopt(optimizer: WireOptimizer, run: SavedRun, how: Policy) -> None:
    """Continue a saved run, as `thinwire.checkpoint.load` does after it has read the model."""
    load(optimizer, read(optimizer, run, how))
