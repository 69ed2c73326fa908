"""The same budget for everybody: four learning rates, two other betas, another decay; then fresh seeds.

Only AdamW, with which all are compared, and the flagship may try more betas, and three more rates with the best of
them: no method wins against a badly tuned one. AdamW with compressed averages searches nothing: it has AdamW's best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from thinwire.cli.study.methods import Method, Setting
from thinwire.cli.study.runs import Result
from thinwire.cli.study.tasks import Task

SEARCH_SEED = 0
FRESH_SEEDS = (1, 2, 3, 4, 5)
RATES = 4
SEARCH_RUNS = RATES + 3


def takes_part(task: Task, method: Method) -> bool:
    """Whether a method is tried on a task."""
    return method.only in (None, task.name) and (task.methods is None or method.name in task.methods)


def search_runs(task: Task, method: Method) -> int:
    """How many settings a method may try."""
    if method.searches_rate:
        return RATES
    if method.settings_of is not None:
        return 0
    if task.betas is not None:
        return RATES
    return SEARCH_RUNS + (len(method.more_betas) + RATES - 1 if method.more_betas else 0)


Measure = Callable[[Setting, int], Result]


def study(task: Task, method: Method, measure: Measure) -> Setting:
    """Search, and run the best setting on fresh seeds.

    Args:
        task: what to train.
        method: by whom.
        measure: runs a setting with a seed, or knows the result already.

    Returns:
        The best setting.
    """

    def cost(setting: Setting) -> float:
        return task.value(measure(setting, SEARCH_SEED).final)

    best = Setting(rounded(method.lr * task.lr), task.betas or method.betas[0], method.decays[0])
    best = replace(best, lr=_best_rate(best.lr, lambda rate: cost(replace(best, lr=rate))))
    if task.betas is not None:
        repeat(best, measure)
        return best
    for name, others in (("betas", method.betas[1:]), ("weight_decay", method.decays[1:])):
        candidates = [best, *(replace(best, **{name: other}) for other in others)]
        best = min(candidates, key=cost)
    if method.more_betas:
        best = min((best, *(replace(best, betas=betas) for betas in method.more_betas)), key=cost)
        best = replace(best, lr=_best_rate(best.lr, lambda rate: cost(replace(best, lr=rate))))
    repeat(best, measure)
    return best


def search_rate(others: Setting, task: Task, measure: Measure) -> Setting:
    """Search the learning rate for settings that another method has found, from half of its rate on."""

    def cost(rate: float) -> float:
        return task.value(measure(replace(others, lr=rate), SEARCH_SEED).final)

    return replace(others, lr=_best_rate(rounded(others.lr / 2), cost))


def repeat(setting: Setting, measure: Measure) -> None:
    """Run a setting on fresh seeds."""
    for seed in FRESH_SEEDS:
        measure(setting, seed)


def best_setting(task: Task, results: Iterable[Result]) -> Setting | None:
    """The best setting that a study has run on all seeds; None if the study is not complete."""
    by_setting: dict[Setting, dict[int, Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, {})[result.seed] = result
    complete = {
        setting: task.value(of_seeds[SEARCH_SEED].final)
        for setting, of_seeds in by_setting.items()
        if {SEARCH_SEED, *FRESH_SEEDS} <= set(of_seeds)
    }
    return min(complete, key=complete.__getitem__, default=None)


def _best_rate(start: float, cost: Callable[[float], float]) -> float:
    """A factor of 2 apart as long as the best is at an end, then between the best and its better neighbour."""
    costs: dict[float, float] = {}
    octave = 0.0
    for _ in range(RATES):
        costs[octave] = cost(rounded(start * 2**octave))
        best = min(costs, key=costs.__getitem__)
        above = min((other for other in costs if other > best), default=None)
        below = max((other for other in costs if other < best), default=None)
        if above is None or below is None:
            octave = best + 1.0 if above is None else best - 1.0
        else:
            octave = (best + min(above, below, key=costs.__getitem__)) / 2
    return rounded(start * 2 ** min(costs, key=costs.__getitem__))


def rounded(rate: float) -> float:
    """To three digits, so that it looks the same in a file, in a table and in a command."""
    return float(f"{rate:.3g}")
