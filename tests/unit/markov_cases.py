"""Cases for the kernels of Markov compression, AMSGrad and sketches, as in sign_cases.

What lies beyond the last element of a parameter is NaN in every state and any bit in words. What an operation writes is
told in a table, and everything else must stay as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.formulas import Places
from tests.unit.kernel_cases import (
    FLOAT_PLANES,
    ISAS,
    REFERENCE,
    ROOM,
    WORD,
    activation_map,
    allocation,
    cut,
    guarded,
    kernels_of,
    random,
    random_bytes,
    random_words,
)
from tests.unit.sign_cases import (
    empty_sums,
    first_word_of,
    flat_words,
    float_packet,
    gradient,
    in_flat,
    moderate,
    parameter,
    positive,
    scale_table,
)
from tests.unit.test_kernels_invariants import address, changed_bytes
from thinwire.kernels.modes import MarkovMode, Source

MODES = {MarkovMode.ORDINARY: "ordinary", MarkovMode.ACTIVATION: "activation", MarkovMode.REPLAY: "replay"}
SOURCES = {Source.STATE: "state", Source.SIGNS: "signs", Source.FLOATS: "floats"}
PRIME = 2**31 - 1

each_mode = pytest.mark.parametrize("mode", MODES, ids=MODES.values())
each_source = pytest.mark.parametrize("source", SOURCES, ids=SOURCES.values())
each_momentum = pytest.mark.parametrize("momentum", [False, True], ids=["", "momentum"])
each_activity = pytest.mark.parametrize("active", ["all", "none", "some"])

ALIVE = st.sampled_from(["all", "none", "some"])
WEIGHT = st.floats(0, 10)
RATIO = st.one_of(st.just(1.0), st.floats(0, 10))


# Markov compression --------------------------------------------------------------------------------------------------


def markov_encode_case(
    count: int,
    *,
    seed: int,
    grad_dtype: torch.dtype | None = torch.float32,
    mode: int = MarkovMode.ORDINARY,
    momentum: bool = False,
    active: str = "some",
    pieces: int = 1,
    finite: bool = True,
    grad_off: int = 0,
    shift: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """REPLAY has neither a gradient nor a momentum, whatever is passed here."""
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word)
    words = first_word + -(-count // WORD)
    if mode == MarkovMode.REPLAY:
        grad_dtype, momentum = None, False
    return {
        "runs": runs,
        "grad": gradient(count, grad_dtype, generator, finite=finite, elements_off=grad_off),
        "m": guarded(in_flat(moderate(count, generator), first_word)[shift:]) if momentum else None,
        "known": guarded(in_flat(moderate(count, generator), first_word)[shift:]),
        "sent_words": guarded(random_words(words, generator)[shift // WORD :]),
        "nonzero": guarded(torch.full((words - shift // WORD,), 7, dtype=torch.uint8)),
        "sent_mask": flat_words(count, first_word, generator),
        "active": guarded(activation_map(active, words, generator)),
        "packets": guarded(random_bytes(size, generator=generator)),
        "sent_scales": scale_table(runs, generator),
        "sums": empty_sums(runs.shape[0], 3),
        "beta": 0.9,
        "weight": 0.1,
        "scale": 1.0,
        "shift": shift,
        "mode": mode,
        **changes,
    }


def markov_difference_case(count: int, *, seed: int, **options: Any) -> dict[str, Any]:
    case = markov_encode_case(count, seed=seed, **options)
    for of_encoding in ("sent_words", "nonzero", "sent_mask", "active", "packets", "sent_scales", "sums", "mode"):
        del case[of_encoding]
    return case | {"c": guarded(torch.full_like(case["known"], torch.nan))}


def markov_merge_case(
    count: int, *, workers: int, seed: int, active: str = "some", pieces: int = 1, shift: int = 0
) -> dict[str, Any]:
    """Packets that do not follow each other without a gap."""
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word)
    runs[:, 5] = 4
    scales = torch.rand(workers, generator=generator) * 10.0 ** torch.randint(-9, 4, (workers,), generator=generator)
    scales[seed % 9 :: 9] = 0.0
    rows = guarded(random_bytes(workers, 24 + size, generator=generator))[:, 24:]
    rows[:, : size // 2] &= random_bytes(workers, size // 2, generator=generator)  # activation bits are rare
    return {
        "runs": runs,
        "rows": rows,
        "mean": guarded(in_flat(moderate(count, generator), first_word)[shift:]),
        "g": guarded(in_flat(moderate(count, generator), first_word)),
        "active": guarded(activation_map(active, first_word + -(-count // WORD), generator)),
        "answer": guarded(random_bytes(size, generator=generator)),
        "scales": guarded(scales),
        "sums": empty_sums(runs.shape[0], 3),
        "shift": shift,
    }


# AMSGrad -------------------------------------------------------------------------------------------------------------


def amsgrad_case(
    count: int,
    *,
    seed: int,
    source: int,
    pieces: int = 1,
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    steps: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Without `steps` there is no parameter: signs are taken into the gradient, and that is all."""
    generator, first_word = random(seed), first_word_of(seed)
    runs, size = cut(count, pieces, first_word=first_word, planes=FLOAT_PLANES if source == Source.FLOATS else 1)
    of_step: dict[str, Any] = dict.fromkeys(("x", "low", "m", "v", "peak"))
    if steps:
        of_step = parameter(count, low_dtype, generator, loaded=loaded, elements_off=x_off) | {
            "m": guarded(in_flat(moderate(count, generator), first_word)),
            "v": guarded(in_flat(positive(count, generator), first_word)),
            "peak": guarded(in_flat(positive(count, generator), first_word)),
        }
    packets = None
    if source == Source.SIGNS:
        packets = guarded(random_bytes(size, generator=generator))
    elif source == Source.FLOATS:
        packets = float_packet(runs, size, generator)
    words = first_word + -(-count // WORD)
    return {
        "runs": runs,
        **of_step,
        "g": guarded(in_flat(moderate(count, generator), first_word)) if source != Source.FLOATS else None,
        "packets": packets,
        "scales": scale_table(runs, generator) if source == Source.SIGNS else None,
        "active": guarded(activation_map("some", words, generator)) if source == Source.SIGNS else None,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "rate": 1e-3,
        "correction": 1.7,
        "decay": 0.99,
        "source": source,
        **changes,
    }


def momentum_sum_case(
    count: int,
    *,
    seed: int,
    grad_dtype: torch.dtype | None,
    pieces: int = 1,
    finite: bool = True,
    grad_off: int = 0,
    shift: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    generator, first_word = random(seed), first_word_of(seed)
    runs, _ = cut(count, pieces, first_word=first_word)
    states = {name: guarded(in_flat(moderate(count, generator), first_word)[shift:]) for name in ("m", "e", "g")}
    return {
        "runs": runs,
        "grad": gradient(count, grad_dtype, generator, finite=finite, elements_off=grad_off),
        **states,
        "beta": 0.9,
        "weight": 0.1,
        "scale": 1.0,
        "ratio": 1.3,
        "shift": shift,
        **changes,
    }


def sparse_amsgrad_case(
    count: int,
    *,
    seed: int,
    share: float = 0.3,
    low_dtype: torch.dtype | None = None,
    loaded: bool = False,
    x_off: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """About `share` of a parameter's coordinates are chosen, some of these with nothing to do.

    A third of all has never been chosen before: `v` and `peak` are `eps` there.
    """
    generator, first, eps = random(seed), first_word_of(seed) * WORD, float(changes.get("eps", 1e-6))
    v = moderate(count, generator).abs() + 1e-30
    peak = torch.maximum(v * 10 ** (torch.rand(count, generator=generator) - 0.5), v / 2)
    fresh = torch.rand(count, generator=generator) < 0.3
    v[fresh], peak[fresh] = eps, eps
    chosen = (torch.rand(count, generator=generator) < share).nonzero().flatten()
    momenta, gradients = moderate(chosen.numel(), generator), moderate(chosen.numel(), generator)
    idle = torch.randint(0, 6, (chosen.numel(),), generator=generator)
    momenta[idle % 3 == 0], gradients[idle % 2 == 0] = 0.0, -0.0
    beyond = torch.full((-count % WORD,), torch.nan)
    return {
        **parameter(count, low_dtype, generator, loaded=loaded, elements_off=x_off),
        "v": guarded(torch.cat([v, beyond])),
        "peak": guarded(torch.cat([peak, beyond])),
        "indices": guarded((first + chosen).to(torch.int32)),
        "momenta": guarded(momenta),
        "gradients": guarded(gradients),
        "first": first,
        "beta2": 0.99,
        "eps": eps,
        "rate": 1e-3,
        "decay": 0.99,
        **changes,
    }


# Selection and sketches ----------------------------------------------------------------------------------------------


def scratch_for(k: int) -> Tensor:
    return guarded(torch.full((2 * k,), -1))


def sketch_scratch_for(k: int, table: Tensor) -> Tensor:
    return guarded(torch.full((-(-(16 * k + 2**19 + table.numel()) // 8),), -1))


def top_k_case(values: Tensor, k: int, *, elements_off: int = 0) -> dict[str, Any]:
    return {
        "values": guarded(values, elements_off=elements_off),
        "indices": guarded(torch.full((k,), -1, dtype=torch.int32)),
        "scratch": scratch_for(k),
    }


def coefficients_of(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, PRIME, (rows, 4), generator=generator)


def sketch_case(
    count: int, *, seed: int, rows: int, columns: int, first: int = 0, elements_off: int = 0, filled: bool = True
) -> dict[str, Any]:
    """Values, all zeros of which are positive, and a table that is not empty by default."""
    generator = random(seed)
    values = moderate(count, generator) + 0.0
    table = moderate(rows * columns, generator).view(rows, columns) if filled else torch.zeros(rows, columns)
    return {
        "values": guarded(values, elements_off=elements_off),
        "table": guarded(table),
        "coefficients": guarded(coefficients_of(rows, generator)),
        "first": first,
    }


def sketch_top_k_case(counts: list[int], k: int, *, seed: int, rows: int, columns: int) -> dict[str, Any]:
    """Ranges of so many elements each, with a word between them, of which nothing may be asked: `peak` is NaN there."""
    generator, first = random(seed), WORD * first_word_of(seed)
    ranges: list[list[int]] = []
    for count in counts:
        ranges.append([first, count])
        first += WORD * (-(-count // WORD) + 1)
    peak = torch.full((first,), torch.nan)
    for start, count in ranges:
        peak[start : start + count] = moderate(count, generator).abs() + 1e-20
    table = moderate(rows * columns, generator).view(rows, columns)
    return {
        "table": guarded(table),
        "peak": guarded(peak),
        "ranges": guarded(torch.tensor(ranges)),
        "indices": guarded(torch.full((k,), -1, dtype=torch.int32)),
        "scratch": sketch_scratch_for(k, table),
        "coefficients": guarded(coefficients_of(rows, generator)),
    }


def same_selection(operation: str, **case: Any) -> list[int]:
    """As `same_everywhere`, but for what is left in the scratch room, around which nothing is written; the indices."""
    inputs = {name: allocation(tensor).clone() for name, tensor in case.items() if isinstance(tensor, Tensor)}
    getattr(REFERENCE, operation)(**case)
    expected = allocation(case["indices"]).clone()
    for isa in ISAS:
        case["indices"].fill_(-1)
        with kernels_of(isa) as kernels:
            getattr(kernels, operation)(**case)
        assert torch.equal(allocation(case["indices"]), expected), f"{operation} on {isa}"
        for name, before in inputs.items():
            after = allocation(case[name])
            if name == "scratch":
                edges = torch.cat([after[:ROOM], after[after.numel() - ROOM :]])
                assert bool((edges == 0xA5).all()), f"{operation} on {isa} writes around its scratch room"
            elif name != "indices":
                assert torch.equal(after, before), f"{operation} on {isa} changes {name}"
    return case["indices"].tolist()


SELECTIONS = {"top_k", "sketch_top_k"}
"""Operations that leave something in a scratch room: for `same_selection`."""


def a_case_of_each(count: int) -> dict[str, dict[str, Any]]:
    """A case of every operation."""
    sketch = sketch_case(count, seed=3, rows=3, columns=50)
    generator = random(3)
    return {
        "markov_encode": markov_encode_case(count, seed=3, shift=WORD, momentum=True),
        "markov_difference": markov_difference_case(count, seed=3, shift=WORD),
        "markov_merge": markov_merge_case(count, workers=3, seed=3),
        "amsgrad_apply": amsgrad_case(count, seed=3, source=Source.SIGNS, low_dtype=torch.bfloat16, loaded=True),
        "momentum_sum": momentum_sum_case(count, seed=3, grad_dtype=torch.float16),
        "sparse_amsgrad": sparse_amsgrad_case(count, seed=3, low_dtype=torch.float16),
        "top_k": top_k_case(moderate(count, generator), 9),
        "sparse_add": {
            "values": guarded(moderate(count, generator)),
            "indices": guarded(torch.tensor([2, 5], dtype=torch.int32)),
            "amounts": guarded(moderate(2, generator)),
            "weight": 0.3,
        },
        "sketch_add": sketch,
        "sketch_estimate": sketch_case(count, seed=4, rows=4, columns=50) | {"weight": 0.5},
        "sketch_top_k": sketch_top_k_case([count, 3], 9, seed=3, rows=5, columns=50),
    }


# What is written -----------------------------------------------------------------------------------------------------

OWN = {
    "markov_encode": {"m", "known"},
    "markov_difference": {"m", "c"},
    "markov_merge": {"mean"},
    "momentum_sum": {"m", "e", "g"},
}
"""What an operation changes at the elements less the shift,"""
FLAT = {"amsgrad_apply": {"g", "m", "v", "peak"}}
"""at the elements in the flat space,"""
OF_PARAM = {"amsgrad_apply": {"x", "low"}}
"""in the parameter,"""
IN_PACKET = {"markov_encode": "packets", "markov_merge": "answer"}
"""and at the bytes of a packet. `sent_words` is written by whole words, `nonzero` a byte for each."""


def _may_change(operation: str, name: str, case: dict[str, Any]) -> set[int]:
    """The bytes of an argument's allocation that an operation may write."""
    places, tensor = Places(case["runs"]), case[name]
    if name == "sums":
        return {address(tensor) + byte for byte in range(8 * tensor.numel())}
    if IN_PACKET.get(operation) == name:
        starts = [(byte, 8 * -(-count // WORD)) for _, _, count, byte, _, _ in places.runs]
    elif name == "sent_words":
        starts = [((run[0] - case["shift"]) // 8, 8 * -(-run[2] // WORD)) for run in places.runs]
    elif name == "nonzero":
        starts = [((run[0] - case["shift"]) // WORD, -(-run[2] // WORD)) for run in places.runs]
    elif name in OWN.get(operation, ()):
        starts = [(4 * int(at), 4) for at in places.element - case["shift"]]
    elif name in FLAT.get(operation, ()):
        starts = [(4 * int(at), 4) for at in places.element]
    elif name in OF_PARAM.get(operation, ()):
        starts = [(tensor.element_size() * int(at), tensor.element_size()) for at in places.in_param]
    else:
        starts = []
    return {address(tensor) + start + byte for start, size in starts for byte in range(size)}


def assert_bounds(backend: str, operation: str, case: dict[str, Any]) -> None:
    """An operation writes its own places; what it only reads stays, to the last byte around it."""
    tensors = {name: argument for name, argument in case.items() if isinstance(argument, Tensor)}
    before = {name: allocation(tensor).clone() for name, tensor in tensors.items()}
    with kernels_of(backend) as kernels:
        getattr(kernels, operation)(**case)
    written = 0
    for name, tensor in tensors.items():
        changed = changed_bytes(before[name], allocation(tensor))
        allowed = _may_change(operation, name, case)
        assert changed <= allowed, f"{name}: {sorted(changed - allowed)[:8]}"
        written += len(changed)
    assert written


def assert_padding_counts_for_nothing(
    backend: str, operation: str, case: dict[str, Any], other: dict[str, Any]
) -> None:
    """Two equal cases of one run that ends within a word: whatever stands in its padding, the results are the same."""
    (run,) = case["runs"].tolist()
    end, words = run[0] + run[2], -(-run[2] // WORD)
    assert run[2] % WORD
    for name, argument in other.items():
        if name == "runs" or not isinstance(argument, Tensor):
            continue
        if name in ("m", "v", "peak", "known", "mean", "c", "e", "g"):
            own = name in OWN.get(operation, ()) or name == "known"
            argument[end - (other["shift"] if own else 0) :] = 1e30
        elif name in ("sent_words", "sent_mask", "active"):
            argument[-1] ^= -1 << run[2] % WORD
        elif name in ("rows", "packets"):
            torch.atleast_2d(argument)[:, run[3] + run[2] // 8 + 1 : run[3] + 8 * words] ^= 255
        elif name in ("x", "low", "grad"):
            argument.as_strided((32,), (1,), argument.storage_offset() + run[2]).fill_(1e3)
    with kernels_of(backend) as kernels:
        expected, result = getattr(kernels, operation)(**case), getattr(kernels, operation)(**other)
    assert result == expected
    for name in {"sums", "x", "low", "answer", "sent_words", "nonzero"} & set(case):
        assert case[name] is None or torch.equal(other[name], case[name])
    if operation == "markov_encode":
        assert torch.equal(other["packets"], case["packets"])
    for names, shift in ((OWN, case.get("shift", 0)), (FLAT, 0)):
        for name in names.get(operation, ()):
            if case[name] is not None:
                assert torch.equal(other[name][run[0] - shift : end - shift], case[name][run[0] - shift : end - shift])
