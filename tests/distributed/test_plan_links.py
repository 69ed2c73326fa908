"""`thinwire plan` on several ranks: measured links, and ranks that do not fit together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.testbeds import skip_unless_available
from thinwire.testbed import Testbed

SIZE = ("--params", "1e6", "--step-ms", "20")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "thinwire", "plan", *arguments]


def _run_ranks(arguments: Sequence[Sequence[str]], ranks_per_host: int) -> list[tuple[int, str]]:
    """One process per list of arguments, over loopback. Returns exit codes, and what each has printed in one line."""
    with socket.socket() as kept:
        # As long as it is bound, nobody else gets the port. Rank 0 may listen there, because both allow it.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1])}
        processes = [
            subprocess.Popen(
                _command(*own),
                env={
                    **os.environ,
                    **places,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(arguments)),
                    "LOCAL_WORLD_SIZE": str(ranks_per_host),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "COLUMNS": "120",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, own in enumerate(arguments)
        ]
        try:
            outputs = [process.communicate(timeout=150)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    codes = [process.returncode for process in processes]
    return [(code, " ".join(text.replace("│", " ").split())) for code, text in zip(codes, outputs, strict=True)]


def test_links_of_the_testbed_are_measured(tmp_path: Path) -> None:
    skip_unless_available()
    file = tmp_path / "plan.json"
    with Testbed(3, rate="100mbit") as testbed:
        testbed.set_rate("20mbit", host=2)
        assert testbed.run(_command(*SIZE, "--json", str(file))) == 0
    cluster = json.loads(file.read_text())["cluster"]
    assert (cluster["hosts"], cluster["ranks_per_host"]) == (3, 1)
    assert 30e6 < cluster["link"]["bits_per_second"] < 110e6  # less on a busy machine
    assert list(cluster["other_links"]) == ["2"], "the host with the slow link, and no other"
    assert 12e6 < cluster["other_links"]["2"]["bits_per_second"] < 22e6
    assert 0 < cluster["link"]["latency"] < 1  # 0.1 ms on an idle machine


def test_ranks_that_do_not_fit_together() -> None:
    """On every rank, a sentence that says what is wrong."""
    results = _run_ranks([SIZE, ("--params", "2e6", "--step-ms", "20")], ranks_per_host=1)
    for code, output in results:
        assert code == 2, output
        assert "rank 1 trains 2,000,000 parameters in 128 tensors, rank 0 1,000,000 in 128" in output
    for code, output in _run_ranks([SIZE, SIZE], ranks_per_host=2):
        assert code == 2, output
        assert "2 ranks, 2 per host: expected two hosts or more" in output
