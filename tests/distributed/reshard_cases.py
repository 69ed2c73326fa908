"""Runs of all optimizers that are saved, and runs of other ranks that go on from them."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from tests.conformance.test_conformance import OPTIMIZERS, Entry, Grid
from tests.distributed.common import digest
from tests.distributed.stages import FREEZE
from tests.resharding import adopt
from tests.saved_states import SavedStates
from thinwire.optimizers.reshard import Policy, SavedRun

DENSE, SWITCHED, APART = 7, 14, 21
"""Steps after which states are saved: before the variance is frozen, after it, and after three local steps."""
AFTERWARDS = 6
"""Steps that are taken by those who go on."""
BUCKET_MB = 0.003


class Net(nn.Module):
    """Rows without a gradient, odd sizes and a 0-dim parameter: 2,400 elements, or four buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 13)
        self.hidden = nn.Linear(13, 40)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(40, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))) * self.scale)


SHAPES = [tuple(p.shape) for p in Net().parameters()]


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Every token is to be answered by another one; only the lower half of them occurs."""
    return nn.functional.cross_entropy(net(tokens).float(), tokens * 7 % 29)


def loss_of_all(net: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(net, torch.arange(25)).item()


def backward(net: nn.Module, rank: int, step: int) -> None:
    """Every rank has a batch of its own."""
    tokens = torch.randint(0, 25, (16,), generator=torch.Generator().manual_seed(1000 * rank + step))
    loss_of(net, tokens).backward()


def train(net: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(net, rank, step)
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Case:
    """An optimizer, and the steps after which it is saved."""

    entry: Entry
    lr: float
    """Such that it is still learning then."""
    stages: tuple[int, ...] = (SWITCHED,)
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    variant: str = ""
    """What is special about it."""

    def __str__(self) -> str:
        return "-".join(filter(None, [str(self.entry), self.variant]))

    @property
    def rounding(self) -> float:
        """Of what is kept, relative to it."""
        return 2.0**-8 if torch.bfloat16 in self.options.values() else 1e-6

    def start(self, grid: Grid, **options: Any) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = Net().to(self.dtype)
        topology = "flat" if grid.ranks == 1 else "hierarchical"
        options = {"bucket_mb": BUCKET_MB, "topology": topology, **self.options, **options}
        return net, self.entry.make(net.parameters(), lr=self.lr, **options)


ENTRIES = {str(entry): entry for entry in OPTIMIZERS}
BFLOAT16_ERRORS = {"error_dtype": torch.bfloat16}
BFLOAT16_STATE = {"state_dtype": torch.bfloat16, "amsgrad": True, "downlink": "votes", "beta_b": None}
CASES = [
    Case(ENTRIES["Birder"], 0.01),
    Case(ENTRIES["DistributedLion"], 0.01),
    Case(ENTRIES["OneBitAdam"], 0.01, (DENSE, SWITCHED)),
    Case(ENTRIES["ZeroOneAdam"], 0.01, (DENSE, SWITCHED, APART)),
    Case(ENTRIES["Lamb"], 0.025),
    Case(ENTRIES["OneBitLamb"], 0.02, (DENSE, SWITCHED)),
    Case(ENTRIES["OneBitAdam-int4-warm-up"], 0.01, (DENSE, SWITCHED)),
    Case(ENTRIES["OneBitAdam-blocks"], 0.01),
    Case(ENTRIES["ZeroOneAdam-int4-warm-up"], 0.01, (DENSE,)),
    Case(ENTRIES["OneBitLamb-int4-warm-up"], 0.02, (DENSE,)),
    Case(ENTRIES["CDAdam"], 0.01),
    Case(ENTRIES["CDAdam-topk"], 0.02),
    Case(ENTRIES["SketchedAMSGrad"], 0.01, options={"k": 200, "columns": 500}),
    Case(ENTRIES["Birder"], 0.01, options=BFLOAT16_STATE, variant="bfloat16-amsgrad-votes"),
    Case(ENTRIES["OneBitAdam"], 0.01, (SWITCHED,), BFLOAT16_ERRORS, variant="bfloat16-errors"),
    Case(ENTRIES["ZeroOneAdam"], 0.01, (APART,), BFLOAT16_ERRORS, torch.bfloat16, "all-bfloat16"),
    Case(ENTRIES["CDAdam"], 0.01, options={"compress": "momentum"}, variant="momentum"),
]


def nodes_of(grid: Grid) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(node * grid.ranks, (node + 1) * grid.ranks)) for node in range(grid.nodes))


@dataclass(frozen=True)
class Change:
    before: Grid
    after: Grid
    bucket_mb: float = BUCKET_MB
    special: bool = False
    """Whether the cases that are special go through it, or the others."""
    long: bool = False
    """Whether only `make test-all` makes it."""

    def __str__(self) -> str:
        return f"{self.before}-to-{self.after}" + ("" if self.bucket_mb == BUCKET_MB else "-other-buckets")

    @property
    def cases(self) -> list[Case]:
        return [case for case in CASES if bool(case.variant) == self.special]

    @property
    def compressed(self) -> bool:
        """Whether both runs compress."""
        return all(grid.nodes > 1 or grid.ranks == 1 for grid in (self.before, self.after))


CHANGES = [
    Change(Grid(4), Grid(3), 0.001),
    Change(Grid(4), Grid(2, 2), special=True),
    Change(Grid(2, 2), Grid(1, 2)),
    Change(Grid(4), Grid(3), 0.001, special=True, long=True),
    Change(Grid(4), Grid(2, 2), long=True),
    Change(Grid(3), Grid(4), long=True),
    Change(Grid(4), Grid(1), long=True),
    Change(Grid(4), Grid(4), 0.001, long=True),
    Change(Grid(2, 2), Grid(4), long=True),
    Change(Grid(2, 2), Grid(4), special=True, long=True),
    Change(Grid(2, 2), Grid(2, 2), 0.001, long=True),
    Change(Grid(1, 2), Grid(3), long=True),
]


# What ranks do -------------------------------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=True)


Saved = dict[tuple[str, int], bytes]
"""By case and stage."""
Taken = dict[tuple[str, int, Policy], bytes | str]


def save(rank: int, world_size: int, grid: Grid) -> Saved:
    """What a rank saves of every case, and how the loss has fallen from the beginning."""
    saved = {}
    for case in CASES:
        net, optimizer = case.start(grid)
        losses = []
        for step in range(max(case.stages)):
            train(net, optimizer, rank, step)
            losses.append(loss_of_all(net))
            if step + 1 in case.stages:
                one = {"net": net.state_dict(), "optimizer": optimizer._state_of_this_rank(), "losses": losses}
                saved[str(case), step + 1] = packed(one)
    return saved


def go_on(rank: int, world_size: int, change: Change, saved: list[Saved]) -> Taken:
    """What a rank has when it has taken over, and what comes of it; or what was raised."""
    taken: Taken = {}
    for case in change.cases:
        for stage in case.stages:
            of_ranks = [unpacked(of_rank[str(case), stage]) for of_rank in saved]
            run = SavedRun(nodes_of(change.before), BUCKET_MB, lambda r, of_ranks=of_ranks: of_ranks[r]["optimizer"])
            for how in get_args(Policy):
                net, optimizer = case.start(change.after, bucket_mb=change.bucket_mb)
                net.load_state_dict(of_ranks[rank % len(of_ranks)]["net"])  # replicas may differ: any of them must do
                try:
                    adopt(optimizer, run, how)
                except ValueError as refusal:
                    taken[str(case), stage, how] = str(refusal)
                    continue
                state = packed({"net": net.state_dict(), "optimizer": optimizer._state_of_this_rank()})
                losses = [loss_of_all(net)]
                for step in range(stage, stage + AFTERWARDS):
                    train(net, optimizer, rank, step)
                    losses.append(loss_of_all(net))
                optimizer.synchronize()
                end = {"taken over": state, "losses": losses, "end": digest(net.parameters())}
                taken[str(case), stage, how] = packed(end)
    return taken


PATIENCE = 110.0
"""Seconds: each of these runs is all cases in one, for many tests to look at."""


@functools.cache
def saved_by(grid: Grid) -> list[Saved]:
    return grid.run(save, grid, timeout=PATIENCE)


@functools.cache
def taken_by(change: Change) -> list[Taken]:
    return change.after.run(go_on, change, saved_by(change.before), timeout=PATIENCE)


# What came of it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Before and after, on all ranks."""

    change: Change
    case: Case
    stage: int
    how: Policy

    def __str__(self) -> str:
        stage = {DENSE: "dense", SWITCHED: "switched", APART: "apart"}[self.stage]
        return f"{self.change}-{self.case}-{stage}-{self.how}"

    @property
    def name(self) -> str:
        return self.case.entry.optimizer.__name__

    @property
    def frozen(self) -> bool:
        """Whether the variance is."""
        return self.stage > FREEZE and self.name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")

    @property
    def refused(self) -> bool:
        """Whether it ought to be: the new run never freezes it."""
        return self.frozen and self.change.after.nodes == 1 < self.change.after.ranks

    @property
    def answers(self) -> list[bytes | str]:
        return [of_rank[str(self.case), self.stage, self.how] for of_rank in taken_by(self.change)]

    @functools.cached_property
    def saved(self) -> list[Any]:
        return [unpacked(of_rank[str(self.case), self.stage]) for of_rank in saved_by(self.change.before)]

    @functools.cached_property
    def ends(self) -> list[Any]:
        return [unpacked(answer) for answer in self.answers if isinstance(answer, bytes)]

    @functools.cached_property
    def taken_over(self) -> list[Any]:
        return [unpacked(end["taken over"]) for end in self.ends]

    @property
    def before(self) -> SavedStates:
        states = [saved["optimizer"] for saved in self.saved]
        return SavedStates(states, SHAPES, nodes_of(self.change.before), BUCKET_MB, self._scale_block)

    @property
    def after(self) -> SavedStates:
        states = [taken["optimizer"] for taken in self.taken_over]
        return SavedStates(states, SHAPES, nodes_of(self.change.after), self.change.bucket_mb, self._scale_block)

    @property
    def _scale_block(self) -> int | None:
        return self.case.entry.options.get("scale_block")


OUTCOMES = [
    Outcome(change, case, stage, how)
    for change in CHANGES
    for case in change.cases
    for stage in case.stages
    for how in get_args(Policy)
]
