"""What a step of every optimizer reads and writes in device memory, kernel by kernel; data for `benchmarks.roofline`.

tests/unit/test_roofline.py holds it against the tensors that the kernels of a real step are given.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args

import torch

from thinwire.compressors.dense import Dense
from thinwire.compressors.markov import MarkovSign
from thinwire.compressors.scaled_sign import ScaledSign
from thinwire.compressors.stochastic_sign import REFRESH_PERIOD, Downlink, StochasticSign
from thinwire.kernels.ops import BACKENDS
from thinwire.transport.buffers import Payload
from thinwire.transport.layout import WORD, Layout

WORKERS = 4
LOCAL_CYCLE = 16
"""Steps of 0/1 Adam of which one synchronises, in the row that is a mean."""

BIT = 1 / 8
FLOAT = 4.0
TILE = 32 * WORD
"""Elements that a program adds up at once."""
SUM_BYTES = 8 / TILE
"""Of a tile's sum, a parameter."""

Bytes = dict[str, float]


@dataclass(frozen=True)
class Kernel:
    """What an operation moves, in bytes for each of the elements that it covers, by the names of its arguments."""

    name: str
    reads: Bytes
    writes: Bytes
    share: float = 1.0
    """Of the model's elements, those that it covers in a step."""
    sums: int = 0
    """How many sums it makes of every tile: written by it, and read by the loops that add them in their order."""
    each: str = "bucket"
    """Called once for every "part" (what a parameter has in a bucket), "bucket", or "shard" of a bucket."""
    often: float = 1.0
    """In how many of all steps."""
    launches: int = 1
    """Of a call; one more for the loop that adds up sums."""

    @property
    def read(self) -> float:
        """Bytes a parameter of the model and a step."""
        return self.often * self.share * (sum(self.reads.values()) + self.sums * SUM_BYTES)

    @property
    def written(self) -> float:
        """Bytes a parameter of the model and a step."""
        return self.often * self.share * (sum(self.writes.values()) + self.sums * SUM_BYTES)


@dataclass(frozen=True)
class Form:
    """Of what dtype parameters and their gradients are."""

    name: str
    grad: float
    low: Bytes = field(default_factory=dict)
    """The parameter, where `x` is its fp32 master."""

    @property
    def x(self) -> Bytes:
        """A parameter, and its master if it has one."""
        return {"x": FLOAT, **self.low}


FORMS = (Form("fp32", FLOAT), Form("bf16", 2.0, {"low": 2.0}))


CHECKSUMS = {"packet_seal": 2, "packet_check": 3}
"""What is done to packets as a whole, and in how many launches: headers, checksums, and room for these."""


def _checksum(name: str, size: float, share: float = 1.0) -> Kernel:
    return Kernel(name, {"packets": size}, {}, share=share, launches=CHECKSUMS[name])


def _packets(up: float, down: float) -> list[Kernel]:
    """What is done with packets of any kind, of so many bytes an element; the presence bits are a word or two."""
    mine = 1 / WORKERS
    return [
        _checksum("packet_seal", up),
        Kernel("copy of the own packet", {"sent": up}, {"received": up}, share=mine),
        _checksum("packet_check", up),
        Kernel("any_of", {"rows": WORKERS * BIT}, {"answer": BIT}, share=0.0),
        _checksum("packet_seal", down, share=mine),
        _checksum("packet_check", down),
    ]


def _birder(form: Form, *, downlink: Downlink, state: float) -> list[Kernel]:
    planes = WORKERS.bit_length() if downlink == "votes" else 1
    vote = {"bit": "vote_bit", "majority": "vote_majority", "votes": "vote_count"}[downlink]
    encoded = {"m": state, "b": state}
    rows, mine = WORKERS * BIT, 1 / WORKERS
    return [
        Kernel(
            "birder_encode", {"grad": form.grad, **encoded, "active": BIT}, {**encoded, "packets": BIT}, each="part"
        ),
        Kernel("activity_refresh", {"state": state}, {"packets": BIT}, share=1 / REFRESH_PERIOD),
        Kernel(vote, {"rows": rows, "active": BIT}, {"answer": planes * BIT}, share=mine),
        Kernel("any_of", {"rows": rows}, {"answer": BIT}, share=mine / REFRESH_PERIOD),
        *_packets(BIT, planes * BIT),
        Kernel("birder_apply", {**form.x, "active": BIT, "answers": planes * BIT}, form.x, each="part"),
        Kernel("activity_update", {"active": BIT, "answers": planes * BIT}, {"active": BIT}),
    ]


def _signs_merged(error: float) -> list[Kernel]:
    """Signs on their way, from the encoded packet to the answer as all know it."""
    reads, writes = {"rows": WORKERS * BIT, "y": error}, {"y": error, "answer": BIT}
    return [
        Kernel("shard_scale", {}, {}, each="shard"),
        Kernel("sign_merge", reads, writes, share=1 / WORKERS, sums=1),
        Kernel("shard_scale", {}, {}),
        *_packets(BIT, BIT),
        Kernel("copy of the answers", {"answers": BIT}, {"answer_words": BIT}),
    ]


def _sign_encode(form: Form, error: float) -> Kernel:
    reads = {"grad": form.grad, "c": error, "answer_words": BIT}
    return Kernel("sign_encode", reads, {"c": error, "packets": BIT}, sums=1, each="part")


def _sign_apply(form: Form) -> Kernel:
    return Kernel("sign_apply", {**form.x, "p": FLOAT, "answer_words": BIT}, form.x, each="part")


def _onebit_adam(form: Form, *, error: float) -> list[Kernel]:
    return [_sign_encode(form, error), *_signs_merged(error), _sign_apply(form)]


def _onebit_lamb(form: Form) -> list[Kernel]:
    measured = {**form.x, "p": FLOAT, "w": FLOAT, "answer_words": BIT, "previous_words": BIT}
    return [
        _sign_encode(form, FLOAT),
        *_signs_merged(FLOAT),
        Kernel("copy of the previous answers", {"answer_words": BIT}, {"previous_words": BIT}),
        Kernel("onebit_lamb_measure", measured, {"w": FLOAT}, sums=2, each="part"),
        _sign_apply(form),
    ]


def _warm_up(form: Form) -> list[Kernel]:
    """1-bit Adam's dense stage: AdamW by thinwire's own means."""
    averages = {"m": FLOAT, "v": FLOAT}
    adam = {**form.x, **averages, "gradient": FLOAT}
    return [
        Kernel("dense_encode", {"grad": form.grad}, {"packets": FLOAT}, each="part"),
        Kernel("mean", {"rows": WORKERS * FLOAT}, {"out": FLOAT}, share=1 / WORKERS),
        *_packets(FLOAT, FLOAT),
        Kernel("adam_apply", adam, {**form.x, **averages}, sums=1, each="part"),
    ]


def _momentum_encode(form: Form, *, signs: bool) -> Kernel:
    kept = {"m": FLOAT, "c": FLOAT}
    writes = {**kept, "packets": BIT} if signs else kept
    return Kernel("momentum_encode", {"grad": form.grad, **kept}, writes, sums=int(signs), each="part")


def _synchronising_step(form: Form) -> list[Kernel]:
    # The step begins at the anchor: what local steps have made of the parameter since is not read.
    reads, writes = {"anchor": FLOAT, "p": FLOAT, "answer_words": BIT}, {**form.x, "m": FLOAT}
    return [
        _momentum_encode(form, signs=True),
        *_signs_merged(FLOAT),
        Kernel("sign_apply", reads, writes, each="part"),
    ]


def local_step(form: Form, *, first: bool = False) -> list[Kernel]:
    """0/1 Adam's; the first after a synchronisation remembers the parameter."""
    anchor = {"anchor": FLOAT} if first else {}
    return [
        _momentum_encode(form, signs=False),
        *_packets(0.0, 0.0),
        Kernel("step_apply", {**form.x, "p": FLOAT, "values": FLOAT}, {**form.x, **anchor}, each="part"),
    ]


def _zero_one_adam(form: Form) -> list[Kernel]:
    kinds = ((_synchronising_step(form), 1), (local_step(form, first=True), 1), (local_step(form), LOCAL_CYCLE - 2))
    return [dataclasses.replace(kernel, often=count / LOCAL_CYCLE) for kernels, count in kinds for kernel in kernels]


def _cd_adam(form: Form) -> list[Kernel]:
    mine, states = 1 / WORKERS, {"g": FLOAT, "m": FLOAT, "v": FLOAT, "peak": FLOAT}
    encoded = {"grad": form.grad, "known": FLOAT, "sent_words": BIT, "sent_mask": BIT, "active": BIT}
    words = {"known": FLOAT, "sent_words": BIT, "nonzero": 1 / WORD, "packets": BIT}
    merged = {"rows": WORKERS * BIT, "mean": FLOAT, "g": FLOAT, "active": BIT}
    quiet = {"words": 1 / WORD}  # those that have just fallen quiet are written, which are few
    return [
        Kernel("markov_encode", encoded, words, sums=3, each="part"),
        Kernel("shard_scale", {}, {}, each="shard"),
        Kernel("quiet words of the worker", {"nonzero": 1 / WORD}, {"sent": BIT / WORD}, each="shard"),
        Kernel("any_of", {"rows": WORKERS * BIT}, {"answer": BIT}, share=mine / WORD),
        Kernel(
            "quiet words of the owner",
            {"active": BIT, "sent_mask": BIT},
            {"answer_words": BIT},
            share=mine,
        ),
        Kernel("clear_words", quiet, {}, share=mine),
        Kernel("markov_merge", merged, {"mean": FLOAT, "answer": BIT}, share=mine, sums=3),
        Kernel("shard_scale", {}, {}),
        *_packets(BIT + BIT / WORD, BIT + BIT / WORD),
        Kernel("quiet words, answer_words by all", {"active": BIT, "sent_mask": BIT}, {"answer_words": BIT}),
        Kernel("clear_words", quiet, {}),
        Kernel("clear_words", quiet, {}),
        Kernel("amsgrad_apply", {**form.x, **states, "packets": BIT, "active": BIT}, {**form.x, **states}, each="part"),
        Kernel("maps", {"answer_words": BIT, "active": BIT, "answers": BIT}, {"sent_mask": BIT, "active": BIT}),
    ]


def _adamw(form: Form) -> list[Kernel]:
    """In one kernel for all parameters; with fp32 masters if these are bf16."""
    averages = {"m": FLOAT, "v": FLOAT}
    reads = {"grad": form.grad, "x": FLOAT, **averages}
    return [Kernel("AdamW", reads, {**form.x, **averages}, each="model")]


@dataclass(frozen=True)
class Method:
    """An optimizer in one of its stages: its kernels, and what its packets carry."""

    kernels: Callable[[Form], list[Kernel]]
    payload: Callable[[Layout], Payload] | None = None
    sends: float = 1.0
    """In how many of all steps packets travel."""


def _votes(layout: Layout, downlink: Downlink) -> Payload:
    return StochasticSign(layout, downlink, BACKENDS["reference"], torch.zeros(0), 0.0).payload


def _signs(layout: Layout) -> Payload:
    return ScaledSign(layout, 0, BACKENDS["reference"], torch.float32).payload


def _changes(layout: Layout) -> Payload:
    return MarkovSign(layout, 0, BACKENDS["reference"]).payload


def _birders() -> Iterator[tuple[str, Method]]:
    for downlink, (dtype, state) in itertools.product(get_args(Downlink), (("fp32", FLOAT), ("bf16", 2.0))):
        kernels = functools.partial(_birder, downlink=downlink, state=state)
        yield f"Birder, {downlink}, {dtype} state", Method(kernels, functools.partial(_votes, downlink=downlink))


YARDSTICK = "AdamW, fused"
METHODS = {
    YARDSTICK: Method(_adamw),
    **dict(_birders()),
    "1-bit Adam, fp32 errors": Method(functools.partial(_onebit_adam, error=FLOAT), _signs),
    "1-bit Adam, bf16 errors": Method(functools.partial(_onebit_adam, error=2.0), _signs),
    "1-bit Adam, warm-up": Method(_warm_up, lambda _: Dense.payload),
    "0/1 Adam, synchronising step": Method(_synchronising_step, _signs),
    "0/1 Adam, local step": Method(local_step),
    f"0/1 Adam, one step of {LOCAL_CYCLE} sends": Method(_zero_one_adam, _signs, sends=1 / LOCAL_CYCLE),
    "1-bit LAMB": Method(_onebit_lamb, _signs),
    "CD-Adam": Method(_cd_adam, _changes),
}
