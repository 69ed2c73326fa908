"""What a worker has not sent yet, through changes of the members of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.optimizers.reshard import end_of, ranges_of
from thinwire.outer.averager import OuterAverager

RESIDUAL, ANSWER_RESIDUAL = "residual", "answer_residual"
"""The names in the state of a compressor: what packets leave out, and what the answers of an owner leave out."""


@dataclass(frozen=True)
class _Owned:
    """What the answers of an owner have left out, of the shards that it owned as one of some workers."""

    values: Tensor
    ranges: list[tuple[slice, slice]]
    place: tuple[int, int]
    """The rank, and the number of ranks, on which the ranges depend."""


class ErrorMemory:
    """The residuals of one worker for one fragment, as they were before an exchange.

    With n workers, parameters are still to receive the mean of the workers' residuals e_i, and the residual ē of the
    owner of each shard. A worker keeps its e_i when the members change. Which shards it owns depends on their number,
    and ē may not get lost with the ownership. So if rank or number have changed, a worker adds n·ē to its own residual,
    with the new n: it then enters the next mean with the weight that it had. Nothing has to be sent for this.

    A worker that is alone sends nothing and leaves nothing out. It keeps what it has until there are others again.
    """

    def __init__(self) -> None:
        self._residual: Tensor | None = None
        self._owned: _Owned | None = None

    def clear(self) -> None:
        """Forget everything: a new worker has nothing left to send."""
        self._residual = self._owned = None

    @torch.no_grad()
    def save(self, averager: OuterAverager) -> None:
        """Copy the residuals of an averager."""
        state, layout, peers = averager._flat_state, averager._session.layout, averager._peers
        if RESIDUAL not in state.own:
            return
        residual = state.own[RESIDUAL][: end_of(layout)]
        self._residual = residual.clone() if self._residual is None else self._residual.copy_(residual)
        self._owned = None
        if ANSWER_RESIDUAL in state.owned:
            ranges = list(ranges_of(layout, averager._topology.node))
            self._owned = _Owned(state.owned[ANSWER_RESIDUAL].clone(), ranges, (peers.rank, peers.size))

    @torch.no_grad()
    def restore(self, averager: OuterAverager) -> None:
        """Copy them into another averager of the same fragment, which has not exchanged anything yet."""
        state, layout, peers = averager._flat_state, averager._session.layout, averager._peers
        if self._residual is None or RESIDUAL not in state.own:
            return
        residual = state.own[RESIDUAL]
        residual[: end_of(layout)] = self._residual
        if self._owned is None:
            return
        if self._owned.place == (peers.rank, peers.size):
            state.owned[ANSWER_RESIDUAL].copy_(self._owned.values)
            return
        for of_space, of_state in self._owned.ranges:
            residual[of_space] += self._owned.values[of_state] * float(peers.size)
