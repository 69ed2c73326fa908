"""The messages of Markov compression add up, and bad gradients are not taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.formulas import Places, double
from tests.unit.kernel_cases import WORD, allocation, each_backend, guarded, kernels_of, random, random_words
from tests.unit.markov_cases import each_activity, each_momentum, markov_difference_case, markov_encode_case
from tests.unit.sign_cases import GRADIENTS, in_flat
from thinwire.kernels.modes import MarkovMode

# Messages add up -----------------------------------------------------------------------------------------------------


@each_backend
@each_momentum
def test_messages_add_up_to_what_is_known(backend: str, momentum: bool) -> None:
    """The sum of all messages is what the worker has in `known`, to the bit."""
    case = markov_encode_case(300, seed=0, momentum=momentum, active="all", scale=1.0)
    answer_words, silence = torch.zeros(300), torch.zeros_like(case["sent_mask"])
    case["known"].copy_(in_flat(torch.zeros(300), 0))
    case["sent_mask"] = silence
    places = Places(case["runs"])
    for step in range(12):
        case["grad"] = torch.randn(300, generator=random(step)) * 2.0**step
        with kernels_of(backend) as kernels:
            assert kernels.markov_encode(**case) is False
        assert torch.equal(case["known"][:300], answer_words)
        scale = torch.tensor(float(case["sums"][0, 0] / case["sums"][0, 2]), dtype=torch.float32)
        case["sent_scales"][1] = scale
        answer_words = answer_words + torch.where(torch.from_numpy(places.bits(case["packets"])), scale, -scale)
        case["sent_mask"] = case["active"]


@each_backend
def test_each_message_brings_what_is_known_nearer(backend: str) -> None:
    """With the mean magnitude as the scale, a message takes n s^2 off the square of the distance."""
    case = markov_encode_case(500, seed=2, active="all", scale=1.0)
    first, n = 2 * WORD, 500
    case["known"].copy_(in_flat(torch.zeros(n), 2))
    case["grad"] = torch.randn(n, generator=random(1)) ** 3
    case["sent_mask"] = torch.zeros_like(case["sent_mask"])
    left = float((case["grad"].double() ** 2).sum())
    beginning = left
    for _ in range(30):
        with kernels_of(backend) as kernels:
            kernels.markov_encode(**case)
        magnitudes, squares, is_active = case["sums"][0].tolist()
        assert is_active == n
        assert squares == pytest.approx(left, rel=1e-4)
        distance = case["grad"].double() - case["known"][first : first + n].double()
        assert squares == pytest.approx(float((distance**2).sum()), rel=1e-4)
        scale = magnitudes / n
        case["sent_scales"][1] = scale
        case["sent_mask"] = case["active"]
        left = squares - n * scale**2
    assert left < 0.2 * beginning


@each_backend
@each_momentum
def test_an_activation_round_and_the_next_message_equal_an_ordinary_message(backend: str, momentum: bool) -> None:
    """A worker that learns the activation map from activation bits sends what a worker sends that knew it before.

    Without a momentum the gradient is recalled, with one it is already in it. Inactive coordinates forget it.
    """
    count = 700
    options: dict[str, Any] = {"seed": 3, "pieces": 4, "momentum": momentum, "shift": 2 * WORD}
    greeting, direct = markov_encode_case(count, **options), markov_encode_case(count, **options)
    places = Places(direct["runs"])
    own = places.element - 2 * WORD
    awake = guarded(random_words(direct["active"].numel(), random(9)))
    for case in (greeting, direct):
        case["known"].copy_(in_flat(torch.zeros(count), 3)[2 * WORD :])
        case["sent_mask"].zero_()
    with kernels_of(backend) as kernels:
        kernels.markov_encode(**(direct | {"active": awake}))
        kernels.markov_encode(**(greeting | {"active": torch.zeros_like(awake), "mode": MarkovMode.ACTIVATION}))
        meant = double(greeting["m" if momentum else "known"])[own]
        np.testing.assert_array_equal(places.bits(greeting["packets"]), meant != 0)
        assert not greeting["sums"].any()
        again = {"active": awake, "grad": None, "mode": MarkovMode.ORDINARY if momentum else MarkovMode.REPLAY}
        kernels.markov_encode(**(greeting | again))
    for name in ("packets", "sent_words", "known", "m"):
        if direct[name] is not None:
            assert torch.equal(allocation(greeting[name]), allocation(direct[name])), name
    assert torch.equal(greeting["sums"], direct["sums"])
    assert not double(greeting["known"])[own].any()


# What must not be taken in -------------------------------------------------------------------------------------------

BAD = [
    (0, torch.nan),
    (31, torch.inf),
    (32, -torch.inf),
    (63, torch.nan),
    (64, -torch.inf),
    (192, torch.inf),
    (199, torch.nan),
]
"""Where one gradient is bad, and what it is."""


def encoded(
    backend: str, gradient: Tensor | None, *, mode: int, momentum: bool, active: str
) -> tuple[bool | None, dict[str, Any]]:
    case = markov_encode_case(200, seed=2, pieces=3, mode=mode, momentum=momentum, active=active, scale=1.0)
    with kernels_of(backend) as kernels:
        return kernels.markov_encode(**(case | {"grad": gradient})), case


@each_backend
@each_activity
@pytest.mark.parametrize("mode", [MarkovMode.ORDINARY, MarkovMode.ACTIVATION], ids=["ordinary", "activation"])
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_a_bad_gradient_repeats_the_last_value(backend: str, mode: int, grad_dtype: torch.dtype, active: str) -> None:
    """As if the gradient were what is known already; the other elements are what they are without it."""
    gradient = torch.randn(200, generator=random(1)).to(grad_dtype)
    good, ordinary = encoded(backend, gradient, mode=MarkovMode.ORDINARY, momentum=False, active=active)
    assert good is False
    before = ordinary["known"][Places(ordinary["runs"]).element]
    for where, bad in BAD:
        repeated = gradient.float()
        repeated[where] = before[where]
        _, expected = encoded(backend, repeated, mode=mode, momentum=False, active=active)
        with_it = gradient.clone()
        with_it[where] = bad
        found, case = encoded(backend, with_it, mode=mode, momentum=False, active=active)
        assert found is True
        for name in ("known", "sent_words", "packets", "sums"):
            assert torch.equal(allocation(case[name]), allocation(expected[name])), name
        assert bool(case["sums"].isfinite().all())


@each_backend
@each_activity
@pytest.mark.parametrize("mode", [MarkovMode.ORDINARY, MarkovMode.ACTIVATION], ids=["ordinary", "activation"])
@pytest.mark.parametrize("grad_dtype", GRADIENTS, ids=str)
def test_a_momentum_keeps_its_value_when_the_gradient_is_bad(
    backend: str, mode: int, grad_dtype: torch.dtype, active: str
) -> None:
    gradient = torch.randn(200, generator=random(1)).to(grad_dtype)
    good, expected = encoded(backend, gradient, mode=mode, momentum=True, active=active)
    _, without = encoded(backend, None, mode=mode, momentum=True, active=active)
    assert good is False
    places = Places(expected["runs"])
    for where, bad in BAD:
        here = np.arange(200) == where
        with_it = gradient.clone()
        with_it[where] = bad
        found, case = encoded(backend, with_it, mode=mode, momentum=True, active=active)
        assert found is True
        for name in ("m", "known"):
            mixed = np.where(here, double(without[name])[places.element], double(expected[name])[places.element])
            np.testing.assert_array_equal(double(case[name])[places.element], mixed)
        mixed = np.where(here, places.bits(without["packets"]), places.bits(expected["packets"]))
        np.testing.assert_array_equal(places.bits(case["packets"]), mixed)
        assert bool(case["sums"].isfinite().all())


@each_backend
@each_momentum
@pytest.mark.parametrize("active", ["all", "none"])
def test_a_change_stays_below_two_to_the_60(backend: str, momentum: bool, active: str) -> None:
    below = torch.nextafter(torch.tensor(2.0**60), torch.tensor(0.0))
    for sign in (1.0, -1.0):
        for value, bad in ((below, False), (torch.tensor(2.0**60), True)):
            options: dict[str, Any] = {"seed": 0, "momentum": momentum, "beta": 0.0, "weight": 1.0}
            case = markov_encode_case(WORD, active=active, **options)
            for name in ("grad", "known", "sent_mask", "m"):
                if case[name] is not None:
                    case[name].zero_()
            case["grad"][7] = sign * value
            other = markov_difference_case(WORD, **options)
            other |= {name: case[name] if case[name] is None else case[name].clone() for name in ("grad", "known", "m")}
            with kernels_of(backend) as kernels:
                assert kernels.markov_encode(**case) is bad
                assert kernels.markov_difference(**other) is bad
            taken_in = 0.0 if bad else float(sign * value)
            assert float(other["c"][7]) == taken_in
            if momentum:
                assert float(case["m"][7]) == taken_in
            if active == "all":
                assert case["sums"][0].tolist() == [abs(taken_in), float((other["c"][7] ** 2).double()), WORD]
            bit = int(case["sent_words"][0]) >> 7 & 1
            assert bit == (taken_in >= 0 if active == "all" else taken_in != 0)
