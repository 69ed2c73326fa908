"""`thinwire chaos`: faults on a testbed for as long as you say, and whether anything was lost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire._torch_compat import IMPORTED_BY_OPTIMIZERS
from thinwire.cli.chaos.elastic import ElasticPlan, run_elastic
from thinwire.cli.chaos.results import ChaosResults
from thinwire.cli.chaos.run import ChaosRun, Limits, UnfinishedError
from thinwire.cli.options import LARGEST_SEED, checked_by, integer, number, output_file
from thinwire.testbed import Testbed, TestbedUnavailable, parse_rate
from thinwire.testbed.forkserver import ForkServer
from thinwire.testbed.signals import signals_deferred

PRELOAD = ("thinwire.cli.chaos.worker", IMPORTED_BY_OPTIMIZERS)


def chaos(
    minutes: Annotated[float, number(0, 1e5, "Inject no more faults after this time.")] = 5.0,
    seed: Annotated[
        int, integer(0, "Decides the models, the data and the faults, but for their timing.", maximum=LARGEST_SEED)
    ] = 0,
    hosts: Annotated[int, integer(2, "Hosts, with one rank each.")] = 4,
    faults: Annotated[int | None, integer(1, "Inject at most this many faults.")] = None,
    timeout: Annotated[
        float | None,
        number(1, 3600, "Of the process groups, in seconds.", show_default="5; with --elastic 60"),
    ] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Kill workers of an elastic run instead, while the others go on.")
    ] = False,
    every: Annotated[
        float | None, number(1, 3600, "With --elastic: seconds between two kills.", show_default="30")
    ] = None,
    rejoin: Annotated[
        float | None,
        number(0, 3600, "With --elastic: seconds until a killed worker starts again.", show_default="10"),
    ] = None,
    rate: Annotated[
        str | None, checked_by(parse_rate, "With --elastic: what a link carries.", show_default="100mbit")
    ] = None,
    json: Annotated[
        Path | None,
        output_file("Write all faults and results to this file, after every episode; continue what it has."),
    ] = None,
) -> None:
    """Kill, freeze, cut off, slow down and corrupt ranks that train, and compare with a run without faults, to the bit.

    All optimizers, compressors of thinwire.compress and local steps take turns, each on a testbed of network namespaces
    (Linux, root, ip and tc), restarted from its last checkpoint after every fault that must end it. Ends with exit code
    1 if any rank hung, failed without need or by the wrong error, or has other bits than without faults.

    With --json a run can be interrupted: the same command continues after the last episode in the file, until --faults
    are done. --minutes is for each call.

    With --elastic the workers are those of `thinwire.elastic`. One after another is killed and starts again. Ends with
    exit code 1 if workers that live ever differ in a bit, or one rejoins too late.
    """
    if elastic:
        between, restart = 30.0 if every is None else every, 10.0 if rejoin is None else rejoin
        plan = ElasticPlan(hosts, minutes, between, restart, rate or "100mbit", timeout or 60.0, faults, seed)
        run_elastic(plan, json)
        return
    for option, given in (("--every", every), ("--rejoin", rejoin), ("--rate", rate)):
        if given is not None:
            raise typer.BadParameter(f"{given} is of use with --elastic only", param_hint=f"'{option}'")
    console = Console()
    try:
        testbed = Testbed(hosts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--hosts'") from None
    report = _results(json, seed, hosts, timeout or 5.0)
    unfinished = ""
    try:
        with testbed, _folder() as folder, ForkServer(PRELOAD) as server:
            server.wait()
            began, before = time.monotonic(), report.seconds
            limits = Limits(began + 60 * minutes, faults)

            def say(news: str) -> None:
                console.print(news, markup=False, highlight=False, soft_wrap=True)

            def store() -> None:
                report.seconds = before + time.monotonic() - began
                if json is not None:
                    report.write(json)

            def store_episode() -> None:
                # A pipe takes the results once, in the end.
                if json is not None and (json.is_file() or not json.exists()):
                    store()

            try:
                ChaosRun(testbed, server, folder, report, limits, say, on_episode=store_episode).run()
            except UnfinishedError as error:
                unfinished = str(error)
            store()
    except TestbedUnavailable as error:
        typer.echo(f"thinwire chaos: {error}", err=True)
        raise typer.Exit(2) from None
    report.print(console)
    if json is not None:
        console.print(f"Wrote {json}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    if unfinished:
        typer.echo(f"thinwire chaos: {unfinished}", err=True)
    if unfinished or report.wrongs:
        raise typer.Exit(1)


def _results(path: Path | None, seed: int, hosts: int, timeout: float) -> ChaosResults:
    """Those in the file, to go on with; new ones if there are none."""
    new = ChaosResults(seed, hosts, timeout)
    if path is None or not path.is_file() or not path.stat().st_size:
        return new
    try:
        found = ChaosResults.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(f"cannot go on with {str(path)!r}: {error}", param_hint="'--json'") from None
    for name in ("seed", "hosts", "timeout"):
        if getattr(found, name) != getattr(new, name):
            raise typer.BadParameter(
                f"{str(path)!r} has results with --{name} {getattr(found, name)}, not {getattr(new, name)}: "
                "give the same, or another file",
                param_hint="'--json'",
            )
    return found


@contextmanager
def _folder() -> Iterator[Path]:
    with signals_deferred():
        folder = tempfile.TemporaryDirectory(prefix="thinwire-chaos-")
    try:
        yield Path(folder.name)
    finally:
        with signals_deferred():
            folder.cleanup()
