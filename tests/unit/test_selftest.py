"""`thinwire selftest`: it passes here, it fails where something is broken, and nothing hides what else there is."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

import thinwire
from tests.distributed.common import environment
from tests.harness import run_ranks
from thinwire.cli.app import app
from thinwire.cli.selftest import command, oracles
from thinwire.cli.selftest.counting import counted_bytes
from thinwire.cli.selftest.laws import LAWS, Law, judge
from thinwire.cli.selftest.ranks import Part, PartOutcome, run_parts
from thinwire.cli.selftest.results import FAILED, NOT_TESTED, PASSED, LawResult, SelftestResults
from thinwire.cli.selftest.runs import SUBJECTS
from thinwire.cli.selftest.site import Findings, Site
from thinwire.cli.selftest.speed import MEMCPY, Kernel, Steps
from thinwire.kernels import ops
from thinwire.kernels.ops import Kernels
from thinwire.transport.lane_transport import LaneTransport

# The command ---------------------------------------------------------------------------------------------------------


def test_a_quick_run_reports_all_laws_and_both_benchmarks(tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    arguments = ["selftest", "--device", "cpu", "--quick", "--ranks", "2", "--json", str(file)]
    program = [sys.executable, "-c", "from thinwire.cli.app import main; main()"]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert [(law["number"], law["status"], law["complaints"]) for law in results["laws"]] == [
        (law.number, PASSED, []) for law in LAWS
    ]
    assert (results["failed"], results["errors"], results["ranks"]) == (False, {}, 2)
    memcpy, *kernels = results["kernels"]
    assert (memcpy["name"], memcpy["memcpy_ratio"], memcpy["bytes_per_element"]) == (MEMCPY, 1.0, 8.0)
    assert len(kernels) == 9
    for kernel in kernels:
        rate = kernel["bytes_per_element"] * kernel["elements"] / kernel["seconds"]
        assert kernel["bytes_per_second"] == pytest.approx(rate)
        assert kernel["memcpy_ratio"] == pytest.approx(rate / memcpy["bytes_per_second"])
    (steps,) = results["steps"]
    assert steps["label"] == "Birder"
    assert steps["ratio"] == pytest.approx(steps["per_second"] / steps["adamw_per_second"])
    machine = results["machine"]
    assert (machine["thinwire"], machine["torch"]) == (thinwire.__version__, torch.__version__)
    assert machine["kernels for cpu"] == ops.backend(torch.device("cpu")).name
    for text in (*(law.title for law in LAWS), "only Birder, 1-bit Adam, CD-Adam were tested", "2 ranks: passed"):
        assert text in done.stdout


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["selftest", *arguments])
    assert done.exit_code == 2
    return " ".join(done.output.split())


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_an_error_with_a_hint() -> None:
    said = refused("--device", "cuda")
    assert f"--device cuda, but torch {torch.__version__} was built without CUDA" in said
    assert "--device cpu" in said
    assert "Traceback" not in said


def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "built for CUDA 13.0, sees no GPU. See that nvidia-smi lists one" in refused("--device", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "was built without NCCL" in refused("--device", "cuda")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert "--ranks 3, but torch sees 2 GPU(s)" in refused("--device", "cuda", "--ranks", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--device"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cpu", "--ranks", "0"], "'--ranks'"),
        (["--device", "cpu", "--json", "/nowhere/report.json"], "cannot write '/nowhere/report.json'"),
    ],
)
def test_bad_arguments_are_rejected(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments).replace("│ ", "").replace(" │", "")


# Laws, where something is broken -------------------------------------------------------------------------------------


def law(number: int) -> Law:
    return next(law for law in LAWS if law.number == number)


def test_laws_are_counted_and_all_optimizers_are_subjects() -> None:
    assert [law.number for law in LAWS] == [1, 2, 3, 4, 5, 6]
    public = [getattr(thinwire, name) for name in thinwire.__all__]
    classes = {c for c in public if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    # Local steps are of any optimizer, and the other two send nothing.
    assert classes - {thinwire.LocalSteps, thinwire.MuonAdamW, thinwire.SignSGD} == {
        subject.optimizer for subject in SUBJECTS
    }


def findings_of(rank: int, world_size: int, number: int, break_it: Callable[[int], None] | None) -> list[str]:
    """The complaints of all ranks, where something is broken; in a process of its own, so that it stays there."""
    if break_it is not None:
        break_it(rank)
    return judge(law(number), Site.here("cpu", quick=True)).complaints


def break_kernels(*, also_reference: bool = False, **broken: Callable[[Kernels], Callable[..., Any]]) -> None:
    """Give optimizers other operations than they should have."""
    choose = ops.backend

    def chosen(device: torch.device) -> Kernels:
        kernels = choose(device)
        if kernels.name == "reference" and not also_reference:
            return kernels
        return dataclasses.replace(kernels, **{name: make(kernels) for name, make in broken.items()})

    ops.backend = chosen


def changed(name: str, **changes: Callable[[Any], Any]) -> Callable[[Kernels], Callable[..., Any]]:
    """That operation with some arguments changed."""

    def make(kernels: Kernels) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            new = {option: change(options[option]) for option, change in changes.items()}
            return getattr(kernels, name)(*args, **{**options, **new})

        return call

    return make


def half_rate_on_rank_1(rank: int) -> None:
    if rank == 1:
        break_kernels(birder_apply=changed("birder_apply", lr=lambda lr: lr / 2))


def a_rate_that_is_a_bit_off(rank: int) -> None:
    break_kernels(sign_apply=changed("sign_apply", rate=lambda rate: rate * (1 + 2e-6)))


def other_draws(rank: int) -> None:
    """By all kernels, so that they are all alike."""
    break_kernels(also_reference=True, vote_bit=changed("vote_bit", key=lambda key: key ^ 1))


def the_same_bits_always(rank: int) -> None:
    break_kernels(birder_encode=changed("birder_encode", key=lambda _: 1))


def errors_forgotten(rank: int) -> None:
    def make(kernels: Kernels) -> Callable[..., bool | None]:
        def sign_encode(runs: Any, grad: Any, c: torch.Tensor, *args: Any, **options: Any) -> bool | None:
            c.zero_()
            return kernels.sign_encode(runs, grad, c, *args, **options)

        return sign_encode

    break_kernels(sign_encode=make)


def smallest_instead_of_largest(rank: int) -> None:
    def make(kernels: Kernels) -> Callable[..., None]:
        return lambda values, *rest: kernels.top_k(1 / values, *rest)

    break_kernels(top_k=make)


def bytes_not_counted(rank: int) -> None:
    count = LaneTransport._count

    def half(self: LaneTransport, rounds: int, sent: int, received: int) -> None:
        count(self, rounds, sent // 2, received // 2)

    LaneTransport._count = half


def infinities_overlooked(rank: int) -> None:
    def make(kernels: Kernels) -> Callable[..., bool]:
        def birder_encode(*args: Any, **options: Any) -> bool:
            kernels.birder_encode(*args, **options)
            return False

        return birder_encode

    break_kernels(birder_encode=make)


@pytest.mark.parametrize(
    ("number", "break_it", "complaint"),
    [
        (1, half_rate_on_rank_1, "rank 1: Birder: this rank is not as rank 0, from step 1 on other bits"),
        (2, a_rate_that_is_a_bit_off, "with the reference kernels, on the CPU and over gloo against"),
        (3, other_draws, "Birder: after step 1 "),
        (3, a_rate_that_is_a_bit_off, None),
        (4, the_same_bits_always, "a worker's bits are off their mean by up to "),
        (4, errors_forgotten, "signs with error feedback: sent + kept is off the input"),
        (4, smallest_instead_of_largest, "are not the largest"),
        (5, bytes_not_counted, "but torch was given"),
        (6, infinities_overlooked, "skipped [0, 0, 0, 0, 0, 0, 0, 0, 0] steps instead of [0, 1, 1, 1, 1, 2, 2, 2, 2]"),
    ],
)
def test_a_law_fails_where_something_is_broken(number: int, break_it: Callable[[int], None], complaint: str) -> None:
    for complaints in run_ranks(findings_of, 2, number, break_it):
        if complaint is None:
            assert complaints == []  # what rounding may do is no business of a float64 oracle
        else:
            assert complaint in "\n".join(complaints)


@pytest.mark.parametrize("number", [law.number for law in LAWS if law.least_ranks == 1])
def test_laws_for_one_rank_hold_with_one(number: int) -> None:
    assert run_ranks(findings_of, 1, number, None) == [[]]


def findings_on_a_stream(rank: int, world_size: int, number: int) -> list[str]:
    with environment({"THINWIRE_LANE": "stream"}):
        return findings_of(rank, world_size, number, None)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: str(law.number))
def test_laws_hold_for_exchanges_as_gpus_make_them(law: Law) -> None:
    assert run_ranks(findings_on_a_stream, 2, law.number) == [[], []]


def test_drawn_workers_are_all_of_them_equally_often() -> None:
    for workers in (1, 2, 3, 5, 8):
        counts = torch.bincount(oracles.drawn_worker(7, workers, torch.arange(60_000)), minlength=workers)
        assert counts.shape == (workers,)
        assert (counts - 60_000 / workers).abs().max() < 6 * (60_000 / workers) ** 0.5


def send_in_all_ways(rank: int, world_size: int) -> list[int]:
    group, other = (dist.new_group(group_desc=description) for description in ("counted", "another"))
    assert isinstance(group, dist.ProcessGroup)
    given = torch.arange(12, dtype=torch.uint8)

    def by_message() -> None:
        work = dist.irecv(torch.empty_like(given), (rank - 1) % world_size, group=group)
        dist.send(given, (rank + 1) % world_size, group=group)
        assert work is not None
        work.wait()

    def unequally() -> None:
        splits = [2, 4, 6]
        mine = torch.empty(splits[rank] * world_size, dtype=torch.uint8)
        dist.all_to_all_single(mine, given, [splits[rank]] * world_size, splits, group=group)

    ways: list[Callable[[], object]] = [
        by_message,
        unequally,
        lambda: dist.all_to_all_single(torch.empty_like(given), given, group=group),
        lambda: dist.all_gather([torch.empty_like(given) for _ in range(world_size)], given, group=group),
        lambda: dist.all_gather([torch.empty_like(given) for _ in range(world_size)], given, group=other),
    ]
    counts = []
    for way in ways:
        with counted_bytes("counted") as counter:
            way()
        counts.append(counter.bytes)
    by_message()  # methods are as they were
    return counts


def test_bytes_are_counted_whatever_way_they_are_sent() -> None:
    assert run_ranks(send_in_all_ways, 3) == [[12, 12 - own, 8, 24, 0] for own in (2, 4, 6)]


# Ranks that go wrong -------------------------------------------------------------------------------------------------


def say_hello(site: Site) -> list[int]:
    return site.gather(site.rank)


def fail_on_rank_1(site: Site) -> None:
    if site.rank == 1:
        raise ValueError("rank 1 does not like this")
    site.gather(None)


def wait_for_ever(site: Site) -> None:
    time.sleep(1000)


def test_a_part_that_fails_or_hangs_hides_no_other() -> None:
    parts = [
        Part("hangs", wait_for_ever, 1.0),
        Part("is fine", say_hello, 60.0),
        Part("fails", fail_on_rank_1, 60.0),
    ]
    begun: list[str] = []
    outcomes = run_parts("cpu", 2, parts, quick=True, on_begin=begun.append)
    assert begun == ["hangs", "is fine", "fails"]
    assert "ValueError: rank 1 does not like this" in (outcomes["fails"].error or "")
    assert outcomes["hangs"].error == "it has not ended within 1 s"
    assert 1 <= outcomes["hangs"].seconds < 30
    assert (outcomes["is fine"].result, outcomes["is fine"].error) == ([0, 1], None)


def test_ranks_without_a_device_fail_all_parts_at_once() -> None:
    parts = [Part(name, say_hello, 60.0) for name in ("first", "second")]
    begun: list[str] = []
    outcomes = run_parts("teapot", 1, parts, quick=True, on_begin=begun.append)
    assert begun == []
    assert all("teapot" in (outcomes[name].error or "") for name in ("first", "second"))


# The report ----------------------------------------------------------------------------------------------------------


def test_every_law_has_a_verdict_whatever_came_of_it() -> None:
    outcomes = {
        command.part_name(law(2)): PartOutcome(1.0, Findings()),
        command.part_name(law(3)): PartOutcome(1.0, Findings(["x is not y"], ["z was left out"])),
        command.part_name(law(4)): PartOutcome(2.0, error="worker 0 failed"),
        command.part_name(law(6)): PartOutcome(1.0, Findings()),
    }
    found = command.verdicts(LAWS, outcomes, 1)
    assert [verdict.status for verdict in found] == [NOT_TESTED, PASSED, FAILED, FAILED, NOT_TESTED, PASSED]
    assert found[0].notes == ["it needs 2 ranks, and there is 1"]
    assert (found[2].complaints, found[2].notes) == (["x is not y"], ["z was left out"])
    assert found[3].complaints == ["worker 0 failed"]


def results(**changes: Any) -> SelftestResults:
    whole = SelftestResults(
        device="cpu",
        ranks=2,
        quick=False,
        machine={"torch": "2 | 3"},
        laws=[LawResult(1, "A title", "This with that.", PASSED, 1.5, [], ["something was left out"])],
        kernels=[Kernel("encode", 1000, 1e-6, 8.0, 0.5)],
        steps=[Steps("Birder", 7_000_000, 20.0, 10.0)],
        errors={},
    )
    return dataclasses.replace(whole, **changes)


def test_a_report_in_markdown() -> None:
    text = results().markdown()
    assert text.startswith("**thinwire selftest on cpu, 2 ranks: passed (laws: 1 passed)**\n")
    for line in (
        "| torch | 2 \\| 3 |",
        "| 1 | A title | passed | 1.5 |",
        "1. This with that.",
        "| encode | 1 | 8 | 8.0 | 0.50 |",
        "| Birder | 20.00 | 10.00 | 2.00 |",
        "something was left out",
    ):
        assert line in text.splitlines()


def test_what_failed_is_said_loudly() -> None:
    broken = results(
        laws=[LawResult(1, "A title", "This.", FAILED, 1.5, ["[bold] is off"], [])], errors={"steps": "no"}
    )
    assert broken.failed
    assert results(errors={"steps": "no"}).failed
    assert not results().failed
    console = Console(width=100, record=True, file=io.StringIO())
    broken.print_tables(console)
    printed = console.export_text()
    for text in ("FAILED", "Law 1 failed:", "[bold] is off", "No benchmark of steps:", "(laws: 1 failed; no benchmark"):
        assert text in printed
