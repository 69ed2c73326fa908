"""The kernels of CD-Adam's messages, scaled signs of what changed, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels import arguments
from thinwire.kernels.modes import LARGEST
from thinwire.kernels.native.library import lib, pointer, typed


def markov_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    said: Tensor,
    busy: Tensor,
    spoke: Tensor,
    active: Tensor,
    packets: Tensor,
    *,
    sent_scales: Tensor,
    sums: Tensor,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
    mode: int,
    largest: float = LARGEST,
) -> bool:
    """See `reference.markov_encode`."""
    bounds = arguments.markov_encode(runs, grad, m, known, said, busy, spoke, active, packets, sent_scales, sums, shift)
    return bool(
        lib().thinwire_markov_encode(
            *bounds.table,
            *typed(grad),
            pointer(m),
            known.data_ptr(),
            shift,
            said.data_ptr(),
            busy.data_ptr(),
            spoke.data_ptr(),
            active.data_ptr(),
            packets.data_ptr(),
            sent_scales.data_ptr(),
            sums.data_ptr(),
            beta,
            weight,
            scale,
            largest,
            mode,
        )
    )


def markov_merge(
    runs: Tensor,
    rows: Tensor,
    mean: Tensor,
    g: Tensor,
    active: Tensor,
    answer: Tensor,
    *,
    scales: Tensor,
    sums: Tensor,
    shift: int,
) -> None:
    """See `reference.markov_merge`."""
    bounds = arguments.markov_merge(runs, rows, mean, g, active, answer, scales, sums, shift)
    lib().thinwire_markov_merge(
        *bounds.table,
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        mean.data_ptr(),
        shift,
        g.data_ptr(),
        active.data_ptr(),
        answer.data_ptr(),
        scales.data_ptr(),
        sums.data_ptr(),
    )


def markov_difference(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    c: Tensor,
    *,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
    largest: float = LARGEST,
) -> bool:
    """See `reference.markov_difference`."""
    bounds = arguments.markov_difference(runs, grad, m, known, c, shift)
    return bool(
        lib().thinwire_markov_difference(
            *bounds.table,
            *typed(grad),
            pointer(m),
            known.data_ptr(),
            c.data_ptr(),
            shift,
            beta,
            weight,
            scale,
            largest,
        )
    )
