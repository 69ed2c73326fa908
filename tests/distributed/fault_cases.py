"""Ranks that a fault strikes, at a stage of a step that is chosen to the call.

The victim replaces a method in its own process, so that it does something to itself, or to others, when it gets there.
The other ranks run what users run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.distributed.common import environment, token_loss, token_net
from tests.distributed.stages import PAPER
from thinwire.compressors.all_reduce import EncodedAllReduce
from thinwire.optimizers.optimizer import WireOptimizer
from thinwire.transport.lane_transport import LaneTransport
from thinwire.transport.node import LaneNode
from thinwire.transport.peers import Peers

STEPS = 6
TOGETHER_SECONDS = 10.0
"""How long a rank that has noticed waits for the others to notice too, before it closes any connection."""
PATIENCE_SECONDS = 30.0
"""Within which anything else that is waited for must have happened."""


@dataclass(frozen=True)
class Stage:
    """Where a fault strikes: at the so-manieth call of a method, counted from the beginning of a step."""

    owner: type
    method: str
    call: int = 1
    step: int = 3
    """From 1; 0 for what comes before the first."""
    victim: int = 1
    world_size: int = 3
    ranks_a_node: int = 1
    optimizer: str = "Birder"
    options: Mapping[str, Any] = field(default_factory=dict)
    attach: bool = True
    noticed: tuple[int | None, ...] = (3,)
    """At which steps others may notice, as `PeerLost.step` has it."""


class Between:
    """What users do in between."""

    @staticmethod
    def steps() -> None:
        """Nothing."""

    @staticmethod
    def backward_and_step(step: int) -> None:
        """Nothing."""


WARM_UP: dict[str, Any] = {"optimizer": "OneBitAdam", "options": {"betas": (0.9, 0.9), "warmup_steps": 10, **PAPER}}
SKETCH: dict[str, Any] = {"optimizer": "SketchedAMSGrad"}
CHECK: dict[str, Any] = {"options": {"check_replicas_every": 3}}
NODES: dict[str, Any] = {"world_size": 4, "ranks_a_node": 2}
START: dict[str, Any] = {"step": 0, "noticed": (None,)}
AFTER: dict[str, Any] = {"noticed": (4,)}
STAGES = {
    "the agreement": Stage(Peers, "gather", attach=False, world_size=4, **START),
    "the agreement of attach": Stage(Peers, "gather", victim=0, **START),
    "connections": Stage(Peers, "connect", victim=0, **START),
    "connections of nodes": Stage(Peers, "connect", victim=3, **NODES, **START),
    "encoding": Stage(WireOptimizer, "_encode", call=3),
    "listening": Stage(LaneTransport, "_post_receives", victim=2),
    "the first packets": Stage(LaneTransport, "_send", victim=0),
    "packets during backward": Stage(LaneTransport, "_send", call=3),
    "packets in step()": Stage(LaneTransport, "_send", call=3, attach=False),
    "merging": Stage(LaneTransport, "_merge_presence", call=2),
    "answers": Stage(LaneTransport, "_collect", call=2),
    "the commit round": Stage(LaneTransport, "_commit", victim=0),
    "apply": Stage(WireOptimizer, "_apply_all", **AFTER),
    "between steps": Stage(Between, "steps", victim=2, **AFTER),
    "the exchange after a greeting": Stage(LaneTransport, "_send", call=7, step=1, attach=False, noticed=(1,)),
    "dense packets": Stage(LaneTransport, "_send", call=3, **WARM_UP),
    "dense merging": Stage(LaneTransport, "_merge_presence", call=2, **WARM_UP),
    "sketches": Stage(EncodedAllReduce, "exchange", **SKETCH),
    "values after a sketch": Stage(EncodedAllReduce, "exchange", call=2, **SKETCH),
    "the replica check": Stage(Peers, "gather_integer", world_size=4, **CHECK),
    "gradients of the node": Stage(LaneNode, "scatter", call=3, **NODES),
    "merging between nodes": Stage(LaneTransport, "_merge_presence", call=2, victim=0, **NODES),
    "answers of the node": Stage(LaneNode, "share", call=2, victim=3, **NODES),
    "the commit round of the node": Stage(LaneNode, "commit", noticed=(3, 4), **NODES),
}


class Notes:
    """What ranks leave in a directory, for each other and for the test."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def leave(self, name: str, value: float) -> None:
        """Write a number, so that nobody sees half of it."""
        unfinished = self._directory / f".{name}-{os.getpid()}"
        unfinished.write_text(repr(value))
        unfinished.rename(self._directory / name)

    def read(self, name: str) -> float | None:
        """The number, if it has been left."""
        path = self._directory / name
        return float(path.read_text()) if path.exists() else None


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Or until so much time has passed: then whatever comes next is as it is."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


Blow = Callable[[Notes], None]
"""What happens to the victim, on the thread that has come to the stage."""


def kill(_: Notes) -> None:
    # This very thread goes no further: a signal to the process may take its time.
    signal.pthread_kill(threading.get_ident(), signal.SIGKILL)


def stop(_: Notes) -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def fail(_: Notes) -> None:
    raise ValueError("no merging today")


def signal_rank(notes: Notes, rank: int, number: int) -> None:
    # Ranks say who they are before they train, but another one may be faster.
    wait_until(lambda: notes.read(f"pid-{rank}") is not None)
    pid = notes.read(f"pid-{rank}")
    assert pid is not None, f"rank {rank} has not said who it is"
    os.kill(int(pid), number)


@dataclass(frozen=True)
class Interrupt:
    """Send a signal to other ranks when they wait for this one, which then stops."""

    number: int
    ranks: tuple[int, ...] = (0,)

    def __call__(self, notes: Notes) -> None:
        time.sleep(0.5)
        notes.leave("struck", time.monotonic())
        for rank in self.ranks:
            signal_rank(notes, rank, self.number)
        stop(notes)


@dataclass(frozen=True)
class InterruptThenDie:
    """The same, but die: connections close while the others' interpreters are being torn down."""

    delay: float
    dawdlers: bool = False
    """Whether the others dawdle: then wait until all of them do."""

    def __call__(self, notes: Notes) -> None:
        if self.dawdlers:
            wait_until(lambda: all(notes.read(f"dawdling-{rank}") is not None for rank in (0, 2)))
        time.sleep(0.5)
        notes.leave("struck", time.monotonic())
        for rank in (0, 2):
            signal_rank(notes, rank, signal.SIGINT)
        time.sleep(self.delay)
        kill(notes)


@dataclass
class Report:
    """What a rank has to tell."""

    where: str = ""
    """What the user's code was at."""
    raised: str | None = None
    """The type of what it raised."""
    message: str = ""
    traceback: str = ""
    at: float = 0.0
    stage: str | None = None
    step: int | None = None
    bucket: int | None = None
    ranks: tuple[int, ...] = ()
    threads: int = 0
    """Of thinwire, that were left."""
    farewell: float = 0.0
    """Seconds that it took to destroy the process groups."""


def _prepare_blow(stage: Stage, blow: Blow, notes: Notes) -> Callable[[int], None]:
    """Let it strike in this process; to be told of every step that begins."""
    original, left, armed = getattr(stage.owner, stage.method), stage.call, False

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= armed
        if armed and left == 0:
            notes.leave("struck", time.monotonic())
            blow(notes)
        return original(*args, **kwargs)

    def begin_step(step: int) -> None:
        nonlocal armed
        armed = step >= stage.step

    setattr(stage.owner, stage.method, struck)
    return begin_step


def _train(rank: int, stage: Stage, begin_step: Callable[[int], None], report: Report) -> None:
    """The user's program."""
    net = token_net()
    options = {"lr": 1e-2, "bucket_mb": 0.01, "check_replicas_every": 0, **stage.options}
    optimizer = getattr(thinwire, stage.optimizer)(net.parameters(), **options)
    model: torch.nn.Module = net
    begin_step(0)
    if stage.attach:
        model = DistributedDataParallel(net)
        report.where = "attach"
        thinwire.attach(model, optimizer)
    for step in range(1, STEPS + 1):
        begin_step(step)
        report.where = "backward"
        token_loss(model, rank, step).backward()
        Between.backward_and_step(step)
        report.where = "step"
        optimizer.step()
        optimizer.zero_grad()
        Between.steps()


def suffer(rank: int, world_size: int, stage: Stage, blow: Blow, directory: str, manners: str = "") -> Report:
    """Train until the blow has struck the victim; report what was raised, and leave as a program does.

    Manners are those of a rank that is interrupted: it "catches" that, "exits" by itself when it is terminated, or
    "dawdles" before step(), so that its lanes wait and it does not.
    """
    notes, report = Notes(directory), Report()
    if manners == "exits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    notes.leave(f"pid-{rank}", os.getpid())

    def dawdle(step: int) -> None:
        if step == stage.step:
            notes.leave(f"dawdling-{rank}", time.monotonic())
            time.sleep(PATIENCE_SECONDS)  # the interrupt comes much earlier

    if manners == "dawdles" and rank != stage.victim:
        Between.backward_and_step = dawdle
    begin_step = _prepare_blow(stage, blow, notes) if rank == stage.victim else lambda _: None
    caught = (RuntimeError, KeyboardInterrupt) if manners == "catches" else RuntimeError
    with environment({"LOCAL_WORLD_SIZE": str(stage.ranks_a_node)}):
        try:
            _train(rank, stage, begin_step, report)
        except caught as error:
            report.at = time.monotonic()
            report.raised, report.message, report.traceback = type(error).__name__, str(error), traceback.format_exc()
            if isinstance(error, thinwire.PeerLost):
                report.stage, report.step, report.bucket = error.stage, error.step, error.bucket
                report.ranks = error.ranks
    if stage.method != "connect":  # those threads stay, as long as torch keeps them
        # thinwire itself waits a second for some of them, which may not get a core for so long.
        wait_until(lambda: not _threads())
    report.threads = _threads()
    if rank != stage.victim and blow in (kill, stop, fail):
        _wait_for_others(rank, world_size, stage, notes)
    began = time.monotonic()
    dist.destroy_process_group()
    report.farewell = time.monotonic() - began
    return report


def _threads() -> int:
    return sum(thread.name.startswith("thinwire") for thread in threading.enumerate())


def _wait_for_others(rank: int, world_size: int, stage: Stage, notes: Notes) -> None:
    """Let nobody notice because another has left."""
    notes.leave(f"noticed-{rank}", time.monotonic())
    others = {f"noticed-{other}" for other in range(world_size) if other != stage.victim}
    wait_until(lambda: all(notes.read(name) is not None for name in others), TOGETHER_SECONDS)
