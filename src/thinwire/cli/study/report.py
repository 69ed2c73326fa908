"""What the study says: tables in Markdown, and a picture a task; and one of both for all tasks, of thin wires."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from thinwire.cli import markdown as md
from thinwire.cli.study.methods import METHODS, Setting
from thinwire.cli.study.summary import LINKS, REFERENCE, Summary, compute_seconds, reference, summaries
from thinwire.cli.study.tasks import PictureTask, Task
from thinwire.cli.units import byte_count

HEAD = ("optimizer", "lr, β, decay", "end, mean ± std", "against AdamW")


def write(console: Console, directory: Path, tasks: Sequence[Task], methods: Sequence[str]) -> None:
    """Print the tables, and leave them and the pictures beside the results."""
    from thinwire.cli.study.plots import plot_task, plot_thin_wires

    sections, by_task, thin = [], [], []
    for task in tasks:
        found = summaries(directory, task, methods)
        if any(summary.method.thin for summary in found):
            thin.append(found)
        compared = [summary for summary in found if not summary.method.thin]
        if compared:
            by_task.append(compared)
            sections.append(section(task, compared))
            plot_task(directory / f"{task.name}.png", task, compared)
    if not by_task and not thin:
        console.print(f"No study of a task is complete in {directory} yet.", markup=False, emoji=False, soft_wrap=True)
        return
    if by_task:
        sections.append(rates(by_task))
    if thin:
        sections.append(thin_wires(thin))
        plot_thin_wires(directory / "thin-wires.png", thin)
    text = "\n".join(sections)
    (directory / "tables.md").write_text(text, encoding="utf-8")
    console.print(Markdown(text))


def thin_wires(by_task: Sequence[Sequence[Summary]]) -> str:
    """How thin can my wire be? All methods by the bits that they send of a parameter in a step, most first."""
    of_method = {
        summary.method.name: {
            other[0].task.name: found for other in by_task for found in other if found.method == summary.method
        }
        for summaries_of_task in by_task
        for summary in summaries_of_task
    }
    order = sorted(of_method.values(), key=lambda found: -max(summary.bits for summary in found.values()))
    rows = []
    for found in order:
        some = next(iter(found.values()))
        row = [some.method.title, f"{max(summary.bits for summary in found.values()):.3g}"]
        for compared in by_task:
            summary = found.get(compared[0].task.name)
            adamw = reference(compared)
            if summary is None:
                row += ["", "", ""]
                continue
            against = "" if adamw is None else _against(summary, adamw)[0]
            row += [f"{summary.setting.lr:g}", shown(summary.task, summary.mean, summary.std), against]
        rows.append(row)
    head = ["optimizer", "bits per parameter and step, each way"]
    for compared in by_task:
        head += [f"lr, {compared[0].task.title}", "end, mean ± std", "against AdamW"]
    return "### How thin can my wire be?\n\n" + _table(head, rows)


def rates(by_task: Sequence[Sequence[Summary]]) -> str:
    """The learning rates of all methods relative to AdamW's, task by task: where to start when migrating from AdamW."""
    compared = [
        (found[0].task, adamw, found)
        for found in by_task
        if (adamw := reference(found)) is not None and any(map(_searches, found))
    ]
    rows = []
    for method in METHODS.values():
        if method.only is None and method.settings_of is None and not method.thin and method.name != REFERENCE:
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
    return "".join(f"{md.row(line)}\n" for line in lines)
