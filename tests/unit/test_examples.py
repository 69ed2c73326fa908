"""The examples run as their first lines say, as users run them: by torchrun, or by plain python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 90
GRACE_SECONDS = 20

PYTHON = [sys.executable]
# Standalone: a free port instead of the fixed one, which a neighbour may have.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(launcher: list[str], example: str, *arguments: str, cwd: Path) -> str:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "PYTHONWARNINGS": "error"}
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


@pytest.mark.parametrize(("launcher", "ranks"), [(PYTHON, 1), (TORCHRUN, 2)], ids=["python", "torchrun"])
def test_without_ddp(launcher: list[str], ranks: int, tmp_path: Path) -> None:
    output = run(launcher, "without_ddp.py", cwd=tmp_path)
    losses = losses_in(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 10
    assert output.count("the same parameters on all ranks, to the bit: True") == (1 if ranks > 1 else 0)


def test_resume(tmp_path: Path) -> None:
    output = run(TORCHRUN, "resume.py", "--directory", str(tmp_path / "checkpoints"), cwd=tmp_path)
    # Two ranks share an output, and one may begin a line before the other has ended its own.
    runs = re.findall(r"loss ([\d.]+) without a stop, ([\d.]+) with; same parameters: (True|False)", output)
    assert len(runs) == 2
    assert all(straight == resumed and same == "True" for straight, resumed, same in runs)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["rank0of2.pt", "rank1of2.pt"]
