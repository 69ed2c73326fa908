"""Workers that are killed at random moments and started again by torchrun end as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import restart_worker
from tests.harness import run_ranks

RANKS = 3
SECONDS = 280
GRACE_SECONDS = 20


# torchrun's store keeps the addresses of dead workers, and those that come after them ask for them.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def undisturbed(rank: int, world_size: int, directory: Path) -> tuple[str, int]:
    return restart_worker.train(rank, world_size, directory, lambda taken: None)


@pytest.mark.timeout(SECONDS + GRACE_SECONDS)
@pytest.mark.parametrize("kills", [3, pytest.param(6, marks=pytest.mark.long)])
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_is_not(tmp_path: Path, kills: int) -> None:
    straight = run_ranks(undisturbed, RANKS, tmp_path / "straight")
    assert straight == [(straight[0][0], 0)] * RANKS
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    process = subprocess.Popen(
        [*command, f"--max-restarts={kills}", restart_worker.__file__, str(tmp_path), str(kills)],
        env={**os.environ, **NEW_STORE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "error"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS - 40)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its workers, which kill() would leave behind
            process.wait(GRACE_SECONDS)
    assert process.returncode == 0, output
    for rank in range(RANKS):
        last = json.loads((tmp_path / f"lives-{rank}").read_text().splitlines()[-1])
        assert last["life"] == kills
        assert last["digest"] == straight[0][0]
        assert last["start"] > 0
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name != ".lock")
    assert [name.partition("-")[2] for name in saved] == ["step-86", "step-88", "step-90"]
