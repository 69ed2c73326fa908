"""The scheme `dct_topk`: the largest cosine coefficients of each chunk, as DeMo sends its momentum."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compressors.codecs._entries import bits_per_value
from thinwire.compressors.codecs.dct_topk import VALUE_BITS, DctTopK, check_entries
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import Layout


@dataclass(frozen=True)
class DctTopKScheme(Scheme):
    """The k largest coefficients of the cosine transform of each chunk of 64 x 64, and a residual that is a momentum.

    B. Peng, L. Chen, B. Su, J. Quesnelle, D. P. Kingma, Q. Liu: "DeMo: decoupled momentum optimization", arXiv
    2411.19870, 2024.

    With `residual_decay=β` and `thinwire.SignSGD` this is DeMo, in its form with signs::

        thinwire.compress(model, "dct_topk", residual_decay=0.999)
        opt = thinwire.SignSGD(model.parameters(), lr=1e-3)

        m ← β·m + g,  q = the k largest of DCT(m),  m ← m - IDCT(q)     the residual of each worker
        x ← (1 - lr·λ)·x - lr·sign(mean of IDCT(q))

    What is common to neighbours in a matrix is in few coefficients, so it is sent soon; the rest waits in the residual,
    and fades with β.

    Bits per value: (20·k + 32)/4096 up and down; 0.16 for k = 32.
    Memory: residuals of 4 bytes per element at the workers, and 4/n at the owners.

    When not to use it: on fast links, because two products of 64 x 64 matrices in float64 per chunk and transform take
    longer than forward and backward of a small model. With models of few thousand parameters, whose shards fill no
    chunk.

    Differences from the paper: chunks are 4,096 neighbours in the flat space, as 64 rows; in the paper, blocks of 64 x
    64 of each matrix, or less where a side is no multiple of 64. Coefficients have 8 bits, and rounding stays in the
    residual; the authors send floats, and indices of 64 bits. The owner answers with the k largest coefficients of the
    mean, and keeps the rest in a residual with the same decay; in the paper all workers receive all packets. The
    gradient is added as it is; the authors' code multiplies it by the learning rate first, which matters while a
    schedule changes the rate within 1/(1 - β) steps.

    Args:
        k: the number of coefficients that is sent of each chunk, an even number up to 4096.

    Raises:
        ValueError: if `k` is out of range.
    """

    k: int = 32

    def __post_init__(self) -> None:
        check_entries(self.k)

    def bind(self, layout: Layout, node: int, kernels: Kernels) -> ErrorFeedback:
        """See `Scheme`."""

        def codec() -> DctTopK:
            return DctTopK(self.k)

        return ErrorFeedback(layout, node, kernels, codec, codec)

    def bits_per_value(self, workers: int) -> tuple[float, float]:
        """See `Scheme`."""
        bits = bits_per_value(self.k, VALUE_BITS)
        return bits, bits
