"""The laws that are tested, in one list, each as a program that runs in all ranks.

A law compares what the ranks do with what they must do, and complains; an exception is a failure too. They are counted
as in the tests, of which these are the ones that devices can break.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import thinwire
from thinwire.cli.selftest import codec_law, oracles
from thinwire.cli.selftest.counting import counted_bytes
from thinwire.cli.selftest.runs import (
    LR,
    SHAPES,
    STEPS,
    Course,
    Subject,
    Variant,
    difference,
    gradients_of,
    run,
    subjects,
)
from thinwire.cli.selftest.site import CPU, Findings, Site
from thinwire.kernels import native, ops
from thinwire.transport.layout import bucket_elements

SECONDS = 300.0
"""How long a law may take. On a GPU its kernels are compiled on the way."""
_PLAIN = Variant("one exchange in step()")
_OVERLAPPED = Variant("overlapped with backward, under DDP", attach=True)


@dataclass(frozen=True)
class Law:
    """What must hold, and how it is tested."""

    number: int
    title: str
    compared: str
    """What with what, in a sentence."""
    check: Callable[[Site, Findings], None]
    least_ranks: int = 1
    """With fewer there is nothing to compare."""


def judge(law: Law, site: Site) -> Findings:
    """What all ranks have found, together."""
    findings = Findings()
    law.check(site, findings)
    of_ranks: list[Findings] = site.gather(findings)
    return Findings(_told([f.complaints for f in of_ranks]), _told([f.notes for f in of_ranks]))


def _told(of_ranks: list[list[str]]) -> list[str]:
    """Each text of any rank once, with the ranks that reported it."""
    tellers: dict[str, list[int]] = {}
    for rank, said in enumerate(of_ranks):
        for text in said:
            tellers.setdefault(text, []).append(rank)
    everybody = list(range(len(of_ranks)))
    return [text if who == everybody else f"rank {', '.join(map(str, who))}: {text}" for text, who in tellers.items()]


# 1 -------------------------------------------------------------------------------------------------------------------


def _replicas_are_equal(site: Site, findings: Findings) -> None:
    for subject in subjects(site, findings):
        course = run(site, subject, _OVERLAPPED)
        first, *_ = site.gather(course)
        assert isinstance(first, Course)
        findings.expect(course.equal == first.equal, f"{subject.label}: ranks synchronise at different steps")
        # Optimizers with local steps differ in between, on purpose.
        due = [0, *(step for step, equal in enumerate(course.equal, start=1) if equal)]
        differs = difference(course.values[due], first.values[due])
        findings.expect(differs is None, f"{subject.label}: this rank is not as rank 0, {differs}")
        still = [step for step in range(1, STEPS + 1) if torch.equal(course.values[step], course.values[step - 1])]
        findings.expect(not still, f"{subject.label}: nothing moved in steps {still}")


# 2 -------------------------------------------------------------------------------------------------------------------


def _nothing_matters_that_must_not(site: Site, findings: Findings) -> None:
    for subject in subjects(site, findings):
        plain = run(site, subject, _PLAIN)
        for variant in _variants(site, subject):
            differs = difference(run(site, subject, variant).values, plain.values)
            findings.expect(differs is None, f"{subject.label}, {variant.label} against {_PLAIN.label}: {differs}")
    if ops.backend(site.device).name == "reference":
        findings.notes.append("the reference was only compared with itself, as there are no other kernels here")


def _variants(site: Site, subject: Subject) -> Iterator[Variant]:
    yield _OVERLAPPED
    if not subject.buckets_matter:
        yield Variant("in one bucket", options={})
        yield Variant("in one bucket, overlapped", attach=True, options={})
    yield Variant("with the reference kernels, on the CPU and over gloo", cpu_kernels="reference")
    if site.device.type != "cpu" and native.available():
        yield Variant("with the native kernels, on the CPU and over gloo", cpu_kernels="native")


# 3 -------------------------------------------------------------------------------------------------------------------

_NEAR = 5e-5
"""A single bit that differs, in any step, is further off than this."""
_FEW = 20
_BETAS, _EPS, _WARM_UP, _FLOOR, _DECAY = (0.5, 0.5), 1e-8, 2, 0.1, 0.1


def _runs_are_their_papers(site: Site, findings: Findings) -> None:
    numels = [math.prod(shape) for shape in SHAPES]
    bucket_mb = _PLAIN.options["bucket_mb"]
    places, shards, owners = oracles.flat_places(numels, site.ranks, bucket_elements(bucket_mb, sum(numels)))
    adam = {"betas": _BETAS, "eps": _EPS, "variance_floor": _FLOOR}
    paper = {"warmup_bits": None, "scale_block": None}
    rule = {"lr": LR, "decay": _DECAY}
    cases: list[tuple[Subject, Callable[[Tensor], Any]]] = [
        (
            Subject("Birder", thinwire.Birder, {"beta": 0.8, "beta_b": None}),
            lambda x: oracles.Birder(x, places, site.ranks, **rule, beta=0.8, downlink="bit"),
        ),
        (
            Subject("Birder with a majority", thinwire.Birder, {"beta": 0.8, "beta_b": None, "downlink": "majority"}),
            lambda x: oracles.Birder(x, places, site.ranks, **rule, beta=0.8, downlink="majority"),
        ),
        (
            Subject("Birder with votes", thinwire.Birder, {"beta": 0.8, "beta_b": None, "downlink": "votes"}),
            lambda x: oracles.Birder(x, places, site.ranks, **rule, beta=0.8, downlink="votes"),
        ),
        (
            Subject("1-bit Adam", thinwire.OneBitAdam, {**adam, **paper, "warmup_steps": _WARM_UP}),
            lambda x: oracles.OneBitAdam(x, shards, owners, site.ranks, **rule, **adam, warm_up=_WARM_UP),
        ),
    ]
    for subject, make in cases:
        course = run(site, subject, _OVERLAPPED, weight_decay=_DECAY)
        oracle = make(course.values[0])
        for step in range(STEPS):
            everybody = [gradients_of(rank, step) for rank in range(site.ranks)]
            oracle.step(torch.stack([torch.cat([g.flatten() for g in of_rank]) for of_rank in everybody]))
            off = (course.values[step + 1].double() - oracle.x).abs()[~oracle.undecided]
            if not bool((off <= _NEAR).all()):
                wrong = int((~(off <= _NEAR)).sum())
                findings.complaints.append(
                    f"{subject.label}: after step {step + 1} {wrong} of {off.numel()} elements are off the formula, by "
                    f"up to {off.max():.3g}"
                )
                break
        doubts = int(oracle.undecided.sum())
        findings.expect(doubts <= _FEW, f"{subject.label}: {doubts} elements were too near to call, which is too many")


# 5 -------------------------------------------------------------------------------------------------------------------

_ELEMENTS = 1 << 20
_SETTLING, _COUNTED = 4, 4
_OVERHEAD = 1.02


def _bytes_are_what_codecs_say(site: Site, findings: Findings) -> None:
    """Two bits per parameter, or what an optimizer says; and as many as torch.distributed is given to send."""
    share = (site.ranks - 1) / site.ranks * _ELEMENTS / 8
    signs = {"betas": (0.5, 0.5), "warmup_steps": 2}
    cases: list[tuple[Subject, float]] = [
        (Subject("Birder", thinwire.Birder), 2 * share),
        (Subject("Birder with a majority", thinwire.Birder, {"downlink": "majority"}), 2 * share),
        (Subject("Birder with votes", thinwire.Birder, {"downlink": "votes"}), (1 + site.ranks.bit_length()) * share),
        (Subject("1-bit Adam, compressing", thinwire.OneBitAdam, signs), 2 * share),
        (Subject("CD-Adam", thinwire.CDAdam), 2 * 65 / 64 * share),
    ]
    for subject, theory in cases:
        p = nn.Parameter(torch.ones(_ELEMENTS, device=site.device))
        p.grad = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(site.rank)).to(site.device)
        options = {"lr": 1e-3, "topology": "flat", "check_replicas_every": 0, "process_group": site.group}
        optimizer = subject.optimizer([p], **options, **subject.options)
        for _ in range(_SETTLING):
            optimizer.step()
        before = optimizer.metrics()
        with counted_bytes() as counter:
            for _ in range(_COUNTED):
                optimizer.step()
        site.finish()
        after = optimizer.metrics()
        sent, received = after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received
        everybody = site.gather((sent, received))
        totals = [sum(column) for column in zip(*everybody, strict=True)]
        ratio = sent / _COUNTED / theory
        findings.expect(
            1 <= ratio <= _OVERHEAD,
            f"{subject.label}: {sent / _COUNTED:,.0f} bytes per step are {ratio:.4f} times what its bits take",
        )
        findings.expect(
            sent == counter.bytes, f"{subject.label}: it says {sent:,} bytes, but torch was given {counter.bytes:,}"
        )
        findings.expect(
            totals[0] == totals[1], f"{subject.label}: {totals[0]:,} bytes were sent, {totals[1]:,} received"
        )


# 6 -------------------------------------------------------------------------------------------------------------------

_POISONS = ((1, math.nan), (5, math.inf))
"""In which steps, counted from 0, the last rank has what in its gradient."""


def _all_skip_together(site: Site, findings: Findings) -> None:
    culprit = site.ranks - 1
    poisons = [(step, culprit, value) for step, value in _POISONS]
    bad = {step for step, _ in _POISONS}
    for subject in subjects(site, findings):
        for variant in (_PLAIN, _OVERLAPPED):
            name = f"{subject.label}, {variant.label}"
            course = run(site, subject, variant, poisons=poisons, **subject.always_together)
            counts = [sum(when <= step for when in bad) for step in range(STEPS)]
            findings.expect(course.skipped == counts, f"{name}: skipped {course.skipped} steps instead of {counts}")
            for step in range(STEPS):
                moved = not torch.equal(course.values[step], course.values[step + 1])
                findings.expect(
                    moved is (step not in bad), f"{name}: step {step + 1} {'moved' if moved else 'moved nothing'}"
                )
            findings.expect(all(course.finite), f"{name}: some state is not finite after step {_first(course.finite)}")
            (first, *_) = site.gather(course.values)
            differs = difference(course.values, first.to(CPU))
            findings.expect(differs is None, f"{name}: this rank is not as rank 0, {differs}")


def _first(flags: list[bool]) -> int | None:
    return next((step for step, fine in enumerate(flags, start=1) if not fine), None)


# All -----------------------------------------------------------------------------------------------------------------

LAWS = (
    Law(
        1,
        "Replicas are identical",
        "The parameters of every rank with rank 0's after each synchronising step, to the bit, for every optimizer.",
        _replicas_are_equal,
        least_ranks=2,
    ),
    Law(
        2,
        "What must not matter does not",
        "One exchange in step() with overlap under DDP, with other bucket sizes where scales allow it, and with the "
        "reference kernels on the CPU, to the bit after every step, for every optimizer.",
        _nothing_matters_that_must_not,
    ),
    Law(
        3,
        "A run is what the paper says",
        "Distributed runs of Birder (all downlinks) and 1-bit Adam (both stages) with float64 programs of their "
        f"formulas for all workers at once, to within {_NEAR:g}, where one wrong bit would be worth far more.",
        _runs_are_their_papers,
    ),
    Law(
        4,
        "Nothing is lost, and bits are unbiased",
        "What codecs say plus what is left with what they were given, for signs with error feedback and signs of "
        "changes over several rounds; and means of a worker's and an owner's random bits with their expectation (a "
        f"sound kernel fails with probability {codec_law.ERROR_RATE:g}).",
        codec_law.check,
    ),
    Law(
        5,
        "Bytes are what is said",
        "The bytes that metrics() counts with those that torch.distributed was given to send, with those that others "
        f"have received, and with the bits of a model of {_ELEMENTS:,} parameters.",
        _bytes_are_what_codecs_say,
        least_ranks=2,
    ),
    Law(
        6,
        "A bad step is skipped by all",
        "Runs in which the last rank has a NaN or an infinity in two steps with what must come of it: nobody moves "
        "then, all count it, no state is poisoned, and replicas are equal.",
        _all_skip_together,
    ),
)
"""Laws 7 and 8, about checkpoints and dead peers, are not about devices."""
