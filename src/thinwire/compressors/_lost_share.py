"""The fraction of the squared norm that compression left out."""

from __future__ import annotations

import math

from torch import Tensor


class LostShare:
    """Sums over the parts of a message, such as its shards.

    Args:
        parts: how many there are.
    """

    def __init__(self, parts: int) -> None:
        self._wanted: list[float | Tensor] = [0.0] * parts
        self._left_out: list[float | Tensor] = [0.0] * parts

    def note(self, part: int, wanted: float | Tensor, left_out: float | Tensor) -> None:
        """Note the squared norm of a part, and that of what was left out of it. A tensor is read later."""
        self._wanted[part], self._left_out[part] = wanted, left_out

    def read(self) -> float:
        """The fraction over all parts; NaN if there was nothing to send."""
        wanted = math.fsum(map(float, self._wanted))
        left_out = math.fsum(max(float(part), 0.0) for part in self._left_out)
        return left_out / wanted if wanted > 0 else math.nan
