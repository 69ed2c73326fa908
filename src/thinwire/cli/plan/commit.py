"""`thinwire simulate commit`: what the commit round costs on links with latency."""

from __future__ import annotations

from thinwire.cli import markdown as md
from thinwire.planning.calibration import benchmarked_costs
from thinwire.planning.cluster import Cluster, Link
from thinwire.planning.methods import METHODS
from thinwire.planning.step import simulate_step
from thinwire.planning.workload import Workload

HOSTS, RATE, CORES = 4, 1e9, 4
ELEMENTS, SECONDS = 7_200_000, 0.2
LATENCIES = (0.0, 1e-3, 1e-2, 5e-2)
"""One way."""
COMPARED = ("birder",)


def markdown() -> str:
    """The table of docs/scale.md."""
    costs = benchmarked_costs()
    workload = Workload.of_size(ELEMENTS, SECONDS)
    titles = [METHODS[name].title for name in COMPARED]
    columns = [column for title in titles for column in (title, f"{title}, without commit", "cost")]
    lines = md.heading(["latency, one way", *columns], first="---:")
    for latency in LATENCIES:
        cluster = Cluster(HOSTS, 1, Link(RATE, latency), cores=CORES)
        row = [f"{1e3 * latency:g} ms"]
        for name in COMPARED:
            with_commit, without = (
                simulate_step(workload, cluster, METHODS[name], costs, commits=commits).total
                for commits in (True, False)
            )
            row += [f"{1e3 * seconds:.1f} ms" for seconds in (with_commit, without, with_commit - without)]
        lines.append(md.row(row))
    return "\n".join(lines) + "\n"
