"""The command ``thinwire study``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from thinwire.cli.options import MOST_RANKS, check_folder, integer
from thinwire.cli.study import report
from thinwire.cli.study.images import FASHION_MNIST
from thinwire.cli.study.methods import METHODS, Setting
from thinwire.cli.study.runs import Result, Run, run_really, run_virtually
from thinwire.cli.study.search import FRESH_SEEDS, best_setting, repeat, search_rate, search_runs, study, takes_part
from thinwire.cli.study.store import Store
from thinwire.cli.study.tasks import Sources, Task, tasks
from thinwire.testbed.supervisor import Child, ChildError, Returned, Supervisor

STEPS_BETWEEN_REPORTS = 20


@dataclass(frozen=True)
class _Progress:
    """How far a search is."""

    task: str
    method: str
    steps: int
    """Of the current run."""
    runs: int
    """Runs that are complete."""


def study_command(
    output: Annotated[Path, typer.Option(help="Folder of the results, to continue from.")] = Path("thinwire-study"),
    task: Annotated[list[str] | None, typer.Option(help="Only this task (again for another).")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this optimizer (again for another).")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file; by default the help texts of Python.")] = None,
    pictures: Annotated[Path, typer.Option(help="Directory of the four IDX files.")] = FASHION_MNIST,
    steps: Annotated[int | None, integer(1, "Of every run; by default what a task needs.")] = None,
    jobs: Annotated[int, integer(1, "Searches at a time, one core each.", maximum=MOST_RANKS)] = os.cpu_count() or 1,
    processes: Annotated[
        bool, typer.Option(help="One process per worker and DDP instead of virtual workers: the same bits.")
    ] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Run nothing; report the stored results.")] = False,
) -> None:
    """Compare convergence: search the settings of every optimizer on several tasks, and run the best on five seeds.

    AdamW with compressed averages (compress-…) runs with the best settings of AdamW, which must be there or be chosen.
    Local steps (…-h30) do too, and search a learning rate. They run only if they are chosen.
    You can stop it at any time: the next call continues.
    """
    sources = Sources(text, pictures)
    known = {name: each if steps is None else replace(each, steps=steps) for name, each in tasks(sources).items()}
    chosen = _chosen("--task", task, list(known))
    methods = _chosen("--method", method, list(METHODS))
    if not method and not only_report:
        methods = [name for name in methods if METHODS[name].by_default]
    pairs = [(t, m) for t in chosen for m in methods if takes_part(known[t], METHODS[m])]
    console = Console()
    check_folder(output, "--output", create=False)
    if not only_report:
        try:
            for name in chosen:
                known[name].data()
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
        _check_sources(output, known, pairs)
        for name in chosen:
            check_folder(output / name, "--output", create=True)
        try:
            _run_all(console, output, known, pairs, jobs, processes=processes)
        except ChildError as error:
            typer.echo(f"thinwire study: {error}", err=True)
            raise typer.Exit(1) from None
    report.write(console, output, [known[name] for name in chosen], methods)


def _chosen(option: str, names: list[str] | None, known: list[str]) -> list[str]:
    for name in names or []:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=f"'{option}'")
    return names or known


def _check_sources(output: Path, known: dict[str, Task], pairs: list[tuple[str, str]]) -> None:
    """Refuse a method whose settings come from another one, if that one has no results and is not chosen either.

    Raises:
        typer.BadParameter: naming both.
    """
    for t, m in pairs:
        source = METHODS[m].settings_of
        if source is not None and (t, source) not in pairs and _setting_of(output, known[t], source) is None:
            raise typer.BadParameter(
                f"{m!r} runs with the settings of {source!r}, whose study of the task {t!r} is not complete in "
                f"{str(output)!r}: add --method {source}",
                param_hint="'--method'",
            )


def _setting_of(output: Path, task: Task, method: str) -> Setting | None:
    return best_setting(task, Store(output, task, method, task.data()).results)


def _run_all(
    console: Console,
    output: Path,
    known: dict[str, Task],
    pairs: list[tuple[str, str]],
    jobs: int,
    *,
    processes: bool,
) -> None:
    """One process per search, at most ``jobs`` at a time. If one fails, or Ctrl-C arrives, all of them end at once.

    Raises:
        ChildError: when a search fails; the message has its traceback.
    """
    totals = {(t, m): search_runs(known[t], METHODS[m]) + len(FRESH_SEEDS) for t, m in pairs}
    bars: dict[tuple[str, str], TaskID] = {}
    done: dict[tuple[str, str], int] = {}
    waiting = list(pairs)
    started: list[tuple[Child, tuple[str, str]]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, Supervisor() as searches:
        whole = progress.add_task("runs", total=sum(totals.values()))
        while waiting or not searches.finished:
            running = [pair for search, pair in started if not isinstance(search.outcome, Returned)]
            for t, m in _ready(waiting, running)[: jobs - len(searches.alive)]:
                waiting.remove((t, m))
                search = searches.start(_search, output, known[t], m, processes, name=f"the search {t}: {m}")
                started.append((search, (t, m)))
            for _, news in searches.messages():
                pair = (news.task, news.method)
                if pair not in bars:
                    bars[pair] = progress.add_task(f"{news.task}: {news.method}", total=known[news.task].steps)
                done[pair] = news.runs
                progress.update(bars[pair], completed=news.steps, visible=news.runs < totals[pair])
                progress.update(whole, completed=sum(done.values()))
            for search in searches.alive:
                if isinstance(search.outcome, Returned):
                    search.release()


def _ready(waiting: Sequence[tuple[str, str]], running: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The searches that need no settings of another one that is still to come."""
    unfinished = (*waiting, *running)
    return [(t, m) for t, m in waiting if (t, METHODS[m].settings_of) not in unfinished]


def _search(channel: Connection, output: Path, task: Task, method: str, processes: bool) -> None:
    """Run in a process of its own, which reports its progress."""
    if processes:
        # The default ends Python at once, and would leave behind the ranks that run_really has started.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Searches share the cores; one that spread over all of them would only slow down the others.
    torch.set_num_threads(1)
    store = Store(output, task, method, task.data())
    run = run_really if processes else run_virtually

    def measure(setting: Setting, seed: int) -> Result:
        result = store.find(setting, seed)
        if result is None:
            result = run(Run(task, method, setting, seed), report)
            store.add(result)
        return result

    def report(steps: int) -> None:
        if steps % STEPS_BETWEEN_REPORTS == 0:
            channel.send(_Progress(task.name, method, steps, len(store.results)))

    source = METHODS[method].settings_of
    if source is None:
        study(task, METHODS[method], measure)
    else:
        setting = _setting_of(output, task, source)
        assert setting is not None, "the study of the source is complete"
        if METHODS[method].searches_rate:
            setting = search_rate(setting, task, measure)
        repeat(setting, measure)
    # There may be fewer: some of the settings that were to be tried again were known.
    channel.send(_Progress(task.name, method, task.steps, search_runs(task, METHODS[method]) + len(FRESH_SEEDS)))
