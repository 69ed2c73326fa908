"""`thinwire selftest`: checks the laws on this machine and writes a report to attach to an issue."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from thinwire.cli.options import MOST_RANKS, integer, output_file
from thinwire.cli.selftest import machine, speed
from thinwire.cli.selftest.laws import LAWS, SECONDS, Law, judge
from thinwire.cli.selftest.ranks import Part, PartOutcome, run_parts
from thinwire.cli.selftest.results import FAILED, NOT_TESTED, PASSED, LawResult, SelftestResults
from thinwire.cli.selftest.site import Findings

CPU_RANKS = 4
KERNELS, STEPS = "kernels", "steps"


class Device(str, Enum):
    """What can be tested."""

    cpu = "cpu"
    cuda = "cuda"


class UnfitMachineError(Exception):
    """This machine cannot do what was asked for; the message suggests an alternative."""


def selftest(
    device: Annotated[Device, typer.Option(help="Test GPUs, over NCCL, or the CPU, over gloo.")],
    ranks: Annotated[
        int | None, integer(1, f"Local processes, one a GPU; by default all GPUs, or {CPU_RANKS}.", maximum=MOST_RANKS)
    ] = None,
    json: Annotated[Path | None, output_file("Write everything to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, to be pasted into an issue.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer optimizers, and rough timings.")] = False,
) -> None:
    """See whether thinwire is right and fast on this machine: laws 1 to 6, kernels, and training steps.

    Ends with exit code 1 if a law does not hold or a benchmark cannot run. Attach what it prints to your issue.
    """
    try:
        count = _ranks(device.value, ranks)
    except UnfitMachineError as error:
        typer.echo(f"thinwire selftest: {error}", err=True)
        raise typer.Exit(2) from None
    progress = Console(stderr=True)
    facts = machine.describe(device.value, count)

    def show(part: str) -> None:
        progress.print(f"{part} …", highlight=False)

    testable = [law for law in LAWS if count >= law.least_ranks]
    parts = [Part(part_name(law), functools.partial(judge, law), SECONDS) for law in testable]
    parts += [Part(KERNELS, speed.kernels, speed.SECONDS), Part(STEPS, speed.steps, speed.SECONDS)]
    outcomes = run_parts(device.value, count, parts, quick=quick, on_begin=show)
    benchmarks = {name: outcomes[name] for name in (KERNELS, STEPS)}
    results = SelftestResults(
        device=device.value,
        ranks=count,
        quick=quick,
        machine=facts,
        laws=verdicts(LAWS, outcomes, count),
        kernels=outcomes[KERNELS].result or [],
        steps=outcomes[STEPS].result or [],
        errors={name: outcome.error for name, outcome in benchmarks.items() if outcome.error is not None},
    )
    if markdown:
        print(results.markdown())
    else:
        results.print_tables(Console())
    if json is not None:
        results.write_json(json)
    if results.failed:
        raise typer.Exit(1)


def _ranks(device_type: str, asked: int | None) -> int:
    """How many there are going to be.

    Raises:
        UnfitMachineError: when this machine has no place for them.
    """
    if device_type == "cpu":
        return asked or CPU_RANKS
    this_torch = f"--device cuda, but torch {torch.__version__}"
    if torch.version.cuda is None:
        raise UnfitMachineError(
            f"{this_torch} was built without CUDA. On a machine with NVIDIA GPUs install a build with it (see "
            "https://pytorch.org/get-started); to test this one as it is: --device cpu"
        )
    if not torch.cuda.is_available():
        raise UnfitMachineError(
            f"{this_torch}, built for CUDA {torch.version.cuda}, sees no GPU. See that nvidia-smi lists one and that "
            "CUDA_VISIBLE_DEVICES does not hide it; to test the CPU: --device cpu"
        )
    if not dist.is_nccl_available():
        raise UnfitMachineError(f"{this_torch} was built without NCCL, by which GPUs exchange: install one with it")
    gpus = torch.cuda.device_count()
    if asked is not None and asked > gpus:
        raise UnfitMachineError(f"--ranks {asked}, but torch sees {gpus} GPU(s), and NCCL needs one for every rank")
    return asked or gpus


def part_name(law: Law) -> str:
    """What its part of the test is called."""
    return f"law {law.number}: {law.title}"


def verdicts(laws: Sequence[Law], outcomes: dict[str, PartOutcome], ranks: int) -> list[LawResult]:
    """One for each law, whatever came of it."""
    found = []
    for law in laws:
        outcome = outcomes.get(part_name(law))
        if outcome is None:
            status, findings = NOT_TESTED, Findings(notes=[f"it needs {law.least_ranks} ranks, and there is {ranks}"])
        elif outcome.error is not None:
            status, findings = FAILED, Findings([outcome.error])
        else:
            findings = outcome.result
            status = FAILED if findings.complaints else PASSED
        seconds = 0.0 if outcome is None else outcome.seconds
        found.append(
            LawResult(law.number, law.title, law.compared, status, seconds, findings.complaints, findings.notes)
        )
    return found
