"""`thinwire plan`: what it measures, predicts, prints and refuses, and its page in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.by import By
from torch import nn
from typer.testing import CliRunner

import thinwire
from tests.browser import chromium
from thinwire.cli.app import app
from thinwire.planning.cluster import Link
from thinwire.planning.measurement import NothingMeasured, measure_workload
from thinwire.planning.prediction import NOTHING_HELPS

SIZE = ("--params", "110e6", "--step-ms", "180")
NETWORK = ("--link", "1gbit", "--latency", "0.2ms", "--hosts", "8")
SCRIPT = """
import sys
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
opt = torch.optim.AdamW(model.parameters())
print("arguments", sys.argv[1:])
for step in range(1_000_000):
    model(torch.randn(16, 64)).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""


def _run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "120"})
    # Messages are wrapped in a box.
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_a_plan_of_given_numbers(tmp_path: Path) -> None:
    code, output = _run(*SIZE, *NETWORK, "--gpus-per-host", "8", "--json", tmp_path / "plan.json")
    assert code == 0, output
    assert "110,000,000 parameters, 8 hosts with 8 ranks each, links of 1 Gbit/s, latency 0.2 ms" in output
    assert "not measured" in output, "costs of GPUs are estimated, and it says so"
    plan = json.loads((tmp_path / "plan.json").read_text())
    by_name = {prediction["method"]: prediction for prediction in plan["predictions"]}
    assert by_name["ddp"]["bytes_per_step"] == pytest.approx(2 * 63 / 64 * 440e6)
    assert by_name["birder"]["bytes_per_step"] == pytest.approx(2 * 7 / 8 * 110e6 / 8)
    for line in by_name[plan["recommended"]]["lines"].splitlines():
        assert line in output
    assert by_name["birder"]["loss"]["link"] == "docs/convergence.md"


def test_the_page_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    command, *lines = page.split("```console\n", 1)[1].split("```", 1)[0].splitlines()
    code, output = _run(*command.removeprefix("$ thinwire plan ").split())
    assert code == 0, output
    for line in lines:
        assert line == "..." or " ".join(line.split()) in output, line


def test_it_says_when_nothing_helps() -> None:
    code, output = _run(
        "--params", "1e6", "--step-ms", "500", "--link", "100gbit", "--hosts", "2", "--gpus-per-host", "1"
    )
    assert code == 0
    assert NOTHING_HELPS in output


def test_a_script_is_measured_until_it_has_taken_some_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, output = _run("--json", tmp_path / "plan.json", *NETWORK, script, "--lr", "1", "--hosts", "no option of plan")
    assert code == 0, output
    assert "arguments ['--lr', '1', '--hosts', 'no option of plan']" in output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["parameters"] == 64 * 256 + 256 + 256 * 8 + 8
    assert 0 < plan["backward_seconds"] < 1
    assert torch.autograd.backward.__module__ == "torch.autograd", "as it was"


def test_a_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(32, 8)\n"
        "    def forward(self, x):\n        return self.layer(x).mean()\n"
        "def build():\n    return Net(), torch.randn(4, 32)\n"
        "def idle():\n    return lambda: None\n"
        "def odd():\n    return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    code, output = _run("--model", "plan_models:build", *NETWORK)
    assert code == 0, output
    assert "264 parameters" in output
    code, output = _run("--model", "plan_models:idle", *NETWORK)
    assert code == 2
    assert "backward was never called" in output
    code, output = _run("--model", "plan_models:odd", *NETWORK)
    assert code == 2
    assert "must return (module, batch)" in output


def test_plan_in_code() -> None:
    model = nn.Linear(64, 64)

    def step() -> None:
        model(torch.randn(8, 64)).sum().backward()

    link = Link(1e8, 1e-4)
    plan = thinwire.plan(model, step, link=link, hosts=4)
    assert plan.workload.elements == 64 * 64 + 64
    assert plan.of("ddp").step > plan.workload.compute
    with pytest.raises(ValueError, match="hosts=1: nothing leaves the host"):
        thinwire.plan(model, step, link=link, hosts=1)
    with pytest.raises(ValueError, match=r"gradients of 4,160 elements, but model has 12 that require one"):
        thinwire.plan(nn.Linear(3, 3), step, link=link, hosts=4)
    with pytest.raises(KeyError, match="method='none': expected one of ddp, "):
        plan.of("none")
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'plane'"):
        thinwire.plane  # noqa: B018


def test_gradient_ready_times_follow_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    x = torch.randn(256, 256)

    def step() -> None:
        model(x).sum().backward()

    workload = measure_workload(step)
    assert workload.elements == sum(p.numel() for p in model.parameters())
    ready = [gradient.ready for gradient in workload.gradients]
    assert ready == sorted(ready, reverse=True), "in the order of the model: the last layer is the first to be ready"
    assert 0 < ready[-1] < ready[0] <= workload.backward
    buckets = workload.ddp_buckets()
    assert sum(bucket.elements for bucket in buckets) == workload.elements
    with pytest.raises(NothingMeasured, match="backward was never called"):
        measure_workload(lambda: None)
    leaf = torch.ones(1, requires_grad=True)
    with pytest.raises(NothingMeasured, match="no parameter of a module got a gradient"):
        measure_workload(lambda: (2 * leaf).sum().backward())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--link"),
        (NETWORK, "Give what you train: a script, --model module:function, or --params with --step-ms"),
        ((*SIZE, *NETWORK, "--model", "a:b"), "got --model and --params"),
        (("--params", "110e6", *NETWORK), "--params needs the time of forward and backward too"),
        (("--params", "many", "--step-ms", "1", *NETWORK), "must be a number of parameters like 110e6, got 'many'"),
        ((*SIZE, "--hosts", "8"), "give the rate of the links, such as --link 1gbit"),
        ((*SIZE, "--link", "1gbit"), "give the number of hosts, such as --hosts 8"),
        ((*SIZE, "--link", "0mbit", "--hosts", "8"), "rate must be like '100mbit'"),
        ((*SIZE, "--link", "unlimited", "--hosts", "8"), "without a limit nobody waits"),
        ((*SIZE, "--link", "1gbit", "--hosts", "1"), "hosts=1: nothing leaves the host"),
        ((*SIZE, *NETWORK, "--latency", "soon"), "latency must be like '5ms'"),
        ((*SIZE, *NETWORK, "--gpus-per-host", "8", "--gpu", "b200"), "gpu='b200': expected one of"),
        ((*SIZE, *NETWORK, "--gpus-per-host", "8", "--ranks-per-host", "8"), "not both"),
        ((*SIZE, *NETWORK, "--report", "plan.md"), "is written by --validate; a plan has --html"),
        ((*NETWORK, "missing.py"), "there is no file 'missing.py'"),
        ((*NETWORK, "--model", "nothing"), "must be like mymodule:build, got 'nothing'"),
        ((*NETWORK, "--model", "no_such_module:build"), "No module named 'no_such_module'"),
    ],
)
def test_bad_input_gets_a_sentence(arguments: tuple[str, ...], message: str) -> None:
    code, output = _run(*arguments)
    assert code == 2
    assert message in output


def test_scripts_that_cannot_be_measured(tmp_path: Path) -> None:
    idle, failing = tmp_path / "idle.py", tmp_path / "failing.py"
    idle.write_text("x = 1\n")
    failing.write_text("raise SystemExit('no data')\n")
    code, output = _run(*NETWORK, idle)
    assert code == 2
    assert "backward was never called: there is no training step to measure" in output
    code, output = _run(*NETWORK, failing)
    assert code == 2
    assert "ended with 'no data'" in output


def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    code, output = _run(*SIZE, *NETWORK, "--gpus-per-host", "8", "--html", page)
    assert code == 0, output
    with chromium(tmp_path / "profile") as browser:
        for width in (1280, 400):
            browser.set_window_size(width, 1800)
            browser.get(page.as_uri())
            assert browser.get_log("browser") == []
            assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
            assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
            drawings = browser.find_elements(By.CSS_SELECTOR, "svg")
            assert len(drawings) == 2
            for drawing in drawings:
                assert drawing.size["width"] >= 300
                assert "1024" in drawing.text or "100M" in drawing.text
        assert "Birder" in browser.find_element(By.TAG_NAME, "table").text


def test_the_papers_clusters(tmp_path: Path) -> None:
    """The committed page is what the command prints, and the curves are drawn."""
    figure = tmp_path / "scale.png"
    result = CliRunner().invoke(app, ["simulate", "papers", "--figure", str(figure)])
    assert result.exit_code == 0, result.output
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert page.endswith(result.stdout)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_commit_round() -> None:
    """The committed page has what the command prints. The round costs at least one latency."""
    result = CliRunner().invoke(app, ["simulate", "commit"])
    assert result.exit_code == 0, result.output
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert result.stdout in page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()[2:]]
    for latency, _, _, cost in rows:
        assert float(cost.split()[0]) >= float(latency.split()[0])


def test_buckets() -> None:
    """The committed page has what the command prints. More equal buckets take no longer."""
    result = CliRunner().invoke(app, ["simulate", "buckets"])
    assert result.exit_code == 0, result.output
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert result.stdout in page
    for line in result.stdout.splitlines()[2:]:
        equal = [int(cell.replace(",", "")) for cell in line.split("|")[2:7]]
        assert equal == sorted(equal, reverse=True)
