"""The scales of blocks, from the sums of their runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class BlockScales:
    """Computes the scales of some blocks at once, as the kernel `shard_scale` computes that of a shard.

    There may be many blocks, and each has few numbers, so torch adds up one run of every block at a time.

    Args:
        rows: for each block, the rows of the sums of its runs, in order.
        lengths: the number of elements of each block, without padding.
        zero: a row of the sums that is always zero. It fills up the blocks with fewer runs than others.
        device: of the sums.
    """

    def __init__(self, rows: Sequence[Sequence[int]], lengths: Sequence[int], zero: int, device: torch.device) -> None:
        most = max(map(len, rows), default=0)
        table = [[*block, *[zero] * (most - len(block))] for block in rows]
        which = torch.tensor(table, dtype=torch.int64, device=device).view(len(rows), most)
        self._columns = which.t().contiguous().unbind()
        # A block of nothing but padding has no sums, and its scale is zero.
        self._lengths = torch.tensor(lengths, dtype=torch.float64, device=device).clamp(min=1)

    def write(self, sums: Tensor, to: Tensor, also: Tensor | None = None) -> None:
        """Write the root of the mean of squares of each block into `to`, and `also`."""
        totals = torch.zeros_like(self._lengths)
        for rows in self._columns:
            totals += sums[rows, 0]
        scales = (totals / self._lengths).sqrt_()
        to.copy_(scales.view(to.shape))
        if also is not None:
            also.copy_(to)
