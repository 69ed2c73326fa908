"""Kernels for whole shards: the scale, from the sums of the runs, and words of a state that become zero."""

from __future__ import annotations

import math

from torch import Tensor

_WORD = 64


def shard_scale(sums: Tensor, which: Tensor, to: Tensor, also: Tensor | None, *, length: int) -> None:
    """The scale of a shard, from the rows `which` of `sums`, added up in double and in order; into `to`, and `also`.

    With one sum per run, of squares, it is the root of their mean over `length` elements. With three, it is the first
    over the third: the sum of magnitudes over the number of active elements. Zero if there are none.
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


def clear_words(state: Tensor, words: Tensor, *, first: int) -> None:
    """Zero the words of a state, counted from its word `first` on, that are marked in the bools `words`."""
    places = words.nonzero().flatten()
    if places.numel():
        state.view(-1, _WORD).index_fill_(0, places + first, 0.0)
