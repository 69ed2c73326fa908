"""The report as one HTML page: nothing is loaded, so it can be mailed, committed, and read without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from thinwire.cli.step import charts, words
from thinwire.cli.step.methods import is_method, method_named
from thinwire.cli.step.models import MODELS, parameter_count
from thinwire.cli.step.results import BASELINE, LIMIT, StepResult, StepResults
from thinwire.cli.step.tables import cells, headings_for
from thinwire.cli.step.worker import COMPUTE_PROBES, FEWEST_STEPS, WARM_UP_STEPS

_LIGHT = {**charts.COLOURS, "shade": "#f4f6f9"}
_DARK = {
    "paper": "#14181f",
    "shade": "#1d232c",
    "ink": "#e6eaf0",
    "muted": "#98a3b3",
    "grid": "#323b48",
    "ours": "#ef7182",
    "theirs": "#7d8a9e",
    "limit": "#53c39f",
    "compute": "#6f9fd4",
    "optimizer": "#e9b95c",
    "wait": "#f0795c",
    "rest": "#b9a5d6",
}
_CSS = """
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .4rem; padding-top: .8rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .2rem; }
p, ul { max-width: 48rem; margin: .4rem 0; }
.quiet, caption, dt { color: var(--muted); }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--shade); border-radius: .6rem; padding: .8rem 1.1rem; flex: 1 1 12rem; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; color: var(--ours); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: .5rem 1.5rem; }
.charts svg { width: 100%; max-width: 34rem; height: auto; display: block; }
.charts text { font-family: inherit !important; } /* matplotlib names its own, at every single text */
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .8rem 0; }
caption { text-align: left; padding: .2rem 0; }
th, td { padding: .28rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--muted); white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
.figures td:first-child { white-space: nowrap; }
th.text, td.text { white-space: normal; text-align: left; min-width: 12rem; }
.ours td:first-child { color: var(--ours); font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(0, max-content) minmax(0, 1fr); gap: .15rem 1rem; } dd { margin: 0; }
code, pre { font: .86em/1.45 ui-monospace, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--shade); padding: .7rem .9rem; border-radius: .5rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
"""


class _Html(str):
    """Text that is HTML already; all other text is escaped where it enters the page."""

    __slots__ = ()


def _text(value: object) -> str:
    return escape(words.visible(str(value)))


def _cell(value: str) -> str:
    return value if isinstance(value, _Html) else _text(value)


def render(results: StepResults) -> str:
    """The whole page."""
    plan = results.plan
    rows = results.rows()
    ranks = "rank" if plan.ranks == 1 else "ranks"
    parts = [
        "<h1>Training steps over thin wires</h1>",
        f'<p class="quiet">{plan.hosts} hosts × {plan.ranks} {ranks} on one machine, links shaped to '
        f"{_text(', '.join(words.rate(rate) for rate in plan.rates))} · {_text(results.machine['date'])}</p>",
        _cards(rows),
        *(_model(results, rows, model) for model in plan.models),
        _how(results),
    ]
    return document("thinwire bench step", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A page with these elements in its body, in the colours of the charts."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Without an icon of its own a page makes browsers ask for one.
        f'<link rel="icon" href="data:,">\n<title>{_text(title)}</title>\n'
        f"<style>\n:root {{ color-scheme: light dark; {_variables(_LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}{_CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{role}: {colour};" for role, colour in colours.items())


def _cards(rows: Sequence[StepResult]) -> str:
    """The answer in a few numbers: Birder at each rate, of the first model."""
    cards = [
        f'<div class="card">{_text(row.model)}, {_text(words.rate(row.rate))}<b>{words.ratio(row.speed_up)}</b>'
        f"as many steps as {BASELINE}"
        f"{f'; {words.ratio(row.to_limit)} the time of {LIMIT}' if row.to_limit else ''}</div>"
        for row in rows
        if (row.model, row.method) == (rows[0].model, "birder") and row.speed_up
    ]
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _model(results: StepResults, rows: Sequence[StepResult], model: str) -> str:
    workload = MODELS[model]
    size = parameter_count(model)
    parts = [f"<h2>{_text(model)}</h2>", f"<p>{_text(workload.description)} a rank; {size:,} parameters.</p>"]
    for section in charts.sections(results, model):
        drawn = "\n".join(charts.svg(model, section, panel) for panel in section.panels)
        parts += [
            f"<h3>{_text(section.title)}</h3>",
            f"<p>{_text(section.explanation)}</p>",
            f'<div class="charts">{drawn}</div>',
        ]
    parts.append("<h3>Figures</h3>")
    headings = headings_for(rows)
    for rate, own in groupby((row for row in rows if row.model == model), key=lambda row: row.rate):
        own = list(own)
        caption = f"{words.rate(rate)}; forward and backward alone take {words.seconds(own[0].compute)}"
        ours = [method_named(row.method).ours for row in own]
        parts.append(table(headings, [cells(row, headings) for row in own], caption=caption, ours=ours))
    gone = [
        (f"{one.method} ({one.outcome})", _Html(f"<code>{_text(one.reason)}</code>"))
        for one in results.unmeasured
        if one.model == model
    ]
    if gone:
        parts += ["<h3>Without figures</h3>", table(("method", "why"), gone, prose=True)]
    return "\n".join(parts)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    ours: Sequence[bool] = (),
    prose: bool = False,
) -> str:
    """Cells are text, but for those that are `_Html`."""
    align = ' class="text"' if prose else ""
    head = "".join(f"<th{align}>{_text(heading)}</th>" for heading in headings)
    body = ""
    for number, row in enumerate(rows):
        mark = ' class="ours"' if number < len(ours) and ours[number] else ""
        first, *others = map(_cell, row)
        body += f"<tr{mark}><td>{first}</td>" + "".join(f"<td{align}>{cell}</td>" for cell in others) + "</tr>\n"
    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    kind = ' class="figures"' if ours else ""
    return f'<div class="wide"><table{kind}>{title}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _how(results: StepResults) -> str:
    plan = results.plan
    methods = table(
        ("method", "what it is"),
        ((name, method_named(name).description) for name in plan.methods if is_method(name)),
        prose=True,
    )
    facts = "".join(
        f"<dt>{_text(name.replace('_', ' '))}</dt><dd>{_text(value)}</dd>" for name, value in results.machine.items()
    )
    return f"""<h2>How it was measured</h2>
<ul>
<li>Hosts are network namespaces on one switch. A token bucket holds what each of them sends to the rate; what it
receives is what others may send. All ranks share the cores of one machine, so forward and backward take longer than on
machines of their own, and an exchange that needs the processor takes it from them.</li>
<li>Every method takes {plan.rounds} {"turn" if plan.rounds == 1 else "turns"} at a rate, in rounds, and each round
begins with another method: a noisy neighbour hits all alike. A turn has a fresh model, optimizer and process group,
{WARM_UP_STEPS} steps of warm-up without a limit, one at the rate, and then as many as fit into {plan.seconds:g} s, at
least {FEWEST_STEPS}.</li>
<li>Measured steps follow each other without barriers. A step's time is that from the end of the one before to its own
end, as the mean over ranks; the median and the quartiles are over all steps of all turns. Where steps of several kinds
take turns, whole cycles of them are measured, and the mean over a cycle counts as a step.</li>
<li>Compute is forward and backward under no_sync(), {COMPUTE_PROBES} times a turn, on all ranks together. It is the
same work for all methods, so one median over all of them counts.</li>
<li>Exposed wait is what thinwire's optimizers report of standing still in step(); for other methods that
send it is the step without compute and optimizer.</li>
<li>Sent is what left a host's link in the measured steps, with the headers of every frame, acknowledgements included.
Theory is what a method has to send: 2(n-1)/n times the gradients for an all-reduce in a ring of n ranks, 2(n-1)/n·d/8
bytes for d parameters at a bit up and a bit down.</li>
<li>1-bit Adam, 0/1 Adam and 1-bit LAMB are measured in the stage that their row names. They get there in two steps, and
at a learning rate at which nothing moves: a variance that is frozen so early would let some parameters fly off.</li>
<li>Memory, where it was measured, is the most that a turn adds to what the process held before: the model, gradients,
activations, DDP's buckets, state and packets. Of the ranks the one with the most counts, of the turns at all rates the
one with the least, because a process also loads modules in its first turns.</li>
<li>The bound is max(compute, theory at the rate): a perfect overlap.</li>
<li>DDP runs with its defaults, but for broadcast_buffers=False: statistics of BatchNorm are nobody's gradients, and the
same for all.</li>
</ul>
{methods}
<dl>{facts}</dl>
<pre>{_text(results.command)}</pre>"""
