"""The kernels of CD-Adam's messages, scaled signs of what changed, called in the library."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.native.library import lib, pointer, table, typed


def markov_encode(
    runs: Tensor,
    grad: Tensor | None,
    m: Tensor | None,
    known: Tensor,
    said: Tensor,
    busy: Tensor,
    spoke: Tensor,
    alive: Tensor,
    packets: Tensor,
    *,
    sent_scales: Tensor,
    sums: Tensor,
    beta: float,
    weight: float,
    scale: float,
    shift: int,
    mode: int,
) -> bool:
    """See `reference.markov_encode`."""
    return bool(
        lib().thinwire_markov_encode(
            *table(runs),
            *typed(grad),
            pointer(m),
            known.data_ptr(),
            shift,
            said.data_ptr(),
            busy.data_ptr(),
            spoke.data_ptr(),
            alive.data_ptr(),
            packets.data_ptr(),
            sent_scales.data_ptr(),
            sums.data_ptr(),
            beta,
            weight,
            scale,
            mode,
        )
    )


def markov_merge(
    runs: Tensor,
    rows: Tensor,
    mean: Tensor,
    g: Tensor,
    alive: Tensor,
    answer: Tensor,
    *,
    scales: Tensor,
    sums: Tensor,
    shift: int,
) -> None:
    """See `reference.markov_merge`."""
    lib().thinwire_markov_merge(
        *table(runs),
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        mean.data_ptr(),
        shift,
        g.data_ptr(),
        alive.data_ptr(),
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
) -> bool:
    """See `reference.markov_difference`."""
    return bool(
        lib().thinwire_markov_difference(
            *table(runs),
            *typed(grad),
            pointer(m),
            known.data_ptr(),
            c.data_ptr(),
            shift,
            beta,
            weight,
            scale,
        )
    )
