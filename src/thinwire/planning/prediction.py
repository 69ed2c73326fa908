"""What each method would take on a cluster, which one to use, and how that changes with the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from thinwire.planning.cluster import Cluster
from thinwire.planning.costs import Costs
from thinwire.planning.methods import BASELINE, METHODS, RECOMMENDED_INTERVAL, LossCost, Method, local_steps
from thinwire.planning.step import StepTime, simulate_step
from thinwire.planning.workload import Workload

LEAST_GAIN = 1.1
"""A method that is not faster than this is not worth a change. Neither is one that is slower than another by less."""
NOTHING_HELPS = "Nothing here helps you: your network is not what you wait for."
_IN_ORDER = ("int8", "int4", "onebit-adam", "birder", "zero-one-adam")
"""The methods that the convergence study covers. Of two that are about as fast, the first one is better."""


@dataclass(frozen=True)
class Prediction:
    """A method on a cluster. Times in seconds per step, bytes per step and host, memory per rank."""

    method: str
    title: str
    lines: str
    """What to change in a script."""
    bytes_per_step: float
    step: float
    compute: float
    exposed_wait: float
    rest: float
    """Encoding and applying, and what the exchange takes from the cores of the computation."""
    speed_up: float
    """Steps per second, those of DDP in fp32 = 1."""
    state_bytes: float
    """Beyond parameters and gradients."""
    loss: LossCost | None
    note: str


@dataclass(frozen=True)
class Plan:
    """The answer: what each method would take, and which one to use."""

    workload: Workload
    cluster: Cluster
    flat: bool
    costs_from: str
    predictions: tuple[Prediction, ...]
    recommended: Prediction | None
    """None if nothing helps."""
    answer: str
    """In a sentence."""

    def of(self, method: str) -> Prediction:
        """The prediction for a method.

        Raises:
            KeyError: for a method that the plan does not have.
        """
        for prediction in self.predictions:
            if prediction.method == method:
                return prediction
        raise KeyError(f"method={method!r}: expected one of {', '.join(p.method for p in self.predictions)}")


def make_plan(
    workload: Workload,
    cluster: Cluster,
    costs: Costs,
    *,
    every: Sequence[int] = (RECOMMENDED_INTERVAL,),
    flat: bool = False,
) -> Plan:
    """Predict all methods on a cluster, and choose one.

    Args:
        workload: the computation of a rank.
        cluster: the hosts.
        costs: what the work around the exchange costs.
        every: numbers of local steps to include.
        flat: whether every rank is a worker. Otherwise every host is one, as thinwire does by default.

    Raises:
        ValueError: for a single host, which sends nothing.
    """
    if cluster.hosts == 1:
        raise ValueError(
            "hosts=1: nothing leaves the host, so there is nothing to compress. Give the number of hosts that you "
            "train on, or want to train on"
        )
    methods = [*METHODS.values(), *(local_steps(steps) for steps in every)]
    predictions = predict(workload, cluster, methods, costs, flat=flat)
    chosen = _choose(predictions)
    return Plan(workload, cluster, flat, costs.source, predictions, chosen, _answer(predictions, chosen))


def predict(
    workload: Workload, cluster: Cluster, methods: Iterable[Method], costs: Costs, *, flat: bool = False
) -> tuple[Prediction, ...]:
    """Predict some methods on a cluster; see `make_plan`."""
    baseline = mean_step(workload, cluster, METHODS[BASELINE], costs, flat=flat)
    predictions: list[Prediction] = []
    for method in methods:
        step = mean_step(workload, cluster, method, costs, flat=flat)
        predictions.append(
            Prediction(
                method=method.name,
                title=method.title,
                lines=method.lines,
                bytes_per_step=method.bytes_per_step(
                    workload.elements, cluster.hosts, cluster.ranks_per_host, flat=flat
                ),
                step=step.total,
                compute=step.compute,
                exposed_wait=step.exposed_wait,
                rest=step.rest,
                speed_up=baseline.total / step.total,
                state_bytes=method.state_bytes * workload.elements,
                loss=method.loss,
                note=method.note,
            )
        )
    return tuple(predictions)


def mean_step(
    workload: Workload, cluster: Cluster, method: Method, costs: Costs, *, flat: bool = False, seed: int = 0
) -> StepTime:
    """The mean over the steps of a run, of all kinds that the method has."""
    kinds = [(1 - sum(part for part, _ in method.others), method), *method.others]
    steps = [(part, simulate_step(workload, cluster, kind, costs, flat=flat, seed=seed)) for part, kind in kinds]
    return StepTime(
        *(sum(part * getattr(step, name) for part, step in steps) for name in ("total", "compute", "exposed_wait"))
    )


def _choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest method that costs no loss. If none of these helps, the fastest one that does."""
    useful = [prediction for prediction in _studied(predictions) if prediction.speed_up >= LEAST_GAIN]
    free = [prediction for prediction in useful if prediction.loss is not None and prediction.loss.none]
    return _first_of_the_fastest(free or useful)


def _studied(predictions: Sequence[Prediction]) -> list[Prediction]:
    by_name = {prediction.method: prediction for prediction in predictions}
    return [by_name[name] for name in _IN_ORDER]


def _first_of_the_fastest(predictions: Sequence[Prediction]) -> Prediction | None:
    """The first one that is about as fast as the fastest."""
    fastest = min((prediction.step for prediction in predictions), default=0.0)
    return next((prediction for prediction in predictions if prediction.step <= LEAST_GAIN * fastest), None)


def _answer(predictions: Sequence[Prediction], chosen: Prediction | None) -> str:
    baseline = next(prediction for prediction in predictions if prediction.method == BASELINE)
    share = baseline.exposed_wait / baseline.step
    if chosen is None:
        return f"{NOTHING_HELPS} DDP waits for it for {share:.0%} of a step."
    answer = (
        f"Use {chosen.title}: {chosen.speed_up:.1f} times as many steps per second as DDP in fp32, "
        f"which waits for the network for {share:.0%} of a step."
    )
    # What is even faster costs loss.
    faster = _first_of_the_fastest([p for p in _studied(predictions) if LEAST_GAIN * p.step < chosen.step])
    if faster is None or faster.loss is None:
        return answer
    more = chosen.step / faster.step
    return f"{answer} {faster.title} takes {more:.1f} times as many again, at {faster.loss.text} loss."


# How it changes with the network --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Speed-ups of a method over DDP in fp32, for several clusters."""

    method: str
    title: str
    speed_ups: tuple[float, ...]
    steps: tuple[float, ...]
    """Seconds per step."""


def over_rates(plan: Plan, costs: Costs, rates: Sequence[float], methods: Sequence[Method]) -> list[Curve]:
    """Curves over the rate of the links, in bits per second. All else is as in the plan."""
    link = plan.cluster.link
    clusters = [replace(plan.cluster, link=replace(link, bits_per_second=rate)) for rate in rates]
    return curves(plan.workload, clusters, costs, methods, flat=plan.flat)


def over_hosts(plan: Plan, costs: Costs, hosts: Sequence[int], methods: Sequence[Method]) -> list[Curve]:
    """Curves over the number of hosts. All else is as in the plan."""
    clusters = [replace(plan.cluster, hosts=count) for count in hosts]
    return curves(plan.workload, clusters, costs, methods, flat=plan.flat)


def curves(
    workload: Workload, clusters: Sequence[Cluster], costs: Costs, methods: Sequence[Method], *, flat: bool = False
) -> list[Curve]:
    """Curves over some clusters."""
    found = [predict(workload, cluster, methods, costs, flat=flat) for cluster in clusters]
    return [
        Curve(
            method.name,
            method.title,
            tuple(predictions[position].speed_up for predictions in found),
            tuple(predictions[position].step for predictions in found),
        )
        for position, method in enumerate(methods)
    ]
