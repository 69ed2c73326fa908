"""What is done for a whole shard: its scale, from the sums of its runs, and words of a state that are forgotten."""

from __future__ import annotations

import math

from torch import Tensor

_WORD = 64


def shard_scale(sums: Tensor, which: Tensor, to: Tensor, also: Tensor | None, *, length: int) -> None:
    """The scale of a shard, from the rows `which` of `sums`, added up in double and in order; into `to`, and `also`.

    With one sum a run, of squares, it is the root of their mean over `length` elements. With three, it is the first
    over the third: of magnitudes, over the number of those that live. Zero, where there are none.
    """
    totals = [0.0] * sums.shape[1]
    for row in sums[which].tolist():
        totals = [total + value for total, value in zip(totals, row, strict=True)]
    if len(totals) == 1:
        scale = math.sqrt(totals[0] / length) if length else 0.0
    else:
        scale = totals[0] / totals[2] if totals[2] else 0.0
    to.fill_(scale)
    if also is not None:
        also.fill_(scale)


def forget(state: Tensor, words: Tensor, *, first: int) -> None:
    """Zero those words of a state, counted from its word `first` on, that are marked in `words`, which are bools."""
    places = words.nonzero().flatten()
    if places.numel():
        state.view(-1, _WORD).index_fill_(0, places + first, 0.0)
