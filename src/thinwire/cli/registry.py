"""The optimizers that the commands offer.

One table for demo, soak, the benchmarks, chaos, selftest and study: adding an optimizer to all of them is one entry of
`OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire
from thinwire.cli.stages import ALIKE, DENSE, QUANTISED_SHARE, WITH_LOCAL_STEPS, Stages, after_warm_up
from thinwire.optimizers.optimizer import WireOptimizer

WEIGHT_DECAY = 0.1
"""Of whole runs, unless a study searches it."""
# As for thinwire's optimizers: betas of the study, the best of a few learning rates in one run each.
ADAMW: dict[str, Any] = {"lr": 5e-3, "betas": (0.7, 0.95), "weight_decay": WEIGHT_DECAY, "fused": True}
"""Arguments of AdamW in whole runs of the demo's model."""
SHORT_RUN, LR_OF_SHORT_RUN = 200, 3e-3
"""A run of up to so many steps has a smaller learning rate: 5e-3 is the best of a few for 400 steps. In 125 steps AdamW
ended at 2.129 and 2.107 with 3e-3 (two seeds), at 2.141 and 2.172 with 5e-3, and at 2.194 and 2.184 with 7e-3."""
RECOMMENDED = "onebit-adam-4bit"
"""What `thinwire demo` trains with unless it is told otherwise: the name of an optimizer here, or of an averaging."""
TOPK_OF = 64
"""Top-k sends one of so many elements, as an index and a value: as many bytes as signs take."""

Command = Literal["demo", "bench exchange", "bench step", "chaos", "selftest"]
ALL_COMMANDS: frozenset[Command] = frozenset({"demo", "bench exchange", "bench step", "chaos", "selftest"})
Betas = tuple[float, ...]


def adamw(steps: int) -> dict[str, Any]:
    """Arguments of AdamW in a whole run of so many steps."""
    return ADAMW | ({"lr": LR_OF_SHORT_RUN} if steps <= SHORT_RUN else {})


@dataclass(frozen=True)
class Bits:
    """How many bits per parameter a worker sends to the owners of shards, and an owner back to every worker."""

    up: float
    down: Callable[[int], float]
    """For so many workers."""

    @classmethod
    def each_way(cls, bits: float) -> Bits:
        """The same number in both directions."""
        return cls(bits, lambda workers: bits)


@dataclass(frozen=True)
class Search:
    """Where `thinwire study` begins to search for settings, for a task whose `lr` is 1."""

    lr: float
    betas: tuple[Betas, Betas, Betas]
    """The betas to begin with, and two alternatives."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are not searched, to be shown, and for the store to notice when they change."""
    more_betas: tuple[Betas, ...] = ()
    """Betas to try in a second, longer search."""
    name: str | None = None
    """In the study, if it differs."""
    title: str | None = None
    """In the study's tables, if it differs from the label."""
    seeded: bool = True
    """Whether the seed of a run is also the seed of the optimizer."""
    only: str | None = None
    """The task that it is for; None for all."""
    settings_of: str | None = None
    """A method of the study whose best settings it uses, instead of a search of its own."""


@dataclass(frozen=True)
class Prepared:
    """An optimizer that is ready to train a model."""

    optimizer: Optimizer
    metrics: Callable[[], thinwire.Metrics] | None
    """Of thinwire's exchange; None if thinwire exchanges nothing."""


@dataclass(frozen=True)
class Entry:
    """An optimizer, and the settings with which each command runs it."""

    name: str
    """On the command line."""
    label: str
    """In texts and tables."""
    optimizer: type[WireOptimizer]
    lr: float
    """Of a whole run of the demo's model."""
    betas: Betas | None = None
    """Of a whole run; None: the optimizer's own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments in all commands."""
    stages: Stages = ALIKE
    takes_seed: bool = False
    overlaps: bool = True
    """Whether it sends while backward runs."""
    bits: Bits = field(default_factory=lambda: Bits.each_way(1))
    """Of a step in the stage that benchmarks measure."""
    measured_as: str = "flat"
    """How `bench step` describes what it measures."""
    scales_per_bucket: bool = False
    """Whether results depend on the size of buckets."""
    selftest: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the small models of the selftest."""
    search: Search | None = None
    """How `thinwire study` searches its settings; None: it does not take part."""
    commands: frozenset[Command] = ALL_COMMANDS

    def whole_run(
        self,
        steps: int,
        seed: int | None,
        *,
        lr: float | None = None,
        betas: Betas | None = None,
        weight_decay: float = WEIGHT_DECAY,
    ) -> dict[str, Any]:
        """Arguments for a run of so many steps. What is None is as the entry says."""
        settings: dict[str, Any] = {"lr": self.lr if lr is None else lr, "weight_decay": weight_decay}
        settings |= {**self.stages.whole_run(steps, betas or self.betas), **self.options}
        return settings | ({"seed": seed} if self.takes_seed and seed is not None else {})

    def measured(self) -> dict[str, Any]:
        """Arguments for benchmarks: after a few steps the optimizer is in the stage that is measured, and stays."""
        return {**self.options, **self.stages.measured}

    def build(self, params: Iterable[nn.Parameter], settings: Mapping[str, Any]) -> WireOptimizer:
        """An optimizer of these parameters."""
        return self.optimizer(params, **settings)

    def prepare(self, model: nn.Module, settings: Mapping[str, Any], *, overlap: bool = True, **wire: Any) -> Prepared:
        """Give a model an optimizer, attached if the model is in DDP. `wire` has options such as `bucket_mb`."""
        optimizer = self.build(model.parameters(), {**settings, **wire})
        if isinstance(model, DistributedDataParallel):
            thinwire.attach(model, optimizer, overlap=overlap)
        return Prepared(optimizer, optimizer.metrics)

    def with_downlink(self, downlink: str | None) -> Entry:
        """The same with another downlink, which may want another learning rate. None changes nothing."""
        if downlink is None or downlink == self.options["downlink"]:
            return self
        return replace(OPTIMIZERS[f"{self.name}-{downlink}"], name=self.name, label=self.label)


def _birder_betas(_: int, betas: Betas | None) -> dict[str, Any]:
    if betas is None:
        return {}
    beta, *others = betas
    return {"beta": beta, "beta_b": others[0] if others else None}  # None: one beta for both, as in the paper


_BIRDER = Stages(whole_run=_birder_betas)
_BIRDER_BETAS = ((0.7, 0.95), (0.8, 0.95), (0.8,))
# The variance is frozen after 15 % of a short run, and cannot look back further.
_FROZEN_BETAS = ((0.9, 0.95), (0.8, 0.95), (0.9, 0.966))
# Compressed differences lag behind the gradient, which has the effect of a momentum.
_LAGGING_BETAS = ((0.0, 0.99), (0.5, 0.99), (0.0, 0.999))
_VARIANT: frozenset[Command] = frozenset({"bench step", "selftest"})

# Betas come from `thinwire study` (docs/convergence.md). The learning rates of Birder were the best of a few in one run
# each of the demo's model; those of the others come from the study, whose model is smaller.
_ENTRIES = (
    Entry(
        "birder",
        "Birder",
        thinwire.Birder,
        lr=4e-3,
        options={"downlink": "bit"},
        stages=_BIRDER,
        takes_seed=True,
        search=Search(6e-3, _BIRDER_BETAS, {"gain": 2.0}, name="birder-bit", title="Birder, bit"),
    ),
    Entry(
        "birder-delay",
        "Birder with a delay",
        thinwire.Birder,
        lr=4e-3,
        options={"downlink": "bit", "delay": 1},
        stages=_BIRDER,
        takes_seed=True,
        measured_as="flat, delay=1",
        search=Search(
            6e-3, _BIRDER_BETAS, {"gain": 2.0, "delay": 1}, title="Birder, bit, delay=1", settings_of="birder-bit"
        ),
        commands=frozenset({"bench step"}),
    ),
    Entry(
        "birder-majority",
        "Birder with a majority",
        thinwire.Birder,
        lr=3e-3,
        options={"downlink": "majority"},
        stages=_BIRDER,
        takes_seed=True,
        measured_as='flat, downlink="majority"',
        search=Search(4e-3, _BIRDER_BETAS, {"gain": 1.5}, title="Birder, majority"),
        commands=_VARIANT,
    ),
    Entry(
        "birder-votes",
        "Birder with votes",
        thinwire.Birder,
        lr=4e-3,
        options={"downlink": "votes"},
        stages=_BIRDER,
        takes_seed=True,
        bits=Bits(1, int.bit_length),  # 0 to n votes
        measured_as='flat, downlink="votes"',
        search=Search(8e-3, _BIRDER_BETAS, {"gain": 1.5}, more_betas=((0.6, 0.95),), title="Birder, votes"),
        commands=_VARIANT,
    ),
    Entry(
        "onebit-adam",
        "1-bit Adam",
        thinwire.OneBitAdam,
        lr=2.5e-3,
        betas=(0.8, 0.95),
        options={"warmup_bits": None, "scale_block": None},
        stages=after_warm_up("AdamW"),
        measured_as="flat, after its warm-up",
        scales_per_bucket=True,
        search=Search(5e-3, _FROZEN_BETAS, {"warm-up": 0.15}),
    ),
    Entry(
        "onebit-adam-4bit",
        "1-bit Adam, 4-bit warm-up",
        thinwire.OneBitAdam,
        lr=ADAMW["lr"],
        betas=ADAMW["betas"],
        stages=after_warm_up("AdamW", QUANTISED_SHARE, bits=4),
        measured_as="flat, after its warm-up",
        scales_per_bucket=True,
        search=Search(
            5e-3,
            _FROZEN_BETAS,
            {"warm-up": QUANTISED_SHARE, "warm-up bits": 4, "scale block": 4096},
            settings_of="adamw",
        ),
        commands=frozenset({"demo", "bench exchange", "bench step"}),
    ),
    Entry(
        "zero-one-adam",
        "0/1 Adam",
        thinwire.ZeroOneAdam,
        lr=2.5e-3,
        betas=(0.8, 0.95),
        stages=WITH_LOCAL_STEPS,
        measured_as="flat, synchronising at every step",
        scales_per_bucket=True,
        search=Search(5e-3, _FROZEN_BETAS, {"freeze": 0.15, "interval": 4}),
    ),
    Entry(
        "onebit-lamb",
        "1-bit LAMB",
        thinwire.OneBitLamb,
        lr=5e-3,
        betas=(0.8, 0.95),
        stages=after_warm_up("LAMB"),
        measured_as="flat, after its warm-up",
        scales_per_bucket=True,
        search=Search(1e-2, _FROZEN_BETAS, {"warm-up": 0.15}),
    ),
    Entry(
        "lamb",
        "LAMB",
        thinwire.Lamb,
        lr=5e-3,
        betas=(0.8, 0.95),
        stages=DENSE,
        bits=Bits.each_way(32),
        search=Search(1e-2, _FROZEN_BETAS, only="large-batch"),
        commands=frozenset({"demo", "chaos", "selftest"}),
    ),
    Entry(
        "cd-adam",
        "CD-Adam",
        thinwire.CDAdam,
        lr=4e-3,
        bits=Bits.each_way(65 / 64),  # one more bit per word of signs
        stages=Stages(settling_steps=1),  # the first step of its signs has one more exchange than the others
        scales_per_bucket=True,
        search=Search(4e-3, _LAGGING_BETAS),
    ),
    Entry(
        "cd-adam-momentum",
        "CD-Adam of momenta",
        thinwire.CDAdam,
        lr=1e-3,
        options={"compress": "momentum"},
        scales_per_bucket=True,
        commands=frozenset({"demo"}),
    ),
    Entry(
        "cd-adam-topk",
        "CD-Adam with top-k",
        thinwire.CDAdam,
        lr=5e-3,
        options={"codec": "topk", "ratio": 1 / TOPK_OF},
        bits=Bits.each_way(64 / TOPK_OF),
        measured_as=f'flat, codec="topk": one element in {TOPK_OF}, 64 bits each',
        scales_per_bucket=True,
        selftest={"ratio": 0.1},
    ),
    Entry(
        "sketched-amsgrad",
        "SketchedAMSGrad",
        thinwire.SketchedAMSGrad,
        lr=1.6e-2,
        betas=(0.0, 0.99),
        takes_seed=True,
        overlaps=False,
        bits=Bits.each_way(32 * (5 / 50 + 2 / 100)),  # a sketch, then two floats for each coordinate that it picks
        measured_as="flat: sketches of 5 × d/50, and d/100 coordinates; both exchanged in step(), one after the other",
        search=Search(4e-3, ((0.0, 0.99), (0.5, 0.99), (0.9, 0.99)), {"eps": 1e-4}, seeded=False),
    ),
    Entry(
        "distributed-lion",
        "Distributed Lion",
        thinwire.DistributedLion,
        lr=1e-3,
        betas=(0.8, 0.95),
        stages=Stages(settling_steps=1),  # the first step has one more exchange than the others
    ),
)

OPTIMIZERS: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
"""All entries by name."""


def offered(command: Command) -> dict[str, Entry]:
    """The optimizers of a command, by name."""
    return {name: entry for name, entry in OPTIMIZERS.items() if command in entry.commands}
