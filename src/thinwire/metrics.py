"""Counters of what a run has sent and where its time went."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Metrics:
    """Totals of this rank since its optimizer was created.

    The training thread spends the seconds of `stage`, `apply` and `exposed_wait`. Lanes spend those of `node`, `merge`
    and `wire`; with an attached model they run at the same time as backward. `encode` runs on the training thread in a
    flat topology and on a lane in a hierarchical one. Compressors that need a whole bucket always encode on a lane.
    """

    steps: int
    """Calls of `step()`, skipped steps included."""
    skipped_steps: int
    """Steps that no rank took because some rank had a non-finite gradient."""
    rounds: int
    """Rounds of messages between workers: two per bucket, and one commit round per exchange."""
    bytes_sent: int
    """Bytes sent to other workers, headers included."""
    bytes_received: int
    """Bytes received from other workers, headers included."""
    node_bytes_sent: int
    """Bytes sent to other ranks of the same node; 0 in a flat topology, where every rank is a worker."""
    stage_seconds: float
    """Copying gradients for the other ranks of the node, and clipping them (`clip_norm`, `clip_value`)."""
    node_seconds: float
    """Waiting for gradients and answers from other ranks of the node."""
    encode_seconds: float
    """The local update, and compressing its result into packets."""
    merge_seconds: float
    """Merging packets, and encoding the answers, for the shards that this rank owns."""
    apply_seconds: float
    """Moving the parameters."""
    wire_seconds: float
    """Waiting for packets and waiting for answers, slower ranks included. The two waits overlap for different buckets,
    so that their sum may exceed the elapsed time."""
    exposed_wait_seconds: float
    """Time for which `step()` waited for the lanes: the part of the exchange that backward did not hide."""
    mean_abs_vote: float
    """Mean |ū| of the last step, over a sample of the shards that this rank owns: 1 if all workers agree, about 0.8/√n
    if their bits are random. NaN before the first step, and for optimizers without votes."""
    contraction: float
    """‖c - C(c)‖²/‖c‖² of the last step, where c is this rank's message before compression and C(c) is what it sent: 0
    if nothing was lost, 1 if everything was. With scaled signs this is 1 - ‖c‖₁²/(d‖c‖₂²). NaN for optimizers that do
    not measure it."""
    elapsed_seconds: float
    """Time since the optimizer was created."""

    def as_dict(self, since: Metrics | None = None) -> dict[str, float]:
        """All totals by name, and rates, for a logger. What was not measured (NaN) is left out.

        The rates are `steps_per_second`, `bytes_sent_per_second`, `bytes_received_per_second`, and `waited_share`: the
        share of the time for which `step()` waited for the exchange. Example::

            before = opt.metrics()
            ...
            for name, value in opt.metrics().as_dict(since=before).items():
                writer.add_scalar(f"thinwire/{name}", value, step)

        Args:
            since: earlier metrics of the same optimizer, from which on rates are measured; None for its whole life.
        """
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if not math.isnan(value)}
        seconds = self.elapsed_seconds - (since.elapsed_seconds if since is not None else 0.0)
        if seconds > 0:
            for name, total in _RATES.items():
                past = getattr(since, total) if since is not None else 0
                numbers[name] = (getattr(self, total) - past) / seconds
        return numbers


_RATES = {
    "steps_per_second": "steps",
    "bytes_sent_per_second": "bytes_sent",
    "bytes_received_per_second": "bytes_received",
    "waited_share": "exposed_wait_seconds",
}
"""By the name of a rate, the total whose change per second it is."""


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
    merge: Stopwatch = field(default_factory=Stopwatch)
    apply: Stopwatch = field(default_factory=Stopwatch)
    packets: Stopwatch = field(default_factory=Stopwatch)
    answers: Stopwatch = field(default_factory=Stopwatch)
    exposed_wait: Stopwatch = field(default_factory=Stopwatch)
    began: float = field(default_factory=time.perf_counter)

    def read(self, *, mean_abs_vote: float, contraction: float) -> Metrics:
        """The current totals."""
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
            merge_seconds=self.merge.seconds,
            apply_seconds=self.apply.seconds,
            wire_seconds=self.packets.seconds + self.answers.seconds,
            exposed_wait_seconds=self.exposed_wait.seconds,
            mean_abs_vote=mean_abs_vote,
            contraction=contraction,
            elapsed_seconds=time.perf_counter() - self.began,
        )
