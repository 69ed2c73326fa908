"""`clip_norm` and `clip_value` against the oracle, and what they promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles import clipping as oracle
from thinwire.kernels import ops
from thinwire.optimizers.clipping import CHUNK, SHARE, Clipping
from thinwire.transport.layout import Layout

SIZES = (1000, 7, 1, 130)
LIMITS = [(1.0, None), (None, 0.01), (0.5, 0.02)]
CPU = torch.device("cpu")


def layout_of(sizes: tuple[int, ...]) -> Layout:
    return Layout(sizes, 1, 1 << 22, slices=1, own_slice=0, device=CPU)


def bound(norm: float | None, value: float | None, sizes: tuple[int, ...] = SIZES, kernels: str = "native") -> Clipping:
    clipping = Clipping(norm, value)
    clipping.bind(layout_of(sizes), ops.BACKENDS[kernels])
    clipping.begin_step()
    return clipping


def clipped(clipping: Clipping, gradients: list[Tensor | None], scale: float = 1.0) -> list[Any]:
    """What encoders see: the product of the gradient and the scale, in float32."""
    out: list[Any] = []
    for position, grad in enumerate(gradients):
        if grad is None:
            out.append(None)
        else:
            vector, factor = clipping.clip(position, grad, scale)
            out.append((vector.float() * torch.tensor(factor, dtype=torch.float32)).numpy().copy())
    clipping.end_step()
    clipping.begin_step()
    return out


def gradients_of(step: int, sizes: tuple[int, ...], size: float = 1.0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return [
        None if (step + i) % 5 == 4 else size * (i + 1) * torch.randn(n, generator=generator)
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.3])
@pytest.mark.parametrize(("norm", "value"), LIMITS)
def test_it_is_the_oracle_to_the_bit(norm: float | None, value: float | None, scale: float, kernels: str) -> None:
    sizes = tuple(reversed(SIZES))  # the flat space is in reverse order
    ours, expected = bound(norm, value, SIZES, kernels), oracle.Clipping(sizes, norm, value)
    for step in range(12):
        spike = 1e4 if step % 5 == 3 else 1e-3 if step % 5 == 1 else 0.1
        gradients = gradients_of(step, sizes, spike)
        got = clipped(ours, gradients, scale)
        want = expected.step([None if g is None else g.numpy() for g in gradients], scale)
        for mine, other in zip(got, want, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or other is None or np.array_equal(mine.view(np.int32), other.view(np.int32))
        if norm is not None:
            assert ours._shares.tolist() == expected.shares


def test_norms_of_long_and_low_precision_gradients() -> None:
    size = CHUNK + 4711
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grad = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
        ours, expected = bound(1.0, None, (size,)), oracle.Clipping([size], 1.0, None)
        (got,), (want,) = clipped(ours, [grad]), expected.step([grad.float().numpy()])
        assert want is not None
        assert np.array_equal(got.view(np.int32), want.view(np.int32))
        assert math.isclose(float(np.linalg.norm(got.astype(np.float64))), 1.0, rel_tol=1e-5)


def test_the_norm_of_the_whole_gradient_never_exceeds_the_limit() -> None:
    clipping = bound(0.5, None)
    for step in range(40):
        gradients = gradients_of(step, tuple(reversed(SIZES)), 10.0 ** ((7 * step) % 9 - 4))
        if step % 3 == 0:  # a spike in a single parameter
            gradients[step % 4] = torch.full((SIZES[3 - step % 4],), 1e6)
        whole = np.concatenate([each for each in clipped(clipping, gradients) if each is not None])
        assert np.linalg.norm(whole.astype(np.float64)) <= 0.5 * (1 + 1e-6)


def test_ordinary_gradients_pass_and_a_spike_in_all_parameters_keeps_its_direction() -> None:
    """Where global clipping does nothing, so does this, once the shares are known and there is some room."""
    sizes = tuple(reversed(SIZES))
    base: list[Tensor | None] = [0.01 * (i + 1) * torch.ones(n) for i, n in enumerate(sizes)]
    norm = math.sqrt(sum(float((g**2).sum()) for g in base if g is not None))
    clipping = bound(2 * norm, None)
    for _ in range(60):
        clipped(clipping, base)
    for grad, got in zip(base, clipped(clipping, base), strict=True):
        assert grad is not None
        assert np.array_equal(got, grad.numpy())
    got = np.concatenate(clipped(clipping, [1e4 * g for g in base if g is not None]))
    whole = torch.cat([g for g in base if g is not None]).numpy()
    cosine = float(got @ whole) / float(np.linalg.norm(got) * np.linalg.norm(whole))
    assert cosine > 0.95
    assert 1.2 * norm < np.linalg.norm(got) <= 2 * norm * (1 + 1e-6)


def test_a_parameter_that_had_no_gradient_for_long_gets_a_part_of_the_limit() -> None:
    sizes = (100, 100)
    clipping = bound(1.0, None, sizes)
    for _ in range(2000):
        clipped(clipping, [torch.ones(100), None])
    _, late = clipped(clipping, [None, torch.full((100,), 1e3)])
    assert np.linalg.norm(late) == pytest.approx(0.5, rel=1e-5)  # sqrt((0 + 1/2) / 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("norm", "value"), LIMITS)
def test_what_is_not_finite_stays_so_and_does_not_enter_the_shares(
    norm: float | None, value: float | None, bad: float
) -> None:
    clipping = bound(norm, value)
    before = clipping._shares.clone()
    grad = torch.ones(SIZES[3])
    grad[5] = bad
    first, *_ = clipped(clipping, [grad, None, None, None])
    assert not np.isfinite(first[5])
    assert torch.equal(clipping._shares, before)


def test_a_norm_that_overflows_skips_the_step() -> None:
    first, *_ = clipped(bound(1.0, None), [torch.full((SIZES[3],), 1e30), None, None, None])
    assert np.isnan(first).all()


def test_steps_without_gradients_or_with_zeros_change_nothing() -> None:
    clipping = bound(1.0, None)
    before = clipping._shares.clone()
    clipped(clipping, [None] * 4)
    zeros = clipped(clipping, [torch.zeros(n) for n in reversed(SIZES)])
    assert not any(each.any() for each in zeros)
    assert torch.equal(clipping._shares, before)


def test_a_loss_scale_that_stays_in_the_gradients() -> None:
    """As in `compress`: limits apply to the gradients of the loss without the scale."""
    gradients = gradients_of(0, tuple(reversed(SIZES)), 3.0)
    plain, scaled = bound(1.0, 0.5), bound(1.0, 0.5)
    scaled.loss_scale = 1024.0
    for step in range(3):
        expected = clipped(plain, gradients)
        got = clipped(scaled, [None if g is None else g * 1024 for g in gradients])
        for mine, other in zip(got, expected, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or np.array_equal(mine, other * np.float32(1024)), step


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", [1.0]])
def test_limits_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*: expected a number > 0, or None for no clipping"):
        thinwire.Birder([torch.nn.Parameter(torch.ones(3))], **{name: value})


def test_shares_are_saved_and_only_with_a_norm() -> None:
    def optimizer(**options: Any) -> thinwire.Birder:
        made = thinwire.Birder([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))], **options)
        for p in made.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 2.0)
        made.step()
        return made

    clipping, plain = optimizer(clip_norm=1.0), optimizer(clip_value=1.0)
    saved = clipping.state_dict()
    assert [float(saved["state"][i][SHARE]) for i in range(2)] == pytest.approx([3 / 8, 5 / 8])
    assert not any(SHARE in state for state in plain.state_dict()["state"].values())
    # A run may be resumed with other limits, and is told that it is another run.
    for source, target in ((clipping, plain), (plain, clipping)):
        with pytest.warns(RuntimeWarning, match="clip_norm=1.0"):
            target.load_state_dict(source.state_dict())
    saved["state"][0][SHARE].fill_(1.5)
    with pytest.raises(ValueError, match="'clip_share' in the state dict has a share that is not in"):
        clipping.load_state_dict(saved)
