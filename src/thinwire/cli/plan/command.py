"""What `thinwire plan` does: read or measure the model and the network, predict, and report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from thinwire.cli.options import integer, number, output_file
from thinwire.cli.plan import inputs
from thinwire.cli.plan.ranks import RanksDisagree, launched
from thinwire.cli.plan.tables import as_json, print_links, print_plan
from thinwire.planning.calibration import quick_costs
from thinwire.planning.cluster import LOOPBACK, NVLINK, Cluster, Link
from thinwire.planning.costs import GPUS, Costs
from thinwire.planning.links import Links, LinkTimedOut
from thinwire.planning.methods import RECOMMENDED_INTERVAL
from thinwire.planning.prediction import Plan, make_plan
from thinwire.planning.workload import Workload
from thinwire.testbed import TestbedUnavailable
from thinwire.testbed.supervisor import ChildError

MOST_HOSTS = 100_000
_INPUTS = "Give what you train: a script, --model module:function, or --params with --step-ms"


def plan(
    script: Annotated[
        list[str] | None, typer.Argument(help="A training script with its arguments. Its first steps are measured.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="Number of parameters, such as 110e6, instead of a script.")
    ] = None,
    step_ms: Annotated[
        float | None, number(0.001, 1e9, "Milliseconds of forward and backward of a rank, with --params.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="module:function that returns (module, batch) or a training step, to measure.")
    ] = None,
    link: Annotated[str | None, typer.Option(help="Rate of each host's link: 100mbit, 1gbit, ...")] = None,
    latency: Annotated[str, typer.Option(help="How long a message travels in addition: 0.2ms, 50us, ...")] = "0.1ms",
    half_duplex: Annotated[bool, typer.Option("--half-duplex", help="Both directions share the rate.")] = False,
    hosts: Annotated[int | None, integer(1, "Hosts.", maximum=MOST_HOSTS)] = None,
    gpus_per_host: Annotated[int | None, integer(1, "GPUs per host, a rank on each.", maximum=64)] = None,
    ranks_per_host: Annotated[int | None, integer(1, "Ranks per host, on CPUs.", maximum=1024)] = None,
    cores: Annotated[float | None, number(0.01, 4096, "Cores that the ranks of a host share.")] = None,
    gpu: Annotated[
        str, typer.Option(help=f"Type of the GPUs ({', '.join(GPUS)}), or a file of thinwire selftest --json.")
    ] = "a100",
    spread: Annotated[
        float, number(0, 9, "Standard deviation of the ranks' time to compute a step, as a part of it.")
    ] = 0.0,
    local_steps: Annotated[
        int, integer(1, "H of local steps: steps from one exchange to the next.")
    ] = RECOMMENDED_INTERVAL,
    flat: Annotated[bool, typer.Option("--flat", help="Every rank is a worker, as with topology='flat'.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Predict steps on the testbed, measure them, and compare. Needs root.")
    ] = False,
    json: Annotated[Path | None, output_file("Write all numbers to this file.")] = None,
    report: Annotated[Path | None, output_file("With --validate: write its table to this file, as Markdown.")] = None,
    html: Annotated[Path | None, output_file("Write a page with curves to this file.")] = None,
) -> None:
    """Predict what each method gains on your model and your network, and say which one to use.

    E.g. ``thinwire plan --params 110e6 --step-ms 180 --link 1gbit --hosts 8 --gpus-per-host 8``. Under torchrun, and
    without --link, the links between the hosts are measured.
    """
    if validate:
        _validate(json, report)
        return
    if report is not None:
        raise typer.BadParameter("is written by --validate; a plan has --html", param_hint="--report")
    with launched() as ranks:
        try:
            links = ranks.measure_links() if ranks is not None and link is None else None
            if links is None:
                cluster = _cluster(link, latency, half_duplex, hosts, gpus_per_host, ranks_per_host, cores, spread)
            else:
                cluster = _measured_cluster(links, gpus_per_host)
            costs = _costs(gpus_per_host, gpu)
            workload = _workload(script, params, step_ms, model)
            if ranks is not None:
                workload = ranks.agree(workload)
            made = make_plan(workload, cluster, costs, every=(local_steps,), flat=flat)
        except (ValueError, LinkTimedOut, RanksDisagree) as error:
            raise typer.BadParameter(str(error)) from None
    if ranks is None or ranks.rank == 0:
        _report(made, costs, links, json, html)


def _report(made: Plan, costs: Costs, links: Links | None, json: Path | None, html: Path | None) -> None:
    console = Console()
    if links is not None:
        print_links(console, links)
    print_plan(console, made)
    if json is not None:
        json.write_text(as_json(made), encoding="utf-8")
    if html is not None:
        # Not at the top: no other command should wait for matplotlib.
        from thinwire.cli.plan import page

        html.write_text(page.render(made, costs), encoding="utf-8")
    for path in (json, html):
        if path is not None:
            console.print(f"Wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _measured_cluster(links: Links, gpus_per_host: int | None) -> Cluster:
    """With the ranks per host that torchrun has started; --gpus-per-host only says that they have a GPU each."""
    cluster = links.cluster()
    if gpus_per_host is None:
        return cluster
    return replace(cluster, node_link=NVLINK, all_reduce="nccl", cores=None)


def _validate(json: Path | None, report: Path | None) -> None:
    # Not at the top: plans do not need the benchmark.
    from thinwire.cli.plan import validation
    from thinwire.cli.step.run import StartError

    console = Console()
    try:
        found = validation.validate(console, rounds=3, turn_seconds=3.0)
    except (TestbedUnavailable, StartError, ChildError) as error:
        typer.echo(f"thinwire plan: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, TestbedUnavailable) else 1) from None
    validation.print_validation(console, found)
    if json is not None:
        json.write_text(found.as_json(), encoding="utf-8")
    if report is not None:
        report.write_text(found.as_markdown(), encoding="utf-8")
    if not found.passed:
        raise typer.Exit(1)


def _cluster(
    link: str | None,
    latency: str,
    half_duplex: bool,
    hosts: int | None,
    gpus_per_host: int | None,
    ranks_per_host: int | None,
    cores: float | None,
    spread: float,
) -> Cluster:
    if link is None:
        raise typer.BadParameter("give the rate of the links, such as --link 1gbit", param_hint="--link")
    if hosts is None:
        raise typer.BadParameter("give the number of hosts, such as --hosts 8", param_hint="--hosts")
    if gpus_per_host is not None and ranks_per_host is not None:
        raise typer.BadParameter("give --gpus-per-host or --ranks-per-host, not both", param_hint="--ranks-per-host")
    on_gpus = gpus_per_host is not None
    return Cluster(
        hosts,
        gpus_per_host or ranks_per_host or 1,
        Link(inputs.rate(link), inputs.latency(latency), "half" if half_duplex else "full"),
        NVLINK if on_gpus else LOOPBACK,
        cores=cores,
        all_reduce="nccl" if on_gpus else "gloo",
        spread=spread,
    )


def _costs(gpus_per_host: int | None, gpu: str) -> Costs:
    if gpus_per_host is None:
        return quick_costs()
    try:
        return Costs.of_selftest(Path(gpu).read_text(encoding="utf-8")) if Path(gpu).is_file() else Costs.of_gpu(gpu)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from None


def _workload(script: list[str] | None, params: str | None, step_ms: float | None, model: str | None) -> Workload:
    given = [name for name, value in (("a script", script), ("--model", model), ("--params", params)) if value]
    if len(given) != 1:
        raise typer.BadParameter(_INPUTS if not given else f"{_INPUTS}; got {' and '.join(given)}")
    if script:
        return inputs.script(Path(script[0]), script[1:])
    if model:
        return inputs.model_named(model)
    if step_ms is None:
        raise typer.BadParameter("--params needs the time of forward and backward too", param_hint="--step-ms")
    return Workload.of_size(inputs.count(params or ""), step_ms / 1e3)
