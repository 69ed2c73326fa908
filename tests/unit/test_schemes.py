"""Schemes that average gradients: sizes, options, what the papers promise of their codecs, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import averaging
from tests.oracles.averaging import Compress, Keys
from tests.unit.kernel_cases import PATIENT, SEEDS
from thinwire.averaging.catalogue import rule_of
from thinwire.compressors.chunked_topk import ChunkedTopKScheme
from thinwire.compressors.codecs import Codec, RandomCodec
from thinwire.compressors.codecs.block_sign import BlockSign, FixedSign, HalfMeans
from thinwire.compressors.codecs.chunked_topk import ChunkedTopK
from thinwire.compressors.codecs.dct_topk import DctTopK
from thinwire.compressors.codecs.levels import Levels
from thinwire.compressors.codecs.natural import Natural
from thinwire.compressors.codecs.randomk import RandomK
from thinwire.compressors.codecs.sign import Sign
from thinwire.compressors.codecs.topk import TopK, Union
from thinwire.compressors.dct_topk import DctTopKScheme
from thinwire.compressors.error_feedback import ErrorFeedback
from thinwire.compressors.gradient_compressor import Scheme
from thinwire.compressors.gtopk import GlobalTopKScheme
from thinwire.compressors.laq import LaqScheme
from thinwire.compressors.natural import NaturalScheme
from thinwire.compressors.onebit_sgd import OneBitSGDScheme
from thinwire.compressors.qsgd import QSGDScheme
from thinwire.compressors.randomk import RandomKScheme
from thinwire.compressors.sign import SignScheme
from thinwire.compressors.signsgd import SignSGDScheme
from thinwire.compressors.sketched import CountSketchScheme
from thinwire.compressors.terngrad import TernGradScheme
from thinwire.compressors.topk import TopKScheme
from thinwire.errors import CorruptPacket
from thinwire.kernels.ops import BACKENDS
from thinwire.transport.buffers import PacketBuffers
from thinwire.transport.layout import Layout
from thinwire.transport.packet import HEADER_BYTES

NATIVE = BACKENDS["native"]
SCHEMES: dict[str, Scheme] = {
    "topk": TopKScheme(),
    "topk, dense answers": TopKScheme(0.3),
    "gtopk": GlobalTopKScheme(),
    "randomk": RandomKScheme(),
    "chunked_topk": ChunkedTopKScheme(),
    "chunked_topk, union": ChunkedTopKScheme(union=True),
    "dct_topk": DctTopKScheme(),
    "qsgd": QSGDScheme(),
    "qsgd, error feedback": QSGDScheme(error_feedback=True),
    "qsgd, 2 bits": QSGDScheme(levels=1),
    "qsgd, 8 bits": QSGDScheme(levels=8, block=64),
    "terngrad": TernGradScheme(),
    "natural": NaturalScheme(),
    "natural, error feedback": NaturalScheme(error_feedback=True),
    "sign": SignScheme(),
    "sign, blocks": SignScheme(block=128),
    "signsgd": SignSGDScheme(),
    "onebit_sgd": OneBitSGDScheme(),
    "laq": LaqScheme(),
    "count_sketch": CountSketchScheme(),
    "count_sketch, momentum": CountSketchScheme(momentum=0.9),
}
each_scheme = pytest.mark.parametrize("name", SCHEMES)

PADDED = [130, 0, 1, 700, 65]


class Worker:
    """A single worker, which owns all shards: what it sends, it merges."""

    def __init__(self, scheme: Scheme, numels: Sequence[int] = PADDED, bucket: int = 400) -> None:
        self.layout = Layout(numels, 1, bucket)
        self.compressor = scheme.bind(self.layout, 0, NATIVE)
        self.buffers = PacketBuffers(self.layout, self.compressor.payload, alone=True)
        self.compressor.bind(self.buffers)
        self.live = torch.zeros(self.layout.size, dtype=torch.bool)
        for slot in self.layout.slots:
            self.live[slot.start : slot.start + slot.numel] = True
        self.steps = 0

    def encode(self, flat: Tensor, scale: float = 1.0) -> bool:
        """A gradient over the flat space; whether it was not finite."""
        self.steps += 1
        self.compressor.begin_step(self.steps)
        bad = False
        for slot, parts in zip(self.layout.slots, self.buffers.parts, strict=True):
            for part in parts:
                bad |= bool(self.compressor.encode(part, flat[slot.start : slot.start + slot.numel], scale))
        return bad

    def exchange(self) -> Tensor:
        """The answer over the flat space."""
        for frame in self.buffers.frames:
            self.compressor.seal(frame)
            self.compressor.merge(frame, 0)
        self.compressor.read_answers()
        return self.answer()

    def answer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        flat = torch.zeros(self.layout.size, dtype=dtype)
        for slot, parts in zip(self.layout.slots, self.buffers.parts, strict=True):
            for part in parts:
                self.compressor.decode(part, flat[slot.start : slot.start + slot.numel])
        return flat

    def step(self, flat: Tensor) -> Tensor:
        assert not self.encode(flat)
        return self.exchange()

    def gradient(self, seed: int) -> Tensor:
        return torch.randn(self.layout.size, generator=torch.Generator().manual_seed(seed)) * self.live

    def state(self) -> list[Tensor]:
        state = self.compressor.state()
        kinds = (state.own, state.owned, state.whole, state.shards)
        return [tensor for kind in kinds for tensor in kind.values()]


# Sizes ---------------------------------------------------------------------------------------------------------------


@each_scheme
@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_packets_have_the_bits_of_the_scheme(name: str, workers: int) -> None:
    """Within 2 %, for shards of 100,000 elements and more."""
    scheme, elements = SCHEMES[name], 64 * 1600
    payload = scheme.bind(Layout([elements * workers], workers, 1 << 30), 0, NATIVE).payload
    for words, bits in zip((payload.up_words, payload.down_words), scheme.bits_per_value(workers), strict=True):
        assert 64 * words(elements // 64) / elements == pytest.approx(bits, rel=0.02)


def test_the_bits_are_those_of_the_documentation() -> None:
    assert TopKScheme(0.01).bits_per_value(4) == (0.64, 2.56)
    assert TopKScheme(0.25).bits_per_value(4) == (16.0, 32.0)
    assert RandomKScheme(0.25).bits_per_value(4) == (8.0, 8.0)
    assert ChunkedTopKScheme().bits_per_value(4) == (928 / 4096, 928 / 4096)
    assert ChunkedTopKScheme(union=True).bits_per_value(4) == (928 / 4096, 3616 / 4096)
    assert ChunkedTopKScheme(k=2048, union=True).bits_per_value(4) == (28704 / 4096, 57376 / 4096)
    assert DctTopKScheme().bits_per_value(4) == (672 / 4096, 672 / 4096)
    assert QSGDScheme().bits_per_value(4) == (4.0625, 4.0625)
    assert TernGradScheme().bits_per_value(4) == (2.0625, 2.0625)
    assert NaturalScheme().bits_per_value(4) == (9.0, 9.0)
    assert SignScheme(block=64).bits_per_value(4) == (1.5, 1.5)
    assert SignSGDScheme().bits_per_value(4) == (1.0, 1.0)
    assert OneBitSGDScheme().bits_per_value(4) == (1.125, 1.125)
    assert CountSketchScheme(cells=0.125).bits_per_value(4) == (4.0, 0.64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKScheme(0.0), r"^ratio=0\.0: expected a number in \(0, 1\]"),
        (lambda: GlobalTopKScheme(1.5), r"^ratio=1\.5: expected a number in \(0, 1\]"),
        (lambda: RandomKScheme(math.nan), r"^ratio=nan: expected a number in \(0, 1\]"),
        (lambda: RandomKScheme(seed=-1), r"^seed=-1: expected an integer in \[0, 2\*\*63\)"),
        (lambda: ChunkedTopKScheme(k=6), r"^k=6: expected a multiple of 4 from 4 to 4096"),
        (lambda: ChunkedTopKScheme(union=1), r"^union=1: expected True or False"),  # type: ignore[arg-type]
        (lambda: DctTopKScheme(k=5), r"^k=5: expected an even number from 2 to 4096"),
        (lambda: DctTopKScheme(k=0), r"^k=0: expected an even number"),
        (lambda: ChunkedTopKScheme(k=8192), r"^k=8192: expected a multiple of 4 from 4 to 4096"),
        (lambda: QSGDScheme(levels=128), r"^levels=128: expected an integer from 1 to 127"),
        (lambda: QSGDScheme(block=0), r"^block=0: expected an integer from 8 to 2\*\*20"),
        (lambda: QSGDScheme(norm="l1"), r"^norm='l1': expected 'max' or 'l2'"),  # pyright: ignore[reportArgumentType]
        (lambda: QSGDScheme(error_feedback=1), r"^error_feedback=1: expected True or False"),  # pyright: ignore[reportArgumentType]
        (lambda: TernGradScheme(block=7), r"^block=7: expected an integer from 8 to 2\*\*20"),
        (lambda: NaturalScheme(seed=True), r"^seed=True: expected an integer in \[0, 2\*\*63\)"),
        (lambda: SignScheme(block=4), r"^block=4: expected an integer from 8 to 2\*\*20"),
        (lambda: SignSGDScheme(scale=0.0), r"^scale=0\.0: expected a positive number"),
        (lambda: SignSGDScheme(scale=math.inf), r"^scale=inf: expected a positive number"),
        (lambda: OneBitSGDScheme(block=2**21), r"^block=2097152: expected an integer from 8 to 2\*\*20"),
        (lambda: CountSketchScheme(cells=0.6), r"^cells=0\.6: expected a number in \(0, 0\.5\]"),
        (lambda: CountSketchScheme(rows=16), r"^rows=16: expected an integer from 1 to 15"),
        (lambda: TopKScheme("0.1"), r"^ratio='0\.1': expected a number in \(0, 1\]"),  # pyright: ignore[reportArgumentType]
        (lambda: GlobalTopKScheme(True), r"^ratio=True: expected a number in \(0, 1\]"),
        (lambda: SignSGDScheme(scale=True), r"^scale=True: expected a positive number"),
        (lambda: CountSketchScheme(cells=None), r"^cells=None: expected a number in"),  # pyright: ignore[reportArgumentType]
        (lambda: CountSketchScheme(momentum=[1]), r"^momentum=\[1\]: expected a number in"),  # pyright: ignore[reportArgumentType]
        (lambda: LaqScheme(bits=2), r"^bits=2: expected 3, 4 or 8"),
        (lambda: LaqScheme(block=48), r"^block=48: expected 16, 32 or 64"),
        (lambda: LaqScheme(patience=-0.5), r"^patience=-0\.5: expected a number in \[0, 1\]"),
        (lambda: LaqScheme(patience=1.5), r"^patience=1\.5: expected a number in \[0, 1\]"),
        (lambda: LaqScheme(history=0), r"^history=0: expected a number of exchanges, at least 1"),
        (lambda: LaqScheme(max_age=-1), r"^max_age=-1: expected a number of exchanges, at least 0"),
        (lambda: CountSketchScheme(momentum=1.0), r"^momentum=1\.0: expected a number in \[0, 1\)"),
    ],
)
def test_invalid_options_are_refused_by_name(make: Callable[[], Scheme], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("decay", ["0.5", None, True, math.nan, 1.5, [1]])
def test_a_residual_decay_that_is_no_share_is_refused_by_name(decay: Any) -> None:
    with pytest.raises(ValueError, match=r"^residual_decay=.*: expected a number in \[0, 1\]"):
        rule_of("int4", {}, decay)


def test_laq_has_no_residual_to_decay_and_no_packets_of_fixed_length() -> None:
    with pytest.raises(ValueError, match=r"^residual_decay=0\.9 with compressor 'laq', which keeps no residuals"):
        rule_of("laq", {}, 0.9)
    with pytest.raises(ValueError, match=r"^compressor 'laq' with parameters on 'meta': expected parameters on"):
        LaqScheme().bind(Layout([64], 2, 64, device=torch.device("meta")), 0, NATIVE)


@pytest.mark.parametrize(
    ("name", "closest"), [("int5", "int"), ("TopK", "topk"), ("power_sgd", "powersgd"), ("none4", "none")]
)
def test_an_unknown_compressor_gets_the_list_and_the_closest_name(name: str, closest: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^compressor='{name}': expected one of int4, .*powersgd. Did you mean '{closest}"
    ):
        rule_of(name, {})


@each_scheme
def test_the_residual_of_workers_is_announced(name: str) -> None:
    state = SCHEMES[name].bind(Layout([64], 1, 64), 0, NATIVE).state()
    assert ("residual" in state.own) == SCHEMES[name].worker_residual


@each_scheme
def test_settings_are_the_options(name: str) -> None:
    scheme = SCHEMES[name]
    assert type(scheme)(**scheme.settings()) == scheme


# Codecs against their oracles ----------------------------------------------------------------------------------------

ORACLES: dict[str, tuple[Callable[[], Codec], Compress]] = {
    "top-k": (lambda: TopK(NATIVE, 0.1), averaging.top_k(0.1)),
    "random-k": (lambda: RandomK(NATIVE, 0.1), averaging.random_k(0.1)),
    "chunks": (lambda: ChunkedTopK(8), averaging.chunked_top_k(8)),
    "levels": (lambda: Levels(7, 96, "l2"), averaging.levels(7, 96, "l2")),
    "ternary": (lambda: Levels(1, 512, "max"), averaging.levels(1, 512, "max")),
    "natural": (Natural, averaging.natural),
    "sign": (lambda: Sign(NATIVE), averaging.scaled_sign(None)),
    "signs of blocks": (lambda: BlockSign(96), averaging.scaled_sign(96)),
    "half means": (lambda: HalfMeans(96), averaging.half_means(96)),
    "fixed signs": (lambda: FixedSign(0.25), averaging.fixed_sign(0.25)),
}


def through(codec: Codec, values: Tensor, own: int = 0, shared: int = 0) -> Tensor:
    if isinstance(codec, RandomCodec):
        codec.use_keys(own, shared)
    packet = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, packet)
    decoded = torch.zeros_like(values)
    codec.decode(packet, decoded)
    return decoded


def heavy_tailed(length: int, seed: int) -> Tensor:
    """Numbers of all sizes, some of them zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=draw) * 4.0 ** torch.randint(-4, 3, (length,), generator=draw)
    values[torch.rand(length, generator=draw) < 0.1] = 0.0
    return values


@pytest.mark.parametrize("name", ORACLES)
@PATIENT
@given(length=st.sampled_from([1, 64, 500, 5000]), seed=SEEDS, own=SEEDS, shared=SEEDS)
def test_a_codec_decodes_to_what_its_oracle_says(name: str, length: int, seed: int, own: int, shared: int) -> None:
    make, oracle = ORACLES[name]
    values = heavy_tailed(length, seed)
    wanted = oracle(values.double().numpy(), Keys(own, shared))
    np.testing.assert_allclose(through(make(), values, own, shared), wanted, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("name", ORACLES)
def test_long_vectors_are_encoded_piece_by_piece_as_one(name: str) -> None:
    make, oracle = ORACLES[name]
    values = heavy_tailed(70_001, 0)
    wanted = oracle(values.double().numpy(), Keys(1, 2))
    np.testing.assert_allclose(through(make(), values, 1, 2), wanted, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("length", [64, 500, 5000, 70_001])
def test_cosine_coefficients_are_those_of_the_oracle(length: int) -> None:
    for k in (2, 32):
        values = heavy_tailed(length, k)
        wanted = averaging.dct_top_k(k)(values.double().numpy(), Keys(0, 0))
        np.testing.assert_array_equal(through(DctTopK(k), values), wanted.astype(np.float32))


def test_a_cosine_is_one_coefficient() -> None:
    """A wave over rows and columns goes into one of 4,096 numbers; noise does not."""
    row, column = torch.arange(64)[:, None] + 0.5, torch.arange(64)[None, :] + 0.5
    wave = torch.cos(torch.pi * 3 * row / 64) * torch.cos(torch.pi * 5 * column / 64)
    assert lost(DctTopK(2), wave.flatten()) < 1e-8
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert 0.9 < lost(DctTopK(2), noise) < 1
    assert lost(DctTopK(4096), noise) < 1e-4, "all of them, with 8 bits"
    assert not through(DctTopK(2), torch.zeros(100)).any()


# Contractions --------------------------------------------------------------------------------------------------------


def lost(codec: Codec, values: Tensor, shared: int = 0) -> float:
    """‖c - C(c)‖²/‖c‖²."""
    c = values.double()
    return float((c - through(codec, values, shared=shared)).square().sum() / c.square().sum())


@PATIENT
@given(seed=SEEDS, k=st.sampled_from([4, 16, 64, 256]), power=st.floats(0.0, 12.0), live=st.integers(1, 9000))
def test_chunked_top_k_is_the_contraction_of_its_docstring(seed: int, k: int, power: float, live: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.zeros(9000)
    at = torch.randperm(9000, generator=draw)[:live]
    values[at] = torch.randn(live, generator=draw) * torch.rand(live, generator=draw) ** power + 1e-12
    assert lost(ChunkedTopK(k), values) <= 1 - 0.64 / (1 + (k - 1) / 36) * k / 4096


def test_chunked_top_k_loses_little_of_what_it_selects() -> None:
    """Of 64 of 4,096 normal elements, the two magnitudes of each sign leave out less than a tenth."""
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    selected = values.view(-1, 4096).square().topk(64).values.sum() / values.square().sum()
    assert lost(ChunkedTopK(64), values) < 1 - 0.9 * float(selected)


@pytest.mark.parametrize("length", [1000, 1024, 997])
def test_random_k_keeps_the_rest_on_average(length: int) -> None:
    """E‖c - C(c)‖²/‖c‖² = 1 - k/d for normal elements, which are all alike; 5 standard errors of 400 draws."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    found = np.array([lost(RandomK(NATIVE, 0.125), values, shared) for shared in range(400)])
    assert abs(found.mean() - (1 - math.ceil(length / 8) / length)) < 5 * found.std() / 20
    assert found.std() > 0


def test_random_k_draws_every_element_equally_often() -> None:
    """Each of 64 elements is one of 8 with probability 1/8: 4,000 draws, within 5 standard deviations (p < 4e-5)."""
    counts = torch.zeros(64)
    for shared in range(4000):
        counts += through(RandomK(NATIVE, 0.125), torch.ones(64), shared=shared)
    assert counts.sum() == 8 * 4000
    assert float((counts - 500).abs().max()) < 5 * math.sqrt(4000 * 7 / 64)


@pytest.mark.parametrize("seed", range(3))
def test_signs_of_blocks_and_half_means_are_projections(seed: int) -> None:
    """The error is orthogonal to what is decoded, and two means per block lose no more than one."""
    values = heavy_tailed(1000, seed).abs_().sub_(0.5)
    for codec in (BlockSign(96), HalfMeans(96)):
        decoded = through(codec, values).double()
        error = values.double() - decoded
        assert float(error @ decoded) == pytest.approx(0.0, abs=1e-5 * float(values.double().square().sum()))
    assert lost(HalfMeans(96), values) <= lost(BlockSign(96), values) < 1


# Unbiased codecs -----------------------------------------------------------------------------------------------------

DRAWS = 2000


def drawn(codec: RandomCodec, values: Tensor) -> np.ndarray:
    """Decoded vectors under other keys, one row each."""
    return np.stack([through(codec, values, own=key).numpy() for key in range(DRAWS)]).astype(np.float64)


def blocks_of(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, [64, 128, 192])


def level_gap(levels: int, order: float) -> Callable[[np.ndarray], np.ndarray]:
    """The distance between neighbouring levels, for each element."""

    def gap(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.full(x.size, np.linalg.norm(x, order)) for x in blocks_of(values)]) / levels

    return gap


def power_gap(values: np.ndarray) -> np.ndarray:
    """The distance between the powers of two around each element."""
    return 2.0 ** np.floor(np.log2(np.maximum(np.abs(values), 2.0**-126)))


def ternary_variance(values: np.ndarray) -> float:
    """Σ|x|·(s - |x|)."""
    return float(sum((np.abs(x) * (np.abs(x).max() - np.abs(x))).sum() for x in blocks_of(values)))


@pytest.mark.parametrize(
    ("make", "gap", "bound"),
    [
        (lambda: Levels(7, 64, "l2"), level_gap(7, 2), lambda x: min(64 / 49, 8 / 7) * np.sum(x**2)),
        (lambda: Levels(7, 64, "max"), level_gap(7, np.inf), lambda x: np.sum(level_gap(7, np.inf)(x) ** 2) / 4),
        (lambda: Levels(1, 64, "max"), level_gap(1, np.inf), ternary_variance),
        (Natural, power_gap, lambda x: np.sum(x**2) / 8),
    ],
    ids=["qsgd l2", "qsgd max", "terngrad", "natural"],
)
def test_the_mean_over_draws_is_the_vector_and_the_variance_that_of_the_paper(
    make: Callable[[], RandomCodec], gap: Callable[[np.ndarray], np.ndarray], bound: Callable[[np.ndarray], float]
) -> None:
    """Hoeffding: the mean of an element is wrong by more than gap·√(ln(2/δ)/(2·DRAWS)) with a probability below δ.

    With δ = 1e-8 and 200 elements, a correct codec fails for 2 of a million choices of keys. The squared error varies
    by less than 2 % of its mean over these draws, so 10 % is beyond 5 standard errors.
    """
    values = torch.randn(200, generator=torch.Generator().manual_seed(1))
    values[::17] = 0.0
    x, found = values.double().numpy(), drawn(make(), values)
    allowed = gap(x) * math.sqrt(math.log(2e8) / (2 * DRAWS)) + 1e-6 * np.abs(x)
    assert (np.abs(found.mean(axis=0) - x) <= allowed).all()
    variance = np.sum((found - x) ** 2, axis=1).mean()
    assert 0 < variance < 1.1 * bound(x)


def test_the_variance_of_ternary_elements_is_exactly_that_of_the_formula() -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(2))
    x, found = values.double().numpy(), drawn(Levels(1, 64, "max"), values)
    assert np.sum((found - x) ** 2, axis=1).mean() == pytest.approx(ternary_variance(x), rel=0.05)


def test_the_signs_of_zeros_are_random_and_half_of_them_positive() -> None:
    """10,000 signs: within 5 standard deviations (p < 1e-6)."""
    signs = through(FixedSign(), torch.zeros(10_000), own=9)
    assert abs(float(signs.sum())) < 5 * math.sqrt(10_000)
    assert not torch.equal(signs, through(FixedSign(), torch.zeros(10_000), own=10))


# The compressor ------------------------------------------------------------------------------------------------------


@each_scheme
def test_padding_stays_zero_and_answers_are_finite(name: str) -> None:
    worker = Worker(SCHEMES[name])
    assert not bool(worker.live.all())
    for step in range(4):
        answer = worker.step(worker.gradient(step))
        assert bool(answer.isfinite().all())
        assert bool(answer.any())
        if isinstance(worker.compressor, ErrorFeedback):
            assert not worker.compressor.residual[~worker.live].any()
            state = worker.compressor.state()
            if state.owned:
                assert not worker.compressor.answer_residual[~worker.live].any()
            if not state.own:
                assert not worker.compressor.residual.any()


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name].worker_residual])
def test_what_is_answered_and_what_is_kept_is_what_was_given(name: str) -> None:
    """Law 4, over several exchanges: the answers and both residuals add up to the gradients."""
    worker = Worker(SCHEMES[name])
    given_, answered = torch.zeros(worker.layout.size), torch.zeros(worker.layout.size)
    for step in range(5):
        gradient = worker.gradient(step)
        given_ += gradient
        answered += worker.step(gradient)
    compressor = worker.compressor
    assert isinstance(compressor, ErrorFeedback)
    kept = compressor.residual + compressor.answer_residual if compressor.state().owned else compressor.residual
    np.testing.assert_allclose((answered + kept)[worker.live], given_[worker.live], rtol=0, atol=5e-5)


@each_scheme
def test_a_state_continues_with_the_same_bits(name: str) -> None:
    first, second = Worker(SCHEMES[name]), Worker(SCHEMES[name])
    for step in range(3):
        first.step(first.gradient(step))
    second.steps = first.steps
    for mine, theirs in zip(second.state(), first.state(), strict=True):
        mine.copy_(theirs)
    gradient = first.gradient(3)
    assert torch.equal(first.step(gradient), second.step(gradient))


@each_scheme
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2.0**60])
def test_elements_that_are_not_finite_are_reported_and_not_taken(name: str, bad: float) -> None:
    worker, clean = Worker(SCHEMES[name]), Worker(SCHEMES[name])
    first, second = worker.gradient(0), worker.gradient(1)
    worker.step(first)
    clean.step(first)
    element = 200
    assert bool(worker.live[element])
    poisoned, zeroed = second.clone(), second.clone()
    poisoned[element], zeroed[element] = bad, 0.0
    assert worker.encode(poisoned)
    assert not clean.encode(zeroed)
    assert torch.equal(worker.exchange(), clean.exchange())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(worker.state(), clean.state(), strict=True))


@each_scheme
def test_rescaling_the_residuals_is_the_same_as_other_units(name: str) -> None:
    """Factors of two are exact. A sign has no units."""
    plain, doubled = Worker(SCHEMES[name]), Worker(SCHEMES[name])
    plain.step(plain.gradient(0))
    doubled.step(plain.gradient(0))
    doubled.compressor.rescale(2.0)
    answer, twice = plain.step(plain.gradient(1)), doubled.step(2.0 * plain.gradient(1))
    assert torch.equal(twice, answer if name == "signsgd" else 2.0 * answer)


@each_scheme
def test_gradients_are_multiplied_by_a_scale(name: str) -> None:
    plain, scaled = Worker(SCHEMES[name]), Worker(SCHEMES[name])
    gradient = plain.gradient(0)
    assert not scaled.encode(4.0 * gradient, 0.25)
    assert torch.equal(scaled.exchange(), plain.step(gradient))


@each_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_answers_are_rounded_into_gradients_of_low_precision(name: str, dtype: torch.dtype) -> None:
    worker = Worker(SCHEMES[name])
    answer = worker.step(worker.gradient(0))
    assert torch.equal(worker.answer(dtype), answer.to(dtype))


@each_scheme
def test_random_numbers_depend_on_step_and_seed_alone(name: str) -> None:
    """An answer is the same in a repeated run, and for a random scheme another one in another step."""
    scheme = SCHEMES[name]
    one, again, later = Worker(scheme), Worker(scheme), Worker(scheme)
    later.steps = 1
    gradient = one.gradient(0)
    answer = one.step(gradient)
    assert torch.equal(answer, again.step(gradient))
    # All of these are random without a seed of hashes; one worker without zeros votes without chance.
    is_random = "seed" in scheme.settings() and not name.startswith(("count_sketch", "signsgd"))
    assert torch.equal(answer, later.step(gradient)) != is_random


def test_without_anything_sent_the_contraction_is_unknown() -> None:
    worker = Worker(TopKScheme(1.0))
    assert math.isnan(worker.compressor.contraction())
    worker.step(torch.zeros(worker.layout.size))
    assert math.isnan(worker.compressor.contraction())
    worker.step(worker.gradient(0))
    assert worker.compressor.contraction() == 0.0


# What is refused -----------------------------------------------------------------------------------------------------


def set_index(packet: Tensor) -> None:
    packet[:4].view(torch.int32)[0] = 1 << 30


def set_last_byte(at: int, value: int) -> Callable[[Tensor], None]:
    def change(packet: Tensor) -> None:
        packet[at] = value

    return change


CORRUPT: dict[str, tuple[Scheme, Callable[[Tensor], None], str]] = {
    "topk": (TopKScheme(), set_index, "index beyond"),
    "gtopk": (GlobalTopKScheme(), set_index, "index beyond"),
    # Entry 0 of the only chunk has the index 0xFFF: beyond the shard, and before smaller ones.
    "chunked_topk": (ChunkedTopKScheme(k=4), set_last_byte(4, 0xFF), "out of order or beyond"),
    "qsgd": (QSGDScheme(), set_last_byte(8, 0xFF), "a code above 14"),
    "terngrad": (TernGradScheme(), set_last_byte(8, 0xFF), "a code above 2"),
    "natural": (NaturalScheme(), set_last_byte(3, 0xFF), "an exponent above 254"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_packet_that_no_encoder_writes_is_refused_by_name(name: str) -> None:
    scheme, corrupt, message = CORRUPT[name]
    worker = Worker(scheme)
    worker.encode(worker.gradient(0))
    frame = worker.buffers.frames[1]
    worker.compressor.seal(frame)
    corrupt(frame.received[0][HEADER_BYTES:])
    with pytest.raises(CorruptPacket, match=rf"^the packet of worker 0 for bucket 1: .*{message}"):
        worker.compressor.merge(frame, 0)


@pytest.mark.parametrize("name", CORRUPT)
def test_an_answer_that_no_encoder_writes_is_refused_by_name(name: str) -> None:
    scheme, corrupt, message = CORRUPT[name]
    worker = Worker(scheme)
    worker.step(worker.gradient(0))
    if name == "topk":
        assert worker.buffers.frames[1].answers.shape == worker.buffers.frames[1].sent.shape
    corrupt(worker.buffers.frames[1].answers[0][HEADER_BYTES:])
    worker.compressor.read_answers()
    with pytest.raises(CorruptPacket, match=rf"^the answer for shard 0 of bucket 1: .*{message}"):
        worker.answer()


def test_a_union_is_exact_and_dense_where_that_is_smaller() -> None:
    values = torch.zeros(1000)
    values[::40] = heavy_tailed(25, 0) + 1.0
    for ratio, packets, nbytes in ((0.01, 3, 240), (0.2, 3, 4000), (0.0251, 1, 208)):
        codec = Union(NATIVE, ratio, packets)
        assert codec.nbytes(1000) == nbytes
        assert torch.equal(through(codec, values), values)


def test_two_workers_who_disagree_are_decided_by_chance() -> None:
    """A sum of one and of minus one is a tie."""
    compressor = SignSGDScheme().bind(layout := Layout([6400], 2, 1 << 20), 0, NATIVE)
    buffers = PacketBuffers(layout, compressor.payload, alone=False)
    compressor.bind(buffers)
    compressor.begin_step(1)
    frame, up = buffers.frames[0], 3200 // 8
    frame.received[0, HEADER_BYTES : HEADER_BYTES + up] = 0xFF
    frame.received[1, HEADER_BYTES : HEADER_BYTES + up] = 0x00
    compressor.merge(frame, 0)
    ones = np.unpackbits(frame.answers[0, HEADER_BYTES : HEADER_BYTES + up].numpy()).sum()
    assert abs(int(ones) - 1600) < 5 * math.sqrt(3200) / 2, "within 5 standard deviations (p < 1e-6)"


def test_options_are_in_the_representation() -> None:
    options: dict[str, Any] = QSGDScheme(levels=3).settings()
    assert options == {"levels": 3, "block": 512, "norm": "max", "error_feedback": False, "seed": 0}
