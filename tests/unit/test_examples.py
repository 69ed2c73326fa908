"""The examples run as their first lines say, as users run them: by torchrun, or by plain python."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 240
"""How long an example may take: ten to twenty seconds of a core, on a machine that is busy with other tests."""
GRACE_SECONDS = 20

pytestmark = pytest.mark.timeout(2 * (SECONDS + GRACE_SECONDS))  # some run twice

PYTHON = [sys.executable]
# Standalone: a free port instead of the fixed one, which a neighbour may have.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(
    launcher: list[str], example: str, *arguments: str, cwd: Path, warnings: str = "error", more: Mapping[str, str] = {}
) -> str:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "PYTHONWARNINGS": warnings,
        "HF_HUB_OFFLINE": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **more,
    }
    process = subprocess.Popen(
        [*launcher, str(EXAMPLES / example), *arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its workers, which kill() would leave behind
            process.wait(GRACE_SECONDS)
    assert process.returncode == 0, output
    return output


def losses_in(output: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"^step +\d+  loss ([\d.]+)$", output, re.MULTILINE)]


def test_train_ddp(tmp_path: Path) -> None:
    output = run(TORCHRUN, "train_ddp.py", cwd=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 7
    assert losses[-1] < losses[0] / 3
    sent, dense = (float(figure.replace(",", "")) for figure in re.findall(r"[\d,]{4,}", output.splitlines()[-1]))
    assert 30 < dense / sent < 32


@pytest.mark.parametrize(("optimizer", "least", "most"), [("adamw", 7, 7.6), ("birder", 28, 32)])
def test_train_fsdp(optimizer: str, least: float, most: float, tmp_path: Path) -> None:
    output = run(TORCHRUN, "train_fsdp.py", "--optimizer", optimizer, cwd=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 3
    sent, dense = (float(figure.replace(",", "")) for figure in re.findall(r"[\d,]{4,}", output.splitlines()[-1]))
    assert least < dense / sent < most  # 32 / 4.25 bits, and 32 bits, without headers and padding


def test_local_steps(tmp_path: Path) -> None:
    output = run(TORCHRUN, "local_steps.py", cwd=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    assert "the same on all ranks: True" in output
    assert "12 exchanges" in output
    sent, dense = (float(figure.replace(",", "")) for figure in re.findall(r"([\d,]+) bytes, DDP ([\d,]+)", output)[0])
    assert 20 * 6.5 < dense / sent < 20 * 32 / 4.25


@pytest.mark.parametrize(("launcher", "ranks"), [(PYTHON, 1), (TORCHRUN, 2)], ids=["python", "torchrun"])
def test_without_ddp(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    output = run(launcher, "without_ddp.py", cwd=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 10
    assert output.count("parameters are equal on all ranks, to the bit: True") == (1 if ranks > 1 else 0)


def test_resume(tmp_path: Path) -> None:
    """A worker is killed on the way, and the end is that of a run in which none was."""
    straight = run(TORCHRUN, "resume.py", "--directory", str(tmp_path / "straight"), cwd=tmp_path)
    restarting = [*TORCHRUN, "--max-restarts", "1"]
    crashed = run(restarting, "resume.py", "--directory", str(tmp_path / "crashed"), "--crash-at", "130", cwd=tmp_path)
    assert re.findall(r"^from step (\d+)$", straight, re.MULTILINE) == ["0"]
    assert re.findall(r"^from step (\d+)$", crashed, re.MULTILINE) == ["0", "100"]
    ends = [
        re.findall(r"^step 200  loss [\d.]+  parameters [0-9a-f]{16}$", out, re.MULTILINE)
        for out in (straight, crashed)
    ]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    for directory in ("straight", "crashed"):
        saved = sorted(path.name for path in (tmp_path / directory).iterdir() if path.name != ".lock")
        assert saved == ["000003-step-150", "000004-step-200"]


def needs(framework: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(framework) is None
    return pytest.mark.skipif(missing, reason=f"{framework} is not installed: pip install '.[integrations,elastic]'")


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    output = run(TORCHRUN, "lightning_trainer.py", cwd=tmp_path, warnings="default")  # Lightning's own
    losses = losses_in(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 3
    sent, dense = (float(figure.replace(",", "")) for figure in re.findall(r"[\d,]{4,}", output.splitlines()[-1]))
    assert 28 < dense / sent < 32  # packets are small here, and headers are not


@needs("transformers")
@needs("accelerate")
def test_trainer(tmp_path: Path) -> None:
    output = run(TORCHRUN, "trainer.py", "--steps", "20", cwd=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    sent, dense = (float(figure.replace(",", "")) for figure in re.findall(r"[\d,]{4,}", output.splitlines()[-1]))
    assert 28 < dense / sent < 32


@needs("accelerate")
def test_accelerated(tmp_path: Path) -> None:
    """Saves in the middle of an accumulation, and ends as a run that was not stopped."""
    straight = run(TORCHRUN, "accelerated.py", cwd=tmp_path)
    resumed = run(TORCHRUN, "accelerated.py", "--resume", cwd=tmp_path)
    losses = losses_in(straight)
    assert losses[-1] < losses[0] / 2
    assert losses_in(resumed) == losses[3:]
    ends = [re.findall(r"^parameters [0-9a-f]{16}$", output, re.MULTILINE) for output in (straight, resumed)]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]


@needs("torchft")
def test_elastic(tmp_path: Path) -> None:
    """Two workers without torchrun, of which one gets the parameters of the other."""
    from tests.distributed.elastic_workers import lighthouse

    with lighthouse(least=2) as address, ThreadPoolExecutor(2) as workers:
        environment = {"TORCHFT_LIGHTHOUSE": address}
        # torchft calls Logger.warn.
        running = [
            workers.submit(run, PYTHON, "elastic.py", cwd=tmp_path, warnings="default", more=environment)
            for _ in range(2)
        ]
        outputs = [each.result() for each in running]
    ends = [re.findall(r"^sum of the parameters: .*$", output, re.MULTILINE) for output in outputs]
    assert len(ends[0]) == 1
    assert ends[0] == ends[1]
    for output in outputs:
        assert "joined 1 others at step 0" in output
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)  workers 2$", output, re.MULTILINE)]
        assert len(losses) == 12
        assert losses[-1] < losses[0] / 2
