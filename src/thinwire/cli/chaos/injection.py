"""One fault as it unfolds: who is hit, what must come of it, and what came of it instead."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.cli.chaos.ranks import Attempt, Rank, seconds_without_core
from thinwire.cli.chaos.results import CRASH, DIVERGENCE, FALSE_ALARM, HANG, WRONG_ERROR, Fault
from thinwire.testbed import Testbed

GRACE_SECONDS = 5.0
"""What a rank may take on top of the timeout to end."""
MOST_STARVED_SECONDS = 60.0
"""How much longer at most, on a machine without a core to spare."""
_BLINK = 0.2

Complain = Callable[[str, Rank | None, str], None]
"""Takes down what must not happen: its kind, the rank, and details."""


def _waited() -> float:
    """For how long the main thread of this process has waited for a core."""
    return seconds_without_core(Path("/proc/self")) or 0.0


@dataclass
class Injection:
    """What a fault needs: the ranks, their network, and where to report violations."""

    testbed: Testbed
    attempt: Attempt
    random: random.Random
    timeout: float
    fault: Fault
    complain: Complain
    _since: float = field(default_factory=time.monotonic)
    _waited_before: float = field(default_factory=_waited)

    @property
    def ranks(self) -> list[Rank]:
        """All of them."""
        return self.attempt.ranks

    def choose(self, count: int) -> list[Rank]:
        """Some ranks at random."""
        return self.random.sample(self.ranks, count)

    def all_but(self, victims: Sequence[Rank]) -> list[Rank]:
        """The others."""
        return [rank for rank in self.ranks if rank not in victims]

    def inflict(self, victims: Sequence[Rank]) -> None:
        """Record the victims, and start the clock."""
        self.fault.victims = [rank.number for rank in victims]
        self.fault.step = max(rank.step for rank in self.ranks)
        for rank in self.ranks:
            rank.corrupted = ""
        self.begin_again()

    def begin_again(self) -> None:
        """Restart the clock."""
        for rank in self.ranks:
            rank.begin_to_count()
        self._since, self._waited_before = time.monotonic(), _waited()

    def _in_time(self, waits: int = 1) -> bool:
        """Whether ranks may still take their time: for so many timeouts, and as long as they have waited for a core.

        A rank may wait for another that waited for a core, and so may this process before it sees what they report.
        Ranks that hang want none, so they are found in the end.
        """
        late = time.monotonic() - self._since - waits * self.timeout - GRACE_SECONDS
        starved = sum(rank.starved() for rank in self.ranks) + _waited() - self._waited_before
        return late < min(starved, MOST_STARVED_SECONDS)

    def wait(self, seconds: float) -> None:
        """Let time pass, unless something goes wrong."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.attempt.failed:
            self.attempt.receive(left)

    def wait_for_groups(self) -> None:
        """Let ranks find each other. Until they have, torch takes five timeouts to notice that one is missing."""
        while not all(rank.joined for rank in self.ranks) and not self.attempt.failed and self._in_time():
            self.attempt.receive(_BLINK)

    # What must happen ------------------------------------------------------------------------------------------------

    def expect_loss(self, ranks: Sequence[Rank], *, waits: int = 1) -> None:
        """These ranks must raise `PeerLost`, after at most so many waits one after another, and end by themselves."""
        self.expect_end(ranks, errors=("PeerLost",), waits=waits)

    def corrupted_by(self, rank: Rank) -> str:
        """What a rank has sent that was changed on its way, as soon as it has; empty if it was too late for that."""
        while not (rank.corrupted or rank.result or self.attempt.failed) and self._in_time():
            self.attempt.receive(_BLINK)
        return rank.corrupted

    def expect_corruption(self) -> None:
        """All ranks must raise `CorruptPacket` in the same step, without having applied it, and end in time.

        In a step that a node takes by itself the packet is the node's alone, and others only lose their peers.
        """
        episode = self.ranks[0].config.episode
        size = episode.ranks_a_node if episode.subject.has_local_steps and episode.ranks_a_node > 1 else episode.ranks
        parties = [self.ranks[first : first + size] for first in range(0, episode.ranks, size)]
        self.expect_end(self.ranks, errors=("CorruptPacket", "PeerLost"))
        hit = next((party for party in parties if any(map(_had_corruption, party))), parties[0])
        for rank in hit:
            if rank.result is not None and any(sender.corrupted for sender in self.ranks):
                self.complain(WRONG_ERROR, rank, "finished, although a packet was corrupt")
            if rank.raised is not None and not _had_corruption(rank):
                self.complain(WRONG_ERROR, rank, f"raised {rank.raised.types[0]}, not CorruptPacket\n{rank.log()}")
            if rank.raised is not None and rank.raised.digest != rank.last_digest:
                self.complain(DIVERGENCE, rank, f"a corrupt packet has changed parameters after step {rank.step}")
        if len({rank.step for rank in hit}) > 1:
            steps = ", ".join(f"rank {rank.number}: {rank.step}" for rank in hit)
            self.complain(DIVERGENCE, None, f"some have applied a step in which others had a corrupt packet: {steps}")

    def expect_end(
        self, ranks: Sequence[Rank], *, errors: Sequence[str] = (), any_error: bool = False, waits: int = 1
    ) -> None:
        """These ranks must end by themselves in time, by one of some errors, or because they have finished."""
        while any(rank.exit_code is None for rank in ranks) and self._in_time(waits):
            self.attempt.receive(_BLINK)
            for rank in ranks:
                if rank.result is not None:
                    rank.dismiss()
        self.fault.take_down([(rank.noticed_at - self._since, rank.ended_at - self._since) for rank in ranks])
        for rank in ranks:
            self._judge(rank, errors, any_error=any_error)

    def _judge(self, rank: Rank, errors: Sequence[str], *, any_error: bool) -> None:
        if rank.exit_code is None:
            late = time.monotonic() - self._since
            raised = "nothing" if rank.raised is None else f"{rank.raised.types[0]}: {rank.raised.message}"
            stacks = rank.stacks()
            self.complain(HANG, rank, f"had not ended {late:.1f} s after the fault; raised {raised}\n{stacks}")
            rank.signal(signal.SIGKILL)
        elif rank.exit_code < 0 and not (rank.exit_code == -signal.SIGINT and "KeyboardInterrupt" in errors):
            # (Python sends itself the SIGINT again that it has raised an exception for.)
            raised = "" if rank.raised is None else f" after {rank.raised.types[0]}"
            self.complain(CRASH, rank, f"ended by {signal.Signals(-rank.exit_code).name}{raised}\n{rank.log()}")
        elif rank.raised is None:
            if rank.result is None:
                self.complain(WRONG_ERROR, rank, f"ended with code {rank.exit_code}, without a word\n{rank.log()}")
        elif not any_error and not set(errors) & set(rank.raised.types):
            wanted = " or ".join(errors)
            text = f"raised {rank.raised.types[0]}, expected {wanted}: {rank.raised.message}"
            self.complain(WRONG_ERROR, rank, f"{text}\n{rank.log()}")

    def expect_progress(self) -> bool:
        """All ranks must go on, to at least one more step each, in time. If any does not, all have to start again."""
        self.begin_again()
        before = [(rank, rank.steps_taken) for rank in self.ranks]
        while self._in_time() and not self.attempt.failed:
            if all(rank.steps_taken > taken or rank.result is not None for rank, taken in before):
                return True
            self.attempt.receive(_BLINK)
        self._give_up()
        return False

    def expect_finish(self) -> bool:
        """All ranks must take all steps that are left, and end."""
        while not self.attempt.finished:
            if not self.expect_progress():
                return False
        self.begin_again()
        for rank in self.ranks:
            rank.dismiss()
        while self.attempt.alive and self._in_time():
            self.attempt.receive(_BLINK)
        for rank in self.ranks:
            self._judge(rank, (), any_error=False)
        return True

    def _give_up(self) -> None:
        """Say of all ranks why they do not go on, and have them start again."""
        self.fault.restarted = True
        # If a rank has failed, the others are about to notice.
        self.begin_again()
        while self.attempt.failed and self.attempt.alive and self._in_time():
            self.attempt.receive(_BLINK)
        failed = [rank for rank in self.ranks if rank.raised is not None or rank.exit_code is not None]
        for rank in failed:
            raised = "" if rank.raised is None else f": {rank.raised.types[0]}: {rank.raised.message}"
            self.complain(FALSE_ALARM, rank, f"failed with code {rank.exit_code}{raised}\n{rank.log()}")
        if not failed:
            for rank in self.ranks:
                self.complain(HANG, rank, f"made no step in time\n{rank.stacks()}")


def _had_corruption(rank: Rank) -> bool:
    return rank.raised is not None and "CorruptPacket" in rank.raised.types
