"""The kernel of checksums, called in the library."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.native.library import lib


def crc32c(data: Tensor, crc: int = 0) -> int:
    """See `reference.crc32c`."""
    assert data.dtype == torch.uint8
    assert data.dim() == 1
    assert data.is_contiguous()
    assert 0 <= crc < 2**32  # ctypes would take the lowest bits of anything
    return lib().thinwire_crc32c(data.data_ptr(), data.numel(), crc)
