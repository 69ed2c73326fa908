"""Adam, signs and LAMB: kernels write their own elements and no others, and padding counts for nothing."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.formulas import Places
from tests.unit.kernel_cases import WORD, allocation, each_backend, kernels_of, random
from tests.unit.sign_cases import a_case_of_each, momentum_encode_case
from tests.unit.test_kernels_invariants import address, changed_bytes, vast

OPERATIONS = [name for name in a_case_of_each(100, 1) if name not in ("square_sum", "precondition")]
each_operation = pytest.mark.parametrize("operation", OPERATIONS)

FLAT = {
    "adam_apply": {"m", "v"},
    "sign_apply": {"m"},
    "momentum_encode": {"m"},
    "lamb_measure": {"m", "v"},
    "onebit_lamb_measure": {"w"},
}
"""What an operation changes at a run's elements in the flat space,"""
SHIFTED = {"sign_encode": {"c"}, "sign_merge": {"y"}, "momentum_encode": {"c"}}
"""at elements less the shift,"""
OF_PARAM = {
    "adam_apply": {"x", "low"},
    "sign_apply": {"x", "low"},
    "step_apply": {"x", "low", "anchor"},
    "lamb_measure": {"x"},
    "lamb_apply": {"x", "low"},
    "onebit_lamb_measure": {"x"},
}
"""in the parameter,"""
IN_PACKET = {"dense_encode": "packets", "sign_encode": "packets", "sign_merge": "answer", "momentum_encode": "packets"}
"""and at its bytes of a packet."""


def may_change(operation: str, name: str, case: dict[str, Any]) -> set[int]:
    """The bytes of an argument's allocation that an operation may write."""
    places, tensor = Places(case["runs"]), case[name]
    if name == "sums":
        rows = len(places.runs)
        return {address(tensor) + byte for byte in range(8 * rows * tensor[0].numel())}
    if IN_PACKET.get(operation) == name:
        found: set[int] = set()
        for _, _, count, byte, _, _ in places.runs:
            size = 4 * count if operation == "dense_encode" or case.get("output") == 2 else 8 * -(-count // WORD)
            found.update(range(address(tensor) + byte, address(tensor) + byte + size))
        return found
    if name in FLAT.get(operation, ()):
        at = places.element
    elif name in SHIFTED.get(operation, ()):
        at = places.element - case["shift"]
    elif name in OF_PARAM.get(operation, ()):
        at = places.in_param
    else:
        return set()
    size = tensor.element_size()
    return {address(tensor) + size * int(i) + byte for i in at for byte in range(size)}


def assert_bounds(backend: str, operation: str, case: dict[str, Any]) -> None:
    tensors = {name: argument for name, argument in case.items() if isinstance(argument, Tensor)}
    before = {name: allocation(tensor).clone() for name, tensor in tensors.items()}
    with kernels_of(backend) as kernels:
        getattr(kernels, operation)(**case)
    written = 0
    for name, tensor in tensors.items():
        changed = changed_bytes(before[name], allocation(tensor))
        allowed = may_change(operation, name, case)
        assert changed <= allowed, f"{name}: {sorted(changed - allowed)[:8]}"
        written += len(changed)
    assert written


@each_backend
@each_operation
def test_an_operation_writes_its_own_places_and_no_others(backend: str, operation: str) -> None:
    """Of all runs but one in the middle; what it only reads stays, to the last byte around it."""
    case = a_case_of_each(1700, 5)[operation]
    runs = case["runs"]
    assert runs.shape[0] == 5
    assert_bounds(backend, operation, case | {"runs": runs[[0, 1, 3, 4]]})


@each_backend
@pytest.mark.parametrize("count", [1, 31, 33, 63, 65])
@each_operation
def test_a_short_tail_is_all_that_is_written(backend: str, operation: str, count: int) -> None:
    assert_bounds(backend, operation, a_case_of_each(count, 1)[operation])


@each_backend
@pytest.mark.parametrize("output", [0, 2], ids=["nothing", "floats"])
def test_momentum_encode_writes_the_output_that_is_asked_for(backend: str, output: int) -> None:
    options: dict[str, Any] = {"grad_dtype": torch.bfloat16, "state_dtype": torch.float32}
    assert_bounds(backend, "momentum_encode", momentum_encode_case(700, seed=3, pieces=5, output=output, **options))


def shift_of(state: str, case: dict[str, Any]) -> int:
    return case["shift"] if state in ("c", "y") else 0


@each_backend
@each_operation
def test_padding_counts_for_nothing(backend: str, operation: str) -> None:
    """Whatever there is beyond the last element, in states, bits and behind the parameter: the results are the same."""
    case, other = a_case_of_each(333, 1)[operation], a_case_of_each(333, 1)[operation]
    (run,) = case["runs"].tolist()
    for name, argument in other.items():
        if name == "runs" or not isinstance(argument, Tensor):
            continue
        if name in ("m", "v", "c", "y", "p", "w"):
            argument[run[0] + run[2] - shift_of(name, other) :] = 1e30
        elif argument.dtype == torch.int64:
            argument[-1] ^= -1 << run[2] % WORD
        elif name == "rows":
            argument[:, run[3] + run[2] // 8 + 1 : run[3] + 8 * -(-run[2] // WORD)] ^= 255
        elif name in ("x", "low", "anchor", "grad"):
            beyond = argument.as_strided((32,), (1,), argument.storage_offset() + 333)
            beyond.fill_(1e3)
    with kernels_of(backend) as kernels:
        expected, result = getattr(kernels, operation)(**case), getattr(kernels, operation)(**other)
    assert result == expected
    places = Places(case["runs"])
    for name, argument in case.items():
        if name in ("m", "v", "c", "y", "w") and argument is not None:
            at = places.element - shift_of(name, case)
            assert torch.equal(other[name][at], argument[at])
        elif name in ("x", "low", "packets", "answer", "sums") and argument is not None:
            assert torch.equal(other[name], argument)


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs memory that is not there until it is touched")
@each_backend
def test_elements_beyond_two_to_the_32_are_reached(backend: str) -> None:
    """A parameter that lies across the boundary, in a step of every operation that goes by the flat space."""
    first, count = 2**32 - 192, 300
    size = first + 320
    runs = torch.tensor([[first, 0, 128, 0, 0, 0], [first + 128, 128, count - 128, 512, 0, 1]])
    m, v = vast(size, torch.float32), vast(size, torch.float32)
    answer_words, before = vast(size // WORD, torch.int64), vast(size // WORD, torch.int64)
    answer_words[first // WORD :] = torch.tensor([-1, 0, -1, 0, -1])
    c, scales = torch.zeros(320), torch.tensor([1.0, 2.0])
    x, packets = torch.zeros(count), torch.randn(320, generator=random(0)).view(torch.uint8)
    sums = torch.zeros(2, 3, dtype=torch.float64)
    bit = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]).repeat_interleave(WORD)[:count]
    sent_words = bit * scales.repeat_interleave(torch.tensor([128, count - 128]))
    moments: dict[str, Any] = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0}
    rule: dict[str, Any] = {"beta": 1.0, "weight": 1.0, "scale": 1.0, "shift": first, "sums": sums[:, 0].contiguous()}
    with kernels_of(backend) as kernels:
        kernels.adam_apply(
            runs,
            x,
            None,
            m,
            v,
            answer_words,
            scales,
            **moments,
            rate=1.0,
            correction=1.0,
            decay=1.0,
            update_variance=True,
        )
        assert torch.equal(m[first : first + count], sent_words)
        assert torch.equal(v[first : first + count], sent_words**2)
        assert torch.equal(x, -bit)
        step: dict[str, Any] = {"rate": 1.0, "decay": 1.0, "anchor": None}
        kernels.sign_apply(runs, x, None, v, answer_words, scales, **step, m=m, momentum=0.5)
        assert torch.equal(m[first : first + count], sent_words / 2)
        assert torch.equal(x, -bit - sent_words * sent_words**2)
        silent = torch.zeros(2)
        kernels.sign_encode(runs, None, c, answer_words, packets, sent_scales=silent, answer_scales=scales, **rule)
        assert torch.equal(c[:count], sent_words)
        kernels.momentum_encode(runs, x, m, c, packets, sent_scales=scales, rate=1.0, output=2, **rule)
        assert torch.equal(m[first : first + count], sent_words / 2 + x)
        assert torch.equal(c[:count], m[first : first + count])
        x.zero_()
        kernels.step_apply(runs, x, None, v, packets, **step)
        assert torch.equal(x, -m[first : first + count] * sent_words**2)
        m[first : first + count] = 1.0
        measure: dict[str, Any] = {"shrink": 1.0, "unbias": 1.0, "weight_decay": 0.0, "sums": sums}
        kernels.onebit_lamb_measure(runs, x, None, m, v, answer_words, scales, before, silent, **moments, **measure)
        assert torch.equal(v[first : first + count], sent_words**2)
        np.testing.assert_allclose(sums[:, 0].numpy(), [128, 4 * (count - 128)])
    assert not bool(m[: 1 << 20].any())
