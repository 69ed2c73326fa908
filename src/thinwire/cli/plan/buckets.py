"""`thinwire simulate buckets`: how long a step takes if the model is cut into buckets in another way."""

from __future__ import annotations

from thinwire.cli import markdown as md
from thinwire.planning.calibration import benchmarked_costs
from thinwire.planning.cluster import Cluster, Link
from thinwire.planning.methods import METHODS
from thinwire.planning.step import simulate_step
from thinwire.planning.workload import Workload

HOSTS, CORES = 4, 4
MODELS = ((7_200_000, 0.2), (50_000_000, 1.3))
"""Elements, and seconds of forward and backward."""
RATES = (1e8, 3e8, 1e9)
LATENCY = 2e-4
COMPARED = ("birder", "int4")
CUTS = {
    "1": (1,),
    "2": (1, 1),
    "4": (1,) * 4,
    "8": (1,) * 8,
    "16": (1,) * 16,
    "last one small: 20, 30, 30, 15, 5 %": (20, 30, 30, 15, 5),
    "ends small: 5, 15, 30, 30, 15, 5 %": (5, 15, 30, 30, 15, 5),
}
"""Shares of the buckets, in the order of backward."""


def markdown() -> str:
    """The table of docs/scale.md: milliseconds per step."""
    costs = benchmarked_costs()
    lines = md.heading(["model, method, link", *CUTS])
    for elements, seconds in MODELS:
        workload = Workload.of_size(elements, seconds)
        for name in COMPARED:
            method = METHODS[name]
            for rate in RATES:
                cluster = Cluster(HOSTS, 1, Link(rate, LATENCY), cores=CORES)
                steps = [simulate_step(workload, cluster, method, costs, shares=cut).total for cut in CUTS.values()]
                case = f"{elements / 1e6:g} M, {method.title}, {rate / 1e6:g} Mbit/s"
                lines.append(md.row([case, *(f"{1e3 * step:,.0f}" for step in steps)]))
    return "\n".join(lines) + "\n"
