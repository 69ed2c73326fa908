"""Birder's Triton kernels, interpreted on the CPU, equal the reference to the bit."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import test_kernels as flat
from tests.unit import test_kernels_node as node
from tests.unit.kernel_cases import (
    REFERENCE,
    WORD,
    activity_refresh_case,
    allocation,
    copy_of,
    each_grad,
    each_low,
    each_state,
    either_amsgrad,
    encode_case,
    guarded,
    hard_gradient,
    long,
    random,
)
from tests.unit.sign_cases import dense_encode_case
from thinwire.kernels.modes import Gate

pytest.importorskip("triton")
# NumPy, in which Triton's interpreter computes, warns of every infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TILE = 32 * WORD
TAILS = (1, 63, 64, 65, TILE, 2 * TILE + 321)
OTHERS = 0b100
"""A bit in `bad` that another kernel has raised."""
REPORT = {"birder_encode", "birder_direction", "dense_encode"}


def same_as_reference(
    operation: str, arguments: dict[str, Any], *, gate: Gate | None = None, shared: tuple[str, ...] = ()
) -> Any:
    """Calls an operation of the reference, in place, and of the Triton kernels on copies; all memory must be the same.

    A scale that is a tensor is a float for the reference, which knows of no gates. Arguments that are `shared` are
    neither copied nor compared. Returns what the reference has returned.
    """
    copy = {name: argument if name in shared else copy_of(argument) for name, argument in arguments.items()}
    if isinstance(arguments.get("scale"), Tensor):
        arguments = arguments | {"scale": float(arguments["scale"])}
    bad = guarded(torch.tensor([OTHERS], dtype=torch.int32))
    expected = None
    if gate is None or int(gate.open[gate.parameter]):
        expected = getattr(REFERENCE, operation)(**arguments)
    options: dict[str, Any] = {} if gate is None else {"gate": gate}
    if operation in REPORT:
        options["bad"] = bad
    kernels = importlib.import_module("thinwire.kernels.triton")
    assert getattr(kernels, operation)(**copy, **options) is None
    assert int(bad) == OTHERS | int(bool(expected))
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) and name not in shared:
            wrong = (allocation(copy[name]) != allocation(argument)).nonzero().flatten().tolist()
            assert not wrong, f"{operation}: {name} differs in {len(wrong)} bytes, first {wrong[:4]}"
    return expected


# Encode and direction -------------------------------------------------------------------------------------------------


@each_state
@each_grad
@either_amsgrad
def test_encode_for_every_tail(grad_dtype: torch.dtype | None, state_dtype: torch.dtype, amsgrad: bool) -> None:
    options: dict[str, Any] = {"grad_dtype": grad_dtype, "state_dtype": state_dtype, "amsgrad": amsgrad}
    for seed, count in enumerate(TAILS):
        assert same_as_reference("birder_encode", encode_case(count, seed=seed, **options)) is False
        assert same_as_reference("birder_direction", node.direction_case(count, seed=seed, **options)) is False
    other = {"beta_b": 0.95, "level": 0.3}
    assert same_as_reference("birder_encode", encode_case(200, seed=1, **options) | other) is False
    assert same_as_reference("birder_direction", node.direction_case(200, seed=1, **options) | other) is False


@each_state
@each_grad
def test_encode_for_many_runs_and_steps(grad_dtype: torch.dtype | None, state_dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"pieces": 5, "grad_dtype": grad_dtype, "state_dtype": state_dtype, "eps": 1e-5}
    bits, floats = encode_case(3000, seed=4, **options), node.direction_case(3000, seed=4, **options)
    for step in range(3):
        if grad_dtype is not None:
            bits["grad"] = floats["grad"] = hard_gradient(3000, grad_dtype, random(step))
        same_as_reference("birder_encode", bits | {"key": step})
        same_as_reference("birder_direction", floats)


@each_state
@either_amsgrad
def test_encode_with_gradients_that_are_not_finite(state_dtype: torch.dtype, amsgrad: bool) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        options: dict[str, Any] = {"grad_dtype": grad_dtype, "state_dtype": state_dtype, "amsgrad": amsgrad}
        for count in (65, TILE + 1):
            bits = encode_case(count, seed=count, finite=False, **options)
            assert same_as_reference("birder_encode", bits) is True
            floats = node.direction_case(count, seed=count, finite=False, **options)
            assert same_as_reference("birder_direction", floats) is True


@pytest.mark.parametrize("of_tile", [0, TILE - 1, TILE, TILE + 64])
def test_encode_reports_a_single_non_finite_gradient(of_tile: int) -> None:
    case = encode_case(TILE + 65, seed=1, grad_dtype=torch.float32, state_dtype=torch.float32)
    case["grad"][of_tile] = torch.nan
    assert same_as_reference("birder_encode", case) is True


@each_state
@pytest.mark.parametrize("scale", [-1.0, 2.0**-16, 1 / 3, 0.0, 1e-30, 1e30, 1e-40])
def test_encode_with_scaled_gradients(state_dtype: torch.dtype, scale: float) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        options: dict[str, Any] = {"grad_dtype": grad_dtype, "state_dtype": state_dtype}
        for given in (scale, torch.tensor([scale])):
            same_as_reference("birder_encode", encode_case(500, seed=7, scale=given, **options))
            same_as_reference("birder_direction", node.direction_case(500, seed=7, scale=given, **options))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_encode_reads_and_rounds_every_half_as_torch_does(grad_dtype: torch.dtype) -> None:
    """All 65536 of them, into states that are rounded: beta = 0 copies the gradient into m."""
    case = encode_case(65536, seed=0, grad_dtype=grad_dtype, state_dtype=torch.bfloat16, beta=0.0)
    case["grad"] = torch.arange(-32768, 32768, dtype=torch.int16).view(grad_dtype)
    assert same_as_reference("birder_encode", case) is True


@pytest.mark.parametrize("elements_off", [1, 3, 7])
def test_encode_takes_gradients_at_any_address(elements_off: int) -> None:
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        options: dict[str, Any] = {"grad_dtype": grad_dtype, "state_dtype": torch.float32, "grad_off": elements_off}
        same_as_reference("birder_encode", encode_case(TILE + 70, seed=2, **options))
        same_as_reference("birder_direction", node.direction_case(TILE + 70, seed=2, **options))


@pytest.mark.parametrize("active", ["all", "none"])
@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("eps", [0.0, 1e-40, 1e-3])
def test_encode_with_any_key(active: str, key: int, eps: float) -> None:
    options: dict[str, Any] = {"grad_dtype": torch.float32, "state_dtype": torch.bfloat16, "active": active}
    same_as_reference("birder_encode", encode_case(200, seed=9, key=key, eps=eps, **options))


@each_state
@pytest.mark.parametrize("first", [64, 2**32 - TILE // 2, 2**32 + 128, 5 * 2**32 - 64, 2**40])
def test_direction_of_a_slice_of_a_large_model(state_dtype: torch.dtype, first: int) -> None:
    case = node.direction_case(2 * TILE, seed=5, grad_dtype=torch.float32, state_dtype=state_dtype, pieces=3)
    case["runs"][:, 0] += first
    same_as_reference("birder_direction", case | {"shift": first})


@each_state
@pytest.mark.parametrize("first", [64, 2**32 - TILE // 2, 2**32 + 128, 5 * 2**32 - 64])
def test_encode_of_a_slice_of_a_large_model(state_dtype: torch.dtype, first: int) -> None:
    """Random numbers depend on the upper half of an element too; of the map only the slice's words are ever touched."""
    case = encode_case(2 * TILE, seed=5, grad_dtype=torch.float32, state_dtype=state_dtype, pieces=3)
    active, case["active"] = case["active"], torch.empty(first // WORD + case["active"].numel(), dtype=torch.int64)
    case["active"][first // WORD :] = active
    case["runs"][:, 0] += first
    same_as_reference("birder_encode", case | {"shift": first}, shared=("active",))
    assert torch.equal(case["active"][first // WORD :], active)


# Dense exchanges ------------------------------------------------------------------------------------------------------


@each_grad
def test_dense_encode(grad_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        case = dense_encode_case(count, seed=seed, grad_dtype=grad_dtype, pieces=1 + seed % 4)
        for scale in (1.0, 1 / 3, torch.tensor([-0.25])):
            assert same_as_reference("dense_encode", case | {"scale": scale}) is False
    if grad_dtype is not None:
        for grad_off in (1, 5):
            case = dense_encode_case(TILE + 1, seed=3, grad_dtype=grad_dtype, finite=False, grad_off=grad_off)
            assert same_as_reference("dense_encode", case) is True


@node.each_row
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_mean(dtype: torch.dtype, rows: int) -> None:
    for seed, count in enumerate((1, 64, 1023, 1024, 2049)):
        same_as_reference("mean", node.mean_case(rows, count, seed=seed, dtype=dtype))


# Activity -----------------------------------------------------------------------------------------------------------


@each_state
def test_activity_refresh_over_shard_boundaries(state_dtype: torch.dtype) -> None:
    """Shards that are shorter and longer than the period, and every phase: some shards have no word to refresh."""
    for shard_words in (1, 4, 13):
        for phase in range(4):
            same_as_reference(
                "activity_refresh", activity_refresh_case(shard_words, 3, 7, 4, phase, phase, state_dtype)
            )
    same_as_reference("activity_refresh", activity_refresh_case(300, 2, 129, 256, 255, 0, state_dtype))
    same_as_reference("activity_refresh", activity_refresh_case(70, 2, 5, 2, 1, 0, state_dtype, shift=128))


@pytest.mark.parametrize("planes", [1, 3])
def test_activity_update(planes: int) -> None:
    for shard_words in (1, 4, 13, 515):
        for phase in (0, 3):
            same_as_reference("activity_update", flat.activity_update_case(shard_words, 2, 7, 4, phase, phase, planes))
    same_as_reference("activity_update", flat.activity_update_case(520, 2, 300, 256, 1, 0, planes))


# Votes ----------------------------------------------------------------------------------------------------------------

WORKERS = (1, 2, 3, 6, 8, 11)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("active", ["all", "some", "none", None], ids=str)
def test_vote_bit(workers: int, active: str | None) -> None:
    for words in (1, 65):
        same_as_reference("vote_bit", flat.vote_case(workers, words, active, seed=words))


def test_votes_of_many() -> None:
    same_as_reference("vote_bit", flat.vote_case(33, 2, "some", seed=3))
    same_as_reference("vote_majority", flat.majority_case(33, 2, "some", seed=3))
    same_as_reference("vote_majority", flat.majority_case(300, 2, "some", seed=3))
    same_as_reference("vote_count", flat.count_case(300, 2, "some", seed=3))


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1, 2**63, 2**64 - 2])
def test_vote_bit_with_any_key(key: int) -> None:
    same_as_reference("vote_bit", flat.vote_case(7, 3, "all", seed=2) | {"key": key})


@pytest.mark.parametrize("first_word", [2**26 - 1, 2**26 + 5, 2**27])
def test_vote_bit_of_a_large_model(first_word: int) -> None:
    case = flat.vote_case(5, 3, "all", seed=0)
    case["active"] = torch.empty(first_word + 3, dtype=torch.int64)
    case["active"][first_word:] = -1
    same_as_reference("vote_bit", case | {"first_word": first_word}, shared=("active",))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("active", ["all", "some", "none"])
def test_vote_majority(workers: int, active: str) -> None:
    for words in (1, 65):
        same_as_reference("vote_majority", flat.majority_case(workers, words, active, seed=words))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("active", ["all", "some", "none"])
def test_vote_count(workers: int, active: str) -> None:
    for words in (1, 65):
        same_as_reference("vote_count", flat.count_case(workers, words, active, seed=words))


@pytest.mark.parametrize("workers", [3, *long(1, 8)])
def test_the_signal_is_sampled_alike(workers: int) -> None:
    words = flat.SIGNAL_BLOCK + 70  # two samples, the second one cut short
    same_as_reference("vote_count", flat.count_case(workers, words, "some", seed=0))
    same_as_reference("vote_bit", flat.vote_case(workers, words, "some", seed=1))
    same_as_reference("vote_bit", flat.vote_case(workers, words, "some", seed=1, signal=False))
    same_as_reference("vote_majority", flat.majority_case(workers, words, "some", seed=2))


# Steps ----------------------------------------------------------------------------------------------------------------


@each_low
@pytest.mark.parametrize("workers", [0, 1, 3, 33])
def test_apply_for_every_tail(low_dtype: torch.dtype | None, workers: int) -> None:
    for seed, count in enumerate(TAILS):
        options: dict[str, Any] = {
            "seed": seed,
            "low_dtype": low_dtype,
            "pieces": 1 + seed % 3,
            "loaded": seed % 2 == 1,
        }
        same_as_reference("birder_apply", flat.apply_case(count, workers=workers, **options))


@each_low
def test_dense_apply_for_every_tail(low_dtype: torch.dtype | None) -> None:
    for seed, count in enumerate(TAILS):
        options: dict[str, Any] = {
            "seed": seed,
            "low_dtype": low_dtype,
            "pieces": 1 + seed % 3,
            "loaded": seed % 2 == 1,
        }
        for resting in ("some", "all", "none"):
            same_as_reference("dense_apply", node.dense_case(count, resting=resting, **options))


@each_low
@pytest.mark.parametrize("rates", [(0.0, 1.0), (10.0, -0.5), (1e-40, 0.999)])
def test_apply_with_any_rate(low_dtype: torch.dtype | None, rates: tuple[float, float]) -> None:
    lr, decay = rates
    options: dict[str, Any] = {"seed": 6, "low_dtype": low_dtype, "x_off": 3, "lr": lr, "decay": decay}
    same_as_reference("birder_apply", flat.apply_case(500, workers=5, active="all", **options))
    same_as_reference("birder_apply", flat.apply_case(500, workers=0, **options))
    same_as_reference("dense_apply", node.dense_case(500, **options))


@pytest.mark.parametrize("parameter", [0, 1, 2])
def test_nothing_is_written_where_a_gate_is_closed(parameter: int) -> None:
    gate = Gate(torch.tensor([0, 1, 0], dtype=torch.int32), parameter)
    for count in (65, TILE):
        options: dict[str, Any] = {"seed": 1, "low_dtype": torch.bfloat16, "loaded": True}
        same_as_reference("birder_apply", flat.apply_case(count, **options), gate=gate)
        same_as_reference("dense_apply", node.dense_case(count, **options), gate=gate)
    same_as_reference("activity_update", flat.activity_update_case(13, 3, 7, 4, 1, 0, 2), gate=gate)
