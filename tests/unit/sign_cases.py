"""Cases for the kernels of Adam, of signs with error memory and of LAMB, as in kernel_cases.

What lies beyond the last element of a parameter, up to a whole word, is NaN in every state: it must neither count nor
change. Runs stand in shards 1, 2, ...; no run is of shard 0, whose scale is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.kernel_cases import (
    COUNTS,
    FLOAT_PLANES,
    SEEDS,
    WORD,
    cut,
    guarded,
    hard_gradient,
    random,
    random_bytes,
    random_words,
)

GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
MODERATE = 2.0**50
"""Numbers up to it can be added to a memory without being refused."""

RUNS: dict[str, Any] = {"count": COUNTS, "seed": SEEDS, "pieces": st.integers(1, 6)}
GRADIENT: dict[str, Any] = {
    "grad_dtype": st.sampled_from([*GRADIENTS, None]),
    "finite": st.booleans(),
    "grad_off": st.integers(0, 9),
    "scale": st.floats(-100, 100),
}
PARAMETER: dict[str, Any] = {
    "low_dtype": st.sampled_from([None, torch.bfloat16, torch.float16]),
    "loaded": st.booleans(),
    "x_off": st.integers(0, 9),
}
MEMORY = st.sampled_from([torch.float32, torch.bfloat16])
BETA = st.one_of(st.sampled_from([0.0, 0.9, 0.999]), st.floats(0, 1, exclude_max=True))
RATE = st.one_of(st.just(0.0), st.floats(0, 10))
DECAY = st.one_of(st.just(1.0), st.floats(0.1, 1))
EPS = st.sampled_from([0.0, 1e-40, 1e-8, 1e-3])


# Parts of cases ------------------------------------------------------------------------------------------------------


def first_word_of(seed: int) -> int:
    return seed % 5


def moderate(count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Difficult numbers that are not huge."""
    values = hard_gradient(count, dtype, generator).float()
    return values.clamp(-MODERATE, MODERATE).to(dtype)


def positive(count: int, generator: torch.Generator) -> Tensor:
    """As preconditioners and variances are, and zero in a quarter of all places, of either sign."""
    values = moderate(count, generator).abs()
    resting = torch.randint(0, 8, (count,), generator=generator)
    values[resting == 0], values[resting == 1] = 0.0, -0.0
    return values


def in_flat(values: Tensor, first_word: int) -> Tensor:
    """A state of the flat space that holds `values` from word `first_word` on and NaN elsewhere."""
    words = first_word + -(-values.numel() // WORD)
    state = torch.full((words * WORD,), torch.nan, dtype=values.dtype)
    state[first_word * WORD : first_word * WORD + values.numel()] = values
    return state


def flat_words(count: int, first_word: int, generator: torch.Generator) -> Tensor:
    return guarded(random_words(first_word + -(-count // WORD), generator))


def scale_table(runs: Tensor, generator: torch.Generator) -> Tensor:
    """A scale for each shard, of any magnitude, some of them zero."""
    size = 2 + int(runs[:, 5].max())
    scales = torch.rand(size, generator=generator) * 10.0 ** torch.randint(-9, 4, (size,), generator=generator)
    kind = torch.randint(0, 8, (size,), generator=generator)
    scales[kind == 0], scales[kind == 1] = 0.0, 2.0**-149
    scales[0] = torch.nan
    return guarded(scales)


def gradient(
    count: int, dtype: torch.dtype | None, generator: torch.Generator, *, finite: bool, elements_off: int
) -> Tensor | None:
    if dtype is None:
        return None
    values = moderate(count, generator, dtype) if finite else hard_gradient(count, dtype, generator, finite=False)
    return guarded(values, elements_off=elements_off)


def parameter(
    count: int,
    low_dtype: torch.dtype | None,
    generator: torch.Generator,
    *,
    loaded: bool,
    elements_off: int,
    infinite: bool = True,
) -> dict[str, Tensor | None]:
    """x and low; `loaded`: other numbers were loaded into half of the low-precision parameter."""
    x = moderate(count, generator)
    if infinite:
        x[::17] = float("-inf")
    low = None
    if low_dtype is not None:
        low = x.to(low_dtype)
        if not infinite:
            low = low.where(low.isfinite(), torch.ones_like(low))
            x = x.where(x.to(low_dtype).isfinite(), 1.0)
        if loaded:
            low[1::2] = moderate(count, generator, low_dtype)[1::2]
        low = guarded(low, elements_off=elements_off)
    return {"x": guarded(x, elements_off=elements_off), "low": low}


def float_packet(runs: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A packet with difficult floats at the places of the runs."""
    packet = random_bytes(size, generator=generator)
    for _, _, count, byte, _, _ in runs.tolist():
        packet[byte : byte + 4 * count] = moderate(count, generator).view(torch.uint8)
    return guarded(packet)


def empty_sums(*shape: int) -> Tensor:
    return guarded(torch.full(shape, -7.0, dtype=torch.float64))


# Adam ----------------------------------------------------------------------------------------------------------------


def dense_encode_case(
    count: int,
    *,
    seed: int,
    grad_dtype: torch.dtype | None,
    pieces: int = 1,
    finite: bool = True,
    grad_off: int = 0,
    scale: float = 1.0,
) -> dict[str, Any]:
    """Infinities, but no NaN: torch widens those of float16 in two ways, one in whole vectors and one in the rest."""
    generator = random(seed)
    runs, size = cut(count, pieces, first_word=first_word_of(seed), planes=FLOAT_PLANES)
    grad = gradient(count, grad_dtype, generator, finite=finite, elements_off=grad_off)
    if grad is not None:
        grad.nan_to_num_(torch.inf, torch.inf, -torch.inf)
    return {
        "runs": runs,
        "grad": grad,
        "packets": guarded(random_bytes(size, generator=generator)),
        "scale": scale,
    }


def adam_case(
    count: int,
    *,
    seed: int,
    pieces: int = 1,
    by_sign: bool = False,
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word, planes=FLOAT_PLANES)
    return {
        "runs": runs,
        **parameter(count, low_dtype, generator, loaded=loaded, elements_off=x_off),
        "m": guarded(in_flat(moderate(count, generator), first_word)),
        "v": guarded(in_flat(positive(count, generator), first_word)),
        "gradient": flat_words(count, first_word, generator) if by_sign else float_packet(runs, size, generator),
        "scales": scale_table(runs, generator) if by_sign else None,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "rate": 1e-3,
        "correction": 1.7,
        "decay": 0.99,
        "update_variance": True,
        **changes,
    }


# Signs ---------------------------------------------------------------------------------------------------------------


def sign_encode_case(
    count: int,
    *,
    seed: int,
    grad_dtype: torch.dtype | None,
    state_dtype: torch.dtype,
    pieces: int = 1,
    finite: bool = True,
    grad_off: int = 0,
    shift: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word)
    return {
        "runs": runs,
        "grad": gradient(count, grad_dtype, generator, finite=finite, elements_off=grad_off),
        "c": guarded(in_flat(moderate(count, generator, state_dtype), first_word)[shift:]),
        "answer_words": flat_words(count, first_word, generator),
        "packets": guarded(random_bytes(size, generator=generator)),
        "sent_scales": scale_table(runs, generator),
        "answer_scales": scale_table(runs, generator),
        "sums": empty_sums(runs.shape[0]),
        "beta": 0.9,
        "weight": 0.1,
        "scale": 1.0,
        "shift": shift,
        **changes,
    }


BLOCKS = 5
"""The blocks of the shard that is merged."""


def sign_merge_case(
    count: int, *, workers: int, seed: int, state_dtype: torch.dtype, pieces: int = 1, shift: int = 0
) -> dict[str, Any]:
    """Packets that do not follow each other without a gap."""
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word)
    # Blocks of a shard, in any order, of which the last has no run.
    runs[:, 5] = (torch.arange(runs.shape[0]) * 3 + seed) % BLOCKS
    shape = (workers, BLOCKS + 1)
    scales = torch.rand(shape, generator=generator) * 10.0 ** torch.randint(-9, 4, shape, generator=generator)
    scales.view(-1)[seed % 9 :: 9] = 0.0
    return {
        "runs": runs,
        "rows": guarded(random_bytes(workers, 24 + size, generator=generator))[:, 24:],
        "y": guarded(in_flat(moderate(count, generator, state_dtype), first_word)[shift:]),
        "answer": guarded(random_bytes(size, generator=generator)),
        "scales": guarded(scales),
        "last_scales": guarded(torch.rand(BLOCKS, generator=generator) / 3),
        "sums": empty_sums(runs.shape[0]),
        "shift": shift,
    }


def sign_apply_case(
    count: int,
    *,
    seed: int,
    pieces: int = 1,
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    anchored: bool = False,
    with_momentum: bool = False,
    rate: float = 1e-3,
    decay: float = 0.99,
    momentum: float = 1.3,
) -> dict[str, Any]:
    generator, first_word = random(seed), first_word_of(seed)
    runs, _ = cut(count, pieces, first_word=first_word)
    p = positive(count, generator)
    p[5::31] = -1.0
    return {
        "runs": runs,
        **parameter(count, low_dtype, generator, loaded=loaded, elements_off=x_off),
        "p": guarded(in_flat(p, first_word)),
        "answer_words": flat_words(count, first_word, generator),
        "scales": scale_table(runs, generator),
        "rate": rate,
        "decay": decay,
        "anchor": guarded(moderate(count, generator), elements_off=x_off) if anchored else None,
        "m": guarded(in_flat(moderate(count, generator), first_word)) if with_momentum else None,
        "momentum": momentum,
    }


def momentum_encode_case(
    count: int,
    *,
    seed: int,
    output: int,
    grad_dtype: torch.dtype | None,
    state_dtype: torch.dtype,
    pieces: int = 1,
    finite: bool = True,
    grad_off: int = 0,
    shift: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word, planes=FLOAT_PLANES if output == 2 else 1)
    return {
        "runs": runs,
        "grad": gradient(count, grad_dtype, generator, finite=finite, elements_off=grad_off),
        "m": guarded(in_flat(moderate(count, generator), first_word)),
        "c": guarded(in_flat(moderate(count, generator, state_dtype), first_word)[shift:]),
        "packets": guarded(random_bytes(size, generator=generator)) if output else None,
        "sent_scales": scale_table(runs, generator),
        "sums": empty_sums(runs.shape[0]) if output == 1 else None,
        "beta": 0.9,
        "weight": 0.1,
        "scale": 1.0,
        "rate": 1e-3,
        "shift": shift,
        "output": output,
        **changes,
    }


def step_apply_case(count: int, *, seed: int, pieces: int = 1, **options: Any) -> dict[str, Any]:
    case = sign_apply_case(count, seed=seed, **options)
    for of_signs in ("answer_words", "scales", "m", "momentum"):
        del case[of_signs]
    case["runs"], size = cut(count, pieces, first_word=first_word_of(seed), planes=FLOAT_PLANES)
    return case | {"values": float_packet(case["runs"], size, random(seed))}


# LAMB ----------------------------------------------------------------------------------------------------------------


def lamb_measure_case(
    count: int,
    *,
    seed: int,
    pieces: int = 1,
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    case = adam_case(count, seed=seed, pieces=pieces)
    for of_adam in ("scales", "rate", "decay", "update_variance"):
        del case[of_adam]
    case |= parameter(count, low_dtype, random(seed), loaded=loaded, elements_off=x_off, infinite=False)
    return case | {"unbias": 2.5, "weight_decay": 0.01, "sums": empty_sums(case["runs"].shape[0], 3), **changes}


def lamb_apply_case(count: int, *, seed: int, rate: float = 1e-2, **options: Any) -> dict[str, Any]:
    case = lamb_measure_case(count, seed=seed, **options)
    for of_measuring in ("gradient", "beta1", "beta2", "sums"):
        del case[of_measuring]
    return case | {"rate": rate}


def onebit_lamb_case(
    count: int,
    *,
    seed: int,
    pieces: int = 1,
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    case = sign_apply_case(count, seed=seed, pieces=pieces)
    for of_applying in ("rate", "decay", "anchor", "m", "momentum"):
        del case[of_applying]
    generator, first_word = random(seed + 1), first_word_of(seed)
    return {
        **case,
        **parameter(count, low_dtype, generator, loaded=loaded, elements_off=x_off, infinite=False),
        "w": guarded(in_flat(positive(count, generator), first_word)),
        "previous_words": flat_words(count, first_word, generator),
        "previous_scales": scale_table(case["runs"], generator),
        "shrink": 0.7,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "unbias": 2.5,
        "weight_decay": 0.01,
        "sums": empty_sums(case["runs"].shape[0], 3),
        **changes,
    }


def square_sum_case(count: int, *, seed: int, elements_off: int = 0) -> dict[str, Any]:
    return {"values": guarded(moderate(count, random(seed)), elements_off=elements_off)}


def precondition_case(count: int, *, seed: int, elements_off: int = 0) -> dict[str, Any]:
    """A variance of every magnitude, some of it zero."""
    v = hard_gradient(count, torch.float32, random(seed)).abs()
    return {"v": guarded(v, elements_off=elements_off), "correction": 1.3, "floor": 1e-3, "eps": 1e-8}


# All of them ---------------------------------------------------------------------------------------------------------


def a_case_of_each(count: int, pieces: int) -> dict[str, dict[str, Any]]:
    """A case of every operation, with all that it can be given."""
    runs: dict[str, Any] = {"count": count, "pieces": pieces, "seed": 3}
    encoded: dict[str, Any] = runs | {"grad_dtype": torch.float32, "state_dtype": torch.bfloat16, "shift": WORD}
    applied: dict[str, Any] = runs | {"low_dtype": torch.bfloat16, "loaded": True}
    return {
        "dense_encode": dense_encode_case(**runs, grad_dtype=torch.float16),
        "adam_apply": adam_case(**applied),
        "sign_encode": sign_encode_case(**encoded),
        "sign_merge": sign_merge_case(**runs, workers=3, state_dtype=torch.bfloat16, shift=WORD),
        "sign_apply": sign_apply_case(**applied, anchored=True, with_momentum=True),
        "momentum_encode": momentum_encode_case(**encoded, output=1),
        "step_apply": step_apply_case(**applied, anchored=True),
        "lamb_measure": lamb_measure_case(**applied),
        "lamb_apply": lamb_apply_case(**applied),
        "onebit_lamb_measure": onebit_lamb_case(**applied),
        "square_sum": square_sum_case(count, seed=3),
        "precondition": precondition_case(count, seed=3),
    }
