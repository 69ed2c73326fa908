"""The kernels that pick the largest values and add to the places that were picked, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.native.library import lib


def top_k(values: Tensor, indices: Tensor, scratch: Tensor) -> None:
    """See `reference.top_k`."""
    arguments.top_k(values, indices, scratch)
    lib().thinwire_top_k(values.data_ptr(), values.numel(), indices.numel(), indices.data_ptr(), scratch.data_ptr())


def sparse_add(values: Tensor, indices: Tensor, amounts: Tensor, *, weight: float) -> bool:
    """See `reference.sparse_add`."""
    arguments.sparse_add(values, indices, amounts)
    return bool(
        lib().thinwire_sparse_add(
            values.data_ptr(), values.numel(), indices.data_ptr(), amounts.data_ptr(), indices.numel(), weight
        )
    )
