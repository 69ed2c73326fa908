"""The tables of optimizers and averagings: one entry is enough for every command."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

import thinwire
from thinwire.cli.averagings import AVERAGINGS, COMMANDS, contenders
from thinwire.cli.local_runs import INTERVALS, LOCAL_RUNS
from thinwire.cli.registry import ALL_COMMANDS, OPTIMIZERS, offered
from thinwire.cli.step.methods import METHODS as STEP_METHODS
from thinwire.cli.study.methods import METHODS as STUDIED

NAMES = {
    "demo": "birder onebit-adam onebit-adam-4bit zero-one-adam onebit-lamb lamb cd-adam cd-adam-momentum cd-adam-topk "
    "sketched-amsgrad distributed-lion",
    "bench exchange": "birder onebit-adam onebit-adam-4bit zero-one-adam onebit-lamb cd-adam cd-adam-topk "
    "sketched-amsgrad distributed-lion",
    "bench step": "birder birder-delay birder-majority birder-votes onebit-adam onebit-adam-4bit zero-one-adam "
    "onebit-lamb cd-adam cd-adam-topk sketched-amsgrad distributed-lion",
    "chaos": "birder onebit-adam zero-one-adam onebit-lamb lamb cd-adam cd-adam-topk sketched-amsgrad distributed-lion",
    "selftest": "birder birder-majority birder-votes onebit-adam zero-one-adam onebit-lamb lamb cd-adam cd-adam-topk "
    "sketched-amsgrad distributed-lion",
}


def test_names_of_every_command() -> None:
    assert set(NAMES) == ALL_COMMANDS
    assert {command: " ".join(offered(command)) for command in sorted(ALL_COMMANDS)} == NAMES


def test_names_of_averagings() -> None:
    names = ("int8", "int4", "int3", "int2", "int1", "topk", "gtopk", "powersgd")
    in_all = [f"compress-{name}" for name in names]
    assert set(AVERAGINGS) == {*in_all, "compress-int4-delay"}
    for command in ALL_COMMANDS:
        added = [name for name in contenders(command) if name not in offered(command)]
        expected = list(AVERAGINGS) if command == "bench step" else in_all
        assert added == (expected if command in COMMANDS else [])
    assert {"demo", "bench exchange", "bench step"} == COMMANDS


def test_names_of_local_steps() -> None:
    profiles = ("diloco", "diloco-int4", "sparse-loco", "sign", "muloco")
    studied = [f"{profile}-h{every}" for profile in profiles for every in INTERVALS]
    assert [*LOCAL_RUNS] == [*studied, "streaming-int4-h30"]
    assert [name for name in STEP_METHODS if name in LOCAL_RUNS] == [
        "diloco-h30",
        "diloco-int4-h30",
        "sparse-loco-h30",
        "streaming-int4-h30",
    ]
    assert [name for name in STUDIED if name in LOCAL_RUNS] == [*LOCAL_RUNS]
    assert not any(STUDIED[name].by_default for name in LOCAL_RUNS)
    for name, bits in {"diloco-h5": 32 / 5, "diloco-int4-h30": 4.25 / 30, "sign-h15": 1 / 15}.items():
        assert LOCAL_RUNS[name].bits(4) == (bits, bits)
    assert LOCAL_RUNS["sparse-loco-h30"].bits(4) == (928 / 4096 / 30, 3616 / 4096 / 30), "answers have all entries"
    rates = {name: STUDIED[name].settings_of for name in LOCAL_RUNS if not STUDIED[name].searches_rate}
    assert rates == {
        "diloco-int4-h5": "diloco-h5",
        "diloco-int4-h15": "diloco-h15",
        "diloco-int4-h30": "diloco-h30",
        "sign-h5": "diloco-h5",
        "sign-h15": "diloco-h15",
        "sign-h30": "diloco-h30",
        "streaming-int4-h30": "diloco-h30",
    }, "the others search a rate, and have AdamW's betas and decay"


def test_every_public_optimizer_is_registered() -> None:
    public = [getattr(thinwire, name) for name in thinwire.__all__]
    classes = {c for c in public if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    # Local steps are of any optimizer, and two know nothing of other ranks.
    assert classes - {thinwire.LocalSteps, thinwire.MuonAdamW, thinwire.SignSGD} == {
        entry.optimizer for entry in OPTIMIZERS.values()
    }


ADD_ONE = """
import json
import thinwire
from thinwire.cli import registry

registry.OPTIMIZERS["another"] = registry.Entry(
    "another", "Another", thinwire.CDAdam, lr=1e-3, search=registry.Search(4e-3, ((0.0, 0.99),) * 3)
)
from thinwire.cli import averagings
averagings.AVERAGINGS["compress-qsgd"] = averagings.Averaging("qsgd")
from itertools import islice
from typer.testing import CliRunner
from thinwire.cli.app import app
from thinwire.cli.chaos.episodes import episodes
from thinwire.cli.selftest.runs import SUBJECTS
from thinwire.cli.step.methods import METHODS
from thinwire.cli.study.methods import METHODS as STUDIED

def help_of(*command):
    return CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "400"}).output

print(json.dumps({
    "demo": "another" in help_of("demo"),
    "soak": "another" in help_of("soak"),
    "bench exchange": "another" in help_of("bench", "exchange"),
    "bench step": "another" in METHODS,
    "chaos": "another" in {episode.subject_name for episode in islice(episodes(0, 2), 40)},
    "selftest": "Another" in {subject.label for subject in SUBJECTS},
    "study": "another" in STUDIED,
    "averaging in demo": "compress-qsgd" in help_of("demo"),
    "averaging in soak": "compress-qsgd" in help_of("soak"),
    "averaging in bench exchange": "compress-qsgd" in help_of("bench", "exchange"),
    "averaging in bench step": "compress-qsgd" in METHODS,
    "averaging in study": "compress-qsgd" in STUDIED,
}))
"""


def test_one_entry_adds_an_optimizer_or_an_averaging_to_all_commands() -> None:
    done = subprocess.run([sys.executable, "-c", ADD_ONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found.values()), found
