"""Sums of gradients over this rank's slices, guarded against numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compressors._padding import padding_of
from thinwire.kernels.modes import Scale
from thinwire.kernels.ops import Kernels
from thinwire.transport.buffers import Part
from thinwire.transport.layout import Bucket, Layout
from thinwire.transport.memory import untouched_zeros


class GradientSums:
    """One float32 per element of this rank's slices. Its padding stays zero.

    Args:
        layout: the flat space.
        kernels: the backend.
    """

    def __init__(self, layout: Layout, kernels: Kernels) -> None:
        self._kernels = kernels
        self.flat = untouched_zeros(layout.own_size, torch.float32, layout.device)
        self._padding = padding_of(layout)
        # The kernel subtracts what receivers know of a value, here nothing, and writes the difference, here unused.
        longest = max((bucket.slice_elements for bucket in layout.buckets), default=0)
        self._nothing = untouched_zeros(longest, torch.float32, layout.device)
        self._unused = untouched_zeros(longest, torch.float32, layout.device)

    def add(self, part: Part, grad: Tensor | None, scale: Scale) -> bool | None:
        """Add a part of a gradient, times `scale`, except where the sum is not finite or reaches 2^60.

        Returns:
            Whether there was such an element; None if only the device knows.
        """
        if grad is None:
            return False
        bucket = part.frame.bucket
        first = bucket.own_start - bucket.state_shift
        return self._kernels.markov_difference(
            part.up_runs,
            grad,
            self.flat[first : first + bucket.slice_elements],
            self._nothing,
            self._unused,
            beta=1.0,
            weight=1.0,
            scale=scale,
            shift=bucket.own_start,
        )

    def shard(self, bucket: Bucket, row: int) -> Tensor:
        """The elements of one of this rank's shards of a bucket."""
        length = bucket.shard_elements
        first = bucket.own_start - bucket.state_shift + row * length
        return self.flat[first : first + length]

    def clear_padding(self, bucket: Bucket, row: int) -> None:
        """Zero the padding of a shard, for codecs that decode zeros as something else."""
        padding = self._padding[bucket.shard_number(bucket.own_shards[row])]
        self.shard(bucket, row).index_fill_(0, padding, 0.0)
