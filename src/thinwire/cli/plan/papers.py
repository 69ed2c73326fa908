"""`thinwire simulate papers`: the clusters of the papers, predicted, and the same methods on more hosts.

The papers' own clusters are not at hand. Their compute times are inputs here, each with its source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.cli import markdown as md
from thinwire.planning.calibration import benchmarked_costs
from thinwire.planning.cluster import NVLINK, Cluster, Link
from thinwire.planning.costs import Costs
from thinwire.planning.methods import DENSE_WARM_UP, METHODS, RECOMMENDED_INTERVAL, Method, local_steps
from thinwire.planning.prediction import Prediction, mean_step, predict
from thinwire.planning.workload import Workload

HOSTS, GPUS_PER_HOST = 8, 8
RATES = (1e9, 1e10, 1e11)
LATENCY = 50e-6
"""Of Ethernet with TCP, one way: assumed."""
SCALE_HOSTS = (8, 16, 32, 64, 128, 256, 512, 1024)
INTERNET = Link(200e6, 30e-3)
"""Between sites: 200 Mbit/s and 30 ms one way."""


@dataclass(frozen=True)
class PaperCase:
    """A model on the papers' GPUs."""

    model: str
    elements: int
    setting: str
    seconds: float
    """Forward and backward of one GPU."""
    source: str
    claim: float
    """What the Birder paper reports at 10 Gbit/s, DDP with SGD or Adam = 1."""

    @property
    def workload(self) -> Workload:
        """Its computation."""
        return Workload.of_size(self.elements, self.seconds)


_NVIDIA = "NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, one V100 16GB"
_BERT_FLOP = 6 * 85e6 * 32 * 128
"""Forward and backward: six operations per parameter outside the embeddings and token (Kaplan et al. 2020)."""

CASES = (
    PaperCase("ResNet-50", 25_600_000, "32 images per GPU, fp32", 32 / 367, f"{_NVIDIA}: 367 images/s in fp32", 2.5),
    PaperCase(
        "ResNet-50", 25_600_000, "32 images per GPU, mixed precision", 32 / 1200, f"{_NVIDIA}: 1,200 images/s", 2.5
    ),
    PaperCase(
        "BERT-Base",
        110_000_000,
        "32 sequences of 128 tokens per GPU, fp32",
        _BERT_FLOP / (0.6 * 15.7e12),
        "assumed: 60 % of a V100's 15.7 TFLOPS (data sheet), 6 operations per parameter and token",
        6.3,
    ),
    PaperCase(
        "BERT-Base",
        110_000_000,
        "32 sequences of 128 tokens per GPU, mixed precision",
        _BERT_FLOP / (0.3 * 125e12),
        "assumed: 30 % of a V100's 125 TFLOPS (data sheet), 6 operations per parameter and token",
        6.3,
    ),
)
_LOCAL_STEPS = local_steps(RECOMMENDED_INTERVAL)
_WARM_UP = 0.15
"""The part of a run that sends dense gradients first in the 1-bit Adam paper's recipe, and in the convergence study."""
METHODS_COMPARED: tuple[tuple[Method, bool], ...] = (
    (METHODS["ddp"], False),
    (METHODS["ddp-bf16"], False),
    (METHODS["int4"], False),
    (
        replace(METHODS["onebit-adam"], title="1-bit Adam, dense warm-up", others=((_WARM_UP, DENSE_WARM_UP),)),
        False,
    ),
    (replace(METHODS["onebit-adam"], title="1-bit Adam, 4-bit warm-up"), False),
    (replace(METHODS["birder"], title="Birder, flat"), True),
    (replace(METHODS["birder"], title="Birder, hierarchical"), False),
    (_LOCAL_STEPS, False),
)
"""Each with whether it is flat."""
_WHOLE_MODEL = 1e6
"""More megabytes than any model here has."""
METHODS_SCALED = (
    METHODS["ddp"],
    METHODS["int4"],
    METHODS["onebit-adam"],
    METHODS["birder"],
    replace(METHODS["birder"], title="Birder, one bucket", bucket_mb=_WHOLE_MODEL),
    METHODS["zero-one-adam"],
    _LOCAL_STEPS,
)
"""Those of the curves."""


def papers_cluster(rate: float) -> Cluster:
    """8 hosts of 8 GPUs."""
    return Cluster(HOSTS, GPUS_PER_HOST, Link(rate, LATENCY), NVLINK, all_reduce="nccl")


def predictions(case: PaperCase, rate: float) -> list[Prediction]:
    """All methods for a case at a rate."""
    costs = Costs.of_gpu("v100")
    return [
        predict(case.workload, papers_cluster(rate), [method], costs, flat=flat)[0] for method, flat in METHODS_COMPARED
    ]


@dataclass(frozen=True)
class Scaling:
    """A kind of cluster with more and more hosts, and the time of a step on each, by the title of a method."""

    title: str
    explanation: str
    hosts: tuple[int, ...]
    steps: dict[str, tuple[float, ...]]
    compute: float


def scalings() -> Iterator[Scaling]:
    """BERT-Base on GPUs in a data centre, on GPUs at sites on the internet, and on CPUs."""
    case = CASES[3]
    gpu = Costs.of_gpu("v100")
    cpu = benchmarked_costs()
    data_centre = papers_cluster(1e10)
    internet = Cluster(HOSTS, 1, INTERNET, NVLINK, all_reduce="nccl")
    cpus = Cluster(HOSTS, 1, Link(1e10, LATENCY), cores=4, all_reduce="gloo")
    gpus = f"BERT-Base, {case.setting}: {1e3 * case.seconds:.0f} ms per step on a V100"
    yield _scaling("8 GPUs per host, 10 Gbit/s", gpus, case.workload, data_centre, gpu)
    yield _scaling("One GPU per host, internet: 200 Mbit/s, 30 ms", gpus, case.workload, internet, gpu)
    small = Workload.of_size(7_200_000, 0.2)
    yield _scaling(
        "CPUs with gloo, 10 Gbit/s", "A transformer of 7.2 M parameters, 200 ms per step, 4 cores", small, cpus, cpu
    )


def _scaling(title: str, explanation: str, workload: Workload, cluster: Cluster, costs: Costs) -> Scaling:
    steps = {
        method.title: tuple(
            mean_step(workload, replace(cluster, hosts=hosts), method, costs).total for hosts in SCALE_HOSTS
        )
        for method in METHODS_SCALED
    }
    return Scaling(title, explanation, SCALE_HOSTS, steps, workload.compute)


# As text --------------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The tables of docs/scale.md."""
    parts = ["### 8 hosts of 8 GPUs: speed-up over DDP in fp32", ""]
    titles = [method.title for method, _ in METHODS_COMPARED]
    parts += md.heading(["model, GPU", "link", "compute", *titles, "Birder paper"])
    for case in CASES:
        for rate in RATES:
            found = predictions(case, rate)
            claim = f"{case.claim:g}" if rate == 1e10 else ""
            cells = [f"{prediction.speed_up:.2f}" for prediction in found]
            first = [f"{case.model}, {case.setting}", f"{rate / 1e9:g} Gbit/s", f"{1e3 * case.seconds:.0f} ms"]
            parts.append(md.row([*first, *cells, claim]))
    parts += ["", "Compute times:", ""]
    parts += [f"* {case.model}, {case.setting}: {1e3 * case.seconds:.0f} ms. {case.source}." for case in CASES]
    for scaling in scalings():
        parts += ["", f"### {scaling.title}: ms per step", "", f"{scaling.explanation}.", ""]
        parts += md.heading(["hosts", *scaling.steps])
        for position, hosts in enumerate(scaling.hosts):
            parts.append(md.row([f"{hosts:,}", *(f"{1e3 * steps[position]:,.0f}" for steps in scaling.steps.values())]))
    return "\n".join(parts) + "\n"


def write_figure(path: Path) -> None:
    """The curves of docs/scale.md."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    found = list(scalings())
    figure = Figure(figsize=(4.6 * len(found), 3.8), layout="constrained")
    for axes, scaling in zip(figure.subplots(1, len(found)), found, strict=True):
        for title, steps in scaling.steps.items():
            axes.plot(scaling.hosts, [1e3 * step for step in steps], marker="o", markersize=3, label=title)
        axes.axhline(1e3 * scaling.compute, color="gray", linestyle="--", linewidth=1, label="compute")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(scaling.hosts, [str(hosts) for hosts in scaling.hosts], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(scaling.title, fontsize=10)
        axes.set_xlabel("hosts")
        axes.set_ylabel("predicted ms per step")
        axes.grid(linewidth=0.4)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
