"""`thinwire chaos --elastic` on real workers: a short run, one in which a worker dies unasked, and what it compares."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft has no wheel for this Python and system", allow_module_level=True)

from tests.distributed.elastic_workers import Given, lighthouse, new_params
from tests.testbeds import eventually, is_gone, namespaces_of, skip_unless_available
from thinwire.cli.chaos.elastic_worker import outer_step_of
from thinwire.elastic import ElasticLocalSteps

# torchft calls Logger.warn.
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")
SCRIPT = Path(sysconfig.get_path("scripts"), "thinwire")


@contextmanager
def running(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    skip_unless_available()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "chaos", "--elastic", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
    assert namespaces_of(process.pid) == []
    assert list(folder.glob("thinwire*")) == []


@pytest.mark.timeout(600)
def test_a_kill_and_a_rejoin(tmp_path: Path) -> None:
    written = tmp_path / "elastic.json"
    # Nobody rejoins before the others have noticed the death: they do at the end of an interval of 3 s.
    limits = ("--hosts", 3, "--minutes", 0.2, "--every", 12, "--rejoin", 5, "--json", written)
    with running(tmp_path, *limits) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said
    told = json.loads(written.read_text())
    assert (told["kills"], told["misses"], told["divergences"]) == (1, [], [])
    # In a short time hardly anything can be said of throughput, but that no step is faster than its pace.
    for when in ("without", "with"):
        assert 0 < told[f"steps_per_second_{when}_kills"] <= 1 / told["step_seconds"], said
    ratio = told["steps_per_second_with_kills"] / told["steps_per_second_without_kills"]
    assert told["relative_throughput"] == pytest.approx(ratio)
    assert told["share_of_full_strength"] > 0, said
    (rejoin,) = told["rejoins"]
    assert 0 < rejoin["seconds_to_import"] < rejoin["seconds"]
    assert told["longer_than_without_kills"]["a death"]["intervals"] >= 2  # one for each of the others, at least
    lives = told["lives"]
    assert [life["number"] for life in lives] == [0, 0, 0, 1]
    assert [life["killed"] is None for life in lives].count(False) == 1
    digests: dict[int, set[str]] = {}
    for life in lives:
        # Whoever is killed at once may have completed an exchange that the others then repeat.
        for step in life["outer_steps"][: None if life["killed"] is None else -1]:
            row = dict(zip(life["columns"], step, strict=True))
            digests.setdefault(row["number"], set()).add(row["digest"])
    assert len(digests) >= 4  # of more than 24 s, in which a step takes 3 s or more
    assert all(len(found) == 1 for found in digests.values()), digests
    assert len(set.union(*digests.values())) == len(digests)


@pytest.mark.timeout(600)
def test_a_worker_that_dies_unasked_ends_the_run(tmp_path: Path) -> None:
    with running(tmp_path, "--hosts", "2", "--minutes", "1") as process:
        assert process.stdout is not None
        while "2 workers have joined" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        children = _children(process.pid)
        assert len(children) >= 3
        victim = children[-1]  # the last that was started, which is a worker; its number need not be the largest
        os.kill(victim, signal.SIGKILL)
        said = process.stdout.read()
        assert process.wait() == 1
    assert re.search(r"thinwire chaos: the worker of host 1 has ended with code -9", said), said
    assert eventually(lambda: all(is_gone(child) for child in children))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_every_part_of_a_state_counts() -> None:
    """The digest that is compared changes with any bit of the parameters, θ_ref and the outer momentum."""
    with lighthouse(least=1) as address:
        params = new_params(0)
        model = torch.nn.ParameterList(params)
        opt = ElasticLocalSteps(Given(params), lighthouse=address, every=1, hostname="127.0.0.1")
        try:
            opt.join()
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
            (fragment,) = opt.state_dict()["thinwire"]["elastic"]["fragments"]
            reference, momentum = fragment
            whole = outer_step_of(opt, model, steps=1, began=0.0, loss=None).digest
            found = {whole}
            for tensor in (*params, reference, momentum):
                flat = tensor.detach().view(-1)
                for position in (0, -1):
                    value = flat[position].clone()
                    flat[position] = value.nextafter(value + 1)
                    found.add(outer_step_of(opt, model, steps=1, began=0.0, loss=None).digest)
                    flat[position] = value
            assert outer_step_of(opt, model, steps=1, began=0.0, loss=None).digest == whole
            assert len(found) == 1 + 2 * (len(params) + 2)
        finally:
            opt.close()
