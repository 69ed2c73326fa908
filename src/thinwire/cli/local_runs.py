"""Local steps that `thinwire bench step` and `thinwire study` offer: a profile of `thinwire.LocalSteps`.

One table for both: adding one is one entry of `LOCAL_RUNS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.averaging.catalogue import SCHEMES
from thinwire.cli.registry import Prepared
from thinwire.outer.profiles import PROFILES, profile_of

INTERVALS = (5, 15, 30)
"""Inner steps per outer step, in the study."""
MEASURED_INTERVAL = 30
"""The same, in the benchmark."""
SHORT_RUN = {"outer_momentum": 0.6}
"""MuLoCo's momentum, for all runs with momentum: theirs have 16 to 120 outer steps, and 0.9 is a mean of about ten."""


@dataclass(frozen=True)
class LocalRun:
    """AdamW under a profile of local steps; under "muloco" with Muon for matrices."""

    profile: str
    every: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments beyond those of the profile."""
    measured: bool = False
    """Whether it takes part in `thinwire bench step`."""
    studied: bool = False
    """Whether it takes part in `thinwire study`."""
    settings_of: str | None = None
    """In the study, the local run whose learning rate it uses. None: it searches one."""

    @property
    def name(self) -> str:
        """On the command line."""
        return f"{self.profile}-h{self.every}"

    @property
    def label(self) -> str:
        """In texts and tables."""
        return f"{self.profile}, every {self.every}"

    def bits(self, workers: int) -> tuple[float, float]:
        """Bits per parameter and inner step that a worker sends, and an owner to each worker."""
        profile = profile_of(self.profile)
        options = {name: value for name, value in profile.items() if name in ("k", "union")}
        up, down = SCHEMES[profile["compressor"]](**options).bits_per_value(workers)
        return up / self.every, down / self.every

    def definition(self) -> dict[str, Any]:
        """What a run depends on, as JSON has it."""
        return {"every": self.every, **PROFILES[self.profile], **self.settings}

    def prepare(self, model: nn.Module, settings: Mapping[str, Any]) -> Prepared:
        """Give a model AdamW with these settings, in local steps."""
        inner: torch.optim.Optimizer
        if self.profile == "muloco":
            output = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
            inner = thinwire.MuonAdamW(model, adamw=[output], **settings)
        else:
            inner = torch.optim.AdamW(model.parameters(), fused=True, **settings)
        optimizer = thinwire.LocalSteps.from_profile(
            self.profile, inner, every=self.every, topology="flat", **self.settings
        )
        return Prepared(optimizer, optimizer.metrics)


_MEASURED = ("diloco", "diloco-int4", "sparse-loco")
_AS_DENSE = ("diloco-int4", "sign")
"""They differ from dense updates by the compressor alone, so they have their learning rate."""


def _entry(profile: str, every: int) -> LocalRun:
    return LocalRun(
        profile,
        every,
        settings={} if profile == "sparse-loco" else SHORT_RUN,
        measured=every == MEASURED_INTERVAL and profile in _MEASURED,
        studied=True,
        settings_of=f"diloco-h{every}" if profile in _AS_DENSE else None,
    )


_ENTRIES = (
    *(
        _entry(profile, every)
        for profile in ("diloco", "diloco-int4", "sparse-loco", "sign", "muloco")
        for every in INTERVALS
    ),
    LocalRun(
        "streaming-int4",
        MEASURED_INTERVAL,
        settings=SHORT_RUN,
        measured=True,
        studied=True,
        settings_of=f"diloco-h{MEASURED_INTERVAL}",
    ),
)

LOCAL_RUNS: dict[str, LocalRun] = {entry.name: entry for entry in _ENTRIES}
"""All entries by name."""
