"""`thinwire chaos --elastic`: workers of an elastic run are killed, one after another, and start again.

Four hosts of a testbed have one worker each, and a fifth has torchft's Lighthouse. First nobody is killed, which gives
the figure to compare with; then the kills begin. `elastic_results` says what is measured.
"""

from __future__ import annotations

import importlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import typer
from rich.console import Console

from thinwire.cli.chaos.elastic_results import ElasticResults, Life, OuterStep, Started
from thinwire.testbed import Testbed, TestbedUnavailable
from thinwire.testbed.supervisor import Child, Raised, Supervisor

_EVERY, _STEP_SECONDS = 20, 0.15
_QUIET_SHARE = 0.2
"""Of the time with kills, so long nobody is killed before."""
_SHORTEST_QUIET = 12.0
_MOST_HOSTS = 253
_SECONDS_TO_GATHER = 300.0
"""For all workers to be in one quorum, at first and after a kill."""


@dataclass(frozen=True)
class ElasticPlan:
    """What is done to whom."""

    hosts: int
    minutes: float
    seconds_between_kills: float
    seconds_to_restart: float
    rate: str
    timeout: float
    """Of exchanges."""
    kills: int | None
    """At most so many."""
    seed: int

    def kill_times(self) -> list[float]:
        """In seconds since the kills began. The first comes after half of the time between two."""
        between = self.seconds_between_kills
        count = int(60 * self.minutes / between)
        return [(number + 0.5) * between for number in range(count)][: self.kills]


class UnfinishedError(RuntimeError):
    """Workers did what nobody has told them: there is nothing more to measure."""


class ElasticRun:
    """Workers on a testbed, and what is done to them; the report tells what came of it.

    Args:
        plan: what is done.
        testbed: with a host for each worker, and one for the Lighthouse.
        children: starts the processes.
        report: filled in here.
        on_news: gets a line about everything that happens.
    """

    def __init__(
        self,
        plan: ElasticPlan,
        testbed: Testbed,
        children: Supervisor,
        report: ElasticResults,
        on_news: Callable[[str], None],
    ) -> None:
        self._plan, self._testbed, self._children, self._say = plan, testbed, children, on_news
        self._report = report
        self._random = random.Random(plan.seed)
        self._processes: dict[Child, Life] = {}
        self._of_host: list[Life] = []
        self._lighthouse_began: float | None = None

    def run(self) -> None:
        """All of it.

        Raises:
            UnfinishedError: if a worker ends that was not killed, or does not come back.
        """
        report = self._report
        self._start_lighthouse()
        self._of_host = [self._start(host, 0) for host in range(self._plan.hosts)]
        self._wait(self._all_in_one_quorum, "all workers to join")
        report.quiet_began = time.monotonic()
        quiet = max(_SHORTEST_QUIET, _QUIET_SHARE * 60 * self._plan.minutes)
        self._say(f"{self._plan.hosts} workers have joined; nobody is killed for {quiet:g} s")
        self._pass(report.quiet_began + quiet)
        report.began = time.monotonic()
        report.ended = report.began + 60 * self._plan.minutes
        for seconds in self._plan.kill_times():
            self._pass(report.began + seconds)
            # Not two at once: that is another experiment.
            self._wait(self._all_in_one_quorum, "all workers to rejoin")
            if time.monotonic() < report.ended:
                self._kill_and_restart()
        self._pass(report.ended)
        # The intervals that began in time are to be whole.
        self._wait(lambda: self._all_in_one_quorum() and self._last_intervals_are_over(), "the last intervals")

    def _kill_and_restart(self) -> None:
        victim = self._random.choice(self._of_host)
        process = next(child for child, life in self._processes.items() if life is victim)
        process.signal(signal.SIGKILL)
        victim.killed = time.monotonic()
        self._say(f"{victim.killed - self._report.began:.1f} s: {victim.name} is killed")
        self._pass(victim.killed + self._plan.seconds_to_restart)
        self._of_host[victim.host] = self._start(victim.host, victim.number + 1)

    # Processes -------------------------------------------------------------------------------------------------------

    def _start_lighthouse(self) -> None:
        from thinwire.cli.chaos.elastic_worker import serve_lighthouse

        namespace = self._testbed.hosts[-1].namespace
        log = self._children.folder / "lighthouse.log"
        self._children.start(serve_lighthouse, name="the Lighthouse", namespace=namespace, log=log)
        self._wait(lambda: self._lighthouse_began is not None, "the Lighthouse")

    def _start(self, index: int, number: int) -> Life:
        from thinwire.cli.chaos.elastic_worker import PORT, WorkerConfig, train

        host = self._testbed.hosts[index]
        life = Life(index, number, time.monotonic())
        config = WorkerConfig(
            host=index,
            life=number,
            address=host.address,
            interface=host.interface,
            lighthouse=f"http://{self._testbed.hosts[-1].address}:{PORT}",
            every=self._report.every,
            step_seconds=self._report.step_seconds,
            timeout=self._plan.timeout,
            seed=self._plan.seed,
        )
        log = self._children.folder / f"worker-{index}-{number}.log"
        child = self._children.start(train, config, name=life.name, namespace=host.namespace, log=log)
        self._processes[child] = life
        self._report.lives.append(life)
        return life

    # Time ------------------------------------------------------------------------------------------------------------

    def _pass(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._receive(left)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _SECONDS_TO_GATHER
        while not condition():
            if time.monotonic() > deadline:
                raise UnfinishedError(f"{_SECONDS_TO_GATHER:g} s were not enough for {what}")
            self._receive(deadline - time.monotonic())

    def _all_in_one_quorum(self) -> bool:
        last = [life.outer_steps[-1] if life.outer_steps else None for life in self._of_host]
        return all(step is not None and step.workers == self._plan.hosts for step in last)

    def _last_intervals_are_over(self) -> bool:
        return all(life.outer_steps[-1].at >= self._report.ended for life in self._of_host)

    def _receive(self, seconds: float) -> None:
        for child, message in self._children.receive(seconds):
            life = self._processes.get(child)
            if life is None:
                self._lighthouse_began = message.at
            elif isinstance(message, Started):
                life.imported, life.starved_in_imports = message.at, message.starved
            else:
                life.outer_steps.append(message)
                if life.number and len(life.outer_steps) == 1:
                    self._tell_of_rejoin(life, message)
        for child in self._children:
            life = self._processes.get(child)
            if life is not None and life.killed is not None:
                continue
            if isinstance(child.outcome, Raised):
                raise UnfinishedError(f"{child.name} has failed:\n{child.outcome.traceback}")
            if child.exit_code is not None:
                output = "\n".join(child.log_lines())
                raise UnfinishedError(f"{child.name} has ended with code {child.exit_code}\n{output}")

    def _tell_of_rejoin(self, life: Life, first: OuterStep) -> None:
        imports = 0.0 if life.imported is None else life.imported - life.started
        self._say(
            f"{first.at - self._report.began:.1f} s: {life.name}, has rejoined {first.at - life.started:.1f} s after "
            f"its start ({imports:.1f} s of which were imports), at outer step {first.number}"
        )


def run_elastic(plan: ElasticPlan, json: Path | None) -> None:
    """Do what `thinwire chaos --elastic` is to do.

    Raises:
        typer.Exit: 2 if this machine cannot; 1 if a bar is missed that must not be missed.
        typer.BadParameter: if nobody would be killed, or there are too many hosts.
    """
    if not plan.kill_times():
        raise typer.BadParameter(
            f"must be at least {plan.seconds_between_kills / 60:g} with one kill every "
            f"{plan.seconds_between_kills:g} s, got {plan.minutes:g}",
            param_hint="'--minutes'",
        )
    if plan.hosts > _MOST_HOSTS:
        raise typer.BadParameter(
            f"must be at most {_MOST_HOSTS}, because the Lighthouse has a host of its own, got {plan.hosts}",
            param_hint="'--hosts'",
        )
    try:
        importlib.import_module("thinwire.elastic")  # first, because it says what to install
        from thinwire.cli.chaos.elastic_worker import HEARTBEAT_TIMEOUT
    except ImportError as error:
        typer.echo(f"thinwire chaos: {error}", err=True)
        raise typer.Exit(2) from None
    testbed = Testbed(plan.hosts + 1, rate=plan.rate)
    console = Console()

    def say(news: str) -> None:
        console.print(news, markup=False, highlight=False, soft_wrap=True)

    report = ElasticResults(
        hosts=plan.hosts,
        rate=plan.rate,
        every=_EVERY,
        step_seconds=_STEP_SECONDS,
        seconds_between_kills=plan.seconds_between_kills,
        seconds_to_restart=plan.seconds_to_restart,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        seed=plan.seed,
        date=datetime.now(timezone.utc).date().isoformat(),
    )
    unfinished = ""
    try:
        with testbed, Supervisor(grace=0.0) as children:
            try:
                ElasticRun(plan, testbed, children, report, say).run()
            except UnfinishedError as error:
                unfinished = str(error)
    except TestbedUnavailable as error:
        typer.echo(f"thinwire chaos: {error}", err=True)
        raise typer.Exit(2) from None
    if unfinished:
        typer.echo(f"thinwire chaos: {unfinished}", err=True)
        raise typer.Exit(1)
    report.print(console)
    if json is not None:
        report.write(json)
        console.print(f"Wrote {json}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    if report.misses:
        raise typer.Exit(1)
