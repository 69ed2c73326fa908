"""What a run has cost so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metrics:
    """Totals since the optimizer was made, of this rank.

    Seconds of `stage`, `apply` and `exposed_wait` are the training thread's; `node`, `vote` and `wire` are the lanes'
    and run behind backward when the model is attached. `encode` is the training thread's in a flat topology and a
    lane's in a hierarchical one, but for what needs a whole bucket, which is always a lane's.
    """

    steps: int
    """Calls of step(), skipped ones included."""
    skipped_steps: int
    """Steps that no rank took because a gradient on some rank was not finite."""
    rounds: int
    """Rounds of messages between workers: two a bucket, and one at the end of an exchange, that all was right."""
    bytes_sent: int
    """Bytes given to the network for other workers, headers included."""
    bytes_received: int
    node_bytes_sent: int
    """Bytes given to other ranks of the same node; none in a flat topology, where every rank is a worker."""
    stage_seconds: float
    """Copying gradients for the ranks of the same node."""
    node_seconds: float
    """Waiting for gradients and answers of ranks of the same node."""
    encode_seconds: float
    """Local rule, sampling and packing, or sketching."""
    vote_seconds: float
    """Counting and answering for the shards that this rank owns."""
    apply_seconds: float
    """Moving the parameters."""
    wire_seconds: float
    """Waiting for packets and, for another bucket at the same time, for answers, slower ranks included. As the sum of
    both it may exceed the time that has passed."""
    exposed_wait_seconds: float
    """Time that step() stood still for the lanes: the part of the exchange that backward did not hide."""
    mean_abs_vote: float
    """Mean |ū| of the last step, over a sample of the shards that this rank owns: 1 when workers agree, and about
    0.8/√n when they toss coins. NaN before the first step and where an optimizer has no votes."""
    contraction: float
    """‖c - C(c)‖²/‖c‖² of the last step, c being what this rank had to tell and C(c) what it sent: 0 when all was said,
    and 1 when nothing was. With scaled signs that is 1 - ‖c‖₁²/(d‖c‖₂²). NaN where an optimizer does not measure it."""


class Stopwatch:
    """Adds up the seconds of `with stopwatch:` blocks; about 0.2 µs each."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


@dataclass
class Meter:
    """The counters behind `Metrics`. Each field is written by one thread only, so none needs a lock."""

    steps: int = 0
    skipped_steps: int = 0
    rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    node_bytes_sent: int = 0
    stage: Stopwatch = field(default_factory=Stopwatch)
    scatter: Stopwatch = field(default_factory=Stopwatch)
    share: Stopwatch = field(default_factory=Stopwatch)
    encode: Stopwatch = field(default_factory=Stopwatch)
    seal: Stopwatch = field(default_factory=Stopwatch)
    vote: Stopwatch = field(default_factory=Stopwatch)
    apply: Stopwatch = field(default_factory=Stopwatch)
    packets: Stopwatch = field(default_factory=Stopwatch)
    answers: Stopwatch = field(default_factory=Stopwatch)
    exposed_wait: Stopwatch = field(default_factory=Stopwatch)

    def read(self, *, mean_abs_vote: float, contraction: float) -> Metrics:
        """The totals as they are now."""
        return Metrics(
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            rounds=self.rounds,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            node_bytes_sent=self.node_bytes_sent,
            stage_seconds=self.stage.seconds,
            node_seconds=self.scatter.seconds + self.share.seconds,
            encode_seconds=self.encode.seconds + self.seal.seconds,
            vote_seconds=self.vote.seconds,
            apply_seconds=self.apply.seconds,
            wire_seconds=self.packets.seconds + self.answers.seconds,
            exposed_wait_seconds=self.exposed_wait.seconds,
            mean_abs_vote=mean_abs_vote,
            contraction=contraction,
        )
