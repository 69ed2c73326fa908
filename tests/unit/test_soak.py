"""`thinwire soak`: what it looks at, and what it complains of."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from thinwire.cli.soak import SAMPLES, Sample, growth_of, look, sample_steps

STEPS = 300


def samples(**slopes: float) -> list[Sample]:
    """Those of a thousand steps, in which something grows by so much a step."""
    start = Sample(step=0, rss_bytes=200_000_000, descriptors=20, threads=9, objects=100_000)
    found = []
    for step in sorted(sample_steps(1000)):
        grown = {name: getattr(start, name) + int(slope * step) for name, slope in slopes.items()}
        found.append(dataclasses.replace(start, step=step, **grown))
    return found


def test_a_run_that_stays_as_it_is_passes() -> None:
    growth = growth_of(0, samples())
    assert growth.complaints() == []
    assert (growth.settled.step, growth.end.step) == (100, 1000)
    assert growth.rss_growth == 0


def test_what_happens_before_it_has_settled_does_not_count() -> None:
    early = samples()
    early[:9] = [dataclasses.replace(sample, rss_bytes=1, descriptors=1, threads=1) for sample in early[:9]]
    assert growth_of(0, early).complaints() == []


def test_memory_that_grows_at_every_step_is_told() -> None:
    assert growth_of(0, samples(rss_bytes=2_000)).complaints() == []  # 0.9 %
    (complaint,) = growth_of(3, samples(rss_bytes=2_400)).complaints()
    assert complaint == "rank 3: memory has grown by 1.08%, the limit is 1%"


@pytest.mark.parametrize("name", ["descriptors", "threads"])
@pytest.mark.parametrize("slope", [0.002, -0.002])
def test_a_single_descriptor_or_thread_more_or_less_is_told(name: str, slope: float) -> None:
    (complaint,) = growth_of(1, samples(**{name: slope})).complaints()
    assert complaint.startswith("rank 1: ")
    assert complaint.endswith(f" at step {100}")
    assert name in complaint


def leak(rank: int, world_size: int) -> tuple[Sample, Sample, int, int]:
    """What a process holds before and after, the bytes that it has written, and the objects that it has made."""
    before = look(1)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    memory = mmap.mmap(-1, 1 << 24)  # not of what the process has freed before
    memory.write(b"x" * len(memory))
    objects = [[] for _ in range(50_000)]
    after = look(2, before)
    release.set()
    thread.join()
    for descriptor in held:
        os.close(descriptor)
    return before, after, len(memory), len(objects)


def test_a_leak_of_a_process_is_seen() -> None:
    """In a process of its own, in which no thread of an earlier test ends."""
    ((before, after, written, made),) = run_ranks(leak, 1)
    assert after.descriptors == before.descriptors + 3
    assert after.threads == before.threads + 1
    assert after.rss_bytes >= before.rss_bytes + written // 2
    assert after.objects >= before.objects + made


def test_the_last_step_is_looked_at_and_no_run_is_too_short() -> None:
    for steps in (10, 99, 100, 101, 12_345):
        due = sample_steps(steps)
        assert max(due) == steps
        assert min(due) >= 1
        assert len(due) == min(steps, SAMPLES)


def run_soak(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = folder / "soak.json"
    command = [sys.executable, "-c", "from thinwire.cli.app import main; main()", "soak", "--json", str(file)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=170, check=False)
    assert file.exists(), done.stderr
    return done, json.loads(file.read_text(encoding="utf-8"))


def test_a_short_soak_opens_nothing_that_it_does_not_close(tmp_path: Path) -> None:
    """Its memory is not judged here: a process this young may still grow."""
    done, results = run_soak(tmp_path, "--steps", str(STEPS), "--ranks", "2")
    assert (results["optimizer"], results["steps"], len(results["ranks"])) == ("birder", STEPS, 2)
    for rank in results["ranks"]:
        assert [sample["step"] for sample in rank["samples"]] == sorted(sample_steps(STEPS))
        settled, end = rank["settled"], rank["samples"][-1]
        assert settled["step"] == STEPS // 10
        assert (end["descriptors"], end["threads"]) == (settled["descriptors"], settled["threads"])
        assert end["threads"] > 1  # gloo's, and the lanes
        assert rank["rss_growth"] == pytest.approx(end["rss_bytes"] / settled["rss_bytes"] - 1)
    assert all("memory has grown" in complaint for complaint in results["complaints"])
    assert done.returncode == (1 if results["complaints"] else 0)
    assert "steps/s" in done.stdout
