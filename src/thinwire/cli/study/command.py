"""The command ``thinwire study``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import Empty
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from thinwire.cli.launch import WorkerError, children_ignore_interrupts, end_processes
from thinwire.cli.options import MOST_RANKS, check_folder, integer
from thinwire.cli.study import report
from thinwire.cli.study.images import FASHION_MNIST
from thinwire.cli.study.methods import METHODS, Setting
from thinwire.cli.study.runs import Result, Run, run_really, run_virtually
from thinwire.cli.study.search import FRESH_SEEDS, search_runs, study
from thinwire.cli.study.store import Store
from thinwire.cli.study.tasks import Sources, Task, tasks
from thinwire.testbed.launcher import die_with
from thinwire.testbed.signals import signals_deferred

SECONDS_BETWEEN_LOOKS = 0.2
STEPS_BETWEEN_NEWS = 20


@dataclass(frozen=True)
class _News:
    """What a study in another process has to tell: how far a run is, or that one is over."""

    task: str
    method: str
    steps: int
    """Of the run under way."""
    runs: int
    """That are over."""


def study_command(
    output: Annotated[Path, typer.Option(help="Where results are kept, and looked for.")] = Path("thinwire-study"),
    task: Annotated[list[str] | None, typer.Option(help="Only this task (again for another).")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this optimizer (again for another).")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file; by default the help texts of Python.")] = None,
    pictures: Annotated[Path, typer.Option(help="Directory of the four IDX files.")] = FASHION_MNIST,
    steps: Annotated[int | None, integer(1, "Of every run; by default what a task needs.")] = None,
    jobs: Annotated[int, integer(1, "Runs at a time, a core each.", maximum=MOST_RANKS)] = os.cpu_count() or 1,
    processes: Annotated[
        bool, typer.Option(help="A process a worker, DDP and attach instead of virtual workers: the same bits.")
    ] = False,
    only_report: Annotated[bool, typer.Option("--report", help="Run nothing; report what there is.")] = False,
) -> None:
    """Does it train as well? Every optimizer on three tasks, its settings searched, the best of them on five seeds.

    Stop it whenever you like: it goes on where it was.
    """
    sources = Sources(text, pictures)
    known = {name: each if steps is None else replace(each, steps=steps) for name, each in tasks(sources).items()}
    chosen = _chosen("--task", task, list(known))
    methods = _chosen("--method", method, list(METHODS))
    pairs = [(t, m) for t in chosen for m in methods if METHODS[m].only in (None, t)]
    console = Console()
    check_folder(output, "--output", create=False)
    if not only_report:
        try:
            for name in chosen:
                known[name].data()
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
        for name in chosen:
            check_folder(output / name, "--output", create=True)
        _run_all(console, output, known, pairs, jobs, processes=processes)
    report.write(console, output, [known[name] for name in chosen], methods)


def _chosen(option: str, names: list[str] | None, known: list[str]) -> list[str]:
    for name in names or []:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=f"'{option}'")
    return names or known


def _run_all(
    console: Console,
    output: Path,
    known: dict[str, Task],
    pairs: list[tuple[str, str]],
    jobs: int,
    *,
    processes: bool,
) -> None:
    """One process per study, at most ``jobs`` at a time. If one fails, or Ctrl-C arrives, all of them end at once.

    Not a ProcessPoolExecutor: an interrupt while its processes start leaves it half built, and it raises at exit.
    """
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    totals = {(t, m): search_runs(METHODS[m]) + len(FRESH_SEEDS) for t, m in pairs}
    bars: dict[tuple[str, str], TaskID] = {}
    done: dict[tuple[str, str], int] = {}
    waiting = deque(pairs)
    running: list[SpawnProcess] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        whole = progress.add_task("runs", total=sum(totals.values()))
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    t, m = waiting.popleft()
                    arguments = (output, known[t], m, news, os.getpid())
                    process = context.Process(
                        target=_study, args=arguments, kwargs={"processes": processes}, name=f"{t}: {m}"
                    )
                    with children_ignore_interrupts():
                        process.start()
                        running.append(process)
                connection.wait([process.sentinel for process in running], SECONDS_BETWEEN_LOOKS)
                for process in [each for each in running if each.exitcode is not None]:
                    running.remove(process)
                    if process.exitcode != 0:
                        raise WorkerError(f"the study {process.name} ended with exit code {process.exitcode}")
                for told in _all_of(news):
                    pair = (told.task, told.method)
                    if pair not in bars:
                        bars[pair] = progress.add_task(f"{told.task}: {told.method}", total=known[told.task].steps)
                    done[pair] = told.runs
                    progress.update(bars[pair], completed=told.steps, visible=told.runs < totals[pair])
                    progress.update(whole, completed=sum(done.values()))
        finally:
            with signals_deferred():
                end_processes(running)


def _all_of(news: Any) -> list[_News]:
    told = []
    while True:
        try:
            told.append(news.get_nowait())
        except Empty:
            return told


def _study(output: Path, task: Task, method: str, news: Any, parent: int, *, processes: bool) -> None:
    if sys.platform == "linux":
        die_with(parent)
    if processes:
        # The default ends Python on the spot, and would leave behind what run_really has started.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Runs share the cores; one that spread over all of them would only disturb the others.
    torch.set_num_threads(1)
    _search(output, task, method, news, processes=processes)


def _search(output: Path, task: Task, method: str, news: Any, *, processes: bool) -> None:
    store = Store(output, task, method, task.data())
    run = run_really if processes else run_virtually

    def measure(setting: Setting, seed: int) -> Result:
        result = store.find(setting, seed)
        if result is None:
            result = run(Run(task, method, setting, seed), tell)
            store.add(result)
        return result

    def tell(steps: int) -> None:
        if steps % STEPS_BETWEEN_NEWS == 0:
            news.put(_News(task.name, method, steps, len(store.results)))

    study(task, METHODS[method], measure)
    # There may be fewer: some of the settings that were to be tried again were known.
    news.put(_News(task.name, method, task.steps, search_runs(METHODS[method]) + len(FRESH_SEEDS)))
