"""A run of `thinwire.LocalSteps` in a checkpoint: each rank has its own parameters, inner state and residuals."""

from __future__ import annotations

import copy
from typing import Any

from thinwire._unwrap import unwrapped_optimizer
from thinwire.checkpoint._optimizers import OPTIMIZER, Optimizers
from thinwire.local_steps import LocalSteps


class LocalRun(Optimizers):
    """See `Optimizers`. The state dict of this rank has everything, its parameters included.

    Args:
        local: the optimizer.
    """

    reshards = False

    def __init__(self, local: LocalSteps) -> None:
        self.local = local
        self.wire = local._first_averager()
        self.plain = None
        self.peers.check_initialized_first()

    @property
    def name(self) -> str:
        """See `Optimizers`."""
        return f"LocalSteps with {type(self.local.inner).__name__}"

    def check_saveable(self) -> None:
        """See `Optimizers`. `contents` waits for an exchange that is under way."""

    def check_loadable(self) -> None:
        """See `Optimizers`. An exchange under way is completed and discarded, on all ranks."""

    def contents(self) -> dict[str, Any]:
        """See `Optimizers`."""
        return {OPTIMIZER: self.local.state_dict()}

    def check_contents(self, contents: dict[str, Any]) -> None:
        """See `Optimizers`."""
        self.local.check_state_dict(contents[OPTIMIZER])

    def load(self, contents: dict[str, Any]) -> None:
        """See `Optimizers`."""
        self.local.load_state_dict(contents[OPTIMIZER])


class LocalSnapshot:
    """A copy of the state of a LocalSteps.

    Args:
        local: the optimizer.
    """

    def __init__(self, local: LocalSteps) -> None:
        self._local = local
        self._state = copy.deepcopy(local.state_dict())

    def restore(self) -> None:
        """Undo all changes since then."""
        self._local.load_state_dict(self._state)


def optimizers_of(optimizer: object, compression: object) -> Optimizers:
    """What a checkpoint holds besides the model, given the arguments of `save` and `load`.

    Raises:
        TypeError: if neither argument connects this rank to the others.
    """
    unwrapped = unwrapped_optimizer(optimizer)
    if isinstance(unwrapped, LocalSteps) and compression is None:
        return LocalRun(unwrapped)
    return Optimizers(optimizer, compression)
