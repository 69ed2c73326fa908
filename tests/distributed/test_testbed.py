"""The testbed as whole processes use it: torch across its hosts, the command, signals, and what a killed run leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.harness import forked, wait_for_end
from tests.testbeds import NAMESPACES, eventually, is_gone, namespaces_of, read_lines, skip_unless_available
from thinwire.cli.app import app
from thinwire.testbed import Testbed, remove_leftovers

SCRIPT = Path(sysconfig.get_path("scripts"), "thinwire")

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(value)
assert value.eq(3).all(), value
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def available() -> None:
    skip_unless_available()


@pytest.mark.usefixtures("available")
def test_gloo_across_hosts() -> None:
    with Testbed(2, rate="1gbit") as testbed:
        assert testbed.run([sys.executable, "-W", "error", "-c", ALL_REDUCE]) == 0
        assert min(testbed.bytes_sent()) > 4000


def leave_behind() -> tuple[list[str], subprocess.Popen[str]]:
    """What a killed process leaves: a host on a switch, and a process in it."""
    owner = subprocess.Popen(["true"])
    owner.wait()
    host, switch = names = [f"thinwire-{owner.pid}-1-0-{role}" for role in ("h0", "switch")]
    for command in (
        f"ip netns add {switch}",
        f"ip netns add {host}",
        f"ip -n {switch} link add br0 type bridge",
        f"ip -n {switch} link add port0 type veth peer name eth0 netns {host}",
    ):
        # A colleague's testbed that starts right now may remove it while it is made.
        subprocess.run(command.split(), check=False, capture_output=True)
    inside = subprocess.Popen(
        ["ip", "netns", "exec", host, "sh", "-c", "echo inside; exec sleep 600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    read_lines(inside, 1)
    return names, inside


@pytest.mark.usefixtures("available")
def test_leftovers_go_and_cleaners_do_not_mind_each_other() -> None:
    for _ in range(3):
        names, inside = leave_behind()
        with inside, ThreadPoolExecutor(4) as cleaners:
            for cleaner in [cleaners.submit(remove_leftovers) for _ in range(4)]:
                cleaner.result()
        assert not any((NAMESPACES / name).exists() for name in names)
        assert inside.returncode != 0


@pytest.mark.usefixtures("available")
def test_clean_says_what_it_removed() -> None:
    def said() -> bool:
        names, inside = leave_behind()
        with inside:
            result = CliRunner().invoke(app, ["testbed", "clean"])
        assert result.exit_code == 0, result.output
        assert not any((NAMESPACES / name).exists() for name in names)
        return all(f"removed {name}\n" in result.output for name in names)

    # Another testbed that starts on this machine may be faster.
    assert eventually(said)


@contextmanager
def sleeping_run(*command: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`thinwire testbed run` with two ranks that sleep; gives it and the ranks' process ids."""
    # Whoever runs the tests in the background may have told their processes to ignore Ctrl-C.
    main = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from thinwire.cli.app import main; main()"  # noqa: E501
    arguments = ("testbed", "run", "--hosts", "2", "--rate", "100mbit", "--", *command)
    with subprocess.Popen([sys.executable, "-c", main, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, [int(line) for line in read_lines(process, 2)]
        finally:
            process.kill()


@pytest.mark.usefixtures("available")
def test_signals_in_a_program_that_does_not_handle_them() -> None:
    def hang_up() -> None:
        with Testbed(1) as testbed:
            testbed.start(["sleep", "600"])
            signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match="129"):
            hang_up()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert namespaces_of(os.getpid()) == []


STUBBORN = ("sh", "-c", "trap '' TERM; echo $$; sleep 600; sleep 600")


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("command", "signals", "codes"),
    [
        pytest.param(("sh", "-c", "echo $$; exec sleep 600"), [signal.SIGINT], {1, 130}, id="interrupt"),
        # While the first one's work is being done, the second has to wait.
        # If this process is late, they come when Python exits and has no handlers any more: all is done then.
        pytest.param(
            STUBBORN,
            [signal.SIGTERM, signal.SIGTERM, signal.SIGINT],
            {1, 130, 143, -signal.SIGTERM, -signal.SIGINT},
            id="terminate",
        ),
    ],
)
def test_nothing_is_left_after_a_signal(command: Sequence[str], signals: list[int], codes: set[int]) -> None:
    with sleeping_run(*command) as (process, pids):
        assert len(namespaces_of(process.pid)) == 3
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        assert process.wait(60) in codes
        assert namespaces_of(process.pid) == []
        assert all(is_gone(pid) for pid in pids)


@pytest.mark.usefixtures("available")
def test_a_killed_run_is_cleaned_up_by_the_next_a_living_one_is_not() -> None:
    with sleeping_run("sh", "-c", "echo $$; exec sleep 600") as (process, pids):
        with Testbed(2) as testbed:
            assert testbed.run(["true"]) == 0
            assert len(namespaces_of(process.pid)) == len(namespaces_of(os.getpid())) == 3
        assert len(namespaces_of(process.pid)) == 3
        assert not any(is_gone(pid) for pid in pids)
        process.kill()  # and not waited for: a zombie owns nothing
        # The ranks do not wait for the next testbed.
        assert eventually(lambda: all(is_gone(pid) for pid in [process.pid, *pids]))
        with Testbed(1):
            assert namespaces_of(process.pid) == []


def three_after_another(channel: Connection) -> None:
    for _ in range(3):
        with Testbed(3, rate="1gbit") as testbed:
            assert testbed.run(["sh", "-c", "ip -4 address show dev eth0 | grep -q inet"]) == 0
            assert len(testbed.bytes_sent()) == 3


@pytest.mark.usefixtures("available")
def test_many_at_the_same_time() -> None:
    with forked(three_after_another) as first, forked(three_after_another) as second:
        assert wait_for_end(first)
        assert wait_for_end(second)
    assert [first.exit_code, second.exit_code] == [0, 0]
    assert not any(namespaces_of(process.pid) for process in (first, second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0", "true"], "'--hosts': hosts must be 1 to 254, got 0"),
        (["--ranks", "-1", "true"], "'--ranks': ranks must be at least 1, got -1"),
        (["--rate", "fast", "true"], "'--rate': rate must be like '100mbit' or '1gbit'"),
        (["--rate", "0mbit", "true"], "got '0mbit'"),
        (["--delay", "soon", "true"], "'--delay': delay must be like '5ms'"),
        (["--hosts", "2"], "Missing argument 'COMMAND"),
        (["--hosts", "2", "--"], "Missing argument 'COMMAND"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["testbed", "run", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message.lower() in re.sub(r"\s+", " ", result.output).lower()


@pytest.mark.usefixtures("available")
def test_the_command_keeps_its_options_output_and_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["sh", "-c", 'echo "$@"; exit 5', "sh", "--hosts"]
    result = CliRunner().invoke(app, ["testbed", "run", "--hosts", "2", "--rate", "1gbit", *command])
    assert result.exit_code == 5
    assert set(capfd.readouterr().out.splitlines()) == {"--hosts"}
    assert re.fullmatch(r"(host [01] \(10\.77\.0\.[12]\): [\d,]+ bytes sent\n){2}", result.stderr)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to give it up")
def test_without_root() -> None:
    # Not root, but allowed to read all files: the interpreter may be in root's home.
    rights = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *rights]
    finished = subprocess.run(
        [*nobody, sys.executable, SCRIPT, "testbed", "run", "true"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    # Libraries may have something to say about a home that is not theirs before.
    assert finished.stderr.endswith(
        "thinwire testbed: a testbed needs root to make network namespaces; this process runs as user 65534\n"
    )


@pytest.mark.usefixtures("available")
def test_without_tc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ip").symlink_to(shutil.which("ip") or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments in (["run", "true"], ["clean"]):
        result = CliRunner().invoke(app, ["testbed", *arguments])
        assert result.exit_code == 2
        assert result.stderr == (
            "thinwire testbed: a testbed needs the commands 'ip' and 'tc' (package iproute2); not on PATH: tc\n"
        )
