"""The testbed: hosts that reach each other, links as thin as asked for, and nothing left of it afterwards."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.harness import forked
from tests.testbeds import NAMESPACES, eventually, is_gone, namespaces_of, read_lines, skip_unless_available
from thinwire.testbed import (
    LinkCounter,
    Testbed,
    TestbedUnavailable,
    enter_namespace,
    parse_delay,
    parse_rate,
    processes,
)

# A pair of ranks: the second sends as many bytes as it is told and says when it began, the first says when all were
# there. Both read the same clock. A receiver that measured alone would begin late on a busy machine, when most has
# arrived.
PAIR = """
import os, socket, sys, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    for line in sys.stdin:
        missing = int(line)
        while missing:
            missing -= len(connection.recv(min(missing, 1 << 20)))
        print(time.monotonic(), flush=True)
else:
    sys.stdin.readline()
    connection = socket.create_connection(address)
    for line in sys.stdin:
        print(time.monotonic(), flush=True)
        connection.sendall(bytes(int(line)))
"""


@pytest.fixture
def available() -> None:
    skip_unless_available()


class Pair:
    """Host 1 sends to host 0."""

    def __init__(self, testbed: Testbed) -> None:
        started = testbed.start([sys.executable, "-c", PAIR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.receiver, self.sender = started
        assert read_lines(self.receiver, 1) == ["listening"]
        self._tell(self.sender, "connect")
        self.transferred = 0

    def begin(self, size: int) -> None:
        self.transferred += size
        for process in (self.receiver, self.sender):
            self._tell(process, size)

    def seconds(self) -> float:
        """From before the first byte was sent until the last one was there."""
        began, ended = (float(read_lines(process, 1)[0]) for process in (self.sender, self.receiver))
        return ended - began

    def megabits(self, size: int) -> float:
        """Ethernet frames and all."""
        self.begin(size)
        return size * 8 / 1e6 * (1514 / 1448) / self.seconds()

    def has_rate(self, size: int, least: float, most: float = math.inf) -> bool:
        """Whether it once has a rate in between: on a busy machine processes come late."""
        return eventually(lambda: least < self.megabits(size) < most, seconds=90)

    def close(self) -> None:
        for process in (self.sender, self.receiver):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
            process.wait()

    def kill(self) -> None:
        """End both in the midst of a transfer."""
        for process in (self.sender, self.receiver):
            process.kill()

    def _tell(self, process: subprocess.Popen[str], what: object) -> None:
        assert process.stdin is not None
        print(what, file=process.stdin, flush=True)


@contextmanager
def paired(testbed: Testbed) -> Iterator[Pair]:
    pair = Pair(testbed)
    try:
        yield pair
    except BaseException:
        pair.kill()  # or it would be waited for until a long transfer ends
        raise
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        ("100mbit", 100e6),
        ("1gbit", 1e9),
        ("2.5gbit", 2.5e9),
        ("64kbit", 64e3),
        ("1500bit", 1500),
        ("unlimited", None),
        (None, None),
    ],
)
def test_rates(rate: str | None, bits: float | None) -> None:
    assert parse_rate(rate) == bits


@pytest.mark.parametrize("rate", ["fast", "0mbit", "-1mbit", "100", "100 mbit", "mbit", "1e3mbit", "1bit", "9tbit", ""])
def test_bad_rates(rate: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"or 'unlimited', got {rate!r}")):
        parse_rate(rate)
    with pytest.raises(ValueError, match="rate must be like '100mbit'"):
        Testbed(2, rate=rate)


def test_delays() -> None:
    assert parse_delay("5ms") == 5e-3
    assert parse_delay("250us") == pytest.approx(250e-6)
    assert parse_delay(None) is None
    for delay in ("soon", "0ms", "11s", "5"):
        with pytest.raises(ValueError, match=f"delay must be like '5ms' .* got '{delay}'"):
            Testbed(2, delay=delay)


@pytest.mark.parametrize("hosts", [-1, 0, 255])
def test_bad_number_of_hosts(hosts: int) -> None:
    with pytest.raises(ValueError, match=f"hosts must be 1 to 254, got {hosts}"):
        Testbed(hosts)


@pytest.mark.usefixtures("available")
def test_hosts_and_environment(tmp_path: Path) -> None:
    program = 'echo "$WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME $MINE $(ip -4 -o address show dev eth0)" > "$RANK"; echo "$MASTER_PORT" > port'  # noqa: E501
    with Testbed(2) as testbed:
        assert [(host.index, host.interface) for host in testbed.hosts] == [(0, "eth0"), (1, "eth0")]
        addresses = [host.address for host in testbed.hosts]
        ports = []
        for _ in range(2):
            # What an outer launcher says about ranks is not what ours are told.
            started = testbed.start(
                ["sh", "-c", program], ranks=2, env={"MINE": "mine", "RANK": "9", "WORLD_SIZE": "9"}, cwd=tmp_path
            )
            assert [process.wait() for process in started] == [0] * 4
            ports.append((tmp_path / "port").read_text())
        assert len(set(ports)) == 2
    for rank in range(4):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith(f"4 {rank % 2} 2 {rank // 2} {addresses[0]} eth0 mine")
        assert f"inet {addresses[rank // 2]}/24" in text
    with pytest.raises(RuntimeError, match="only inside its with block"):
        testbed.bytes_sent()
    with pytest.raises(RuntimeError, match="is used once"):
        testbed.__enter__()


@pytest.mark.usefixtures("available")
def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with Testbed(1) as testbed:
        program = ["sh", "-c", 'test "$OMP_NUM_THREADS" = "$0" && test -z "$TORCHELASTIC_USE_AGENT_STORE"']
        assert testbed.run([*program, "1"]) == 0
        assert testbed.run([*program, "3"], env={"OMP_NUM_THREADS": "3"}) == 0
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert testbed.run([*program, "2"]) == 0


@pytest.mark.usefixtures("available")
def test_rate_and_bytes() -> None:
    size = 2_500_000  # at rates that a busy machine reaches too
    with Testbed(2, rate="20mbit") as testbed, paired(testbed) as pair:
        before = testbed.bytes_sent()
        assert pair.has_rate(size, 8, 30)
        acknowledgements, sent = (after - before for after, before in zip(testbed.bytes_sent(), before, strict=True))
        assert sent > 1.04 * pair.transferred
        assert 0 < acknowledgements < 0.1 * sent
        assert sends_little_more_than(size, testbed, pair)
        testbed.set_rate("80mbit")
        assert pair.has_rate(size, 30, 140)
        testbed.set_rate("unlimited")
        assert pair.has_rate(10 * size, 200)
        assert sends_little_more_than(10 * size, testbed, pair)


def sends_little_more_than(size: int, testbed: Testbed, pair: Pair) -> bool:
    """Whether frame headers are counted one by one, in all packets that TCP sends as one, too.

    Once is enough: a busy machine acknowledges late, and TCP then sends some bytes twice.
    """

    def does() -> bool:
        before = testbed.bytes_sent()[1]
        pair.begin(size)
        pair.seconds()
        sent = (testbed.bytes_sent()[1] - before) / size
        assert sent > 1.04
        return sent < 1.10

    return eventually(does)


@pytest.mark.usefixtures("available")
def test_no_message_is_free() -> None:
    with Testbed(2, rate="50mbit") as testbed, paired(testbed) as pair:
        pair.begin(1)
        pair.seconds()
        time.sleep(0.2)  # long enough to fill any bucket
        pair.begin(300_000)
        assert pair.seconds() > 0.9 * 300_000 * 8 / 50e6


@pytest.mark.usefixtures("available")
def test_slower_in_the_midst_of_a_transfer() -> None:
    size = 2_000_000_000  # 16 s of the wide link: however late this process is, there is more to send
    with Testbed(2, rate="1gbit") as testbed, paired(testbed) as pair:
        pair.begin(size)
        assert eventually(lambda: testbed.bytes_sent()[1] > 1_000_000)
        testbed.set_rate("10mbit")
        sent = testbed.bytes_sent()[1]
        assert sent < size
        # Packets for a wider link that were waiting do not block the narrower one.
        assert eventually(lambda: testbed.bytes_sent()[1] > sent + 100_000)
        testbed.set_rate(None)
        sent = testbed.bytes_sent()[1]
        # The narrow link would take longer than this waits.
        assert eventually(lambda: testbed.bytes_sent()[1] > sent + 50_000_000)
        pair.kill()


@pytest.mark.usefixtures("available")
def test_one_host_slower_than_the_others() -> None:
    size = 500_000
    with Testbed(2, rate="400mbit") as testbed, paired(testbed) as pair:
        testbed.set_rate("20mbit", host=0)
        assert pair.has_rate(size, 40)  # it is host 1 that sends
        testbed.set_rate("20mbit", host=1)
        assert pair.has_rate(size, 5, 40)
        testbed.set_rate("400mbit", host=1)
        assert pair.has_rate(size, 40)


@pytest.mark.usefixtures("available")
def test_a_cable_is_pulled_and_plugged_in_again() -> None:
    size = 20_000_000  # 16 s of this link: a busy machine has time to pull the cable before all is sent
    with Testbed(2, rate="10mbit") as testbed, paired(testbed) as pair:
        pair.begin(size)
        assert eventually(lambda: testbed.bytes_sent()[1] > 500_000)
        testbed.cut(1)
        testbed.cut(1)  # twice is once

        def is_still() -> bool:
            before = testbed.bytes_sent()[1]
            time.sleep(0.5)
            return testbed.bytes_sent()[1] == before

        assert eventually(is_still)
        assert testbed.bytes_sent()[1] < size
        testbed.set_rate("200mbit", host=1)
        testbed.mend(1)
        # The same connection, and nothing is missing.
        assert pair.seconds() > 0.5
        testbed.cut(0)
        testbed.mend(0)
        pair.begin(1000)
        pair.seconds()


@pytest.mark.usefixtures("available")
def test_faults_of_hosts_that_are_not_there() -> None:
    with Testbed(2) as testbed:
        for fault in (testbed.cut, testbed.mend, lambda host: testbed.set_rate("1mbit", host=host)):
            for host in (-1, 2):
                with pytest.raises(ValueError, match=f"host must be 0 to 1, got {host}"):
                    fault(host)
    with pytest.raises(RuntimeError, match="only inside its with block"):
        testbed.cut(0)


@pytest.mark.usefixtures("available")
def test_idle_hosts_are_silent() -> None:
    with Testbed(2) as testbed:
        time.sleep(1.2)
        assert testbed.bytes_sent() == [0, 0]


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(("end", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_one_failure_ends_all(tmp_path: Path, end: str, code: int) -> None:
    # The one that fails waits for the others to say who they are.
    all_are_there = f"until test $(cat {tmp_path}/? | wc -l) = 4; do sleep 0.1; done"
    program = f"echo $$ > {tmp_path}/$RANK; test $RANK = 2 || exec sleep 600; {all_are_there}; {end}"
    with Testbed(2) as testbed:
        assert testbed.run(["sh", "-c", program], ranks=2) == code
        assert all(is_gone(int(path.read_text())) for path in tmp_path.iterdir())
        # The others are still good for another run.
        assert testbed.run(["true"]) == 0


@pytest.mark.usefixtures("available")
def test_who_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    stubborn = "trap '' TERM; setsid sleep 600 & echo $! > daemon; echo $$ > leader; sleep 600"
    with Testbed(1) as testbed:
        testbed.start(["sh", "-c", stubborn], cwd=tmp_path)
        assert eventually(lambda: (tmp_path / "leader").exists() and bool((tmp_path / "leader").read_text()))
    assert is_gone(int((tmp_path / "leader").read_text()))
    # It has left the rank's process group, but not its network namespace.
    assert is_gone(int((tmp_path / "daemon").read_text()))
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("available")
def test_bad_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Testbed(1) as testbed:
        with pytest.raises(ValueError, match="ranks must be at least 1, got -1"):
            testbed.start(["true"], ranks=-1)
        for nothing in ("true", []):
            with pytest.raises(ValueError, match="command must be a sequence"):
                testbed.run(nothing)
        with pytest.raises(TypeError, match="sets shell itself"):
            testbed.start(["true"], shell=True)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            testbed.start(["true"], cwd=tmp_path / "nowhere")
        assert testbed.run(["no-such-program"]) == 127
        assert testbed.run([str(tmp_path)]) == 126
        with pytest.raises(ValueError, match="got 'fast'"):
            testbed.set_rate("fast")
    assert "cannot run 'no-such-program': No such file or directory" in capfd.readouterr().err


@pytest.mark.usefixtures("available")
def test_ranks_outlive_the_thread_that_asked_for_them() -> None:
    with Testbed(1) as testbed:
        started: list[subprocess.Popen[Any]] = []
        thread = threading.Thread(target=lambda: started.extend(testbed.start(["sleep", "600"])))
        thread.start()
        thread.join()
        time.sleep(0.3)
        assert started[0].poll() is None
    assert started[0].returncode == -signal.SIGTERM


@pytest.mark.usefixtures("available")
def test_delay_where_the_kernel_can() -> None:
    refusal = ""
    try:
        with Testbed(2, delay="20ms") as testbed, paired(testbed) as pair:
            start = time.perf_counter()
            pair.begin(1)
            pair.seconds()
            assert time.perf_counter() - start > 0.02
    except TestbedUnavailable as error:
        refusal = str(error)
    assert not refusal or refusal.startswith("a testbed needs netem for delay=, and this kernel refuses: `tc ")
    assert namespaces_of(os.getpid()) == []


def move_and_tell(channel: Connection, namespace: str) -> None:
    enter_namespace(namespace)
    shown = subprocess.run(
        ["ip", "-4", "-o", "address", "show", "dev", "eth0"], capture_output=True, text=True, check=True
    )
    channel.send(shown.stdout)
    channel.recv()


@pytest.mark.usefixtures("available")
def test_a_process_that_moves_to_a_host_by_itself() -> None:
    with Testbed(2) as testbed:
        for host in testbed.hosts:
            with forked(move_and_tell, host.namespace) as moved:
                assert f"inet {host.address}/24" in moved.channel.recv()
        with pytest.raises(FileNotFoundError, match="nowhere"):
            enter_namespace("nowhere")


def count_on_host(channel: Connection, namespace: str, receiver: str) -> None:
    enter_namespace(namespace)
    counter = LinkCounter("eth0")
    before = counter.bytes_sent()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(5):
            sender.sendto(bytes(1000), (receiver, 9))
    channel.recv()
    channel.send((before, counter.bytes_sent()))
    counter.close()
    try:
        LinkCounter("eth7")
    except OSError as error:
        channel.send(str(error))
    channel.recv()


@pytest.mark.usefixtures("available")
def test_a_process_counts_on_its_host_what_the_testbed_counts() -> None:
    with Testbed(2) as testbed:
        sender, receiver = testbed.hosts
        with forked(count_on_host, sender.namespace, receiver.address) as counting:
            # Ethernet, IP and UDP headers, and the question for the receiver's address.
            assert eventually(lambda: testbed.bytes_sent()[0] >= 5 * 1042)
            least = testbed.bytes_sent()[0]
            counting.send("all have arrived")
            first, last = counting.channel.recv()
            assert first == 0
            # Equal, unless the hosts asked for each other's addresses once more meanwhile.
            assert least <= last <= testbed.bytes_sent()[0]
            refusal = counting.channel.recv()
        assert "No such device" in refusal or "no interface" in refusal


@pytest.mark.usefixtures("available")
def test_an_exception_in_the_block() -> None:
    def fail() -> None:
        with Testbed(2) as testbed:
            testbed.start(["sleep", "600"], ranks=2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("available")
def test_links_are_gone_when_the_block_is_left() -> None:
    with Testbed(1) as testbed, open(NAMESPACES / testbed.hosts[0].namespace) as namespace:
        # Held open, the namespace outlives its name, and shows what is left in it.
        show_links = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace.fileno()}", "ip", "-br", "link"]
        assert "eth0" in subprocess.run(show_links, capture_output=True, text=True, check=True).stdout
        testbed.__exit__(None, None, None)
        assert "eth0" not in subprocess.run(show_links, capture_output=True, text=True, check=True).stdout
