"""Leads episodes through their faults, and compares what is left of them with what would have been without."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from thinwire.cli.chaos.episodes import Episode, episodes
from thinwire.cli.chaos.faults import AT_START, FAULTS
from thinwire.cli.chaos.injection import Injection
from thinwire.cli.chaos.ranks import Attempt, Rank, RankResult
from thinwire.cli.chaos.results import DIVERGENCE, LOST, ChaosResults, Ending, Fault, Wrong
from thinwire.cli.chaos.worker import RankConfig, main
from thinwire.testbed import Testbed
from thinwire.testbed.forkserver import ForkServer

NO_FAULT = "no fault"
# How soon faults follow the first step, or one another; or, if they do not wait for the first step, the process group.
_PAUSE_SECONDS = (0.0, 1.0)
_PAUSE_SECONDS_AT_START = (0.0, 0.3)
# Then an episode may come to its end, and it is another optimizer's turn.
_MOST_FAULTS = 6
# An episode is abandoned after so many failures in a row without a fault.
_MOST_FAILURES = 3


class UnfinishedError(RuntimeError):
    """A run without any fault did not come to its end: there is nothing to compare with."""


@dataclass(frozen=True)
class Limits:
    """When it is enough: after either of these there are no more faults, and no further episode."""

    deadline: float
    faults: int | None

    def reached(self, faults: int) -> bool:
        """Whether it is enough."""
        return time.monotonic() > self.deadline or (self.faults is not None and faults >= self.faults)


class ChaosRun:
    """Runs episodes on a testbed until it is enough; the report tells what came of it.

    Args:
        testbed: with a host a rank.
        server: forks the ranks.
        folder: for rendezvous, logs and checkpoints.
        report: filled in here.
        limits: when it is enough.
        on_news: gets a line about everything that happens.
        train: what each rank runs.
        on_episode: called after each episode, when the report has it.
    """

    def __init__(
        self,
        testbed: Testbed,
        server: ForkServer,
        folder: Path,
        report: ChaosResults,
        limits: Limits,
        on_news: Callable[[str], None],
        train: Callable[[Connection, RankConfig], None] = main,
        on_episode: Callable[[], None] = lambda: None,
    ) -> None:
        self._testbed, self._server, self._folder, self._train = testbed, server, folder, train
        self._report, self._limits, self._say, self._on_episode = report, limits, on_news, on_episode
        # Another call with the same report does not begin with the same faults again.
        self._random = random.Random(f"{report.seed} {report.episodes}")
        self._kinds = self._drawn()
        self._put_off: list[str] = []
        self._attempts = 0

    def run(self) -> None:
        """Episode after episode, from the first that the report does not have.

        Raises:
            UnfinishedError: when a run without faults does not come to its end.
        """
        for episode in episodes(self._report.seed, self._report.hosts):
            if episode.number < self._report.episodes:
                continue
            if self._enough():
                return
            self._play(episode, self._reference(episode))
            self._remove("checkpoints")
            self._report.episodes = episode.number + 1
            self._on_episode()

    def _enough(self, most_faults: int | None = None) -> bool:
        faults = len(self._report.faults)
        return self._limits.reached(faults) or (most_faults is not None and faults >= most_faults)

    def _remove(self, checkpoints: str) -> None:
        # There are none if no rank got as far as that.
        if (self._folder / checkpoints).exists():
            shutil.rmtree(self._folder / checkpoints)

    # An episode ------------------------------------------------------------------------------------------------------

    def _reference(self, episode: Episode) -> list[Rank]:
        """The ranks of a run without faults."""
        before = len(self._report.wrongs)
        with self._ranks(episode, "reference") as attempt:
            self._injection(episode, attempt, NO_FAULT).expect_finish()
        self._remove("reference")
        if len(self._report.wrongs) > before:
            raise UnfinishedError(f"{episode.label}, without any fault: {self._report.wrongs[before].details}")
        return attempt.ranks

    def _play(self, episode: Episode, reference: list[Rank]) -> None:
        """The same with faults, until its end, or until there is no point in going on."""
        faults, wrongs, restarts, saved, failures = len(self._report.faults), len(self._report.wrongs), -1, 0, 0
        while True:
            restarts += 1
            before = len(self._report.faults)
            with self._ranks(episode, "checkpoints") as attempt:
                finished = self._live(episode, attempt, faults + _MOST_FAULTS)
            failures = 0 if len(self._report.faults) > before else failures + 1
            saved = self._check_checkpoints(episode, attempt.ranks, saved)
            equal = self._check_digests(episode, attempt.ranks, reference)
            if finished:
                break
            if failures == _MOST_FAILURES or not equal:
                self._say(f"episode {episode.number}, {episode.label}: given up")
                return
        result = self._check_results(episode, attempt.ranks, reference)
        count = len(self._report.faults) - faults
        self._report.endings.append(
            Ending(episode.number, episode.label, episode.steps, result.skipped, count, restarts, result.digest)
        )
        verdict = "equal to the bit" if len(self._report.wrongs) == wrongs else "NOT as it should be"
        self._say(
            f"episode {episode.number}, {episode.label}: {episode.steps} steps, {result.skipped} of them skipped; "
            f"{count} faults, {restarts} restarts; {verdict}"
        )

    def _live(self, episode: Episode, attempt: Attempt, most_faults: int) -> bool:
        """Fault after fault, until one makes a restart necessary (False), or all ranks have finished."""
        began = time.monotonic()
        kind = None if self._enough(most_faults) else self._next_kind(at_start=True)
        if kind is not None:
            injection = self._injection(episode, attempt, kind)
            injection.wait_for_groups()
            injection.wait(self._random.uniform(*_PAUSE_SECONDS_AT_START))
            self._inflict(injection)
            return False
        for _ in range(episode.subject.settling_steps):
            if not self._injection(episode, attempt, NO_FAULT).expect_progress():
                return False
        self._report.restart_seconds.append(time.monotonic() - began)
        while not self._enough(most_faults):
            kind = self._next_kind(at_start=False)
            assert kind is not None
            injection = self._injection(episode, attempt, kind)
            injection.wait(self._random.uniform(*_PAUSE_SECONDS))
            if attempt.failed or any(rank.result is not None for rank in attempt.ranks):
                # Too late for this one.
                self._put_off.append(kind)
                break
            if not self._inflict(injection):
                return False
        return self._injection(episode, attempt, NO_FAULT).expect_finish()

    def _inflict(self, injection: Injection) -> bool:
        """Whether the ranks can go on."""
        fault = injection.fault
        FAULTS[fault.kind](injection)
        self._report.faults.append(fault)
        outcome = "borne"
        if fault.noticed_after is not None:
            outcome = f"raised within {fault.noticed_after:.2f} s, ended within {fault.ended_after:.2f} s"
        victims = f"rank{'s' if len(fault.victims) > 1 else ''} {', '.join(map(str, fault.victims))}"
        self._say(
            f"{len(self._report.faults)}. {fault.contender}, step {fault.step}: {fault.kind}, {victims}: {outcome}"
        )
        return not fault.restarted

    def _drawn(self) -> Iterator[str]:
        """Kinds of faults: all of them in some order, again and again, so that none is left out."""
        while True:
            yield from self._random.sample(list(FAULTS), len(FAULTS))

    def _next_kind(self, *, at_start: bool) -> str | None:
        """A fault for this moment, if there is one; those for another moment are put off."""
        fitting = [kind for kind in self._put_off if (kind in AT_START) == at_start]
        if fitting:
            self._put_off.remove(fitting[0])
            return fitting[0]
        while not at_start:
            kind = next(self._kinds)
            if kind not in AT_START:
                return kind
            self._put_off.append(kind)
        return None

    # Ranks, and what may be said against them ------------------------------------------------------------------------

    @contextmanager
    def _ranks(self, episode: Episode, checkpoints: str) -> Iterator[Attempt]:
        self._attempts += 1
        folder = self._folder / f"attempt-{self._attempts}"
        folder.mkdir()
        configs = [
            RankConfig(
                episode=episode,
                rank=host.index,
                namespace=host.namespace,
                interface=host.interface,
                timeout=self._report.timeout,
                folder=str(folder),
                checkpoints=str(self._folder / checkpoints),
            )
            for host in self._testbed.hosts
        ]
        try:
            with Attempt(self._server, self._train, configs) as attempt:
                yield attempt
        finally:
            shutil.rmtree(folder)

    def _injection(self, episode: Episode, attempt: Attempt, kind: str) -> Injection:
        fault = Fault(kind, episode.number, episode.label, step=-1, victims=[])

        def complain(what: str, rank: Rank | None, details: str) -> None:
            self._complain(episode, kind, what, rank, details)

        return Injection(self._testbed, attempt, self._random, self._report.timeout, fault, complain)

    def _complain(self, episode: Episode, kind: str, what: str, rank: Rank | None, details: str) -> None:
        number, step = (None, -1) if rank is None else (rank.number, rank.step)
        self._report.wrongs.append(Wrong(what, episode.number, episode.label, kind, number, step, details))
        whom = "" if rank is None else f", rank {number} after step {step}"
        self._say(f"{what.upper()}: {episode.label}, {kind}{whom}: {details.splitlines()[0]}")

    def _check_checkpoints(self, episode: Episode, ranks: list[Rank], saved: int) -> int:
        """Whether all went on from the same checkpoint, and from the last that all knew of; the last they know of."""
        restored = {rank.restored for rank in ranks if rank.restored is not None}
        if len(restored) > 1:
            self._complain(episode, "restart", DIVERGENCE, None, f"ranks went on from steps {sorted(restored)}")
        if restored and min(restored) < saved:
            lost = f"all ranks had saved step {saved}, but went on from step {min(restored)}"
            self._complain(episode, "restart", LOST, None, lost)
        return max(saved, min(rank.saved for rank in ranks))

    def _check_digests(self, episode: Episode, ranks: list[Rank], reference: list[Rank]) -> bool:
        """Whether every rank had the bits of the run without faults after every step, and after loading."""
        equal = True
        for rank, unharmed in zip(ranks, reference, strict=True):
            expected = dict(unharmed.digests)
            if rank.restored:
                expected[rank.restored] = unharmed.saved_digests.get(rank.restored, "never saved")
            wrong = [step for step, digest in rank.digests.items() if digest != expected.get(step, digest)]
            if wrong:
                equal = False
                at = "when it had loaded" if wrong[0] == rank.restored else "from"
                details = f"other parameters than without faults {at} step {wrong[0]}, gone on from {rank.restored}"
                self._complain(episode, "comparison", DIVERGENCE, rank, details)
        return equal

    def _check_results(self, episode: Episode, ranks: list[Rank], reference: list[Rank]) -> RankResult:
        """Whether all ranks have in the end what they would have without faults, and the same; what the first has."""
        for rank, unharmed in zip(ranks, reference, strict=True):
            if rank.result != unharmed.result:
                details = f"ends with {rank.result}, and {unharmed.result} without faults"
                self._complain(episode, "comparison", DIVERGENCE, rank, details)
        results = [rank.result for rank in ranks if rank.result is not None]
        if len({result.digest for result in results}) > 1:
            self._complain(episode, "comparison", DIVERGENCE, None, f"ranks end with {results}")
        return results[0]
