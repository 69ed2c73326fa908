"""Ctrl-C and SIGTERM in the midst of a step: no process is left, no namespace, no file and no shared memory."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.testbeds import eventually, namespaces_of, skip_unless_available

# Whoever runs the tests in the background may have told their processes to ignore Ctrl-C.
MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from thinwire.cli.app import main; main()"
)
SHARED_MEMORY = Path("/dev/shm")
# Torch has a folder for what it compiles; it is made with any optimizer, and is torch's.
OF_TORCH = "torchinductor_*"


class Run:
    """A command, told from all other processes and files on this machine."""

    def __init__(self, arguments: Sequence[str], folder: Path, *, own_group: bool = False) -> None:
        self.mark = f"THINWIRE_TEST_{secrets.token_hex(8)}"
        self.folder = folder
        environment = {
            **os.environ,
            self.mark: "1",
            "TMPDIR": str(folder),
            # Progress is shown as in a terminal.
            "FORCE_COLOR": "1",
            "COLUMNS": "200",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=own_group,
        )
        self.said = b""

    def pids(self) -> set[int]:
        """The processes of the command: all have inherited its environment."""
        found: set[int] = set()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended, or is none of ours
            if self.mark.encode() in environment:
                found.add(int(folder.name))
        return found

    def wait_for_words(self, pattern: bytes) -> None:
        assert self.process.stdout is not None
        while not re.search(pattern, self.said, re.DOTALL):
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, self.said.decode()
            self.said += data

    def wait_for_traffic(self, size: int) -> None:
        """Until a host of its testbed has sent so many bytes."""
        (first,) = (name for name in namespaces_of(self.process.pid) if name.endswith("-h0"))

        def sent() -> int:
            show = ["ip", "-n", first, "-j", "-s", "link", "show", "dev", "eth0"]
            shown = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
            return shown[0]["stats64"]["tx"]["bytes"]

        assert eventually(lambda: sent() > size, seconds=60)


@contextmanager
def running(arguments: Sequence[str], folder: Path, *, own_group: bool = False) -> Iterator[Run]:
    run = Run(arguments, folder, own_group=own_group)
    with run.process:
        try:
            yield run
        finally:
            run.process.kill()


def in_a_step_of_the_demo(run: Run) -> None:
    run.wait_for_words(rb"thinwire \(Birder\)[^\r\n]*, step [\d,]+, loss")


def in_a_step_of_the_benchmark(run: Run) -> None:
    run.wait_for_words(rb"birder")
    run.wait_for_traffic(100_000)


def in_an_interval(run: Run) -> None:
    run.wait_for_words(rb"2 workers have joined")
    time.sleep(1.0)


def in_a_step_after_a_fault(run: Run) -> None:
    run.wait_for_words(rb"1\. birder")
    time.sleep(0.3)


TINY = ("--layers", "1", "--width", "32", "--context", "16", "--batch", "1")
# So many steps that it is not over before this process gets a core again: some seconds, after as many of AdamW.
DEMO_OF_BIRDER = ("demo", "--optimizer", "birder", "--ranks", "2", "--steps", "1000", *TINY)
DEMO = (*DEMO_OF_BIRDER, "--rate", "unlimited")
DEMO_ON_HOSTS = (*DEMO_OF_BIRDER, "--rate", "100mbit")
BENCH = ("bench", "step", "--hosts", "2", "--rates", "10mbit", "--methods", "birder", "--seconds", "60")
CHAOS = ("chaos", "--hosts", "3", "--timeout", "2")
ELASTIC = ("chaos", "--elastic", "--hosts", "2")


def _case(arguments: Sequence[str], in_a_step: Callable[[Run], None], processes: int, number: signal.Signals) -> Any:
    """`make test` ends each command by one of the signals, `make test-all` by the other one too."""
    names = {BENCH: "bench step", DEMO_ON_HOSTS: "demo on hosts", ELASTIC: "chaos --elastic"}
    name = names.get(tuple(arguments), arguments[0])
    marks = [] if (arguments is DEMO) == (number == signal.SIGTERM) else [pytest.mark.long]
    return pytest.param(arguments, in_a_step, processes, number, marks=marks, id=f"{name}-{number.name}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "in_a_step", "processes", "number"),
    [
        _case(*command, number)
        for number in (signal.SIGINT, signal.SIGTERM)
        for command in (
            (DEMO, in_a_step_of_the_demo, 3),
            (DEMO_ON_HOSTS, in_a_step_of_the_demo, 3),
            (BENCH, in_a_step_of_the_benchmark, 3),
            (CHAOS, in_a_step_after_a_fault, 5),
            (ELASTIC, in_an_interval, 4),
        )
    ],
)
def test_nothing_is_left(
    arguments: Sequence[str],
    in_a_step: Callable[[Run], None],
    processes: int,
    number: signal.Signals,
    tmp_path: Path,
) -> None:
    if arguments is not DEMO:
        skip_unless_available()
    if arguments is ELASTIC:
        pytest.importorskip("torchft", reason="torchft has no wheel for this Python and system")
    shared_before = set(SHARED_MEMORY.iterdir())  # whoever left it may have had the same number
    with running(arguments, tmp_path) as run:
        in_a_step(run)
        # Chaos may be about to start its ranks again.
        assert eventually(lambda: len(run.pids()) >= processes, seconds=60)
        pids = run.pids()
        assert (arguments is DEMO) == (namespaces_of(run.process.pid) == [])
        run.process.send_signal(number)
        said, _ = run.process.communicate(timeout=60)
        assert run.process.returncode in {1, 128 + number}, (run.said + said).decode()
    # Python's own helpers end when they notice that the command has.
    assert eventually(lambda: not run.pids()), run.pids()
    assert namespaces_of(run.process.pid) == []
    assert [path for path in tmp_path.iterdir() if not path.match(OF_TORCH)] == []
    of_these = re.compile(rf"(?<!\d)({'|'.join(map(str, pids))})(?!\d)")
    assert [path for path in set(SHARED_MEMORY.iterdir()) - shared_before if of_these.search(path.name)] == []


# It does not come to its end by itself.
EXCHANGE = ("bench", "exchange", "--ranks", "2", "--elements", "65536", "--repeats", "1000000")
STUDY = ("study", "--task", "text", "--method", "adamw", "--method", "lion", "--jobs", "2", "--output", "study")
COMMANDS = {
    "demo": DEMO,
    "demo on hosts": DEMO_ON_HOSTS,
    "bench exchange": EXCHANGE,
    "study": STUDY,
    "study --processes": (*STUDY, "--processes"),
}
SECONDS_AFTER_THE_FIRST_CHILD = (0.0, 0.4, 1.0, 1.6, 2.3, 3.0)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "seconds", "whole_group"),
    [
        ("demo", 1.6, False),
        ("demo on hosts", 0.0, True),
        ("bench exchange", 2.3, False),
        ("study", 1.0, True),
        ("study --processes", 0.4, False),
        ("study --processes", 3.0, True),
    ],
)
def test_ctrl_c_while_processes_start(name: str, seconds: float, whole_group: bool, tmp_path: Path) -> None:
    """Every command, and every moment once; the full grid takes minutes."""
    assert_ctrl_c_ends(COMMANDS[name], seconds, tmp_path, whole_group=whole_group)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole_group", [False, True], ids=["command only", "whole process group"])
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_every_moment_of_a_start(name: str, whole_group: bool, tmp_path: Path) -> None:
    for number, seconds in enumerate(SECONDS_AFTER_THE_FIRST_CHILD):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_ctrl_c_ends(COMMANDS[name], seconds, folder, whole_group=whole_group)


def assert_ctrl_c_ends(arguments: Sequence[str], seconds: float, folder: Path, *, whole_group: bool) -> None:
    """A terminal sends SIGINT to the whole group, so children receive it too, at any moment of their start."""
    if arguments is DEMO_ON_HOSTS:
        skip_unless_available()
    with running(arguments, folder, own_group=True) as run:
        assert eventually(lambda: len(run.pids()) >= 2 or run.process.poll() is not None, seconds=90)
        assert run.process.poll() is None, run.process.communicate()[0].decode()
        time.sleep(seconds)
        if whole_group:
            os.killpg(run.process.pid, signal.SIGINT)
        else:
            run.process.send_signal(signal.SIGINT)
        output, _ = run.process.communicate(timeout=60)
    printed = f"after {seconds} s:\n{output.decode()}"
    assert run.process.returncode in {128 + signal.SIGINT, -signal.SIGINT}, printed
    for trouble in ("terminate called", "Traceback", "KeyboardInterrupt", "Exception ignored"):
        assert trouble not in printed, printed
    assert eventually(lambda: not run.pids()), (printed, run.pids())
    assert namespaces_of(run.process.pid) == []
    left = {path.name for path in folder.iterdir() if not path.match(OF_TORCH)}
    assert left <= {"study"}, printed
