"""Settings that decide which steps of an optimizer are dense, compressed or local.

Some optimizers begin with dense steps, or skip the exchange in some steps. Every command runs for a different number of
steps, and needs the stages at different places. `Stages` has the settings for all of them; an optimizer whose steps are
all alike uses `ALIKE`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DENSE_SHARE = 0.15
"""The share of a whole run that is dense, or mostly dense, in optimizers with such a stage."""
QUANTISED_SHARE = 0.3
"""The share of a whole run that is warm-up if its gradients are quantised, which makes it cheap."""
DENSE_STEPS = 2
"""The dense steps of a benchmark; benchmarks do not measure their first steps."""
LOCAL_CYCLE = 16
"""The longest interval between synchronisations of 0/1 Adam, by default."""


# Benchmarks: the stage to be measured begins after a few steps. A variance that is frozen so early is meaningless, and
# some parameters would overflow at an ordinary learning rate. At this rate nothing moves far, and every step does the
# same work. With such small betas the bias correction, during which 0/1 Adam rescales its errors, ends with the dense
# steps.
_STILL = {"lr": 1e-8, "betas": (0.1, 0.5)}

WARMED_UP: dict[str, Any] = {**_STILL, "warmup_steps": DENSE_STEPS}
"""1-bit Adam and 1-bit LAMB: compressed from the third step on."""

SYNCHRONISING: dict[str, Any] = {
    **_STILL,
    "var_freeze_step": DENSE_STEPS,
    "var_update_scaler": DENSE_STEPS,
    "local_step_scaler": 10**9,
}
"""0/1 Adam: a synchronisation at every step from the third on."""

MOSTLY_LOCAL: dict[str, Any] = {**SYNCHRONISING, "local_step_scaler": 1, "local_step_clipper": LOCAL_CYCLE}
"""0/1 Adam: from the fifth step on, one step of every `LOCAL_CYCLE` synchronises and the others are local."""

OF_ALL_KINDS: dict[str, Any] = {**MOSTLY_LOCAL, "var_freeze_step": 4, "local_step_clipper": 2}
"""0/1 Adam: dense and signs up to the fourth step, local steps and synchronisations up to the eighth."""


def dense_steps(steps: int, share: float = DENSE_SHARE) -> int:
    """How many steps of a whole run are dense, or mostly dense, in optimizers with such a stage."""
    return max(1, round(share * steps))


def warm_up(steps: int, betas: tuple[float, ...] | None = None, share: float = DENSE_SHARE) -> dict[str, Any]:
    """A warm-up for a run of so many steps, and betas whose variance looks back no further than the warm-up."""
    dense, betas = dense_steps(steps, share), betas or (0.8, 0.95)
    return {"betas": (betas[0], min(betas[1], 1 - 1 / dense)), "warmup_steps": dense}


def local_steps(steps: int, betas: tuple[float, ...]) -> dict[str, Any]:
    """A run of 0/1 Adam: after the freeze of the variance, a third of the steps at each of the intervals 1, 2 and 4."""
    freeze = dense_steps(steps)
    return {
        "betas": betas,
        "var_freeze_step": freeze,
        "var_update_scaler": min(16, freeze),
        "local_step_scaler": max(1, -(-(steps - freeze) // 3)),
    }


def _no_stages(_: int, betas: tuple[float, ...] | None) -> dict[str, Any]:
    return {} if betas is None else {"betas": betas}


@dataclass(frozen=True)
class Stages:
    """Settings for the stages of an optimizer, by what a command needs."""

    whole_run: Callable[[int, Any], dict[str, Any]] = _no_stages
    """For a run of so many steps with these betas: demo, soak and study. Betas of None are the optimizer's own."""
    remark: Callable[[int], str | None] = lambda steps: None
    """Which steps of such a run send what; None if all send the same."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """For benchmarks: the stage to be measured begins after `settling_steps`, and lasts."""
    settling_steps: int = 0
    measured_name: str = ""
    """What benchmarks call that stage."""
    every_kind: tuple[Mapping[str, Any], int] = ({}, 2)
    """Settings, and a number of steps within which a step of every kind occurs: each kind needs its own memory."""
    nine_steps: Mapping[str, Any] = field(default_factory=dict)
    """For the selftest: steps of every kind within nine steps."""
    synchronous: Mapping[str, Any] = field(default_factory=dict)
    """Added to `nine_steps` where all ranks must exchange at every step."""
    fifty_steps: Mapping[str, Any] = field(default_factory=dict)
    """For chaos: all stages within fifty steps."""
    has_local_steps: bool = False
    """Whether workers take steps without an exchange."""


ALIKE = Stages()
"""All steps are alike."""

_SHORT_MEMORY = {"betas": (0.5, 0.5)}
_FIFTY_STEPS = {"betas": (0.9, 0.9)}
_COMPRESSED = " in the compressed stage"

DENSE = Stages(remark=lambda steps: "all steps send floats, as AdamW's do.", nine_steps=_SHORT_MEMORY)
"""All steps are dense."""


def after_warm_up(rule: str, share: float = DENSE_SHARE, bits: int | None = None) -> Stages:
    """Steps by an uncompressed rule, then compressed ones.

    Args:
        rule: the name of the uncompressed rule.
        share: the share of a whole run that it has.
        bits: of its gradients; None for floats.
    """

    def remark(steps: int) -> str:
        sent = "floats" if bits is None else f"{bits} bits per parameter each way"
        return (
            f"the first {dense_steps(steps, share)} of {steps} steps are {rule}'s and send {sent}, the others one bit "
            "per parameter each way."
        )

    return Stages(
        whole_run=functools.partial(warm_up, share=share),
        remark=remark,
        measured=WARMED_UP,
        settling_steps=4,
        measured_name=_COMPRESSED,
        every_kind=(WARMED_UP, 4),
        nine_steps={**_SHORT_MEMORY, "warmup_steps": 2},
        fifty_steps={**_FIFTY_STEPS, "warmup_steps": 15},
    )


def _zero_one_remark(steps: int) -> str:
    return (
        f"of the first {dense_steps(steps)} of {steps} steps ever fewer send floats, the others one bit per parameter "
        "each way; after them all steps, then every second, then every fourth step sends bits, and the others send "
        "nothing. Workers synchronise before every validation; that is included in the bytes but not in the times."
    )


WITH_LOCAL_STEPS = Stages(
    whole_run=local_steps,
    remark=_zero_one_remark,
    measured=SYNCHRONISING,
    settling_steps=4,
    measured_name=_COMPRESSED,
    every_kind=(OF_ALL_KINDS, 8),
    nine_steps={
        **_SHORT_MEMORY,
        "var_freeze_step": 3,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 2,
    },
    synchronous={"local_step_scaler": 10**9},
    fifty_steps={
        **_FIFTY_STEPS,
        "var_freeze_step": 15,
        "var_update_scaler": 4,
        "local_step_scaler": 8,
        "local_step_clipper": 4,
    },
    has_local_steps=True,
)
"""0/1 Adam: dense steps with growing gaps, then compressed steps, then local steps between synchronisations."""
