"""What `thinwire.compress` returns: the state and the metrics of compressed averaging."""

from __future__ import annotations

from typing import Any

from thinwire.averaging.averager import GradientAverager
from thinwire.metrics import Metrics


class Compression:
    """The compressed averaging of a model's gradients, as `thinwire.compress` returns it, to save and to measure.

    It stays active as long as the model exists, whether or not you keep this object.

    Args:
        averager: averages the gradients.
    """

    def __init__(self, averager: GradientAverager) -> None:
        self._averager = averager

    def metrics(self) -> Metrics:
        """The bytes, times and counters of this rank since the start. A step is one exchange: a backward that
        synchronizes. `contraction` is the squared relative error of this rank's last message."""
        return self._averager.metrics()

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, in the form of an optimizer's state dict.

        Each rank has its own, so every rank must save, unless `consolidate_state_dict` was called. With several ranks,
        an entry under which each rank has its own values is a dict: `{"rank1": tensor}`. torch.distributed.checkpoint
        therefore saves the tensors of all ranks if this object is among the states that you save.

        Raises:
            RuntimeError: during backward.
        """
        return self._averager.state_dict()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the residuals of all ranks on rank `to`, as `thinwire.Birder.consolidate_state_dict` does."""
        self._averager.consolidate_state_dict(to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with residuals that `state_dict()` returned on the same rank of a run with as many ranks. Call it on
        all ranks, between two backward passes. The next backward compares the states of all ranks again.

        A compressor or options other than those that were saved give a RuntimeWarning if the residuals fit.

        Raises:
            TypeError: if it is not a dict.
            ValueError: if they are of another rank, number of ranks or topology, or do not fit the model or the
                compressor. Nothing has changed then.
        """
        self._averager.load_state_dict(state_dict)

    @property
    def is_synchronized(self) -> bool:
        """Whether `.grad` has had the average of every backward. With `delay=1` that of the last one is in flight."""
        return self._averager.is_synchronized

    def synchronize(self) -> None:
        """With `delay=1`, wait for the average of the last backward, and write it into `.grad`.

        Take one more `step()` of your optimizer then, before you evaluate, or at the end of training. The next backward
        gives zeros, as the first one did. Call it on all ranks, after `step()`: it replaces what `.grad` holds. It does
        nothing if nothing is in flight, or if a gradient was not finite. To save and resume it is not needed: the
        average is part of the state.

        Raises:
            RuntimeError: during backward.
            PeerLost, CorruptPacket: if the exchange has failed.
        """
        self._averager.synchronize()

    def close(self) -> None:
        """End threads and connections. The model can take no more steps."""
        self._averager.close()
