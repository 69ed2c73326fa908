"""What the study says: tables in Markdown, and a picture a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from thinwire.cli.study.methods import METHODS, Setting
from thinwire.cli.study.summary import LINKS, REFERENCE, Summary, compute_seconds, reference, summaries
from thinwire.cli.study.tasks import PictureTask, Task
from thinwire.cli.units import byte_count

HEAD = ("optimizer", "lr, β, decay", "end, mean ± std", "against AdamW")


def write(console: Console, directory: Path, tasks: Sequence[Task], methods: Sequence[str]) -> None:
    """Print the tables, and leave them and the pictures beside the results."""
    from thinwire.cli.study.plots import plot_task

    sections, by_task = [], []
    for task in tasks:
        found = summaries(directory, task, methods)
        if found:
            by_task.append(found)
            sections.append(section(task, found))
            plot_task(directory / f"{task.name}.png", task, found)
    if not by_task:
        console.print(f"No study of a task is complete in {directory} yet.", markup=False, emoji=False, soft_wrap=True)
        return
    text = "\n".join((*sections, rates(by_task)))
    (directory / "tables.md").write_text(text, encoding="utf-8")
    console.print(Markdown(text))


def rates(by_task: Sequence[Sequence[Summary]]) -> str:
    """The learning rates of all methods relative to AdamW's, task by task: where to start when migrating from AdamW."""
    compared = [
        (found[0].task, adamw, found)
        for found in by_task
        if (adamw := reference(found)) is not None and any(map(_searches, found))
    ]
    rows = []
    for method in METHODS.values():
        if method.only is None and method.settings_of is None and method.name != REFERENCE:
            best = [
                [f.setting.lr / adamw.setting.lr for f in found if f.method is method] for _, adamw, found in compared
            ]
            rows.append([method.title, *(f"{ratio[0]:.2g}" if ratio else "" for ratio in best)])
    return _table(("learning rate, AdamW's = 1", *(task.title for task, _, _ in compared)), rows)


def _searches(summary: Summary) -> bool:
    """Whether a method has a learning rate of its own, to compare with AdamW's."""
    return summary.method.settings_of is None and summary.method.name != REFERENCE


def section(task: Task, found: Sequence[Summary]) -> str:
    """All tables of a task."""
    first = found[0].results[0]
    title = (
        f"### {task.title[0].upper()}{task.title[1:]}\n\n"
        f"{first.parameters:,} parameters, {task.workers} workers × {task.batch} examples, {task.steps} steps; "
        f"{'pictures taken for what they are' if isinstance(task, PictureTask) else 'loss'}, on data not trained on. "
        f"Forward and backward take a worker {1e3 * compute_seconds(found):.1f} ms on a core of its own.\n"
    )
    return "\n".join((title, _quality(task, found), _speed(found)))


def _quality(task: Task, found: Sequence[Summary]) -> str:
    adamw = reference(found)
    rows = []
    for summary in found:
        setting = summary.setting
        row = [summary.method.title, f"{setting.lr:g}, {_betas(setting)}, {setting.weight_decay:g}"]
        row.append(shown(task, summary.mean, summary.std))
        row += ["", "", ""] if adamw is None else _against(summary, adamw)
        rows.append(row)
    looked_at = "AdamW" if adamw is None else f"AdamW's at {adamw.curve()[-1][0]}"
    return _table((*HEAD, f"steps to {looked_at}", "sent until then"), rows)


def _against(summary: Summary, adamw: Summary) -> list[str]:
    difference = summary.mean - adamw.mean
    pictures = isinstance(summary.task, PictureTask)
    percent = f"{-100 * difference:+.2f} points" if pictures else f"{100 * difference / adamw.mean:+.1f} %"
    against = "" if summary is adamw else f"{percent}, {difference / adamw.std:+.1f} std"
    steps = summary.steps_to(adamw.curve()[-1][1])
    if steps is None:
        return [against, "not reached", ""]
    return [against, str(steps), byte_count(sum(summary.bytes_by_step()[:steps]))]


def shown(task: Task, mean: float, std: float) -> str:
    """A mean and its spread: a loss, or how many per cent are right."""
    if not math.isfinite(mean):
        return "diverged"
    return f"{100 * (1 - mean):.2f} ± {100 * std:.2f} %" if isinstance(task, PictureTask) else f"{mean:.4f} ± {std:.4f}"


def _betas(setting: Setting) -> str:
    listed = ", ".join(f"{beta:g}" for beta in setting.betas)
    return listed if len(setting.betas) == 1 else f"({listed})"


def _speed(found: Sequence[Summary]) -> str:
    compute = compute_seconds(found)
    rows = []
    for summary in found:
        sent = sum(summary.bytes_by_step())
        times = [f"{summary.seconds(rate, compute):.1f} s" for rate in LINKS.values()]
        rows.append([summary.method.title, byte_count(sent), *times])
    head = ("optimizer", "sent by a worker in all", *(f"predicted, {link}" for link in LINKS))
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
