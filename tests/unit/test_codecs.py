"""Codecs: what an encoding takes, what comes back out of it, and what it leaves out (law 4)."""

# Sums must refuse codecs by type: where pyright has nothing to ignore any more, it says so.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.formulas import Array, double, sign_of
from tests.unit.kernel_cases import ON_CPU, ROOM, allocation, guarded, random
from thinwire.compressors.all_reduce import EncodedAllReduce
from thinwire.compressors.codecs import AddingCodec, Codec, Projection
from thinwire.compressors.codecs.block_sign import BlockSign, FixedSign, HalfMeans
from thinwire.compressors.codecs.chunked_topk import ChunkedTopK
from thinwire.compressors.codecs.count_sketch import CountSketch
from thinwire.compressors.codecs.dct_topk import DctTopK
from thinwire.compressors.codecs.dense import Floats
from thinwire.compressors.codecs.levels import Levels
from thinwire.compressors.codecs.natural import Natural
from thinwire.compressors.codecs.randomk import RandomK
from thinwire.compressors.codecs.sign import Sign
from thinwire.compressors.codecs.topk import TopK, Union
from thinwire.kernels.ops import BACKENDS, Kernels
from thinwire.transport.topology import Topology

LENGTHS = (1, 2, 63, 64, 65, 200, 1000)
CODECS: dict[str, Callable[[Kernels], Codec]] = {
    "signs": Sign,
    "a tenth": lambda kernels: TopK(kernels, 0.1),
    "all by index": lambda kernels: TopK(kernels, 1.0),
    "sketch": lambda kernels: CountSketch(kernels, 5, 40, seed=3),
    "sketch of an odd number of cells": lambda kernels: CountSketch(kernels, 3, 7, seed=3),
    "floats": lambda kernels: Floats(),
    "union of sparse packets": lambda kernels: Union(kernels, 0.1, 3),
    "union that is dense": lambda kernels: Union(kernels, 0.3, 3),
    "random tenth": lambda kernels: RandomK(kernels, 0.1),
    "chunks": lambda kernels: ChunkedTopK(8),
    "cosine coefficients": lambda kernels: DctTopK(8),
    "levels of 2 bits": lambda kernels: Levels(1, 64, "max"),
    "levels of 4 bits": lambda kernels: Levels(7, 96, "l2"),
    "levels of 8 bits": lambda kernels: Levels(127, 512, "max"),
    "powers of two": lambda kernels: Natural(),
    "signs of blocks": lambda kernels: BlockSign(96),
    "half means": lambda kernels: HalfMeans(96),
    "fixed signs": lambda kernels: FixedSign(0.5),
}

CHECKED = (
    "a tenth",
    "all by index",
    "union of sparse packets",
    "chunks",
    "levels of 2 bits",
    "levels of 4 bits",
    "levels of 8 bits",
    "powers of two",
)
"""Codecs that do not decode all bytes. Of 20 random packets of 200 elements, each refuses some."""

each_kernels = pytest.mark.parametrize("kernels", ON_CPU.values(), ids=ON_CPU)
each_codec = pytest.mark.parametrize("name", CODECS)
each_length = pytest.mark.parametrize("length", LENGTHS)


def vector(length: int, seed: int = 0) -> Tensor:
    """Numbers of all sizes, of which some are zero and some are equal."""
    generator = random(seed)
    values = torch.randn(length, generator=generator) * 10.0 ** torch.randint(-4, 3, (length,), generator=generator)
    values[5::9] = 0.0
    values[3::7] = -1.5
    return values


def encoded(codec: Codec, values: Tensor) -> Tensor:
    packet = torch.zeros(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, packet)
    return packet


def decoded(codec: Codec, packet: Tensor, length: int) -> Tensor:
    values = torch.zeros(length)
    codec.decode(packet, values)
    return values


def through(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), values.numel())


# What holds for all --------------------------------------------------------------------------------------------------


@each_kernels
@each_codec
@each_length
def test_an_encoding_takes_the_bytes_that_it_says(name: str, length: int, kernels: Kernels) -> None:
    """It fills them up to the last word, and writes nowhere else; decoding writes to nothing but the values."""
    codec = CODECS[name](kernels)
    size = codec.nbytes(length)
    assert size % 8 == 0
    values = guarded(vector(length))
    before = allocation(values).clone()
    packets = [guarded(torch.full((size,), background, dtype=torch.uint8)) for background in (0x00, 0xFF)]
    for packet in packets:
        codec.encode(values, packet)
    assert torch.equal(allocation(values), before), "the vector has changed"
    for packet in packets:
        outside = torch.cat([allocation(packet)[:ROOM], allocation(packet)[ROOM + size :]])
        assert bool((outside == 0xA5).all()), "something was written beside the packet"
    written = torch.eq(*packets)
    assert bool(written[: size - 8].all())
    assert bool(written[size - 8 :].any()), "a shorter packet would do"

    whole = allocation(packets[0]).clone()
    codec.decode(packets[0], values)
    assert torch.equal(allocation(packets[0]), whole), "decoding has changed the packet"
    outside = torch.cat([allocation(values)[:ROOM], allocation(values)[ROOM + 4 * length :]])
    assert bool((outside == 0xA5).all()), "something was written beside the values"
    # What has not been written says nothing.
    assert torch.equal(decoded(codec, packets[0], length), decoded(codec, packets[1], length))


def not_a_vector(values: Tensor) -> dict[str, Tensor]:
    """The same numbers in tensors that are not a contiguous row of float32."""
    imaginary = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(imaginary, values)
    return {
        "negated": imaginary.resolve_conj() if imaginary.is_conj() else torch._neg_view(-values),
        "imaginary": imaginary,
        "gaps": values.repeat_interleave(2)[::2],
        "expanded": values[:1].expand(values.numel()),
        "float64": values.double(),
        "bfloat16": values.to(torch.bfloat16),
        "integers": values.to(torch.int32),
        "two dimensions": values.view(2, -1),
        "meta": values.to("meta"),
    }


@each_kernels
@each_codec
@pytest.mark.parametrize("kind", list(not_a_vector(torch.ones(4))))
def test_what_is_no_row_of_float32_is_refused(name: str, kind: str, kernels: Kernels) -> None:
    """Encoded or decoded to: an exception, for what a kernel would make of its memory is wrong."""
    codec = CODECS[name](kernels)
    values = vector(200)
    packet = torch.zeros(codec.nbytes(200), dtype=torch.uint8)
    before = encoded(codec, values)
    wrong = not_a_vector(values)[kind]
    with pytest.raises((TypeError, ValueError), match=r"values .*expected"):
        codec.encode(wrong, packet)
    with pytest.raises((TypeError, ValueError), match=r"values .*expected"):
        codec.decode(before, wrong)
    assert not bool(packet.any())
    assert torch.equal(encoded(codec, values), before)


@each_kernels
@each_codec
@pytest.mark.parametrize("missing", [8, -8])
def test_a_packet_of_another_size_is_refused(name: str, missing: int, kernels: Kernels) -> None:
    codec = CODECS[name](kernels)
    packet = torch.zeros(codec.nbytes(200) - missing, dtype=torch.uint8)
    for attempt in (codec.encode, lambda values, packet: codec.decode(packet, values)):
        with pytest.raises(ValueError, match=rf"packet .*expected .*{codec.nbytes(200)} bytes"):
            attempt(vector(200), packet)


@each_kernels
@each_codec
@pytest.mark.parametrize("kind", ["gaps", "int8", "negated", "meta"])
def test_a_packet_that_is_no_row_of_bytes_is_refused(name: str, kind: str, kernels: Kernels) -> None:
    codec = CODECS[name](kernels)
    packet = torch.zeros(codec.nbytes(200), dtype=torch.uint8)
    wrong = {
        "gaps": packet.repeat_interleave(2)[::2],
        "int8": packet.to(torch.int8),
        "negated": torch._neg_view(packet),
        "meta": packet.to("meta"),
    }[kind]
    for attempt in (codec.encode, lambda values, packet: codec.decode(packet, values)):
        with pytest.raises((TypeError, ValueError), match=r"packet .*expected"):
            attempt(vector(200), wrong)


@each_kernels
@each_codec
def test_a_vector_without_elements_has_an_encoding(name: str, kernels: Kernels) -> None:
    codec = CODECS[name](kernels)
    assert through(codec, torch.empty(0)).tolist() == []


@each_codec
@each_length
def test_an_encoding_depends_on_the_vector_alone(name: str, length: int) -> None:
    """Not on the backend, nor on what an instance has encoded before."""
    values = vector(length)
    packets = []
    for kernels in ON_CPU.values():
        used = CODECS[name](kernels)
        for other in (1, 300, length):
            encoded(used, vector(other, seed=1))
        packets += [encoded(used, values), encoded(CODECS[name](kernels), values)]
    assert all(torch.equal(packet, packets[0]) for packet in packets)
    decodings = [decoded(CODECS[name](kernels), packets[0], length) for kernels in ON_CPU.values()]
    assert torch.equal(*decodings)


@each_codec
def test_an_encoding_does_not_depend_on_the_number_of_threads(name: str) -> None:
    """200,000 elements are enough for torch to use several."""
    values, packets, decodings = vector(200_000), [], []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            packets.append(encoded(CODECS[name](BACKENDS["native"]), values))
            decodings.append(decoded(CODECS[name](BACKENDS["native"]), packets[-1], values.numel()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*packets)
    assert torch.equal(*decodings)


@each_kernels
@each_codec
@each_length
def test_decoding_adds_what_a_packet_says_times_a_weight(name: str, length: int, kernels: Kernels) -> None:
    codec = CODECS[name](kernels)
    packet = encoded(codec, vector(length))
    values = vector(length, seed=2)
    said = double(decoded(codec, packet, length))
    expected, size = double(values), np.abs(double(values))
    for weight in (1.0, -1.0, 0.25, 1 / 3):
        codec.decode(packet, values, weight)
        expected, size = expected + weight * said, size + np.abs(said)
        assert (np.abs(double(values) - expected) <= 2.0**-22 * size).all()
    assert said.any()


@each_kernels
@pytest.mark.parametrize("name", [name for name in CODECS if name != "fixed signs"])
@each_length
def test_nothing_comes_of_zeros(name: str, length: int, kernels: Kernels) -> None:
    assert not through(CODECS[name](kernels), torch.zeros(length)).any()


@each_kernels
@each_codec
def test_arbitrary_bytes_are_decoded_or_refused(name: str, kernels: Kernels) -> None:
    """Whatever they are, nothing is written beside the values."""
    codec = CODECS[name](kernels)
    refused = 0
    for seed in range(20):
        packet = torch.randint(0, 256, (codec.nbytes(200),), generator=random(seed), dtype=torch.uint8)
        values = guarded(vector(200))
        try:
            codec.decode(packet, values)
        except ValueError:
            assert torch.equal(values, vector(200)), "a refused packet has changed the values"
            refused += 1
        outside = torch.cat([allocation(values)[:ROOM], allocation(values)[ROOM + 800 :]])
        assert bool((outside == 0xA5).all())
    assert (refused > 0) == (name in CHECKED)


# Law 4: what is sent, and what is left over --------------------------------------------------------------------------


@each_length
def test_floats_lose_nothing(length: int) -> None:
    values = vector(length)
    assert torch.equal(through(Floats(), values), values)


@each_kernels
@each_length
@pytest.mark.parametrize("ratio", [1e-9, 1 / 64, 0.1, 0.5, 1.0])
def test_top_k_sends_the_largest_as_they_are_and_leaves_the_others(ratio: float, length: int, kernels: Kernels) -> None:
    codec, values = TopK(kernels, ratio), vector(length)
    count = math.ceil(ratio * length)
    assert codec.nbytes(length) == 8 * count
    magnitudes = values.abs().numpy()
    kept = np.zeros(length, dtype=bool)
    kept[np.lexsort((np.arange(length), -magnitudes))[:count]] = True  # of equals the first
    said = through(codec, values)
    left = values - said
    np.testing.assert_array_equal(said.numpy(), np.where(kept, values.numpy(), 0.0))
    np.testing.assert_array_equal(left.numpy(), np.where(kept, 0.0, values.numpy()))
    # Taking back what was said leaves the same, to the bit: that is how a worker knows what it has not said.
    rest = values.clone()
    codec.decode(encoded(codec, values), rest, -1.0)
    assert torch.equal(rest, left)
    assert torch.equal(said + left, values)


@each_kernels
@each_length
def test_a_packet_of_top_k_is_indices_in_order_and_then_their_values(length: int, kernels: Kernels) -> None:
    values = vector(length)
    count = math.ceil(0.1 * length)
    numbers = struct.unpack(f"<{count}i{count}f", encoded(TopK(kernels, 0.1), values).numpy().tobytes())
    indices = list(numbers[:count])
    assert indices == sorted(set(indices))
    assert list(numbers[count:]) == values[indices].tolist()


@each_kernels
@each_length
def test_signs_are_of_one_size(length: int, kernels: Kernels) -> None:
    values = vector(length)
    x = double(values)
    said = double(through(Sign(kernels), values))
    np.testing.assert_array_equal(said, np.abs(said).max() * sign_of(x))
    np.testing.assert_allclose(np.abs(said), np.abs(x).mean(), rtol=1e-6)


@each_kernels
@each_length
@pytest.mark.parametrize("name", ["sign", "top-k"])
def test_what_a_projection_leaves_out_is_orthogonal_to_what_it_says(name: str, length: int, kernels: Kernels) -> None:
    codec: Projection = Sign(kernels) if name == "sign" else TopK(kernels, 0.1)
    values = vector(length)
    x, said = double(values), double(through(codec, values))
    squares = codec.square_sum(encoded(codec, values), length)
    np.testing.assert_allclose(squares, np.sum(said**2), rtol=1e-5)
    np.testing.assert_allclose(squares + np.sum((x - said) ** 2), np.sum(x**2), rtol=1e-5)


@each_kernels
@each_length
def test_signs_leave_out_the_share_of_the_formula(length: int, kernels: Kernels) -> None:
    values = vector(length)
    x, said = double(values), double(through(Sign(kernels), values))
    left_out = 1 - np.abs(x).sum() ** 2 / (length * np.sum(x**2))
    np.testing.assert_allclose(np.sum((x - said) ** 2) / np.sum(x**2), left_out, rtol=1e-5, atol=1e-12)
    assert left_out > 0.1 or length < 3
    # What is left has nothing more to say along the signs: the scale was the best one.
    np.testing.assert_allclose(np.sum((x - said) * sign_of(x)), 0.0, atol=1e-5 * np.abs(x).sum())


@each_kernels
def test_a_packet_of_signs_is_words_of_bits_and_a_scale(kernels: Kernels) -> None:
    values = torch.tensor([1.0, -2.0, 0.0, -0.0, -5.0] + [0.0] * 59 + [-4.0, 3.0])
    packet = encoded(Sign(kernels), values).numpy().tobytes()
    assert len(packet) == 24
    assert struct.unpack("<QQf", packet[:20]) == ((1 << 64) - 1 - 0b10010, 0b10, np.float32(15 / 66))


# The count sketch ----------------------------------------------------------------------------------------------------


def table_of(packet: Tensor, sketch: CountSketch) -> Tensor:
    return packet.view(torch.float32)[: sketch.rows * sketch.columns]


@each_kernels
@pytest.mark.parametrize("name", [name for name in CODECS if name.startswith(("sketch", "floats"))])
@each_length
def test_the_sum_of_encodings_is_the_encoding_of_the_sum(name: str, length: int, kernels: Kernels) -> None:
    codec = CODECS[name](kernels)
    vectors = [vector(length, seed) for seed in range(4)]
    total = torch.stack([encoded(codec, values).view(torch.float32) for values in vectors]).sum(0)
    size = sum(float(values.abs().sum()) for values in vectors)
    of_sum = encoded(codec, torch.stack(vectors).sum(0)).view(torch.float32)
    np.testing.assert_allclose(total, of_sum, atol=1e-6 * size)


@each_kernels
@pytest.mark.parametrize("cuts", [(64,), (128, 192, 960), tuple(range(64, 1000, 64))], ids=str)
def test_a_sketch_may_be_made_in_pieces(cuts: tuple[int, ...], kernels: Kernels) -> None:
    sketch, values = CountSketch(kernels, 5, 40, seed=3), vector(1000)
    packet = torch.zeros(sketch.nbytes(1000), dtype=torch.uint8)
    for first, last in zip((0, *cuts), (*cuts, 1000), strict=True):
        sketch.add(values[first:last], packet, first)
    assert torch.equal(packet, encoded(sketch, values))


@each_kernels
def test_an_element_is_in_one_cell_of_every_row_wherever_it_stands(kernels: Kernels) -> None:
    """With nothing else in the sketch it is read as it is; and seeds make other sketches."""
    sketch, other = (CountSketch(kernels, 4, 50, seed) for seed in (0, 1))
    for element in (0, 7, 64, 777):
        values = torch.zeros(1000)
        values[element] = -2.5
        cells = table_of(encoded(sketch, values), sketch).view(4, 50)
        assert torch.equal(cells.abs().sum(1), torch.full((4,), 2.5))
        assert through(sketch, values)[element] == -2.5
        assert not torch.equal(cells, table_of(encoded(other, values), other).view(4, 50))


TRIALS = 2000
"""Sketches with other seeds. One element is looked at in each: those of one sketch depend on each other."""
SIGMAS = 5.0
"""A binomial count goes this far beyond its mean with a probability of less than 1e-5, were the seeds others."""


def errors(rows: int, columns: int, values: Tensor, element: int) -> Array:
    """The error of an element's estimate in each of the trials."""
    found = []
    for seed in range(TRIALS):
        sketch = CountSketch(BACKENDS["native"], rows, columns, seed)
        found.append(float(through(sketch, values)[element] - values[element]))
    return np.array(found)


def one_that_stands_out() -> Tensor:
    """In the way of element 3 is element 190 alone: a collision is an error as large as the vector."""
    values = torch.zeros(200)
    values[190] = -7.0
    return values


def spread_out() -> Tensor:
    return torch.randn(200, generator=random(4))


@pytest.mark.parametrize(("rows", "certainty"), [(1, 0.875), (5, 0.984), (7, 0.993)])
@pytest.mark.parametrize("make", [one_that_stands_out, spread_out])
def test_an_estimate_is_as_good_as_the_docstring_says(make: Callable[[], Tensor], rows: int, certainty: float) -> None:
    """With 9 columns and one that stands out a row is wrong by more than the bound in one of 9 cases: nearly 1/8."""
    values, columns = make(), 9
    bound = math.sqrt(8 / columns) * float(values.norm())
    wrong = int((np.abs(errors(rows, columns, values, 3)) > bound).sum())
    assert wrong <= TRIALS * (1 - certainty) + SIGMAS * math.sqrt(TRIALS * certainty * (1 - certainty))


def test_elements_meet_by_chance_alone() -> None:
    """In one of `columns` cases, and with either sign in half of them."""
    of_row = errors(1, 9, one_that_stands_out(), 3)
    collisions = int((of_row != 0).sum())
    assert abs(collisions - TRIALS / 9) < SIGMAS * math.sqrt(TRIALS / 9 * 8 / 9)
    assert abs(int((of_row > 0).sum()) - collisions / 2) < SIGMAS * math.sqrt(collisions) / 2


@each_kernels
def test_the_largest_estimates_in_units_of_a_root(kernels: Kernels) -> None:
    sketch, values = CountSketch(kernels, 5, 40, seed=3), vector(1000)
    packet = encoded(sketch, values)
    peak = torch.rand(1000, generator=random(5)) + 1e-3
    estimates = decoded(sketch, packet, 1000)
    keys = (estimates.abs() / peak.sqrt()).numpy()
    ranges = torch.tensor([[64, 100], [192, 1], [320, 500]], dtype=torch.int64)
    inside = np.concatenate([np.arange(first, first + count) for first, count in ranges.tolist()])
    for k in (1, 7, 300, inside.size):  # more and more room is needed
        indices = torch.zeros(k, dtype=torch.int32)
        sketch.largest(packet, peak, ranges, indices)
        best = inside[np.lexsort((inside, -keys[inside]))[:k]]
        assert indices.tolist() == sorted(best.tolist())


@each_kernels
def test_of_equal_estimates_the_first_are_the_largest(kernels: Kernels) -> None:
    sketch = CountSketch(kernels, 5, 40)
    packet, ranges = encoded(sketch, torch.zeros(300)), torch.tensor([[64, 3], [128, 172]], dtype=torch.int64)
    indices = torch.zeros(5, dtype=torch.int32)
    sketch.largest(packet, torch.ones(300), ranges, indices)
    assert indices.tolist() == [64, 65, 66, 128, 129]


# What is refused -----------------------------------------------------------------------------------------------------

ALONE = Topology(((0,),), 0, 0, "a test")


@each_kernels
def test_only_encodings_that_add_can_be_summed(kernels: Kernels) -> None:
    with pytest.raises(TypeError, match=r"^Sign in an all-reduce: .*AddingCodec, such as CountSketch or Floats"):
        EncodedAllReduce([(Sign(kernels), 10)], ALONE, kernels)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^TopK in an all-reduce: .*AddingCodec, such as CountSketch or Floats"):
        EncodedAllReduce([(Floats(), 10), (TopK(kernels, 0.1), 10)], ALONE, kernels)  # pyright: ignore[reportArgumentType]
    for make in CODECS.values():
        assert make(kernels).adds == isinstance(make(kernels), AddingCodec)
    contents: list[tuple[AddingCodec, int]] = [(CountSketch(kernels, 3, 7), 1000), (Floats(), 5)]
    packets = EncodedAllReduce(contents, ALONE, kernels).packets
    assert [packet.numel() for packet in packets] == [3 * 7 * 4 + 4, 5 * 4 + 4]


def spoilt_packet(codec: TopK, bad: int, which: slice) -> Tensor:
    """Five entries for a vector of 100, of which some have a bad index."""
    packet = encoded(codec, vector(100))
    assert packet.numel() == 5 * 8
    packet.view(torch.int32)[:5][which] = bad
    return packet


each_bad_index = pytest.mark.parametrize("bad", [100, 2**31 - 1, -1, -(2**31)])
each_place = pytest.mark.parametrize("which", [slice(0, 1), slice(2, 3), slice(4, 5), slice(0, 5)], ids=str)


@each_kernels
@each_bad_index
@each_place
def test_indices_beyond_the_vector_are_refused(which: slice, bad: int, kernels: Kernels) -> None:
    codec, values = TopK(kernels, 0.05), guarded(vector(100, seed=1))
    with pytest.raises(ValueError, match="a top-k packet has an index beyond its 100 elements"):
        codec.decode(spoilt_packet(codec, bad, which), values)
    outside = torch.cat([allocation(values)[:ROOM], allocation(values)[ROOM + 4 * 100 :]])
    assert bool((outside == 0xA5).all()), "something was written beside the values"


@each_kernels
@each_bad_index
def test_of_a_packet_that_is_refused_nothing_is_written(bad: int, kernels: Kernels) -> None:
    codec, values = TopK(kernels, 0.05), vector(100, seed=1)
    with pytest.raises(ValueError, match="a top-k packet has an index beyond its 100 elements"):
        codec.decode(spoilt_packet(codec, bad, slice(2, 3)), values)
    assert torch.equal(values, vector(100, seed=1))


@pytest.mark.parametrize("ratio", [0, 0.0, -1, -0.5, 1.5, math.nan, math.inf])
def test_a_ratio_that_is_no_share(ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"^ratio={ratio!r}: expected a number in \(0, 1\]"):
        TopK(BACKENDS["reference"], ratio)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        *(({"rows": rows}, "an integer from 1 to 15") for rows in (0, -1, 16, 2.0, 1.5, "3", None)),
        *(({"columns": columns}, r"an integer from 1 to 2\*\*30") for columns in (0, -1, 2**30 + 1, 9.0, "9", None)),
    ],
    ids=str,
)
def test_a_sketch_without_a_cell_or_with_too_many(option: dict[str, Any], expected: str) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r}: expected {expected}"):
        CountSketch(BACKENDS["reference"], **{"rows": 5, "columns": 9, **option})
