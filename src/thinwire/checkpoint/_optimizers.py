"""The optimizers of a run: a thinwire optimizer, or any optimizer whose gradients a compression averages."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from thinwire._unwrap import unwrapped_optimizer
from thinwire.averaging.handle import Compression
from thinwire.optimizers import state_dict as state_dicts
from thinwire.optimizers.inputs import make_plain
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport.peers import Peers

OPTIMIZER = "optimizer"
"""The part of a rank's file with the state dict of the optimizer."""
COMPRESSION = "compression"
"""The part with the state dict of the compression, if there is one."""


class Optimizers:
    """What a checkpoint holds besides the model, and what connects the ranks.

    Args:
        optimizer: a thinwire optimizer; with a compression, any other optimizer. A framework may have wrapped it.
        compression: what `thinwire.compress` returned; None for a thinwire optimizer.

    Raises:
        TypeError: if neither argument connects this rank to the others, or if the optimizer has sharded parameters.
    """

    reshards = True
    """Whether a run can continue on other ranks."""

    def __init__(self, optimizer: object, compression: object) -> None:
        optimizer = unwrapped_optimizer(optimizer)
        # Raised on this rank alone: the arguments are what connects it to the others.
        if compression is None and not isinstance(optimizer, WireOptimizer):
            raise TypeError(
                f"optimizer is {_class(optimizer)}, expected a thinwire optimizer, for example thinwire.Birder. For "
                "any other optimizer also pass compression=, the object that thinwire.compress returned"
            )
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(
                f"compression is {_class(compression)}, expected the object that thinwire.compress returned, or None "
                "for a thinwire optimizer"
            )
        self.wire: WireOptimizer = optimizer if compression is None else compression._averager  # type: ignore[assignment]
        """Each rank has its own state of it: the thinwire optimizer, or the averager behind the compression."""
        self.plain: Optimizer | None = None if compression is None else optimizer  # type: ignore[assignment]
        """The optimizer that follows the compression. All ranks have the same state of it."""
        if self.wire._sharding is not None:
            raise TypeError(
                f"optimizer is {_class(optimizer)} with sharded parameters (FSDP2), which thinwire.checkpoint cannot "
                "save or load. Use get_state_dict, set_state_dict, save and load of torch.distributed.checkpoint"
            )
        self.peers.check_initialized_first()

    @property
    def peers(self) -> Peers:
        """The ranks of the run."""
        return self.wire._peers

    @property
    def name(self) -> str:
        """What a manifest calls them."""
        return type(self.wire).__name__ if self.plain is None else f"{type(self.plain).__name__} with thinwire.compress"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a rank's file that have their state dicts."""
        return (OPTIMIZER,) if self.plain is None else (OPTIMIZER, COMPRESSION)

    def check(self) -> None:
        """Reject an optimizer that does not go with a compression.

        Raises:
            TypeError: naming its class.
        """
        if isinstance(self.plain, WireOptimizer):
            raise TypeError(
                f"optimizer is {_class(self.plain)}, which exchanges gradients itself, but a compression is given. "
                "Pass the optimizer that follows thinwire.compress; or a thinwire optimizer without compression="
            )
        if self.plain is not None and not isinstance(self.plain, Optimizer):
            raise TypeError(f"optimizer is {_class(self.plain)}, expected a torch.optim.Optimizer")

    # Saving and loading ----------------------------------------------------------------------------------------------

    def check_saveable(self) -> None:
        """Check that no exchange is under way.

        Raises:
            RuntimeError: if one is.
        """
        state_dicts.check_saveable(self.wire)

    def check_loadable(self) -> None:
        """Check that no exchange is under way.

        Raises:
            RuntimeError: if one is.
        """
        if any(self.wire._session.encoded):
            raise RuntimeError(
                f"checkpoint.load() {self.wire._exchange_time}: gradients of this step have been sent already. Load "
                "before backward, or after step()"
            )

    def contents(self) -> dict[str, Any]:
        """Their parts of this rank's file.

        Raises:
            RuntimeError: while an exchange is under way.
        """
        own = self.wire._state_of_this_rank()
        if self.plain is None:
            return {OPTIMIZER: own}
        saved = self.plain.state_dict()
        for group in saved["param_groups"]:
            make_plain(group)
        return {OPTIMIZER: saved, COMPRESSION: own}

    def wire_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        """From the contents of a rank's file, the state that each rank has of its own."""
        return contents[self.parts[-1]]

    def check_contents(self, contents: dict[str, Any]) -> None:
        """Check that `load` will accept the contents of this rank's file, as far as it is known before.

        Raises:
            ValueError: if a part is of another optimizer, run or rank, or has values that no run can have saved.
        """
        state_dicts.check(self.wire, self.wire_state(contents))
        self.check_plain(contents)

    def check_plain(self, contents: dict[str, Any]) -> None:
        """The same for the state that all ranks have in common. torch checks some of it, but only while it loads."""
        if self.plain is not None:
            _check_plain(self.plain, contents[OPTIMIZER])

    def load(self, contents: dict[str, Any]) -> None:
        """Continue with the contents of this rank's file."""
        self.wire.load_state_dict(self.wire_state(contents))
        self.load_plain(contents)

    def load_plain(self, contents: dict[str, Any]) -> None:
        """Load the state that all ranks have in common, from the contents of any rank's file.

        Raises:
            ValueError: if a parameter group lacks a hyper-parameter.
        """
        if self.plain is None:
            return
        self.plain.load_state_dict(contents[OPTIMIZER])
        # Only now: an optimizer may have added what an older version of it did not save.
        for i, group in enumerate(self.plain.param_groups):
            missing = sorted(self.plain.defaults.keys() - group.keys())
            if missing:
                raise ValueError(f"parameter group {i} of the saved optimizer lacks {', '.join(map(repr, missing))}")


def _check_plain(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    states, groups = saved["state"], saved["param_groups"]
    for i, group in enumerate(groups):
        params = group.get("params")
        if not isinstance(params, list) or not all(type(each) is int for each in params):
            raise ValueError(f"parameter group {i} of the saved optimizer has no list of the numbers of its parameters")
    saved_sizes, sizes = ([len(group["params"]) for group in of] for of in (groups, optimizer.param_groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"the saved optimizer has parameter groups of {saved_sizes} parameters, this {type(optimizer).__name__} "
            f"of {sizes}"
        )
    for number in [each for group in groups for each in group["params"]]:
        if not isinstance(states.get(number, {}), dict):
            kind = type(states[number]).__name__
            raise ValueError(f"the state of parameter {number} of the saved optimizer is {kind}, expected a dict")


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"
