"""Law 4: what codecs say and what is left together are what they were given; and a random bit is right on average."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.cli.selftest.site import CPU, Findings, Site
from thinwire.compressors.codecs import Codec
from thinwire.compressors.codecs.dense import Floats
from thinwire.compressors.codecs.topk import TopK
from thinwire.kernels.modes import MarkovMode
from thinwire.kernels.ops import Kernels
from thinwire.transport.layout import WORD

ERROR_RATE = 1e-6
"""The probability that unbiased bits would be taken for biased ones, by Hoeffding's bound, were the keys others."""
_LENGTH = 1000
_ROUNDS = 6
_SHARE = 0.1
_BINS, _IN_BIN = 16, 256
_VOTERS = 3
TOP_K = "top-k"
_CODECS: dict[str, Callable[[Kernels], Codec]] = {
    TOP_K: lambda kernels: TopK(kernels, _SHARE),
    "floats": lambda _: Floats(),
}


def check(site: Site, findings: Findings) -> None:
    """Each rank for itself, with the kernels of its device."""
    kernels = site.kernels()
    for name, make in _CODECS.items():
        _nothing_is_lost(site, findings, name, make(kernels))
    _signs_catch_up(site, findings, kernels)
    _changes_add_up(site, findings, kernels)
    _bits_are_unbiased(site, findings, kernels)


def _noise(length: int, seed: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def _nothing_is_lost(site: Site, findings: Findings, name: str, codec: Codec) -> None:
    values = _noise(_LENGTH, 1)
    given = values.to(site.device)
    packet = torch.zeros(codec.nbytes(_LENGTH), dtype=torch.uint8, device=site.device)
    codec.encode(given, packet)
    said, left = torch.zeros_like(given), given.clone()
    codec.decode(packet, said)
    codec.decode(packet, left, -1.0)
    said, left = said.to(CPU), left.to(CPU)
    off = (said.double() + left.double() - values.double()).abs().max()
    findings.expect(bool(off == 0), f"{name}: said + left is off the input by up to {off:.3g}")
    if name == TOP_K:
        largest = values.abs().topk(math.ceil(_SHARE * _LENGTH)).indices.sort().values
        spoken = said.nonzero().flatten()
        findings.expect(torch.equal(spoken, largest), f"{name}: elements {spoken.tolist()} are not the largest")


def _signs_catch_up(site: Site, findings: Findings, kernels: Kernels) -> None:
    """With error feedback, all that was ever said and the last error are all that was ever given."""
    words = -(-_LENGTH // WORD)
    runs = torch.tensor([[0, 0, _LENGTH, 0, 8 * words, 0]])
    on = site.device
    c, packets = torch.zeros(words * WORD, device=on), torch.zeros(8 * words, dtype=torch.uint8, device=on)
    heard, sums = torch.zeros(words, dtype=torch.int64, device=on), torch.zeros(1, 1, dtype=torch.float64, device=on)
    sent_scales, heard_scales = torch.zeros(1, device=on), torch.zeros(1, device=on)
    given, said = torch.zeros(_LENGTH, dtype=torch.float64), torch.zeros(_LENGTH, dtype=torch.float64)
    for turn in range(_ROUNDS):
        gradient = _noise(_LENGTH, turn)
        kernels.sign_encode(
            runs,
            gradient.to(site.device),
            c,
            heard,
            packets,
            sent_scales=sent_scales,
            answer_scales=heard_scales,
            sums=sums,
            beta=0.0,
            weight=1.0,
            scale=1.0,
            shift=0,
        )
        sent_scales.fill_(math.sqrt(float(sums[0, 0]) / _LENGTH))
        given += gradient
        said += (2.0 * _bits(packets)[:_LENGTH] - 1) * sent_scales.to(CPU)
    memory, scale = c[:_LENGTH].to(CPU).double(), float(sent_scales)
    kept = memory - torch.where(memory >= 0, scale, -scale)
    off = (said + kept - given).abs().max()
    findings.expect(bool(off <= 1e-5), f"signs with error feedback: sent + kept is off the input by up to {off:.3g}")
    findings.expect(bool(kept.abs().max() > 0.1), "signs with error feedback: nothing was kept")


def _changes_add_up(site: Site, findings: Findings, kernels: Kernels) -> None:
    """With signs of changes, what a worker says is the sign of what it means less all that it has ever said."""
    words = -(-_LENGTH // WORD)
    runs = torch.tensor([[0, 0, _LENGTH, 0, 8 * words, 0]])
    on = site.device
    known, packets = torch.zeros(words * WORD, device=on), torch.zeros(8 * words, dtype=torch.uint8, device=on)
    said, busy = (torch.zeros(words, dtype=dtype, device=on) for dtype in (torch.int64, torch.uint8))
    active = torch.full_like(said, -1)
    scales, sums = torch.zeros(1, device=on), torch.zeros(1, 3, dtype=torch.float64, device=on)
    told = torch.zeros(_LENGTH, dtype=torch.float64)
    for turn in range(_ROUNDS):
        meant = _noise(_LENGTH, turn)
        kernels.markov_encode(
            runs,
            meant.to(site.device),
            None,
            known,
            said,
            busy,
            active,
            active,
            packets,
            sent_scales=scales,
            sums=sums,
            beta=0.0,
            weight=1.0,
            scale=1.0,
            shift=0,
            mode=MarkovMode.ORDINARY,
        )
        change = meant - told
        bits = _bits(packets)[:_LENGTH]
        wrong = int(((bits == 1) != (change >= 0))[change.abs() > 1e-5].sum())
        findings.expect(wrong == 0, f"signs of changes: {wrong} of {_LENGTH} are wrong in round {turn + 1}")
        off = (known[:_LENGTH].to(CPU) - told).abs().max()
        findings.expect(bool(off <= 1e-5), f"signs of changes: what is known is off what was said by up to {off:.3g}")
        scales.fill_(change.abs().mean())
        told += (2.0 * bits - 1) * scales.to(CPU)


def _bits_are_unbiased(site: Site, findings: Findings, kernels: Kernels) -> None:
    """E[Q(u)] = u for what workers sample, and for what an owner draws from them."""
    elements = _BINS * _IN_BIN
    turns = 64 if site.quick else 512
    u = torch.linspace(-0.95, 0.95, _BINS).repeat_interleave(_IN_BIN)
    runs = torch.tensor([[0, 0, elements, 0, elements // 8, 0]])
    on = site.device
    m, b = u.to(site.device), torch.ones(elements, device=on)
    active = torch.full((elements // WORD,), -1, dtype=torch.int64, device=on)
    rows = torch.zeros(_VOTERS, elements // 8, dtype=torch.uint8, device=on)
    answer = torch.zeros(elements // 8, dtype=torch.uint8, device=on)
    signal = torch.zeros(2, dtype=torch.int64, device=on)
    sampled, answered = torch.zeros(elements), torch.zeros(elements)
    rule = {"beta": 0.8, "eps": 1e-12, "scale": 1.0, "amsgrad": False}
    vote = {"first_word": 0, "words": elements // WORD, "answer": answer, "answer_byte": 0, "signal": signal}
    for turn in range(turns):
        for voter, row in enumerate(rows):
            kernels.birder_encode(runs, None, m, b, active, row, **rule, key=_VOTERS * turn + voter)
        kernels.vote_bit(rows, 0, active, **vote, key=turn)
        sampled += _bits(rows[turn % _VOTERS])
        answered += _bits(answer)
    # A mean of N numbers that are -1 or 1 is off by t with a probability of at most 2 exp(-N t²/2).
    tests, numbers = 2 * _BINS, turns * _IN_BIN
    allowed = math.sqrt(2 * math.log(2 * tests / ERROR_RATE) / numbers)
    for name, ones in (("a worker's bits", sampled), ("an owner's bits", answered)):
        means = (2 * ones / turns - 1).view(_BINS, _IN_BIN).mean(1)
        off = (means - u.view(_BINS, _IN_BIN)[:, 0]).abs().max()
        findings.expect(bool(off <= allowed), f"{name} are off their mean by up to {off:.3g}, allowed is {allowed:.3g}")


def _bits(packet: Tensor) -> Tensor:
    """As zeros and ones, on the CPU."""
    return ((packet.to(CPU).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().float()
