"""`thinwire study`: data, searches with equal budgets, a store that goes on where it was, what is made of results."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import thinwire
from tests.harness import run_ranks
from thinwire.cli.app import app
from thinwire.cli.averagings import AVERAGINGS
from thinwire.cli.charlm import ModelShape
from thinwire.cli.schedule import is_due
from thinwire.cli.study.images import read_idx, read_pictures
from thinwire.cli.study.methods import METHODS, Course, Setting
from thinwire.cli.study.plots import plot_task
from thinwire.cli.study.references import DistributedLion, MeanAdamW, MeanSGD
from thinwire.cli.study.report import rates, section
from thinwire.cli.study.runs import VALIDATIONS, Point, Result, Run, run_virtually, train
from thinwire.cli.study.search import (
    FRESH_SEEDS,
    RATES,
    SEARCH_RUNS,
    SEARCH_SEED,
    rounded,
    search_runs,
    study,
    takes_part,
)
from thinwire.cli.study.store import Store
from thinwire.cli.study.summary import Summary, summaries
from thinwire.cli.study.tasks import FineTuningTask, PictureTask, Score, Sources, Task, TextTask, tasks
from thinwire.compressors.stochastic_sign import Downlink
from thinwire.transport import virtual

# Pictures ------------------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    """As the format is described: magic, sizes, elements."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_pictures(directory: Path, count: int = 40) -> Path:
    """Pictures whose label can be seen: a bright column."""
    directory.mkdir(exist_ok=True)
    for part in ("train", "t10k"):
        labels = np.arange(count, dtype=np.uint8) % 10
        pictures = np.zeros((count, 28, 28), dtype=np.uint8)
        pictures[np.arange(count), :, 2 * labels] = 255
        (directory / f"{part}-images-idx3-ubyte").write_bytes(idx(pictures))
        (directory / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return directory


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4)])
def test_idx_files_are_read_as_they_are_and_compressed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "file"
    for data in (idx(array), gzip.compress(idx(array))):
        path.write_bytes(data)
        np.testing.assert_array_equal(read_idx(path).numpy(), array)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: b"PNG" + data[3:], "expected an IDX file of bytes"),
        (lambda data: data[:2] + b"\x0d" + data[3:], "expected an IDX file of bytes"),
        (lambda data: data[:-1], "has 17 bytes"),
        (lambda data: data + b"\0", "has 19 bytes"),
        (lambda _: b"", "expected an IDX file of bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: Callable[[bytes], bytes], complaint: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(change(idx(np.zeros((2, 3), dtype=np.uint8))))
    with pytest.raises(ValueError, match=complaint):
        read_idx(path)


def test_pictures_have_values_around_zero(tmp_path: Path) -> None:
    pictures, labels = read_pictures(write_pictures(tmp_path), "train")
    assert pictures.shape == (40, 1, 28, 28)
    assert (pictures.min(), pictures.max()) == (-1, 1)
    assert labels[:12].tolist() == [*range(10), 0, 1]
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        read_pictures(tmp_path / "nowhere", "train")


# Tasks and runs ------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(layers=1, width=32, context=16)


def sources(tmp_path: Path) -> Sources:
    text = tmp_path / "text"
    text.write_text("to be, or not to be, that is the question. " * 60, encoding="utf-8")
    return Sources(text, write_pictures(tmp_path / "pictures"))


def small(tmp_path: Path, name: str, steps: int = 6) -> Task:
    task = replace(tasks(sources(tmp_path))[name], steps=steps, batch=2)
    if isinstance(task, TextTask):
        task = replace(task, shape=SHAPE)
    return replace(task, pretraining_steps=5) if isinstance(task, FineTuningTask) else task


def test_a_fine_tuning_task_begins_where_pretraining_ended(tmp_path: Path) -> None:
    task = small(tmp_path, "fine-tuning")
    assert isinstance(task, FineTuningTask)
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        states.append(task.model().state_dict())
        torch.manual_seed(seed)
        assert torch.equal(torch.rand(3), expected)
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
    longer = replace(task, pretraining_steps=6).model().state_dict()
    assert any(not torch.equal(value, longer[name]) for name, value in states[0].items())
    scratch = small(tmp_path, "text")
    assert scratch.examples > task.examples, "only one half is left for fine-tuning"
    assert scratch.data() != task.data()


def test_pictures_that_are_told_apart_count(tmp_path: Path) -> None:
    task = small(tmp_path, "pictures", steps=30)
    assert isinstance(task, PictureTask)
    result = run_virtually(Run(replace(task, batch=10), "adamw", Setting(5e-3, (0.9, 0.95), 0.0), 0))
    first, last = result.points[0].score, result.final
    assert first.accuracy is not None
    assert last.accuracy is not None
    assert last.accuracy > 0.9
    assert last.loss < first.loss
    assert task.value(last) == 1 - last.accuracy


def train_in_rank(rank: int, world_size: int, runs: list[Run]) -> list[Result]:
    torch.set_num_threads(1)
    return [train(rank, world_size, run, lambda _: None, ddp=True) for run in runs]


THIN = ("sparse-loco-h5", "streaming-int4-h30", "demo")
"""Of the methods that run only if they are named, those that are compared here."""


@pytest.mark.timeout(400)
def test_virtual_and_real_workers_give_the_same_results(tmp_path: Path) -> None:
    """Every method, and of local steps one in fragments and one that is not: losses to the last bit, and every byte."""
    runs = [
        Run(small(tmp_path, task), name, Setting(method.lr, method.betas[0], method.decays[0]), seed=3)
        for name, method in METHODS.items()
        for task in ("text", "pictures")
        if method.only in (None, task) and (method.by_default or name in THIN)
    ]
    expected = run_ranks(train_in_rank, 4, runs, timeout=250)[0]
    for run, processes in zip(runs, expected, strict=True):
        result = run_virtually(run)
        assert result.points == processes.points, run.method
        # With a delay the bytes of an exchange count when it ends, which between processes is a matter of time.
        if not run.method.endswith("-delay"):
            assert result.bytes_sent == processes.bytes_sent, run.method
        assert len(result.points) == run.task.steps
        assert sum(steps for steps, _ in result.bytes_sent) == run.task.steps


@pytest.mark.parametrize("method", ["onebit-lamb", "compress-int4"])
def test_a_run_that_diverges_says_so(tmp_path: Path, method: str) -> None:
    run = Run(small(tmp_path, "text", steps=130), method, Setting(1e30, (0.9, 0.95), 0.1), 0)
    result = run_virtually(run)
    assert math.isnan(result.final.loss)
    assert run.task.value(result.final) == math.inf
    assert [point.step for point in result.points] == [step for step in range(1, 131) if is_due(step, 130, VALIDATIONS)]
    assert sum(steps for steps, _ in result.bytes_sent) == 130
    stored = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert math.isnan(Result.from_json(stored).final.loss)


# References ----------------------------------------------------------------------------------------------------------


def descend(worker: int, workers: int, make: Callable[..., torch.optim.Optimizer], steps: int) -> list[float]:
    p = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = make([p])
    for step in range(steps):
        p.grad = gradient(worker, step)
        optimizer.step()
        optimizer.zero_grad()
    return p.tolist()


def gradient(worker: int, step: int) -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(10 * step + worker))


@pytest.mark.parametrize(
    ("mean", "alone", "options"),
    [
        (MeanAdamW, torch.optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}),
        (MeanSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ],
)
def test_dense_references_see_the_mean(mean: Any, alone: Any, options: dict[str, Any]) -> None:
    workers = virtual.run_workers(3, descend, lambda params: mean(params, **options), 5)
    p = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = alone([p], **options)
    for step in range(5):
        p.grad = torch.stack([gradient(worker, step) for worker in range(3)]).mean(0)
        optimizer.step()
    assert workers == [p.tolist()] * 3


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_distributed_lion_is_a_majority_of_lions(workers: int) -> None:
    lr, beta1, beta2, decay = 0.1, 0.9, 0.99, 0.1
    found = virtual.run_workers(workers, descend, lambda p: DistributedLion(p, lr, (beta1, beta2), decay), 6)
    x, momenta = np.array([1.0, -2.0, 0.5]), np.zeros((workers, 3))
    for step in range(6):
        g = np.stack([gradient(worker, step).numpy() for worker in range(workers)])
        votes = np.sign(beta1 * momenta + (1 - beta1) * g).sum(0)
        momenta = beta2 * momenta + (1 - beta2) * g
        x = (1 - lr * decay) * x - lr * np.sign(votes)
    for worker in found:
        np.testing.assert_allclose(worker, x, rtol=1e-5)


# Search --------------------------------------------------------------------------------------------------------------


class Landscape:
    """What runs would cost, if learning were simple; and who asked."""

    def __init__(self, lr: float, betas: tuple[float, ...], decay: float) -> None:
        self.best = Setting(lr, betas, decay)
        self.runs: dict[tuple[Setting, int], Result] = {}

    def __call__(self, setting: Setting, seed: int) -> Result:
        best = self.best
        loss = 2.0 + math.log2(setting.lr / best.lr) ** 2
        loss += 0.1 * (setting.betas != best.betas) + 0.1 * (setting.weight_decay != best.weight_decay)
        loss = math.nan if setting.lr > 50 * best.lr else loss
        result = Result(setting, seed, [Point(1, Score(loss))], [(1, 8.0)], 0.01, 10)
        assert self.runs.setdefault((setting, seed), result) == result
        return result


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.3, 2.0, 3.0])
def test_the_search_finds_the_best_and_everybody_has_the_same_budget(tmp_path: Path, factor: float) -> None:
    task, method = small(tmp_path, "text"), replace(METHODS["adamw"], more_betas=())
    landscape = Landscape(factor * method.lr, method.betas[2], method.decays[1])
    best = study(task, method, landscape)
    assert (best.betas, best.weight_decay) == (method.betas[2], method.decays[1])
    assert abs(math.log2(best.lr / landscape.best.lr)) <= 0.5
    seeds = [seed for _, seed in landscape.runs]
    assert seeds.count(SEARCH_SEED) == SEARCH_RUNS
    assert len({setting.lr for setting, _ in landscape.runs}) == RATES
    assert [setting for setting, seed in landscape.runs if seed in FRESH_SEEDS] == [best] * len(FRESH_SEEDS)


def test_rates_at_which_training_diverges_are_left(tmp_path: Path) -> None:
    method = replace(METHODS["adamw"], more_betas=())
    landscape = Landscape(method.lr / 64, method.betas[0], method.decays[0])
    assert study(small(tmp_path, "text"), method, landscape).lr == pytest.approx(method.lr / 4, rel=0.01)


def test_the_reference_and_the_flagship_may_search_longer(tmp_path: Path) -> None:
    assert [name for name, method in METHODS.items() if method.more_betas] == ["adamw", "birder-votes"]
    method = METHODS["adamw"]
    task = small(tmp_path, "text")
    landscape = Landscape(20 * method.lr, method.more_betas[0], method.decays[1])
    best = study(task, method, landscape)
    assert best.betas == method.more_betas[0]
    assert abs(math.log2(best.lr / landscape.best.lr)) <= 0.5, "beyond what the first four rates reach"
    assert len({setting for setting, seed in landscape.runs if seed == SEARCH_SEED}) == search_runs(task, method)


def test_a_long_task_searches_rates_only(tmp_path: Path) -> None:
    task, method = small(tmp_path, "larger"), METHODS["adamw"]
    assert task.betas not in method.betas
    landscape = Landscape(1.3 * method.lr * task.lr, method.betas[0], method.decays[1])
    best = study(task, method, landscape)
    assert (best.betas, best.weight_decay) == (task.betas, method.decays[0])
    assert abs(math.log2(best.lr / landscape.best.lr)) <= 0.5
    searched = {setting for setting, seed in landscape.runs if seed == SEARCH_SEED}
    assert len(searched) == search_runs(task, method) == RATES


def test_tasks_name_methods_that_exist(tmp_path: Path) -> None:
    for task in tasks(sources(tmp_path)).values():
        assert set(task.methods or ()) <= set(METHODS)
        assert {method.only for method in METHODS.values()} - {None} <= set(tasks(sources(tmp_path)))
        assert takes_part(task.reference or task, METHODS["adamw"]), "all are compared with it"


def test_workers_who_share_a_task_have_its_mean_gradients(tmp_path: Path) -> None:
    shared = [task for task in tasks(sources(tmp_path)).values() if task.reference is not None]
    assert {task.workers for task in shared} == {8, 16, 32}
    setting = Setting(1e-3, (0.7, 0.95), 0.1)
    for task in shared:
        assert task.reference is not None
        small, whole = (replace(each, steps=2) for each in (task, task.reference))
        losses = [run_virtually(Run(each, "adamw", setting, 1)).final.loss for each in (small, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_one_beta_is_the_papers_rule() -> None:
    for downlink in get_args(Downlink):
        method = METHODS[f"birder-{downlink}"]
        for betas in method.betas:
            model = nn.ParameterList([torch.ones(3)])
            [group] = method.prepare(model, Setting(1e-3, betas, 0.1), Course(10, 0)).optimizer.param_groups
            paper = len(betas) == 1
            assert (group["beta"], group["beta_b"]) == (betas[0], None if paper else betas[1])
            assert group["gain"] == (1.0 if paper else method.fixed["gain"])
            usual = thinwire.Birder([nn.Parameter(torch.ones(3))], downlink=downlink)
            assert paper or group["gain"] == usual.param_groups[0]["gain"], "the defaults are those of the study"


# Store, report, command ----------------------------------------------------------------------------------------------


def test_a_store_keeps_results_and_forgets_what_was_defined_otherwise(tmp_path: Path) -> None:
    task, setting, out = small(tmp_path, "text"), Setting(1e-3, (0.9, 0.95), 0.1), tmp_path / "out"
    result = run_virtually(Run(task, "lion", setting, 1))
    store = Store(out, task, "lion", task.data())
    assert store.find(setting, 1) is None
    store.add(result)
    for again in (store, Store(out, task, "lion", task.data()), Store(out, task, "lion", data=None)):
        found = again.find(setting, 1)
        assert found is not None
        assert found.final.loss == pytest.approx(result.final.loss, abs=1e-6)
        assert (found.setting, found.seed, found.bytes_sent) == (setting, 1, result.bytes_sent)
        assert again.find(setting, 2) is None
        assert again.find(replace(setting, lr=2e-3), 1) is None
    assert not Store(out, replace(task, steps=7), "lion", task.data()).results
    assert not Store(out, task, "adamw", task.data()).results
    (tmp_path / "elsewhere").write_text("other words " * 100, encoding="utf-8")
    other = replace(task, sources=replace(task.sources, text=tmp_path / "elsewhere"))
    assert not Store(out, other, "lion", other.data()).results


def test_a_store_notices_another_compressor_or_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, setting, out = small(tmp_path, "text", steps=1), Setting(1e-3, (0.9, 0.95), 0.1), tmp_path / "out"
    Store(out, task, "compress-int4", task.data()).add(run_virtually(Run(task, "compress-int4", setting, 1)))
    assert Store(out, task, "compress-int4", task.data()).find(setting, 1) is not None
    (out / task.name / "compress-int4.json").rename(out / task.name / "compress-int8.json")
    assert not Store(out, task, "compress-int8", task.data()).results
    (out / task.name / "compress-int8.json").rename(out / task.name / "compress-int4.json")
    other = replace(
        METHODS["compress-int4"], fixed=replace(AVERAGINGS["compress-int4"], options={"block": 32}).definition()
    )
    monkeypatch.setitem(METHODS, "compress-int4", other)
    assert not Store(out, task, "compress-int4", task.data()).results


def summary(task: Task, method: str, ends: list[float], sent: float = 1000.0) -> Summary:
    results = [
        Result(
            Setting(1e-3, (0.9, 0.95), 0.1),
            seed,
            [Point(1, Score(4.0)), Point(3, Score(end)), Point(4, Score(end))],
            [(1, 10 * sent), (3, sent)],
            compute_seconds=0.5,
            parameters=7,
        )
        for seed, end in zip(FRESH_SEEDS, ends, strict=True)
    ]
    return Summary(task, METHODS[method], results)


def test_what_is_made_of_results(tmp_path: Path) -> None:
    task = small(tmp_path, "text")
    adamw = summary(task, "adamw", [2.0, 2.1, 1.9, 2.0, 2.0])
    birder = summary(task, "birder-bit", [1.0, 1.0, 1.0, 1.0, 1.0], sent=100.0)
    sketched = summary(task, "sketched-amsgrad", [3.0] * 5)
    diverged = summary(task, "lion", [3.0] * 4 + [math.nan])
    assert (adamw.mean, adamw.std) == (pytest.approx(2.0), pytest.approx(math.sqrt(0.02 / 4)))
    assert birder.curve() == [(1, 4.0), (3, 1.0)]
    assert (birder.steps_to(4.0), birder.steps_to(2.5), birder.steps_to(1.0)) == (1, 2, 3)
    assert birder.steps_to(0.9) is None
    # 10,000 and three times 1,000 bytes at 16,000 bits a second are 5 and 0.5 s; computing takes 0.5 s a step.
    assert adamw.seconds(16_000, compute=0.5) == pytest.approx(5 + 3 * 0.5)
    assert sketched.seconds(16_000, compute=0.5) == pytest.approx(6.5 + 2.0)
    found = [birder, adamw, sketched, diverged]
    text = section(task, found)
    assert "| steps to AdamW's at 3 | sent until then |" in text
    assert "| Birder, bit | 0.001, (0.9, 0.95), 0.1 | 1.0000 ± 0.0000 | -50.0 %, -14.1 std | 3 | 1.20 kB |" in text
    assert "| AdamW | 0.001, (0.9, 0.95), 0.1 | 2.0000 ± 0.0707 |  | 3 | 12.00 kB |" in text
    assert "| SketchedAMSGrad | 0.001, (0.9, 0.95), 0.1 | 3.0000 ± 0.0000 | +50.0 %, +14.1 std | not" in text
    assert "| Distributed Lion | 0.001, (0.9, 0.95), 0.1 | diverged |" in text
    plot_task(tmp_path / "plot.png", task, found)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_that_the_command_prints(tmp_path: Path) -> None:
    """Of the results in the repository; and a picture of each task."""
    copied = tmp_path / "convergence"
    shutil.copytree(ROOT / "docs" / "convergence", copied)
    (copied / "tables.md").unlink()
    told = invoke("--report", "--output", str(copied))
    assert told.exit_code == 0, told.output
    tables = (copied / "tables.md").read_text(encoding="utf-8")
    assert tables == (ROOT / "docs" / "convergence" / "tables.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "convergence.md").read_text(encoding="utf-8")
    run = [task for task in tasks(Sources()).values() if (copied / task.name).exists()]
    assert {"text", "pictures", "fine-tuning"} <= {task.name for task in run}
    everything_by_task = [summaries(copied, task, list(METHODS)) for task in run]
    by_task = [[summary for summary in found if not summary.method.thin] for found in everything_by_task]
    assert rates(by_task) in page
    local_steps = (ROOT / "docs" / "local-steps.md").read_text(encoding="utf-8")
    _, _, thin = local_steps.partition("## How thin can my wire be?")
    rows = [line for line in thin.partition("\n## ")[0].splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 5
    assert set(rows) <= set(tables.splitlines())
    assert "convergence/thin-wires.png" in thin
    for task in run:
        everything = summaries(copied, task, list(METHODS))
        shown = {summary.method.name for summary in everything} - ({"adamw"} if task.reference is not None else set())
        assert shown == {path.stem for path in (copied / task.name).glob("*.json")}
        found = [summary for summary in everything if not summary.method.thin]
        searched = {name for name, method in METHODS.items() if method.settings_of is None and not method.thin}
        assert shown >= {name for name in searched if takes_part(task, METHODS[name])}
        assert section(task, found) in page
        assert f"convergence/{task.name}.png" in page


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["study", *arguments], env={"COLUMNS": "200"})


@pytest.mark.timeout(400)
def test_a_whole_study_that_is_stopped_and_goes_on(tmp_path: Path) -> None:
    where = sources(tmp_path)
    arguments = ["--output", str(tmp_path / "out"), "--text", str(where.text), "--steps", "2", "--jobs", "1"]
    chosen = ["--task", "text", "--method", "adamw", "--method", "birder-bit"]
    assert "complete in" in invoke(*arguments, *chosen, "--report").output
    done = invoke(*arguments, *chosen)
    assert done.exit_code == 0, done.output
    assert "Birder, bit" in done.output
    assert (tmp_path / "out" / "text.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "out" / "text" / "birder-bit.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert len(stored["runs"]) == SEARCH_RUNS + len(FRESH_SEEDS)
    tables = (tmp_path / "out" / "tables.md").read_text(encoding="utf-8")

    # Some runs are lost, and made again as they were; nothing else is.
    kept = stored["runs"][:-2]
    path.write_text(json.dumps({**stored, "runs": [{**run, "compute_seconds": 123.0} for run in kept]}))
    assert invoke(*arguments, *chosen).exit_code == 0
    again = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert [run["compute_seconds"] for run in again[:-2]] == [123.0] * len(kept)
    for before, after in zip(stored["runs"][-2:], again[-2:], strict=True):
        assert {**after, "compute_seconds": None} == {**before, "compute_seconds": None}
    task = replace(tasks(where)["text"], steps=2)
    assert len(summaries(tmp_path / "out", task, list(METHODS))) == 2
    assert "Birder, bit" in tables


@pytest.mark.timeout(400)
def test_local_steps_search_a_rate_and_are_compared_by_their_bits(tmp_path: Path) -> None:
    """diloco-h5 has AdamW's betas and decay, and searches a rate; its int4 has all of its settings."""
    out, where = tmp_path / "out", sources(tmp_path)
    arguments = ["--output", str(out), "--text", str(where.text), "--steps", "5", "--jobs", "2", "--task", "text"]
    names = ["diloco-int4-h5", "diloco-h5", "adamw"]
    done = invoke(*arguments, *(word for name in names for word in ("--method", name)))
    assert done.exit_code == 0, done.output
    task = replace(tasks(where)["text"], steps=5)
    found = {summary.method.name: summary for summary in summaries(out, task, list(METHODS))}
    adamw, dense, int4 = found["adamw"], found["diloco-h5"], found["diloco-int4-h5"]
    assert (dense.setting.betas, dense.setting.weight_decay) == (adamw.setting.betas, adamw.setting.weight_decay)
    assert int4.setting == dense.setting
    runs = json.loads((out / "text" / "diloco-h5.json").read_text(encoding="utf-8"))["runs"]
    tried = [run["setting"]["lr"] for run in runs if run["seed"] == 0]
    assert len(set(tried)) == RATES
    assert tried[0] == rounded(adamw.setting.lr / 2)
    assert adamw.bits == pytest.approx(32)
    assert dense.bits == pytest.approx(32 / 5, rel=0.02)
    assert int4.bits == pytest.approx(4.25 / 5, rel=0.05)
    tables = (out / "tables.md").read_text(encoding="utf-8")
    table = tables[tables.index("How thin") :]
    places = [table.index(f"| {title} |") for title in ("AdamW", "diloco, every 5", "diloco-int4, every 5")]
    assert places == sorted(places), "the thickest wire comes first"
    assert "diloco" not in tables[: tables.index("How thin")]
    assert (out / "thin-wires.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(400)
def test_compressed_averages_run_with_the_settings_of_adamw(tmp_path: Path) -> None:
    out, where = tmp_path / "out", sources(tmp_path)
    arguments = ["--output", str(out), "--text", str(where.text), "--steps", "2", "--jobs", "2", "--task", "text"]
    compressed = ["--method", "compress-int4"]
    told = invoke(*arguments, *compressed)
    assert told.exit_code == 2
    assert "'compress-int4' runs with the settings of 'adamw'" in told.output
    assert "--method adamw" in told.output
    # The settings of AdamW are known when its search is complete: it goes first, whatever the order.
    done = invoke(*arguments, *compressed, "--method", "adamw")
    assert done.exit_code == 0, done.output
    assert "AdamW, int4" in done.output
    task = replace(tasks(where)["text"], steps=2)
    found = {summary.method.name: summary for summary in summaries(out, task, list(METHODS))}
    assert found["compress-int4"].setting == found["adamw"].setting
    path = out / "text" / "compress-int4.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert [run["seed"] for run in stored["runs"]] == list(FRESH_SEEDS), "it searches nothing"
    # Results of settings that AdamW no longer has are not shown.
    moved = [{**run, "setting": {**run["setting"], "lr": 123.0}} for run in stored["runs"]]
    path.write_text(json.dumps({**stored, "runs": moved}), encoding="utf-8")
    assert [summary.method.name for summary in summaries(out, task, list(METHODS))] == ["adamw"]


def test_ctrl_c_ends_it_and_all_its_runs(tmp_path: Path) -> None:
    # A shell starts its background jobs with SIGINT ignored, and these tests may run in one.
    main = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    main += "; from thinwire.cli.app import main; main()"
    folder, text = tmp_path / "out", sources(tmp_path).text
    command = [sys.executable, "-c", main, "study", "--output", folder, "--text", text, "--task", "text", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as study:
        try:
            children = Path(f"/proc/{study.pid}/task/{study.pid}/children")
            deadline = time.monotonic() + 90
            while len(pids := children.read_text().split()) < 3:  # two runs, and what looks after their memory
                assert time.monotonic() < deadline
                assert study.poll() is None
                time.sleep(0.1)
            study.send_signal(signal.SIGINT)
            assert study.wait(60) != 0
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                assert time.monotonic() < deadline + 80
                time.sleep(0.1)
        finally:
            study.kill()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--task", "poetry"), "'poetry' is none of text, pictures, fine-tuning"),
        (("--method", "guessing"), "'guessing' is none of adamw"),
        (("--task", "pictures", "--pictures", "/nowhere"), "apt-get install dataset-fashion-mnist"),
        (("--task", "text", "--text", "/nowhere"), "No such file"),
        (("--steps", "0"), "must be at least 1, got 0"),
        (("--jobs", "0"), "must be at least 1, got 0"),
    ],
)
def test_bad_input_is_told(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    told = invoke("--output", str(tmp_path), *arguments)
    assert told.exit_code == 2
    assert complaint in told.output
