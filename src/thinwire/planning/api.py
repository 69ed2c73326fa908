"""`thinwire.plan`: measure a training step, and predict what each method would gain."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from thinwire.planning.calibration import quick_costs
from thinwire.planning.cluster import LOOPBACK, NVLINK, Cluster, Link
from thinwire.planning.costs import Costs
from thinwire.planning.measurement import measure_workload
from thinwire.planning.methods import RECOMMENDED_INTERVAL
from thinwire.planning.prediction import Plan, make_plan


def plan(
    model: nn.Module,
    step_fn: Callable[[], object],
    *,
    link: Link,
    hosts: int,
    ranks_per_host: int = 1,
    gpu: str | None = None,
    local_steps: int = RECOMMENDED_INTERVAL,
) -> Plan:
    """Measure a training step on this machine, and predict what each method would gain on a cluster.

    Example::

        link = thinwire.planning.cluster.Link(bits_per_second=1e9, latency=2e-4)
        plan = thinwire.plan(model, lambda: model(batch).backward(), link=link, hosts=8)
        print(plan.answer, plan.of("birder").speed_up)

    Args:
        model: the model that the step trains.
        step_fn: computes the loss and calls backward; called five times.
        link: of each host.
        hosts: the number of hosts, two or more.
        ranks_per_host: the number of ranks on each.
        gpu: the type of GPU whose kernels are estimated: "a100", "h100" or "v100". None for CPUs.
        local_steps: steps from one exchange to the next, of the method that takes local steps.

    Raises:
        ValueError: for a single host, or an unknown GPU; if the step does not train the model.
        NothingMeasured: the step did not call backward.
    """
    costs = quick_costs() if gpu is None else Costs.of_gpu(gpu)
    cluster = Cluster(
        hosts,
        ranks_per_host,
        link,
        LOOPBACK if gpu is None else NVLINK,
        all_reduce="gloo" if gpu is None else "nccl",
    )
    workload = measure_workload(step_fn)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if workload.elements > trainable:
        raise ValueError(
            f"step_fn computes gradients of {workload.elements:,} elements, but model has {trainable:,} that require "
            "one: give the model that the step trains"
        )
    return make_plan(workload, cluster, costs, every=(local_steps,))
