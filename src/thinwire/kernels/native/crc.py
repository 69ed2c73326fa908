"""The kernel of checksums, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib


def crc32c(data: Tensor, crc: int = 0) -> int:
    """See `reference.crc32c`."""
    arguments.crc32c(data, crc)
    return lib().thinwire_crc32c(data.data_ptr(), data.numel(), crc)
