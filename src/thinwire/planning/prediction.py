"""What each method would take on a cluster, which one to use, and how that changes with the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from thinwire.planning.cluster import Cluster
from thinwire.planning.costs import Costs
from thinwire.planning.methods import BASELINE, DENSE, METHODS, LossCost, Method, local_steps, without_exchange
from thinwire.planning.step import StepTime, simulate_step
from thinwire.planning.workload import Workload

LEAST_GAIN = 1.1
"""A method that is not faster than this is not worth a change. Neither is one that is slower than another by less."""
NOTHING_HELPS = "Nothing here helps you: your network is not what you wait for."
_BY_LOSS = ("int8", "int4", "onebit-adam", "birder", "zero-one-adam")
"""The methods that the convergence study covers, the one with the least loss first."""


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
    workload: Workload, cluster: Cluster, costs: Costs, *, every: Sequence[int] = (16,), flat: bool = False
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
    """The mean over the steps of a run: those that exchange, local ones, and those of a dense warm-up."""

    def simulated(one: Method) -> StepTime:
        return simulate_step(workload, cluster, one, costs, flat=flat, seed=seed)

    step = simulated(method)
    if method.every > 1:
        step = _mixed(step, 1 / method.every, simulated(without_exchange(method)))
    if method.dense_part:
        step = _mixed(simulated(DENSE), method.dense_part, step)
    return step


def _mixed(one: StepTime, part: float, other: StepTime) -> StepTime:
    return StepTime(
        *(
            part * getattr(one, name) + (1 - part) * getattr(other, name)
            for name in ("total", "compute", "exposed_wait")
        )
    )


def _choose(predictions: Sequence[Prediction]) -> Prediction | None:
    """The method with the least loss of those that are about as fast as the fastest, if that is a gain."""
    studied = {prediction.method: prediction for prediction in predictions if prediction.method in _BY_LOSS}
    fastest = min(prediction.step for prediction in studied.values())
    for name in _BY_LOSS:
        if studied[name].step <= LEAST_GAIN * fastest:
            return studied[name] if studied[name].speed_up >= LEAST_GAIN else None
    raise AssertionError("the fastest is as fast as itself")


def _answer(predictions: Sequence[Prediction], chosen: Prediction | None) -> str:
    baseline = next(prediction for prediction in predictions if prediction.method == BASELINE)
    share = baseline.exposed_wait / baseline.step
    if chosen is None:
        return f"{NOTHING_HELPS} DDP waits for it for {share:.0%} of a step."
    return (
        f"Use {chosen.title}: {chosen.speed_up:.1f} times as many steps per second as DDP in fp32, "
        f"which waits for the network for {share:.0%} of a step."
    )


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
