"""The scheme `sign`: one bit per element and one scale per shard or block, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.codecs import Codec
from thinwire.compressors.codecs.block_sign import BlockSign, check_block
from thinwire.compressors.codecs.sign import Sign
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class SignScheme(Scheme):
    """EF-signSGD: the sign of each element and the mean magnitude of its shard, with residuals on both sides.

    S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi: "Error feedback fixes signSGD and other gradient compression
    schemes", ICML 2019.
    S. Zheng, Z. Huang, J. T. Kwok: "Communication-efficient distributed blockwise momentum SGD with error-feedback",
    NeurIPS 2019: compressed answers, and one scale per block.

    `c = e + g` becomes ‖c‖₁/d·sign(c), which loses 1 - ‖c‖₁²/(d·‖c‖²) of the squared norm. The sign of 0 is positive.

    Bits per value: 1 up and down, plus 32/block with blocks.
    Memory: residuals of 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: with Adam. Elements without a gradient receive ±s in turn, so their second moment is that of
    all others, and adaptive rates lose their meaning; `thinwire.OneBitAdam` avoids this. With rows that have no
    gradient, such as those of large embeddings.

    Differences from the papers: a scale per shard, which spans parameters, where Karimireddy et al. have one per layer;
    no momentum at workers, because the optimizer is the user's. Padding counts in d.

    Args:
        block: the number of elements that share a scale; None for one scale per shard.

    Raises:
        ValueError: if `block` is out of range.
    """

    block: int | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            check_block(self.block)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> Codec:
            return Sign(kernels) if self.block is None else BlockSign(self.block)

        return ErrorFeedback(layout, node, kernels, codec, codec)

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        bits = 1.0 if self.block is None else 1.0 + 32 / self.block
        return bits, bits
